/* oracle/planner_internal.h - the planner's state, shared by the planner*.c files and nobody else.
 *
 *   planner.c           open, close, the calls of planner.h
 *   planner_rows.c      which rows are known: hash map, records, the evictions remembered
 *   planner_window.c    batches in: distinct rows, who uses them, when they are used next
 *   planner_boundary.c  decisions at boundary i: what leaves, what comes, who owns it, which slot
 *   planner_build.c     plan i and evaluation plans written out
 *   planner_validate.c  recounts everything that is kept as a running number
 *
 * Two steps make plan i. boundary_run(i) decides which rows leave and enter the caches between
 * iterations i-1 and i. Plan i is written only after boundary_run(i+1): whether a gradient of
 * iteration i is urgent depends on whether its row is evicted at boundary i+1, and the values sent
 * in plan i go to the slots of iteration i+1. Nothing looks farther than batch i + max(L, 1), even
 * if more was pushed: so the plans do not depend on how far the caller runs ahead. */
#ifndef CHANTER_ORACLE_PLANNER_INTERNAL_H
#define CHANTER_ORACLE_PLANNER_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/tree.h"
#include "oracle/planner.h"

enum {
    MAX_TRAINERS = TREE_MAX_SLICES, /* a set of trainers is the bits of a u64                  */
    NO_OWNER = UINT8_MAX,
};
#define NONE UINT32_MAX        /* no row, no slot, no value                                    */
#define NO_USE INT64_MAX       /* next use of a row that the window does not use again         */

/* --- rows (planner_rows.c) ------------------------------------------------------------------ */

/* u64 -> u32: open addressing, linear probes, no tombstones. Never walked in an order that could
 * reach a plan. */
struct idmap_cell { uint64_t key; uint32_t value; }; /* value NONE: empty */
struct idmap {
    struct idmap_cell *cell;   /* [cap] */
    uint32_t cap, n;           /* cap: 0 or a power of two */
};

/* A row that is live, used in the window, or remembered.
 *
 *   unknown --push--> awaited --boundary: used--> live --boundary: evicted--> remembered
 *                                                  ^                            |      |
 *                                                  +-----boundary: used---------+   forgotten:
 *                                                                                awaited/unknown */
struct row {
    uint64_t id;
    int64_t next_use;          /* first iteration not yet retired that uses it, or NO_USE      */
    int64_t tail_use;          /* last iteration pushed that uses it, if next_use != NO_USE    */
    int64_t last_use;          /* last iteration retired that used it                          */
    int64_t written;           /* version of its last write-back; PLAN_NEED_SETTLED: forgotten */
    int64_t evicted_at;        /* boundary of its last eviction, -1: none                      */
    int64_t moved_at;          /* last boundary that changed owner or slot, -1: none ...       */
    uint32_t old_slot;         /* ... and the placement before that boundary: evaluation reads */
    uint8_t old_owner;         /* it until plan moved_at is pulled                             */
    uint8_t owner;             /* NO_OWNER: not live                                           */
    bool remembered;           /* in the list planner.forget_first                             */
    uint32_t slot;             /* of the owner                                                 */
    uint32_t tail_index;       /* place of tail_use in its batch's `use`                       */
    uint32_t prev, next;       /* remembered: that list; live: bucket (next); free: next       */
};

/* --- window (planner_window.c) -------------------------------------------------------------- */

struct use {                   /* one distinct row of one batch                                */
    uint64_t slices;           /* bit k: slice k uses it                                       */
    uint32_t row;
    uint32_t next_in;          /* iterations until its next use, 0: none known                 */
    uint32_t next_index;       /* place of that use in its batch's `use`                       */
};
struct batch {
    uint32_t n;                /* samples                                                      */
    float *dense, *label;      /* [global_batch][dense_features], [global_batch]               */
    uint32_t *look_up;         /* [global_batch][n_tables] index into use                      */
    struct use *use;           /* in order of first look-up                                    */
    uint32_t n_use, cap_use;
    struct batch *spare;       /* next in the list of batches to reuse                         */
};
struct distinct { uint64_t id, slices; };

/* --- decisions (planner_boundary.c) --------------------------------------------------------- */

struct item {                  /* a line of a fetch or evict list                              */
    uint64_t row_id;
    int64_t version;           /* fetch: need                                                  */
    uint32_t slot;
    uint8_t owned;
};
struct item_list { struct item *v; uint32_t n, cap; };

struct placed {                /* where one distinct row of batch i is during iteration i      */
    uint64_t users;            /* bit t: trainer t                                             */
    int64_t need;              /* if fetched                                                   */
    uint32_t first_copy;       /* slots of the users, ascending: copy[first_copy ..]           */
    uint32_t owner_slot;
    uint8_t owner;
    bool fetched;
};
struct placement {             /* boundary i and the iteration behind it                       */
    struct placed *row;        /* parallel to the batch's use                                  */
    uint32_t *copy;
    uint32_t n_copy, cap_row, cap_copy;
    struct item_list evict[MAX_TRAINERS];
};

struct cache {                 /* one trainer's slots                                          */
    uint32_t *free;            /* stack: the slot freed last is given out first                */
    uint32_t n_free, cap_free;
    uint32_t n_slots;          /* slots ever given out: [0, n_slots)                           */
    uint32_t owned;            /* live rows it owns                                            */
};
struct bucket { uint32_t first, last; }; /* live rows of one owner with one next use; FIFO     */

/* --- plans (planner_build.c) ---------------------------------------------------------------- */

struct move { uint32_t from, to; uint8_t node; }; /* slots of sender and receiver              */
struct move_list { struct move *v; uint32_t n, cap; };
enum { URGENT, DEFERRED, N_WHEN };
struct exchange { struct move_list grad[N_WHEN], value[N_WHEN]; };

/* What the plans of one step are cut from. Borrows samples and evict lists. */
struct draft {
    enum plan_kind kind;
    int64_t iteration;
    uint32_t n, eval_last;                      /* samples of the global batch                 */
    const float *dense, *label;
    uint32_t *slot;                             /* [global_batch][n_tables]                    */
    struct item_list fetch[MAX_TRAINERS];
    const struct item_list *evict;              /* [n_trainers], NULL: none                    */
    struct exchange *exchange;                  /* [n_trainers sender][n_trainers receiver]    */
    struct move_list copy[MAX_TRAINERS];        /* eval                                        */
    uint32_t eval_rows[MAX_TRAINERS];
};

struct run {                   /* what a trainer has of a batch                                */
    uint32_t lo, hi;           /* slices                                                       */
    uint64_t slices;           /* the same as a mask                                           */
    uint32_t n_nodes;
    struct tree_node node[TREE_MAX_NODES];
    uint64_t node_slices[TREE_MAX_NODES];
};

struct planner {
    struct planner_cfg cfg;
    uint32_t slice_samples;    /* q */
    struct run run[MAX_TRAINERS];

    int64_t pushed;            /* batches */
    int64_t boundaries;        /* boundary_run has done [0, boundaries) */
    int64_t pulled;            /* training plans */
    uint64_t seq;
    bool ended, flushed;
    bool broken;               /* out of memory half-way: only planner_close may follow */

    struct idmap index;        /* row id -> row */
    struct row *row;
    uint32_t n_row, cap_row, free_row;
    uint32_t live;
    uint32_t forget_first, forget_last; /* remembered rows in order of eviction */

    struct batch **ring;       /* batches [pulled, pushed), at iteration % cap_ring */
    uint32_t cap_ring;
    struct batch *spare;
    struct idmap seen;         /* distinct rows of the batch being read: id -> distinct */
    struct distinct *distinct;
    uint32_t n_distinct, cap_distinct;

    struct placement placement[2]; /* at boundary % 2: the last two */
    struct cache cache[MAX_TRAINERS];
    struct bucket *bucket;     /* [n_trainers][lookahead + 1], at next use % (lookahead + 1) */

    struct draft draft;
    uint32_t *shard_at;        /* [n_shards] */
    uint32_t *eval_look_up;    /* [global_batch][n_tables] */
    uint32_t *eval_row;        /* [cap_eval_row] scratch row of each distinct row */
    uint32_t cap_eval_row;

    struct planner_stats stats;
};

static inline uint64_t bit(uint32_t k)
{
    return UINT64_C(1) << k;
}
static inline struct batch *batch_at(const struct planner *p, int64_t i)
{
    return p->ring[(uint64_t)i % p->cap_ring];
}
static inline struct bucket *bucket_at(const struct planner *p, uint32_t t, int64_t next_use)
{
    uint64_t width = (uint64_t)p->cfg.lookahead + 1;
    return &p->bucket[t * width + (uint64_t)next_use % width];
}
/* Slot of trainer t, one of its users, for a placed row. */
static inline uint32_t placed_slot(const struct placement *m, const struct placed *r, uint32_t t)
{
    return m->copy[r->first_copy + (uint32_t)__builtin_popcountll(r->users & (bit(t) - 1))];
}
/* The trainers among whose slices are some of `slices`. */
static inline uint64_t users_of(const struct planner *p, uint64_t slices)
{
    uint64_t users = 0;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++)
        if ((slices & p->run[t].slices) != 0) users |= bit(t);
    return users;
}
/* Every row whose last write-back was at boundary e <= i - remember is forgotten at boundary i. Its
 * version is at most e - 1, so it is below this bound, as is "never written" (-1). */
static inline int64_t settled_at(const struct planner *p, int64_t i)
{
    int64_t bound = i - (int64_t)p->cfg.remember;
    return bound > 0 ? bound : 0;
}

/* `p` with room for `need` items of `size` bytes, NULL (p is as it was) when out of memory. */
MUST_USE void *room(void *p, uint32_t *cap, uint32_t need, size_t size);

uint32_t idmap_get(const struct idmap *m, uint64_t key); /* NONE: absent */
MUST_USE enum st idmap_put(struct idmap *m, uint64_t key, uint32_t value); /* key is absent */
void idmap_remove(struct idmap *m, uint64_t key);                          /* key is there */
void idmap_clear(struct idmap *m);
void idmap_fini(struct idmap *m);

/* The record of `id`, made if there is none. Moves the records: pointers to them end here. */
MUST_USE enum st rows_get(struct planner *p, uint64_t id, uint32_t *row);
void rows_remember(struct planner *p, uint32_t row);
void rows_recall(struct planner *p, uint32_t row); /* take it out of the list again */
/* Forget what was evicted at boundary i - remember or before. */
void rows_forget(struct planner *p, int64_t i);

/* Distinct rows of `s` into p->distinct, look-ups as indices into them. */
MUST_USE enum st window_distinct(struct planner *p, const struct samples *s, uint32_t *look_up);
MUST_USE enum st window_push(struct planner *p, const struct samples *s);
void window_drop(struct planner *p, int64_t i); /* batch i is done with */
void window_fini(struct planner *p);

MUST_USE enum st boundary_run(struct planner *p, int64_t i);

MUST_USE enum st build_train(struct planner *p, int64_t i, struct plan **out);
MUST_USE enum st build_flush(struct planner *p, int64_t i, struct plan **out);
MUST_USE enum st build_eval(struct planner *p, const struct samples *s, int last,
                            struct plan **out);

#endif
