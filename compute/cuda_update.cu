/* compute/cuda_update.cu - optimizer steps, and the sticky fault that stops them (I5). Each update
 * is two kernels: the first looks at all gradients, the second writes unless a fault is there, from
 * this update or from one before.
 *
 * Who writes the fault: `dense` and `first` are for the first kernel of an update, which does
 * nothing once `dense` or `row` is set; `row` is for one thread of a row update's second kernel.
 * `first` is UINT32_MAX minus the row's place, so that 0 is none and the largest is the first row,
 * whatever order threads come in. It stays, so the second kernels need not look at `row`. */
#include "compute/cuda_kernels.h"

#include <math.h>

#include "compute/cuda_kernel.h"
#include "config/config.h"

/* --- is everything finite? ------------------------------------------------------------------ */

struct check_args {
    const float *grad;               /* [n]                                                  */
    size_t n;
    uint32_t D;                      /* floats of a row; 0: dense                            */
    struct cuda_fault *fault;
    int by4;
};

/* By the exponent's bits. */
DEVICE int is_bad(float g)
{
    return (__float_as_uint(g) & 0x7F800000u) == 0x7F800000u;
}

DEVICE void report(const struct check_args *a, size_t i)
{
    if (a->D == 0)
        atomicMax(&a->fault->dense, 1u);
    else
        atomicMax(&a->fault->first, UINT32_MAX - (uint32_t)(i / a->D));
}

KERNEL(check_finite, check_args, a, BLOCK)
{
    float4 g[ROWS_EACH];
    if (a.fault->row != 0 || a.fault->dense != 0) return;
    UNROLL
    for (uint32_t k = 0; k < ROWS_EACH; k++) {
        size_t i = 4 * my_quad(k);
        g[k] = fill4(0.0f);
        if (i >= a.n) continue;
        uint32_t left = a.n - i < 4 ? (uint32_t)(a.n - i) : 4;
        g[k] = load4(a.grad + i, left, a.by4 && left == 4);
    }
    UNROLL
    for (uint32_t k = 0; k < ROWS_EACH; k++) {
        size_t i = 4 * my_quad(k);
        if (is_bad(g[k].x)) report(&a, i);
        if (is_bad(g[k].y)) report(&a, i + 1);
        if (is_bad(g[k].z)) report(&a, i + 2);
        if (is_bad(g[k].w)) report(&a, i + 3);
    }
}

static cudaError_t check(cudaStream_t s, const float *grad, size_t n, uint32_t D,
                         struct cuda_fault *fault)
{
    struct check_args a = {grad, n, D, fault, is_by4(grad, 4, 4)};
    return LAUNCH(s, check_finite, flat_grid((n + 3) / 4), dim(BLOCK, 1), 0, &a);
}

/* --- steps ---------------------------------------------------------------------------------- */

DEVICE float sgd(float w, float g, float lr)
{
    return w - lr * g;
}

/* G += g^2, w -= lr g / (sqrt(G) + eps), for one element. */
DEVICE void adagrad(float *w, float *G, float g, float lr, float eps)
{
    *G += g * g;
    *w -= lr * g / (sqrtf(*G) + eps);
}

DEVICE float4 sgd4(float4 w, float4 g, float lr)
{
    w.x = sgd(w.x, g.x, lr);
    w.y = sgd(w.y, g.y, lr);
    w.z = sgd(w.z, g.z, lr);
    w.w = sgd(w.w, g.w, lr);
    return w;
}

DEVICE void adagrad4(float4 *w, float4 *G, float4 g, float lr, float eps)
{
    adagrad(&w->x, &G->x, g.x, lr, eps);
    adagrad(&w->y, &G->y, g.y, lr, eps);
    adagrad(&w->z, &G->z, g.z, lr, eps);
    adagrad(&w->w, &G->w, g.w, lr, eps);
}

/* --- rows ----------------------------------------------------------------------------------- */

struct rows_args {
    float *table;                    /* records: D values, then state; stride apart          */
    const uint32_t *slot;            /* [n]                                                  */
    const float *grad;               /* (n, D)                                               */
    struct cuda_fault *fault;
    uint32_t n, D, quads, stride;
    float lr, eps;
    int adagrad, by4;
};

/* May this update write? One thread says which row was the first, while all others only look at
 * what no thread of this kernel writes. */
DEVICE int rows_may_step(const struct rows_args *a)
{
    struct cuda_fault *f = a->fault;
    int one = blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0;
    if (one && f->first != 0 && f->row == 0) f->row = 1 + a->slot[UINT32_MAX - f->first];
    return f->first == 0 && f->dense == 0;
}

KERNEL(step_rows, rows_args, a, BLOCK)
{
    if (!rows_may_step(&a)) return;
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        float4 w[ROWS_EACH], g[ROWS_EACH], G[ROWS_EACH];
        float *at[ROWS_EACH];
        uint32_t d = 4 * q, left = a.D - d;
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            at[k] = NULL;
            w[k] = g[k] = G[k] = fill4(0.0f);
            if (i >= a.n) continue;
            at[k] = a.table + (size_t)a.slot[i] * a.stride + d;
            g[k] = load4(a.grad + (size_t)i * a.D + d, left, a.by4);
            w[k] = load4(at[k], left, a.by4);
            if (a.adagrad) G[k] = load4(at[k] + a.D, left, a.by4);
        }
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            if (at[k] == NULL) continue;
            if (a.adagrad) {
                adagrad4(&w[k], &G[k], g[k], a.lr, a.eps);
                store4(at[k] + a.D, left, a.by4, G[k]);
            } else {
                w[k] = sgd4(w[k], g[k], a.lr);
            }
            store4(at[k], left, a.by4, w[k]);
        }
    }
}

/* One number of state for the row, G += mean of squares. Each thread of the row sums up the squares
 * of its quads in order; then each of them adds the sums of all, in order. */
KERNEL_THAT_WAITS(step_rows_rowwise, rows_args, a, BLOCK)
{
    SHARED(float, part);                                     /* [blockDim.y][blockDim.x]      */
    uint32_t i = blockIdx.x * blockDim.y + threadIdx.y;
    float *mine = part + threadIdx.y * blockDim.x, squares = 0.0f, sum = 0.0f;
    if (!rows_may_step(&a)) return; /* all threads alike */
    const float *grad = a.grad + (size_t)i * a.D;
    float *row = i < a.n ? a.table + (size_t)a.slot[i] * a.stride : NULL;
    float G = row != NULL ? row[a.D] : 0.0f;
    for (uint32_t q = threadIdx.x; q < a.quads && row != NULL; q += blockDim.x) {
        float4 g = load4(grad + 4 * q, a.D - 4 * q, a.by4);
        squares += g.x * g.x;
        squares += g.y * g.y;
        squares += g.z * g.z;
        squares += g.w * g.w;
    }
    mine[threadIdx.x] = squares;
    __syncthreads(); /* and every thread of the row has read G */
    if (row == NULL) return;
    for (uint32_t x = 0; x < blockDim.x; x++) sum += mine[x];
    G += sum / (float)a.D;
    float below = sqrtf(G) + a.eps;
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        uint32_t left = a.D - 4 * q;
        float4 g = load4(grad + 4 * q, left, a.by4), w = load4(row + 4 * q, left, a.by4);
        w.x -= a.lr * g.x / below;
        w.y -= a.lr * g.y / below;
        w.z -= a.lr * g.z / below;
        w.w -= a.lr * g.w / below;
        store4(row + 4 * q, left, a.by4, w);
    }
    if (threadIdx.x == 0) row[a.D] = G;
}

cudaError_t cuda_row_update(cudaStream_t s, const struct cuda_opt *o, float *table,
                            uint32_t stride, uint32_t D, const uint32_t *slot, const float *grad,
                            uint32_t n, struct cuda_fault *fault)
{
    struct rows_args a = {table, slot, grad, fault, n, D, quads_of(D), stride, o->learning_rate,
                          o->epsilon, o->kind == (int)OPT_ADAGRAD,
                          is_by4(table, stride, D) && is_by4(grad, D, D)};
    if (n == 0 || D == 0) return cudaSuccess;
    dim3 block = row_block(a.quads);
    cudaError_t e = check(s, grad, (size_t)n * D, D, fault);
    if (e != cudaSuccess) return e;
    if (o->kind != (int)OPT_ROWWISE_ADAGRAD)
        return LAUNCH(s, step_rows, row_grid(n, block), block, 0, &a);
    return LAUNCH(s, step_rows_rowwise, dim(ceil_div(n, block.y), 1), block,
                  block.x * block.y * sizeof(float), &a);
}

/* --- dense weights -------------------------------------------------------------------------- */

struct weights_args {
    float *w, *state;                /* [n]; state for adagrad                               */
    const float *grad;               /* [n]                                                  */
    const struct cuda_fault *fault;
    size_t n;
    float lr, eps;
    int adagrad, by4;
};

KERNEL(step_weights, weights_args, a, BLOCK)
{
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= a.n || a.fault->first != 0 || a.fault->dense != 0) return;
    uint32_t left = a.n - i < 4 ? (uint32_t)(a.n - i) : 4;
    int by4 = a.by4 && left == 4;
    float4 w = load4(a.w + i, left, by4), g = load4(a.grad + i, left, by4);
    if (a.adagrad) {
        float4 G = load4(a.state + i, left, by4);
        adagrad4(&w, &G, g, a.lr, a.eps);
        store4(a.state + i, left, by4, G);
    } else {
        w = sgd4(w, g, a.lr);
    }
    store4(a.w + i, left, by4, w);
}

cudaError_t cuda_dense_update(cudaStream_t s, const struct cuda_opt *o, float *w, float *state,
                              const float *grad, size_t n, struct cuda_fault *fault)
{
    int has_state = o->kind != (int)OPT_SGD;
    struct weights_args a = {w, state, grad, fault, n, o->learning_rate, o->epsilon, has_state,
                             is_by4(w, 4, 4) && is_by4(grad, 4, 4) &&
                                 (!has_state || is_by4(state, 4, 4))};
    if (n == 0) return cudaSuccess;
    cudaError_t e = check(s, grad, n, 0, fault);
    if (e != cudaSuccess) return e;
    return LAUNCH(s, step_weights, dim(ceil_div(n, 4 * BLOCK), 1), dim(BLOCK, 1), 0, &a);
}
