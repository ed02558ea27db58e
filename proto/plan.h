/* proto/plan.h - what the oracle tells one trainer to do in one step. The planner makes it, the
 * codec carries it, the trainer follows it; neither side decides anything about data movement
 * outside of it.
 *
 * Steps are numbered 0, 1, 2, ... (seq) over three kinds: a training iteration, an evaluation batch
 * (reads only, I7), and the final flush. An iteration t runs so on a trainer:
 *
 *   1. boundary: finish the deferred exchange started at t-1 (deferred gradients of t-2 are
 *      applied now; deferred values for t are staged)
 *   2. write back `evict` (rows as they are now; the slots are free from here on)
 *   3. wait for the rows of `fetch`; put fetched rows and the staged values that step t-1 named in
 *      value_recv into their slots
 *   4. start the deferred exchange: deferred gradients of t-1, deferred values for t+1
 *   5. forward, backward; sum gradients per row
 *   6. urgent exchange: dense gradients, urgent row gradients; owners apply; urgent values for t+1
 *
 * An evaluation step reads the rows as iteration t-1 left them, before boundary t: what plan t
 * evicts is still in its slot. A trainer first finishes all deferred work: the exchange under way,
 * and the deferred gradients of t-1, which it exchanges now and not at boundary t; all are applied.
 * (None of their rows is used at t or evicted there: boundary t only finds less to do.)
 *
 * Row copies: the owner's slot holds value and optimizer state from fetch to write-back. Other
 * users of the row get a value into a slot for the one iteration that uses it. */
#ifndef CHANTER_PROTO_PLAN_H
#define CHANTER_PROTO_PLAN_H

#include <stdint.h>

#include "base/status.h"

enum { PLAN_NEED_SETTLED = -1 }; /* see plan_fetch.need */
enum plan_kind { PLAN_TRAIN = 1, PLAN_EVAL = 2, PLAN_FLUSH = 3 };

/* Slots and nodes of one direction to or from one peer, urgent ones first. */
struct plan_grads {         /* one entry per vector: D floats                                  */
    uint32_t n, n_urgent;   /* [0, n_urgent) urgent, [n_urgent, n) deferred                    */
    uint32_t *slot;         /* [n] this trainer's slot of the row                              */
    uint8_t *node;          /* [n] pos of the sum's tree node (base/tree.h)                    */
};
struct plan_values {        /* one entry per row: D floats                                     */
    uint32_t n, n_urgent;
    uint32_t *slot;         /* [n] sender: where it is; receiver: where it goes at t+1         */
};
struct plan_peer {          /* this trainer's exchange with one other; empty for itself        */
    struct plan_grads grad_send, grad_recv;    /* grad_send: rows the peer owns                */
    struct plan_values value_send, value_recv; /* for iteration t+1                            */
};

/* Grouped by shard (row_shard), ascending; within a shard in plan order. */
struct plan_fetch {
    uint32_t n;
    uint64_t *row_id;       /* [n]                                                             */
    uint32_t *slot;         /* [n]                                                             */
    int64_t *need;          /* [n] version that the reply must have; PLAN_NEED_SETTLED: the row
                               was last written so long ago, or never, that no write-back can be
                               under way: any version < settled is right                       */
    uint8_t *owned;         /* [n] 1: whole record (value, state); 0: value only               */
};
struct plan_evict {
    uint32_t n;
    uint64_t *row_id;       /* [n]                                                             */
    uint32_t *slot;         /* [n]                                                             */
    int64_t *version;       /* [n] iteration of the row's last use: what it is stamped with    */
};

struct plan {
    uint64_t seq;
    enum plan_kind kind;
    int64_t iteration;      /* eval: the iteration before which it reads; flush: the last + 1  */
    int64_t settled;        /* see plan_fetch.need                                             */
    uint32_t batch_total;   /* samples of the global batch, all trainers                       */
    uint32_t eval_last;     /* eval: 1 on the last batch of this evaluation                    */

    uint32_t n_samples;     /* this trainer's, in order; slice k holds samples [k*q, (k+1)*q) of
                               the global batch, q = B / S, cut off at batch_total             */
    float *dense;           /* [n_samples][dense_features]                                     */
    float *label;           /* [n_samples]                                                     */
    uint32_t *slot;         /* [n_samples][F]                                                  */

    struct plan_fetch fetch;
    struct plan_evict evict;
    struct plan_peer *peer; /* [n_trainers], rank order                                        */
    uint32_t n_peers;

    /* Evaluation only: "slots" above count rows of a scratch area [0, eval_rows) instead of the
     * cache. It is filled from the servers (fetch, all value only), from peers (value_recv, all
     * urgent) and from this trainer's own cache: */
    uint32_t eval_rows;
    uint32_t n_eval_copy;
    uint32_t *eval_from;    /* [n_eval_copy] cache slot                                        */
    uint32_t *eval_to;      /* [n_eval_copy] scratch row                                       */

    void *arena;            /* all arrays above; freed by plan_close                           */
};

void plan_close(struct plan *p); /* NULL ok; frees p and its arrays */

#endif
