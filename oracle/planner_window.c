/* Batches in. A batch is kept as its distinct rows, the slices that use each of them, and look-ups
 * as places in that list. The uses of one row are chained through the batches, so that its next
 * use is always at hand, and cost no memory of their own. */
#include "oracle/planner_internal.h"

#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

static enum st distinct_add(struct planner *p, uint64_t id, uint32_t *at)
{
    *at = p->n_distinct;
    struct distinct *v = room(p->distinct, &p->cap_distinct, *at + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    p->distinct = v;
    v[*at] = (struct distinct){id, 0};
    enum st st = idmap_put(&p->seen, id, *at);
    if (st == ST_OK) p->n_distinct++;
    return st;
}

enum st window_distinct(struct planner *p, const struct samples *s, uint32_t *look_up)
{
    uint32_t F = p->cfg.n_tables;
    idmap_clear(&p->seen);
    p->n_distinct = 0;
    for (uint32_t b = 0; b < s->n; b++) {
        uint64_t slice = bit(b / p->slice_samples);
        for (size_t k = (size_t)b * F; k < (size_t)(b + 1) * F; k++) {
            uint32_t at = idmap_get(&p->seen, s->id[k]);
            if (at == NONE) {
                enum st st = distinct_add(p, s->id[k], &at);
                if (st != ST_OK) return st;
            }
            p->distinct[at].slices |= slice;
            look_up[k] = at;
        }
    }
    return ST_OK;
}

/* A trainer needs all rows of its samples in its cache at once. */
static enum st check_fits(const struct planner *p)
{
    uint32_t rows[MAX_TRAINERS] = {0}, worst = 0;
    for (uint32_t k = 0; k < p->n_distinct; k++)
        for (uint64_t u = users_of(p, p->distinct[k].slices); u != 0; u &= u - 1)
            rows[__builtin_ctzll(u)]++;
    for (uint32_t t = 1; t < p->cfg.n_trainers; t++)
        if (rows[t] > rows[worst]) worst = t;
    if (rows[worst] <= p->cfg.cap_rows) return ST_OK;
    return log_fail(ST_CONFIG, "cluster.cache_rows",
                    "the batch of iteration %lld takes %u rows on trainer %u, but a cache has "
                    "%llu; set it to at least %u, or take more trainers or a smaller "
                    "train.global_batch",
                    (long long)p->pushed, rows[worst], worst,
                    (unsigned long long)p->cfg.cap_rows, rows[worst]);
}

static void batch_close(struct batch *b)
{
    if (b == NULL) return;
    mem_free(b->use);
    mem_free(b->look_up);
    mem_free(b->label);
    mem_free(b->dense);
    mem_free(b);
}

static enum st batch_open(const struct planner *p, struct batch **out)
{
    uint32_t B = p->cfg.global_batch;
    struct batch *b = mem_zalloc(1, sizeof(*b));
    if (b == NULL) return ST_NOMEM;
    b->dense = mem_alloc((size_t)B * p->cfg.dense_features, sizeof(*b->dense));
    b->label = mem_alloc(B, sizeof(*b->label));
    b->look_up = mem_alloc((size_t)B * p->cfg.n_tables, sizeof(*b->look_up));
    if (b->dense == NULL || b->label == NULL || b->look_up == NULL) {
        batch_close(b);
        return ST_NOMEM;
    }
    *out = b;
    return ST_OK;
}

static enum st batch_take(struct planner *p, struct batch **out)
{
    if (p->spare == NULL) return batch_open(p, out);
    *out = p->spare;
    p->spare = p->spare->spare;
    return ST_OK;
}

static void batch_put(struct planner *p, struct batch *b)
{
    b->spare = p->spare;
    p->spare = b;
}

static enum st ring_room(struct planner *p)
{
    if (p->pushed - p->pulled < (int64_t)p->cap_ring) return ST_OK;
    uint32_t cap = p->cap_ring == 0 ? 8 : p->cap_ring * 2;
    struct batch **ring = mem_zalloc(cap, sizeof(struct batch *));
    if (ring == NULL) return ST_NOMEM;
    for (int64_t i = p->pulled; i < p->pushed; i++) ring[(uint64_t)i % cap] = batch_at(p, i);
    mem_free(p->ring);
    p->ring = ring;
    p->cap_ring = cap;
    return ST_OK;
}

/* Chain use `k` of the newest batch behind the row's uses so far. */
static void append_use(struct planner *p, struct row *r, uint32_t k)
{
    int64_t i = p->pushed;
    if (r->next_use == NO_USE) {
        r->next_use = i;
    } else {
        struct use *tail = &batch_at(p, r->tail_use)->use[r->tail_index];
        tail->next_in = (uint32_t)(i - r->tail_use);
        tail->next_index = k;
    }
    r->tail_use = i;
    r->tail_index = k;
}

/* The rows of p->distinct become the batch's uses. */
static enum st fill_uses(struct planner *p, struct batch *b)
{
    struct use *use = room(b->use, &b->cap_use, p->n_distinct, sizeof(*use));
    if (use == NULL) return ST_NOMEM;
    b->use = use;
    b->n_use = p->n_distinct;
    for (uint32_t k = 0; k < b->n_use; k++) {
        use[k] = (struct use){.slices = p->distinct[k].slices};
        enum st st = rows_get(p, p->distinct[k].id, &use[k].row);
        if (st != ST_OK) return st;
        append_use(p, &p->row[use[k].row], k);
    }
    return ST_OK;
}

enum st window_push(struct planner *p, const struct samples *s)
{
    struct batch *b;
    enum st st = batch_take(p, &b);
    if (st != ST_OK) return st;
    TRY(window_distinct(p, s, b->look_up), err);
    TRY(check_fits(p), err);
    TRY(ring_room(p), err);
    TRY(fill_uses(p, b), err);
    b->n = s->n;
    memcpy(b->dense, s->dense, (size_t)s->n * p->cfg.dense_features * sizeof(*b->dense));
    memcpy(b->label, s->label, (size_t)s->n * sizeof(*b->label));
    p->ring[(uint64_t)p->pushed % p->cap_ring] = b;
    p->pushed++;
    return ST_OK;

err:
    batch_put(p, b);
    return st;
}

void window_drop(struct planner *p, int64_t i)
{
    batch_put(p, batch_at(p, i));
}

void window_fini(struct planner *p)
{
    for (int64_t i = p->pulled; i < p->pushed; i++) batch_close(batch_at(p, i));
    while (p->spare != NULL) {
        struct batch *b = p->spare;
        p->spare = b->spare;
        batch_close(b);
    }
    mem_free(p->ring);
    mem_free(p->distinct);
    idmap_fini(&p->seen);
}
