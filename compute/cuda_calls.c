/* compute/cuda_calls.c - device calls that are one kernel each: their host arrays go through
 * staging memory, everything else is passed on. */
#include <string.h>

#include "base/check.h"
#include "base/tree.h"
#include "compute/cuda.h"

/* --- one slice ------------------------------------------------------------------------------ */

static enum st gather(struct device *dev, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                      const float *table, uint32_t stride, const uint32_t *slot, float *t)
{
    struct cuda_device *d = cuda_of(dev);
    return CUDA(d, cuda_rows_gather, (cuda_stream_of(d, lane), B, F, D, table, stride, slot, t));
}

static enum st interact_forward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F,
                                uint32_t D, const float *t, float *r)
{
    struct cuda_device *d = cuda_of(dev);
    return CUDA(d, cuda_interact_forward, (cuda_stream_of(d, lane), B, F, D, t, r));
}

static enum st interact_backward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F,
                                 uint32_t D, const float *t, const float *dr, float *dt)
{
    struct cuda_device *d = cuda_of(dev);
    return CUDA(d, cuda_interact_backward, (cuda_stream_of(d, lane), B, F, D, t, dr, dt));
}

static enum st bce(struct device *dev, uint32_t lane, uint32_t B, const float *logit,
                   const float *label, float scale, float *dlogit, float *loss, float *prob)
{
    struct cuda_device *d = cuda_of(dev);
    return CUDA(d, cuda_bce, (cuda_stream_of(d, lane), B, logit, label, scale, dlogit, loss, prob));
}

/* --- sums ----------------------------------------------------------------------------------- */

static struct stage_list begins(const struct seg_list *s)
{
    return (struct stage_list){.host = s->begin, .bytes = (s->n + (size_t)1) * sizeof(*s->begin)};
}

static struct stage_list items(const struct seg_list *s)
{
    return (struct stage_list){.host = s->item, .bytes = s->begin[s->n] * sizeof(*s->item)};
}

static enum st row_grads(struct device *dev, const float *dt, uint32_t F, uint32_t D,
                         const struct seg_list *s, uint32_t first_slice, uint32_t items_per_slice,
                         float *out)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    if (s->n == 0) return ST_OK;
    struct stage_list list[] = {begins(s), items(s)};
    struct stage_piece *p;
    TRY(cuda_bind(d), err);
    TRY(stage_lists(d, list, 2, &p), err);
    TRY(CUDA(d, cuda_row_grads, (d->compute, dt, F, D, s->n, list[0].dev, list[1].dev, first_slice,
                                 items_per_slice, out)), err);
    st = stage_sent(d, p);
err: return st;
}

static enum st tree_sum(struct device *dev, const float *vec, uint32_t D, const struct seg_list *s,
                        const uint8_t *pos, float *out)
{
    struct cuda_device *d = cuda_of(dev);
    enum st st;
    if (s->n == 0) return ST_OK;
    struct stage_list list[] = {begins(s), items(s), {.host = pos, .bytes = s->begin[s->n]}};
    struct stage_piece *p;
    TRY(cuda_bind(d), err);
    TRY(stage_lists(d, list, 3, &p), err);
    TRY(CUDA(d, cuda_tree_sum, (d->compute, vec, D, s->n, list[0].dev, list[1].dev, list[2].dev,
                                out)), err);
    st = stage_sent(d, p);
err: return st;
}

static enum st dense_sum(struct device *dev, const float *const *part, const uint8_t *pos,
                         uint32_t n_parts, size_t n, float *out)
{
    struct cuda_device *d = cuda_of(dev);
    struct cuda_parts parts = {.n = n_parts};
    _Static_assert(sizeof(parts.pos) == TREE_MAX_SLICES, "one part a slice at most");
    CHECK(n_parts >= 1 && n_parts <= TREE_MAX_SLICES, "I1: parts are nodes of the tree");
    memcpy(parts.part, part, n_parts * sizeof(*part));
    memcpy(parts.pos, pos, n_parts);
    enum st st;
    TRY(cuda_bind(d), err);
    st = CUDA(d, cuda_dense_sum, (d->compute, &parts, n, out));
err: return st;
}

/* --- updates -------------------------------------------------------------------------------- */

static struct cuda_opt opt_of(const struct opt_step *o)
{
    return (struct cuda_opt){(int)o->kind, o->learning_rate, o->epsilon};
}

static enum st row_update(struct device *dev, const struct opt_step *o, float *table,
                          uint32_t stride, uint32_t D, const uint32_t *slot, const float *grad,
                          uint32_t n)
{
    struct cuda_device *d = cuda_of(dev);
    struct cuda_opt opt = opt_of(o);
    struct stage_list list = {.host = slot, .bytes = n * sizeof(*slot)};
    struct stage_piece *p;
    enum st st;
    if (n == 0) return ST_OK;
    TRY(cuda_bind(d), err);
    TRY(stage_lists(d, &list, 1, &p), err);
    TRY(CUDA(d, cuda_row_update, (d->compute, &opt, table, stride, D, list.dev, grad, n,
                                  d->fault)), err);
    st = stage_sent(d, p);
err: return st;
}

static enum st dense_update(struct device *dev, const struct opt_step *o, float *w, float *state,
                            const float *grad, size_t n)
{
    struct cuda_device *d = cuda_of(dev);
    struct cuda_opt opt = opt_of(o);
    enum st st;
    TRY(cuda_bind(d), err);
    st = CUDA(d, cuda_dense_update, (d->compute, &opt, w, state, grad, n, d->fault));
err: return st;
}

void cuda_kernel_calls(struct device_ops *ops)
{
    ops->gather = gather;
    ops->interact_forward = interact_forward;
    ops->interact_backward = interact_backward;
    ops->bce = bce;
    ops->row_grads = row_grads;
    ops->tree_sum = tree_sum;
    ops->dense_sum = dense_sum;
    ops->row_update = row_update;
    ops->dense_update = dense_update;
}
