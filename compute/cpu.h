/* compute/cpu.h - the CPU backend, between its files only; what the kernels compute is said in
 * device.h. Every kernel works in registers, a few kilobytes of its own stack, or scratch of its
 * lane. Floating-point order is fixed in each (I1): loops over the summed dimension run in
 * ascending order, or in 16 lanes that do (cpu_vec.h), never by thread. */
#ifndef CHANTER_COMPUTE_CPU_H
#define CHANTER_COMPUTE_CPU_H

#include "compute/device.h"
#include "compute/lanes.h"

struct cpu {
    struct device base;          /* first: a struct device * is a struct cpu *                 */
    struct lanes *lanes;
    struct cpu_linear *linear;
    struct device_fault fault;   /* sticky                                                     */
};

static inline struct cpu *cpu_of(struct device *d) { return (struct cpu *)d; }

/* Of one of those calls that work for the whole trainer: indices 0..n-1 in pieces of at most
 * CPU_PIECE, on all lanes. fn works on [lo, hi). */
enum { CPU_PIECE = 1024 };
typedef void cpu_range(void *ctx, size_t lo, size_t hi);
void cpu_over(struct device *d, size_t n, size_t piece, cpu_range *fn, void *ctx);

/* cpu_linear.c. What the layers keep from call to call: scratch of each lane. */
struct cpu_linear;
MUST_USE enum st cpu_linear_open(const struct device_cfg *cfg, struct cpu_linear **out);
void cpu_linear_close(struct cpu_linear *h); /* NULL ok */
size_t cpu_weight_floats(struct device *d, uint32_t K, uint32_t N);
size_t cpu_prepared_bytes(struct device *d, uint32_t K, uint32_t N);
enum st cpu_weight_put(struct device *d, uint32_t K, uint32_t N, const float *host, float *w);
enum st cpu_weight_get(struct device *d, uint32_t K, uint32_t N, const float *w, float *host);
enum st cpu_prepare(struct device *d, uint32_t lane, const struct linear *l);
enum st cpu_linear_forward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                           const float *x, float *y, uint32_t ldy);
enum st cpu_linear_backward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                            const float *x, const float *y, uint32_t ldy, float *dy, float *dw,
                            float *db, float *dx);

/* cpu_interact.c */
enum st cpu_interact_forward(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                             const float *t, float *r);
enum st cpu_interact_backward(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                              const float *t, const float *dr, float *dt);

/* cpu_rows.c */
enum st cpu_rows_put(struct device *d, float *table, uint32_t stride, const uint32_t *slot,
                     uint32_t n, const void *host, uint32_t width);
enum st cpu_rows_get(struct device *d, const float *table, uint32_t stride, const uint32_t *slot,
                     uint32_t n, void *host, uint32_t width, uint64_t *mark);
enum st cpu_rows_copy(struct device *d, const float *from, uint32_t from_stride,
                      const uint32_t *from_slot, uint32_t n, float *to, uint32_t to_stride,
                      const uint32_t *to_slot, uint32_t width);
enum st cpu_gather(struct device *d, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                   const float *table, uint32_t stride, const uint32_t *slot, float *t);

/* cpu_sum.c */
enum st cpu_row_grads(struct device *d, const float *dt, uint32_t F, uint32_t D,
                      const struct seg_list *s, uint32_t first_slice, uint32_t items_per_slice,
                      float *out);
enum st cpu_tree_sum(struct device *d, const float *vec, uint32_t D, const struct seg_list *s,
                     const uint8_t *pos, float *out);
enum st cpu_dense_sum(struct device *d, const float *const *part, const uint8_t *pos,
                      uint32_t n_parts, size_t n, float *out);

/* cpu_update.c */
enum st cpu_row_update(struct device *d, const struct opt_step *o, float *table, uint32_t stride,
                       uint32_t D, const uint32_t *slot, const float *grad, uint32_t n);
enum st cpu_dense_update(struct device *d, const struct opt_step *o, float *w, float *state,
                         const float *grad, size_t n);

/* cpu.c */
enum st cpu_open(const struct device_cfg *cfg, struct device **out);

#endif
