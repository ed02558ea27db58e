/* compute/cpu.h - the CPU backend's kernels, between its files only; what they compute is said in
 * device.h. None has state: `lane` is not used here, because every kernel works in registers and
 * a few kilobytes of its own stack. Floating-point order is fixed in each (I1): loops over the
 * summed dimension run in ascending order, or in 16 lanes that do (cpu_vec.h), never by thread. */
#ifndef CHANTER_COMPUTE_CPU_H
#define CHANTER_COMPUTE_CPU_H

#include "compute/device.h"

/* cpu_linear.c */
enum st cpu_linear_forward(struct device *d, uint32_t lane, uint32_t B, uint32_t K, uint32_t N,
                           const float *x, const float *w, const float *b, int relu, float *y,
                           uint32_t ldy);
enum st cpu_linear_backward(struct device *d, uint32_t lane, uint32_t B, uint32_t K, uint32_t N,
                            const float *x, const float *w, const float *y, uint32_t ldy, int relu,
                            float *dy, float *dw, float *db, float *dx);

/* cpu_interact.c */
enum st cpu_interact_forward(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                             const float *t, float *r);
enum st cpu_interact_backward(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                              const float *t, const float *dr, float *dt);

/* cpu_rows.c */
enum st cpu_rows_put(struct device *d, float *table, uint32_t stride, const uint32_t *slot,
                     uint32_t n, const void *host, uint32_t width);
enum st cpu_rows_get(struct device *d, const float *table, uint32_t stride, const uint32_t *slot,
                     uint32_t n, void *host, uint32_t width);
enum st cpu_gather(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                   const float *table, uint32_t stride, const uint32_t *slot, float *t);

/* cpu_sum.c */
enum st cpu_row_grads(struct device *d, uint32_t lane, const float *dt, uint32_t F, uint32_t D,
                      const struct seg_list *s, uint32_t seg_lo, uint32_t seg_hi,
                      uint32_t first_slice, uint32_t items_per_slice, float *out);
enum st cpu_tree_sum(struct device *d, uint32_t lane, const float *vec, uint32_t D,
                     const struct seg_list *s, const uint8_t *pos, uint32_t seg_lo,
                     uint32_t seg_hi, float *out);
enum st cpu_dense_sum(struct device *d, const float *const *part, const uint8_t *pos,
                      uint32_t n_parts, size_t n, float *out);

/* cpu_update.c */
enum st cpu_row_update(struct device *d, const struct opt_step *o, float *table, uint32_t stride,
                       uint32_t D, const uint32_t *slot, const float *grad, uint32_t n,
                       uint32_t *bad);
enum st cpu_dense_update(struct device *d, const struct opt_step *o, float *w, float *state,
                         const float *grad, size_t n);

/* cpu.c */
enum st cpu_open(const struct device_cfg *cfg, struct device **out);

#endif
