/* bench/step_parts.c - layers get random inputs, the rest what the last step has left: its rows,
 * gradients and look-ups. A call's time does not depend on the numbers. */
#include "bench/step_parts.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"

enum { MOST_PARTS = 64, MOST_REPEAT = 64 };

struct parts {
    struct step_case *c;
    struct device *d;
    uint32_t q, widest;           /* samples of a slice; floats of the widest layer  */
    float *x, *y, *dy, *dx;       /* device [q][widest]; dy also [q][F + 1][D]       */
    float *t, *dt, *label;        /* device [q][F + 1][D] twice, [q]                 */
    size_t bytes;                 /* of each of them                                 */
    struct group group;
    struct part {
        const char *name;
        uint32_t layer;           /* k of x.k, or unused                             */
        enum st (*run)(const struct parts *p, const struct linear *l, const struct part *part);
        struct linear l;
        bool no_dx;
        double products;          /* multiplications and additions, times the batch  */
        double seconds[MOST_REPEAT];
    } part[MOST_PARTS];
    uint32_t n_parts;
};

/* --- the calls ------------------------------------------------------------------------------ */

#define CALL(name) \
    static enum st name(const struct parts *p, const struct linear *l, const struct part *part)

CALL(prepare) { return p->d->ops->prepare(p->d, 0, l); }
CALL(forward) { return p->d->ops->linear_forward(p->d, 0, p->q, l, p->x, p->y, l->N); }
CALL(backward)
{
    float *grad = p->c->step->slice_grad; /* rewritten by the next step */
    size_t weights = p->d->ops->weight_floats(p->d, l->K, l->N);
    return p->d->ops->linear_backward(p->d, 0, p->q, l, p->x, p->y, l->N, p->dy, grad,
                                      grad + weights, part->no_dx ? NULL : p->dx);
}
CALL(gather)
{
    const struct step_case *c = p->c;
    return p->d->ops->gather(p->d, 0, p->q, c->model->n_tables, c->model->dim, c->table, c->stride,
                             c->step->in_slot, p->t);
}
CALL(interact_forward)
{
    const struct model *m = p->c->model;
    return p->d->ops->interact_forward(p->d, 0, p->q, m->n_tables, m->dim, p->t, p->y);
}
CALL(interact_backward)
{
    const struct model *m = p->c->model;
    return p->d->ops->interact_backward(p->d, 0, p->q, m->n_tables, m->dim, p->t, p->y, p->dt);
}
CALL(bce)
{
    return p->d->ops->bce(p->d, 0, p->q, p->x, p->label, 1, p->dy, p->dx, NULL);
}

/* Of the whole batch, by the trainer. */
CALL(group_lookups)
{
    const struct plan *plan = &p->c->plan[0];
    return group_by_slot(&p->c->step->use, plan->slot, plan->n_samples * p->c->model->n_tables);
}
CALL(row_grads)
{
    const struct step *s = p->c->step;
    const struct model *m = p->c->model;
    struct seg_list list = {s->use.n_rows, group_begin(&s->use), group_items(&s->use)};
    return p->d->ops->row_grads(p->d, s->dt, m->n_tables, m->dim, &list, 0, p->q * m->n_tables,
                                s->vec);
}
CALL(row_update)
{
    const struct step *s = p->c->step;
    return p->d->ops->row_update(p->d, &p->c->opt, p->c->table, p->c->stride, p->c->model->dim,
                                 group_slots(&s->use), s->vec, s->use.n_rows);
}
CALL(dense_sum) { return dense_scatter(&p->c->dense, p->c->step, p->c->plan[0].batch_total,
                                       &p->c->scatter); }
CALL(dense_update)
{
    struct dense *d = &p->c->dense;
    return p->d->ops->dense_update(p->d, &p->c->opt, d->params.w, d->state, d->total,
                                   p->c->model->n_floats);
}

/* --- the list ------------------------------------------------------------------------------- */

static void add(struct parts *p, const char *name,
                enum st (*run)(const struct parts *, const struct linear *, const struct part *))
{
    p->part[p->n_parts++] = (struct part){.name = name, .run = run};
}

/* What one call does to layer k of an MLP that starts at tensor `first`. */
static void add_layer(struct parts *p, const char *name, uint32_t first, uint32_t k,
                      enum st (*run)(const struct parts *, const struct linear *,
                                     const struct part *))
{
    const struct model *m = p->c->model;
    const struct model_params *w = &p->c->dense.params;
    const struct model_tensor *t = &m->tensor[first + 2 * k];
    struct part *part = &p->part[p->n_parts];
    add(p, name, run);
    part->layer = k;
    part->no_dx = first == 0 && k == 0;
    part->l = (struct linear){t[0].cols, t[0].rows, first == 0 || k + 1 < m->n_top, w->w + t[0].at,
                              w->w + t[1].at, (char *)w->prepared + t[0].prepared};
    double once = 2.0 * t[0].rows * t[0].cols;
    part->products = run == forward ? once : run == backward ? (part->no_dx ? 1 : 2) * once : 0;
}

static void list_parts(struct parts *p)
{
    const struct model *m = p->c->model;
    uint32_t top = 2 * m->n_bottom;
    for (uint32_t k = 0; k < m->n_bottom; k++) add_layer(p, "prepare bottom", 0, k, prepare);
    for (uint32_t k = 0; k < m->n_top; k++) add_layer(p, "prepare top", top, k, prepare);
    for (uint32_t k = 0; k < m->n_bottom; k++) add_layer(p, "forward bottom", 0, k, forward);
    add(p, "gather", gather);
    add(p, "interact forward", interact_forward);
    for (uint32_t k = 0; k < m->n_top; k++) add_layer(p, "forward top", top, k, forward);
    add(p, "bce", bce);
    for (uint32_t k = m->n_top; k-- > 0;) add_layer(p, "backward top", top, k, backward);
    add(p, "interact backward", interact_backward);
    for (uint32_t k = m->n_bottom; k-- > 0;) add_layer(p, "backward bottom", 0, k, backward);
    add(p, "group look-ups", group_lookups);
    add(p, "row_grads", row_grads);
    add(p, "row_update", row_update);
    add(p, "dense_sum", dense_sum);
    add(p, "dense_update", dense_update);
}

/* --- running -------------------------------------------------------------------------------- */

static bool of_a_slice(const struct part *part)
{
    return part->run == forward || part->run == backward || part->run == gather ||
           part->run == interact_forward || part->run == interact_backward || part->run == bce;
}

struct one { const struct parts *p; const struct part *part; };

static enum st run_one(void *ctx, uint32_t lane, uint32_t task)
{
    const struct one *o = ctx;
    (void)lane;
    (void)task;
    return o->part->run(o->p, &o->part->l, o->part);
}

/* Adds the seconds of each part over a whole batch to its list, as number `at`. */
static enum st run_all(struct parts *p, enum bench_clock clock, uint32_t at)
{
    enum st st = ST_OK;
    for (uint32_t k = 0; k < p->n_parts && st == ST_OK; k++) {
        struct part *part = &p->part[k];
        struct one one = {p, part};
        uint32_t times = of_a_slice(part) ? p->c->config.train.slices : 1;
        bool inside = of_a_slice(part) || part->run == prepare;
        double start = bench_seconds(clock, 1);
        st = inside ? p->d->ops->parallel(p->d, times, run_one, &one) : run_one(&one, 0, 0);
        if (st == ST_OK) st = p->d->ops->wait(p->d, 0);
        part->seconds[at] = bench_seconds(clock, 1) - start;
    }
    return st;
}

static int ascending(const void *p, const void *q)
{
    double a = *(const double *)p, b = *(const double *)q;
    return a < b ? -1 : a > b;
}

static void print_all(struct parts *p, const struct step_options *o, uint32_t n, double gflops)
{
    double batch = p->c->config.train.global_batch;
    for (uint32_t k = 0; k < p->n_parts; k++) {
        struct part *part = &p->part[k];
        qsort(part->seconds, n, sizeof(part->seconds[0]), ascending);
        double us = part->seconds[n / 2] / batch * 1e6;
        printf("{\"bench\":\"step_part\",\"model\":\"%c\",\"batch\":%u,\"slices\":%u,"
               "\"call\":\"%s", o->model, o->batch, o->slices, part->name);
        if (part->l.N > 0) printf(" %u: %u->%u", part->layer, part->l.K, part->l.N);
        printf("\",\"n\":%u,\"us_per_sample\":%.4f", n, us);
        if (part->products > 0 && gflops > 0) {
            double floor_us = part->products / gflops * 1e-3;
            printf(",\"floor_us_per_sample\":%.4f,\"ratio\":%.3f", floor_us, us / floor_us);
        }
        printf("}\n");
    }
}

static enum st open_buffers(struct parts *p)
{
    const struct model *m = p->c->model;
    size_t t = (size_t)(m->n_tables + 1) * m->dim;
    for (uint32_t k = 0; k <= m->n_bottom; k++)
        if (m->bottom[k] > p->widest) p->widest = m->bottom[k];
    for (uint32_t k = 0; k <= m->n_top; k++)
        if (m->top[k] > p->widest) p->widest = m->top[k];
    size_t n = p->q * (t > p->widest ? t : p->widest);
    float **all[] = {&p->x, &p->y, &p->dy, &p->dx, &p->t, &p->dt, &p->label};
    p->bytes = n * sizeof(float);
    float *host = mem_alloc(1, p->bytes);
    if (host == NULL) return ST_NOMEM;
    enum st st = ST_OK;
    for (uint32_t k = 0; k < sizeof(all) / sizeof(all[0]) && st == ST_OK; k++) {
        rng_uniform(1, RNG_SYNTHETIC + 64, k, 1, host, n);
        *all[k] = p->d->ops->alloc(p->d, p->bytes);
        st = *all[k] == NULL ? ST_NOMEM : p->d->ops->copy_in(p->d, *all[k], host, p->bytes);
    }
    mem_free(host);
    return st;
}

static void close_buffers(struct parts *p)
{
    float *all[] = {p->x, p->y, p->dy, p->dx, p->t, p->dt, p->label};
    for (uint32_t k = 0; k < sizeof(all) / sizeof(all[0]); k++)
        p->d->ops->free(p->d, all[k], p->bytes);
    mem_free(p);
}

enum st step_parts(struct step_case *c, const struct step_options *o, struct lanes *lanes,
                   enum bench_clock clock, uint32_t repeat)
{
    enum st st = ST_NOMEM;
    double peak[2], all = 0;
    uint32_t n = 0;
    struct parts *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) return ST_NOMEM;
    p->c = c;
    p->d = c->device;
    p->q = o->batch / o->slices;
    TRY(open_buffers(p), err);
    list_parts(p);
    TRY(run_all(p, clock, 0), err);
    for (uint32_t tries = 0; n < repeat && tries < 4 * repeat; tries++) {
        peak[0] = lanes == NULL ? 0 : bench_peak(lanes, clock);
        TRY(run_all(p, clock, n), err);
        peak[1] = lanes == NULL ? 0 : bench_peak(lanes, clock);
        if (!bench_steady(peak[0], peak[1])) continue;
        all += (peak[0] + peak[1]) / 2;
        n++;
    }
    if (n > 0) print_all(p, o, n, all / n);
    else log_note("bench", "the machine was never steady enough to time the calls one by one");
err:
    close_buffers(p);
    return st;
}
