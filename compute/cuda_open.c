/* compute/cuda_open.c - finding a GPU, making what a device needs on it, and giving it back. */
#include "base/log.h"
#include "base/mem.h"
#include "compute/cuda.h"
#include "compute/cuda_blas.h"

static const struct cuda_tuning TUNING = {(size_t)64 << 20, (size_t)32 << 20};

enum { OLDEST_MAJOR = 8 }; /* compute capability 8.0: bf16, tf32, copies into shared memory */

/* --- giving back ---------------------------------------------------------------------------- */

/* Failures of a device that is given up were said before, or tell nobody anything. */
static void stream_close(cudaStream_t s)
{
    if (s != NULL) (void)cudaStreamDestroy(s);
}

static void event_close(cudaEvent_t e)
{
    if (e != NULL) (void)cudaEventDestroy(e);
}

static void lane_close(struct cuda_lane *l)
{
    for (uint32_t i = 0; i < l->n_scratch; i++) (void)cudaFree(l->scratch[i]);
    if (l->workspace != NULL) (void)cudaFree(l->workspace);
    event_close(l->joined);
    stream_close(l->stream);
}

static void cuda_close(struct device *dev)
{
    struct cuda_device *d = cuda_of(dev);
    if (d->out != NULL) (void)cuda_wait(dev, 0);
    product_close(d);
    stage_close(&d->to_host);
    stage_close(&d->to_device);
    for (uint32_t i = 0; i < CUDA_MAX_LANES; i++) lane_close(&d->lane[i]);
    for (uint32_t i = 0; i < CUDA_MARKS; i++) event_close(d->mark[i]);
    event_close(d->fault_read);
    if (d->fault_host != NULL) (void)cudaFreeHost(d->fault_host);
    if (d->fault != NULL) (void)cudaFree(d->fault);
    event_close(d->fork);
    stream_close(d->in);
    stream_close(d->compute);
    stream_close(d->out);
    (void)cudaGetLastError();
    mem_free(d);
}

/* --- making --------------------------------------------------------------------------------- */

static enum st stream_open(struct cuda_device *d, cudaStream_t *s)
{
    return CUDA(d, cudaStreamCreateWithFlags, (s, cudaStreamNonBlocking));
}

static enum st event_open(struct cuda_device *d, cudaEvent_t *e)
{
    return CUDA(d, cudaEventCreateWithFlags, (e, cudaEventDisableTiming));
}

static enum st lane_open(struct cuda_device *d, struct cuda_lane *l)
{
    enum st st;
    TRY(stream_open(d, &l->stream), err);
    TRY(event_open(d, &l->joined), err);
    st = cuda_memory(d, d->tuning.workspace_bytes, &l->workspace);
err: return st;
}

static enum st order_open(struct cuda_device *d)
{
    enum st st;
    TRY(stream_open(d, &d->in), err);
    TRY(stream_open(d, &d->compute), err);
    TRY(stream_open(d, &d->out), err);
    TRY(event_open(d, &d->fork), err);
    for (uint32_t i = 0; i < CUDA_MARKS; i++) TRY(event_open(d, &d->mark[i]), err);
    for (uint32_t i = 0; i < d->base.lanes; i++) TRY(lane_open(d, &d->lane[i]), err);
err: return st;
}

static enum st fault_open(struct cuda_device *d)
{
    enum st st;
    void *fault, *host;
    TRY(cuda_memory(d, sizeof(*d->fault), &fault), err);
    d->fault = fault;
    TRY(cuda_pinned(d, sizeof(*d->fault), &host), err);
    d->fault_host = host;
    TRY(event_open(d, &d->fault_read), err);
    TRY(CUDA(d, cudaMemsetAsync, (d->fault, 0, sizeof(*d->fault), d->compute)), err);
    st = CUDA(d, cudaStreamSynchronize, (d->compute));
err: return st;
}

static enum st parts_open(struct cuda_device *d)
{
    enum st st;
    TRY(cuda_bind(d), err);
    TRY(order_open(d), err);
    TRY(fault_open(d), err);
    TRY(stage_open(d, &d->to_device, d->tuning.stage_bytes), err);
    TRY(stage_open(d, &d->to_host, d->tuning.stage_bytes), err);
    st = product_open(d);
err: return st;
}

/* --- which GPU ------------------------------------------------------------------------------ */

static enum st no_gpu(const char *why)
{
    return log_fail(ST_CONFIG, "cluster.device", "cuda: %s; see nvidia-smi, or set it to cpu", why);
}

static enum st choose(uint32_t local_rank, int *ordinal, int *n)
{
    int major = 0;
    cudaError_t e = cudaGetDeviceCount(n);
    if (e == cudaSuccess && *n == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) {
        *ordinal = (int)(local_rank % (uint32_t)*n);
        e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *ordinal);
    }
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return no_gpu(cudaGetErrorString(e));
    }
    if (major < OLDEST_MAJOR) return no_gpu("this GPU is older than compute capability 8.0");
    return ST_OK;
}

static void fill_in(struct device_ops *ops)
{
    ops->name = "cuda";
    ops->close = cuda_close;
    cuda_own_calls(ops);
    cuda_move_calls(ops);
    cuda_kernel_calls(ops);
    cuda_linear_calls(ops);
}

enum st cuda_open_tuned(const struct device_cfg *cfg, const struct cuda_tuning *tuning,
                        struct device **out)
{
    int ordinal = 0, n = 0;
    enum st st;
    TRY(choose(cfg->local_rank, &ordinal, &n), err);
    TRY(cuda_blas_load(), err);
    struct cuda_device *d = mem_zalloc(1, sizeof(*d));
    if (d == NULL) return log_fail(ST_NOMEM, "cuda device", "out of memory; free some");
    uint32_t lanes = cfg->lanes > 0 ? cfg->lanes : 1;
    fill_in(&d->ops);
    d->base.ops = &d->ops;
    d->base.lanes = lanes < CUDA_MAX_LANES ? lanes : CUDA_MAX_LANES;
    d->base.siblings = (uint32_t)n;
    d->ordinal = ordinal;
    d->tuning = *tuning;
    d->precision = cfg->precision;
    TRY(parts_open(d), err_device);
    *out = &d->base;
    return ST_OK;

err_device: cuda_close(&d->base);
err:        return st;
}

enum st cuda_open(const struct device_cfg *cfg, struct device **out)
{
    return cuda_open_tuned(cfg, &TUNING, out);
}
