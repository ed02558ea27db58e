/* trainer/grads.h - row gradients on their way from partial sums to the owner's optimizer step. One
 * set is one iteration's urgent or deferred part: what this trainer sends for rows that others own,
 * and all contributions to rows that it owns, its own and others', in tree order. COMPUTE thread. */
#ifndef CHANTER_TRAINER_GRADS_H
#define CHANTER_TRAINER_GRADS_H

#include <stdint.h>

#include "base/grow.h"
#include "compute/device.h"
#include "proto/plan.h"
#include "trainer/exchange.h"
#include "trainer/group.h"
#include "trainer/step.h"

struct grads {
    struct device *device;
    uint32_t dim;
    uint32_t n;                /* contributions to rows owned here                          */
    struct grow slot, pos;     /* u32, u8 [n]: grouped by rank, ranks ascending             */
    uint32_t own_at, own_n;    /* this trainer's own among them                             */
    struct grow recv;          /* f32 [n - own_n][D] host: the others', in the same order   */
    struct grow send;          /* f32 [..][D]: for all peers, rank order                    */
    struct grow pick;          /* u32: vectors to copy                                      */
    struct grow wanted;        /* u8: rows of the step to take                              */
    struct group by_row;
    struct grow row_pos;       /* u8 [n]: pos in the order of by_row's items                */
    float *vec, *sum;          /* device [vec_cap][D]; vec: [n]                             */
    size_t vec_cap;
    struct grow count_up;      /* u32 0, 1, 2, ...                                          */
    size_t counted;
};

MUST_USE enum st grads_init(struct grads *g, struct device *device, uint32_t dim,
                            uint64_t cap_rows);
void grads_fini(struct grads *g); /* {0} ok */

enum grads_class { GRADS_URGENT, GRADS_DEFERRED };
/* Collect this iteration's contributions of one class from the step's vectors and add the messages
 * to `job`; buffers are lent until the job has been waited for. */
MUST_USE enum st grads_collect(struct grads *g, const struct plan *plan, uint32_t rank,
                               const struct step *s, enum grads_class class,
                               struct exchange_job *job);
/* After the exchange: sum each row's contributions in tree order and step the optimizer. */
MUST_USE enum st grads_apply(struct grads *g, const struct opt_step *opt, float *table,
                             uint32_t stride);
/* Both for a trainer alone: every row of the step is its own, and its vectors are where they are. */
MUST_USE enum st grads_apply_alone(struct grads *g, const struct step *s,
                                   const struct opt_step *opt, float *table, uint32_t stride);

#endif
