/* compute/device.h - the seam to arithmetic: one table of functions; behind it cpu.c (and later
 * CUDA). This folder alone knows oneDNN and CUDA. Knows nothing of plans, peers or servers.
 *
 * All matrices are row-major f32 in device memory (dev->alloc). One-letter sizes: B samples of a
 * slice, K inputs, N outputs, D floats per row, F tables. Functions marked [slice] may be called by
 * several threads at once with different outputs, each thread with its own `lane` (0..lanes-1); a
 * call's result depends on its arguments only, never on lane or thread count (I1). All calls are
 * complete on return unless `wait` is set. */
#ifndef CHANTER_COMPUTE_DEVICE_H
#define CHANTER_COMPUTE_DEVICE_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

struct device_cfg { uint32_t lanes; };

/* Uses of rows, sorted: vectors [begin[i], begin[i+1]) of `item` make up output i. */
struct seg_list {
    uint32_t n;              /* outputs                                     */
    const uint32_t *begin;   /* [n + 1]                                     */
    const uint32_t *item;    /* [begin[n]] numbers of input vectors         */
};

/* One optimizer step (DESIGN.md, section 5): sgd w -= lr g; adagrad G += g^2, w -= lr g /
 * (sqrt(G) + eps); rowwise_adagrad G_r += mean_j g_rj^2, w_r -= lr g_r / (sqrt(G_r) + eps). */
struct opt_step { enum optimizer kind; float learning_rate, epsilon; };

struct device {
    const struct device_ops *ops;
    uint32_t lanes;
};

struct device_ops {
    const char *name;
    void (*close)(struct device *d);
    /* Device memory, 64-byte aligned, zeroed. NULL: out of memory. */
    void *(*alloc)(struct device *d, size_t bytes);
    void (*free)(struct device *d, void *p, size_t bytes);

    /* Bytes from host memory to device memory and back. */
    enum st (*copy_in)(struct device *d, void *to, const void *host, size_t bytes);
    enum st (*copy_out)(struct device *d, const void *from, void *host, size_t bytes);

    /* Rows of a cache `table` [cap][stride] <-> packed host rows [n][width], width <= stride:
     * table[slot[i]][0..width) = host[i]. host: unaligned bytes. */
    enum st (*rows_put)(struct device *d, float *table, uint32_t stride, const uint32_t *slot,
                        uint32_t n, const void *host, uint32_t width);
    enum st (*rows_get)(struct device *d, const float *table, uint32_t stride,
                        const uint32_t *slot, uint32_t n, void *host, uint32_t width);

    /* [slice] y = x W^T + b, then max(y, 0) if relu (NaN stays NaN).  x (B,K)  w (N,K)  b (N)
     * y (B,N), its rows ldy >= N floats apart: the bottom MLP writes straight into t. */
    enum st (*linear_forward)(struct device *d, uint32_t lane, uint32_t B, uint32_t K, uint32_t N,
                              const float *x, const float *w, const float *b, int relu, float *y,
                              uint32_t ldy);
    /* [slice] dy (B,N) is the gradient of y and is overwritten (masked where relu and y == 0);
     * dw (N,K) = dy^T x, db (N) = sum over samples of dy in sample order, dx (B,K) = dy W unless
     * NULL. Rows of y and of dy are ldy floats apart. */
    enum st (*linear_backward)(struct device *d, uint32_t lane, uint32_t B, uint32_t K,
                               uint32_t N, const float *x, const float *w, const float *y,
                               uint32_t ldy, int relu, float *dy, float *dw, float *db,
                               float *dx);
    /* [slice] t[b][1 + f][:] = table[slot[b][f]][0..D)   t (B,F+1,D): entry 0 is left alone */
    enum st (*gather)(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                      const float *table, uint32_t stride, const uint32_t *slot, float *t);
    /* [slice] r[b] = [t[b][0] (D), dots t[b][i].t[b][j] for i = 1..F, j = 0..i-1]
     * (facebookresearch/dlrm, interact_features).  r (B, D + F(F+1)/2) */
    enum st (*interact_forward)(struct device *d, uint32_t lane, uint32_t B, uint32_t F,
                                uint32_t D, const float *t, float *r);
    enum st (*interact_backward)(struct device *d, uint32_t lane, uint32_t B, uint32_t F,
                                 uint32_t D, const float *t, const float *dr, float *dt);
    /* [slice] p = logit; loss = sum over samples of log(1 + e^-|z|) + max(z, 0) - z y (f64, then
     * rounded to f32); dlogit = (sigmoid(z) - y) * scale; prob = sigmoid(z), unless NULL. dlogit
     * NULL for evaluation. */
    enum st (*bce)(struct device *d, uint32_t lane, uint32_t B, const float *logit,
                   const float *label, float scale, float *dlogit, float *loss, float *prob);

    /* For segments i in [seg_lo, seg_hi): out[i][:] = tree sum over slices of (sum in list order
     * inside a slice) of the look-up gradients in dt: item k = b * F + f is dt[b][1 + f]. Items of
     * a segment ascend; item k is of slice first_slice + k / items_per_slice: dt holds a trainer's
     * samples, the tree stands over the slices of the global batch. Disjoint ranges of segments
     * may run on several threads at once, each with its own lane. */
    enum st (*row_grads)(struct device *d, uint32_t lane, const float *dt, uint32_t F, uint32_t D,
                         const struct seg_list *s, uint32_t seg_lo, uint32_t seg_hi,
                         uint32_t first_slice, uint32_t items_per_slice, float *out);
    /* For segments i in [seg_lo, seg_hi): out[i][:] = tree sum of vec[item[k]][:] at positions
     * pos[k] (parallel to item, ascending and distinct within a segment). Threads: as above. */
    enum st (*tree_sum)(struct device *d, uint32_t lane, const float *vec, uint32_t D,
                        const struct seg_list *s, const uint8_t *pos, uint32_t seg_lo,
                        uint32_t seg_hi, float *out);
    /* out[0..n) = tree sum of n_parts vectors of n floats at ascending positions pos. n_parts >= 1.
     * Element-wise: parts of the range may run on several threads at once. */
    enum st (*dense_sum)(struct device *d, const float *const *part, const uint8_t *pos,
                         uint32_t n_parts, size_t n, float *out);

    /* One step for rows slot[i] of `table` (record: D values, then state) with grad[i][D].
     * ST_DATA, nothing logged, when a gradient is not finite: *bad = the first such i, rows
     * before it are updated. */
    enum st (*row_update)(struct device *d, const struct opt_step *o, float *table,
                          uint32_t stride, uint32_t D, const uint32_t *slot, const float *grad,
                          uint32_t n, uint32_t *bad);
    /* Element-wise step for n dense weights; state [n] (unused for sgd); rowwise = adagrad.
     * ST_DATA, nothing written, nothing logged, when a gradient is not finite. */
    enum st (*dense_update)(struct device *d, const struct opt_step *o, float *w, float *state,
                            const float *grad, size_t n);
};

MUST_USE enum st device_open(enum device_kind kind, const struct device_cfg *cfg,
                             struct device **out);
void device_close(struct device *d); /* NULL ok */

#endif
