/* bench/step_case.c - the batches come from the synthetic source: ids as skewed as a click log's, over
 * the tables of the Criteo Kaggle log. Slots are dealt out in the order of first use, as a cache
 * that fills up does. */
#include "bench/step_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "data/source.h"
#include "embserver/store.h"
#include "tests/support/reference_dlrm.h"

static uint64_t TABLES[] = {1460,    583,  10131227, 2202608, 305, 24,      12517, 633, 3,
                            93145,   5683, 8351593,  3194,    27,  14992,   5461306, 10, 5652,
                            2173,    4,    7046547,  18,      15,  286181,  105,   142572};
static uint32_t BOTTOM_A[] = {512, 256, 64, 16}, TOP_A[] = {512, 256, 1};
static uint32_t BOTTOM_B[] = {1024, 1024, 512, 256, 64, 48}, TOP_B[] = {1024, 1024, 512, 256, 1};
enum { F = sizeof(TABLES) / sizeof(TABLES[0]), CHECKED = 16 };
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

static struct config config_of(const struct step_options *o)
{
    struct config c = {0};
    bool a = o->model == 'A';
    c.data.format = DATA_SYNTHETIC;
    c.data.rows = (uint64_t)CASE_BATCHES * o->batch;
    c.data.seed = 1;
    c.model.kind = MODEL_DLRM;
    c.model.dense_features = 13;
    c.model.bottom_mlp = a ? BOTTOM_A : BOTTOM_B;
    c.model.n_bottom_mlp = a ? LENGTH(BOTTOM_A) : LENGTH(BOTTOM_B);
    c.model.top_mlp = a ? TOP_A : TOP_B;
    c.model.n_top_mlp = a ? LENGTH(TOP_A) : LENGTH(TOP_B);
    c.model.dim = c.model.bottom_mlp[c.model.n_bottom_mlp - 1];
    c.model.tables = TABLES;
    c.model.n_tables = F;
    c.train.global_batch = o->batch;
    c.train.slices = o->slices;
    c.train.optimizer = o->optimizer;
    c.train.learning_rate = o->optimizer == OPT_SGD ? 0.1f : 0.01f;
    c.train.epsilon = 1e-8f;
    c.train.seed = 1;
    c.cluster.trainers = c.cluster.servers = c.cluster.server_threads = 1;
    c.cluster.threads = o->threads;
    c.cluster.device = o->device;
    c.device.precision = o->precision;
    return c;
}

/* --- data ----------------------------------------------------------------------------------- */

struct use { uint64_t id; uint32_t at; };

static int by_id(const void *p, const void *q)
{
    const struct use *a = p, *b = q;
    if (a->id != b->id) return a->id < b->id ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

/* slot[0..n) of n look-ups; c->row and c->n_rows. first[at]: slot of the row first used at `at`. */
static void number_rows(struct step_case *c, const struct use *use, uint32_t n, uint32_t *slot,
                        uint32_t *first)
{
    for (uint32_t i = 0; i < n; i++) first[use[i].at] = i == 0 || use[i].id != use[i - 1].id;
    for (uint32_t at = 0; at < n; at++)
        if (first[at]) first[at] = c->n_rows++;
    for (uint32_t i = 0; i < n; i++) {
        bool again = i > 0 && use[i].id == use[i - 1].id;
        slot[use[i].at] = again ? slot[use[i - 1].at] : first[use[i].at];
        c->row[slot[use[i].at]] = use[i].id;
    }
}

static enum st slots_of(struct step_case *c, const uint64_t *id, uint32_t n, uint32_t *slot)
{
    enum st st = ST_NOMEM;
    struct use *use = mem_alloc(n, sizeof(*use));
    uint32_t *first = mem_alloc(n, sizeof(*first));
    c->row = mem_alloc(n, sizeof(*c->row));
    if (use == NULL || first == NULL || c->row == NULL) goto err;
    for (uint32_t at = 0; at < n; at++) use[at] = (struct use){id[at], at};
    qsort(use, n, sizeof(*use), by_id);
    number_rows(c, use, n, slot, first);
    st = ST_OK;
err:
    mem_free(first);
    mem_free(use);
    return st;
}

/* Plan k's arrays are its part of one memory for all batches, which plan 0 names as its arena. */
static enum st read_plans(struct step_case *c)
{
    enum st st = ST_NOMEM;
    uint32_t B = c->config.train.global_batch, n = CASE_BATCHES * B, got = 0, W = 13;
    struct source *source = NULL;
    struct samples all = {0};
    size_t floats = (size_t)n * (W + 1), bytes = (floats + (size_t)n * F) * sizeof(float);
    float *dense = mem_alloc(1, bytes);
    if (dense == NULL) goto err;
    c->plan[0].arena = dense;
    TRY(source_open(&c->config, 0, &source), err);
    TRY(samples_open(n, W, F, &all), err_source);
    TRY(source_read(source, &all, 0, n, &got), err_samples);
    uint32_t *slot = (uint32_t *)(dense + floats);
    TRY(slots_of(c, all.id, n * F, slot), err_samples);
    memcpy(dense, all.dense, (size_t)n * W * sizeof(float));
    memcpy(dense + (size_t)n * W, all.label, n * sizeof(float));
    for (uint32_t k = 0; k < CASE_BATCHES; k++) {
        struct plan *p = &c->plan[k];
        size_t at = (size_t)k * B;
        p->kind = PLAN_TRAIN;
        p->batch_total = p->n_samples = B;
        p->dense = dense + at * W;
        p->label = dense + (size_t)n * W + at;
        p->slot = slot + at * F;
    }
err_samples: samples_close(&all);
err_source:  source_close(source);
err:         return st;
}

/* --- opening -------------------------------------------------------------------------------- */

static enum st fill_table(struct step_case *c)
{
    enum st st = ST_NOMEM;
    struct device *d = c->device;
    size_t bytes = (size_t)c->n_rows * c->stride * sizeof(float);
    float *host = mem_alloc(1, bytes);
    c->table = d->ops->alloc(d, bytes);
    if (host == NULL || c->table == NULL) goto err;
    uint32_t D = c->model->dim;
    for (uint32_t s = 0; s < c->n_rows; s++)
        store_initial(c->config.train.seed, c->row[s], TABLES[row_table(c->row[s])], D,
                      c->stride - D, host + (size_t)s * c->stride);
    TRY(d->ops->copy_in(d, c->table, host, bytes), err);
err:
    mem_free(host);
    return st;
}

static enum st open_compute(struct step_case *c)
{
    enum st st;
    const struct config *k = &c->config;
    struct device_cfg dc = {.lanes = k->cluster.threads, .precision = k->device.precision};
    TRY(model_open(k, &c->model), err);
    TRY(device_open(k->cluster.device, &dc, &c->device), err);
    model_place(c->model, c->device);
    struct step_cfg sc = {k, c->model, c->device, 0, 1, c->n_rows, false};
    TRY(step_open(&sc, &c->step), err);
    TRY(dense_init(&c->dense, &sc), err);
    TRY(grads_init(&c->grads, c->device, c->model->dim, c->n_rows), err);
    TRY(fill_table(c), err);
err:
    return st;
}

enum st step_case_open(const struct step_options *o, struct step_case **out)
{
    enum st st = ST_NOMEM;
    struct step_case *c = mem_zalloc(1, sizeof(*c));
    if (c == NULL) goto err;
    c->config = config_of(o);
    const struct config *k = &c->config;
    c->opt = (struct opt_step){k->train.optimizer, k->train.learning_rate, k->train.epsilon};
    c->stride = k->model.dim + config_row_state(k->train.optimizer, k->model.dim);
    TRY(read_plans(c), err);
    TRY(open_compute(c), err);
    *out = c;
    return ST_OK;

err:
    step_case_close(c);
    return st;
}

void step_case_close(struct step_case *c)
{
    if (c == NULL) return;
    struct device *d = c->device;
    if (d != NULL) d->ops->free(d, c->table, (size_t)c->n_rows * c->stride * sizeof(float));
    grads_fini(&c->grads);
    dense_fini(&c->dense);
    step_close(c->step);
    device_close(d);
    model_close(c->model);
    exchange_job_fini(&c->scatter);
    exchange_job_fini(&c->gather);
    mem_free(c->row);
    mem_free(c->plan[0].arena);
    mem_free(c);
}

/* --- running -------------------------------------------------------------------------------- */

enum st step_case_train(struct step_case *c, uint64_t at, double *loss)
{
    enum st st;
    uint64_t mark = 0;
    struct device_fault fault;
    const struct plan *plan = &c->plan[at % CASE_BATCHES];
    TRY(step_train(c->step, plan, &c->dense.params, c->table, c->stride), err);
    TRY(dense_scatter(&c->dense, c->step, plan->batch_total, &c->scatter), err);
    TRY(dense_gather(&c->dense, plan->batch_total, &c->gather), err);
    TRY(grads_apply_alone(&c->grads, c->step, &c->opt, c->table, c->stride), err);
    TRY(dense_apply(&c->dense, &c->opt, &mark), err);
    TRY(c->device->ops->wait(c->device, mark), err);
    TRY(c->device->ops->fault(c->device, &fault), err);
    *loss = (double)*c->dense.loss / plan->batch_total;
    if (fault.dense || fault.row || !isfinite(*loss))
        return log_fail(ST_DATA, "bench", "step %llu: loss or gradients are not finite",
                        (unsigned long long)at);
err:
    return st;
}

/* prob[0..CHECKED) in double, from the initial weights and rows. */
static enum st reference(const struct step_case *c, double *prob)
{
    const struct model *m = c->model;
    const struct plan *plan = &c->plan[0];
    struct ref_shape shape = {m->dense_features, F, m->dim, m->n_bottom, m->n_top, m->bottom,
                              m->top};
    float *initial = mem_zalloc(m->n_params, sizeof(float)), *record = NULL;
    double *params = mem_zalloc(ref_params(&shape), sizeof(double));
    double *rows = mem_zalloc((size_t)CHECKED * F * m->dim, sizeof(double));
    record = mem_zalloc(c->stride, sizeof(float));
    enum st st = ST_NOMEM;
    if (initial == NULL || params == NULL || rows == NULL || record == NULL) goto err;
    model_initial(m, c->config.train.seed, initial);
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        size_t offset, n = ref_tensor(&shape, k, &offset);
        for (size_t i = 0; i < n; i++)
            params[offset + i] = (double)initial[m->tensor[k].offset + i];
    }
    for (uint32_t i = 0; i < CHECKED * F; i++) {
        uint64_t id = c->row[plan->slot[i]];
        store_initial(c->config.train.seed, id, TABLES[row_table(id)], m->dim,
                      c->stride - m->dim, record);
        for (uint32_t d = 0; d < m->dim; d++)
            rows[(size_t)i * m->dim + d] = (double)record[d];
    }
    struct ref_batch batch = {CHECKED, plan->dense, plan->label, rows};
    struct ref_grads out = {.prob = prob};
    ref_dlrm(&shape, params, &batch, 1, &out);
    st = ST_OK;
err:
    mem_free(record);
    mem_free(rows);
    mem_free(params);
    mem_free(initial);
    return st;
}

static enum st check_probs(const struct step_case *c, const float *prob, const double *want)
{
    double bound = c->config.device.precision == PRECISION_FP32 ? 1e-4 : 2e-2;
    for (uint32_t b = 0; b < CHECKED; b++)
        if (!(fabs((double)prob[b] - want[b]) <= bound))
            return log_fail(ST_DATA, "bench", "sample %u: probability %.6f, not %.6f +- %.0e", b,
                            (double)prob[b], want[b], bound);
    return ST_OK;
}

enum st step_case_check(struct step_case *c, double *loss)
{
    enum st st = ST_NOMEM;
    struct device *d = c->device;
    const struct plan *plan = &c->plan[0];
    uint32_t B = plan->n_samples;
    size_t bytes = (B + TREE_MAX_SLICES) * sizeof(float);
    double want[CHECKED], sum = 0;
    float *prob = d->ops->host_alloc(d, bytes);
    if (prob == NULL) goto err;
    TRY(step_eval(c->step, plan, &c->dense.params, c->table, c->stride, prob, prob + B), err);
    TRY(reference(c, want), err);
    TRY(check_probs(c, prob, want), err);
    for (uint32_t b = 0; b < B; b++)
        sum -= log(plan->label[b] > 0.5f ? (double)prob[b] : 1 - (double)prob[b]);
    TRY(step_case_train(c, 0, loss), err);
    if (!(fabs(*loss - sum / B) <= 1e-5 * fabs(sum / B)))
        st = log_fail(ST_DATA, "bench", "the first loss is %.8f, not %.8f", *loss, sum / B);
err:
    d->ops->host_free(d, prob, bytes);
    return st;
}

double step_case_flops(const struct step_case *c)
{
    const struct model *m = c->model;
    double products = 0;
    for (uint32_t k = 0; k < m->n_tensors; k++)
        if (!m->tensor[k].is_bias)
            products += (double)m->tensor[k].rows * m->tensor[k].cols * (k == 0 ? 2 : 3);
    return 2.0 * products * c->config.train.global_batch;
}
