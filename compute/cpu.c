/* compute/cpu.c - the CPU as a device: memory, loss, and the table of functions. Matrix products
 * are oneDNN's (cpu_linear.c); everything else is C that the compiler turns into vector code. */
#include "compute/cpu.h"

#include <math.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

/* From this size on, memory comes as mapped pages: a cache of rows is mostly untouched at first,
 * and huge pages halve the cost of a random row. */
enum { MAP_BYTES = 2 << 20 };

static void *cpu_alloc(struct device *d, size_t bytes)
{
    (void)d;
    return bytes < MAP_BYTES ? mem_zalloc(1, bytes) : mem_map(bytes);
}

static void cpu_free(struct device *d, void *p, size_t bytes)
{
    (void)d;
    if (bytes < MAP_BYTES)
        mem_free(p);
    else
        mem_unmap(p, bytes);
}

static enum st cpu_copy(struct device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    if (bytes > 0) memcpy(to, from, bytes);
    return ST_OK;
}

static enum st cpu_copy_out(struct device *d, const void *from, void *host, size_t bytes)
{
    return cpu_copy(d, host, from, bytes);
}

/* In f64: a logit is one number a sample, and 1 - sigmoid(z) keeps its digits near 0. e^-|z| never
 * overflows. A NaN logit gives a NaN loss through log1p and z y, although max(z, 0) drops it. */
static enum st cpu_bce(struct device *d, uint32_t lane, uint32_t B, const float *logit,
                       const float *label, float scale, float *dlogit, float *loss, float *prob)
{
    (void)d;
    (void)lane;
    double sum = 0.0;
    for (uint32_t b = 0; b < B; b++) {
        double z = (double)logit[b], y = (double)label[b];
        double e = exp(-fabs(z));
        double p = (z >= 0.0 ? 1.0 : e) / (1.0 + e);
        sum += log1p(e) + (z > 0.0 ? z : 0.0) - z * y;
        if (dlogit != NULL) dlogit[b] = (float)((p - y) * (double)scale);
        if (prob != NULL) prob[b] = (float)p;
    }
    *loss = (float)sum;
    return ST_OK;
}

static void cpu_close(struct device *d)
{
    mem_free(d);
}

static const struct device_ops CPU_OPS = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy_out,
    .rows_put = cpu_rows_put,
    .rows_get = cpu_rows_get,
    .linear_forward = cpu_linear_forward,
    .linear_backward = cpu_linear_backward,
    .gather = cpu_gather,
    .interact_forward = cpu_interact_forward,
    .interact_backward = cpu_interact_backward,
    .bce = cpu_bce,
    .row_grads = cpu_row_grads,
    .tree_sum = cpu_tree_sum,
    .dense_sum = cpu_dense_sum,
    .row_update = cpu_row_update,
    .dense_update = cpu_dense_update,
};

enum st cpu_open(const struct device_cfg *cfg, struct device **out)
{
    struct device *d = mem_zalloc(1, sizeof(*d));
    if (d == NULL) return log_fail(ST_NOMEM, "cpu device", "out of memory; free some");
    d->ops = &CPU_OPS;
    d->lanes = cfg->lanes;
    *out = d;
    return ST_OK;
}
