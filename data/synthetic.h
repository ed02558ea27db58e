/* data/synthetic.h - a click log with a known answer: ids as skewed as a real one's, and clicks
 * drawn from a planted model, so that the best loss and AUC that anything can reach are known.
 *
 * Planted: logit = bias + sum_i weight[i] * dense_i + sum_t effect[t][id_t] with the dense values
 * as the model sees them; only the empty field and ids of the 256 lowest ranks have an effect, the
 * smaller the rarer. Click with probability sigmoid(logit). Everything is a function of (data.seed,
 * model.tables, model.dense_features, sample index): any sample can be made at any time. */
#ifndef CHANTER_DATA_SYNTHETIC_H
#define CHANTER_DATA_SYNTHETIC_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

struct synthetic; /* opaque; immutable after open, but its scratch: one thread at a time */

MUST_USE enum st synthetic_open(const struct config *cfg, struct synthetic **out);
void synthetic_close(struct synthetic *s); /* NULL ok */

struct synthetic_sample {
    const int64_t *dense;  /* [dense_features], LAW_EMPTY where empty; lent until the next call  */
    const uint32_t *id;    /* [n_tables] rows of the tables; lent likewise                       */
    double logit;          /* planted                                                            */
    uint8_t label;         /* drawn                                                              */
};
void synthetic_sample(struct synthetic *s, uint64_t index, struct synthetic_sample *out);
double synthetic_logit(struct synthetic *s, uint64_t index);

/* Logloss and AUC of the planted logits on the training rows (eval 0) or the held-out rows (eval 1)
 * that source_open would give. AUC is NaN when one class is missing. */
MUST_USE enum st synthetic_best(const struct config *cfg, int eval, double *logloss, double *auc);
/* Rows [*first, *end) of the stream that are trained on or held out. Logs what contradicts. */
MUST_USE enum st synthetic_rows(const struct config *cfg, int eval, uint64_t *first, uint64_t *end);

/* Write samples [0, rows) as a Criteo TSV file. Reading it gives the same bits as the stream. */
MUST_USE enum st synth_write_tsv(const struct config *cfg, const char *path, uint64_t rows);

#endif
