/* The CPU device: optimizer steps, against plain f32 code of this file's own, on a device with one
 * lane and on one with four; and what a gradient that is not finite stops (I5). */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"

/* Lists this long are dealt to lanes in several pieces: of 1024 rows, of 32768 dense floats. */
enum { MANY_ROWS = 2500, MANY_FLOATS = 70001 };

static const enum optimizer KIND[] = {OPT_SGD, OPT_ADAGRAD, OPT_ROWWISE_ADAGRAD};

/* The formulas of device.h for one row, a rounding an operation. */
static void step_row(const struct opt_step *o, uint32_t D, const float *g, float *w, float *state)
{
    float squares = 0;
    for (uint32_t j = 0; j < D; j++) squares = squares + g[j] * g[j];
    if (o->kind == OPT_ROWWISE_ADAGRAD) *state = *state + squares / (float)D;
    for (uint32_t j = 0; j < D; j++) {
        float s = o->kind == OPT_ROWWISE_ADAGRAD ? *state : 0;
        if (o->kind == OPT_ADAGRAD) s = state[j] = state[j] + g[j] * g[j];
        float by = o->learning_rate * g[j];
        w[j] = w[j] - (o->kind == OPT_SGD ? by : by / (sqrtf(s) + o->epsilon));
    }
}

static void step_record(const struct opt_step *o, uint32_t D, const float *g, float *record)
{
    step_row(o, D, g, record, record + D);
}

static struct device_fault fault_of(struct device *d)
{
    struct device_fault f = {true, true, 99};
    assert_int_equal(d->ops->wait(d, 0), ST_OK);
    assert_int_equal(d->ops->fault(d, &f), ST_OK);
    return f;
}

static void assert_fault(struct device *d, bool dense, bool row, uint32_t slot)
{
    struct device_fault f = fault_of(d);
    assert_int_equal(f.dense, dense);
    assert_int_equal(f.row, row);
    if (row) assert_int_equal(f.slot, slot);
}

/* The list's rows in a table with some more; slots are not in order. */
static uint32_t slot_of(uint32_t i, uint32_t n)
{
    return (uint32_t)((uint64_t)i * 7919 % (2 * n + 1)); /* prime to it: each slot once */
}

static void check_row_steps(struct device *d, const struct opt_step *o, uint32_t n, uint32_t D)
{
    uint32_t stride = 2 * D + 1, *slot = mem_alloc(n, sizeof(*slot));
    struct floats table = floats_random((2 * (size_t)n + 1) * stride, 0, 51);
    struct floats want = floats_open(table.n, 0);
    for (size_t k = 0; k < table.n; k++) /* state is not negative */
        want.p[k] = table.p[k] = fabsf(table.p[k]);
    for (uint32_t r = 0; r < n; r++) slot[r] = slot_of(r, n);
    for (int iteration = 0; iteration < 3; iteration++) {
        struct floats g = floats_rough((size_t)n * D, 0, 52 + (uint64_t)iteration);
        for (uint32_t r = 0; r < n; r++)
            step_record(o, D, g.p + r * D, want.p + slot[r] * stride);
        assert_int_equal(d->ops->row_update(d, o, table.p, stride, D, slot, g.p, n), ST_OK);
        assert_same_bits(table.p, want.p, table.n, "table");
        floats_close(g);
    }
    assert_fault(d, false, false, 0);
    mem_free(slot);
    floats_close(table);
    floats_close(want);
}

static void rows_step_as_the_formulas_say(void **state)
{
    for (int i = 0; i < 3 * 4; i++) {
        struct opt_step o = {KIND[i % 3], 0.37f, 1e-8f};
        check_row_steps(dev, &o, 5, (uint32_t[]){1, 4, 16, 48}[i / 3]);
    }
}

static void many_rows_step_alike_on_one_lane_and_on_four(void **state)
{
    for (int i = 0; i < 3; i++) {
        struct opt_step o = {KIND[i], 0.37f, 1e-8f};
        check_row_steps(dev, &o, MANY_ROWS, 5);
        check_row_steps(lone, &o, MANY_ROWS, 5);
    }
}

static void check_dense_steps(struct device *d, enum optimizer kind, size_t n)
{
    struct opt_step o = {kind, 0.05f, 1e-4f};
    struct opt_step element = {kind == OPT_SGD ? OPT_SGD : OPT_ADAGRAD, 0.05f, 1e-4f};
    struct floats w = floats_random(n, 0, 61), want = floats_random(n, 0, 61);
    struct floats s = floats_open(n, 0), want_s = floats_open(n, 0), g = floats_rough(n, 0, 62);
    memset(s.p, 0, n * sizeof(float));
    memset(want_s.p, 0, n * sizeof(float));
    for (int iteration = 0; iteration < 3; iteration++) {
        for (size_t k = 0; k < n; k++) step_row(&element, 1, g.p + k, want.p + k, want_s.p + k);
        assert_int_equal(d->ops->dense_update(d, &o, w.p, s.p, g.p, n), ST_OK);
        assert_same_bits(w.p, want.p, n, "weights");
        assert_same_bits(s.p, want_s.p, n, "state");
    }
    assert_fault(d, false, false, 0);
    floats_close(w);
    floats_close(want);
    floats_close(s);
    floats_close(want_s);
    floats_close(g);
}

static void dense_weights_step_as_the_formulas_say(void **state)
{
    for (int i = 0; i < 3; i++) {
        check_dense_steps(dev, KIND[i], 1003);
        check_dense_steps(dev, KIND[i], MANY_FLOATS);
        check_dense_steps(lone, KIND[i], MANY_FLOATS);
    }
}

static void lists_without_entries_are_no_work(void **state)
{
    struct opt_step o = {OPT_ADAGRAD, 0.1f, 1e-8f};
    struct floats f = floats_random(64, 0, 65), before = floats_random(64, 0, 65);
    assert_int_equal(dev->ops->row_update(dev, &o, f.p, 8, 4, NULL, NULL, 0), ST_OK);
    assert_int_equal(dev->ops->dense_update(dev, &o, f.p, f.p + 32, f.p, 0), ST_OK);
    assert_same_bits(f.p, before.p, 64, "everything");
    assert_fault(dev, false, false, 0);
    floats_close(f);
    floats_close(before);
}

/* --- gradients that are not finite ------------------------------------------------------------ */

static const float BAD[] = {NAN, INFINITY, -INFINITY};

/* A device of its own, whose fault is not the others'; rows and dense weights to update. */
struct victim {
    struct device *d;
    uint32_t n, D, stride, *slot;
    struct floats table, table0, grad;         /* rows: as they are, and were */
    struct floats w, w0, state, state0, dense; /* dense, likewise             */
};

static struct victim victim_open(uint32_t lanes, uint32_t n, uint32_t D, size_t n_dense)
{
    size_t cells = (2 * (size_t)n + 1) * 2 * D;
    struct victim v = {
        cpu_device_with(lanes), n, D, 2 * D, mem_alloc(n, sizeof(uint32_t)),
        floats_random(cells, 0, 71), floats_random(cells, 0, 71), floats_random(n * D, 0, 72),
        floats_random(n_dense, 0, 73), floats_random(n_dense, 0, 73),
        floats_random(n_dense, 0, 74), floats_random(n_dense, 0, 74),
        floats_random(n_dense, 0, 75)};
    for (uint32_t r = 0; r < n; r++) v.slot[r] = slot_of(r, n);
    return v;
}

static void victim_close(struct victim *v)
{
    struct floats all[] = {v->table, v->table0, v->grad, v->w,
                           v->w0,    v->state,  v->state0, v->dense};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) floats_close(all[i]);
    mem_free(v->slot);
    device_close(v->d);
}

static void update_rows(struct victim *v, enum optimizer kind)
{
    struct opt_step o = {kind, 0.1f, 1e-8f};
    assert_int_equal(v->d->ops->row_update(v->d, &o, v->table.p, v->stride, v->D, v->slot,
                                           v->grad.p, v->n), ST_OK);
}

static void update_dense(struct victim *v, enum optimizer kind)
{
    struct opt_step o = {kind, 0.1f, 1e-8f};
    assert_int_equal(v->d->ops->dense_update(v->d, &o, v->w.p, v->state.p, v->dense.p, v->w.n),
                     ST_OK);
}

static void assert_nothing_written(const struct victim *v)
{
    assert_same_bits(v->table.p, v->table0.p, v->table.n, "table");
    assert_same_bits(v->w.p, v->w0.p, v->w.n, "weights");
    assert_same_bits(v->state.p, v->state0.p, v->state.n, "state");
}

static void one_gradient_that_is_not_finite_stops_all_rows_of_its_list(void **state)
{
    enum { D = 19, N = 4 };
    for (int i = 0; i < 3 * 3 * D; i++) {
        struct victim v = victim_open(1 + i % 2, N, D, 1);
        v.grad.p[2 * D + i / 9] = BAD[i / 3 % 3];
        update_rows(&v, KIND[i % 3]);
        assert_fault(v.d, false, true, v.slot[2]);
        assert_nothing_written(&v);
        victim_close(&v);
    }
}

static void the_fault_is_the_first_bad_row_of_the_list_whatever_lane_met_it(void **state)
{
    for (uint32_t lanes = 1; lanes <= 4; lanes += 3)
        for (uint32_t first = 0; first < MANY_ROWS; first += 600) {
            struct victim v = victim_open(lanes, MANY_ROWS, 3, 1);
            for (uint32_t r = first; r < MANY_ROWS; r += 97) v.grad.p[r * 3 + r % 3] = BAD[r % 3];
            update_rows(&v, OPT_SGD);
            assert_fault(v.d, false, true, v.slot[first]);
            assert_nothing_written(&v);
            victim_close(&v);
        }
}

static void one_dense_gradient_that_is_not_finite_stops_all(void **state)
{
    for (uint32_t at = 0; at < 100; at++) {
        struct victim v = victim_open(1, 1, 1, 100);
        v.dense.p[at] = BAD[at % 3];
        update_dense(&v, KIND[at / 3 % 3]);
        assert_fault(v.d, true, false, 0);
        assert_nothing_written(&v);
        victim_close(&v);
    }
    for (size_t at = 0; at < MANY_FLOATS; at += 7000) {
        struct victim v = victim_open(4, 1, 1, MANY_FLOATS);
        v.dense.p[at] = BAD[at % 3];
        update_dense(&v, OPT_SGD);
        assert_fault(v.d, true, false, 0);
        assert_nothing_written(&v);
        victim_close(&v);
    }
}

/* A run that goes on for a while before it asks finds the first fault, and good rows (I5). */
static void after_a_fault_no_update_writes_and_the_first_fault_stays(void **state)
{
    for (int dense_first = 0; dense_first < 2; dense_first++) {
        struct victim v = victim_open(4, 6, 4, 50);
        float *bad = dense_first ? v.dense.p + 17 : v.grad.p + 3 * 4, good = *bad;
        *bad = NAN;
        dense_first ? update_dense(&v, OPT_ADAGRAD) : update_rows(&v, OPT_ADAGRAD);
        *bad = good;
        update_rows(&v, OPT_ADAGRAD);
        update_dense(&v, OPT_ADAGRAD);
        v.grad.p[1] = v.dense.p[1] = INFINITY;
        update_rows(&v, OPT_SGD);
        update_dense(&v, OPT_SGD);
        assert_fault(v.d, dense_first, !dense_first, v.slot[3]);
        assert_nothing_written(&v);
        victim_close(&v);
    }
}

static void the_largest_float_is_finite(void **state)
{
    struct victim v = victim_open(1, 2, 4, 5);
    v.grad.p[5] = v.dense.p[2] = FLT_MAX;
    v.grad.p[6] = v.dense.p[3] = -FLT_MAX;
    update_rows(&v, OPT_SGD);
    update_dense(&v, OPT_SGD);
    assert_fault(v.d, false, false, 0);
    assert_true(v.table.p[v.slot[1] * v.stride + 1] < -1e37f && v.w.p[3] > 1e37f);
    victim_close(&v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_step_as_the_formulas_say),
        cmocka_unit_test(many_rows_step_alike_on_one_lane_and_on_four),
        cmocka_unit_test(dense_weights_step_as_the_formulas_say),
        cmocka_unit_test(lists_without_entries_are_no_work),
        cmocka_unit_test(one_gradient_that_is_not_finite_stops_all_rows_of_its_list),
        cmocka_unit_test(the_fault_is_the_first_bad_row_of_the_list_whatever_lane_met_it),
        cmocka_unit_test(one_dense_gradient_that_is_not_finite_stops_all),
        cmocka_unit_test(after_a_fault_no_update_writes_and_the_first_fault_stays),
        cmocka_unit_test(the_largest_float_is_finite),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
