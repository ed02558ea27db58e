/* data/auc.h - the two numbers that say how good predictions are. Both are exact functions of
 * their input: the AUC does not even depend on the order of the samples. */
#ifndef CHANTER_DATA_AUC_H
#define CHANTER_DATA_AUC_H

#include <stddef.h>

#include "base/status.h"

/* Area under the ROC curve: the share of (clicked, not clicked) pairs in which the clicked sample
 * scores higher, ties counted half. score [n] in any monotone scale (logits are fine), label [n]
 * 0 or 1. NaN when one class is missing. ST_DATA, logged, for a score that is NaN or a label that
 * is neither 0 nor 1; ST_NOMEM (16 bytes a sample are borrowed). Any thread. */
MUST_USE enum st auc_exact(const float *score, const float *label, size_t n, double *out);
/* Mean binary cross-entropy of logits, summed in sample order in float64; NaN for n == 0. */
double auc_logloss(const float *logit, const float *label, size_t n);

#endif
