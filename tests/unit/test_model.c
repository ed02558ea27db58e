/* The model: shapes and names, initial weights, and gradients against a DLRM in double, which is
 * itself held against finite differences. Whole iterations: test_training.c. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "tests/support/floats.h"
#include "tests/support/reference_dlrm.h"
#include "trainer/model.h"

/* --- models --------------------------------------------------------------------------------- */

static struct device *dev;
static uint32_t BOTTOM_A[] = {9, 6, 5}, TOP_A[] = {39, 23, 1}; /* odd widths                */
static uint32_t BOTTOM_B[] = {4}, TOP_B[] = {1};              /* one layer each             */
static uint32_t BOTTOM_C[] = {512, 256, 64, 16}, TOP_C[] = {512, 256, 1}; /* Criteo Kaggle  */

static struct config shape(uint32_t dense, uint32_t F, uint32_t *bottom, uint32_t n_bottom,
                           uint32_t *top, uint32_t n_top)
{
    struct config c = {0};
    c.model.dense_features = dense;
    c.model.dim = bottom[n_bottom - 1];
    c.model.bottom_mlp = bottom, c.model.n_bottom_mlp = n_bottom;
    c.model.top_mlp = top, c.model.n_top_mlp = n_top;
    c.model.n_tables = F;
    return c;
}

static struct config shape_of(int which)
{
    return which == 0   ? shape(13, 3, BOTTOM_A, 3, TOP_A, 3)
           : which == 1 ? shape(1, 1, BOTTOM_B, 1, TOP_B, 1)
                        : shape(13, 26, BOTTOM_C, 4, TOP_C, 3);
}

static int open_device(void **state)
{
    struct device_cfg cfg = {.lanes = 4};
    return device_open(DEVICE_CPU, &cfg, &dev) == ST_OK ? 0 : -1;
}

static int close_device(void **state)
{
    device_close(dev);
    return mem_live() == 0 ? 0 : -1;
}

/* One model with a slice of inputs, and the same in double. */
struct bench {
    struct model *m;
    struct model_work *w;
    struct ref_shape shape;
    uint32_t B, stride;
    struct floats params, dense, label, table, grad, dt;
    uint32_t *slot;
    struct model_slice slice;
    double *ref_params, *ref_rows;
};

enum { CAP = 40 };

static void bench_copy_to_double(struct bench *x)
{
    size_t F = x->m->n_tables, D = x->m->dim;
    for (uint32_t k = 0; k < x->m->n_tensors; k++) {
        size_t at, n = ref_tensor(&x->shape, k, &at);
        assert_int_equal(n, (size_t)x->m->tensor[k].rows * x->m->tensor[k].cols);
        for (size_t i = 0; i < n; i++)
            x->ref_params[at + i] = (double)x->params.p[x->m->tensor[k].offset + i];
    }
    for (size_t i = 0; i < x->B * F * D; i++)
        x->ref_rows[i] = (double)x->table.p[x->slot[i / D] * x->stride + i % D];
}

static struct bench bench_open(int which, uint32_t B, size_t shift)
{
    struct bench x = {.B = B};
    struct config c = shape_of(which);
    assert_int_equal(model_open(&c, &x.m), ST_OK);
    assert_int_equal(model_work_open(x.m, dev, B, &x.w), ST_OK);
    uint32_t F = x.m->n_tables, D = x.m->dim;
    x.shape = (struct ref_shape){x.m->dense_features, F, D, x.m->n_bottom, x.m->n_top,
                                 x.m->bottom, x.m->top};
    x.stride = D + 1;
    x.params = floats_open(x.m->n_params, 0);
    x.dense = floats_random((size_t)B * x.m->dense_features, shift, 91);
    x.label = floats_random(B, shift, 92);
    x.table = floats_random((size_t)CAP * x.stride, shift, 93);
    x.grad = floats_open(x.m->n_params + 1, 0);
    x.dt = floats_open((size_t)B * (F + 1) * D, shift);
    x.slot = mem_alloc((size_t)B * F, sizeof(*x.slot));
    model_initial(x.m, 7, x.params.p);
    for (uint32_t i = 0; i < B * F; i++) x.slot[i] = draw(94, i) % CAP;
    for (uint32_t b = 0; b < B; b++) x.label.p[b] = x.label.p[b] > 0 ? 1.0f : 0.0f;
    x.slice = (struct model_slice){B, x.dense.p, x.label.p, x.slot, x.table.p, x.stride};
    x.ref_params = mem_alloc(ref_params(&x.shape), sizeof(double));
    x.ref_rows = mem_alloc((size_t)B * F * D, sizeof(double));
    bench_copy_to_double(&x);
    return x;
}

static void bench_close(struct bench *x)
{
    mem_free(x->ref_rows);
    mem_free(x->ref_params);
    mem_free(x->slot);
    floats_close(x->params);
    floats_close(x->dense);
    floats_close(x->label);
    floats_close(x->table);
    floats_close(x->grad);
    floats_close(x->dt);
    model_work_close(x->w);
    model_close(x->m);
}

static void bench_train(struct bench *x, uint32_t lane, float scale)
{
    assert_int_equal(model_train(x->m, dev, lane, x->w, x->params.p, &x->slice, scale, x->grad.p,
                                 x->dt.p), ST_OK);
}

static double bench_reference(const struct bench *x, double scale, const struct ref_grads *out)
{
    struct ref_batch batch = {x->B, x->dense.p, x->label.p, x->ref_rows};
    return ref_dlrm(&x->shape, x->ref_params, &batch, scale, out);
}

/* --- shapes --------------------------------------------------------------------------------- */

static void tensors_have_the_references_names_and_shapes(void **state)
{
    static const struct { const char *name; uint32_t rows, cols; } WANT[] = {
        {"bot_l.0.weight", 512, 13},  {"bot_l.0.bias", 512, 1}, {"bot_l.2.weight", 256, 512},
        {"bot_l.2.bias", 256, 1},     {"bot_l.4.weight", 64, 256}, {"bot_l.4.bias", 64, 1},
        {"bot_l.6.weight", 16, 64},   {"bot_l.6.bias", 16, 1},  {"top_l.0.weight", 512, 367},
        {"top_l.0.bias", 512, 1},     {"top_l.2.weight", 256, 512}, {"top_l.2.bias", 256, 1},
        {"top_l.4.weight", 1, 256},   {"top_l.4.bias", 1, 1}};
    struct config c = shape_of(2);
    struct model *m;
    size_t end = 0;
    assert_int_equal(model_open(&c, &m), ST_OK);
    assert_int_equal(m->n_tensors, 14);
    for (uint32_t k = 0; k < 14; k++) {
        assert_string_equal(m->tensor[k].name, WANT[k].name);
        assert_int_equal(m->tensor[k].rows, WANT[k].rows);
        assert_int_equal(m->tensor[k].cols, WANT[k].cols);
        assert_int_equal(m->tensor[k].is_bias, k % 2);
        assert_int_equal(m->tensor[k].offset % 16, 0);
        assert_true(m->tensor[k].offset >= end && m->tensor[k].offset < end + 16);
        end = m->tensor[k].offset + (size_t)WANT[k].rows * WANT[k].cols;
    }
    assert_true(m->n_params >= end && m->n_params < end + 16);
    model_close(m);
    model_close(NULL);
}

static void initial_weights_are_normal_and_padding_is_zero(void **state)
{
    struct config c = shape_of(2);
    struct model *m;
    assert_int_equal(model_open(&c, &m), ST_OK);
    struct floats p = floats_open(m->n_params, 0), again = floats_open(m->n_params, 0);
    struct floats other = floats_open(m->n_params, 0), drawn = floats_open(m->n_params, 0);
    model_initial(m, 5, p.p);
    model_initial(m, 5, again.p);
    model_initial(m, 6, other.p);
    assert_same_bits(again.p, p.p, m->n_params, "same seed");
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        const struct model_tensor *t = &m->tensor[k];
        size_t n = (size_t)t->rows * t->cols, next = t->offset + n;
        double sum = 0, squares = 0;
        double deviation = sqrt(t->is_bias ? 1.0 / t->rows : 2.0 / (t->rows + t->cols));
        for (const float *w = p.p + t->offset; w < p.p + next; w++)
            sum += (double)*w, squares += (double)*w * (double)*w;
        /* Within five deviations of the mean's and the variance's own spread. */
        assert_true(fabs(sum / (double)n) <= 5 * deviation / sqrt((double)n));
        assert_true(fabs(squares / (double)n / (deviation * deviation) - 1) <=
                    5 * sqrt(2.0 / (double)n));
        assert_true(p.p[t->offset] != other.p[t->offset]);
        rng_normal(5, RNG_DENSE_0 + k, 0, (float)deviation, drawn.p, n);
        assert_same_bits(p.p + t->offset, drawn.p, n, t->name);
        size_t end = k + 1 < m->n_tensors ? m->tensor[k + 1].offset : m->n_params;
        for (size_t i = next; i < end; i++) assert_true(p.p[i] == 0 && !signbit(p.p[i]));
    }
    floats_close(p);
    floats_close(again);
    floats_close(other);
    floats_close(drawn);
    model_close(m);
}

/* --- gradients ------------------------------------------------------------------------------ */

/* The double model against central differences: error h^2 and rounding 1e-16 / h, h = 1e-6. */
static void reference_gradients_are_slopes(void **state)
{
    const double h = 1e-6, scale = 0.25;
    const struct ref_grads nothing = {0};
    for (int which = 0; which < 2; which++) {
        struct bench x = bench_open(which, 4, 0);
        size_t n = ref_params(&x.shape), n_rows = (size_t)x.B * x.m->n_tables * x.m->dim;
        double *g = mem_alloc(n, sizeof(*g)), *dr = mem_alloc(n_rows, sizeof(*dr));
        struct ref_grads out = {.params = g, .rows = dr};
        bench_reference(&x, scale, &out);
        for (size_t i = 0; i < n + n_rows; i++) {
            double *w = i < n ? x.ref_params + i : x.ref_rows + (i - n), before = *w;
            *w = before + h;
            double up = bench_reference(&x, scale, &nothing);
            *w = before - h;
            double down = bench_reference(&x, scale, &nothing);
            *w = before;
            double slope = scale * (up - down) / (2 * h), got = i < n ? g[i] : dr[i - n];
            if (!(fabs(slope - got) <= 1e-8 + 1e-7 * fabs(slope)))
                fail_msg("model %d: [%zu] is %.12g, slope %.12g", which, i, got, slope);
        }
        mem_free(g);
        mem_free(dr);
        bench_close(&x);
    }
}

/* f32 against double: a few roundings of 6e-8 a layer, grown by cancellation where the summed
 * logits' gradients nearly cancel; 2e-5 of the tensor's largest gradient is 3 times the worst. */
static void check_tensor(const float *got, const double *want, size_t n, const char *what)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
    assert_true(largest > 0);
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= 2e-5 * largest))
            fail_msg("%s: [%zu] is %.9g, not %.9g (largest %.3g)", what, i, (double)got[i],
                     want[i], largest);
}

static void gradients_agree_with_the_reference(void **state)
{
    static const uint32_t BATCH[] = {1, 8, 33};
    for (int i = 0; i < 9; i++) {
        struct bench x = bench_open(i % 3, BATCH[i / 3], 0);
        size_t F = x.m->n_tables, D = x.m->dim;
        double *g = mem_alloc(ref_params(&x.shape), sizeof(*g));
        double *dr = mem_alloc(x.B * F * D, sizeof(*dr));
        struct ref_grads out = {.params = g, .rows = dr};
        bench_train(&x, 0, 1.0f / 64);
        double loss = bench_reference(&x, 1.0 / 64, &out);
        assert_near(x.grad.p[x.m->n_params], loss, loss, 100, "loss", 0);
        for (uint32_t k = 0; k < x.m->n_tensors; k++) {
            size_t at, n = ref_tensor(&x.shape, k, &at);
            check_tensor(x.grad.p + x.m->tensor[k].offset, g + at, n, x.m->tensor[k].name);
        }
        for (size_t b = 0; b < x.B; b++) /* entry 0 of each sample is not a look-up */
            check_tensor(x.dt.p + (b * (F + 1) + 1) * D, dr + b * F * D, F * D, "dt");
        mem_free(g);
        mem_free(dr);
        bench_close(&x);
    }
}

static void evaluation_has_the_bits_of_training_and_changes_nothing(void **state)
{
    struct bench x = bench_open(2, 12, 0), same = bench_open(2, 12, 0);
    struct floats prob = floats_open(12, 0), loss = floats_open(1, 0);
    double want[12];
    struct ref_grads out = {.prob = want};
    bench_reference(&x, 1, &out);
    bench_train(&x, 0, 1);
    assert_int_equal(model_eval(x.m, dev, 0, x.w, x.params.p, &x.slice, prob.p, loss.p), ST_OK);
    assert_same_bits(loss.p, x.grad.p + x.m->n_params, 1, "loss");
    for (size_t b = 0; b < 12; b++) assert_near(prob.p[b], want[b], 1, 100, "prob", b);
    assert_same_bits(x.params.p, same.params.p, x.params.n, "weights");
    assert_same_bits(x.table.p, same.table.p, x.table.n, "table");
    floats_close(prob);
    floats_close(loss);
    bench_close(&x);
    bench_close(&same);
}

struct lane_run { uint32_t lane; struct bench x; };

static void *train_on_lane(void *arg)
{
    struct lane_run *r = arg;
    for (int again = 0; again < 3; again++) bench_train(&r->x, r->lane, 0.5f);
    return NULL;
}

static void a_slices_bits_do_not_depend_on_lane_thread_or_address(void **state)
{
    static const size_t SHIFT[] = {0, 3, 8, 13};
    struct bench want = bench_open(2, 20, 0);
    struct lane_run run[4];
    pthread_t thread[4];
    bench_train(&want, 0, 0.5f);
    for (uint32_t t = 0; t < 4; t++) {
        run[t] = (struct lane_run){t, bench_open(2, 20, SHIFT[t])};
        assert_int_equal(pthread_create(&thread[t], NULL, train_on_lane, &run[t]), 0);
    }
    for (int t = 0; t < 4; t++) {
        pthread_join(thread[t], NULL);
        assert_same_bits(run[t].x.grad.p, want.grad.p, want.grad.n, "gradients and loss");
        assert_same_bits(run[t].x.dt.p, want.dt.p, want.dt.n, "dt");
        bench_close(&run[t].x);
    }
    bench_close(&want);
}

static void padding_of_gradients_is_left_alone(void **state)
{
    struct bench x = bench_open(0, 4, 0);
    size_t at = 0;
    bench_train(&x, 0, 1);
    for (uint32_t k = 0; k <= x.m->n_tensors; k++) {
        const struct model_tensor *t = k < x.m->n_tensors ? &x.m->tensor[k] : NULL;
        size_t end = t != NULL ? t->offset : x.m->n_params;
        for (; at < end; at++) assert_true(isnan(x.grad.p[at])); /* floats_open's */
        if (t == NULL) break;
        assert_int_equal(t->offset % 16, 0);
        at = t->offset + (size_t)t->rows * t->cols;
        for (size_t i = t->offset; i < at; i++) assert_true(isfinite(x.grad.p[i]));
    }
    bench_close(&x);
}

static float loss_with(struct bench *x, float *where, float value)
{
    float before = *where;
    *where = value;
    bench_train(x, 0, 1);
    *where = before;
    return x->grad.p[x->m->n_params];
}

static void nan_reaches_the_loss_from_every_input(void **state)
{
    struct bench x = bench_open(0, 6, 0);
    assert_true(isfinite(loss_with(&x, x.dense.p, x.dense.p[0])));
    for (size_t i = 0; i < x.dense.n; i++) assert_true(isnan(loss_with(&x, x.dense.p + i, NAN)));
    for (size_t i = 0; i < x.label.n; i++) assert_true(isnan(loss_with(&x, x.label.p + i, NAN)));
    for (uint32_t i = 0; i < 6 * 3; i++)
        assert_true(isnan(loss_with(&x, x.table.p + x.slot[i] * x.stride + i % 5, NAN)));
    for (uint32_t k = 0; k < x.m->n_tensors; k++)
        for (size_t i = 0; i < (size_t)x.m->tensor[k].rows * x.m->tensor[k].cols; i++)
            assert_true(isnan(loss_with(&x, x.params.p + x.m->tensor[k].offset + i, NAN)));
    bench_close(&x);
}

/* --- opening -------------------------------------------------------------------------------- */

static void keep_line(void *ctx, const char *line)
{
    snprintf(ctx, 256, "%s", line);
}

static void model_opens_whole_or_not_at_all(void **state)
{
    char line[256] = "";
    struct config c = shape_of(0);
    size_t injected = 0, live = mem_live();
    log_set_sink(keep_line, line);
    for (size_t nth = 1;; nth++) {
        struct model *untouched = (struct model *)&c, *m = untouched;
        mem_fail_at(nth);
        enum st st = model_open(&c, &m);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            model_close(m);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(m, untouched);
        assert_int_equal(mem_live(), live);
    }
    log_set_sink(NULL, NULL);
    assert_int_equal(injected, 4);
    assert_non_null(strstr(line, "error[E-NOMEM]: model:"));
    assert_int_equal(mem_live(), live);
}

static void buffers_open_whole_or_not_at_all(void **state)
{
    char line[256] = "";
    struct config c = shape_of(0);
    struct model *m;
    assert_int_equal(model_open(&c, &m), ST_OK);
    size_t injected = 0, live = mem_live();
    log_set_sink(keep_line, line);
    for (size_t nth = 1;; nth++) {
        struct model_work *untouched = (struct model_work *)&c, *w = untouched;
        mem_fail_at(nth);
        enum st st = model_work_open(m, dev, 8, &w);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            model_work_close(w);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(w, untouched);
        assert_int_equal(mem_live(), live);
    }
    log_set_sink(NULL, NULL);
    assert_int_equal(injected, 4);
    assert_non_null(strstr(line, "activations of 8 samples"));
    assert_int_equal(mem_live(), live);
    model_work_close(NULL);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_have_the_references_names_and_shapes),
        cmocka_unit_test(initial_weights_are_normal_and_padding_is_zero),
        cmocka_unit_test(reference_gradients_are_slopes),
        cmocka_unit_test(gradients_agree_with_the_reference),
        cmocka_unit_test(evaluation_has_the_bits_of_training_and_changes_nothing),
        cmocka_unit_test(a_slices_bits_do_not_depend_on_lane_thread_or_address),
        cmocka_unit_test(padding_of_gradients_is_left_alone),
        cmocka_unit_test(nan_reaches_the_loss_from_every_input),
        cmocka_unit_test(model_opens_whole_or_not_at_all),
        cmocka_unit_test(buffers_open_whole_or_not_at_all),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
