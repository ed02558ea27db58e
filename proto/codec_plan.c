/* proto/codec_plan.c - plans. Encoding points the generated structs at the plan's own arrays.
 * Decoding checks everything a trainer relies on without looking again, and copies all arrays into
 * one arena. */
#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "base/tree.h"
#include "proto/codec.h"
#include "proto/codec_impl.h"
#include "proto/oracle.pb-c.h"

_Static_assert((int)PLAN_TRAIN == CHANTER__PLAN_REPLY__KIND__TRAIN &&
               (int)PLAN_EVAL == CHANTER__PLAN_REPLY__KIND__EVAL &&
               (int)PLAN_FLUSH == CHANTER__PLAN_REPLY__KIND__FLUSH, "kinds as on the wire");

/* --- writing ------------------------------------------------------------------------------- */

struct peer_out {
    Chanter__PlanPeer peer;
    Chanter__PlanGrads grad_send, grad_recv;
    Chanter__PlanValues value_send, value_recv;
};

static Chanter__PlanGrads grads_out(const struct plan_grads *g)
{
    Chanter__PlanGrads m = CHANTER__PLAN_GRADS__INIT;
    m.n_urgent = g->n_urgent;
    m.n_slot = g->n;
    m.slot = g->slot;
    m.node = (ProtobufCBinaryData){g->n, g->node};
    return m;
}

static Chanter__PlanValues values_out(const struct plan_values *v)
{
    Chanter__PlanValues m = CHANTER__PLAN_VALUES__INIT;
    m.n_urgent = v->n_urgent;
    m.n_slot = v->n;
    m.slot = v->slot;
    return m;
}

static void peer_out_fill(const struct plan_peer *p, struct peer_out *o)
{
    o->grad_send = grads_out(&p->grad_send);
    o->grad_recv = grads_out(&p->grad_recv);
    o->value_send = values_out(&p->value_send);
    o->value_recv = values_out(&p->value_recv);
    o->peer = (Chanter__PlanPeer)CHANTER__PLAN_PEER__INIT;
    o->peer.grad_send = &o->grad_send;
    o->peer.grad_recv = &o->grad_recv;
    o->peer.value_send = &o->value_send;
    o->peer.value_recv = &o->value_recv;
}

static Chanter__PlanFetch fetch_out(const struct plan_fetch *f)
{
    Chanter__PlanFetch m = CHANTER__PLAN_FETCH__INIT;
    m.n_row_id = m.n_slot = m.n_need = f->n;
    m.row_id = f->row_id;
    m.slot = f->slot;
    m.need = f->need;
    m.owned = (ProtobufCBinaryData){f->n, f->owned};
    return m;
}

static Chanter__PlanEvict evict_out(const struct plan_evict *e)
{
    Chanter__PlanEvict m = CHANTER__PLAN_EVICT__INIT;
    m.n_row_id = m.n_slot = m.n_version = e->n;
    m.row_id = e->row_id;
    m.slot = e->slot;
    m.version = e->version;
    return m;
}

/* The generated structs behind one reply. */
struct plan_out {
    Chanter__Header head;
    Chanter__PlanFetch fetch;
    Chanter__PlanEvict evict;
    Chanter__PlanReply reply;
};

static void plan_out_fill(const struct rpc_header *h, const struct plan *p, struct plan_out *o)
{
    o->head = codec_header(h);
    o->fetch = fetch_out(&p->fetch);
    o->evict = evict_out(&p->evict);
    Chanter__PlanReply *m = &o->reply;
    *m = (Chanter__PlanReply)CHANTER__PLAN_REPLY__INIT;
    m->header = &o->head;
    m->seq = p->seq;
    m->kind = (Chanter__PlanReply__Kind)p->kind;
    m->iteration = p->iteration;
    m->settled = p->settled;
    m->batch_total = p->batch_total;
    m->eval_last = p->eval_last != 0;
    m->n_samples = p->n_samples;
    m->eval_rows = p->eval_rows;
    m->fetch = &o->fetch;
    m->evict = &o->evict;
    m->n_eval_from = m->n_eval_to = p->n_eval_copy;
    m->eval_from = p->eval_from;
    m->eval_to = p->eval_to;
    m->label = p->label;
    m->dense = p->dense;
    m->slot = p->slot;
}

enum st plan_encode(const struct rpc_header *h, const struct plan_limits *lim,
                    const struct plan *plan, struct msg **out)
{
    struct plan_out o;
    plan_out_fill(h, plan, &o);
    o.reply.n_label = plan->n_samples;
    o.reply.n_dense = (size_t)plan->n_samples * lim->dense_features;
    o.reply.n_slot = (size_t)plan->n_samples * lim->n_tables;

    enum st st = ST_NOMEM;
    struct peer_out *peer = mem_alloc(plan->n_peers, sizeof(*peer));
    Chanter__PlanPeer **list = mem_alloc(plan->n_peers, sizeof(*list));
    if (peer == NULL || list == NULL) {
        log_fail(st, NULL, "no memory to encode a plan");
        goto out;
    }
    for (uint32_t i = 0; i < plan->n_peers; i++) {
        peer_out_fill(&plan->peer[i], &peer[i]);
        list[i] = &peer[i].peer;
    }
    o.reply.n_peer = plan->n_peers;
    o.reply.peer = list;
    st = codec_pack(&o.reply.base, 0, out);

out:
    mem_free(list);
    mem_free(peer);
    return st;
}

/* --- reading: do the lists fit together? --------------------------------------------------- */

/* All parts are there, also empty ones: plan_encode writes them. */
static bool grads_lists_ok(const Chanter__PlanGrads *g)
{
    return g != NULL && g->node.len == g->n_slot && g->n_urgent <= g->n_slot;
}

static bool values_lists_ok(const Chanter__PlanValues *v)
{
    return v != NULL && v->n_urgent <= v->n_slot;
}

static bool peer_lists_ok(const Chanter__PlanPeer *p)
{
    return grads_lists_ok(p->grad_send) && grads_lists_ok(p->grad_recv) &&
           values_lists_ok(p->value_send) && values_lists_ok(p->value_recv);
}

static bool lists_ok(const Chanter__PlanReply *m, const struct plan_limits *lim)
{
    const Chanter__PlanFetch *f = m->fetch;
    if (f == NULL || f->n_slot != f->n_row_id || f->n_need != f->n_row_id ||
        f->owned.len != f->n_row_id)
        return false;
    const Chanter__PlanEvict *e = m->evict;
    if (e == NULL || e->n_slot != e->n_row_id || e->n_version != e->n_row_id) return false;

    if (m->n_peer != lim->n_trainers || m->n_eval_from != m->n_eval_to) return false;
    for (size_t i = 0; i < m->n_peer; i++)
        if (!peer_lists_ok(m->peer[i])) return false;
    /* u32 times u32: no overflow in size_t. */
    return m->n_label == m->n_samples &&
           m->n_dense == (size_t)m->n_samples * lim->dense_features &&
           m->n_slot == (size_t)m->n_samples * lim->n_tables;
}

/* --- reading: into one arena --------------------------------------------------------------- */

/* Filled twice: with base == NULL to learn the size, then for real. */
struct arena { uint8_t *base; size_t used; };

static void *arena_take(struct arena *a, size_t bytes)
{
    void *p = a->base == NULL ? NULL : a->base + a->used;
    a->used += (bytes + 63) / 64 * 64;
    return p;
}

static void *arena_copy(struct arena *a, const void *from, size_t n, size_t size)
{
    void *to = arena_take(a, n * size);
    if (to != NULL && n > 0) memcpy(to, from, n * size);
    return to;
}
#define ARENA_COPY(a, from, n) arena_copy((a), (from), (n), sizeof(*(from)))

static struct plan_grads grads_in(const Chanter__PlanGrads *g, struct arena *a)
{
    return (struct plan_grads){.n = (uint32_t)g->n_slot, .n_urgent = g->n_urgent,
                               .slot = ARENA_COPY(a, g->slot, g->n_slot),
                               .node = ARENA_COPY(a, g->node.data, g->node.len)};
}

static struct plan_values values_in(const Chanter__PlanValues *v, struct arena *a)
{
    return (struct plan_values){.n = (uint32_t)v->n_slot, .n_urgent = v->n_urgent,
                                .slot = ARENA_COPY(a, v->slot, v->n_slot)};
}

static struct plan_fetch fetch_in(const Chanter__PlanFetch *f, struct arena *a)
{
    return (struct plan_fetch){.n = (uint32_t)f->n_row_id,
                               .row_id = ARENA_COPY(a, f->row_id, f->n_row_id),
                               .slot = ARENA_COPY(a, f->slot, f->n_slot),
                               .need = ARENA_COPY(a, f->need, f->n_need),
                               .owned = ARENA_COPY(a, f->owned.data, f->owned.len)};
}

static struct plan_evict evict_in(const Chanter__PlanEvict *e, struct arena *a)
{
    return (struct plan_evict){.n = (uint32_t)e->n_row_id,
                               .row_id = ARENA_COPY(a, e->row_id, e->n_row_id),
                               .slot = ARENA_COPY(a, e->slot, e->n_slot),
                               .version = ARENA_COPY(a, e->version, e->n_version)};
}

static void peers_in(const Chanter__PlanReply *m, struct arena *a, struct plan *p)
{
    p->n_peers = (uint32_t)m->n_peer;
    p->peer = arena_take(a, m->n_peer * sizeof(*p->peer));
    for (size_t i = 0; i < m->n_peer; i++) {
        const Chanter__PlanPeer *from = m->peer[i];
        struct plan_peer peer = {.grad_send = grads_in(from->grad_send, a),
                                 .grad_recv = grads_in(from->grad_recv, a),
                                 .value_send = values_in(from->value_send, a),
                                 .value_recv = values_in(from->value_recv, a)};
        if (p->peer != NULL) p->peer[i] = peer;
    }
}

static void plan_in(const Chanter__PlanReply *m, struct arena *a, struct plan *p)
{
    *p = (struct plan){.seq = m->seq, .kind = (enum plan_kind)m->kind, .iteration = m->iteration,
                       .settled = m->settled, .batch_total = m->batch_total,
                       .eval_last = m->eval_last != 0, .n_samples = m->n_samples,
                       .eval_rows = m->eval_rows, .n_eval_copy = (uint32_t)m->n_eval_from};
    p->dense = ARENA_COPY(a, m->dense, m->n_dense);
    p->label = ARENA_COPY(a, m->label, m->n_label);
    p->slot = ARENA_COPY(a, m->slot, m->n_slot);
    p->fetch = fetch_in(m->fetch, a);
    p->evict = evict_in(m->evict, a);
    peers_in(m, a, p);
    p->eval_from = ARENA_COPY(a, m->eval_from, m->n_eval_from);
    p->eval_to = ARENA_COPY(a, m->eval_to, m->n_eval_to);
    p->arena = a->base;
}

static enum st plan_copy(const Chanter__PlanReply *m, struct plan **out)
{
    struct plan *p = mem_alloc(1, sizeof(*p));
    if (p == NULL) goto err;
    struct arena a = {NULL, 0};
    plan_in(m, &a, p);
    a.base = mem_alloc(1, a.used);
    if (a.base == NULL) goto err_plan;
    a.used = 0;
    plan_in(m, &a, p);
    *out = p;
    return ST_OK;

err_plan:
    mem_free(p);
err:
    return log_fail(ST_NOMEM, NULL, "no memory for a plan");
}

/* --- reading: does every number mean something? -------------------------------------------- */

static bool below(const uint32_t *slot, size_t n, uint64_t limit)
{
    for (size_t i = 0; i < n; i++)
        if (slot[i] >= limit) return false;
    return true;
}

static bool row_ids_ok(const uint64_t *row_id, uint32_t n, uint32_t n_tables)
{
    for (uint32_t i = 0; i < n; i++)
        if (row_table(row_id[i]) >= n_tables) return false;
    return true;
}

static bool fetch_ok(const struct plan_fetch *f, const struct plan_limits *lim, bool eval,
                     uint64_t rows)
{
    for (uint32_t i = 0; i < f->n; i++)
        if (f->need[i] < PLAN_NEED_SETTLED || f->owned[i] > (eval ? 0 : 1)) return false;
    return below(f->slot, f->n, rows) && row_ids_ok(f->row_id, f->n, lim->n_tables);
}

static bool evict_ok(const struct plan_evict *e, const struct plan_limits *lim)
{
    for (uint32_t i = 0; i < e->n; i++)
        if (e->version[i] < 0) return false;
    return below(e->slot, e->n, lim->cap_rows) && row_ids_ok(e->row_id, e->n, lim->n_tables);
}

static bool grads_ok(const struct plan_grads *g, uint64_t rows)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->node[i] >= TREE_MAX_SLICES) return false;
    return below(g->slot, g->n, rows);
}

/* Values are always sent from the cache; an evaluation receives them into scratch rows. */
static bool peer_ok(const struct plan_peer *p, const struct plan_limits *lim, uint64_t rows)
{
    return grads_ok(&p->grad_send, rows) && grads_ok(&p->grad_recv, rows) &&
           below(p->value_send.slot, p->value_send.n, lim->cap_rows) &&
           below(p->value_recv.slot, p->value_recv.n, rows);
}

/* An evaluation writes nothing (I7), defers nothing, and fills its scratch rows. */
static bool eval_ok(const struct plan *p, const struct plan_limits *lim)
{
    uint64_t filled = (uint64_t)p->fetch.n + p->n_eval_copy;
    for (uint32_t i = 0; i < p->n_peers; i++) {
        const struct plan_peer *q = &p->peer[i];
        if (q->grad_send.n != 0 || q->grad_recv.n != 0) return false;
        if (q->value_send.n_urgent != q->value_send.n) return false;
        if (q->value_recv.n_urgent != q->value_recv.n) return false;
        filled += q->value_recv.n;
    }
    return p->evict.n == 0 && p->eval_rows <= filled &&
           below(p->eval_from, p->n_eval_copy, lim->cap_rows) &&
           below(p->eval_to, p->n_eval_copy, p->eval_rows);
}

static bool contents_ok(const struct plan *p, const struct plan_limits *lim)
{
    bool eval = p->kind == PLAN_EVAL;
    uint64_t rows = eval ? p->eval_rows : lim->cap_rows;
    if (p->kind < PLAN_TRAIN || p->kind > PLAN_FLUSH) return false;
    if (p->iteration < 0 || p->n_samples > p->batch_total) return false;
    if (p->kind == PLAN_FLUSH && p->n_samples != 0) return false;
    if (eval && !eval_ok(p, lim)) return false;
    if (!eval && (p->eval_rows != 0 || p->n_eval_copy != 0 || p->eval_last != 0)) return false;
    if (!below(p->slot, (size_t)p->n_samples * lim->n_tables, rows)) return false;
    if (!fetch_ok(&p->fetch, lim, eval, rows) || !evict_ok(&p->evict, lim)) return false;
    for (uint32_t i = 0; i < p->n_peers; i++)
        if (!peer_ok(&p->peer[i], lim, rows)) return false;
    return true;
}

enum st plan_decode(const uint8_t *p, size_t n, const struct plan_limits *lim,
                    struct rpc_header *h, struct plan **out)
{
    if (n > UINT32_MAX) return ST_BADMSG; /* so that every list's length fits in u32 */
    struct rpc_header header;
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__plan_reply__descriptor, p, n, &header, &base);
    if (st != ST_OK) return st;
    const Chanter__PlanReply *m = (const Chanter__PlanReply *)base;
    struct plan *plan = NULL;
    st = lists_ok(m, lim) ? plan_copy(m, &plan) : ST_BADMSG;
    codec_free(base);
    if (st != ST_OK) return st;
    if (!contents_ok(plan, lim)) {
        plan_close(plan);
        return ST_BADMSG;
    }
    *h = header;
    *out = plan;
    return ST_OK;
}
