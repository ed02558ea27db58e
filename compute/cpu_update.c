/* compute/cpu_update.c - optimizer steps, in f32, one rounding an operation (-ffp-contract=off).
 * A gradient that is not finite stops before it is written anywhere (I5). */
#include <math.h>
#include <string.h>

#include "compute/cpu.h"

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

enum st cpu_row_update(struct device *d, const struct opt_step *o, float *table, uint32_t stride,
                       uint32_t D, const uint32_t *slot, const float *grad, uint32_t n,
                       uint32_t *bad)
{
    (void)d;
    for (uint32_t i = 0; i < n; i++, grad += D) {
        float *row = table + (size_t)slot[i] * stride;
        if (!all_finite(D, grad)) {
            *bad = i;
            return ST_DATA;
        }
        switch (o->kind) {
        case OPT_SGD: sgd(D, o->learning_rate, grad, row); break;
        case OPT_ADAGRAD: adagrad(D, o->learning_rate, o->epsilon, grad, row, row + D); break;
        case OPT_ROWWISE_ADAGRAD:
            rowwise(D, o->learning_rate, o->epsilon, grad, row, row + D);
            break;
        }
    }
    return ST_OK;
}

enum st cpu_dense_update(struct device *d, const struct opt_step *o, float *w, float *state,
                         const float *grad, size_t n)
{
    (void)d;
    if (!all_finite(n, grad)) return ST_DATA;
    if (o->kind == OPT_SGD)
        sgd(n, o->learning_rate, grad, w);
    else
        adagrad(n, o->learning_rate, o->epsilon, grad, w, state);
    return ST_OK;
}
