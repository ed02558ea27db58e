/* compute/cuda_stage.c - staging memory between host and GPU, in rings (cuda.h).
 *
 * Why data passes through it in both directions: a copy engine that wrote where a caller points
 * would have to wait for all arithmetic given out before, which may still read there, and the other
 * way round. Into a place of its own it waits for nothing; the move from there to where it belongs
 * is done by `compute`, in order, at the speed of GPU memory. */
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "compute/cuda.h"

enum { STAGE_ALIGN = 256, CUTS = 4 };

static size_t rounded(size_t bytes)
{
    return (bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
}

/* --- opening -------------------------------------------------------------------------------- */

static void memory_close(struct stage *s)
{
    if (s->dev != NULL) (void)cudaFree(s->dev);
    if (s->host != NULL) (void)cudaFreeHost(s->host);
    s->host = s->dev = NULL;
}

static enum st memory_open(struct cuda_device *d, struct stage *s, size_t bytes)
{
    void *host, *dev;
    enum st st;
    TRY(cuda_pinned(d, bytes, &host), err);
    s->host = host;
    TRY(cuda_memory(d, bytes, &dev), err);
    s->dev = dev;
    s->bytes = bytes;
err: return st;
}

enum st stage_open(struct cuda_device *d, struct stage *s, size_t bytes)
{
    enum st st;
    TRY(memory_open(d, s, rounded(bytes)), err);
    for (uint32_t i = 0; i < STAGE_PIECES; i++) {
        struct stage_piece *p = &s->piece[i];
        TRY(CUDA(d, cudaEventCreateWithFlags, (&p->ready, cudaEventDisableTiming)), err);
        TRY(CUDA(d, cudaEventCreateWithFlags, (&p->used, cudaEventDisableTiming)), err);
    }
err: return st;
}

void stage_close(struct stage *s)
{
    for (uint32_t i = 0; i < STAGE_PIECES; i++) {
        if (s->piece[i].ready != NULL) (void)cudaEventDestroy(s->piece[i].ready);
        if (s->piece[i].used != NULL) (void)cudaEventDestroy(s->piece[i].used);
    }
    memory_close(s);
}

size_t stage_cut(const struct stage *s)
{
    return s->bytes / CUTS;
}

/* --- pieces --------------------------------------------------------------------------------- */

static enum st give_back_oldest(struct cuda_device *d, struct stage *s)
{
    struct stage_piece *p = &s->piece[s->first];
    enum st st = CUDA(d, cudaEventSynchronize, (p->used));
    s->tail = p->end;
    s->first = (s->first + 1) % STAGE_PIECES;
    s->n--;
    return st;
}

/* A list that has to be in one piece is larger than the stage. Rare: sizes settle. */
static enum st grow(struct cuda_device *d, struct stage *s, size_t bytes)
{
    enum st st;
    TRY(cuda_wait(&d->base, 0), err);
    memory_close(s);
    s->bytes = 0;
    s->head = s->tail = 0;
    s->first = s->n = 0;
    st = memory_open(d, s, rounded(2 * bytes));
err: return st;
}

enum st stage_take(struct cuda_device *d, struct stage *s, size_t bytes, struct stage_piece **out)
{
    size_t need = bytes > 0 ? rounded(bytes) : STAGE_ALIGN;
    enum st st;
    CHECK(!d->recording, "nothing between host and device is part of a graph");
    if (need > s->bytes) TRY(grow(d, s, need), err);

    uint64_t at = s->head;
    if (at % s->bytes + need > s->bytes) at += s->bytes - at % s->bytes; /* not around the end */
    while (s->n > 0 && (s->n == STAGE_PIECES || at + need > s->tail + s->bytes))
        TRY(give_back_oldest(d, s), err);
    if (s->n == 0) s->tail = at;

    struct stage_piece *p = &s->piece[(s->first + s->n++) % STAGE_PIECES];
    p->host = s->host + at % s->bytes;
    p->dev = s->dev + at % s->bytes;
    p->end = s->head = at + need;
    *out = p;
    return ST_OK;

err: return st;
}

enum st stage_send(struct cuda_device *d, struct stage_piece *p, size_t bytes)
{
    enum st st = ST_OK;
    if (bytes > 0)
        TRY(CUDA(d, cudaMemcpyAsync, (p->dev, p->host, bytes, cudaMemcpyHostToDevice, d->in)), err);
    TRY(CUDA(d, cudaEventRecord, (p->ready, d->in)), err);
    st = CUDA(d, cudaStreamWaitEvent, (d->compute, p->ready, 0));
err: return st;
}

enum st stage_sent(struct cuda_device *d, struct stage_piece *p)
{
    return CUDA(d, cudaEventRecord, (p->used, d->compute));
}

enum st stage_fetch(struct cuda_device *d, struct stage_piece *p, size_t bytes, void *host)
{
    enum st st;
    TRY(CUDA(d, cudaEventRecord, (p->ready, d->compute)), err);
    TRY(CUDA(d, cudaStreamWaitEvent, (d->out, p->ready, 0)), err);
    if (bytes > 0)
        TRY(CUDA(d, cudaMemcpyAsync, (host != NULL ? host : p->host, p->dev, bytes,
                                      cudaMemcpyDeviceToHost, d->out)), err);
    st = CUDA(d, cudaEventRecord, (p->used, d->out));
err: return st;
}

/* --- lists ---------------------------------------------------------------------------------- */

enum st stage_lists(struct cuda_device *d, struct stage_list *list, uint32_t n,
                    struct stage_piece **out)
{
    enum { LIST_ALIGN = 16 };
    struct stage_piece *p;
    size_t bytes = 0, at = 0;
    enum st st;
    for (uint32_t i = 0; i < n; i++)
        bytes += (list[i].bytes + LIST_ALIGN - 1) / LIST_ALIGN * LIST_ALIGN;
    TRY(stage_take(d, &d->to_device, bytes, &p), err);
    for (uint32_t i = 0; i < n; i++) {
        if (list[i].bytes > 0) memcpy(p->host + at, list[i].host, list[i].bytes);
        list[i].dev = p->dev + at;
        at += (list[i].bytes + LIST_ALIGN - 1) / LIST_ALIGN * LIST_ALIGN;
    }
    TRY(stage_send(d, p, bytes), err);
    *out = p;
err: return st;
}
