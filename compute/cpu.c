/* compute/cpu.c - the CPU as a device: memory, loss, and the table of functions. Matrix products
 * are hand-made (cpu_gemm.c) or oneDNN's (cpu_bf16.c); all else is C that the compiler turns into
 * vector code. */
#include "compute/cpu.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

/* From this size on, memory comes as whole huge pages: they halve the cost of a random row, and
 * weights and activations on small pages cost a product up to a sixth of its speed. */
enum { MAP_BYTES = 512 << 10 };

static size_t whole_pages(size_t bytes)
{
    if (bytes > SIZE_MAX - MEM_HUGE_BYTES) return bytes;
    return (bytes + MEM_HUGE_BYTES - 1) / MEM_HUGE_BYTES * MEM_HUGE_BYTES;
}

static void *cpu_alloc(struct device *d, size_t bytes)
{
    (void)d;
    return bytes < MAP_BYTES ? mem_zalloc(1, bytes) : mem_map(whole_pages(bytes));
}

static void cpu_free(struct device *d, void *p, size_t bytes)
{
    (void)d;
    if (bytes < MAP_BYTES)
        mem_free(p);
    else
        mem_unmap(p, whole_pages(bytes));
}

/* --- order: everything is done when its call returns ---------------------------------------- */

static enum st cpu_parallel(struct device *d, uint32_t n_tasks, device_task *fn, void *ctx)
{
    return lanes_run(cpu_of(d)->lanes, n_tasks, fn, ctx);
}

static enum st cpu_repeat(struct device *d, void **graph, enum st (*fn)(void *ctx), void *ctx)
{
    (void)d;
    (void)graph;
    return fn(ctx);
}

static void cpu_graph_free(struct device *d, void *graph)
{
    (void)d;
    (void)graph;
}

static enum st cpu_wait(struct device *d, uint64_t mark)
{
    (void)d;
    (void)mark;
    return ST_OK;
}

static enum st cpu_fault(struct device *d, struct device_fault *out)
{
    *out = cpu_of(d)->fault;
    return ST_OK;
}

struct over { cpu_range *fn; void *ctx; size_t n, piece; };

static enum st over_task(void *ctx, uint32_t lane, uint32_t task)
{
    struct over *o = ctx;
    (void)lane;
    size_t lo = task * o->piece, hi = lo + o->piece;
    o->fn(o->ctx, lo, hi < o->n ? hi : o->n);
    return ST_OK;
}

void cpu_over(struct device *d, size_t n, size_t piece, cpu_range *fn, void *ctx)
{
    struct over o = {fn, ctx, n, piece};
    enum st st = lanes_run(cpu_of(d)->lanes, (uint32_t)((n + piece - 1) / piece), over_task, &o);
    CHECK(st == ST_OK, "no task fails");
}

/* --- bytes ------------------------------------------------------------------------------------ */

static enum st cpu_copy(struct device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    if (bytes > 0) memcpy(to, from, bytes);
    return ST_OK;
}

static enum st cpu_copy_out(struct device *d, const void *from, void *host, size_t bytes,
                            uint64_t *mark)
{
    if (mark != NULL) *mark = 0;
    return cpu_copy(d, host, from, bytes);
}

static size_t cpu_free_bytes(struct device *d)
{
    (void)d;
    return mem_available();
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
    lanes_close(cpu_of(d)->lanes);
    cpu_linear_close(cpu_of(d)->linear);
    mem_free(d);
}

static const struct device_ops CPU_OPS = {
    .name = "cpu",
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_alloc = cpu_alloc,
    .host_free = cpu_free,
    .free_bytes = cpu_free_bytes,
    .parallel = cpu_parallel,
    .repeat = cpu_repeat,
    .graph_free = cpu_graph_free,
    .wait = cpu_wait,
    .fault = cpu_fault,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy_out,
    .rows_put = cpu_rows_put,
    .rows_get = cpu_rows_get,
    .rows_copy = cpu_rows_copy,
    .weight_floats = cpu_weight_floats,
    .prepared_bytes = cpu_prepared_bytes,
    .weight_put = cpu_weight_put,
    .weight_get = cpu_weight_get,
    .prepare = cpu_prepare,
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
    struct cpu *c = mem_zalloc(1, sizeof(*c));
    if (c == NULL) goto err;
    c->base = (struct device){&CPU_OPS, cfg->lanes, 1, true};
    enum st st = cpu_linear_open(cfg, &c->linear); /* has said why */
    if (st != ST_OK) {
        mem_free(c);
        return st;
    }
    if (lanes_open(cfg->lanes, &c->lanes) != ST_OK) goto err_linear;
    *out = &c->base;
    return ST_OK;

err_linear: cpu_linear_close(c->linear);
            mem_free(c);
err:        return log_fail(ST_NOMEM, "cpu device", "out of memory; free some");
}
