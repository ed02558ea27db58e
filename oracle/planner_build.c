/* Plans written out. First a draft of the whole step is made: for every pair of trainers what
 * moves from one to the other, so that both sides' lists come from one and agree in order. Then
 * each trainer's plan is cut from it into one block of memory. */
#include "oracle/planner_internal.h"

#include <string.h>

#include "base/mem.h"
#include "base/row.h"

/* --- draft ---------------------------------------------------------------------------------- */

static struct exchange *exchange_at(const struct planner *p, uint32_t from, uint32_t to)
{
    return &p->draft.exchange[(size_t)from * p->cfg.n_trainers + to];
}

static enum st move_add(struct move_list *l, struct move move)
{
    struct move *v = room(l->v, &l->cap, l->n + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    l->v = v;
    v[l->n++] = move;
    return ST_OK;
}

static enum st fetch_add(struct planner *p, uint32_t t, struct item item)
{
    struct item_list *l = &p->draft.fetch[t];
    struct item *v = room(l->v, &l->cap, l->n + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    l->v = v;
    v[l->n++] = item;
    return ST_OK;
}

static void draft_begin(struct planner *p, enum plan_kind kind, int64_t i)
{
    struct draft *d = &p->draft;
    d->kind = kind;
    d->iteration = i;
    d->n = d->eval_last = 0;
    d->dense = d->label = NULL;
    d->evict = NULL;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        d->fetch[t].n = d->copy[t].n = d->eval_rows[t] = 0;
        for (uint32_t peer = 0; peer < p->cfg.n_trainers; peer++)
            for (int when = 0; when < N_WHEN; when++)
                exchange_at(p, t, peer)->grad[when].n = exchange_at(p, t, peer)->value[when].n = 0;
    }
}

/* Look-ups [*lo, *hi) of a step of n samples are trainer t's. */
static void look_ups_of(const struct planner *p, uint32_t t, uint32_t n, size_t *lo, size_t *hi)
{
    uint32_t from = p->run[t].lo * p->slice_samples, to = p->run[t].hi * p->slice_samples;
    *lo = (size_t)(from < n ? from : n) * p->cfg.n_tables;
    *hi = (size_t)(to < n ? to : n) * p->cfg.n_tables;
}

static void draft_slots(struct planner *p, const struct batch *b, const struct placement *m)
{
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        size_t lo, hi;
        look_ups_of(p, t, b->n, &lo, &hi);
        for (size_t k = lo; k < hi; k++)
            p->draft.slot[k] = placed_slot(m, &m->row[b->look_up[k]], t);
    }
}

static enum st draft_fetches(struct planner *p, const struct batch *b, const struct placement *m)
{
    for (uint32_t k = 0; k < b->n_use; k++) {
        const struct placed *at = &m->row[k];
        if (!at->fetched) continue;
        for (uint64_t u = at->users; u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u);
            enum st st = fetch_add(p, t, (struct item){p->row[b->use[k].row].id, at->need,
                                                       placed_slot(m, at, t), t == at->owner});
            if (st != ST_OK) return st;
            p->stats.fetches++;
            p->stats.refetches += at->need != PLAN_NEED_SETTLED;
        }
    }
    return ST_OK;
}

/* Trainer t's sums for a row: one for each node of its run to which the row's slices contribute. */
static enum st draft_row_grads(struct planner *p, struct move_list *l, uint32_t t, uint64_t slices,
                               uint32_t from, uint32_t to)
{
    const struct run *run = &p->run[t];
    for (uint32_t k = 0; k < run->n_nodes; k++) {
        if ((slices & run->node_slices[k]) == 0) continue;
        enum st st = move_add(l, (struct move){from, to, run->node[k].pos});
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

/* Gradients of iteration i. A deferred one is applied at boundary i+2: in time iff nobody reads
 * the row before, neither a user at i+1 or i+2 nor the write-back of boundary i+1. (A row used at
 * i+2 has its value sent from boundary i+1 on.) */
static enum st draft_grads(struct planner *p, int64_t i, const struct batch *b,
                           const struct placement *m)
{
    for (uint32_t k = 0; k < b->n_use; k++) {
        const struct placed *at = &m->row[k];
        const struct row *r = &p->row[b->use[k].row];
        bool urgent = r->next_use <= i + 2 || r->evicted_at == i + 1;
        for (uint64_t u = at->users & ~bit(at->owner); u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u);
            struct move_list *l = &exchange_at(p, t, at->owner)->grad[urgent ? URGENT : DEFERRED];
            enum st st = draft_row_grads(p, l, t, b->use[k].slices, placed_slot(m, at, t),
                                         at->owner_slot);
            if (st != ST_OK) return st;
        }
    }
    return ST_OK;
}

/* Values for iteration i+1 of rows that are live across its boundary, `next` its batch. One that
 * iteration i does not update goes behind its compute. */
static enum st draft_values(struct planner *p, int64_t i, const struct batch *next,
                            const struct placement *m)
{
    for (uint32_t k = 0; k < next->n_use; k++) {
        const struct placed *at = &m->row[k];
        if (at->fetched) continue;
        int when = p->row[next->use[k].row].last_use == i ? URGENT : DEFERRED;
        for (uint64_t u = at->users & ~bit(at->owner); u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u);
            enum st st = move_add(&exchange_at(p, at->owner, t)->value[when],
                                  (struct move){at->owner_slot, placed_slot(m, at, t), 0});
            if (st != ST_OK) return st;
        }
    }
    return ST_OK;
}

/* --- plans ---------------------------------------------------------------------------------- */

/* Hands out pieces of a plan's block; without a block it only adds up their size. */
struct carver { char *base; size_t used; };

static void *carve(struct carver *c, size_t n, size_t size)
{
    void *piece = c->base == NULL ? NULL : c->base + c->used;
    c->used += (n * size + 63) / 64 * 64;
    return piece;
}

static void lay_grads(struct carver *c, const struct move_list l[N_WHEN], struct plan_grads *g)
{
    g->n_urgent = l[URGENT].n;
    g->n = l[URGENT].n + l[DEFERRED].n;
    g->slot = carve(c, g->n, sizeof(*g->slot));
    g->node = carve(c, g->n, sizeof(*g->node));
}

static void lay_values(struct carver *c, const struct move_list l[N_WHEN], struct plan_values *v)
{
    v->n_urgent = l[URGENT].n;
    v->n = l[URGENT].n + l[DEFERRED].n;
    v->slot = carve(c, v->n, sizeof(*v->slot));
}

static void lay_out(const struct planner *p, uint32_t t, struct carver *c, struct plan *pl)
{
    pl->dense = carve(c, (size_t)pl->n_samples * p->cfg.dense_features, sizeof(*pl->dense));
    pl->label = carve(c, pl->n_samples, sizeof(*pl->label));
    pl->slot = carve(c, (size_t)pl->n_samples * p->cfg.n_tables, sizeof(*pl->slot));
    pl->fetch.row_id = carve(c, pl->fetch.n, sizeof(*pl->fetch.row_id));
    pl->fetch.slot = carve(c, pl->fetch.n, sizeof(*pl->fetch.slot));
    pl->fetch.need = carve(c, pl->fetch.n, sizeof(*pl->fetch.need));
    pl->fetch.owned = carve(c, pl->fetch.n, sizeof(*pl->fetch.owned));
    pl->evict.row_id = carve(c, pl->evict.n, sizeof(*pl->evict.row_id));
    pl->evict.slot = carve(c, pl->evict.n, sizeof(*pl->evict.slot));
    pl->evict.version = carve(c, pl->evict.n, sizeof(*pl->evict.version));
    pl->eval_from = carve(c, pl->n_eval_copy, sizeof(*pl->eval_from));
    pl->eval_to = carve(c, pl->n_eval_copy, sizeof(*pl->eval_to));
    pl->peer = carve(c, pl->n_peers, sizeof(*pl->peer));
    for (uint32_t peer = 0; peer < pl->n_peers; peer++) {
        struct plan_peer sizes_only, *at = pl->peer == NULL ? &sizes_only : &pl->peer[peer];
        const struct exchange *out = exchange_at(p, t, peer), *in = exchange_at(p, peer, t);
        lay_grads(c, out->grad, &at->grad_send);
        lay_grads(c, in->grad, &at->grad_recv);
        lay_values(c, out->value, &at->value_send);
        lay_values(c, in->value, &at->value_recv);
    }
}

static void fill_grads(const struct move_list l[N_WHEN], bool send, struct plan_grads *g)
{
    uint32_t n = 0;
    for (int when = 0; when < N_WHEN; when++)
        for (uint32_t k = 0; k < l[when].n; k++, n++) {
            g->slot[n] = send ? l[when].v[k].from : l[when].v[k].to;
            g->node[n] = l[when].v[k].node;
        }
}

static void fill_values(const struct move_list l[N_WHEN], bool send, struct plan_values *v)
{
    uint32_t n = 0;
    for (int when = 0; when < N_WHEN; when++)
        for (uint32_t k = 0; k < l[when].n; k++)
            v->slot[n++] = send ? l[when].v[k].from : l[when].v[k].to;
}

/* p->shard_at[g] = place of shard g's first item when they are grouped by shard. */
static void find_shards(struct planner *p, const struct item_list *l)
{
    uint32_t *at = p->shard_at, start = 0;
    memset(at, 0, p->cfg.n_shards * sizeof(*at));
    for (uint32_t k = 0; k < l->n; k++) at[row_shard(l->v[k].row_id, p->cfg.n_shards)]++;
    for (uint32_t g = 0; g < p->cfg.n_shards; g++) {
        uint32_t n = at[g];
        at[g] = start;
        start += n;
    }
}

static void fill_fetch(struct planner *p, const struct item_list *l, struct plan_fetch *f)
{
    find_shards(p, l);
    for (uint32_t k = 0; k < l->n; k++) {
        uint32_t at = p->shard_at[row_shard(l->v[k].row_id, p->cfg.n_shards)]++;
        f->row_id[at] = l->v[k].row_id;
        f->slot[at] = l->v[k].slot;
        f->need[at] = l->v[k].version;
#ifdef BUG_state_not_fetched
        f->owned[at] = 0; /* planted: the value without its optimizer state */
#else
        f->owned[at] = l->v[k].owned;
#endif
    }
}

static void fill_evict(struct planner *p, const struct item_list *l, struct plan_evict *e)
{
    find_shards(p, l);
    for (uint32_t k = 0; k < l->n; k++) {
        uint32_t at = p->shard_at[row_shard(l->v[k].row_id, p->cfg.n_shards)]++;
        e->row_id[at] = l->v[k].row_id;
        e->slot[at] = l->v[k].slot;
        e->version[at] = l->v[k].version;
    }
}

static void fill_samples(const struct planner *p, size_t first_look_up, struct plan *pl)
{
    const struct draft *d = &p->draft;
    if (pl->n_samples == 0) return;
    size_t F = p->cfg.n_tables, features = p->cfg.dense_features, first = first_look_up / F;
    memcpy(pl->dense, d->dense + first * features, pl->n_samples * features * sizeof(*pl->dense));
    memcpy(pl->label, d->label + first, pl->n_samples * sizeof(*pl->label));
    memcpy(pl->slot, d->slot + first_look_up, pl->n_samples * F * sizeof(*pl->slot));
}

static void fill_plan(struct planner *p, uint32_t t, size_t first_look_up, struct plan *pl)
{
    const struct draft *d = &p->draft;
    fill_samples(p, first_look_up, pl);
    fill_fetch(p, &d->fetch[t], &pl->fetch);
    if (d->evict != NULL) fill_evict(p, &d->evict[t], &pl->evict);
    for (uint32_t k = 0; k < pl->n_eval_copy; k++) {
        pl->eval_from[k] = d->copy[t].v[k].from;
        pl->eval_to[k] = d->copy[t].v[k].to;
    }
    for (uint32_t peer = 0; peer < pl->n_peers; peer++) {
        const struct exchange *out = exchange_at(p, t, peer), *in = exchange_at(p, peer, t);
        fill_grads(out->grad, true, &pl->peer[peer].grad_send);
        fill_grads(in->grad, false, &pl->peer[peer].grad_recv);
        fill_values(out->value, true, &pl->peer[peer].value_send);
        fill_values(in->value, false, &pl->peer[peer].value_recv);
    }
}

static enum st cut_plan(struct planner *p, uint32_t t, struct plan **out)
{
    const struct draft *d = &p->draft;
    struct plan *pl = mem_zalloc(1, sizeof(*pl));
    if (pl == NULL) return ST_NOMEM;
    size_t lo, hi;
    look_ups_of(p, t, d->n, &lo, &hi);
    pl->seq = p->seq;
    pl->kind = d->kind;
    pl->iteration = d->iteration;
    pl->settled = settled_at(p, d->iteration);
    pl->batch_total = d->n;
    pl->eval_last = d->eval_last;
    pl->n_samples = (uint32_t)((hi - lo) / p->cfg.n_tables);
    pl->fetch.n = d->fetch[t].n;
    pl->evict.n = d->evict == NULL ? 0 : d->evict[t].n;
    pl->n_peers = p->cfg.n_trainers;
    pl->eval_rows = d->eval_rows[t];
    pl->n_eval_copy = d->copy[t].n;

    struct carver c = {NULL, 0};
    lay_out(p, t, &c, pl);
    pl->arena = mem_alloc(c.used, 1);
    if (pl->arena == NULL) {
        mem_free(pl);
        return ST_NOMEM;
    }
    c = (struct carver){pl->arena, 0};
    lay_out(p, t, &c, pl);
    fill_plan(p, t, lo, pl);
    *out = pl;
    return ST_OK;
}

/* Every trainer's plan of the draft. */
static enum st cut_plans(struct planner *p, struct plan **out)
{
    struct plan *made[MAX_TRAINERS];
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        enum st st = cut_plan(p, t, &made[t]);
        if (st == ST_OK) continue;
        while (t-- > 0) plan_close(made[t]);
        return st;
    }
    memcpy(out, made, p->cfg.n_trainers * sizeof(struct plan *));
    p->seq++;
    return ST_OK;
}

static void draft_evicts(struct planner *p, int64_t i)
{
    p->draft.evict = p->placement[i & 1].evict;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) p->stats.write_backs += p->draft.evict[t].n;
}

enum st build_train(struct planner *p, int64_t i, struct plan **out)
{
    const struct batch *b = batch_at(p, i);
    const struct placement *m = &p->placement[i & 1], *next = &p->placement[(i + 1) & 1];
    draft_begin(p, PLAN_TRAIN, i);
    p->draft.n = b->n;
    p->draft.dense = b->dense;
    p->draft.label = b->label;
    draft_slots(p, b, m);
    draft_evicts(p, i);
    enum st st;
    TRY(draft_fetches(p, b, m), err);
    TRY(draft_grads(p, i, b, m), err);
    if (i + 1 < p->pushed) TRY(draft_values(p, i, batch_at(p, i + 1), next), err);
    return cut_plans(p, out);

err:
    return st;
}

enum st build_flush(struct planner *p, int64_t i, struct plan **out)
{
    draft_begin(p, PLAN_FLUSH, i);
    draft_evicts(p, i);
    return cut_plans(p, out);
}

/* --- evaluation ----------------------------------------------------------------------------- */

/* Where a row is before boundary `pulled`, although that boundary is decided already. */
static uint8_t placed_before(const struct planner *p, const struct row *r, uint32_t *slot)
{
    bool before = !p->flushed && r->moved_at == p->pulled;
    *slot = before ? r->old_slot : r->slot;
    return before ? r->old_owner : r->owner;
}

/* Trainer t gets row `id` into its scratch row `to`. */
static enum st draft_source(struct planner *p, uint32_t t, uint64_t id, uint32_t to)
{
    uint32_t at = idmap_get(&p->index, id), slot = NONE;
    uint8_t owner = NO_OWNER;
    if (at != NONE) owner = placed_before(p, &p->row[at], &slot);
    if (owner == NO_OWNER) {
        int64_t need = at == NONE ? PLAN_NEED_SETTLED : p->row[at].written;
        return fetch_add(p, t, (struct item){id, need, to, 0});
    }
    struct move_list *l = owner == t ? &p->draft.copy[t] : &exchange_at(p, owner, t)->value[URGENT];
    return move_add(l, (struct move){slot, to, 0});
}

static enum st draft_eval_rows(struct planner *p, uint32_t t)
{
    struct draft *d = &p->draft;
    memset(p->eval_row, 0xff, p->n_distinct * sizeof(*p->eval_row));
    size_t lo, hi;
    look_ups_of(p, t, d->n, &lo, &hi);
    for (size_t k = lo; k < hi; k++) {
        uint32_t at = p->eval_look_up[k];
        if (p->eval_row[at] == NONE) {
            p->eval_row[at] = d->eval_rows[t]++;
            enum st st = draft_source(p, t, p->distinct[at].id, p->eval_row[at]);
            if (st != ST_OK) return st;
        }
        d->slot[k] = p->eval_row[at];
    }
    return ST_OK;
}

enum st build_eval(struct planner *p, const struct samples *s, int last, struct plan **out)
{
    enum st st;
    draft_begin(p, PLAN_EVAL, p->pulled);
    p->draft.n = s->n;
    p->draft.eval_last = last != 0;
    p->draft.dense = s->dense;
    p->draft.label = s->label;
    TRY(window_distinct(p, s, p->eval_look_up), err);
    uint32_t *v = room(p->eval_row, &p->cap_eval_row, p->n_distinct, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    p->eval_row = v;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) TRY(draft_eval_rows(p, t), err);
    return cut_plans(p, out);

err:
    return st;
}
