#include "trainer/values.h"

#include <string.h>

void values_fini(struct values *v)
{
    grow_fini(&v->send);
    grow_fini(&v->recv);
    grow_fini(&v->slot);
    v->n = 0;
}

static void class_range(const struct plan_values *l, enum values_class class, uint32_t *lo,
                        uint32_t *n)
{
    *lo = class == VALUES_URGENT ? 0 : l->n_urgent;
    *n = class == VALUES_URGENT ? l->n_urgent : l->n - l->n_urgent;
}

static enum st reserve(struct values *v, const struct plan *plan, enum values_class class,
                       uint32_t D)
{
    enum st st = ST_OK;
    uint32_t lo, n, n_send = 0, n_recv = 0;
    for (uint32_t p = 0; p < plan->n_peers; p++) {
        class_range(&plan->peer[p].value_send, class, &lo, &n);
        n_send += n;
        class_range(&plan->peer[p].value_recv, class, &lo, &n);
        n_recv += n;
    }
    TRY(grow_reserve(&v->send, (size_t)n_send * D, sizeof(float)), err);
    TRY(grow_reserve(&v->recv, (size_t)n_recv * D, sizeof(float)), err);
    TRY(grow_reserve(&v->slot, n_recv, sizeof(uint32_t)), err);
err:
    return st;
}

enum st values_collect(struct values *v, const struct plan *plan, enum values_class class,
                       struct device *d, const float *table, uint32_t stride, uint32_t D,
                       struct exchange_job *job)
{
    uint32_t lo, n;
    size_t row_bytes = (size_t)D * sizeof(float);
    enum st st = reserve(v, plan, class, D);
    v->n = 0;
    float *send = v->send.p;
    for (uint32_t p = 0; p < plan->n_peers && st == ST_OK; p++) {
        const struct plan_values *out = &plan->peer[p].value_send;
        class_range(out, class, &lo, &n);
        TRY(d->ops->rows_get(d, table, stride, out->slot + lo, n, send, D, NULL), err);
        TRY(exchange_add_out(job, p, send, n * row_bytes), err);
        send += (size_t)n * D;

        const struct plan_values *in = &plan->peer[p].value_recv;
        class_range(in, class, &lo, &n);
        if (n == 0) continue;
        TRY(exchange_add_in(job, p, (float *)v->recv.p + (size_t)v->n * D, n * row_bytes), err);
        memcpy((uint32_t *)v->slot.p + v->n, in->slot + lo, n * sizeof(uint32_t));
        v->n += n;
    }
err:
    return st;
}

enum st values_install(struct values *v, struct device *d, float *table, uint32_t stride,
                       uint32_t D)
{
    uint32_t n = v->n;
    v->n = 0;
    return d->ops->rows_put(d, table, stride, v->slot.p, n, v->recv.p, D);
}
