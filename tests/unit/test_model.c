/* The model: gradients against a DLRM in double, which is itself held against finite differences.
 * Shapes and places: test_model_shape.c. Whole iterations: test_training.c. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"
#include "tests/support/model_shapes.h"
#include "tests/support/reference_dlrm.h"
#include "trainer/model.h"

/* One model with a slice of inputs, and the same in double. Device memory is host memory here. */
struct bench {
    struct model *m;
    struct model_work *work;
    struct ref_shape shape;
    uint32_t B, stride;
    struct floats params;          /* host [n_params]                                          */
    struct floats w, grad;         /* device [n_floats], and the loss behind the gradients     */
    void *prepared;                /* device                                                   */
    struct floats dense, label, table, dt;
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

/* After a change of params. */
static void bench_put(struct bench *x)
{
    struct model_params p = {x->w.p, x->prepared};
    assert_int_equal(model_put(x->m, dev, x->params.p, x->w.p), ST_OK);
    assert_int_equal(model_prepare(x->m, dev, &p), ST_OK);
}

/* As device memory is at first: 0; but NaN between tensors, where nobody has any business. */
static struct floats grads_open(const struct model *m)
{
    struct floats grad = floats_open(m->n_floats + 1, 0), at = model_places(m, dev);
    for (size_t i = 0; i < m->n_floats; i++)
        if (!isnan(at.p[i])) grad.p[i] = 0;
    floats_close(at);
    return grad;
}

static struct bench bench_open(int which, uint32_t B, size_t shift)
{
    struct bench x = {.B = B};
    struct config c = model_shape(which);
    assert_int_equal(model_open(&c, &x.m), ST_OK);
    model_place(x.m, dev);
    assert_int_equal(model_work_open(x.m, dev, B, &x.work), ST_OK);
    uint32_t F = x.m->n_tables, D = x.m->dim;
    x.shape = (struct ref_shape){x.m->dense_features, F, D, x.m->n_bottom, x.m->n_top,
                                 x.m->bottom, x.m->top};
    x.stride = D + 1;
    x.params = floats_open(x.m->n_params, 0);
    x.w = floats_open(x.m->n_floats, 0);
    x.grad = grads_open(x.m);
    x.prepared = dev->ops->alloc(dev, x.m->prepared_bytes);
    x.dense = floats_random((size_t)B * x.m->dense_features, shift, 91);
    x.label = floats_random(B, shift, 92);
    x.table = floats_random((size_t)CAP * x.stride, shift, 93);
    x.dt = floats_open((size_t)B * (F + 1) * D, shift);
    x.slot = mem_alloc((size_t)B * F, sizeof(*x.slot));
    model_initial(x.m, 7, x.params.p);
    bench_put(&x);
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
    dev->ops->free(dev, x->prepared, x->m->prepared_bytes);
    floats_close(x->params);
    floats_close(x->w);
    floats_close(x->dense);
    floats_close(x->label);
    floats_close(x->table);
    floats_close(x->grad);
    floats_close(x->dt);
    model_work_close(x->work);
    model_close(x->m);
}

static void bench_train(struct bench *x, uint32_t lane, float scale)
{
    struct model_params p = {x->w.p, x->prepared};
    assert_int_equal(model_train(x->m, dev, lane, x->work, &p, &x->slice, scale, x->grad.p,
                                 x->dt.p), ST_OK);
}

static double bench_reference(const struct bench *x, double scale, const struct ref_grads *out)
{
    struct ref_batch batch = {x->B, x->dense.p, x->label.p, x->ref_rows};
    return ref_dlrm(&x->shape, x->ref_params, &batch, scale, out);
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
        struct floats got = floats_open(x.m->n_params, 0);
        assert_int_equal(model_get(x.m, dev, x.grad.p, got.p), ST_OK);
        assert_near(x.grad.p[x.m->n_floats], loss, loss, 100, "loss", 0);
        for (uint32_t k = 0; k < x.m->n_tensors; k++) {
            size_t at, n = ref_tensor(&x.shape, k, &at);
            check_tensor(got.p + x.m->tensor[k].offset, g + at, n, x.m->tensor[k].name);
        }
        for (size_t b = 0; b < x.B; b++) /* entry 0 of each sample is not a look-up */
            check_tensor(x.dt.p + (b * (F + 1) + 1) * D, dr + b * F * D, F * D, "dt");
        floats_close(got);
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
    struct model_params p = {x.w.p, x.prepared};
    assert_int_equal(model_eval(x.m, dev, 0, x.work, &p, &x.slice, prob.p, loss.p), ST_OK);
    assert_same_bits(loss.p, x.grad.p + x.m->n_floats, 1, "loss");
    for (size_t b = 0; b < 12; b++) assert_near(prob.p[b], want[b], 1, 100, "prob", b);
    assert_same_bits(x.w.p, same.w.p, x.w.n, "weights");
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

/* Sums and optimizer steps run over all n_floats: padding inside a weight's gradient must be 0. */
static void gradients_lie_like_weights_and_their_padding_stays_as_it_was(void **state)
{
    for (int which = 0; which < MODEL_SHAPES; which++) {
        struct bench x = bench_open(which, 4, 0);
        struct floats at = model_places(x.m, dev);
        for (int again = 0; again < 2; again++) bench_train(&x, 0, 1);
        for (size_t i = 0; i < x.m->n_floats; i++) {
            if (isnan(at.p[i]))
                assert_true(isnan(x.grad.p[i])); /* between tensors */
            else if (at.p[i] == 0)
                assert_true(x.grad.p[i] == 0);
            else
                assert_true(isfinite(x.grad.p[i]));
        }
        floats_close(at);
        bench_close(&x);
    }
}

/* Change one number of the inputs. */
static float loss_with(struct bench *x, float *where, float value)
{
    float before = *where;
    *where = value;
    bench_train(x, 0, 1);
    *where = before;
    return x->grad.p[x->m->n_floats];
}

/* Change one of the parameters. */
static float loss_with_param(struct bench *x, size_t at, float value)
{
    float before = x->params.p[at];
    x->params.p[at] = value;
    bench_put(x);
    bench_train(x, 0, 1);
    x->params.p[at] = before;
    bench_put(x);
    return x->grad.p[x->m->n_floats];
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
            assert_true(isnan(loss_with_param(&x, x.m->tensor[k].offset + i, NAN)));
    assert_true(isfinite(loss_with_param(&x, 0, x.params.p[0])));
    bench_close(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_gradients_are_slopes),
        cmocka_unit_test(gradients_agree_with_the_reference),
        cmocka_unit_test(evaluation_has_the_bits_of_training_and_changes_nothing),
        cmocka_unit_test(a_slices_bits_do_not_depend_on_lane_thread_or_address),
        cmocka_unit_test(gradients_lie_like_weights_and_their_padding_stays_as_it_was),
        cmocka_unit_test(nan_reaches_the_loss_from_every_input),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
