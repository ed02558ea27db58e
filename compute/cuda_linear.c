/* compute/cuda_linear.c - fully connected layers: products (cuda_product.c) and what surrounds them
 * (cuda_dense.cu).
 *
 * cuBLASLt counts columns first: our row-major x (B,K) is its (K,B) with leading dimension K. So
 *
 *   forward  y^T (N,B)  = (w^T (K,N))^T  x^T (K,B)        + b, relu: the epilogue
 *   dw       dw^T (K,N) = x^T (K,B)     (dy^T (N,B))^T
 *   dx       dx^T (K,B) = w^T (K,N)      dy^T (N,B)
 *
 * bf16: factors are narrowed into scratch memory of the lane, rows padded with zeros to multiples
 * of 8 numbers, where 16-byte loads and tensor cores want them; weights by `prepare`. Sums and
 * results are f32. tf32: factors as they are, rounded by the tensor cores. The layer with one
 * output is f32 always: it is bound by memory. */
#include <stdint.h>

#include "base/check.h"
#include "compute/cuda.h"

enum { BF16_PAD = 8, SCRATCH_ALIGN = 256 };

static uint32_t padded(uint32_t n)
{
    return (n + BF16_PAD - 1) / BF16_PAD * BF16_PAD;
}

static bool narrows(const struct cuda_device *d, uint32_t N)
{
    return d->precision == PRECISION_BF16 && N > 1;
}

/* --- scratch memory of a lane --------------------------------------------------------------- */

static size_t scratch_size(size_t n, size_t item)
{
    return (n * item + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
}

/* Twice what is needed each time: SCRATCH_BLOCKS are never all used. */
static enum st scratch_grow(struct cuda_device *d, struct cuda_lane *l, size_t bytes)
{
    void *p;
    enum st st;
    if (d->recording) return cuda_fails(d, "making scratch memory", "");
    CHECK(l->n_scratch < SCRATCH_BLOCKS, "blocks double");
    TRY(cuda_memory(d, 2 * bytes, &p), err);
    l->scratch[l->n_scratch++] = p;
    l->scratch_bytes = 2 * bytes;
err: return st;
}

/* What one layer's calls on a lane write for each other. */
struct scratch { uint16_t *x, *dy; float *sum; };

/* Room for x (B, K) and dy (B, N) in bf16, 0 for none, and for n_sum floats. */
static enum st scratch_of(struct cuda_device *d, uint32_t lane, size_t B, uint32_t K, uint32_t N,
                          size_t n_sum, struct scratch *out)
{
    struct cuda_lane *l = &d->lane[lane];
    size_t x = scratch_size(B * K, sizeof(*out->x)), dy = scratch_size(B * N, sizeof(*out->dy));
    size_t bytes = x + dy + scratch_size(n_sum, sizeof(*out->sum));
    if (bytes > l->scratch_bytes) {
        enum st st = scratch_grow(d, l, bytes);
        if (st != ST_OK) return st;
    }
    char *p = l->n_scratch > 0 ? l->scratch[l->n_scratch - 1] : NULL;
    *out = (struct scratch){(uint16_t *)p, (uint16_t *)(p + x), (float *)(p + x + dy)};
    return ST_OK;
}

/* --- factors -------------------------------------------------------------------------------- */

/* A row-major matrix as a factor: rows of it are `ld` items apart. */
struct matrix { const void *p; uint32_t ld; bool bf16; };

/* Bytes that p and all its rows are aligned to, up to 16. */
static uint32_t alignment(const void *p, uint32_t ld, bool bf16)
{
    uintptr_t bits = (uintptr_t)p | (uintptr_t)ld * (bf16 ? 2 : 4) | CUDA_BEST_ALIGN;
    return (uint32_t)(bits & -bits);
}

/* (rows, cols) f32, `ld` apart, as bf16 at `to`. */
static enum st narrow(struct cuda_device *d, uint32_t lane, uint32_t rows, uint32_t cols,
                      const float *from, uint32_t ld, uint16_t *to, struct matrix *out)
{
    *out = (struct matrix){to, padded(cols), true};
    return CUDA(d, cuda_to_bf16, (cuda_stream_of(d, lane), rows, cols, from, ld, to, out->ld));
}

static struct matrix weight_of(const struct cuda_device *d, const struct linear *l)
{
    if (narrows(d, l->N)) return (struct matrix){l->prepared, padded(l->K), true};
    return (struct matrix){l->w, l->K, false};
}

static struct cuda_shape shape_of(struct matrix a, struct matrix b, const float *to, uint32_t ld)
{
    return (struct cuda_shape){
        .lda = a.ld, .ldb = b.ld, .ldd = ld, .ta = CUBLAS_OP_N, .tb = CUBLAS_OP_N,
        .align_a = alignment(a.p, a.ld, a.bf16), .align_b = alignment(b.p, b.ld, b.bf16),
        .align_d = alignment(to, ld, false), .bf16 = a.bf16, .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
    };
}

/* --- weights -------------------------------------------------------------------------------- */

static size_t weight_floats(struct device *dev, uint32_t K, uint32_t N)
{
    (void)dev;
    return (size_t)K * N;
}

static size_t prepared_bytes(struct device *dev, uint32_t K, uint32_t N)
{
    return narrows(cuda_of(dev), N) ? (size_t)N * padded(K) * sizeof(uint16_t) : 0;
}

static enum st weight_put(struct device *dev, uint32_t K, uint32_t N, const float *host, float *w)
{
    return dev->ops->copy_in(dev, w, host, (size_t)K * N * sizeof(*w));
}

static enum st weight_get(struct device *dev, uint32_t K, uint32_t N, const float *w, float *host)
{
    return dev->ops->copy_out(dev, w, host, (size_t)K * N * sizeof(*w), NULL);
}

static enum st prepare(struct device *dev, uint32_t lane, const struct linear *l)
{
    struct cuda_device *d = cuda_of(dev);
    struct matrix w;
    if (!narrows(d, l->N)) return ST_OK;
    return narrow(d, lane, l->N, l->K, l->w, l->K, l->prepared, &w);
}

/* --- forward -------------------------------------------------------------------------------- */

/* The epilogue that does bias and ReLU as we want them, if there is one. */
static enum st choose_epilogue(struct cuda_device *d, const struct linear *l, struct cuda_shape *s)
{
    bool keeps_nan = true;
    if ((uintptr_t)l->b % CUDA_BEST_ALIGN != 0) return ST_OK;
    s->epilogue = l->relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
    enum st st = l->relu ? product_keeps_nan(d, s, &keeps_nan) : ST_OK;
    if (!keeps_nan) s->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return st;
}

static enum st forward(struct device *dev, uint32_t lane, uint32_t B, const struct linear *l,
                       const float *x, float *y, uint32_t ldy)
{
    struct cuda_device *d = cuda_of(dev);
    cudaStream_t s = cuda_stream_of(d, lane);
    struct matrix in = {x, l->K, false}, w = weight_of(d, l);
    enum st st;
    if (l->N == 1)
        return CUDA(d, cuda_forward_one, (s, B, l->K, x, l->w, l->b, l->relu, y, ldy));
    if (w.bf16) {
        struct scratch scratch;
        TRY(scratch_of(d, lane, B, padded(l->K), 0, 0, &scratch), err);
        TRY(narrow(d, lane, B, l->K, x, l->K, scratch.x, &in), err);
    }
    struct cuda_shape shape = shape_of(w, in, y, ldy);
    shape.m = l->N;
    shape.n = B;
    shape.k = w.ld; /* the padding is 0 in both factors */
    shape.ta = CUBLAS_OP_T;
    TRY(choose_epilogue(d, l, &shape), err);
    TRY(product_run(d, lane, &shape, (struct cuda_factors){w.p, in.p, y, l->b}), err);
    if (shape.epilogue == CUBLASLT_EPILOGUE_DEFAULT)
        st = CUDA(d, cuda_bias_relu, (s, B, l->N, l->b, l->relu, y, ldy));
err: return st;
}

/* --- backward ------------------------------------------------------------------------------- */

static enum st weight_gradient(struct cuda_device *d, uint32_t lane, uint32_t B,
                               const struct linear *l, struct matrix x, struct matrix dy,
                               float *dw)
{
    struct cuda_shape shape = shape_of(x, dy, dw, l->K);
    shape.m = l->K;
    shape.n = l->N;
    shape.k = B;
    shape.tb = CUBLAS_OP_T;
    return product_run(d, lane, &shape, (struct cuda_factors){x.p, dy.p, dw, NULL});
}

static enum st input_gradient(struct cuda_device *d, uint32_t lane, uint32_t B,
                              const struct linear *l, struct matrix dy, float *dx)
{
    struct matrix w = weight_of(d, l);
    struct cuda_shape shape = shape_of(w, dy, dx, l->K);
    shape.m = l->K;
    shape.n = B;
    shape.k = l->N;
    return product_run(d, lane, &shape, (struct cuda_factors){w.p, dy.p, dx, NULL});
}

static enum st backward(struct device *dev, uint32_t lane, uint32_t B, const struct linear *l,
                        const float *x, const float *y, uint32_t ldy, float *dy, float *dw,
                        float *db, float *dx)
{
    struct cuda_device *d = cuda_of(dev);
    cudaStream_t s = cuda_stream_of(d, lane);
    struct matrix in = {x, l->K, false}, back = {dy, ldy, false};
    bool bf16 = narrows(d, l->N);
    struct scratch scratch;
    enum st st;
    size_t n_sum = cuda_sum_scratch(B, l->N > 1 ? l->N : l->K);
    TRY(scratch_of(d, lane, B, bf16 ? padded(l->K) : 0, bf16 ? padded(l->N) : 0, n_sum, &scratch),
        err);
    TRY(CUDA(d, cuda_mask_and_sum, (s, B, l->N, y, ldy, l->relu, dy, db, scratch.sum)), err);
    if (l->N == 1)
        return CUDA(d, cuda_backward_one, (s, B, l->K, x, l->w, dy, ldy, dw, dx, scratch.sum));
    if (bf16) {
        TRY(narrow(d, lane, B, l->K, x, l->K, scratch.x, &in), err);
        TRY(narrow(d, lane, B, l->N, dy, ldy, scratch.dy, &back), err);
    }
    TRY(weight_gradient(d, lane, B, l, in, back, dw), err);
    if (dx != NULL) st = input_gradient(d, lane, B, l, back, dx);
err: return st;
}

void cuda_linear_calls(struct device_ops *ops)
{
    ops->weight_floats = weight_floats;
    ops->prepared_bytes = prepared_bytes;
    ops->weight_put = weight_put;
    ops->weight_get = weight_get;
    ops->prepare = prepare;
    ops->linear_forward = forward;
    ops->linear_backward = backward;
}
