/* compute/cuda_dense.cu - what surrounds a product, and the layer with one output, which is no
 * matrix product.
 *
 * Sums over samples have two levels: chunks of CHUNK samples, a block each, then the chunks' sums.
 * In both, LANES threads of a column take every LANES-th summand, in ascending order, and their
 * sums are added in the order of the lanes. So the order depends on B alone. */
#include "compute/cuda_kernels.h"

#include "compute/cuda_kernel.h"

enum { CHUNK = 64, LANES = 8, QUADS = 32 }; /* samples; rows and quads of a block's threads */

size_t cuda_sum_scratch(uint32_t B, uint32_t N)
{
    return (size_t)ceil_div(B, CHUNK) * N;
}

/* The sum over a column of threads, in the order of threadIdx.y; for threadIdx.y == 0. */
DEVICE float4 sum_lanes(float4 mine, float4 *lane)
{
    lane[threadIdx.y * blockDim.x + threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.y != 0) return mine;
    for (uint32_t y = 1; y < LANES; y++) mine = add4(mine, lane[y * blockDim.x + threadIdx.x]);
    return mine;
}

HOST dim3 column_block(uint32_t quads)
{
    return dim(quads < QUADS ? quads : QUADS, LANES);
}

HOST size_t column_shared(dim3 block)
{
    return block.x * block.y * sizeof(float4);
}

/* --- over samples --------------------------------------------------------------------------- */

struct mask_args {
    const float *y;
    float *dy, *chunk_sum;           /* (B, N), ld apart; (chunks, N)                        */
    uint32_t B, N, ld, quads;
    int relu, by4, by4_sum;
};

DEVICE float4 mask4(float4 dy, float4 y)
{
    dy.x = y.x == 0.0f ? 0.0f : dy.x;
    dy.y = y.y == 0.0f ? 0.0f : dy.y;
    dy.z = y.z == 0.0f ? 0.0f : dy.z;
    dy.w = y.w == 0.0f ? 0.0f : dy.w;
    return dy;
}

KERNEL_THAT_WAITS(mask_chunk, mask_args, a, BLOCK)
{
    SHARED(float4, lane);
    uint32_t q = blockIdx.x * blockDim.x + threadIdx.x, left = a.N - 4 * q;
    uint32_t b0 = blockIdx.y * CHUNK + threadIdx.y;
    float4 dy[CHUNK / LANES], sum = fill4(0.0f);
    UNROLL
    for (uint32_t k = 0; k < CHUNK / LANES; k++) {
        uint32_t b = b0 + k * LANES;
        size_t at = (size_t)b * a.ld + 4 * q;
        dy[k] = fill4(0.0f);
        if (b >= a.B || q >= a.quads) continue;
        dy[k] = load4(a.dy + at, left, a.by4);
        if (a.relu) dy[k] = mask4(dy[k], load4(a.y + at, left, a.by4));
    }
    UNROLL
    for (uint32_t k = 0; k < CHUNK / LANES; k++) {
        uint32_t b = b0 + k * LANES;
        if (b >= a.B || q >= a.quads) continue;
        if (a.relu) store4(a.dy + (size_t)b * a.ld + 4 * q, left, a.by4, dy[k]);
        sum = add4(sum, dy[k]);
    }
    sum = sum_lanes(sum, lane);
    if (threadIdx.y == 0 && q < a.quads)
        store4(a.chunk_sum + (size_t)blockIdx.y * a.N + 4 * q, left, a.by4_sum, sum);
}

struct chunks_args {
    const float *chunk_sum;          /* (chunks, N)                                          */
    float *out;                      /* (N)                                                  */
    uint32_t chunks, N, quads;
    int by4;
};

KERNEL_THAT_WAITS(sum_chunks, chunks_args, a, BLOCK)
{
    SHARED(float4, lane);
    uint32_t q = blockIdx.x * blockDim.x + threadIdx.x, left = a.N - 4 * q;
    float4 sum = fill4(0.0f);
    for (uint32_t c = threadIdx.y; c < a.chunks && q < a.quads; c += LANES)
        sum = add4(sum, load4(a.chunk_sum + (size_t)c * a.N + 4 * q, left, a.by4));
    sum = sum_lanes(sum, lane);
    if (threadIdx.y == 0 && q < a.quads) store4(a.out + 4 * q, left, a.by4, sum);
}

static cudaError_t finish_sum(cudaStream_t s, uint32_t B, uint32_t N, const float *scratch,
                              float *out)
{
    struct chunks_args a = {scratch, out, ceil_div(B, CHUNK), N, quads_of(N),
                            is_by4(scratch, N, N) && is_by4(out, N, N)};
    dim3 block = column_block(a.quads);
    return LAUNCH(s, sum_chunks, dim(ceil_div(a.quads, block.x), 1), block, column_shared(block),
                  &a);
}

cudaError_t cuda_mask_and_sum(cudaStream_t s, uint32_t B, uint32_t N, const float *y, uint32_t ldy,
                              int relu, float *dy, float *db, float *scratch)
{
    struct mask_args a = {y, dy, scratch, B, N, ldy, quads_of(N), relu,
                          is_by4(y, ldy, N) && is_by4(dy, ldy, N), is_by4(scratch, N, N)};
    if (B == 0 || N == 0) return cudaSuccess;
    dim3 block = column_block(a.quads), grid = dim(ceil_div(a.quads, block.x), ceil_div(B, CHUNK));
    cudaError_t e = LAUNCH(s, mask_chunk, grid, block, column_shared(block), &a);
    return e != cudaSuccess ? e : finish_sum(s, B, N, scratch, db);
}

/* --- one output ----------------------------------------------------------------------------- */

enum { ONE_ROWS = 32, ONE_PARTS = 32, ONE_SHARE = 4 }; /* samples of a block; their partial sums */

struct one_args {
    const float *x, *w, *b, *dy;     /* (B, K), (K), one, (B) ldy apart                      */
    float *y, *dx, *chunk_sum;       /* (B) ldy apart; (B, K) or NULL; (chunks, K)           */
    uint32_t B, K, quads, ldy;
    int relu, by4, by4_sum;
};

/* 0 only where y is really negative: a NaN stays, so that it reaches the loss (I5). */
DEVICE float relu_of(float y)
{
    return y < 0.0f ? 0.0f : y;
}

/* Thread (x, y) sums up the quads x, x + 32, ... of samples y, y + 8, ...; then 32 sums a sample
 * become 8, and one. */
KERNEL_THAT_WAITS(forward_one, one_args, a, BLOCK)
{
    SHARED(float, part);                                     /* [ONE_ROWS][ONE_PARTS + 1]     */
    uint32_t t = threadIdx.y * ONE_PARTS + threadIdx.x, b0 = blockIdx.x * ONE_ROWS;
    float sum[ONE_ROWS / LANES] = {0.0f};
    for (uint32_t q = threadIdx.x; q < a.quads; q += ONE_PARTS) {
        uint32_t left = a.K - 4 * q;
        float4 w = load4(a.w + 4 * q, left, a.by4);
        UNROLL
        for (uint32_t k = 0; k < ONE_ROWS / LANES; k++) {
            uint32_t b = b0 + k * LANES + threadIdx.y;
            if (b >= a.B) continue;
            sum[k] = add_dot4(load4(a.x + (size_t)b * a.K + 4 * q, left, a.by4), w, sum[k]);
        }
    }
    UNROLL
    for (uint32_t k = 0; k < ONE_ROWS / LANES; k++)
        part[(k * LANES + threadIdx.y) * (ONE_PARTS + 1) + threadIdx.x] = sum[k];
    __syncthreads();
    float *mine = part + t / LANES * (ONE_PARTS + 1) + t % LANES * ONE_SHARE;
    for (uint32_t k = 1; k < ONE_SHARE; k++) mine[0] += mine[k];
    __syncthreads();
    if (t >= ONE_ROWS || b0 + t >= a.B) return;
    float z = 0.0f;
    for (uint32_t k = 0; k < LANES; k++) z += part[t * (ONE_PARTS + 1) + k * ONE_SHARE];
    z += a.b[0];
    a.y[(size_t)(b0 + t) * a.ldy] = a.relu ? relu_of(z) : z;
}

cudaError_t cuda_forward_one(cudaStream_t s, uint32_t B, uint32_t K, const float *x,
                             const float *w, const float *b, int relu, float *y, uint32_t ldy)
{
    struct one_args a = {x, w, b, NULL, y, NULL, NULL, B, K, quads_of(K), ldy, relu,
                         is_by4(x, K, K) && is_by4(w, K, K), 0};
    if (B == 0) return cudaSuccess;
    return LAUNCH(s, forward_one, dim(ceil_div(B, ONE_ROWS), 1), dim(ONE_PARTS, LANES),
                  ONE_ROWS * (ONE_PARTS + 1) * sizeof(float), &a);
}

KERNEL_THAT_WAITS(backward_one_chunk, one_args, a, BLOCK)
{
    SHARED(float4, lane);
    uint32_t q = blockIdx.x * blockDim.x + threadIdx.x, left = a.K - 4 * q;
    uint32_t b0 = blockIdx.y * CHUNK + threadIdx.y;
    float4 x[CHUNK / LANES], sum = fill4(0.0f), w = fill4(0.0f);
    float dy[CHUNK / LANES];
    if (q < a.quads && a.dx != NULL) w = load4(a.w + 4 * q, left, a.by4);
    UNROLL
    for (uint32_t k = 0; k < CHUNK / LANES; k++) {
        uint32_t b = b0 + k * LANES;
        dy[k] = 0.0f;
        x[k] = fill4(0.0f);
        if (b >= a.B || q >= a.quads) continue;
        dy[k] = a.dy[(size_t)b * a.ldy];
        x[k] = load4(a.x + (size_t)b * a.K + 4 * q, left, a.by4);
    }
    UNROLL
    for (uint32_t k = 0; k < CHUNK / LANES; k++) {
        uint32_t b = b0 + k * LANES;
        sum = multiply_add4(dy[k], x[k], sum);
        if (b >= a.B || q >= a.quads || a.dx == NULL) continue;
        float4 dx = multiply_add4(dy[k], w, fill4(-0.0f)); /* dy w: -0 + p is p, always */
        store4(a.dx + (size_t)b * a.K + 4 * q, left, a.by4, dx);
    }
    sum = sum_lanes(sum, lane);
    if (threadIdx.y == 0 && q < a.quads)
        store4(a.chunk_sum + (size_t)blockIdx.y * a.K + 4 * q, left, a.by4_sum, sum);
}

cudaError_t cuda_backward_one(cudaStream_t s, uint32_t B, uint32_t K, const float *x,
                              const float *w, const float *dy, uint32_t ldy, float *dw, float *dx,
                              float *scratch)
{
    struct one_args a = {x, w, NULL, dy, NULL, dx, scratch, B, K, quads_of(K), ldy, 0,
                         is_by4(x, K, K) && is_by4(w, K, K) && is_by4(dx, K, K),
                         is_by4(scratch, K, K)};
    if (B == 0 || K == 0) return cudaSuccess;
    dim3 block = column_block(a.quads), grid = dim(ceil_div(a.quads, block.x), ceil_div(B, CHUNK));
    cudaError_t e = LAUNCH(s, backward_one_chunk, grid, block, column_shared(block), &a);
    return e != cudaSuccess ? e : finish_sum(s, B, K, scratch, dw);
}

/* --- element by element --------------------------------------------------------------------- */

struct bias_args {
    const float *b;                  /* (N)                                                  */
    float *y;                        /* (B, N), ld apart                                     */
    uint32_t B, N, ld, quads;
    int relu, by4;
};

KERNEL(bias_relu, bias_args, a, BLOCK)
{
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        uint32_t left = a.N - 4 * q;
        float4 v[ROWS_EACH], b = load4(a.b + 4 * q, left, 0);
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            v[k] = fill4(0.0f);
            if (i < a.B) v[k] = load4(a.y + (size_t)i * a.ld + 4 * q, left, a.by4);
        }
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            float4 y = add4(v[k], b);
            if (a.relu) {
                y.x = relu_of(y.x);
                y.y = relu_of(y.y);
                y.z = relu_of(y.z);
                y.w = relu_of(y.w);
            }
            if (i < a.B) store4(a.y + (size_t)i * a.ld + 4 * q, left, a.by4, y);
        }
    }
}

cudaError_t cuda_bias_relu(cudaStream_t s, uint32_t B, uint32_t N, const float *b, int relu,
                           float *y, uint32_t ldy)
{
    struct bias_args a = {b, y, B, N, ldy, quads_of(N), relu, is_by4(y, ldy, N)};
    if (B == 0 || N == 0) return cudaSuccess;
    dim3 block = row_block(a.quads);
    return LAUNCH(s, bias_relu, row_grid(B, block), block, 0, &a);
}

struct narrow_args {
    const float *from;               /* (B, N), ld apart                                     */
    uint16_t *to;                    /* (B, N), ld_to apart; 0 behind the N of each row      */
    uint32_t B, N, ld, ld_to, quads;
    int by4, by4_to;
};

/* To nearest, ties to even; a NaN stays one, quiet. */
DEVICE uint32_t bf16_of(float x)
{
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

DEVICE void store_bf16(uint16_t *p, uint32_t n, int by4, float4 v)
{
    if (by4) {
        uint2 two;
        two.x = bf16_of(v.x) | bf16_of(v.y) << 16;
        two.y = bf16_of(v.z) | bf16_of(v.w) << 16;
        *(uint2 *)p = two;
        return;
    }
    p[0] = (uint16_t)bf16_of(v.x);
    if (n > 1) p[1] = (uint16_t)bf16_of(v.y);
    if (n > 2) p[2] = (uint16_t)bf16_of(v.z);
    if (n > 3) p[3] = (uint16_t)bf16_of(v.w);
}

KERNEL(to_bf16, narrow_args, a, BLOCK)
{
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        float4 v[ROWS_EACH];
        uint32_t n = 4 * q, left = n < a.N ? a.N - n : 0;
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            v[k] = fill4(0.0f);
            if (i < a.B && left != 0) v[k] = load4(a.from + (size_t)i * a.ld + n, left, a.by4);
        }
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            if (i < a.B) store_bf16(a.to + (size_t)i * a.ld_to + n, a.ld_to - n, a.by4_to, v[k]);
        }
    }
}

cudaError_t cuda_to_bf16(cudaStream_t s, uint32_t B, uint32_t N, const float *from, uint32_t ld,
                         uint16_t *to, uint32_t ld_to)
{
    struct narrow_args a = {from, to, B, N, ld, ld_to, quads_of(ld_to), is_by4(from, ld, N),
                            (uintptr_t)to % 8 == 0 && ld_to % 4 == 0};
    if (B == 0 || ld_to == 0) return cudaSuccess;
    dim3 block = row_block(a.quads);
    return LAUNCH(s, to_bf16, row_grid(B, block), block, 0, &a);
}
