#include "trainer/dense.h"

#include <math.h>

#include "base/log.h"
#include "base/tree.h"

enum { ALIGN_FLOATS = 16 };

static uint32_t nodes_of(const struct dense *d, uint32_t rank, struct tree_node *node)
{
    return tree_nodes(tree_run_start(rank, d->size, d->slices),
                      tree_run_start(rank + 1, d->size, d->slices), d->slices, node);
}

/* Does any slice of the node have samples? Slices fill up from the first. */
static int present(const struct dense *d, struct tree_node node, uint32_t total)
{
    return (uint64_t)node.pos * d->slice_samples < total;
}

static size_t chunk_floats(const struct dense *d, uint32_t rank)
{
    size_t lo = rank * d->chunk, hi = lo + d->chunk;
    if (lo > d->floats) lo = d->floats;
    return (hi < d->floats ? hi : d->floats) - lo;
}

enum st dense_init(struct dense *d, const struct step_cfg *cfg)
{
    const struct config *c = cfg->config;
    struct device *dev = cfg->device;
    *d = (struct dense){.model = cfg->model, .device = dev, .rank = cfg->rank, .size = cfg->size,
                        .slices = c->train.slices,
                        .slice_samples = c->train.global_batch / c->train.slices};
    d->floats = (cfg->model->n_params + 1 + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    d->chunk = (d->floats / ALIGN_FLOATS + d->size - 1) / d->size * ALIGN_FLOATS;
    struct tree_node node[TREE_MAX_NODES];
    for (uint32_t r = 0; r < d->size; r++) d->n_all += nodes_of(d, r, node);
    size_t bytes = d->floats * sizeof(float);
    d->params = dev->ops->alloc(dev, bytes);
    d->state = dev->ops->alloc(dev, bytes);
    d->sum = dev->ops->alloc(dev, bytes);
    d->part = dev->ops->alloc(dev, bytes * TREE_MAX_NODES);
    d->recv = dev->ops->alloc(dev, (size_t)d->n_all * d->chunk * sizeof(float));
    if (d->params == NULL || d->state == NULL || d->sum == NULL || d->part == NULL ||
        d->recv == NULL) {
        dense_fini(d);
        return ST_NOMEM;
    }
    model_initial(d->model, c->train.seed, d->params);
    return ST_OK;
}

void dense_fini(struct dense *d)
{
    struct device *dev = d->device;
    if (dev == NULL) return;
    size_t bytes = d->floats * sizeof(float);
    dev->ops->free(dev, d->params, bytes);
    dev->ops->free(dev, d->state, bytes);
    dev->ops->free(dev, d->sum, bytes);
    dev->ops->free(dev, d->part, bytes * TREE_MAX_NODES);
    dev->ops->free(dev, d->recv, (size_t)d->n_all * d->chunk * sizeof(float));
    *d = (struct dense){0};
}

/* part[i] = sum over the slices of this rank's node i. */
static enum st sum_nodes(struct dense *d, const struct step *s, uint32_t total)
{
    enum st st = ST_OK;
    uint32_t hi = step_slices(s, total);
    for (uint32_t i = 0; i < s->n_nodes && st == ST_OK; i++) {
        const float *grad[TREE_MAX_SLICES];
        uint8_t pos[TREE_MAX_SLICES];
        uint32_t n = 0;
        for (uint32_t k = s->node[i].pos; k < s->node[i].end && k < hi; k++, n++) {
            grad[n] = s->slice_grad + (k - s->slice_lo) * s->grad_floats;
            pos[n] = (uint8_t)k;
        }
        if (n > 0)
            st = d->device->ops->dense_sum(d->device, grad, pos, n, d->floats,
                                           d->part + i * d->floats);
    }
    return st;
}

enum st dense_scatter(struct dense *d, const struct step *s, uint32_t total,
                      struct exchange_job *job)
{
    enum st st = ST_OK;
    float *at = d->recv;
    TRY(sum_nodes(d, s, total), err);
    for (uint32_t r = 0; r < d->size; r++) {
        struct tree_node node[TREE_MAX_NODES];
        uint32_t n = nodes_of(d, r, node);
        if (r == d->rank) continue;
        for (uint32_t i = 0; i < s->n_nodes; i++)
            if (present(d, s->node[i], total))
                TRY(exchange_add_out(job, r, d->part + i * d->floats + r * d->chunk,
                                     chunk_floats(d, r) * sizeof(float)), err);
        for (uint32_t i = 0; i < n; i++, at += d->chunk)
            if (present(d, node[i], total))
                TRY(exchange_add_in(job, r, at, chunk_floats(d, d->rank) * sizeof(float)), err);
    }
err:
    return st;
}

enum st dense_gather(struct dense *d, uint32_t total, struct exchange_job *job)
{
    enum st st = ST_OK;
    const float *part[TREE_MAX_SLICES];
    uint8_t pos[TREE_MAX_SLICES];
    uint32_t n_parts = 0;
    const float *at = d->recv;
    size_t mine = d->rank * d->chunk, len = chunk_floats(d, d->rank);
    for (uint32_t r = 0; r < d->size; r++) {
        struct tree_node node[TREE_MAX_NODES];
        uint32_t n = nodes_of(d, r, node);
        for (uint32_t i = 0; i < n; i++) {
            const float *p = r == d->rank ? d->part + i * d->floats + mine : at;
            if (r != d->rank) at += d->chunk;
            if (!present(d, node[i], total)) continue;
            part[n_parts] = p;
            pos[n_parts++] = node[i].pos;
        }
    }
    if (len > 0)
        TRY(d->device->ops->dense_sum(d->device, part, pos, n_parts, len, d->sum + mine), err);
    for (uint32_t r = 0; r < d->size; r++) {
        if (r == d->rank) continue;
        TRY(exchange_add_out(job, r, d->sum + mine, len * sizeof(float)), err);
        TRY(exchange_add_in(job, r, d->sum + r * d->chunk, chunk_floats(d, r) * sizeof(float)),
            err);
    }
err:
    return st;
}

enum st dense_apply(struct dense *d, const struct opt_step *opt, uint32_t total,
                    int64_t iteration, double *loss)
{
    double mean = (double)d->sum[d->model->n_params] / total;
    if (!isfinite(mean))
        return log_fail(ST_DATA, "train", "iteration %lld: the loss is not finite; lower "
                        "train.learning_rate or look for extreme values in the data",
                        (long long)iteration);
    enum st st = d->device->ops->dense_update(d->device, opt, d->params, d->state, d->sum,
                                              d->model->n_params);
    if (st == ST_DATA)
        log_fail(st, "train", "iteration %lld: a dense gradient is not finite; lower "
                 "train.learning_rate or look for extreme values in the data",
                 (long long)iteration);
    if (st == ST_OK) *loss = mean;
    return st;
}
