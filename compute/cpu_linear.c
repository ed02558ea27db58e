/* compute/cpu_linear.c - fully connected layers; the only file with oneDNN. Its plain sgemm is
 * within a few points of its tuned primitives here, needs no weights in a private layout and no
 * object per shape. The layer with one output is a matrix times a vector, which sgemm does at a
 * tenth of the speed: by hand.
 *
 * I1: a product's bits may depend on its shape and leading dimensions, which a slice fixes, but not
 * on threads. oneDNN splits a product over as many threads as OpenMP offers the caller, so each
 * calling thread offers it one, whatever OMP_NUM_THREADS says; parallelism is over slices. */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include "base/log.h"
#include "compute/cpu.h"
#include "compute/cpu_vec.h"

/* C (m,n) = op(A) op(B), row-major, op by 'N' or 'T'. Overwrites C, whatever was there. */
static enum st sgemm(char ta, char tb, uint32_t m, uint32_t n, uint32_t k, const float *a,
                     uint32_t lda, const float *b, uint32_t ldb, float *c, uint32_t ldc)
{
    static _Thread_local int alone; /* has this thread told OpenMP? The setting is per thread. */
    if (!alone) {
        omp_set_num_threads(1);
        alone = 1;
    }
    dnnl_status_t s = dnnl_sgemm(ta, tb, m, n, k, 1.0f, a, lda, b, ldb, 0.0f, c, ldc);
    if (s == dnnl_success) return ST_OK;
    return log_fail(s == dnnl_out_of_memory ? ST_NOMEM : ST_DEVICE, "cpu device",
                    "oneDNN refuses a product of %u x %u x %u: status %d", m, n, k, (int)s);
}

/* 0 only where y is really negative: a NaN stays, so that it reaches the loss (I5). */
static inline float relu_of(float y)
{
    return y < 0.0f ? 0.0f : y;
}

static void add_bias(uint32_t B, uint32_t N, const float *restrict b, int relu, float *restrict y,
                     uint32_t ldy)
{
    for (uint32_t i = 0; i < B; i++, y += ldy) {
        if (relu)
            for (uint32_t n = 0; n < N; n++) y[n] = relu_of(y[n] + b[n]);
        else
            for (uint32_t n = 0; n < N; n++) y[n] += b[n];
    }
}

/* Sixteen running sums over k, folded; then what is left over, one by one. */
static float dot(uint32_t K, const float *restrict x, const float *restrict w)
{
    vec acc = {0};
    uint32_t k = 0;
    for (; k + LANES <= K; k += LANES) acc += vec_load(x + k) * vec_load(w + k);
    float sum = vec_sum(&acc);
    for (; k < K; k++) sum += x[k] * w[k];
    return sum;
}

static void forward_one(uint32_t B, uint32_t K, const float *x, const float *w, float b, int relu,
                        float *y, uint32_t ldy)
{
    for (size_t i = 0; i < B; i++) {
        float z = dot(K, x + i * K, w) + b;
        y[i * ldy] = relu ? relu_of(z) : z;
    }
}

static void backward_one(uint32_t B, uint32_t K, const float *restrict x, const float *restrict w,
                         const float *restrict dy, uint32_t ldy, float *restrict dw,
                         float *restrict dx)
{
    for (uint32_t k = 0; k < K; k++) dw[k] = dy[0] * x[k];
    for (size_t i = 1; i < B; i++)
        for (uint32_t k = 0; k < K; k++) dw[k] += dy[i * ldy] * x[i * K + k];
    if (dx == NULL) return;
    for (size_t i = 0; i < B; i++)
        for (uint32_t k = 0; k < K; k++) dx[i * K + k] = dy[i * ldy] * w[k];
}

size_t cpu_weight_floats(struct device *d, uint32_t K, uint32_t N)
{
    (void)d;
    return (size_t)K * N;
}

size_t cpu_prepared_bytes(struct device *d, uint32_t K, uint32_t N)
{
    (void)d;
    (void)K;
    (void)N;
    return 0;
}

enum st cpu_weight_put(struct device *d, uint32_t K, uint32_t N, const float *host, float *w)
{
    (void)d;
    memcpy(w, host, (size_t)K * N * sizeof(*w));
    return ST_OK;
}

enum st cpu_weight_get(struct device *d, uint32_t K, uint32_t N, const float *w, float *host)
{
    (void)d;
    memcpy(host, w, (size_t)K * N * sizeof(*w));
    return ST_OK;
}

enum st cpu_prepare(struct device *d, uint32_t lane, const struct linear *l)
{
    (void)d;
    (void)lane;
    (void)l;
    return ST_OK;
}

enum st cpu_linear_forward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                           const float *x, float *y, uint32_t ldy)
{
    (void)d;
    (void)lane;
    uint32_t K = l->K, N = l->N;
    if (N == 1) {
        forward_one(B, K, x, l->w, l->b[0], l->relu, y, ldy);
        return ST_OK;
    }
    enum st st = sgemm('N', 'T', B, N, K, x, K, l->w, K, y, ldy);
    if (st == ST_OK) add_bias(B, N, l->b, l->relu, y, ldy);
    return st;
}

/* Masks dy where ReLU cut y off, and sums it over samples on the way. */
static void mask_and_sum(uint32_t B, uint32_t N, const float *restrict y, uint32_t ldy, int relu,
                         float *restrict dy, float *restrict db)
{
    for (uint32_t i = 0; i < B; i++, y += ldy, dy += ldy) {
        if (relu)
            for (uint32_t n = 0; n < N; n++) dy[n] = y[n] == 0.0f ? 0.0f : dy[n];
        if (i == 0)
            memcpy(db, dy, N * sizeof(*db));
        else
            for (uint32_t n = 0; n < N; n++) db[n] += dy[n];
    }
}

enum st cpu_linear_backward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                            const float *x, const float *y, uint32_t ldy, float *dy, float *dw,
                            float *db, float *dx)
{
    (void)d;
    (void)lane;
    uint32_t K = l->K, N = l->N;
    mask_and_sum(B, N, y, ldy, l->relu, dy, db);
    if (N == 1) {
        backward_one(B, K, x, l->w, dy, ldy, dw, dx);
        return ST_OK;
    }
    enum st st = sgemm('T', 'N', N, K, B, dy, ldy, x, K, dw, K);
    if (st == ST_OK && dx != NULL) st = sgemm('N', 'N', B, K, N, dy, ldy, l->w, K, dx, K);
    return st;
}
