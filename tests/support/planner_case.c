#include "tests/support/planner_case.h"

#include <stdlib.h>
#include <string.h>

#include "base/row.h"
#include "base/tree.h"

uint64_t case_draw(uint64_t *state, uint64_t below)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (x ^ x >> 31) % below;
}

#define PICK(state, ...)                                                        \
    ((const uint32_t[]){__VA_ARGS__})[case_draw(                                \
        (state), sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))]

static void *must(void *p)
{
    if (p == NULL) abort();
    return p;
}

static struct samples samples_make(const struct planner_cfg *cfg, uint32_t n)
{
    struct samples s = {.n = n};
    s.dense = must(calloc((size_t)n * cfg->dense_features + 1, sizeof(float)));
    s.label = must(calloc(n, sizeof(float)));
    s.id = must(calloc((size_t)n * cfg->n_tables, sizeof(uint64_t)));
    return s;
}

static uint64_t working_set(const struct planner_cfg *cfg, const struct samples *s)
{
    uint32_t q = cfg->global_batch / cfg->slices, F = cfg->n_tables;
    uint64_t worst = 0;
    for (uint32_t t = 0; t < cfg->n_trainers; t++) {
        size_t lo = (size_t)tree_run_start(t, cfg->n_trainers, cfg->slices) * q * F;
        size_t hi = (size_t)tree_run_start(t + 1, cfg->n_trainers, cfg->slices) * q * F;
        uint64_t rows = 0;
        for (size_t k = lo; k < hi && k < (size_t)s->n * F; k++) {
            size_t before = lo;
            while (s->id[before] != s->id[k]) before++;
            rows += before == k;
        }
        if (rows > worst) worst = rows;
    }
    return worst;
}

static void fill(struct planner_case *c, struct samples *s, uint64_t *r)
{
    for (uint32_t b = 0; b < s->n; b++) {
        for (uint32_t f = 0; f < c->cfg.dense_features; f++)
            s->dense[b * c->cfg.dense_features + f] = (float)case_draw(r, 1000);
        s->label[b] = (float)case_draw(r, 2);
        for (uint32_t f = 0; f < c->cfg.n_tables; f++) {
            uint64_t row = case_draw(r, c->table_rows); /* skewed: the smallest of three */
            for (int again = 0; again < 2; again++) {
                uint64_t other = case_draw(r, c->table_rows);
                if (other < row) row = other;
            }
            s->id[b * c->cfg.n_tables + f] = row_id(f, row);
        }
    }
}

struct planner_case case_random(uint64_t seed)
{
    uint64_t r = seed;
    struct planner_case c = {.seed = seed};
    struct planner_cfg *g = &c.cfg;
    g->n_trainers = 1 + (uint32_t)case_draw(&r, 8);
    g->slices = PICK(&r, 1, 2, 3, 4, 5, 8, 16);
    g->n_tables = 1 + (uint32_t)case_draw(&r, 3);
    g->dense_features = (uint32_t)case_draw(&r, 3);
    g->global_batch = g->slices * (1 + (uint32_t)case_draw(&r, 3));
    g->lookahead = PICK(&r, 0, 1, 2, 3, 7, 50);
    g->n_shards = 1 + (uint32_t)case_draw(&r, 5);
    g->remember = PICK(&r, 1, 2, 5, 1000);
    c.table_rows = PICK(&r, 4, 20, 100, 300);
    c.n_batches = PICK(&r, 0, 1, 2, 20, 60, g->lookahead, g->lookahead + 1,
                       g->lookahead == 0 ? 0 : g->lookahead - 1);
    uint32_t last = 1 + (uint32_t)case_draw(&r, g->global_batch);
    if (case_draw(&r, 2) == 0) last = g->global_batch;

    c.batch = must(calloc(c.n_batches + 1, sizeof(*c.batch)));
    for (uint32_t i = 0; i < c.n_batches; i++) {
        c.batch[i] = samples_make(g, i + 1 == c.n_batches ? last : g->global_batch);
        fill(&c, &c.batch[i], &r);
        uint64_t rows = working_set(g, &c.batch[i]);
        if (rows > c.working_set) c.working_set = rows;
    }
    uint64_t all = (uint64_t)c.table_rows * g->n_tables;
    switch (case_draw(&r, 4)) {
    case 0: g->cap_rows = c.working_set; break;
    case 1: g->cap_rows = c.working_set + 1; break;
    case 2: g->cap_rows = c.working_set + case_draw(&r, all); break;
    default: g->cap_rows = c.working_set + all; break;
    }
    return c;
}

struct planner_case case_by_hand(const struct planner_cfg *cfg, uint32_t n_batches,
                                 const uint64_t *row)
{
    struct planner_case c = {.cfg = *cfg, .n_batches = n_batches};
    uint32_t B = cfg->global_batch;
    c.batch = must(calloc(n_batches + 1, sizeof(*c.batch)));
    for (uint32_t i = 0; i < n_batches; i++) {
        c.batch[i] = samples_make(cfg, B);
        for (uint32_t b = 0; b < B; b++) {
            c.batch[i].label[b] = (float)(i * 100 + b);
            c.batch[i].id[b] = row[i * B + b];
            if (row[i * B + b] >= c.table_rows) c.table_rows = (uint32_t)row[i * B + b] + 1;
        }
    }
    return c;
}

struct planner_cfg case_cfg(uint32_t trainers, uint32_t slices, uint32_t lookahead)
{
    return (struct planner_cfg){.n_trainers = trainers, .n_tables = 1, .global_batch = slices,
                                .slices = slices, .lookahead = lookahead, .n_shards = 1,
                                .cap_rows = 1000, .remember = 100};
}

struct planner *case_open(const struct planner_cfg *cfg)
{
    struct planner *p;
    if (planner_open(cfg, &p) != ST_OK) abort();
    return p;
}

struct planner *case_planner(const struct planner_case *c)
{
    struct planner *p = case_open(&c->cfg);
    for (uint32_t i = 0; i < c->n_batches; i++)
        if (planner_push(p, &c->batch[i]) != ST_OK) abort();
    planner_end(p);
    return p;
}

void case_close_plans(struct plan **plan, uint32_t n)
{
    for (uint32_t t = 0; t < n; t++) plan_close(plan[t]);
}

void case_close(struct planner_case *c)
{
    for (uint32_t i = 0; i < c->n_batches; i++) {
        free(c->batch[i].dense);
        free(c->batch[i].label);
        free(c->batch[i].id);
    }
    free(c->batch);
}

static void add(struct plan_bytes *b, const void *p, size_t n)
{
    if (b->n + n > b->cap) {
        b->cap = (b->n + n) * 2;
        b->p = must(realloc(b->p, b->cap));
    }
    if (n > 0) memcpy(b->p + b->n, p, n);
    b->n += n;
}

#define ADD(b, field) add((b), &(field), sizeof(field))
#define ADD_N(b, array, count) add((b), (array), (size_t)(count) * sizeof(*(array)))

static void add_grads(struct plan_bytes *b, const struct plan_grads *g)
{
    ADD(b, g->n);
    ADD(b, g->n_urgent);
    ADD_N(b, g->slot, g->n);
    ADD_N(b, g->node, g->n);
}

static void add_values(struct plan_bytes *b, const struct plan_values *v)
{
    ADD(b, v->n);
    ADD(b, v->n_urgent);
    ADD_N(b, v->slot, v->n);
}

void plan_bytes_add(struct plan_bytes *b, const struct planner_cfg *cfg, const struct plan *pl)
{
    ADD(b, pl->kind);
    ADD(b, pl->iteration);
    ADD(b, pl->settled);
    ADD(b, pl->batch_total);
    ADD(b, pl->eval_last);
    ADD(b, pl->n_samples);
    ADD_N(b, pl->dense, pl->n_samples * cfg->dense_features);
    ADD_N(b, pl->label, pl->n_samples);
    ADD_N(b, pl->slot, pl->n_samples * cfg->n_tables);
    ADD(b, pl->fetch.n);
    ADD_N(b, pl->fetch.row_id, pl->fetch.n);
    ADD_N(b, pl->fetch.slot, pl->fetch.n);
    ADD_N(b, pl->fetch.need, pl->fetch.n);
    ADD_N(b, pl->fetch.owned, pl->fetch.n);
    ADD(b, pl->evict.n);
    ADD_N(b, pl->evict.row_id, pl->evict.n);
    ADD_N(b, pl->evict.slot, pl->evict.n);
    ADD_N(b, pl->evict.version, pl->evict.n);
    ADD(b, pl->n_peers);
    for (uint32_t r = 0; r < pl->n_peers; r++) {
        add_grads(b, &pl->peer[r].grad_send);
        add_grads(b, &pl->peer[r].grad_recv);
        add_values(b, &pl->peer[r].value_send);
        add_values(b, &pl->peer[r].value_recv);
    }
    ADD(b, pl->eval_rows);
    ADD(b, pl->n_eval_copy);
    ADD_N(b, pl->eval_from, pl->n_eval_copy);
    ADD_N(b, pl->eval_to, pl->n_eval_copy);
}
