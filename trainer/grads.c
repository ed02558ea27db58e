#include "trainer/grads.h"

#include <string.h>

#include "base/log.h"
#include "base/row.h"

enum st grads_init(struct grads *g, struct device *device, struct lanes *lanes, uint32_t dim,
                   uint64_t cap_rows)
{
    *g = (struct grads){.device = device, .lanes = lanes, .dim = dim};
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
    grow_fini(&g->host);
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
                           enum grads_class class, uint32_t *pick, uint32_t *own_at)
{
    enum st st = grow_reserve(&g->wanted, s->use.n_rows, 1);
    if (st != ST_OK) return st;
    uint8_t *wanted = g->wanted.p;
    st = mark_rows(plan, s, class, wanted);
    const uint32_t *first = s->first_vec.p, *row_slot = group_slots(&s->use);
    const uint8_t *node = s->vec_node.p;
    uint32_t *slot = g->slot.p, n = g->n;
    uint8_t *pos = g->pos.p;
    *own_at = n;
    for (uint32_t r = 0; r < s->use.n_rows && st == ST_OK; r++)
        for (uint32_t v = first[r]; wanted[r] && v < first[r + 1]; v++, n++) {
            slot[n] = row_slot[r];
            pos[n] = node[v];
            pick[n - *own_at] = v;
        }
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
        TRY(g->device->ops->rows_get(g->device, s->vec, D, pick, hi - lo, send, D), err);
        TRY(exchange_add_out(job, p, send, (size_t)(hi - lo) * D * sizeof(float)), err);
        send += (size_t)(hi - lo) * D;
    }
err:
    return st;
}

enum st grads_collect(struct grads *g, const struct plan *plan, uint32_t rank,
                      const struct step *s, enum grads_class class, struct exchange_job *job)
{
    enum st st = ST_OK;
    uint32_t lo, hi, D = g->dim, own_at = 0;
    size_t most = s->n_vecs;
    for (uint32_t p = 0; p < plan->n_peers; p++) most += plan->peer[p].grad_recv.n;
    g->iteration = plan->iteration;
    g->n = 0;
    TRY(grow_reserve(&g->slot, most, sizeof(uint32_t)), err);
    TRY(grow_reserve(&g->pos, most, 1), err);
    TRY(grow_reserve(&g->host, most * D, sizeof(float)), err);
    TRY(pack_sends(g, plan, s, class, job), err);
    TRY(grow_reserve(&g->pick, s->n_vecs, sizeof(uint32_t)), err);
    float *host = g->host.p;
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        if (p == rank) {
            TRY(collect_own(g, plan, s, class, g->pick.p, &own_at), err);
            TRY(g->device->ops->rows_get(g->device, s->vec, D, g->pick.p, g->n - own_at,
                                         host + (size_t)own_at * D, D), err);
            continue;
        }
        class_range(&plan->peer[p].grad_recv, class, &lo, &hi);
        TRY(exchange_add_in(job, p, host + (size_t)g->n * D,
                            (size_t)(hi - lo) * D * sizeof(float)), err);
        append_received(g, &plan->peer[p].grad_recv, class);
    }
err:
    return st;
}

static enum st reserve_device(struct grads *g)
{
    struct device *d = g->device;
    if (g->n <= g->vec_cap) return ST_OK;
    size_t cap = (size_t)g->n + g->n / 4, old = g->vec_cap * g->dim * sizeof(float);
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

enum { ROWS_PER_TASK = 1024 };

static enum st sum_rows(void *ctx, uint32_t lane, uint32_t task)
{
    struct grads *g = ctx;
    struct seg_list list = {g->by_row.n_rows, group_begin(&g->by_row), group_items(&g->by_row)};
    uint32_t lo = task * ROWS_PER_TASK, hi = lo + ROWS_PER_TASK;
    return g->device->ops->tree_sum(g->device, lane, g->vec, g->dim, &list, g->row_pos.p, lo,
                                    hi < list.n ? hi : list.n, g->sum);
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

enum st grads_apply(struct grads *g, const struct opt_step *opt, float *table, uint32_t stride,
                    const uint64_t *slot_row)
{
    enum st st = ST_OK;
    uint32_t bad = 0;
    if (g->n == 0) return ST_OK;
    TRY(reserve_device(g), err);
    TRY(g->device->ops->copy_in(g->device, g->vec, g->host.p,
                                (size_t)g->n * g->dim * sizeof(float)), err);
    TRY(group_rows(g), err);
    uint32_t n_rows = g->by_row.n_rows;
    TRY(lanes_run(g->lanes, (n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, sum_rows, g), err);
    st = g->device->ops->row_update(g->device, opt, table, stride, g->dim,
                                    group_slots(&g->by_row), g->sum, n_rows, &bad);
    if (st == ST_DATA) {
        uint64_t id = slot_row[group_slots(&g->by_row)[bad]];
        log_fail(st, "train", "iteration %lld: the gradient of row %llu of table %u is not finite; "
                 "lower train.learning_rate or look for extreme values in the data",
                 (long long)g->iteration, (unsigned long long)row_number(id), row_table(id));
    }
    g->n = 0;
err:
    return st;
}
