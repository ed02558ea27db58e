/* trainer/evaluate.h - held-out rows scored with the weights as they stand between two iterations.
 * Reads rows from servers, from peers' caches and from this trainer's own into a scratch table;
 * writes no row, no state and no slot (I7). COMPUTE thread. */
#ifndef CHANTER_TRAINER_EVALUATE_H
#define CHANTER_TRAINER_EVALUATE_H

#include <stdint.h>

#include "base/grow.h"
#include "compute/device.h"
#include "proto/plan.h"
#include "trainer/exchange.h"
#include "trainer/step.h"
#include "trainer/values.h"

struct evaluate {
    struct device *device;
    const struct step *step;
    uint32_t dim, rank, size;
    float *scratch;            /* device [scratch_cap][D]                            */
    size_t scratch_cap;
    struct values values;
    struct exchange_job job;
    struct grow mine;          /* f32: prob [n], label [n], loss [slices]            */
    struct grow all;           /* rank 0: the same of the other ranks                */
    struct grow prob, label;   /* rank 0: f32, the whole held-out set so far         */
    uint64_t n;
    double loss_sum;
};

struct evaluation { uint64_t rows; double loss, auc; };

void evaluate_init(struct evaluate *e, struct step *step);
void evaluate_fini(struct evaluate *e); /* {0} ok */

/* Room for the plan's rows: where fetched rows are to be put (stride: D). */
MUST_USE enum st evaluate_scratch(struct evaluate *e, const struct plan *plan, float **scratch);
/* After fetched rows are there: one batch. On the last one of an evaluation rank 0 gets *done = 1
 * and the result. */
MUST_USE enum st evaluate_batch(struct evaluate *e, const struct plan *plan, struct exchange *x,
                                struct step *step, const struct model_params *params,
                                const float *table, uint32_t stride, int *done, struct evaluation *out);

#endif
