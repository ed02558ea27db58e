#include "tests/support/planner_world_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- small things ----------------------------------------------------------------------------- */

uint64_t world_mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) + b;
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

static void *zeroed(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);
    if (p == NULL) abort();
    return p;
}

void world_bad(struct world *w, enum world_fault fault, const char *fmt, ...)
{
    if (w->fault != FAULT_NONE) return;
    w->fault = fault;
    int n = snprintf(w->why, sizeof(w->why), "step %lld: ", (long long)w->iteration);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->why + n, sizeof(w->why) - (size_t)n, fmt, ap);
    va_end(ap);
}

struct held *world_held(struct world *w, uint32_t t, uint32_t slot)
{
    static struct held nothing;
    if (slot < w->cap) return &w->rank[t].held[slot];
    world_bad(w, FAULT_SLOT, "trainer %u has no slot %u", t, slot);
    nothing = (struct held){0};
    return &nothing;
}

static uint64_t first_value(uint64_t row)
{
    return world_mix(row, 12345);
}

/* --- open, close ------------------------------------------------------------------------------ */

static void learn_batches(struct world *w)
{
    const struct planner_case *c = w->c;
    w->next_use = zeroed((size_t)(c->n_batches + 1) * w->n_rows, sizeof(int64_t));
    w->slices = zeroed((size_t)(c->n_batches + 1) * w->n_rows, sizeof(uint64_t));
    for (uint32_t i = 0; i < c->n_batches; i++)
        for (uint32_t k = 0; k < c->batch[i].n * c->cfg.n_tables; k++)
            w->slices[(size_t)i * w->n_rows + row_of(w, c->batch[i].id[k])] |=
                sample_slices(w, k / c->cfg.n_tables);
    for (uint32_t r = 0; r < w->n_rows; r++) {
        int64_t next = INT64_MAX;
        for (int64_t i = c->n_batches; i >= 0; i--) {
            if (slices_of(w, i, r) != 0) next = i;
            w->next_use[(size_t)i * w->n_rows + r] = next;
        }
    }
}

struct world *world_open(const struct planner_case *c, struct world_seen *seen)
{
    struct world *w = zeroed(1, sizeof(*w));
    w->c = c;
    w->seen = seen;
    w->N = c->cfg.n_trainers;
    w->cap = (uint32_t)c->cfg.cap_rows;
    w->n_rows = c->cfg.n_tables * c->table_rows;
    w->server = zeroed(w->n_rows, sizeof(*w->server));
    w->truth = zeroed(w->n_rows, sizeof(*w->truth));
    w->last_use = zeroed(w->n_rows, sizeof(*w->last_use));
    w->owners = zeroed(w->n_rows, sizeof(*w->owners));
    for (uint32_t r = 0; r < w->n_rows; r++) {
        w->truth[r] = first_value(r);
        w->last_use[r] = -1;
        w->server[r] = (struct at_server){first_value(r), -1, -1};
    }
    for (uint32_t t = 0; t < w->N; t++) {
        struct rank *k = &w->rank[t];
        k->lo = tree_run_start(t, w->N, c->cfg.slices);
        k->hi = tree_run_start(t + 1, w->N, c->cfg.slices);
        k->held = zeroed(w->cap, sizeof(*k->held));
        k->staged = zeroed(w->cap, sizeof(*k->staged));
        for (int half = 0; half < 2; half++) {
            k->used[half] = zeroed(w->cap, sizeof(struct used));
            k->sum[half] = zeroed(w->cap, sizeof(struct sum));
        }
    }
    learn_batches(w);
    return w;
}

void world_close(struct world *w)
{
    for (uint32_t t = 0; t < w->N; t++) {
        free(w->rank[t].held);
        free(w->rank[t].staged);
        for (int half = 0; half < 2; half++) {
            free(w->rank[t].used[half]);
            free(w->rank[t].sum[half]);
            plan_close(w->plan[half][t]);
        }
    }
    free(w->server);
    free(w->truth);
    free(w->last_use);
    free(w->next_use);
    free(w->slices);
    free(w->owners);
    free(w);
}

enum world_fault world_fault(const struct world *w, const char **why)
{
    *why = w->why;
    return w->fault;
}

/* --- what plans look like --------------------------------------------------------------------- */

static int64_t settled(const struct world *w)
{
    int64_t bound = w->iteration - (int64_t)w->c->cfg.remember;
    return bound < 0 ? 0 : bound;
}

void world_samples_of(const struct world *w, uint32_t t, uint32_t n, uint32_t *lo, uint32_t *hi)
{
    uint32_t q = w->c->cfg.global_batch / w->c->cfg.slices;
    *lo = w->rank[t].lo * q < n ? w->rank[t].lo * q : n;
    *hi = w->rank[t].hi * q < n ? w->rank[t].hi * q : n;
}

void world_check_header(struct world *w, const struct plan *pl, enum plan_kind kind, uint32_t n)
{
    if (pl->kind != kind || pl->seq != w->next_seq || pl->iteration != w->iteration ||
        pl->settled != settled(w) || pl->batch_total != n || pl->n_peers != w->N)
        world_bad(w, FAULT_SAMPLES, "a field at the head of the plan is wrong");
}

void world_check_samples(struct world *w, uint32_t t, const struct plan *pl,
                          const struct samples *s)
{
    uint32_t lo, hi, features = w->c->cfg.dense_features;
    world_samples_of(w, t, s->n, &lo, &hi);
    if (pl->n_samples != hi - lo) world_bad(w, FAULT_SAMPLES, "trainer %u: number of samples", t);
    else if (memcmp(pl->label, s->label + lo, (hi - lo) * sizeof(float)) != 0 ||
             (features > 0 && hi > lo &&
              memcmp(pl->dense, s->dense + (size_t)lo * features,
                     (size_t)(hi - lo) * features * sizeof(float)) != 0))
        world_bad(w, FAULT_SAMPLES, "trainer %u has other samples", t);
}

static void check_shards(struct world *w, uint32_t n, const uint64_t *id)
{
    for (uint32_t k = 1; k < n; k++)
        if (row_shard(id[k - 1], w->c->cfg.n_shards) > row_shard(id[k], w->c->cfg.n_shards))
            world_bad(w, FAULT_LISTS, "not grouped by shard");
}

static void check_pair(struct world *w, struct plan **pl, uint32_t from, uint32_t to)
{
    const struct plan_peer *a = &pl[from]->peer[to], *b = &pl[to]->peer[from];
    if (a->grad_send.n != b->grad_recv.n || a->grad_send.n_urgent != b->grad_recv.n_urgent ||
        a->value_send.n != b->value_recv.n || a->value_send.n_urgent != b->value_recv.n_urgent)
        world_bad(w, FAULT_LISTS, "%u to %u: lengths differ", from, to);
    else if (memcmp(a->grad_send.node, b->grad_recv.node, a->grad_send.n) != 0)
        world_bad(w, FAULT_LISTS, "%u to %u: nodes differ", from, to);
    if (from == to && a->grad_send.n + a->grad_recv.n + a->value_send.n + a->value_recv.n > 0)
        world_bad(w, FAULT_LISTS, "trainer %u talks to itself", from);
}

void world_check_lists(struct world *w, struct plan **pl)
{
    for (uint32_t t = 0; t < w->N; t++) {
        check_shards(w, pl[t]->fetch.n, pl[t]->fetch.row_id);
        check_shards(w, pl[t]->evict.n, pl[t]->evict.row_id);
        for (uint32_t o = 0; o < w->N; o++) check_pair(w, pl, t, o);
    }
}

bool world_need_is_right(const struct world *w, uint32_t row, int64_t need, int64_t bound)
{
    const struct at_server *s = &w->server[row];
    if (need != PLAN_NEED_SETTLED) return need >= 0 && s->version == need;
    return s->version < bound &&
           (s->version < 0 || s->boundary <= w->iteration - (int64_t)w->c->cfg.remember);
}

/* --- evaluation ------------------------------------------------------------------------------- */

struct scratch { bool used; uint64_t id, value; };

static void put(struct world *w, struct scratch *s, uint32_t n, uint32_t to, uint64_t id,
                uint64_t value)
{
    if (to >= n || s[to].used)
        world_bad(w, FAULT_EVAL, "scratch row %u is filled twice or not there", to);
    else
        s[to] = (struct scratch){true, id, value};
}

static void put_held(struct world *w, struct scratch *s, uint32_t n, uint32_t to, uint32_t from,
                     uint32_t slot)
{
    const struct held *h = world_held(w, from, slot);
    if (!h->used || !h->owner)
        world_bad(w, FAULT_EVAL, "slot %u of trainer %u has no row", slot, from);
    else
        put(w, s, n, to, h->id, h->value);
}

static void eval_sources(struct world *w, uint32_t t, struct plan **pl, struct scratch *s)
{
    uint32_t n = pl[t]->eval_rows;
    for (uint32_t k = 0; k < pl[t]->fetch.n; k++) {
        uint32_t row = row_of(w, pl[t]->fetch.row_id[k]);
        if (pl[t]->fetch.owned[k] ||
            !world_need_is_right(w, row, pl[t]->fetch.need[k], pl[t]->settled))
            world_bad(w, FAULT_EVAL, "row %u: fetch asks for another version", row);
        put(w, s, n, pl[t]->fetch.slot[k], pl[t]->fetch.row_id[k], w->server[row].value);
    }
    for (uint32_t k = 0; k < pl[t]->n_eval_copy; k++)
        put_held(w, s, n, pl[t]->eval_to[k], t, pl[t]->eval_from[k]);
    for (uint32_t o = 0; o < w->N; o++) {
        const struct plan_values *in = &pl[t]->peer[o].value_recv;
        const struct plan_values *out = &pl[o]->peer[t].value_send;
        if (in->n_urgent != in->n || pl[t]->peer[o].grad_send.n != 0)
            world_bad(w, FAULT_EVAL, "evaluation defers or sends gradients");
        for (uint32_t k = 0; k < in->n && w->fault == FAULT_NONE; k++)
            put_held(w, s, n, in->slot[k], o, out->slot[k]);
        w->seen->eval_received += in->n;
    }
    w->seen->eval_fetched += pl[t]->fetch.n;
    w->seen->eval_copied += pl[t]->n_eval_copy;
}

static void eval_trainer(struct world *w, uint32_t t, struct plan **pl, const struct samples *batch)
{
    uint32_t lo, hi, F = w->c->cfg.n_tables;
    struct scratch *s = zeroed(pl[t]->eval_rows, sizeof(*s));
    eval_sources(w, t, pl, s);
    world_samples_of(w, t, batch->n, &lo, &hi);
    for (uint32_t k = 0; k < (hi - lo) * F && w->fault == FAULT_NONE; k++) {
        uint64_t id = batch->id[(size_t)lo * F + k];
        uint32_t at = pl[t]->slot[k];
        if (at >= pl[t]->eval_rows || !s[at].used || s[at].id != id ||
            s[at].value != w->truth[row_of(w, id)])
            world_bad(w, FAULT_EVAL, "row %u is not what it is now", row_of(w, id));
    }
    free(s);
}

void world_eval(struct world *w, const struct samples *batch, int last, struct plan **plans)
{
    world_finish_deferred(w, w->iteration - 2);
    world_finish_deferred(w, w->iteration - 1);
    for (uint32_t t = 0; t < w->N; t++) {
        world_check_header(w, plans[t], PLAN_EVAL, batch->n);
        world_check_samples(w, t, plans[t], batch);
        if (plans[t]->evict.n != 0 || plans[t]->eval_last != (uint32_t)last)
            world_bad(w, FAULT_EVAL, "evaluation writes, or does not know its end");
    }
    w->next_seq++;
    world_check_lists(w, plans);
    for (uint32_t t = 0; t < w->N && w->fault == FAULT_NONE; t++) eval_trainer(w, t, plans, batch);
    for (uint32_t t = 0; t < w->N; t++) plan_close(plans[t]);
}
