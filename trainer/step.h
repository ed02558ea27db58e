/* trainer/step.h - the arithmetic of one iteration on this trainer's slices: forward, backward, and
 * the partial sums that leave it: dense gradients per slice, row gradients per (row, tree node).
 * Knows nothing of peers or owners. COMPUTE thread only. */
#ifndef CHANTER_TRAINER_STEP_H
#define CHANTER_TRAINER_STEP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/grow.h"
#include "base/tree.h"
#include "compute/device.h"
#include "proto/plan.h"
#include "trainer/group.h"
#include "trainer/model.h"

struct step_cfg {
    const struct config *config;
    const struct model *model;
    struct device *device;
    uint32_t rank, size;
    uint64_t cap_rows;        /* slots that plans may name */
    bool peers_reach_device;  /* the exchange takes device memory */
};

struct step {
    struct step_cfg cfg;
    uint32_t slice_lo, slice_hi;   /* this trainer's run                                       */
    uint32_t slice_samples;        /* q = B / S                                                */
    uint32_t n_nodes;
    struct tree_node node[TREE_MAX_NODES];
    size_t grad_floats;            /* n_floats + 1 (loss), rounded up to 16                    */
    struct model_work **work;      /* [lanes]                                                  */
    float *slice_grad;             /* [slices of the run][grad_floats] device                  */
    size_t dt_bytes;
    float *dt;                     /* [q * slices of the run][F + 1][D] device                 */
    float *in_dense, *in_label;    /* this batch's inputs on the device                        */
    uint32_t *in_slot;
    float *out_prob, *out_loss;    /* evaluation: [q * slices], [slices] on the device         */
    void *graph;                   /* forward and backward of a full batch; device->repeat     */

    struct group use;              /* look-ups by slot                                         */
    struct grow seg_begin;         /* u32 [n_vecs + 1]                                         */
    struct grow first_vec;         /* u32 [use.n_rows + 1]: vectors of a row                   */
    uint32_t n_vecs;
    struct grow vec_node;          /* u8  [n_vecs] pos of the node                             */
    float *vec;                    /* [vec_cap][D] device: sum over the node's slices          */
    size_t vec_cap;
};

MUST_USE enum st step_open(const struct step_cfg *cfg, struct step **out);
void step_close(struct step *s); /* NULL ok */

/* Slices of the run that have samples in a batch of `total`: [slice_lo, *hi). */
uint32_t step_slices(const struct step *s, uint32_t total);

/* Forward and backward over the plan's samples. Rows are read from `table` (device, `stride`
 * floats apart), the same at every call, as are `params`. Then slice_grad and the vectors are
 * set. */
MUST_USE enum st step_train(struct step *s, const struct plan *plan,
                            const struct model_params *params, const float *table,
                            uint32_t stride);
/* Forward only: prob [n_samples] and slice_loss [slices with samples], host memory. */
MUST_USE enum st step_eval(struct step *s, const struct plan *plan,
                           const struct model_params *params, const float *table,
                           uint32_t stride, float *prob, float *slice_loss);
/* Number of the vector of (slot, node pos); CHECKs that there is one: plans name no other. */
uint32_t step_vec(const struct step *s, uint32_t slot, uint8_t node);

#endif
