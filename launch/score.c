/* A batch of B samples is cut into slices of q = B / S; each lane scores slices with a table of its
 * own that holds the slice's rows packed in order of use, so that slot i is look-up i. A row that
 * is looked up twice is there twice: finding that out would cost more than the copy. */
#include "launch/score.h"

#include <inttypes.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "compute/device.h"
#include "data/auc.h"

struct lane {
    struct model_work *work;
    float *table;             /* [q * F][D] rows of the slice in work */
};

struct score {
    const struct rundir *run;
    uint32_t B, q, S;         /* samples of a batch and of a slice; slices */
    struct device *device;
    struct model *model;      /* the run's, placed on the device */
    struct model_params params;
    uint32_t n_lanes;
    struct lane *lane;        /* [n_lanes]              */
    uint32_t *slot;           /* [q * F] 0, 1, 2, ...   */
    struct samples batch;     /* room for B             */
    uint32_t got;             /* samples of this batch  */
    float *slice_loss;        /* [S] of this batch      */
    float *prob, *label;      /* [cap] all so far       */
    size_t n, cap;
    double loss_sum;
};

static enum st no_memory(const struct score *s)
{
    return log_fail(ST_NOMEM, "evaluation", "out of memory after %zu samples, %" PRIu32 " at once",
                    s->n, s->B);
}

/* --- opening ---------------------------------------------------------------------------------- */

static enum st open_model(struct score *s)
{
    enum st st;
    struct device *d = s->device;
    TRY(model_open(s->run->config, &s->model), err);
    model_place(s->model, d);
    s->params.w = d->ops->alloc(d, s->model->n_floats * sizeof(float));
    s->params.prepared = d->ops->alloc(d, s->model->prepared_bytes);
    if (s->params.w == NULL || s->params.prepared == NULL) return no_memory(s);
    TRY(model_put(s->model, d, s->run->params, s->params.w), err);
    TRY(model_prepare(s->model, d, &s->params), err);
err:
    return st;
}

static enum st open_lanes(struct score *s)
{
    enum st st;
    struct device_cfg cfg = {.lanes = s->n_lanes, .precision = s->run->config->device.precision};
    if (cfg.precision == PRECISION_TF32) cfg.precision = PRECISION_FP32; /* trained on a GPU */
    TRY(device_open(DEVICE_CPU, &cfg, &s->device), err);
    TRY(open_model(s), err);
    const struct model *m = s->model;
    size_t uses = (size_t)s->q * m->n_tables;
    for (uint32_t i = 0; i < s->n_lanes; i++) {
        TRY(model_work_open(m, s->device, s->q, &s->lane[i].work), err);
        s->lane[i].table = mem_alloc(uses * m->dim, sizeof(float));
        if (s->lane[i].table == NULL) return no_memory(s);
    }
err:
    return st;
}

static void score_fini(struct score *s)
{
    for (uint32_t i = 0; s->lane != NULL && i < s->n_lanes; i++) {
        mem_free(s->lane[i].table);
        model_work_close(s->lane[i].work);
    }
    if (s->model != NULL) {
        s->device->ops->free(s->device, s->params.w, s->model->n_floats * sizeof(float));
        s->device->ops->free(s->device, s->params.prepared, s->model->prepared_bytes);
    }
    model_close(s->model);
    device_close(s->device);
    samples_close(&s->batch);
    mem_free(s->label);
    mem_free(s->prob);
    mem_free(s->slice_loss);
    mem_free(s->slot);
    mem_free(s->lane);
}

static enum st score_init(struct score *s, const struct rundir *r)
{
    const struct config *c = r->config;
    uint32_t F = c->model.n_tables, q = c->train.global_batch / c->train.slices;
    *s = (struct score){.run = r, .B = c->train.global_batch, .q = q, .S = c->train.slices,
                        .n_lanes = c->cluster.threads};
    enum st st;
    s->lane = mem_zalloc(s->n_lanes, sizeof(*s->lane));
    s->slot = mem_alloc((size_t)q * F, sizeof(*s->slot));
    s->slice_loss = mem_alloc(s->S, sizeof(*s->slice_loss));
    if (s->lane == NULL || s->slot == NULL || s->slice_loss == NULL) {
        st = no_memory(s);
        goto err;
    }
    for (size_t i = 0; i < (size_t)q * F; i++) s->slot[i] = (uint32_t)i;
    TRY(samples_open(s->B, c->model.dense_features, F, &s->batch), err);
    TRY(open_lanes(s), err);
    return ST_OK;

err:
    score_fini(s);
    return st;
}

/* --- scoring ---------------------------------------------------------------------------------- */

static void copy_rows(const struct score *s, const uint64_t *id, size_t n, float *table)
{
    uint32_t D = s->run->model->dim;
    for (size_t i = 0; i < n; i++)
        memcpy(table + i * D, rundir_row(s->run->table[row_table(id[i])], row_number(id[i])),
               D * sizeof(float));
}

/* lane_task: slice k of the batch. */
static enum st score_slice(void *ctx, uint32_t lane, uint32_t k)
{
    struct score *s = ctx;
    const struct model *m = s->model;
    struct lane *own = &s->lane[lane];
    size_t first = (size_t)k * s->q;
    uint32_t n = s->got - first < s->q ? (uint32_t)(s->got - first) : s->q;
    copy_rows(s, s->batch.id + first * m->n_tables, (size_t)n * m->n_tables, own->table);
    struct model_slice slice = {
        .B = n,
        .dense = s->batch.dense + first * m->dense_features,
        .label = s->batch.label + first,
        .slot = s->slot,
        .table = own->table,
        .stride = m->dim,
    };
    return model_eval(m, s->device, lane, own->work, &s->params, &slice,
                      s->prob + s->n + first, &s->slice_loss[k]);
}

/* Room for one more batch of results. */
static enum st keep_room(struct score *s)
{
    if (s->cap - s->n >= s->B) return ST_OK;
    size_t cap = 2 * s->cap + s->B;
    float *prob = mem_grow(s->prob, s->n, cap, sizeof(float));
    if (prob != NULL) s->prob = prob;
    float *label = mem_grow(s->label, s->n, cap, sizeof(float));
    if (label != NULL) s->label = label;
    if (prob == NULL || label == NULL) return no_memory(s);
    s->cap = cap;
    return ST_OK;
}

static enum st score_batch(struct score *s)
{
    uint32_t slices = (s->got + s->q - 1) / s->q;
    enum st st;
    TRY(keep_room(s), err);
    TRY(s->device->ops->parallel(s->device, slices, score_slice, s), err);
    memcpy(s->label + s->n, s->batch.label, s->got * sizeof(float));
    for (uint32_t k = 0; k < slices; k++) s->loss_sum += (double)s->slice_loss[k];
    s->n += s->got;
err:
    return st;
}

static enum st score_all(struct score *s, struct source *source, struct evaluation *out)
{
    enum st st;
    do {
        TRY(source_read(source, &s->batch, 0, s->B, &s->got), err);
        if (s->got > 0) TRY(score_batch(s), err);
    } while (s->got == s->B);
    if (s->n == 0) return log_fail(ST_DATA, "evaluation", "no samples to score");
    double auc;
    TRY(auc_exact(s->prob, s->label, s->n, &auc), err);
    *out = (struct evaluation){s->n, s->loss_sum / (double)s->n, auc};
err:
    return st;
}

enum st score_source(const struct rundir *r, struct source *source, struct evaluation *out)
{
    struct score s;
    enum st st = score_init(&s, r);
    if (st != ST_OK) return st;
    st = score_all(&s, source, out);
    score_fini(&s);
    return st;
}
