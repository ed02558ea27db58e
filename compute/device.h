/* compute/device.h - the seam to arithmetic: one table of functions; behind it cpu*.c and cuda*.
 * This folder alone knows oneDNN and CUDA. Knows nothing of plans, peers or servers.
 *
 * All matrices are row-major f32 in device memory (dev->alloc), but for weights (below). One-letter
 * sizes: B samples of a slice, K inputs, N outputs, D floats per row, F tables.
 *
 * Order. A device is a queue: calls take effect one after the other, in the order in which one
 * thread (COMPUTE) makes them, and may return before they have. A call that reads host memory has
 * read it on return; a call that writes host memory has written it on return, or, when it is given
 * a `mark`, once wait(mark) has returned. Functions marked [slice] are for tasks of `parallel`
 * only: tasks run beside each other, each on its own `lane` (0..lanes-1), with different outputs.
 * A result depends on a call's arguments only, never on lane, their number, or thread count (I1). */
#ifndef CHANTER_COMPUTE_DEVICE_H
#define CHANTER_COMPUTE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

struct device_cfg {
    uint32_t lanes;              /* tasks of `parallel` under way at once: threads, or queues     */
    uint32_t local_rank;         /* which of this machine's accelerators: local_rank % their number */
    enum precision precision;    /* of the factors of matrix products; sums are f32               */
};

/* Uses of rows, sorted: vectors item[begin[i]], .., item[begin[i+1] - 1] make up output i. Host
 * memory. */
struct seg_list {
    uint32_t n;              /* outputs                                     */
    const uint32_t *begin;   /* [n + 1]                                     */
    const uint32_t *item;    /* [begin[n]] numbers of input vectors         */
};

/* One fully connected layer's parameters. The device decides how a weight (N,K) lies in memory
 * (weight_floats, weight_put, weight_get): w and its gradient dw lie alike, padding is 0, so that
 * sums and optimizer steps are element-wise. `prepared` is what the device derives from w for its
 * products (transposed, narrowed); stale until `prepare` after every change of w. */
struct linear {
    uint32_t K, N;
    bool relu;               /* max(y, 0) after the layer (NaN stays NaN)   */
    const float *w, *b;      /* device; b (N)                               */
    void *prepared;          /* device [prepared_bytes(K, N)]               */
};

/* One optimizer step (DESIGN.md, section 5): sgd w -= lr g; adagrad G += g^2, w -= lr g /
 * (sqrt(G) + eps); rowwise_adagrad G_r += mean_j g_rj^2, w_r -= lr g_r / (sqrt(G_r) + eps). */
struct opt_step { enum optimizer kind; float learning_rate, epsilon; };

/* The first gradient that was not finite, if any. */
struct device_fault {
    bool dense, row;         /* which kind of update met it; both false: none                */
    uint32_t slot;           /* row: the slot of the first such row of that update           */
};

struct device {
    const struct device_ops *ops;
    uint32_t lanes;
    uint32_t siblings;       /* devices of this kind on this machine, itself included: trainers
                                take them in turn                                           */
    bool host_memory;        /* device memory is host memory: pointers may be read and written
                                directly whenever nothing is under way (after `wait`)       */
};

typedef enum st device_task(void *ctx, uint32_t lane, uint32_t task);

struct device_ops {
    const char *name;
    void (*close)(struct device *d);
    /* Device memory, 64-byte aligned, zeroed. NULL: out of memory. free waits for its users. */
    void *(*alloc)(struct device *d, size_t bytes);
    void (*free)(struct device *d, void *p, size_t bytes);
    /* Host memory that copies to and from the device are fastest with; 64-byte aligned. */
    void *(*host_alloc)(struct device *d, size_t bytes);
    void (*host_free)(struct device *d, void *p, size_t bytes);
    size_t (*free_bytes)(struct device *d);  /* device memory that alloc could still give     */

    /* --- order ------------------------------------------------------------------------------ */

    /* fn(ctx, lane, task) for every task in 0..n_tasks-1, independent of each other. The first
     * failure in task order is returned; the others still run. */
    enum st (*parallel)(struct device *d, uint32_t n_tasks, device_task *fn, void *ctx);
    /* Do what fn(ctx) issues: it may be called once, and what it issued then repeated for as long
     * as *graph holds. So fn must issue the same calls with the same arguments each time: what
     * changes lies in device memory. Only [slice] calls, parallel and prepare. *graph: NULL before
     * the first time; closed by graph_free, which takes NULL. */
    enum st (*repeat)(struct device *d, void **graph, enum st (*fn)(void *ctx), void *ctx);
    void (*graph_free)(struct device *d, void *graph);
    /* Until all that was issued before `mark` was given (0: all up to now) is complete. Failures of
     * the accelerator itself are reported here at the latest. */
    enum st (*wait)(struct device *d, uint64_t mark);
    /* Whether a not finite gradient was met by updates that are complete (call wait first). From the
     * first one on, no update writes anything any more (I5). */
    enum st (*fault)(struct device *d, struct device_fault *out);

    /* --- bytes and rows ----------------------------------------------------------------------- */

    /* Between host and device. With mark != NULL, host of copy_out must be from host_alloc. */
    enum st (*copy_in)(struct device *d, void *to, const void *host, size_t bytes);
    enum st (*copy_out)(struct device *d, const void *from, void *host, size_t bytes,
                        uint64_t *mark);
    /* Rows of a cache `table` [cap][stride] <-> packed host rows [n][width], width <= stride:
     * table[slot[i]][0..width) = host[i]. host: unaligned bytes, but from host_alloc where mark !=
     * NULL. slot: host memory, here and below. */
    enum st (*rows_put)(struct device *d, float *table, uint32_t stride, const uint32_t *slot,
                        uint32_t n, const void *host, uint32_t width);
    enum st (*rows_get)(struct device *d, const float *table, uint32_t stride,
                        const uint32_t *slot, uint32_t n, void *host, uint32_t width,
                        uint64_t *mark);
    /* to[to_slot[i]] = from[from_slot[i]], `width` floats; to_slot NULL: i. Device to device. */
    enum st (*rows_copy)(struct device *d, const float *from, uint32_t from_stride,
                         const uint32_t *from_slot, uint32_t n, float *to, uint32_t to_stride,
                         const uint32_t *to_slot, uint32_t width);

    /* --- weights -------------------------------------------------------------------------------- */

    size_t (*weight_floats)(struct device *d, uint32_t K, uint32_t N);
    size_t (*prepared_bytes)(struct device *d, uint32_t K, uint32_t N);  /* may be 0           */
    enum st (*weight_put)(struct device *d, uint32_t K, uint32_t N, const float *host, float *w);
    enum st (*weight_get)(struct device *d, uint32_t K, uint32_t N, const float *w, float *host);
    /* [slice] Bring l->prepared up to date with l->w. */
    enum st (*prepare)(struct device *d, uint32_t lane, const struct linear *l);

    /* --- one slice -------------------------------------------------------------------------- */

    /* [slice] y = x W^T + b.  x (B,K)  y (B,N), its rows ldy >= N floats apart: the bottom MLP
     * writes straight into t. */
    enum st (*linear_forward)(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                              const float *x, float *y, uint32_t ldy);
    /* [slice] dy (B,N) is the gradient of y and is overwritten (masked where relu and y == 0);
     * dw = dy^T x, db (N) = sum over samples of dy in sample order, dx (B,K) = dy W unless NULL.
     * Rows of y and of dy are ldy floats apart. */
    enum st (*linear_backward)(struct device *d, uint32_t lane, uint32_t B,
                               const struct linear *l, const float *x, const float *y,
                               uint32_t ldy, float *dy, float *dw, float *db, float *dx);
    /* [slice] t[b][1 + f][:] = table[slot[b][f]][0..D)   t (B,F+1,D): entry 0 is left alone.
     * slot: device memory. */
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
     * NULL for evaluation. All device memory. */
    enum st (*bce)(struct device *d, uint32_t lane, uint32_t B, const float *logit,
                   const float *label, float scale, float *dlogit, float *loss, float *prob);

    /* --- sums and updates: the whole of a trainer's share in one call --------------------------- */

    /* out[i][:] = tree sum over slices of (sum in list order inside a slice) of the look-up
     * gradients in dt: item k = b * F + f is dt[b][1 + f]. Items of a segment ascend; item k is of
     * slice first_slice + k / items_per_slice: dt holds a trainer's samples, the tree stands over
     * the slices of the global batch. */
    enum st (*row_grads)(struct device *d, const float *dt, uint32_t F, uint32_t D,
                         const struct seg_list *s, uint32_t first_slice, uint32_t items_per_slice,
                         float *out);
    /* out[i][:] = tree sum of vec[item[k]][:] at positions pos[k] (host; parallel to item,
     * ascending and distinct within a segment). */
    enum st (*tree_sum)(struct device *d, const float *vec, uint32_t D, const struct seg_list *s,
                        const uint8_t *pos, float *out);
    /* out[0..n) = tree sum of n_parts vectors of n floats at ascending positions pos. n_parts >= 1;
     * part: host array of device pointers. */
    enum st (*dense_sum)(struct device *d, const float *const *part, const uint8_t *pos,
                         uint32_t n_parts, size_t n, float *out);

    /* One step for rows slot[i] of `table` (record: D values, then state) with grad[i][D]. Writes
     * nothing, and sets the fault, when any of the gradients is not finite. */
    enum st (*row_update)(struct device *d, const struct opt_step *o, float *table,
                          uint32_t stride, uint32_t D, const uint32_t *slot, const float *grad,
                          uint32_t n);
    /* Element-wise step for n dense weights; state [n] (unused for sgd); rowwise = adagrad. Not
     * finite: as above. */
    enum st (*dense_update)(struct device *d, const struct opt_step *o, float *w, float *state,
                            const float *grad, size_t n);
};

/* ST_CONFIG, logged: this build, or this machine, has no such device. */
MUST_USE enum st device_open(enum device_kind kind, const struct device_cfg *cfg,
                             struct device **out);
void device_close(struct device *d); /* NULL ok */

#endif
