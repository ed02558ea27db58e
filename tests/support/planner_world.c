#include "tests/support/planner_world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/row.h"
#include "base/tree.h"

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
    bool flushed;
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

/* --- small things --------------------------------------------------------------------------- */

static uint64_t mix(uint64_t a, uint64_t b)
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

__attribute__((format(printf, 3, 4)))
static void bad(struct world *w, enum world_fault fault, const char *fmt, ...)
{
    if (w->fault != FAULT_NONE) return;
    w->fault = fault;
    int n = snprintf(w->why, sizeof(w->why), "step %lld: ", (long long)w->iteration);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->why + n, sizeof(w->why) - (size_t)n, fmt, ap);
    va_end(ap);
}

static uint32_t row_of(const struct world *w, uint64_t id)
{
    return row_table(id) * w->c->table_rows + (uint32_t)row_number(id);
}
static uint64_t first_value(uint64_t row)
{
    return mix(row, 12345);
}
static int64_t next_use(const struct world *w, int64_t i, uint32_t row)
{
    return w->next_use[(size_t)i * w->n_rows + row];
}
static uint64_t slices_of(const struct world *w, int64_t i, uint32_t row)
{
    return w->slices[(size_t)i * w->n_rows + row];
}
/* What `slices` add to the gradient of a row that they read as `value` at iteration i. */
static uint64_t gradient(uint64_t value, int64_t i, uint64_t slices)
{
    uint64_t total = 0;
    for (; slices != 0; slices &= slices - 1)
        total += mix(value, (uint64_t)i * 64 + (uint64_t)__builtin_ctzll(slices));
    return total;
}
/* NULL and a fault if the cache has no such slot. */
static struct held *held_at(struct world *w, uint32_t t, uint32_t slot)
{
    static struct held nothing;
    if (slot < w->cap) return &w->rank[t].held[slot];
    bad(w, FAULT_SLOT, "trainer %u has no slot %u", t, slot);
    nothing = (struct held){0};
    return &nothing;
}
static uint64_t sample_slices(const struct world *w, uint32_t b)
{
    return UINT64_C(1) << (b / (w->c->cfg.global_batch / w->c->cfg.slices));
}

/* --- open, close ---------------------------------------------------------------------------- */

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

/* --- what plans look like ------------------------------------------------------------------- */

static int64_t settled(const struct world *w)
{
    int64_t bound = w->iteration - (int64_t)w->c->cfg.remember;
    return bound < 0 ? 0 : bound;
}

/* Samples of the step that are trainer t's. */
static void samples_of(const struct world *w, uint32_t t, uint32_t n, uint32_t *lo, uint32_t *hi)
{
    uint32_t q = w->c->cfg.global_batch / w->c->cfg.slices;
    *lo = w->rank[t].lo * q < n ? w->rank[t].lo * q : n;
    *hi = w->rank[t].hi * q < n ? w->rank[t].hi * q : n;
}

static void check_header(struct world *w, const struct plan *pl, enum plan_kind kind, uint32_t n)
{
    if (pl->kind != kind || pl->seq != w->next_seq || pl->iteration != w->iteration ||
        pl->settled != settled(w) || pl->batch_total != n || pl->n_peers != w->N)
        bad(w, FAULT_SAMPLES, "a field at the head of the plan is wrong");
}

static void check_samples(struct world *w, uint32_t t, const struct plan *pl,
                          const struct samples *s)
{
    uint32_t lo, hi, features = w->c->cfg.dense_features;
    samples_of(w, t, s->n, &lo, &hi);
    if (pl->n_samples != hi - lo) bad(w, FAULT_SAMPLES, "trainer %u: number of samples", t);
    else if (memcmp(pl->label, s->label + lo, (hi - lo) * sizeof(float)) != 0 ||
             (features > 0 && hi > lo &&
              memcmp(pl->dense, s->dense + (size_t)lo * features,
                     (size_t)(hi - lo) * features * sizeof(float)) != 0))
        bad(w, FAULT_SAMPLES, "trainer %u has other samples", t);
}

static void check_shards(struct world *w, uint32_t n, const uint64_t *id)
{
    for (uint32_t k = 1; k < n; k++)
        if (row_shard(id[k - 1], w->c->cfg.n_shards) > row_shard(id[k], w->c->cfg.n_shards))
            bad(w, FAULT_LISTS, "not grouped by shard");
}

static void check_pair(struct world *w, struct plan **pl, uint32_t from, uint32_t to)
{
    const struct plan_peer *a = &pl[from]->peer[to], *b = &pl[to]->peer[from];
    if (a->grad_send.n != b->grad_recv.n || a->grad_send.n_urgent != b->grad_recv.n_urgent ||
        a->value_send.n != b->value_recv.n || a->value_send.n_urgent != b->value_recv.n_urgent)
        bad(w, FAULT_LISTS, "%u to %u: lengths differ", from, to);
    else if (memcmp(a->grad_send.node, b->grad_recv.node, a->grad_send.n) != 0)
        bad(w, FAULT_LISTS, "%u to %u: nodes differ", from, to);
    if (from == to && a->grad_send.n + a->grad_recv.n + a->value_send.n + a->value_recv.n > 0)
        bad(w, FAULT_LISTS, "trainer %u talks to itself", from);
}

static void check_lists(struct world *w, struct plan **pl)
{
    for (uint32_t t = 0; t < w->N; t++) {
        check_shards(w, pl[t]->fetch.n, pl[t]->fetch.row_id);
        check_shards(w, pl[t]->evict.n, pl[t]->evict.row_id);
        for (uint32_t o = 0; o < w->N; o++) check_pair(w, pl, t, o);
    }
}

/* --- gradients ------------------------------------------------------------------------------ */

/* Part of trainer t's gradient of iteration i at `slot` that lies in node `pos` of its run. */
static uint64_t node_slices(struct world *w, uint32_t t, const struct used *u, uint8_t pos)
{
    struct tree_node node[TREE_MAX_NODES];
    uint32_t n = tree_nodes(w->rank[t].lo, w->rank[t].hi, w->c->cfg.slices, node);
    for (uint32_t k = 0; k < n; k++)
        if (node[k].pos == pos) return u->slices & tree_node_mask(node[k]);
    bad(w, FAULT_GRADIENT, "trainer %u has no node %u", t, pos);
    return 0;
}

static void add_part(struct world *w, struct sum *s, uint64_t id, uint64_t slices, uint64_t part)
{
    if (slices == 0) bad(w, FAULT_GRADIENT, "row %llu: an empty part", (unsigned long long)id);
    if (s->active && s->id != id) bad(w, FAULT_GRADIENT, "parts of two rows meet");
    if ((s->slices & slices) != 0)
        bad(w, FAULT_GRADIENT, "row %llu: a part comes twice", (unsigned long long)id);
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
        const struct held *h = held_at(w, to, in->slot[k]);
        held_at(w, from, out->slot[k]);
        if (w->fault != FAULT_NONE) return;
        const struct used *u = &w->rank[from].used[i & 1][out->slot[k]];
        uint64_t slices = node_slices(w, from, u, out->node[k]);
        if (!h->used || !h->owner || h->id != u->id)
            bad(w, FAULT_GRADIENT, "a gradient goes to slot %u of trainer %u, which has not the row",
                in->slot[k], to);
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
                bad(w, FAULT_GRADIENT, "a sum is left for a row that is gone");
            if (s->slices != slices_of(w, i, row_of(w, s->id)))
                bad(w, FAULT_GRADIENT, "row %llu: a part is missing", (unsigned long long)s->id);
            h->value = mix(h->value, s->total);
            h->version = i;
            *s = (struct sum){0};
        }
}

/* Exchange and apply the deferred gradients of iteration i. */
static void finish_deferred(struct world *w, int64_t i)
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

static void urgent_grads(struct world *w, int64_t i)
{
    for (uint32_t t = 0; t < w->N; t++) add_own_parts(w, i, t);
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t o = 0; o < w->N && w->fault == FAULT_NONE; o++) {
            const struct plan_grads *g = &w->plan[i & 1][t]->peer[o].grad_send;
            const struct plan_grads *in = &w->plan[i & 1][o]->peer[t].grad_recv;
            move_grads(w, i, t, o, 0, g->n_urgent);
            w->seen->grads_urgent += g->n_urgent;
            for (uint32_t k = in->n_urgent; k < in->n && w->fault == FAULT_NONE; k++)
                if (held_at(w, o, in->slot[k])->used)
                    w->rank[o].sum[i & 1][in->slot[k]].deferred =
                        w->rank[o].sum[i & 1][in->slot[k]].active = true,
                    w->rank[o].sum[i & 1][in->slot[k]].id = w->rank[o].held[in->slot[k]].id;
        }
    if (w->fault == FAULT_NONE) apply(w, i, false);
    w->open_deferred[i & 1] = true;
}

/* --- values --------------------------------------------------------------------------------- */

static void send_values(struct world *w, int64_t i, uint32_t from, uint32_t to, bool deferred)
{
    const struct plan_values *out = &w->plan[i & 1][from]->peer[to].value_send;
    const struct plan_values *in = &w->plan[i & 1][to]->peer[from].value_recv;
    for (uint32_t k = deferred ? out->n_urgent : 0; k < (deferred ? out->n : out->n_urgent); k++) {
        const struct held *h = held_at(w, from, out->slot[k]);
        if (in->slot[k] >= w->cap) bad(w, FAULT_SLOT, "a value for no slot");
        if (w->fault != FAULT_NONE) return;
        struct staged *s = &w->rank[to].staged[in->slot[k]];
        if (!h->used || !h->owner) bad(w, FAULT_READ, "a value comes from a slot without owner");
        if (s->used) bad(w, FAULT_SLOT, "two values for one slot");
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
                bad(w, FAULT_READ, "a deferred value changed under way");
        }
}

/* --- boundary ------------------------------------------------------------------------------- */

static void write_back(struct world *w, uint32_t t, const struct plan *pl, uint32_t k)
{
    struct held *h = held_at(w, t, pl->evict.slot[k]);
    uint32_t row = row_of(w, pl->evict.row_id[k]);
    if (!h->used || !h->owner || h->id != pl->evict.row_id[k])
        bad(w, FAULT_WRITE_BACK, "trainer %u writes row %u from slot %u, but does not own it", t, row,
            pl->evict.slot[k]);
    if (pl->evict.version[k] != w->last_use[row])
        bad(w, FAULT_WRITE_BACK, "row %u: wrong version", row);
    if (h->version != w->last_use[row] || h->value != w->truth[row])
        bad(w, FAULT_WRITE_BACK, "row %u: a stale record is written", row);
    if (w->server[row].version >= pl->evict.version[k])
        bad(w, FAULT_WRITE_BACK, "row %u is written twice", row);
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

static bool need_is_right(const struct world *w, uint32_t row, int64_t need, int64_t bound)
{
    const struct at_server *s = &w->server[row];
    if (need != PLAN_NEED_SETTLED) return need >= 0 && s->version == need;
    return s->version < bound &&
           (s->version < 0 || s->boundary <= w->iteration - (int64_t)w->c->cfg.remember);
}

static bool ample(const struct world *w)
{
    return w->c->cfg.cap_rows >= w->c->working_set + w->n_rows;
}

static void fetch(struct world *w, uint32_t t, const struct plan *pl, uint32_t k)
{
    struct held *h = held_at(w, t, pl->fetch.slot[k]);
    uint32_t row = row_of(w, pl->fetch.row_id[k]);
    if (!need_is_right(w, row, pl->fetch.need[k], pl->settled))
        bad(w, FAULT_NEED, "row %u: need %lld, server has %lld", row, (long long)pl->fetch.need[k],
            (long long)w->server[row].version);
    if (h->used) bad(w, FAULT_SLOT, "trainer %u: slot %u is taken", t, pl->fetch.slot[k]);
    if (ample(w) && w->last_use[row] >= 0 &&
        w->iteration <= w->last_use[row] + (int64_t)w->c->cfg.lookahead)
        bad(w, FAULT_WINDOW, "row %u left although the window knew its next use", row);
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
        if (w->rank[t].held[slot].used) bad(w, FAULT_SLOT, "trainer %u: slot %u is taken", t, slot);
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
            bad(w, FAULT_WINDOW, "row %u has %u owners", row, w->owners[row]);
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

/* --- steps ---------------------------------------------------------------------------------- */

static void look_up(struct world *w, uint32_t t, const struct samples *s)
{
    int64_t i = w->iteration;
    const struct plan *pl = w->plan[i & 1][t];
    uint32_t lo, hi, F = w->c->cfg.n_tables;
    samples_of(w, t, s->n, &lo, &hi);
    memset(w->rank[t].used[i & 1], 0, w->cap * sizeof(struct used));
    for (uint32_t k = 0; k < (hi - lo) * F && w->fault == FAULT_NONE; k++) {
        uint64_t id = s->id[(size_t)lo * F + k];
        const struct held *h = held_at(w, t, pl->slot[k]);
        if (!h->used || h->id != id) bad(w, FAULT_READ, "look-up %u finds another row", k);
        else if (h->value != w->truth[row_of(w, id)])
            bad(w, FAULT_READ, "row %u is read stale", row_of(w, id));
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
        w->truth[row] = mix(w->truth[row], gradient(w->truth[row], i, slices));
        w->last_use[row] = i;
    }
}

static void check_final(struct world *w)
{
    for (uint32_t t = 0; t < w->N; t++)
        for (uint32_t slot = 0; slot < w->cap; slot++)
            if (w->rank[t].held[slot].used) bad(w, FAULT_FINAL, "a row is left in a cache");
    for (uint32_t row = 0; row < w->n_rows; row++)
        if (w->server[row].value != w->truth[row] || w->server[row].version != w->last_use[row])
            bad(w, FAULT_FINAL, "row %u: the server has not its last value", row);
}

static void train(struct world *w, int64_t i)
{
    const struct samples *s = &w->c->batch[i];
    for (uint32_t t = 0; t < w->N; t++) check_samples(w, t, w->plan[i & 1][t], s);
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
    finish_deferred(w, i - 2);
    for (uint32_t t = 0; t < w->N; t++) {
        plan_close(w->plan[i & 1][t]);
        w->plan[i & 1][t] = plans[t];
        check_header(w, plans[t], flush ? PLAN_FLUSH : PLAN_TRAIN,
                     flush ? 0 : w->c->batch[i].n);
    }
    w->next_seq++;
    check_lists(w, w->plan[i & 1]);
    if (w->fault != FAULT_NONE) return;
    boundary(w);
    if (w->fault != FAULT_NONE) return;
    if (flush) check_final(w);
    else train(w, i);
    w->flushed = flush;
}

/* --- evaluation ----------------------------------------------------------------------------- */

struct scratch { bool used; uint64_t id, value; };

static void put(struct world *w, struct scratch *s, uint32_t n, uint32_t to, uint64_t id,
                uint64_t value)
{
    if (to >= n || s[to].used) bad(w, FAULT_EVAL, "scratch row %u is filled twice or not there", to);
    else s[to] = (struct scratch){true, id, value};
}

static void put_held(struct world *w, struct scratch *s, uint32_t n, uint32_t to, uint32_t from,
                     uint32_t slot)
{
    const struct held *h = held_at(w, from, slot);
    if (!h->used || !h->owner) bad(w, FAULT_EVAL, "slot %u of trainer %u has no row", slot, from);
    else put(w, s, n, to, h->id, h->value);
}

static void eval_sources(struct world *w, uint32_t t, struct plan **pl, struct scratch *s)
{
    uint32_t n = pl[t]->eval_rows;
    for (uint32_t k = 0; k < pl[t]->fetch.n; k++) {
        uint32_t row = row_of(w, pl[t]->fetch.row_id[k]);
        if (!need_is_right(w, row, pl[t]->fetch.need[k], pl[t]->settled) || pl[t]->fetch.owned[k])
            bad(w, FAULT_EVAL, "row %u: fetch asks for another version", row);
        put(w, s, n, pl[t]->fetch.slot[k], pl[t]->fetch.row_id[k], w->server[row].value);
    }
    for (uint32_t k = 0; k < pl[t]->n_eval_copy; k++)
        put_held(w, s, n, pl[t]->eval_to[k], t, pl[t]->eval_from[k]);
    for (uint32_t o = 0; o < w->N; o++) {
        const struct plan_values *in = &pl[t]->peer[o].value_recv;
        const struct plan_values *out = &pl[o]->peer[t].value_send;
        if (in->n_urgent != in->n || pl[t]->peer[o].grad_send.n != 0)
            bad(w, FAULT_EVAL, "evaluation defers or sends gradients");
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
    samples_of(w, t, batch->n, &lo, &hi);
    for (uint32_t k = 0; k < (hi - lo) * F && w->fault == FAULT_NONE; k++) {
        uint64_t id = batch->id[(size_t)lo * F + k];
        uint32_t at = pl[t]->slot[k];
        if (at >= pl[t]->eval_rows || !s[at].used || s[at].id != id ||
            s[at].value != w->truth[row_of(w, id)])
            bad(w, FAULT_EVAL, "row %u is not what it is now", row_of(w, id));
    }
    free(s);
}

void world_eval(struct world *w, const struct samples *batch, int last, struct plan **plans)
{
    finish_deferred(w, w->iteration - 2);
    finish_deferred(w, w->iteration - 1);
    for (uint32_t t = 0; t < w->N; t++) {
        check_header(w, plans[t], PLAN_EVAL, batch->n);
        check_samples(w, t, plans[t], batch);
        if (plans[t]->evict.n != 0 || plans[t]->eval_last != (uint32_t)last)
            bad(w, FAULT_EVAL, "evaluation writes, or does not know its end");
    }
    w->next_seq++;
    check_lists(w, plans);
    for (uint32_t t = 0; t < w->N && w->fault == FAULT_NONE; t++) eval_trainer(w, t, plans, batch);
    for (uint32_t t = 0; t < w->N; t++) plan_close(plans[t]);
}
