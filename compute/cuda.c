/* compute/cuda.c - a GPU as a device: its memory, its order (cuda.h), its failures.
 *
 * The first failure of a GPU is logged and ends its use: CUDA reports the same fault again at every
 * later call, and so do we, in silence. */
#include "compute/cuda.h"

#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

/* --- failures ------------------------------------------------------------------------------- */

enum st cuda_fails(struct cuda_device *d, const char *name, const char *what)
{
    if (d->recording) {
        if (d->recording_failed == NULL) d->recording_failed = name;
        return ST_DEVICE;
    }
    if (d->failed) return ST_DEVICE;
    d->failed = true;
    return log_fail(ST_DEVICE, "cuda device", "%s: %s; look at nvidia-smi and the system's log, "
                    "and start again: training goes on from the newest snapshot", name, what);
}

enum st cuda_said(struct cuda_device *d, cudaError_t e, const char *name)
{
    if (e == cudaSuccess) return ST_OK;
    (void)cudaGetLastError(); /* said here: not again by the next launch that asks */
    return cuda_fails(d, name, cudaGetErrorString(e));
}

enum st cuda_bind(struct cuda_device *d)
{
    static _Thread_local int bound = -1; /* a thread's device is 0 until it says otherwise */
    if (bound == d->ordinal) return ST_OK;
    enum st st = CUDA(d, cudaSetDevice, (d->ordinal));
    if (st == ST_OK) bound = d->ordinal;
    return st;
}

/* --- memory --------------------------------------------------------------------------------- */

static enum st no_memory(struct cuda_device *d, cudaError_t e, const char *name, size_t bytes,
                         const char *advice)
{
    if (e != cudaErrorMemoryAllocation) return cuda_said(d, e, name);
    (void)cudaGetLastError();
    return log_fail(ST_NOMEM, "cuda device", "%s of %zu bytes: %s; %s", name, bytes,
                    cudaGetErrorString(e), advice);
}

enum st cuda_memory(struct cuda_device *d, size_t bytes, void **out)
{
    return no_memory(d, cudaMalloc(out, bytes > 0 ? bytes : 1), "cudaMalloc", bytes,
                     "lower cluster.cache_rows or train.global_batch");
}

enum st cuda_pinned(struct cuda_device *d, size_t bytes, void **out)
{
    return no_memory(d, cudaHostAlloc(out, bytes > 0 ? bytes : 1, cudaHostAllocPortable),
                     "cudaHostAlloc", bytes, "the host has too little memory, or may lock too "
                     "little of it (ulimit -l)");
}

/* On `in`: it takes calls from any thread, and nothing on it waits for arithmetic. */
static void *cuda_alloc(struct device *dev, size_t bytes)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    void *p;
    TRY(cuda_bind(d), err);
    TRY(cuda_memory(d, bytes, &p), err);
    if (bytes > 0) TRY(CUDA(d, cudaMemsetAsync, (p, 0, bytes, d->in)), err_memory);
    TRY(CUDA(d, cudaStreamSynchronize, (d->in)), err_memory);
    return p;

err_memory: (void)cudaFree(p);
err:        return NULL;
}

static void cuda_free(struct device *dev, void *p, size_t bytes)
{
    (void)bytes;
    if (p == NULL) return;
    (void)cuda_wait(dev, 0);
    (void)CUDA(cuda_of(dev), cudaFree, (p));
}

static void *cuda_host_alloc(struct device *dev, size_t bytes)
{
    struct cuda_device *d = cuda_of(dev);
    void *p;
    if (cuda_bind(d) != ST_OK || cuda_pinned(d, bytes, &p) != ST_OK) return NULL;
    memset(p, 0, bytes);
    return p;
}

static void cuda_host_free(struct device *dev, void *p, size_t bytes)
{
    (void)bytes;
    if (p == NULL) return;
    (void)cuda_wait(dev, 0);
    (void)CUDA(cuda_of(dev), cudaFreeHost, (p));
}

static size_t cuda_free_bytes(struct device *dev)
{
    struct cuda_device *d = cuda_of(dev);
    size_t left, total;
    if (cuda_bind(d) != ST_OK || CUDA(d, cudaMemGetInfo, (&left, &total)) != ST_OK) return 0;
    return left;
}

/* --- waiting -------------------------------------------------------------------------------- */

/* Lanes have joined `compute`, which waits for all that `in` brings. A mark's event may have been
 * recorded again for a later mark: then it stands for more than was asked for. */
enum st cuda_wait(struct device *dev, uint64_t mark)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    CHECK(mark <= d->marks, "a mark that this device gave");
    if (mark != 0 && mark <= d->marks_done) return ST_OK;
    TRY(cuda_bind(d), err);
    if (mark != 0) {
        TRY(CUDA(d, cudaEventSynchronize, (d->mark[mark % CUDA_MARKS])), err);
        d->marks_done = mark;
        return ST_OK;
    }
    TRY(CUDA(d, cudaStreamSynchronize, (d->in)), err);
    TRY(CUDA(d, cudaStreamSynchronize, (d->compute)), err);
    TRY(CUDA(d, cudaStreamSynchronize, (d->out)), err);
    d->marks_done = d->marks;
err: return st;
}

/* Read through `in`, past all that is still to be computed: updates that are complete have written
 * it, which is what was asked for. */
static enum st cuda_fault_of(struct device *dev, struct device_fault *out)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    TRY(cuda_bind(d), err);
    TRY(CUDA(d, cudaMemcpyAsync, (d->fault_host, d->fault, sizeof(*d->fault),
                                  cudaMemcpyDeviceToHost, d->in)), err);
    TRY(CUDA(d, cudaEventRecord, (d->fault_read, d->in)), err);
    TRY(CUDA(d, cudaEventSynchronize, (d->fault_read)), err);
    const struct cuda_fault *f = d->fault_host;
    *out = (struct device_fault){f->dense != 0, f->row != 0, f->row != 0 ? f->row - 1 : 0};
err: return st;
}

/* --- lanes ---------------------------------------------------------------------------------- */

cudaStream_t cuda_stream_of(struct cuda_device *d, uint32_t lane)
{
    CHECK(lane < d->base.lanes, "a lane of this device");
    return d->in_parallel ? d->lane[lane].stream : d->compute;
}

static enum st fork_lanes(struct cuda_device *d, uint32_t n)
{
    enum st st;
    TRY(CUDA(d, cudaEventRecord, (d->fork, d->compute)), err);
    for (uint32_t i = 0; i < n; i++)
        TRY(CUDA(d, cudaStreamWaitEvent, (d->lane[i].stream, d->fork, 0)), err);
err: return st;
}

static enum st join_lanes(struct cuda_device *d, uint32_t n)
{
    enum st st = ST_OK;
    for (uint32_t i = 0; i < n; i++) {
        TRY(CUDA(d, cudaEventRecord, (d->lane[i].joined, d->lane[i].stream)), err);
        TRY(CUDA(d, cudaStreamWaitEvent, (d->compute, d->lane[i].joined, 0)), err);
    }
err: return st;
}

static enum st cuda_parallel(struct device *dev, uint32_t n_tasks, device_task *fn, void *ctx)
{
    struct cuda_device *d = cuda_of(dev);
    uint32_t n_lanes = n_tasks < dev->lanes ? n_tasks : dev->lanes;
    enum st st;
    CHECK(!d->in_parallel, "tasks have no tasks");
    TRY(cuda_bind(d), err);
    TRY(fork_lanes(d, n_lanes), err);
    d->in_parallel = true;
    for (uint32_t task = 0; task < n_tasks; task++) {
        enum st one = fn(ctx, task % n_lanes, task);
        if (st == ST_OK) st = one;
    }
    d->in_parallel = false;
    enum st joined = join_lanes(d, n_lanes);
    if (st == ST_OK) st = joined;
err: return st;
}

/* --- repeating ------------------------------------------------------------------------------ */

/* The first time runs as it is: it loads kernels, chooses products and makes scratch memory, none
 * of which can be recorded. The second time is recorded. */
struct repeated {
    enum { REPEAT_RECORD, REPEAT_LAUNCH, REPEAT_DIRECTLY } next;
    cudaGraphExec_t exec;
};

static enum st record_graph(struct cuda_device *d, enum st (*fn)(void *ctx), void *ctx,
                            cudaGraphExec_t *exec)
{
    cudaGraph_t graph = NULL;
    d->recording = true;
    d->recording_failed = NULL;
    enum st st = CUDA(d, cudaStreamBeginCapture, (d->compute, cudaStreamCaptureModeThreadLocal));
    if (st != ST_OK) goto err;
    st = fn(ctx);
    enum st ended = CUDA(d, cudaStreamEndCapture, (d->compute, &graph));
    if (st == ST_OK) st = ended;
    if (st == ST_OK) st = CUDA(d, cudaGraphInstantiate, (exec, graph, 0));
    if (graph != NULL) (void)cudaGraphDestroy(graph);
err:
    d->recording = false;
    return st;
}

static enum st record_or_not(struct cuda_device *d, struct repeated *r, enum st (*fn)(void *ctx),
                             void *ctx)
{
    if (record_graph(d, fn, ctx, &r->exec) == ST_OK) {
        r->next = REPEAT_LAUNCH;
        return CUDA(d, cudaGraphLaunch, (r->exec, d->compute));
    }
    r->next = REPEAT_DIRECTLY;
    enum st st = fn(ctx);
    if (st == ST_OK) /* it was the recording's fault, not the GPU's */
        log_note("cuda device", "%s cannot be recorded as part of a graph; each step is issued "
                 "call by call, which is slower",
                 d->recording_failed != NULL ? d->recording_failed : "a call");
    return st;
}

static enum st cuda_repeat(struct device *dev, void **graph, enum st (*fn)(void *ctx), void *ctx)
{
    struct cuda_device *d = cuda_of(dev);
    struct repeated *r = *graph;
    enum st st;
    CHECK(!d->in_parallel && !d->recording, "COMPUTE repeats");
    TRY(cuda_bind(d), err);
    if (r == NULL) {
        TRY(fn(ctx), err);
        r = mem_zalloc(1, sizeof(*r));
        if (r == NULL) return ST_NOMEM;
        *graph = r;
        return ST_OK;
    }
    switch (r->next) {
    case REPEAT_RECORD: return record_or_not(d, r, fn, ctx);
    case REPEAT_LAUNCH: return CUDA(d, cudaGraphLaunch, (r->exec, d->compute));
    case REPEAT_DIRECTLY: return fn(ctx);
    }
err: return st;
}

static void cuda_graph_free(struct device *dev, void *graph)
{
    struct repeated *r = graph;
    if (r == NULL) return;
    (void)cuda_wait(dev, 0);
    if (r->exec != NULL) (void)CUDA(cuda_of(dev), cudaGraphExecDestroy, (r->exec));
    mem_free(r);
}

/* --- the table ------------------------------------------------------------------------------ */

void cuda_own_calls(struct device_ops *ops)
{
    ops->alloc = cuda_alloc;
    ops->free = cuda_free;
    ops->host_alloc = cuda_host_alloc;
    ops->host_free = cuda_host_free;
    ops->free_bytes = cuda_free_bytes;
    ops->parallel = cuda_parallel;
    ops->repeat = cuda_repeat;
    ops->graph_free = cuda_graph_free;
    ops->wait = cuda_wait;
    ops->fault = cuda_fault_of;
}
