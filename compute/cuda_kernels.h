/* compute/cuda_kernels.h - what runs on the GPU, one function a kernel: each puts its kernel on
 * stream `s` and returns at once. All pointers are device memory; what is computed is said in
 * device.h. Sizes of 0 launch nothing. Order of sums is fixed (I1): no atomics on floats. */
#ifndef CHANTER_COMPUTE_CUDA_KERNELS_H
#define CHANTER_COMPUTE_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "compute/cuda_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What updates share: the sticky fault. In device memory; zeroed once. */
struct cuda_fault {
    uint32_t dense;      /* 1: a dense gradient was not finite                                 */
    uint32_t row;        /* 1 + slot of a row with one, 0: none. Of several: the first in order */
    uint32_t first;      /* cuda_update.cu: UINT32_MAX - its place in that update's list       */
};

/* cuda_rows.cu.  to[to_slot ? to_slot[i] : i][0..width) = from[from_slot ? from_slot[i] : i] */
cudaError_t cuda_rows_move(cudaStream_t s, const float *from, uint32_t from_stride,
                           const uint32_t *from_slot, uint32_t n, float *to, uint32_t to_stride,
                           const uint32_t *to_slot, uint32_t width);
cudaError_t cuda_rows_gather(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                             const float *table, uint32_t stride, const uint32_t *slot, float *t);

/* cuda_interact.cu */
cudaError_t cuda_interact_forward(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                                  const float *t, float *r);
cudaError_t cuda_interact_backward(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                                   const float *t, const float *dr, float *dt);

/* cuda_loss.cu.  dlogit, prob: may be NULL */
cudaError_t cuda_bce(cudaStream_t s, uint32_t B, const float *logit, const float *label,
                     float scale, float *dlogit, float *loss, float *prob);

/* cuda_dense.cu: what surrounds a product. */
/* Floats of `scratch` that a sum over B samples of N floats needs: the calling stream's. */
size_t cuda_sum_scratch(uint32_t B, uint32_t N);
/* dy = 0 where relu and y == 0; db[n] = sum over b of dy[b][n], in one fixed order. */
cudaError_t cuda_mask_and_sum(cudaStream_t s, uint32_t B, uint32_t N, const float *y, uint32_t ldy,
                              int relu, float *dy, float *db, float *scratch);
/* The layer with one output: y[b ldy] = x[b] . w + b[0]; dw = sum dy x, dx (NULL ok) = dy w.
 * scratch: for (B, K). */
cudaError_t cuda_forward_one(cudaStream_t s, uint32_t B, uint32_t K, const float *x,
                             const float *w, const float *b, int relu, float *y, uint32_t ldy);
cudaError_t cuda_backward_one(cudaStream_t s, uint32_t B, uint32_t K, const float *x,
                              const float *w, const float *dy, uint32_t ldy, float *dw, float *dx,
                              float *scratch);
/* y = max(y + b, 0) where a product's own epilogue cannot do it. */
cudaError_t cuda_bias_relu(cudaStream_t s, uint32_t B, uint32_t N, const float *b, int relu,
                           float *y, uint32_t ldy);
/* to (B,N) bf16 = from (B,N) f32, round to nearest even; rows are ld floats, ld_to >= N numbers
 * apart, and those behind the N of each row become 0. */
cudaError_t cuda_to_bf16(cudaStream_t s, uint32_t B, uint32_t N, const float *from, uint32_t ld,
                         uint16_t *to, uint32_t ld_to);

/* cuda_sum.cu.  begin, item, pos, part: device copies of device.h's host arrays. */
cudaError_t cuda_row_grads(cudaStream_t s, const float *dt, uint32_t F, uint32_t D, uint32_t n,
                           const uint32_t *begin, const uint32_t *item, uint32_t first_slice,
                           uint32_t items_per_slice, float *out);
cudaError_t cuda_tree_sum(cudaStream_t s, const float *vec, uint32_t D, uint32_t n,
                          const uint32_t *begin, const uint32_t *item, const uint8_t *pos,
                          float *out);
struct cuda_parts { const float *part[64]; uint8_t pos[64]; uint32_t n; };  /* copied */
cudaError_t cuda_dense_sum(cudaStream_t s, const struct cuda_parts *parts, size_t n, float *out);

/* cuda_update.cu.  Both look at all gradients first; nothing is written once *fault is set. */
struct cuda_opt { int kind; float learning_rate, epsilon; };    /* kind: enum optimizer */
cudaError_t cuda_row_update(cudaStream_t s, const struct cuda_opt *o, float *table,
                            uint32_t stride, uint32_t D, const uint32_t *slot, const float *grad,
                            uint32_t n, struct cuda_fault *fault);
cudaError_t cuda_dense_update(cudaStream_t s, const struct cuda_opt *o, float *w, float *state,
                              const float *grad, size_t n, struct cuda_fault *fault);

#ifdef __cplusplus
}
#endif

#endif
