/* Scoring from files against model_eval over whole tables, and against double precision. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "data/auc.h"
#include "data/source.h"
#include "data/synthetic.h"
#include "launch/score.h"
#include "tests/support/caught.h"
#include "tests/support/reference_dlrm.h"
#include "tests/support/tiny_run.h"

/* Held out: two batches of 12 and one of 5, whose second slice has 2 samples in place of 3. */
enum { TRAIN_ROWS = 20, HELD = 29 };

static struct tiny_run tiny;
static struct samples held;
static size_t live_before;        /* allocations of a failed test do not fail the next */

static int open_run(void **state)
{
    struct source *s;
    uint32_t got = 0;
    live_before = mem_live();
    tiny_run_open(&tiny, OPT_ROWWISE_ADAGRAD);
    if (synth_write_tsv(tiny.config, tiny.data, TRAIN_ROWS + HELD) != ST_OK) return -1;
    if (samples_open(HELD, 3, TINY_TABLES, &held) != ST_OK) return -1;
    if (source_open(tiny.config, 1, &s) != ST_OK) return -1;
    enum st st = source_read(s, &held, 0, HELD, &got);
    source_close(s);
    caught_start();
    return st == ST_OK && got == HELD ? 0 : -1;
}

static int close_run(void **state)
{
    caught_stop();
    samples_close(&held);
    tiny_run_close(&tiny);
    return mem_live() == live_before ? 0 : -1;
}

static enum st score(const char *const *set, size_t n_set, struct evaluation *out)
{
    struct rundir *r;
    struct source *s;
    assert_int_equal(rundir_open(tiny.run, set, n_set, RUNDIR_WEIGHTS, &r), ST_OK);
    assert_int_equal(source_open(r->config, 1, &s), ST_OK);
    enum st st = score_source(r, s, out);
    source_close(s);
    rundir_close(r);
    return st;
}

/* --- the reference: model_eval, slice by slice, over one table of all rows -------------------- */

struct whole {
    struct device *device;
    struct model_work *work;
    struct model_params params;
    float *table;                 /* [7 + 40 + 3][D + 1] records             */
    uint32_t slot[HELD * TINY_TABLES];
    float prob[HELD];
    double loss_sum;
};

static void whole_open(struct whole *w)
{
    uint32_t width = tiny.config->model.dim + tiny.state, first = 0, base[TINY_TABLES];
    assert_int_equal(device_open(DEVICE_CPU, &(struct device_cfg){.lanes = 1}, &w->device), ST_OK);
    model_place(tiny.model, w->device);
    assert_int_equal(model_work_open(tiny.model, w->device, 3, &w->work), ST_OK);
    w->params.w = w->device->ops->alloc(w->device, tiny.model->n_floats * sizeof(float));
    w->params.prepared = w->device->ops->alloc(w->device, tiny.model->prepared_bytes);
    assert_int_equal(model_put(tiny.model, w->device, tiny.params, w->params.w), ST_OK);
    assert_int_equal(model_prepare(tiny.model, w->device, &w->params), ST_OK);
    w->table = mem_alloc(50 * width, sizeof(float));
    for (uint32_t t = 0; t < TINY_TABLES; t++) {
        uint64_t rows = tiny.config->model.tables[t];
        memcpy(w->table + first * width, tiny.table[t], rows * width * sizeof(float));
        base[t] = first;
        first += (uint32_t)rows;
    }
    for (size_t i = 0; i < HELD * TINY_TABLES; i++)
        w->slot[i] = base[i % TINY_TABLES] + (uint32_t)row_number(held.id[i]);
    w->loss_sum = 0;
}

static void whole_slice(struct whole *w, uint32_t first, uint32_t n)
{
    float loss;
    struct model_slice slice = {n, held.dense + first * 3, held.label + first,
                                w->slot + first * TINY_TABLES, w->table,
                                tiny.config->model.dim + tiny.state};
    assert_int_equal(model_eval(tiny.model, w->device, 0, w->work, &w->params, &slice,
                                w->prob + first, &loss), ST_OK);
    w->loss_sum += (double)loss;
}

static struct evaluation evaluate_whole(void)
{
    struct whole w;
    struct evaluation e = {.rows = HELD};
    whole_open(&w);
    for (uint32_t first = 0; first < 27; first += 3) whole_slice(&w, first, 3);
    whole_slice(&w, 27, 2);
    e.loss = w.loss_sum / HELD;
    assert_int_equal(auc_exact(w.prob, held.label, HELD, &e.auc), ST_OK);
    mem_free(w.table);
    w.device->ops->free(w.device, w.params.w, tiny.model->n_floats * sizeof(float));
    w.device->ops->free(w.device, w.params.prepared, tiny.model->prepared_bytes);
    model_work_close(w.work);
    device_close(w.device);
    return e;
}

static void assert_same(const struct evaluation *got, const struct evaluation *want)
{
    assert_int_equal(got->rows, want->rows);
    assert_memory_equal(&got->loss, &want->loss, sizeof(double));
    assert_memory_equal(&got->auc, &want->auc, sizeof(double));
}

static void scores_have_the_bits_of_slices_over_whole_tables(void **state)
{
    struct evaluation got, want = evaluate_whole();
    assert_int_equal(score(NULL, 0, &got), ST_OK);
    assert_same(&got, &want);
    assert_true(got.auc > 0 && got.auc < 1);
}

static void threads_change_no_bit(void **state)
{
    const char *set[] = {"cluster.threads=3"};
    struct evaluation got, want;
    assert_int_equal(score(NULL, 0, &want), ST_OK);
    assert_int_equal(score(set, 1, &got), ST_OK);
    assert_same(&got, &want);
}

static void scores_agree_with_double_precision(void **state)
{
    const struct model *m = tiny.model;
    struct ref_shape shape = {m->dense_features, m->n_tables, m->dim, m->n_bottom, m->n_top,
                              m->bottom, m->top};
    double params[512], rows[HELD * TINY_TABLES * 4];
    assert_true(ref_params(&shape) <= 512);
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        size_t offset, n = ref_tensor(&shape, k, &offset);
        for (size_t i = 0; i < n; i++) params[offset + i] = tiny.params[m->tensor[k].offset + i];
    }
    for (size_t i = 0; i < HELD * TINY_TABLES; i++)
        for (size_t j = 0; j < 4; j++)
            rows[i * 4 + j] = tiny.table[i % TINY_TABLES][row_number(held.id[i]) * 5 + j];
    struct ref_batch batch = {HELD, held.dense, held.label, rows};
    double want = ref_dlrm(&shape, params, &batch, 1.0, &(struct ref_grads){0}) / HELD;
    struct evaluation got;
    assert_int_equal(score(NULL, 0, &got), ST_OK);
    /* 29 sums of some 50 products of numbers below 40, in f32: 1e-5 is far more than rounding and
     * far less than one wrong row makes. */
    if (fabs(got.loss - want) > 1e-5 * want) fail_msg("%.9g, want %.9g", got.loss, want);
}

static void one_class_has_a_loss_but_no_auc(void **state)
{
    FILE *f = fopen(tiny.data, "w");
    assert_non_null(f);
    for (int i = 0; i < TRAIN_ROWS + 2; i++) fputs("0\t1\t2\t3\ta\tb\tc\n", f);
    fclose(f);
    struct evaluation got;
    assert_int_equal(score(NULL, 0, &got), ST_OK);
    assert_int_equal(got.rows, 2);
    assert_true(got.loss > 0 && isnan(got.auc));
}

static void an_allocation_that_fails_leaves_nothing_behind(void **state)
{
    struct rundir *r;
    size_t injected = 0;
    assert_int_equal(rundir_open(tiny.run, NULL, 0, RUNDIR_WEIGHTS, &r), ST_OK);
    for (size_t nth = 1;; nth++) {
        struct source *s;
        struct evaluation e = {7, 7, 7};
        assert_int_equal(source_open(r->config, 1, &s), ST_OK);
        size_t live = mem_live();
        mem_fail_at(nth);
        enum st st = score_source(r, s, &e);
        bool fired = mem_fail_stop();
        assert_int_equal(mem_live(), live);
        source_close(s);
        assert_int_equal(st, fired ? ST_NOMEM : ST_OK);
        if (!fired) break;
        injected++;
        assert_int_equal(e.rows, 7);
    }
    rundir_close(r);
    assert_true(injected >= 10);
}

#define WITH(name) cmocka_unit_test_setup_teardown(name, open_run, close_run)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH(scores_have_the_bits_of_slices_over_whole_tables),
        WITH(threads_change_no_bit),
        WITH(scores_agree_with_double_precision),
        WITH(one_class_has_a_loss_but_no_auc),
        WITH(an_allocation_that_fails_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
