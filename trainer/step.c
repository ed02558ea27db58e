#include "trainer/step.h"

#include "base/check.h"
#include "base/mem.h"

static uint32_t run_slices(const struct step *s)
{
    return s->slice_hi - s->slice_lo;
}

static enum st open_buffers(struct step *s)
{
    const struct model *m = s->cfg.model;
    struct device *d = s->cfg.device;
    size_t samples = (size_t)s->slice_samples * run_slices(s);
    s->dt_bytes = samples * (m->n_tables + 1) * m->dim * sizeof(float);
    s->slice_grad = d->ops->alloc(d, run_slices(s) * s->grad_floats * sizeof(float));
    s->dt = d->ops->alloc(d, s->dt_bytes);
    s->in_dense = d->ops->alloc(d, samples * m->dense_features * sizeof(float));
    s->in_label = d->ops->alloc(d, samples * sizeof(float));
    s->in_slot = d->ops->alloc(d, samples * m->n_tables * sizeof(uint32_t));
    s->out_prob = d->ops->alloc(d, samples * sizeof(float));
    s->out_loss = d->ops->alloc(d, run_slices(s) * sizeof(float));
    if (s->slice_grad == NULL || s->dt == NULL || s->in_dense == NULL || s->in_label == NULL ||
        s->in_slot == NULL || s->out_prob == NULL || s->out_loss == NULL)
        return ST_NOMEM;
    return ST_OK;
}

enum st step_open(const struct step_cfg *cfg, struct step **out)
{
    enum st st = ST_NOMEM;
    uint32_t S = cfg->config->train.slices, n_lanes = cfg->device->lanes;
    struct step *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) return ST_NOMEM;
    s->cfg = *cfg;
    s->slice_lo = tree_run_start(cfg->rank, cfg->size, S);
    s->slice_hi = tree_run_start(cfg->rank + 1, cfg->size, S);
    s->slice_samples = cfg->config->train.global_batch / S;
    s->n_nodes = tree_nodes(s->slice_lo, s->slice_hi, S, s->node);
    s->grad_floats = (cfg->model->n_floats + 1 + 15) / 16 * 16;
    s->work = mem_zalloc(n_lanes, sizeof(struct model_work *));
    if (s->work == NULL) goto err;
    for (uint32_t i = 0; i < n_lanes; i++)
        TRY(model_work_open(cfg->model, cfg->device, s->slice_samples, &s->work[i]), err);
    TRY(open_buffers(s), err);
    TRY(group_init(&s->use, cfg->cap_rows), err);
    *out = s;
    return ST_OK;

err:
    step_close(s);
    return st;
}

void step_close(struct step *s)
{
    if (s == NULL) return;
    const struct model *m = s->cfg.model;
    struct device *d = s->cfg.device;
    size_t samples = (size_t)s->slice_samples * run_slices(s);
    for (uint32_t i = 0; s->work != NULL && i < d->lanes; i++) model_work_close(s->work[i]);
    mem_free(s->work);
    d->ops->graph_free(d, s->graph);
    d->ops->free(d, s->out_prob, samples * sizeof(float));
    d->ops->free(d, s->out_loss, run_slices(s) * sizeof(float));
    d->ops->free(d, s->slice_grad, run_slices(s) * s->grad_floats * sizeof(float));
    d->ops->free(d, s->dt, s->dt_bytes);
    d->ops->free(d, s->in_dense, samples * m->dense_features * sizeof(float));
    d->ops->free(d, s->in_label, samples * sizeof(float));
    d->ops->free(d, s->in_slot, samples * m->n_tables * sizeof(uint32_t));
    d->ops->free(d, s->vec, s->vec_cap * m->dim * sizeof(float));
    group_fini(&s->use);
    grow_fini(&s->seg_begin);
    grow_fini(&s->first_vec);
    grow_fini(&s->vec_node);
    mem_free(s);
}

uint32_t step_slices(const struct step *s, uint32_t total)
{
    uint32_t filled = (total + s->slice_samples - 1) / s->slice_samples;
    if (filled < s->slice_lo) return s->slice_lo;
    return filled < s->slice_hi ? filled : s->slice_hi;
}

/* One pass over slices: what the tasks read. */
struct pass {
    struct step *s;
    const struct plan *plan;
    const struct model_params *params;
    const float *table;
    uint32_t stride;
};

static struct model_slice slice_of(const struct pass *p, uint32_t k, uint32_t *first)
{
    const struct step *s = p->s;
    const struct model *m = s->cfg.model;
    uint32_t q = s->slice_samples;
    *first = k * q;
    uint32_t left = p->plan->n_samples - *first;
    return (struct model_slice){
        .B = left < q ? left : q,
        .dense = s->in_dense + (size_t)*first * m->dense_features,
        .label = s->in_label + *first,
        .slot = s->in_slot + (size_t)*first * m->n_tables,
        .table = p->table,
        .stride = p->stride,
    };
}

static enum st train_slice(void *ctx, uint32_t lane, uint32_t k)
{
    struct pass *p = ctx;
    struct step *s = p->s;
    const struct model *m = s->cfg.model;
    uint32_t first;
    struct model_slice slice = slice_of(p, k, &first);
#ifdef BUG_scaled_by_own_samples
    float scale = 1.0f / (float)p->plan->n_samples; /* planted: each trainer's own mean */
#else
    float scale = 1.0f / (float)p->plan->batch_total;
#endif
    return model_train(m, s->cfg.device, lane, s->work[lane], p->params, &slice,
                       scale, s->slice_grad + k * s->grad_floats,
                       s->dt + (size_t)first * (m->n_tables + 1) * m->dim);
}

static enum st eval_slice(void *ctx, uint32_t lane, uint32_t k)
{
    struct pass *p = ctx;
    struct step *s = p->s;
    uint32_t first;
    struct model_slice slice = slice_of(p, k, &first);
    return model_eval(s->cfg.model, s->cfg.device, lane, s->work[lane], p->params, &slice,
                      s->out_prob + first, s->out_loss + k);
}

static enum st load_inputs(struct step *s, const struct plan *plan)
{
    enum st st;
    const struct model *m = s->cfg.model;
    struct device *d = s->cfg.device;
    size_t n = plan->n_samples;
    TRY(d->ops->copy_in(d, s->in_dense, plan->dense, n * m->dense_features * sizeof(float)), err);
    TRY(d->ops->copy_in(d, s->in_label, plan->label, n * sizeof(float)), err);
    TRY(d->ops->copy_in(d, s->in_slot, plan->slot, n * m->n_tables * sizeof(uint32_t)), err);
err:
    return st;
}

static uint8_t node_of_slice(const struct step *s, uint32_t slice)
{
    for (uint32_t i = s->n_nodes; i-- > 0;)
        if (slice >= s->node[i].pos) return s->node[i].pos;
    return s->node[0].pos;
}

/* Cut each row's look-ups where they pass from one tree node to the next. */
static enum st cut_by_node(struct step *s, uint32_t n_items)
{
    enum st st = ST_OK;
    const uint32_t *begin = group_begin(&s->use), *item = group_items(&s->use);
    uint32_t per_slice = s->slice_samples * s->cfg.model->n_tables, n = 0;
    TRY(grow_reserve(&s->seg_begin, (size_t)n_items + 1, sizeof(uint32_t)), err);
    TRY(grow_reserve(&s->vec_node, n_items, 1), err);
    TRY(grow_reserve(&s->first_vec, (size_t)s->use.n_rows + 1, sizeof(uint32_t)), err);
    uint32_t *seg = s->seg_begin.p, *first = s->first_vec.p;
    uint8_t *node = s->vec_node.p;
    uint8_t of_slice[TREE_MAX_SLICES];
    for (uint32_t k = s->slice_lo; k < s->slice_hi; k++)
        of_slice[k - s->slice_lo] = node_of_slice(s, k);
    for (uint32_t r = 0; r < s->use.n_rows; r++) {
        first[r] = n;
        for (uint32_t i = begin[r]; i < begin[r + 1]; i++) {
            uint8_t at = of_slice[item[i] / per_slice];
            if (n > first[r] && node[n - 1] == at) continue;
            node[n] = at;
            seg[n++] = i;
        }
    }
    first[s->use.n_rows] = n;
    seg[n] = n_items;
    s->n_vecs = n;
err:
    return st;
}

static enum st reserve_vecs(struct step *s)
{
    struct device *d = s->cfg.device;
    uint32_t D = s->cfg.model->dim;
    if (s->n_vecs <= s->vec_cap) return ST_OK;
    size_t cap = (size_t)s->n_vecs + s->n_vecs / 4;
    float *vec = d->ops->alloc(d, cap * D * sizeof(float));
    if (vec == NULL) return ST_NOMEM;
    d->ops->free(d, s->vec, s->vec_cap * D * sizeof(float));
    s->vec = vec;
    s->vec_cap = cap;
    return ST_OK;
}

enum { VECS_PER_TASK = 1024 };

static enum st issue_slices(void *ctx)
{
    struct pass *p = ctx;
    struct step *s = p->s;
    struct device *d = s->cfg.device;
    return d->ops->parallel(d, step_slices(s, p->plan->batch_total) - s->slice_lo, train_slice, p);
}

/* A batch that is not full has a shape of its own. */
static enum st run_slices_of(struct pass *p)
{
    struct step *s = p->s;
    struct device *d = s->cfg.device;
    bool full = p->plan->batch_total == s->cfg.config->train.global_batch;
    return full ? d->ops->repeat(d, &s->graph, issue_slices, p) : issue_slices(p);
}

enum st step_train(struct step *s, const struct plan *plan, const struct model_params *params,
                   const float *table, uint32_t stride)
{
    enum st st;
    const struct model *m = s->cfg.model;
    struct device *d = s->cfg.device;
    struct pass pass = {s, plan, params, table, stride};
    uint32_t n_items = plan->n_samples * m->n_tables;
    TRY(load_inputs(s, plan), err);
    TRY(run_slices_of(&pass), err);
    TRY(group_by_slot(&s->use, plan->slot, n_items), err); /* beside an accelerator's work */
    TRY(cut_by_node(s, n_items), err);
    TRY(reserve_vecs(s), err);
    struct seg_list list = {s->n_vecs, s->seg_begin.p, group_items(&s->use)};
    TRY(d->ops->row_grads(d, s->dt, m->n_tables, m->dim, &list, s->slice_lo,
                          s->slice_samples * m->n_tables, s->vec), err);
err:
    return st;
}

enum st step_eval(struct step *s, const struct plan *plan, const struct model_params *params,
                  const float *table, uint32_t stride, float *prob, float *slice_loss)
{
    enum st st;
    struct device *d = s->cfg.device;
    struct pass pass = {s, plan, params, table, stride};
    uint32_t n_slices = step_slices(s, plan->batch_total) - s->slice_lo;
    TRY(load_inputs(s, plan), err);
    TRY(d->ops->parallel(d, n_slices, eval_slice, &pass), err);
    TRY(d->ops->copy_out(d, s->out_prob, prob, plan->n_samples * sizeof(float), NULL), err);
    TRY(d->ops->copy_out(d, s->out_loss, slice_loss, n_slices * sizeof(float), NULL), err);
err:
    return st;
}

uint32_t step_vec(const struct step *s, uint32_t slot, uint8_t node)
{
    const uint8_t *vec_node = s->vec_node.p;
    const uint32_t *first = s->first_vec.p;
    uint32_t r = group_find(&s->use, slot);
    CHECK(r != GROUP_NONE, "a gradient is sent only for a row that was used");
    uint32_t v = first[r];
    while (v < first[r + 1] && vec_node[v] != node) v++;
    CHECK(v < first[r + 1], "a gradient is sent only for a node that used the row");
    return v;
}
