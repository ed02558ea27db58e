/* trainer/dense.h - the dense weights: replicated on every trainer, summed in tree order. The sum
 * is made in two exchanges: each rank gets one chunk of every rank's node sums, adds them up in
 * tree order, and gives the result to all. Where trainers cannot exchange device memory, what is
 * exchanged passes through host memory. COMPUTE thread. */
#ifndef CHANTER_TRAINER_DENSE_H
#define CHANTER_TRAINER_DENSE_H

#include <stdbool.h>

#include "trainer/exchange.h"
#include "trainer/model.h"
#include "trainer/step.h"

struct dense {
    const struct model *model;
    struct device *device;
    uint32_t rank, size, slices, slice_samples;
    size_t floats;             /* n_floats + 1 (the loss), rounded up to 16                  */
    struct model_params params;
    float *state;              /* device [floats]; unused by sgd                             */
    float *part;               /* device [TREE_MAX_NODES][floats]: sums of this rank's nodes */
    const float *node[TREE_MAX_NODES]; /* where they are: `part`, or a lone slice's gradient  */
    float *recv;               /* device [nodes of all ranks][chunk]                         */
    float *sum;                /* device [floats]                                            */
    const float *total;        /* `sum`, or node[0] when that is all there is                */
    size_t chunk;              /* floats of one rank's chunk, but for the last               */
    uint32_t n_all;            /* nodes of all ranks when every slice has samples            */
    bool mirrored;             /* the three below are in use                                 */
    float *host_part, *host_recv, *host_sum;   /* as their likes on the device               */
    float *loss;               /* host, from host_alloc: sum over the batch, once marked     */
};

MUST_USE enum st dense_init(struct dense *d, const struct step_cfg *cfg);
void dense_fini(struct dense *d); /* {0} ok */

/* First exchange: node sums of the step's slice gradients, chunk by chunk to its rank. */
MUST_USE enum st dense_scatter(struct dense *d, const struct step *s, uint32_t total,
                               struct exchange_job *job);
/* After it: sum up this rank's chunk; second exchange: give it to all. */
MUST_USE enum st dense_gather(struct dense *d, uint32_t total, struct exchange_job *job);
/* After that: one optimizer step, and d->loss on its way: there after device->wait(*mark). */
MUST_USE enum st dense_apply(struct dense *d, const struct opt_step *opt, uint64_t *mark);
/* Weights and, unless NULL, optimizer state in host memory, [n_params] each (model.h). */
MUST_USE enum st dense_get(struct dense *d, float *params, float *state);

#endif
