/* tests/support/planner_world_internal.h - the state of the dumb cluster; for planner_world*.c. */
#ifndef CHANTER_TESTS_PLANNER_WORLD_INTERNAL_H
#define CHANTER_TESTS_PLANNER_WORLD_INTERNAL_H

#include "base/row.h"
#include "base/tree.h"
#include "tests/support/planner_world.h"

struct held { bool used, owner; uint64_t id, value; int64_t version; }; /* one slot */
struct used { uint64_t id, slices, value; };      /* what a trainer's samples read from a slot */
struct sum { bool active, deferred; uint64_t id, slices, total; }; /* gradient at the owner */
struct staged { bool used, deferred; uint64_t id, value; uint32_t rank, slot; };

struct rank {
    uint32_t lo, hi;               /* its slices                                     */
    struct held *held;             /* [cap]                                          */
    struct used *used[2];          /* [cap], iteration % 2                           */
    struct sum *sum[2];            /* [cap], iteration % 2                           */
    struct staged *staged;         /* [cap] values for the next iteration            */
};
struct at_server { uint64_t value; int64_t version, boundary; };

struct world {
    const struct planner_case *c;
    struct world_seen *seen;
    uint32_t N, cap, n_rows;
    int64_t iteration;
    uint64_t next_seq;
    struct rank rank[64];
    struct at_server *server;      /* [n_rows]                                       */
    uint64_t *truth;               /* [n_rows] the value that a look-up must read    */
    int64_t *last_use;             /* [n_rows] before `iteration`, -1: none          */
    int64_t *next_use;             /* [n_batches + 1][n_rows] first at or after      */
    uint64_t *slices;              /* [n_batches + 1][n_rows] who uses it            */
    uint32_t *owners;              /* [n_rows] scratch                               */
    struct plan *plan[2][64];      /* iteration % 2                                  */
    bool open_deferred[2];         /* deferred gradients not applied yet             */
    enum world_fault fault;
    char why[200];
};

static inline uint32_t row_of(const struct world *w, uint64_t id)
{
    return row_table(id) * w->c->table_rows + (uint32_t)row_number(id);
}
static inline int64_t next_use(const struct world *w, int64_t i, uint32_t row)
{
    return w->next_use[(size_t)i * w->n_rows + row];
}
static inline uint64_t slices_of(const struct world *w, int64_t i, uint32_t row)
{
    return w->slices[(size_t)i * w->n_rows + row];
}
static inline uint64_t sample_slices(const struct world *w, uint32_t b)
{
    return UINT64_C(1) << (b / (w->c->cfg.global_batch / w->c->cfg.slices));
}

/* planner_world.c */
uint64_t world_mix(uint64_t a, uint64_t b);
void world_bad(struct world *w, enum world_fault fault, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* An empty slot and a fault if the cache has no such slot. */
struct held *world_held(struct world *w, uint32_t t, uint32_t slot);
/* Samples [*lo, *hi) of a step of n are trainer t's. */
void world_samples_of(const struct world *w, uint32_t t, uint32_t n, uint32_t *lo, uint32_t *hi);
void world_check_header(struct world *w, const struct plan *pl, enum plan_kind kind, uint32_t n);
void world_check_samples(struct world *w, uint32_t t, const struct plan *pl,
                         const struct samples *s);
void world_check_lists(struct world *w, struct plan **pl);
bool world_need_is_right(const struct world *w, uint32_t row, int64_t need, int64_t bound);

/* planner_world_step.c */
/* Exchange and apply the deferred gradients of iteration i. */
void world_finish_deferred(struct world *w, int64_t i);

#endif
