#include "tests/support/planner_world_internal.h"

#include <string.h>

/* --- gradients -------------------------------------------------------------------------------- */

/* What `slices` add to the gradient of a row that they read as `value` at iteration i. */
static uint64_t gradient(uint64_t value, int64_t i, uint64_t slices)
{
    uint64_t total = 0;
    for (; slices != 0; slices &= slices - 1)
        total += world_mix(value, (uint64_t)i * 64 + (uint64_t)__builtin_ctzll(slices));
    return total;
}

/* Part of trainer t's gradient of iteration i at `slot` that lies in node `pos` of its run. */
static uint64_t node_slices(struct world *w, uint32_t t, const struct used *u, uint8_t pos)
{
    struct tree_node node[TREE_MAX_NODES];
    uint32_t n = tree_nodes(w->rank[t].lo, w->rank[t].hi, w->c->cfg.slices, node);
    for (uint32_t k = 0; k < n; k++)
        if (node[k].pos == pos) return u->slices & tree_node_mask(node[k]);
    world_bad(w, FAULT_GRADIENT, "trainer %u has no node %u", t, pos);
    return 0;
}

static void add_part(struct world *w, struct sum *s, uint64_t id, uint64_t slices, uint64_t part)
{
    if (slices == 0)
        world_bad(w, FAULT_GRADIENT, "row %llu: an empty part", (unsigned long long)id);
    if (s->active && s->id != id)
        world_bad(w, FAULT_GRADIENT, "parts of two rows meet");
    if ((s->slices & slices) != 0)
        world_bad(w, FAULT_GRADIENT, "row %llu: a part comes twice", (unsigned long long)id);
    s->active = true;
    s->id = id;
    s->slices |= slices;
    s->total += part;
}

/* Vectors [lo, hi) of what `from` sends to `to`, of iteration i. */
static void move_grads(struct world *w, int64_t i, uint32_t from, uint32_t to, uint32_t lo,
                       uint32_t hi)
{
    const struct plan_grads *out = &w->plan[i & 1][from]->peer[to].grad_send;
    const struct plan_grads *in = &w->plan[i & 1][to]->peer[from].grad_recv;
    for (uint32_t k = lo; k < hi && w->fault == FAULT_NONE; k++) {
        const struct held *h = world_held(w, to, in->slot[k]);
        world_held(w, from, out->slot[k]);
        if (w->fault != FAULT_NONE) return;
        const struct used *u = &w->rank[from].used[i & 1][out->slot[k]];
        uint64_t slices = node_slices(w, from, u, out->node[k]);
        if (!h->used || !h->owner || h->id != u->id)
            world_bad(w, FAULT_GRADIENT, "trainer %u: slot %u has not the gradient's row", to,
                      in->slot[k]);
        add_part(w, &w->rank[to].sum[i & 1][in->slot[k]], u->id, slices,
                 gradient(u->value, i, slices));
    }
}

/* Optimizer step of iteration i for the rows whose sums are in. */
static void apply(struct world *w, int64_t i, bool deferred)
{
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++) {
            struct sum *s = &w->rank[t].sum[i & 1][slot];
            struct held *h = &w->rank[t].held[slot];
            if (!s->active || s->deferred != deferred) continue;
            if (!h->used || !h->owner || h->id != s->id)
                world_bad(w, FAULT_GRADIENT, "a sum is left for a row that is gone");
            if (s->slices != slices_of(w, i, row_of(w, s->id)))
                world_bad(w, FAULT_GRADIENT, "row %u: a part is missing", row_of(w, s->id));
            h->value = world_mix(h->value, s->total);
            h->version = i;
            *s = (struct sum){0};
        }
}

void world_finish_deferred(struct world *w, int64_t i)
{
    if (i < 0 || !w->open_deferred[i & 1]) return;
    w->open_deferred[i & 1] = false;
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t o = 0; o < w->N; o++) {
            const struct plan_grads *g = &w->plan[i & 1][t]->peer[o].grad_send;
            move_grads(w, i, t, o, g->n_urgent, g->n);
            w->seen->grads_deferred += g->n - g->n_urgent;
        }
    apply(w, i, true);
}

/* Trainer t's own parts, for the rows that it owns: whatever it does not send away. */
static void add_own_parts(struct world *w, int64_t i, uint32_t t)
{
    struct rank *k = &w->rank[t];
    for (uint32_t slot = 0; slot < w->cap; slot++) {
        const struct used *u = &k->used[i & 1][slot];
        if (u->slices == 0 || !k->held[slot].owner) continue;
        add_part(w, &k->sum[i & 1][slot], u->id, u->slices, gradient(u->value, i, u->slices));
    }
}

/* Sums whose parts come later wait for them. */
static void mark_deferred(struct world *w, int64_t i, uint32_t t, const struct plan_grads *in)
{
    for (uint32_t k = in->n_urgent; k < in->n; k++) {
        const struct held *h = world_held(w, t, in->slot[k]);
        if (w->fault != FAULT_NONE) return;
        struct sum *s = &w->rank[t].sum[i & 1][in->slot[k]];
        s->active = s->deferred = true;
        s->id = h->id;
    }
}

static void urgent_grads(struct world *w, int64_t i)
{
    for (uint32_t t = 0; t < w->N; t++) add_own_parts(w, i, t);
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t o = 0; o < w->N && w->fault == FAULT_NONE; o++) {
            const struct plan_grads *g = &w->plan[i & 1][t]->peer[o].grad_send;
            const struct plan_grads *in = &w->plan[i & 1][o]->peer[t].grad_recv;
            move_grads(w, i, t, o, 0, g->n_urgent);
            w->seen->grads_urgent += g->n_urgent;
            mark_deferred(w, i, o, in);
        }
    if (w->fault == FAULT_NONE) apply(w, i, false);
    w->open_deferred[i & 1] = true;
}

/* --- values ----------------------------------------------------------------------------------- */

static void send_values(struct world *w, int64_t i, uint32_t from, uint32_t to, bool deferred)
{
    const struct plan_values *out = &w->plan[i & 1][from]->peer[to].value_send;
    const struct plan_values *in = &w->plan[i & 1][to]->peer[from].value_recv;
    for (uint32_t k = deferred ? out->n_urgent : 0; k < (deferred ? out->n : out->n_urgent); k++) {
        const struct held *h = world_held(w, from, out->slot[k]);
        if (in->slot[k] >= w->cap) world_bad(w, FAULT_SLOT, "a value for no slot");
        if (w->fault != FAULT_NONE) return;
        struct staged *s = &w->rank[to].staged[in->slot[k]];
        if (!h->used || !h->owner)
            world_bad(w, FAULT_READ, "a value comes from a slot without owner");
        if (s->used) world_bad(w, FAULT_SLOT, "two values for one slot");
        *s = (struct staged){true, deferred, h->id, h->value, from, out->slot[k]};
        *(deferred ? &w->seen->values_deferred : &w->seen->values_urgent) += 1;
    }
}

static void send_all_values(struct world *w, int64_t i, bool deferred)
{
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t o = 0; o < w->N; o++) send_values(w, i, t, o, deferred);
}

/* A deferred value is sent at any moment of the iteration: its row must not change meanwhile. */
static void check_deferred_values(struct world *w)
{
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++) {
            const struct staged *s = &w->rank[t].staged[slot];
            if (!s->used || !s->deferred) continue;
            const struct held *h = &w->rank[s->rank].held[s->slot];
            if (h->id != s->id || h->value != s->value)
                world_bad(w, FAULT_READ, "a deferred value changed under way");
        }
}

/* --- boundary --------------------------------------------------------------------------------- */

static void write_back(struct world *w, uint32_t t, const struct plan *pl, uint32_t k)
{
    struct held *h = world_held(w, t, pl->evict.slot[k]);
    uint32_t row = row_of(w, pl->evict.row_id[k]);
    if (!h->used || !h->owner || h->id != pl->evict.row_id[k])
        world_bad(w, FAULT_WRITE_BACK, "trainer %u, slot %u: written but not owned", t,
                  pl->evict.slot[k]);
    if (pl->evict.version[k] != w->last_use[row])
        world_bad(w, FAULT_WRITE_BACK, "row %u: wrong version", row);
    if (h->version != w->last_use[row] || h->value != w->truth[row])
        world_bad(w, FAULT_WRITE_BACK, "row %u: a stale record is written", row);
    if (w->server[row].version >= pl->evict.version[k])
        world_bad(w, FAULT_WRITE_BACK, "row %u is written twice", row);
    w->server[row] = (struct at_server){h->value, pl->evict.version[k], w->iteration};
    *h = (struct held){0};

    int64_t next = next_use(w, w->iteration, row);
    uint64_t slices = slices_of(w, w->last_use[row] < 0 ? 0 : w->last_use[row], row);
    w->seen->write_backs++;
    w->seen->shared_evictions += (slices & (slices - 1)) != 0;
    w->seen->refetched_at_once += next == w->iteration && w->c->cfg.lookahead > 0;
    w->seen->capacity_evictions +=
        next != INT64_MAX && next <= w->last_use[row] + (int64_t)w->c->cfg.lookahead;
}

static bool ample(const struct world *w)
{
    return w->c->cfg.cap_rows >= w->c->working_set + w->n_rows;
}

static void fetch(struct world *w, uint32_t t, const struct plan *pl, uint32_t k)
{
    struct held *h = world_held(w, t, pl->fetch.slot[k]);
    uint32_t row = row_of(w, pl->fetch.row_id[k]);
    if (!world_need_is_right(w, row, pl->fetch.need[k], pl->settled))
        world_bad(w, FAULT_NEED, "row %u: need %lld, server has %lld", row,
                  (long long)pl->fetch.need[k], (long long)w->server[row].version);
    if (h->used) world_bad(w, FAULT_SLOT, "trainer %u: slot %u is taken", t, pl->fetch.slot[k]);
    if (ample(w) && w->last_use[row] >= 0 &&
        w->iteration <= w->last_use[row] + (int64_t)w->c->cfg.lookahead)
        world_bad(w, FAULT_WINDOW, "row %u left although the window knew its next use", row);
    *h = (struct held){true, pl->fetch.owned[k], pl->fetch.row_id[k], w->server[row].value,
                       w->server[row].version};
    if (pl->fetch.need[k] != PLAN_NEED_SETTLED) w->seen->fetches_exact++;
    else if (w->server[row].version >= 0) w->seen->fetches_settled_again++;
}

static void install_staged(struct world *w, uint32_t t)
{
    for (uint32_t slot = 0; slot < w->cap; slot++) {
        struct staged *s = &w->rank[t].staged[slot];
        if (!s->used) continue;
        if (w->rank[t].held[slot].used)
            world_bad(w, FAULT_SLOT, "trainer %u: slot %u is taken", t, slot);
        w->rank[t].held[slot] = (struct held){true, false, s->id, s->value, -1};
        *s = (struct staged){0};
    }
}

/* One owner for each live row; no row is live that the window rule sends away. */
static void check_live(struct world *w)
{
    memset(w->owners, 0, w->n_rows * sizeof(*w->owners));
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++)
            if (w->rank[t].held[slot].owner) w->owners[row_of(w, w->rank[t].held[slot].id)]++;
    for (uint32_t row = 0; row < w->n_rows; row++) {
        int64_t next = next_use(w, w->iteration, row), last = w->last_use[row];
        bool kept = last >= 0 && next != INT64_MAX && next <= last + (int64_t)w->c->cfg.lookahead;
        uint32_t least = next == w->iteration || (ample(w) && kept) ? 1 : 0;
        uint32_t most = next == w->iteration || kept ? 1 : 0;
        if (w->owners[row] < least || w->owners[row] > most)
            world_bad(w, FAULT_WINDOW, "row %u has %u owners", row, w->owners[row]);
    }
}

static void boundary(struct world *w)
{
    struct plan **pl = w->plan[w->iteration & 1];
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t k = 0; k < pl[t]->evict.n && w->fault == FAULT_NONE; k++)
            write_back(w, t, pl[t], k);
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++) /* copies were for one iteration */
            if (!w->rank[t].held[slot].owner) w->rank[t].held[slot].used = false;
    for (uint32_t t = 0; t < w->N; t++) {
        for (uint32_t k = 0; k < pl[t]->fetch.n && w->fault == FAULT_NONE; k++)
            fetch(w, t, pl[t], k);
        install_staged(w, t);
    }
    check_live(w);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void look_up(struct world *w, uint32_t t, const struct samples *s)
{
    int64_t i = w->iteration;
    const struct plan *pl = w->plan[i & 1][t];
    uint32_t lo, hi, F = w->c->cfg.n_tables;
    world_samples_of(w, t, s->n, &lo, &hi);
    memset(w->rank[t].used[i & 1], 0, w->cap * sizeof(struct used));
    for (uint32_t k = 0; k < (hi - lo) * F && w->fault == FAULT_NONE; k++) {
        uint64_t id = s->id[(size_t)lo * F + k];
        const struct held *h = world_held(w, t, pl->slot[k]);
        if (!h->used || h->id != id) world_bad(w, FAULT_READ, "look-up %u finds another row", k);
        else if (h->value != w->truth[row_of(w, id)])
            world_bad(w, FAULT_READ, "row %u is read stale", row_of(w, id));
        if (w->fault != FAULT_NONE) return;
        struct used *u = &w->rank[t].used[i & 1][pl->slot[k]];
        u->id = id;
        u->value = h->value;
        u->slices |= sample_slices(w, lo + k / F);
        w->seen->reads++;
    }
}

/* The one true run: every row that iteration i uses takes its step. */
static void advance_truth(struct world *w, int64_t i)
{
    for (uint32_t row = 0; row < w->n_rows; row++) {
        uint64_t slices = slices_of(w, i, row);
        if (slices == 0) continue;
        w->truth[row] = world_mix(w->truth[row], gradient(w->truth[row], i, slices));
        w->last_use[row] = i;
    }
}

static void check_final(struct world *w)
{
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++)
            if (w->rank[t].held[slot].used)
            world_bad(w, FAULT_FINAL, "a row is left in a cache");
    for (uint32_t row = 0; row < w->n_rows; row++)
        if (w->server[row].value != w->truth[row] || w->server[row].version != w->last_use[row])
            world_bad(w, FAULT_FINAL, "row %u: the server has not its last value", row);
}

static void train(struct world *w, int64_t i)
{
    const struct samples *s = &w->c->batch[i];
    for (uint32_t t = 0; t < w->N; t++) world_check_samples(w, t, w->plan[i & 1][t], s);
    if (w->fault != FAULT_NONE) return;
    send_all_values(w, i, true);
    for (uint32_t t = 0; t < w->N; t++) look_up(w, t, s);
    if (w->fault != FAULT_NONE) return;
    urgent_grads(w, i);
    advance_truth(w, i);
    send_all_values(w, i, false);
    check_deferred_values(w);
    w->iteration++;
}

void world_step(struct world *w, struct plan **plans)
{
    int64_t i = w->iteration;
    bool flush = i == w->c->n_batches;
    world_finish_deferred(w, i - 2);
    for (uint32_t t = 0; t < w->N; t++) {
        plan_close(w->plan[i & 1][t]);
        w->plan[i & 1][t] = plans[t];
        world_check_header(w, plans[t], flush ? PLAN_FLUSH : PLAN_TRAIN,
                     flush ? 0 : w->c->batch[i].n);
    }
    w->next_seq++;
    world_check_lists(w, w->plan[i & 1]);
    if (w->fault != FAULT_NONE) return;
    boundary(w);
    if (w->fault != FAULT_NONE) return;
    if (flush) check_final(w);
    else train(w, i);
}
