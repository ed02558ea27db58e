/* Device and model together: a few iterations as a trainer runs them, every slice by itself,
 * against the reference's replay in double, for each optimizer. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"
#include "tests/support/reference_dlrm.h"
#include "trainer/model.h"

enum { DENSE = 13, F = 3, D = 5, ROWS = 6 };
enum { SLICES = 3, PER_SLICE = 8, BATCH = SLICES * PER_SLICE, ITERATIONS = 12 };
enum { STRIDE = 2 * D, SLOTS = F * ROWS }; /* rows of table f: slots [f * ROWS, (f + 1) * ROWS) */
static uint32_t BOTTOM[] = {9, 6, D}, TOP[] = {11, 7, 1};

struct trainer {
    struct model *m;
    struct model_work *work;
    struct opt_step step;
    struct floats params;                            /* host: dense, at the start and the end */
    struct floats w, state, grad[SLICES], sum;       /* device: gradients with the loss behind */
    void *prepared;
    struct floats table, dt, row_grad;
    uint32_t begin[SLOTS + 1], item[BATCH * F], slot[SLOTS];
};

static struct floats zeros(size_t n)
{
    struct floats f = floats_open(n, 0);
    memset(f.p, 0, n * sizeof(float));
    return f;
}

static void trainer_open(struct trainer *t, enum optimizer kind)
{
    struct config c = {0};
    c.model.dense_features = DENSE, c.model.n_tables = F, c.model.dim = D;
    c.model.bottom_mlp = BOTTOM, c.model.n_bottom_mlp = 3;
    c.model.top_mlp = TOP, c.model.n_top_mlp = 3;
    *t = (struct trainer){.step = {kind, 0.1f, 1e-3f}};
    assert_int_equal(model_open(&c, &t->m), ST_OK);
    model_place(t->m, dev);
    assert_int_equal(model_work_open(t->m, dev, PER_SLICE, &t->work), ST_OK);
    t->params = floats_open(t->m->n_params, 0);
    model_initial(t->m, 7, t->params.p);
    t->w = zeros(t->m->n_floats);
    t->prepared = dev->ops->alloc(dev, t->m->prepared_bytes);
    assert_int_equal(model_put(t->m, dev, t->params.p, t->w.p), ST_OK);
    t->state = zeros(t->m->n_floats);
    for (int s = 0; s < SLICES; s++) t->grad[s] = zeros(t->m->n_floats + 1);
    t->sum = floats_open(t->m->n_floats + 1, 0);
    t->table = floats_random(SLOTS * STRIDE, 0, 101);
    for (size_t i = 0; i < t->table.n; i++)
        if (i % STRIDE >= D) t->table.p[i] = 0;
    t->dt = floats_open(BATCH * (F + 1) * D, 0);
    t->row_grad = floats_open(SLOTS * D, 0);
}

static void trainer_close(struct trainer *t)
{
    struct floats all[] = {t->params, t->w, t->state, t->sum, t->table, t->dt,
                           t->row_grad};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) floats_close(all[i]);
    for (int s = 0; s < SLICES; s++) floats_close(t->grad[s]);
    dev->ops->free(dev, t->prepared, t->m->prepared_bytes);
    model_work_close(t->work);
    model_close(t->m);
}

/* Segments of the rows in use, and the slots that they are. */
static uint32_t group_by_row(struct trainer *t, const uint32_t *slot)
{
    uint32_t n = 0, used = 0;
    for (uint32_t s = 0; s < SLOTS; s++) {
        uint32_t before = used;
        for (uint32_t k = 0; k < BATCH * F; k++)
            if (slot[k] == s) t->item[used++] = k;
        if (used == before) continue;
        t->slot[n++] = s;
        t->begin[n] = used;
    }
    return n;
}

/* Returns the mean loss before the step. */
static double trainer_step(struct trainer *t, const float *dense, const float *label,
                           const uint32_t *slot)
{
    const struct device_ops *ops = dev->ops;
    const float *part[SLICES];
    uint8_t pos[SLICES];
    uint32_t n = group_by_row(t, slot);
    struct seg_list segs = {n, t->begin, t->item};
    struct model_params params = {t->w.p, t->prepared};
    assert_int_equal(model_prepare(t->m, dev, &params), ST_OK);
    for (uint32_t s = 0, b = 0; s < SLICES; s++, b += PER_SLICE) {
        struct model_slice slice = {PER_SLICE, dense + b * DENSE, label + b, slot + b * F,
                                    t->table.p, STRIDE};
        assert_int_equal(model_train(t->m, dev, s, t->work, &params, &slice, 1.0f / BATCH,
                                     t->grad[s].p, t->dt.p + b * (F + 1) * D), ST_OK);
        part[s] = t->grad[s].p, pos[s] = (uint8_t)s;
    }
    assert_int_equal(ops->row_grads(dev, t->dt.p, F, D, &segs, 0, PER_SLICE * F, t->row_grad.p),
                     ST_OK);
    assert_int_equal(ops->dense_sum(dev, part, pos, SLICES, t->m->n_floats + 1, t->sum.p), ST_OK);
    assert_int_equal(ops->row_update(dev, &t->step, t->table.p, STRIDE, D, t->slot,
                                     t->row_grad.p, n), ST_OK);
    assert_int_equal(ops->dense_update(dev, &t->step, t->w.p, t->state.p, t->sum.p,
                                       t->m->n_floats), ST_OK);
    return (double)t->sum.p[t->m->n_floats] / BATCH;
}

/* The replay, starting from the trainer's own weights. */
static struct ref_trainer *replay_open(const struct trainer *t)
{
    static const uint64_t table_rows[F] = {ROWS, ROWS, ROWS};
    struct ref_shape shape = {DENSE, F, D, t->m->n_bottom, t->m->n_top, t->m->bottom, t->m->top};
    struct ref_trainer *r = ref_trainer_open(&shape, table_rows, t->step.kind,
                                             (double)t->step.learning_rate,
                                             (double)t->step.epsilon);
    for (uint32_t k = 0; k < t->m->n_tensors; k++) {
        size_t at, n = ref_tensor(&shape, k, &at);
        for (size_t i = 0; i < n; i++)
            r->params[at + i] = (double)t->params.p[t->m->tensor[k].offset + i];
    }
    for (uint32_t i = 0; i < SLOTS * D; i++)
        r->table[i / (ROWS * D)][i % (ROWS * D)] = (double)t->table.p[i / D * STRIDE + i % D];
    return r;
}

/* Rounding grows from iteration to iteration; 1e-5 is some 30 times what is seen. */
static void check_end(const struct trainer *t, const struct ref_trainer *r)
{
    double worst = 0;
    assert_int_equal(model_get(t->m, dev, t->w.p, t->params.p), ST_OK);
    for (uint32_t i = 0; i < SLOTS * D; i++) {
        double got = (double)t->table.p[i / D * STRIDE + i % D];
        worst = fmax(worst, fabs(got - r->table[i / (ROWS * D)][i % (ROWS * D)]));
    }
    for (uint32_t k = 0; k < t->m->n_tensors; k++) {
        size_t at, n = ref_tensor(&r->shape, k, &at), from = t->m->tensor[k].offset;
        for (size_t i = 0; i < n; i++)
            worst = fmax(worst, fabs((double)t->params.p[from + i] - r->params[at + i]));
    }
    if (!(worst <= 1e-5)) fail_msg("optimizer %d: off by %.3g", (int)t->step.kind, worst);
}

static void follow(enum optimizer kind)
{
    struct trainer t;
    trainer_open(&t, kind);
    struct ref_trainer *r = replay_open(&t);
    double first = 0, loss = 0;
    for (uint64_t it = 0; it < ITERATIONS; it++) {
        struct floats dense = floats_random(BATCH * DENSE, 0, 200 + it);
        float label[BATCH];
        uint32_t slot[BATCH * F];
        uint64_t row[BATCH * F];
        for (uint32_t k = 0; k < BATCH * F; k++) {
            row[k] = draw(300 + it, k) % ROWS;
            slot[k] = k % F * ROWS + (uint32_t)row[k];
        }
        for (uint32_t b = 0; b < BATCH; b++) label[b] = (float)(row[b * F] % 2);
        double want = ref_trainer_step(r, BATCH, dense.p, label, row);
        loss = trainer_step(&t, dense.p, label, slot);
        assert_true(fabs(loss - want) <= 1e-5 * want);
        if (it == 0) first = loss;
        floats_close(dense);
    }
    assert_true(loss < first); /* and it learns */
    check_end(&t, r);
    ref_trainer_close(r);
    trainer_close(&t);
}

static void sgd_follows_the_replay(void **state)
{
    follow(OPT_SGD);
}

static void adagrad_follows_the_replay(void **state)
{
    follow(OPT_ADAGRAD);
}

static void rowwise_adagrad_follows_the_replay(void **state)
{
    follow(OPT_ROWWISE_ADAGRAD);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sgd_follows_the_replay),
        cmocka_unit_test(adagrad_follows_the_replay),
        cmocka_unit_test(rowwise_adagrad_follows_the_replay),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
