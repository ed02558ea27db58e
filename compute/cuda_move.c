/* compute/cuda_move.c - bytes and rows between host and GPU, through staging memory, and rows from
 * one place on the GPU to another. */
#include <string.h>

#include "base/check.h"
#include "compute/cuda.h"

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* --- in ------------------------------------------------------------------------------------- */

static enum st copy_in(struct device *dev, void *to, const void *host, size_t bytes)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    TRY(cuda_bind(d), err);
    for (size_t at = 0, n; at < bytes; at += n) {
        struct stage_piece *p;
        n = smaller(bytes - at, stage_cut(&d->to_device));
        TRY(stage_take(d, &d->to_device, n, &p), err);
        memcpy(p->host, (const char *)host + at, n);
        TRY(stage_send(d, p, n), err);
        TRY(CUDA(d, cudaMemcpyAsync, ((char *)to + at, p->dev, n, cudaMemcpyDeviceToDevice,
                                      d->compute)), err);
        TRY(stage_sent(d, p), err);
    }
err: return st;
}

/* How many rows of `bytes` go in one piece: one at least, the stage grows if it has to. */
static uint32_t rows_at_once(const struct stage *s, uint32_t n, size_t bytes)
{
    size_t most = stage_cut(s) / bytes;
    return (uint32_t)smaller(n, most > 0 ? most : 1);
}

static enum st rows_put(struct device *dev, float *table, uint32_t stride, const uint32_t *slot,
                        uint32_t n, const void *host, uint32_t width)
{
    struct cuda_device *d = cuda_of(dev);
    size_t row = width * sizeof(*table);
    enum st st;
    TRY(cuda_bind(d), err);
    for (uint32_t at = 0, m; at < n; at += m) {
        m = rows_at_once(&d->to_device, n - at, row + sizeof(*slot));
        struct stage_list list[] = {{.host = slot + at, .bytes = m * sizeof(*slot)},
                                    {.host = (const char *)host + at * row, .bytes = m * row}};
        struct stage_piece *p;
        TRY(stage_lists(d, list, 2, &p), err);
        TRY(CUDA(d, cuda_rows_move, (d->compute, list[1].dev, width, NULL, m, table, stride,
                                     list[0].dev, width)), err);
        TRY(stage_sent(d, p), err);
    }
err: return st;
}

/* --- out ------------------------------------------------------------------------------------ */

/* The mark of what `out` was given so far, which waits for what `compute` was given before. */
static enum st give_mark(struct cuda_device *d, uint64_t *mark)
{
    uint64_t m = d->marks + 1;
    enum st st = CUDA(d, cudaEventRecord, (d->mark[m % CUDA_MARKS], d->out));
    if (st != ST_OK) return st;
    *mark = d->marks = m;
    return ST_OK;
}

/* `compute` was given what fills a piece with `bytes` for `host`: send it there; `later`, without
 * waiting for it. */
static enum st fetch(struct cuda_device *d, struct stage_piece *p, size_t bytes, void *host,
                     bool later)
{
    enum st st;
    TRY(stage_fetch(d, p, bytes, later ? host : NULL), err);
    if (later) return ST_OK;
    TRY(CUDA(d, cudaEventSynchronize, (p->used)), err);
    if (bytes > 0) memcpy(host, p->host, bytes);
err: return st;
}

/* At least one piece, of 0 bytes if need be, so that a mark stands for all before it. */
static enum st copy_out(struct device *dev, const void *from, void *host, size_t bytes,
                        uint64_t *mark)
{
    struct cuda_device *d = cuda_of(dev);
    size_t at = 0, n;
    enum st st;
    TRY(cuda_bind(d), err);
    do {
        struct stage_piece *p;
        n = smaller(bytes - at, stage_cut(&d->to_host));
        TRY(stage_take(d, &d->to_host, n, &p), err);
        if (n > 0)
            TRY(CUDA(d, cudaMemcpyAsync, (p->dev, (const char *)from + at, n,
                                          cudaMemcpyDeviceToDevice, d->compute)), err);
        TRY(fetch(d, p, n, (char *)host + at, mark != NULL), err);
        at += n;
    } while (at < bytes);
    if (mark != NULL) st = give_mark(d, mark);
err: return st;
}

static enum st rows_get(struct device *dev, const float *table, uint32_t stride,
                        const uint32_t *slot, uint32_t n, void *host, uint32_t width,
                        uint64_t *mark)
{
    struct cuda_device *d = cuda_of(dev);
    size_t row = width * sizeof(*table);
    uint32_t at = 0, m;
    enum st st;
    TRY(cuda_bind(d), err);
    do {
        m = rows_at_once(&d->to_host, n - at, row + sizeof(*slot));
        struct stage_list list = {.host = slot + at, .bytes = m * sizeof(*slot)};
        struct stage_piece *in, *out;
        TRY(stage_lists(d, &list, 1, &in), err);
        TRY(stage_take(d, &d->to_host, m * row, &out), err);
        TRY(CUDA(d, cuda_rows_move, (d->compute, table, stride, list.dev, m, (float *)out->dev,
                                     width, NULL, width)), err);
        TRY(stage_sent(d, in), err);
        TRY(fetch(d, out, m * row, (char *)host + at * row, mark != NULL), err);
        at += m;
    } while (at < n);
    if (mark != NULL) st = give_mark(d, mark);
err: return st;
}

/* --- on the GPU ----------------------------------------------------------------------------- */

static enum st rows_copy(struct device *dev, const float *from, uint32_t from_stride,
                         const uint32_t *from_slot, uint32_t n, float *to, uint32_t to_stride,
                         const uint32_t *to_slot, uint32_t width)
{
    struct cuda_device *d = cuda_of(dev);
    size_t bytes = n * sizeof(*from_slot);
    struct stage_list list[] = {{.host = from_slot, .bytes = bytes},
                                {.host = to_slot, .bytes = to_slot != NULL ? bytes : 0}};
    struct stage_piece *p;
    enum st st;
    if (n == 0) return ST_OK;
    TRY(cuda_bind(d), err);
    TRY(stage_lists(d, list, 2, &p), err);
    TRY(CUDA(d, cuda_rows_move, (d->compute, from, from_stride, list[0].dev, n, to, to_stride,
                                 to_slot != NULL ? list[1].dev : NULL, width)), err);
    st = stage_sent(d, p);
err: return st;
}

void cuda_move_calls(struct device_ops *ops)
{
    ops->copy_in = copy_in;
    ops->copy_out = copy_out;
    ops->rows_put = rows_put;
    ops->rows_get = rows_get;
    ops->rows_copy = rows_copy;
}
