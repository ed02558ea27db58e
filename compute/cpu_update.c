/* compute/cpu_update.c - optimizer steps, in f32, one rounding an operation (-ffp-contract=off).
 * A gradient that is not finite stops before it is written anywhere (I5). */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "compute/cpu.h"

enum { DENSE_PIECE = 1 << 15 }; /* floats; a multiple of any vector: pieces change no bit */
enum { AHEAD = 16, LINE_FLOATS = 16 };

/* By the exponent's bits: integer work that goes sixteen at a time. */
static int all_finite(size_t n, const float *g)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, g + i, sizeof(bits));
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return !bad;
}

static void sgd(size_t n, float lr, const float *restrict g, float *restrict w)
{
    for (size_t i = 0; i < n; i++) w[i] -= lr * g[i];
}

static void adagrad(size_t n, float lr, float eps, const float *restrict g, float *restrict w,
                    float *restrict state)
{
    for (size_t i = 0; i < n; i++) {
        state[i] += g[i] * g[i];
        w[i] -= lr * g[i] / (sqrtf(state[i]) + eps);
    }
}

/* One number of state for the row: the mean of squares, summed in ascending order. */
static void rowwise(uint32_t D, float lr, float eps, const float *restrict g, float *restrict w,
                    float *restrict state)
{
    float squares = 0.0f;
    for (uint32_t j = 0; j < D; j++) squares += g[j] * g[j];
    *state += squares / (float)D;
    float below = sqrtf(*state) + eps;
    for (uint32_t j = 0; j < D; j++) w[j] -= lr * g[j] / below;
}

struct gradients { const float *g; atomic_bool bad; };

static void look_at_range(void *ctx, size_t lo, size_t hi)
{
    struct gradients *a = ctx;
    if (!all_finite(hi - lo, a->g + lo)) /* relaxed: the end of the call orders it */
        atomic_store_explicit(&a->bad, true, memory_order_relaxed);
}

/* Before anything is written: two passes, but the second finds the gradients in a cache. */
static bool any_bad(struct device *d, size_t n, const float *g)
{
    struct gradients a = {.g = g};
    cpu_over(d, n, DENSE_PIECE, look_at_range, &a);
    return atomic_load_explicit(&a.bad, memory_order_relaxed);
}

/* Number of the first row that has a gradient that is not finite; one has. */
static uint32_t first_bad(uint32_t D, const float *grad)
{
    uint32_t i = 0;
    while (all_finite(D, grad + (size_t)i * D)) i++;
    return i;
}

struct row_step { const struct opt_step *o; float *table; uint32_t stride, D;
                  const uint32_t *slot; const float *grad; };

/* Records lie anywhere in memory: they are asked for AHEAD of their turn. */
static void row_range(void *ctx, size_t lo, size_t hi)
{
    const struct row_step *r = ctx;
    const struct opt_step *o = r->o;
    for (size_t i = lo; i < hi; i++) {
        const float *g = r->grad + i * r->D;
        float *row = r->table + (size_t)r->slot[i] * r->stride;
        if (i + AHEAD < hi) {
            const float *ahead = r->table + (size_t)r->slot[i + AHEAD] * r->stride;
            for (uint32_t k = 0; k < r->stride; k += LINE_FLOATS) __builtin_prefetch(ahead + k, 1);
        }
        switch (o->kind) {
        case OPT_SGD: sgd(r->D, o->learning_rate, g, row); break;
        case OPT_ADAGRAD: adagrad(r->D, o->learning_rate, o->epsilon, g, row, row + r->D); break;
        case OPT_ROWWISE_ADAGRAD:
            rowwise(r->D, o->learning_rate, o->epsilon, g, row, row + r->D);
            break;
        }
    }
}

enum st cpu_row_update(struct device *d, const struct opt_step *o, float *table, uint32_t stride,
                       uint32_t D, const uint32_t *slot, const float *grad, uint32_t n)
{
    struct device_fault *fault = &cpu_of(d)->fault;
    struct row_step r = {o, table, stride, D, slot, grad};
    if (fault->dense || fault->row) return ST_OK;
    if (any_bad(d, (size_t)n * D, grad))
        *fault = (struct device_fault){.row = true, .slot = slot[first_bad(D, grad)]};
    else
        cpu_over(d, n, CPU_PIECE, row_range, &r);
    return ST_OK;
}

struct dense_step { const struct opt_step *o; float *w, *state; const float *grad; };

static void dense_range(void *ctx, size_t lo, size_t hi)
{
    const struct dense_step *s = ctx;
    const struct opt_step *o = s->o;
    if (o->kind == OPT_SGD)
        sgd(hi - lo, o->learning_rate, s->grad + lo, s->w + lo);
    else
        adagrad(hi - lo, o->learning_rate, o->epsilon, s->grad + lo, s->w + lo, s->state + lo);
}

enum st cpu_dense_update(struct device *d, const struct opt_step *o, float *w, float *state,
                         const float *grad, size_t n)
{
    struct device_fault *fault = &cpu_of(d)->fault;
    struct dense_step s = {o, w, state, grad};
    if (fault->dense || fault->row) return ST_OK;
    if (any_bad(d, n, grad))
        fault->dense = true;
    else
        cpu_over(d, n, DENSE_PIECE, dense_range, &s);
    return ST_OK;
}
