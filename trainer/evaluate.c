#include "trainer/evaluate.h"

#include <string.h>

#include "base/mem.h"
#include "data/auc.h"

void evaluate_init(struct evaluate *e, struct step *step)
{
    *e = (struct evaluate){.device = step->cfg.device, .step = step, .dim = step->cfg.model->dim,
                           .rank = step->cfg.rank, .size = step->cfg.size};
}

void evaluate_fini(struct evaluate *e)
{
    if (e->device == NULL) return;
    e->device->ops->free(e->device, e->scratch, e->scratch_cap * e->dim * sizeof(float));
    values_fini(&e->values);
    exchange_job_fini(&e->job);
    grow_fini(&e->mine);
    grow_fini(&e->all);
    grow_fini(&e->prob);
    grow_fini(&e->label);
    *e = (struct evaluate){0};
}

enum st evaluate_scratch(struct evaluate *e, const struct plan *plan, float **scratch)
{
    struct device *d = e->device;
    if (plan->eval_rows > e->scratch_cap) {
        size_t cap = plan->eval_rows + plan->eval_rows / 4;
        float *p = d->ops->alloc(d, cap * e->dim * sizeof(float));
        if (p == NULL) return ST_NOMEM;
        d->ops->free(d, e->scratch, e->scratch_cap * e->dim * sizeof(float));
        e->scratch = p;
        e->scratch_cap = cap;
    }
    *scratch = e->scratch;
    return ST_OK;
}

/* Rows that trainers hold: this one's are copied, others' sent. */
static enum st collect_live(struct evaluate *e, const struct plan *plan, struct exchange *x,
                            const float *table, uint32_t stride)
{
    enum st st = ST_OK;
    struct device *d = e->device;
    uint32_t n = plan->n_eval_copy, D = e->dim;
    TRY(d->ops->rows_copy(d, table, stride, plan->eval_from, n, e->scratch, D, plan->eval_to, D),
        err);
    exchange_job_reset(&e->job, "evaluation: row values");
    TRY(values_collect(&e->values, plan, VALUES_URGENT, d, table, stride, D, &e->job), err);
    TRY(exchange_start(x, &e->job), err);
    TRY(exchange_wait(x, &e->job), err);
    TRY(values_install(&e->values, d, e->scratch, D, D), err);
err:
    return st;
}

struct share { uint32_t samples, slices; };   /* of one rank in one batch */

static struct share share_of(const struct evaluate *e, uint32_t rank, uint32_t total)
{
    uint32_t S = e->step->cfg.config->train.slices, q = e->step->slice_samples;
    uint32_t lo = tree_run_start(rank, e->size, S) * q, hi = tree_run_start(rank + 1, e->size, S) * q;
    if (lo > total) lo = total;
    if (hi > total) hi = total;
    return (struct share){hi - lo, (hi - lo + q - 1) / q};
}

static size_t share_floats(struct share s)
{
    return 2 * (size_t)s.samples + s.slices;
}

static enum st grow_keep(struct grow *g, uint64_t have, uint64_t want)
{
    if (want * sizeof(float) <= g->bytes) return ST_OK;
    size_t cap = 2 * want;
    void *p = mem_grow(g->p, have, cap, sizeof(float));
    if (p == NULL) return ST_NOMEM;
    *g = (struct grow){p, cap * sizeof(float)};
    return ST_OK;
}

static enum st append(struct evaluate *e, const float *p, struct share s)
{
    enum st st = ST_OK;
    TRY(grow_keep(&e->prob, e->n, e->n + s.samples), err);
    TRY(grow_keep(&e->label, e->n, e->n + s.samples), err);
    memcpy((float *)e->prob.p + e->n, p, s.samples * sizeof(float));
    memcpy((float *)e->label.p + e->n, p + s.samples, s.samples * sizeof(float));
    for (uint32_t k = 0; k < s.slices; k++) e->loss_sum += (double)p[2 * (size_t)s.samples + k];
    e->n += s.samples;
err:
    return st;
}

/* Scores go to rank 0, which keeps them in sample order. */
static enum st gather_scores(struct evaluate *e, const struct plan *plan, struct exchange *x)
{
    enum st st = ST_OK;
    uint32_t total = plan->batch_total;
    size_t others = 0;
    exchange_job_reset(&e->job, "evaluation: scores");
    if (e->rank != 0) {
        size_t n = share_floats(share_of(e, e->rank, total));
        TRY(exchange_add_out(&e->job, 0, e->mine.p, n * sizeof(float)), err);
    }
    for (uint32_t r = 1; e->rank == 0 && r < e->size; r++)
        others += share_floats(share_of(e, r, total));
    TRY(grow_reserve(&e->all, others, sizeof(float)), err);
    float *at = e->all.p;
    for (uint32_t r = 1; e->rank == 0 && r < e->size; r++) {
        size_t n = share_floats(share_of(e, r, total));
        TRY(exchange_add_in(&e->job, r, at, n * sizeof(float)), err);
        at += n;
    }
    TRY(exchange_start(x, &e->job), err);
    TRY(exchange_wait(x, &e->job), err);
    if (e->rank != 0) return ST_OK;
    TRY(append(e, e->mine.p, share_of(e, 0, total)), err);
    at = e->all.p;
    for (uint32_t r = 1; r < e->size; r++) {
        struct share s = share_of(e, r, total);
        TRY(append(e, at, s), err);
        at += share_floats(s);
    }
err:
    return st;
}

enum st evaluate_batch(struct evaluate *e, const struct plan *plan, struct exchange *x,
                       struct step *step, const struct model_params *params, const float *table,
                       uint32_t stride, int *done, struct evaluation *out)
{
    enum st st = ST_OK;
    uint32_t n = plan->n_samples;
    TRY(collect_live(e, plan, x, table, stride), err);
    TRY(grow_reserve(&e->mine, share_floats(share_of(e, e->rank, plan->batch_total)),
                     sizeof(float)), err);
    float *mine = e->mine.p;
    TRY(step_eval(step, plan, params, e->scratch, e->dim, mine, mine + 2 * (size_t)n), err);
    memcpy(mine + n, plan->label, n * sizeof(float));
    TRY(gather_scores(e, plan, x), err);
    if (!plan->eval_last || e->rank != 0) return ST_OK;
    *out = (struct evaluation){e->n, e->loss_sum / (double)e->n, 0};
    TRY(auc_exact(e->prob.p, e->label.p, e->n, &out->auc), err);
    *done = 1;
    e->n = 0;
    e->loss_sum = 0;
err:
    return st;
}
