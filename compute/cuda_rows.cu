/* compute/cuda_rows.cu - rows from where they are to where they are wanted. */
#include "compute/cuda_kernels.h"

#include "compute/cuda_kernel.h"

struct move_args {
    const float *from;
    const uint32_t *from_slot, *to_slot;  /* NULL: i                                          */
    float *to;
    size_t from_stride, to_stride;        /* floats                                           */
    uint32_t n, width, quads;
    uint32_t F;                           /* not 0: row i goes behind entry 0 of its sample   */
    int by4;
};

DEVICE size_t to_row(const struct move_args *a, uint32_t i)
{
    if (a->F != 0) return (size_t)i + i / a->F + 1; /* b (F + 1) + f + 1 */
    return a->to_slot != NULL ? a->to_slot[i] : i;
}

KERNEL(move_rows, move_args, a, BLOCK)
{
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        float4 v[ROWS_EACH];
        uint32_t d = 4 * q, left = a.width - d;
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            v[k] = fill4(0.0f);
            if (i >= a.n) continue;
            size_t row = a.from_slot != NULL ? a.from_slot[i] : i;
            v[k] = load4(a.from + row * a.from_stride + d, left, a.by4);
        }
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++) {
            uint32_t i = my_row(k);
            if (i < a.n) store4(a.to + to_row(&a, i) * a.to_stride + d, left, a.by4, v[k]);
        }
    }
}

static cudaError_t move(cudaStream_t s, struct move_args *a)
{
    if (a->n == 0 || a->width == 0) return cudaSuccess;
    a->quads = quads_of(a->width);
    a->by4 = is_by4(a->from, a->from_stride, a->width) && is_by4(a->to, a->to_stride, a->width);
    dim3 block = row_block(a->quads);
    return LAUNCH(s, move_rows, row_grid(a->n, block), block, 0, a);
}

cudaError_t cuda_rows_move(cudaStream_t s, const float *from, uint32_t from_stride,
                           const uint32_t *from_slot, uint32_t n, float *to, uint32_t to_stride,
                           const uint32_t *to_slot, uint32_t width)
{
    struct move_args a = {from, from_slot, to_slot, to, from_stride, to_stride, n, width, 0, 0, 0};
    return move(s, &a);
}

cudaError_t cuda_rows_gather(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                             const float *table, uint32_t stride, const uint32_t *slot, float *t)
{
    struct move_args a = {table, slot, NULL, t, stride, D, B * F, D, 0, F, 0};
    return move(s, &a);
}
