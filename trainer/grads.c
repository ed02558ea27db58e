#include "trainer/grads.h"

#include <string.h>

#include "base/log.h"

enum st grads_init(struct grads *g, struct device *device, uint32_t dim, uint64_t cap_rows)
{
    *g = (struct grads){.device = device, .dim = dim};
    return group_init(&g->by_row, cap_rows);
}

void grads_fini(struct grads *g)
{
    if (g->device == NULL) return;
    size_t bytes = g->vec_cap * g->dim * sizeof(float);
    g->device->ops->free(g->device, g->vec, bytes);
    g->device->ops->free(g->device, g->sum, bytes);
    group_fini(&g->by_row);
    grow_fini(&g->slot);
    grow_fini(&g->pos);
    grow_fini(&g->row_pos);
    grow_fini(&g->recv);
    grow_fini(&g->count_up);
    grow_fini(&g->send);
    grow_fini(&g->pick);
    grow_fini(&g->wanted);
    *g = (struct grads){0};
}

/* Entries [lo, hi) of a gradient list that are of this class: urgent ones come first. */
static void class_range(const struct plan_grads *l, enum grads_class class, uint32_t *lo,
                        uint32_t *hi)
{
    *lo = class == GRADS_URGENT ? 0 : l->n_urgent;
    *hi = class == GRADS_URGENT ? l->n_urgent : l->n;
}

/* Which of this step's rows are this trainer's own, and of this class? A row is somebody else's
 * when its gradient is sent, deferred when a contribution to it arrives deferred; urgent, which
 * for a row that nobody else used means at once, otherwise. */
static enum st mark_rows(const struct plan *plan, const struct step *s, enum grads_class class,
                         uint8_t *wanted)
{
    memset(wanted, class == GRADS_URGENT, s->use.n_rows);
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        const struct plan_grads *out = &plan->peer[p].grad_send, *in = &plan->peer[p].grad_recv;
        for (uint32_t i = in->n_urgent; i < in->n; i++) {
            uint32_t r = group_find(&s->use, in->slot[i]);
            if (r != GROUP_NONE) wanted[r] = class == GRADS_DEFERRED;
        }
        for (uint32_t i = 0; i < out->n; i++) {
            uint32_t r = group_find(&s->use, out->slot[i]);
            if (r == GROUP_NONE)
                return log_fail(ST_BADMSG, "plan", "iteration %lld sends the gradient of slot %u, "
                                "which it does not use", (long long)plan->iteration, out->slot[i]);
            wanted[r] = 0;
        }
    }
    return ST_OK;
}

/* Append this trainer's own contributions: all vectors of the wanted rows. */
static enum st collect_own(struct grads *g, const struct plan *plan, const struct step *s,
                           enum grads_class class)
{
    enum st st = grow_reserve(&g->wanted, s->use.n_rows, 1);
    if (st != ST_OK) return st;
    uint8_t *wanted = g->wanted.p;
    st = mark_rows(plan, s, class, wanted);
    const uint32_t *first = s->first_vec.p, *row_slot = group_slots(&s->use);
    const uint8_t *node = s->vec_node.p;
    uint32_t *slot = g->slot.p, n = g->n;
    uint8_t *pos = g->pos.p;
    uint32_t *pick = g->pick.p;
    g->own_at = n;
    for (uint32_t r = 0; r < s->use.n_rows && st == ST_OK; r++)
        for (uint32_t v = first[r]; wanted[r] && v < first[r + 1]; v++, n++) {
            slot[n] = row_slot[r];
            pos[n] = node[v];
            pick[n - g->own_at] = v;
        }
    g->own_n = n - g->own_at;
    g->n = n;
    return st;
}

static void append_received(struct grads *g, const struct plan_grads *in, enum grads_class class)
{
    uint32_t lo, hi;
    class_range(in, class, &lo, &hi);
    if (lo == hi) return;
    memcpy((uint32_t *)g->slot.p + g->n, in->slot + lo, (hi - lo) * sizeof(uint32_t));
    memcpy((uint8_t *)g->pos.p + g->n, in->node + lo, hi - lo);
    g->n += hi - lo;
}

static enum st pack_sends(struct grads *g, const struct plan *plan, const struct step *s,
                          enum grads_class class, struct exchange_job *job)
{
    enum st st = ST_OK;
    size_t total = 0;
    uint32_t lo, hi, D = g->dim;
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        class_range(&plan->peer[p].grad_send, class, &lo, &hi);
        total += hi - lo;
    }
    TRY(grow_reserve(&g->send, total * D, sizeof(float)), err);
    TRY(grow_reserve(&g->pick, total, sizeof(uint32_t)), err);
    float *send = g->send.p;
    uint32_t *pick = g->pick.p;
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        const struct plan_grads *out = &plan->peer[p].grad_send;
        class_range(out, class, &lo, &hi);
        for (uint32_t i = lo; i < hi; i++) pick[i - lo] = step_vec(s, out->slot[i], out->node[i]);
        TRY(g->device->ops->rows_get(g->device, s->vec, D, pick, hi - lo, send, D, NULL), err);
        TRY(exchange_add_out(job, p, send, (size_t)(hi - lo) * D * sizeof(float)), err);
        send += (size_t)(hi - lo) * D;
    }
err:
    return st;
}

static enum st reserve_device(struct grads *g, uint32_t n)
{
    struct device *d = g->device;
    if (n <= g->vec_cap) return ST_OK;
    size_t cap = (size_t)n + n / 4, old = g->vec_cap * g->dim * sizeof(float);
    size_t bytes = cap * g->dim * sizeof(float);
    float *vec = d->ops->alloc(d, bytes), *sum = d->ops->alloc(d, bytes);
    if (vec == NULL || sum == NULL) {
        d->ops->free(d, vec, bytes);
        d->ops->free(d, sum, bytes);
        return ST_NOMEM;
    }
    d->ops->free(d, g->vec, old);
    d->ops->free(d, g->sum, old);
    g->vec = vec;
    g->sum = sum;
    g->vec_cap = cap;
    return ST_OK;
}

/* The others' contributions, in rank order around this trainer's own. */
static enum st collect_recv(struct grads *g, const struct plan *plan, uint32_t rank,
                            const struct step *s, enum grads_class class,
                            struct exchange_job *job)
{
    enum st st = ST_OK;
    uint32_t lo, hi, D = g->dim;
    float *recv = g->recv.p;
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        if (p == rank) {
            TRY(collect_own(g, plan, s, class), err);
            continue;
        }
        class_range(&plan->peer[p].grad_recv, class, &lo, &hi);
        TRY(exchange_add_in(job, p, recv, (size_t)(hi - lo) * D * sizeof(float)), err);
        recv += (size_t)(hi - lo) * D;
        append_received(g, &plan->peer[p].grad_recv, class);
    }
err:
    return st;
}

enum st grads_collect(struct grads *g, const struct plan *plan, uint32_t rank,
                      const struct step *s, enum grads_class class, struct exchange_job *job)
{
    enum st st = ST_OK;
    uint32_t D = g->dim;
    size_t others = 0, most;
    for (uint32_t p = 0; p < plan->n_peers; p++) others += plan->peer[p].grad_recv.n;
    most = others + s->n_vecs;
    g->n = 0;
    TRY(grow_reserve(&g->slot, most, sizeof(uint32_t)), err);
    TRY(grow_reserve(&g->pos, most, 1), err);
    TRY(grow_reserve(&g->recv, others * D, sizeof(float)), err);
    TRY(pack_sends(g, plan, s, class, job), err);
    TRY(grow_reserve(&g->pick, s->n_vecs, sizeof(uint32_t)), err);
    TRY(collect_recv(g, plan, rank, s, class, job), err);
    TRY(reserve_device(g, g->n), err);
    TRY(g->device->ops->rows_copy(g->device, s->vec, D, g->pick.p, g->own_n,
                                  g->vec + (size_t)g->own_at * D, D, NULL, D), err);
err:
    return st;
}

/* Bring the contributions to one row together; ranks, and so tree positions, ascend inside it. */
static enum st group_rows(struct grads *g)
{
    enum st st = ST_OK;
    TRY(group_by_slot(&g->by_row, g->slot.p, g->n), err);
    TRY(grow_reserve(&g->row_pos, g->n, 1), err);
    const uint32_t *item = group_items(&g->by_row);
    const uint8_t *pos = g->pos.p;
    uint8_t *row_pos = g->row_pos.p;
    for (uint32_t i = 0; i < g->n; i++) row_pos[i] = pos[item[i]];
err:
    return st;
}

/* What has been received goes around this trainer's own vectors. */
static enum st put_received(struct grads *g)
{
    struct device *d = g->device;
    size_t D = g->dim, row = D * sizeof(float), own_end = (size_t)g->own_at + g->own_n;
    const float *recv = g->recv.p;
    enum st st = d->ops->copy_in(d, g->vec, recv, g->own_at * row);
    if (st != ST_OK) return st;
    return d->ops->copy_in(d, g->vec + own_end * D, recv + g->own_at * D, (g->n - own_end) * row);
}

enum st grads_apply(struct grads *g, const struct opt_step *opt, float *table, uint32_t stride)
{
    enum st st = ST_OK;
    struct device *d = g->device;
    if (g->n == 0) return ST_OK;
    TRY(put_received(g), err);
    TRY(group_rows(g), err);
    struct seg_list list = {g->by_row.n_rows, group_begin(&g->by_row), group_items(&g->by_row)};
    TRY(d->ops->tree_sum(d, g->vec, g->dim, &list, g->row_pos.p, g->sum), err);
    TRY(d->ops->row_update(d, opt, table, stride, g->dim, group_slots(&g->by_row), g->sum, list.n),
        err);
    g->n = 0;
err:
    return st;
}

static enum st count_up(struct grads *g, uint32_t n)
{
    if (n <= g->counted) return ST_OK;
    enum st st = grow_reserve(&g->count_up, n, sizeof(uint32_t));
    if (st != ST_OK) return st;
    g->counted = g->count_up.bytes / sizeof(uint32_t);
    uint32_t *p = g->count_up.p;
    for (size_t i = 0; i < g->counted; i++) p[i] = (uint32_t)i;
    return ST_OK;
}

enum st grads_apply_alone(struct grads *g, const struct step *s, const struct opt_step *opt,
                          float *table, uint32_t stride)
{
    enum st st = ST_OK;
    struct device *d = g->device;
    const float *grad = s->vec;
    if (s->n_vecs != s->use.n_rows) { /* some row has several nodes: slices are not 2^k */
        TRY(count_up(g, s->n_vecs), err);
        TRY(reserve_device(g, s->use.n_rows), err);
        struct seg_list list = {s->use.n_rows, s->first_vec.p, g->count_up.p};
        TRY(d->ops->tree_sum(d, s->vec, g->dim, &list, s->vec_node.p, g->sum), err);
        grad = g->sum;
    }
    TRY(d->ops->row_update(d, opt, table, stride, g->dim, group_slots(&s->use), grad,
                           s->use.n_rows), err);
err:
    return st;
}
