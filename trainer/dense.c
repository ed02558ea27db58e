#include "trainer/dense.h"

#include "base/mem.h"
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

static enum st open_buffers(struct dense *d)
{
    const struct device_ops *ops = d->device->ops;
    size_t bytes = d->floats * sizeof(float);
    size_t recv_bytes = (size_t)d->n_all * d->chunk * sizeof(float);
    d->params.w = ops->alloc(d->device, bytes);
    d->params.prepared = ops->alloc(d->device, d->model->prepared_bytes);
    d->state = ops->alloc(d->device, bytes);
    d->sum = ops->alloc(d->device, bytes);
    d->part = ops->alloc(d->device, bytes * TREE_MAX_NODES);
    d->recv = ops->alloc(d->device, recv_bytes);
    d->loss = ops->host_alloc(d->device, sizeof(float));
    if (d->params.w == NULL || d->params.prepared == NULL || d->state == NULL || d->sum == NULL ||
        d->part == NULL || d->recv == NULL || d->loss == NULL)
        return ST_NOMEM;
    if (!d->mirrored) return ST_OK;
    d->host_part = ops->host_alloc(d->device, bytes * TREE_MAX_NODES);
    d->host_recv = ops->host_alloc(d->device, recv_bytes);
    d->host_sum = ops->host_alloc(d->device, bytes);
    return d->host_part == NULL || d->host_recv == NULL || d->host_sum == NULL ? ST_NOMEM : ST_OK;
}

static enum st fill(struct dense *d, uint64_t seed)
{
    enum st st;
    float *host = mem_zalloc(d->model->n_params, sizeof(float));
    if (host == NULL) return ST_NOMEM;
    model_initial(d->model, seed, host);
    TRY(model_put(d->model, d->device, host, d->params.w), err);
    TRY(model_prepare(d->model, d->device, &d->params), err);
err:
    mem_free(host);
    return st;
}

enum st dense_init(struct dense *d, const struct step_cfg *cfg)
{
    const struct config *c = cfg->config;
    *d = (struct dense){.model = cfg->model, .device = cfg->device, .rank = cfg->rank,
                        .size = cfg->size, .slices = c->train.slices,
                        .slice_samples = c->train.global_batch / c->train.slices};
    d->floats = (cfg->model->n_floats + 1 + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    d->chunk = (d->floats / ALIGN_FLOATS + d->size - 1) / d->size * ALIGN_FLOATS;
    d->mirrored = d->size > 1 && !cfg->device->host_memory && !cfg->peers_reach_device;
    struct tree_node node[TREE_MAX_NODES];
    for (uint32_t r = 0; r < d->size; r++) d->n_all += nodes_of(d, r, node);
    enum st st = open_buffers(d);
    if (st == ST_OK) st = fill(d, c->train.seed);
    if (st != ST_OK) dense_fini(d);
    return st;
}

void dense_fini(struct dense *d)
{
    struct device *dev = d->device;
    if (dev == NULL) return;
    const struct device_ops *ops = dev->ops;
    size_t bytes = d->floats * sizeof(float);
    size_t recv_bytes = (size_t)d->n_all * d->chunk * sizeof(float);
    ops->free(dev, d->params.w, bytes);
    ops->free(dev, d->params.prepared, d->model->prepared_bytes);
    ops->free(dev, d->state, bytes);
    ops->free(dev, d->sum, bytes);
    ops->free(dev, d->part, bytes * TREE_MAX_NODES);
    ops->free(dev, d->recv, recv_bytes);
    ops->host_free(dev, d->loss, sizeof(float));
    ops->host_free(dev, d->host_part, bytes * TREE_MAX_NODES);
    ops->host_free(dev, d->host_recv, recv_bytes);
    ops->host_free(dev, d->host_sum, bytes);
    *d = (struct dense){0};
}

/* node[i] = sum over the slices of this rank's node i. */
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
        float *part = d->part + i * d->floats;
        d->node[i] = n == 1 ? grad[0] : part;
        if (n > 1) st = d->device->ops->dense_sum(d->device, grad, pos, n, d->floats, part);
    }
    return st;
}

/* Where peers can read node i: ready when this returns. */
static enum st expose_node(struct dense *d, uint32_t i, const float **at)
{
    *at = d->node[i];
    if (!d->mirrored) return ST_OK;
    float *host = d->host_part + i * d->floats;
    *at = host;
    return d->device->ops->copy_out(d->device, d->node[i], host, d->floats * sizeof(float), NULL);
}

enum st dense_scatter(struct dense *d, const struct step *s, uint32_t total,
                      struct exchange_job *job)
{
    enum st st = ST_OK;
    const float *out[TREE_MAX_NODES];
    float *at = d->mirrored ? d->host_recv : d->recv;
    TRY(sum_nodes(d, s, total), err);
    if (d->size == 1) return ST_OK;
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (present(d, s->node[i], total)) TRY(expose_node(d, i, &out[i]), err);
    TRY(d->device->ops->wait(d->device, 0), err);
    for (uint32_t r = 0; r < d->size; r++) {
        struct tree_node node[TREE_MAX_NODES];
        uint32_t n = nodes_of(d, r, node);
        if (r == d->rank) continue;
        for (uint32_t i = 0; i < s->n_nodes; i++)
            if (present(d, s->node[i], total))
                TRY(exchange_add_out(job, r, (float *)out[i] + r * d->chunk,
                                     chunk_floats(d, r) * sizeof(float)), err);
        for (uint32_t i = 0; i < n; i++, at += d->chunk)
            if (present(d, node[i], total))
                TRY(exchange_add_in(job, r, at, chunk_floats(d, d->rank) * sizeof(float)), err);
    }
err:
    return st;
}

/* All node sums of one chunk, this rank's, added up in tree order into `sum`. */
static enum st sum_chunk(struct dense *d, uint32_t total, size_t mine, size_t len)
{
    const float *part[TREE_MAX_SLICES];
    uint8_t pos[TREE_MAX_SLICES];
    uint32_t n_parts = 0;
    const float *at = d->recv;
    for (uint32_t r = 0; r < d->size; r++) {
        struct tree_node node[TREE_MAX_NODES];
        uint32_t n = nodes_of(d, r, node);
        for (uint32_t i = 0; i < n; i++) {
            const float *p = r == d->rank ? d->node[i] + mine : at;
            if (r != d->rank) at += d->chunk;
            if (!present(d, node[i], total)) continue;
            part[n_parts] = p;
            pos[n_parts++] = node[i].pos;
        }
    }
    d->total = d->sum;
    if (n_parts == 1 && d->size == 1)
        d->total = part[0];
    else if (len > 0)
        return d->device->ops->dense_sum(d->device, part, pos, n_parts, len, d->sum + mine);
    return ST_OK;
}

enum st dense_gather(struct dense *d, uint32_t total, struct exchange_job *job)
{
    enum st st = ST_OK;
    const struct device_ops *ops = d->device->ops;
    size_t mine = d->rank * d->chunk, len = chunk_floats(d, d->rank);
    float *all = d->mirrored ? d->host_sum : d->sum;
    if (d->mirrored)
        TRY(ops->copy_in(d->device, d->recv, d->host_recv,
                         (size_t)d->n_all * d->chunk * sizeof(float)), err);
    TRY(sum_chunk(d, total, mine, len), err);
    if (d->size == 1) return ST_OK;
    if (d->mirrored)
        TRY(ops->copy_out(d->device, d->sum + mine, all + mine, len * sizeof(float), NULL), err);
    TRY(ops->wait(d->device, 0), err);
    for (uint32_t r = 0; r < d->size; r++) {
        if (r == d->rank) continue;
        TRY(exchange_add_out(job, r, all + mine, len * sizeof(float)), err);
        TRY(exchange_add_in(job, r, all + r * d->chunk, chunk_floats(d, r) * sizeof(float)), err);
    }
err:
    return st;
}

enum st dense_apply(struct dense *d, const struct opt_step *opt, uint64_t *mark)
{
    enum st st = ST_OK;
    struct device *dev = d->device;
    if (d->mirrored)
        TRY(dev->ops->copy_in(dev, d->sum, d->host_sum, d->floats * sizeof(float)), err);
    TRY(dev->ops->dense_update(dev, opt, d->params.w, d->state, d->total, d->model->n_floats),
        err);
    TRY(model_prepare(d->model, dev, &d->params), err);
    TRY(dev->ops->copy_out(dev, d->total + d->model->n_floats, d->loss, sizeof(float), mark), err);
err:
    return st;
}

enum st dense_get(struct dense *d, float *params, float *state)
{
    enum st st = model_get(d->model, d->device, d->params.w, params);
    if (st == ST_OK && state != NULL) st = model_get(d->model, d->device, d->state, state);
    return st;
}
