#include "oracle/planner_internal.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

static void runs_init(struct planner *p)
{
    uint32_t N = p->cfg.n_trainers, S = p->cfg.slices;
    for (uint32_t t = 0; t < N; t++) {
        struct run *run = &p->run[t];
        run->lo = tree_run_start(t, N, S);
        run->hi = tree_run_start(t + 1, N, S);
        run->n_nodes = tree_nodes(run->lo, run->hi, S, run->node);
        for (uint32_t k = 0; k < run->n_nodes; k++) {
            run->node_slices[k] = tree_node_mask(run->node[k]);
            run->slices |= run->node_slices[k];
        }
    }
}

/* The configuration has been checked by whoever read it. */
static void check_cfg(const struct planner_cfg *c)
{
    CHECK(c->n_trainers >= 1 && c->n_trainers <= MAX_TRAINERS, "trainers are bits of a word");
    CHECK(c->slices >= 1 && c->slices <= TREE_MAX_SLICES, "slices are bits of a word");
    CHECK(c->global_batch > 0 && c->global_batch % c->slices == 0, "slices are equal");
    CHECK(c->n_tables >= 1 && c->n_shards >= 1, "there is something to plan");
    CHECK(c->remember >= 1, "a row may come back at the boundary at which it left");
}

enum st planner_open(const struct planner_cfg *cfg, struct planner **out)
{
    check_cfg(cfg);
    struct planner *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) return ST_NOMEM;
    p->cfg = *cfg;
    if (cfg->cap_rows > NONE) p->cfg.cap_rows = NONE; /* slots are u32 */
    p->slice_samples = cfg->global_batch / cfg->slices;
    p->free_row = p->forget_first = p->forget_last = NONE;
    runs_init(p);

    size_t N = cfg->n_trainers, n_buckets = N * ((size_t)cfg->lookahead + 1);
    size_t n_look_ups = (size_t)cfg->global_batch * cfg->n_tables;
    p->bucket = mem_alloc(n_buckets, sizeof(*p->bucket));
    p->draft.exchange = mem_zalloc(N * N, sizeof(*p->draft.exchange));
    p->draft.slot = mem_alloc(n_look_ups, sizeof(*p->draft.slot));
    p->eval_look_up = mem_alloc(n_look_ups, sizeof(*p->eval_look_up));
    p->shard_at = mem_alloc(cfg->n_shards, sizeof(*p->shard_at));
    if (p->bucket == NULL || p->draft.exchange == NULL || p->draft.slot == NULL ||
        p->eval_look_up == NULL || p->shard_at == NULL) {
        planner_close(p);
        return ST_NOMEM;
    }
    for (size_t k = 0; k < n_buckets; k++) p->bucket[k] = (struct bucket){NONE, NONE};
    *out = p;
    return ST_OK;
}

static void exchanges_fini(struct planner *p)
{
    if (p->draft.exchange == NULL) return;
    for (size_t k = 0; k < (size_t)p->cfg.n_trainers * p->cfg.n_trainers; k++)
        for (int when = 0; when < N_WHEN; when++) {
            mem_free(p->draft.exchange[k].grad[when].v);
            mem_free(p->draft.exchange[k].value[when].v);
        }
    mem_free(p->draft.exchange);
}

void planner_close(struct planner *p)
{
    if (p == NULL) return;
    window_fini(p);
    exchanges_fini(p);
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        mem_free(p->draft.fetch[t].v);
        mem_free(p->draft.copy[t].v);
        mem_free(p->cache[t].free);
        for (int k = 0; k < 2; k++) mem_free(p->placement[k].evict[t].v);
    }
    for (int k = 0; k < 2; k++) {
        mem_free(p->placement[k].row);
        mem_free(p->placement[k].copy);
    }
    idmap_fini(&p->index);
    mem_free(p->row);
    mem_free(p->eval_row);
    mem_free(p->shard_at);
    mem_free(p->eval_look_up);
    mem_free(p->draft.slot);
    mem_free(p->bucket);
    mem_free(p);
}

enum st planner_push(struct planner *p, const struct samples *batch)
{
    CHECK(!p->ended, "no batch comes after the end");
    CHECK(batch->n >= 1 && batch->n <= p->cfg.global_batch, "a batch has samples");
    if (p->broken) return ST_NOMEM;
    CHECK(p->pushed == 0 || batch_at(p, p->pushed - 1)->n == p->cfg.global_batch,
          "only the last batch is short");
    enum st st = window_push(p, batch);
    if (st == ST_NOMEM) p->broken = true;
    return st;
}

void planner_end(struct planner *p)
{
    p->ended = true;
}

static enum st pull_train(struct planner *p, struct plan **out)
{
    enum st st;
    int64_t i = p->pulled;
    while (p->boundaries <= i + 1) TRY(boundary_run(p, p->boundaries), err);
    TRY(build_train(p, i, out), err);
    window_drop(p, i);
    p->pulled++;
    return ST_OK;

err:
    p->broken = true; /* out of memory half-way */
    return st;
}

enum st planner_pull(struct planner *p, struct plan **out)
{
    if (p->broken) return ST_NOMEM;
    if (p->ended && p->pulled == p->pushed) {
        if (p->flushed || p->pushed == 0) return ST_END;
        enum st st = build_flush(p, p->pulled, out);
        p->flushed = st == ST_OK;
        return st;
    }
    int64_t ahead = p->cfg.lookahead > 1 ? p->cfg.lookahead : 1;
    if (!p->ended && p->pushed <= p->pulled + ahead) return ST_BUSY;
    return pull_train(p, out);
}

enum st planner_eval(struct planner *p, const struct samples *batch, int last, struct plan **out)
{
    CHECK(batch->n >= 1 && batch->n <= p->cfg.global_batch, "a batch has samples");
    if (p->broken) return ST_NOMEM;
    return build_eval(p, batch, last, out);
}

struct planner_stats planner_stats(const struct planner *p)
{
    struct planner_stats s = p->stats;
    s.live_rows = p->live;
    return s;
}
