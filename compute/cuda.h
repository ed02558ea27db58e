/* compute/cuda.h - the CUDA backend, between its files only. What runs on the GPU: cuda_kernels.h.
 *
 * Streams of one device, and what keeps them in order:
 *
 *   in       host -> staging memory on the GPU           waits for nothing
 *   compute  staging -> where it belongs, sums, updates  waits for `in`, piece by piece
 *   lane i   tasks of `parallel`                         fork from compute, join into it, by events
 *   out      staging memory on the GPU -> host           waits for compute, piece by piece
 *
 * Only `compute` and the lanes touch memory that callers know. Copies touch staging memory only
 * (struct stage), so they overlap with arithmetic and never with what it reads. A piece of staging
 * memory is used again when its last event has been reached; the host waits for that. */
#ifndef CHANTER_COMPUTE_CUDA_H
#define CHANTER_COMPUTE_CUDA_H

#include "compute/cuda_api.h"
#include "compute/cuda_kernels.h"
#include "compute/device.h"

enum { CUDA_MAX_LANES = 16, CUDA_MARKS = 64, STAGE_PIECES = 128, SCRATCH_BLOCKS = 32 };

/* Pinned host memory and GPU memory of the same size, used in a ring: what is at one place in one
 * of them is copied to the same place in the other. */
struct stage_piece {
    cudaEvent_t ready;           /* its first half is done: it may be read on the GPU          */
    cudaEvent_t used;            /* all is done                                                */
    uint64_t end;
    char *host, *dev;
};
struct stage {
    char *host, *dev;            /* [bytes] each                                               */
    size_t bytes;
    uint64_t head, tail;         /* bytes ever taken, ever given back; a place is modulo bytes */
    struct stage_piece piece[STAGE_PIECES];  /* a ring: [first, first + n)                     */
    uint32_t first, n;
};

struct cuda_lane {
    cudaStream_t stream;
    cudaEvent_t joined;
    void *workspace;             /* [workspace_bytes] of cuBLASLt                              */
    /* Narrowed factors and partial sums of one layer. Grows by a new block; older ones stay until
     * close, because a recorded graph may use them. */
    char *scratch[SCRATCH_BLOCKS];
    size_t scratch_bytes;        /* of the newest block                                        */
    uint32_t n_scratch;
};

struct cuda_tuning {
    size_t stage_bytes;          /* of each direction; 64 MiB                                  */
    size_t workspace_bytes;      /* of each lane; 32 MiB, what cuBLAS asks for on Hopper       */
};

/* COMPUTE owns it. alloc may be called by others: it uses `in` and changes nothing here. */
struct cuda_device {
    struct device base;
    struct device_ops ops;
    int ordinal;
    struct cuda_tuning tuning;
    cudaStream_t in, compute, out;
    cudaEvent_t fork;
    struct cuda_lane lane[CUDA_MAX_LANES];
    struct stage to_device, to_host;
    cudaEvent_t mark[CUDA_MARKS];     /* mark m: [m % CUDA_MARKS]                              */
    uint64_t marks, marks_done;       /* last one given; last one known to be reached          */
    struct cuda_fault *fault;         /* on the GPU                                            */
    struct cuda_fault *fault_host;    /* pinned                                                */
    cudaEvent_t fault_read;
    enum precision precision;
    cublasLtHandle_t blas;
    struct cuda_product *product;     /* [n_products], owns: cuda_linear.c                     */
    uint32_t n_products, cap_products;
    bool in_parallel, recording;
    bool failed;                      /* said so already: what follows is no news              */
    const char *recording_failed;     /* the call that cannot be recorded; NULL: none          */
};

static inline struct cuda_device *cuda_of(struct device *d)
{
    return (struct cuda_device *)d;
}

/* --- cuda_open.c ---------------------------------------------------------------------------- */

/* ST_CONFIG, logged: no GPU that can be used. */
MUST_USE enum st cuda_open(const struct device_cfg *cfg, struct device **out);
MUST_USE enum st cuda_open_tuned(const struct device_cfg *cfg, const struct cuda_tuning *tuning,
                                 struct device **out);

/* --- cuda.c --------------------------------------------------------------------------------- */

/* The device of this thread's calls: before anything is put on a stream. */
enum st cuda_bind(struct cuda_device *d);
/* What call `name` came back with, as a status: logged, once a device. */
enum st cuda_said(struct cuda_device *d, cudaError_t e, const char *name);
/* The same for something that is said in another library's words. */
enum st cuda_fails(struct cuda_device *d, const char *name, const char *what);
/* CUDA(d, cudaEventRecord, (event, stream)) */
#define CUDA(d, name, args) cuda_said(d, name args, #name)
/* GPU memory that is not zeroed; logged when there is none. cudaFree gives it back. */
enum st cuda_memory(struct cuda_device *d, size_t bytes, void **out);
enum st cuda_pinned(struct cuda_device *d, size_t bytes, void **out);
/* Where a [slice] call goes. */
cudaStream_t cuda_stream_of(struct cuda_device *d, uint32_t lane);
enum st cuda_wait(struct device *d, uint64_t mark);
void cuda_own_calls(struct device_ops *ops);     /* fills in alloc .. fault                  */

/* --- cuda_stage.c --------------------------------------------------------------------------- */

enum st stage_open(struct cuda_device *d, struct stage *s, size_t bytes);
void stage_close(struct stage *s);      /* after cuda_wait; what was opened of it */
/* Largest piece that data which can be cut is moved in: several under way at once. */
size_t stage_cut(const struct stage *s);
/* A piece of `bytes`; waits for older ones when there is no room. The stage grows, after waiting
 * for everything, when it is smaller than that. The piece stays valid until it is used. */
enum st stage_take(struct cuda_device *d, struct stage *s, size_t bytes, struct stage_piece **out);
/* to_device: piece->host [bytes] was written; `compute` may read piece->dev after this. */
enum st stage_send(struct cuda_device *d, struct stage_piece *p, size_t bytes);
/* to_device: what `compute` was given so far is all that reads the piece. */
enum st stage_sent(struct cuda_device *d, struct stage_piece *p);
/* to_host: `compute` was given what writes piece->dev [bytes]; it goes to `host`, which is pinned,
 * or, when NULL, to piece->host. Wait for piece->used before reading there. */
enum st stage_fetch(struct cuda_device *d, struct stage_piece *p, size_t bytes, void *host);

/* Host arrays that one kernel call reads, in one piece. */
struct stage_list { const void *host; size_t bytes; const void *dev; };
enum st stage_lists(struct cuda_device *d, struct stage_list *list, uint32_t n,
                    struct stage_piece **out);

/* --- cuda_product.c ------------------------------------------------------------------------- */

/* D (m,n) = op(A) (m,k) op(B) (k,n), columns first, then the epilogue. Compared as bytes: no
 * padding, no member left out. */
struct cuda_shape {
    uint32_t m, n, k, lda, ldb, ldd;
    uint32_t align_a, align_b, align_d;  /* bytes that addresses and columns are aligned to    */
    uint32_t ta, tb;                     /* cublasOperation_t                                  */
    uint32_t bf16;                       /* A and B, or else f32                               */
    uint32_t epilogue;                   /* cublasLtEpilogue_t                                 */
};
struct cuda_factors { const void *a, *b; float *d; const float *bias; };
enum { CUDA_BEST_ALIGN = 16 };           /* of bytes; a bias is always aligned to that         */

enum st product_open(struct cuda_device *d);
void product_close(struct cuda_device *d);  /* after cuda_wait; what was opened of it          */
/* Not for the first time while a graph is recorded. */
enum st product_run(struct cuda_device *d, uint32_t lane, const struct cuda_shape *shape,
                    struct cuda_factors f);
/* Does this shape's fused ReLU let NaN through, as I5 wants it? */
enum st product_keeps_nan(struct cuda_device *d, const struct cuda_shape *shape, bool *out);

/* --- the rest of struct device_ops ---------------------------------------------------------- */

void cuda_move_calls(struct device_ops *ops);    /* cuda_move.c: copy_in .. rows_copy        */
void cuda_kernel_calls(struct device_ops *ops);  /* cuda_calls.c: gather .. dense_update     */
void cuda_linear_calls(struct device_ops *ops);  /* cuda_linear.c: weights .. linear_*       */

#endif
