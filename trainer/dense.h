/* trainer/dense.h - the dense weights: replicated on every trainer, summed in tree order. The sum
 * is made in two exchanges: each rank gets one chunk of every rank's node sums, adds them up in
 * tree order, and gives the result to all. COMPUTE thread. */
#ifndef CHANTER_TRAINER_DENSE_H
#define CHANTER_TRAINER_DENSE_H

#include "trainer/exchange.h"
#include "trainer/model.h"
#include "trainer/step.h"

struct dense {
    const struct model *model;
    struct device *device;
    uint32_t rank, size, slices, slice_samples;
    size_t floats;             /* n_params + 1 (the loss), rounded up to 16                  */
    float *params, *state;     /* device [floats]; state is unused by sgd                    */
    float *sum;                /* device [floats]                                            */
    float *part;               /* device [TREE_MAX_NODES][floats]: sums of this rank's nodes */
    float *recv;               /* [nodes of all ranks][chunk]                                */
    size_t chunk;              /* floats of one rank's chunk, but for the last               */
    uint32_t n_all;            /* nodes of all ranks when every slice has samples            */
};

MUST_USE enum st dense_init(struct dense *d, const struct step_cfg *cfg);
void dense_fini(struct dense *d); /* {0} ok */

/* First exchange: node sums of the step's slice gradients, chunk by chunk to its rank. */
MUST_USE enum st dense_scatter(struct dense *d, const struct step *s, uint32_t total,
                               struct exchange_job *job);
/* After it: sum up this rank's chunk; second exchange: give it to all. */
MUST_USE enum st dense_gather(struct dense *d, uint32_t total, struct exchange_job *job);
/* After that: one optimizer step. *loss: mean over the batch's `total` samples. Not finite:
 * ST_DATA, logged. */
MUST_USE enum st dense_apply(struct dense *d, const struct opt_step *opt, uint32_t total,
                             int64_t iteration, double *loss);

#endif
