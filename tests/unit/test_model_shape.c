/* The model: shapes and names, initial weights, where they lie on a device; opening. What it
 * computes: test_model.c. */
#include <math.h>
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
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"
#include "tests/support/model_shapes.h"
#include "trainer/model.h"

/* --- shapes --------------------------------------------------------------------------------- */

static void tensors_have_the_references_names_and_shapes(void **state)
{
    static const struct { const char *name; uint32_t rows, cols; } WANT[] = {
        {"bot_l.0.weight", 512, 13},  {"bot_l.0.bias", 512, 1}, {"bot_l.2.weight", 256, 512},
        {"bot_l.2.bias", 256, 1},     {"bot_l.4.weight", 64, 256}, {"bot_l.4.bias", 64, 1},
        {"bot_l.6.weight", 16, 64},   {"bot_l.6.bias", 16, 1},  {"top_l.0.weight", 512, 367},
        {"top_l.0.bias", 512, 1},     {"top_l.2.weight", 256, 512}, {"top_l.2.bias", 256, 1},
        {"top_l.4.weight", 1, 256},   {"top_l.4.bias", 1, 1}};
    struct config c = model_shape(2);
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
    struct config c = model_shape(2);
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

/* --- on a device ---------------------------------------------------------------------------- */

static void tensors_have_places_of_their_own_on_a_device(void **state)
{
    for (int which = 0; which < MODEL_SHAPES; which++) {
        struct config c = model_shape(which);
        struct model *m;
        size_t end = 0, prepared_end = 0;
        assert_int_equal(model_open(&c, &m), ST_OK);
        for (int again = 0; again < 2; again++) model_place(m, dev); /* as often as one likes */
        for (uint32_t k = 0; k < m->n_tensors; k++) {
            const struct model_tensor *t = &m->tensor[k];
            size_t n = (size_t)t->rows * t->cols;
            size_t floats = t->is_bias ? n : dev->ops->weight_floats(dev, t->cols, t->rows);
            assert_true(t->at % 16 == 0 && t->at >= end && t->at < end + 16);
            assert_true(floats >= n);
            end = t->at + floats;
            if (t->is_bias) continue;
            assert_true(t->prepared % 64 == 0 && t->prepared >= prepared_end);
            prepared_end = t->prepared + dev->ops->prepared_bytes(dev, t->cols, t->rows);
        }
        assert_true(m->n_floats >= end && m->n_floats < end + 16);
        assert_true(m->prepared_bytes >= prepared_end);
        model_close(m);
    }
}

static void check_tensors_alone(const struct model *m, const float *got, const float *want)
{
    size_t at = 0;
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        const struct model_tensor *t = &m->tensor[k];
        for (; at < t->offset; at++) assert_true(isnan(got[at])); /* floats_open's: left alone */
        assert_same_bits(got + at, want + at, (size_t)t->rows * t->cols, t->name);
        at += (size_t)t->rows * t->cols;
    }
    for (; at < m->n_params; at++) assert_true(isnan(got[at]));
}

static void put_and_get(const struct model *m, uint64_t seed, float *w)
{
    struct floats params = floats_rough(m->n_params, 0, seed), got = floats_open(m->n_params, 0);
    assert_int_equal(model_put(m, dev, params.p, w), ST_OK);
    assert_int_equal(model_get(m, dev, w, got.p), ST_OK);
    check_tensors_alone(m, got.p, params.p);
    floats_close(params);
    floats_close(got);
}

static void parameters_come_back_as_they_were_put(void **state)
{
    for (int which = 0; which < MODEL_SHAPES; which++) {
        struct config c = model_shape(which);
        struct model *m;
        assert_int_equal(model_open(&c, &m), ST_OK);
        model_place(m, dev);
        struct floats w = floats_open(m->n_floats, 0);
        put_and_get(m, 40, w.p);
        put_and_get(m, 41, w.p); /* into what the first has left */
        floats_close(w);
        model_close(m);
    }
}

/* Every number has one place; what else a weight takes is 0, whatever was there. */
static void what_a_weight_takes_beyond_its_numbers_is_zero(void **state)
{
    for (int which = 0; which < MODEL_SHAPES; which++) {
        struct config c = model_shape(which);
        struct model *m;
        assert_int_equal(model_open(&c, &m), ST_OK);
        model_place(m, dev);
        struct floats at = model_places(m, dev);
        for (uint32_t k = 0; k < m->n_tensors; k++) {
            const struct model_tensor *t = &m->tensor[k];
            size_t n = (size_t)t->rows * t->cols, ones = 0;
            size_t floats = t->is_bias ? n : dev->ops->weight_floats(dev, t->cols, t->rows);
            for (size_t i = t->at; i < t->at + floats; i++) {
                assert_true(at.p[i] == 0 || at.p[i] == 1);
                ones += at.p[i] == 1;
            }
            assert_int_equal(ones, n);
            size_t next = k + 1 < m->n_tensors ? t[1].at : m->n_floats;
            for (size_t i = t->at + floats; i < next; i++) assert_true(isnan(at.p[i]));
        }
        floats_close(at);
        model_close(m);
    }
}

/* --- opening -------------------------------------------------------------------------------- */

static void keep_line(void *ctx, const char *line)
{
    snprintf(ctx, 256, "%s", line);
}

static void model_opens_whole_or_not_at_all(void **state)
{
    char line[256] = "";
    struct config c = model_shape(0);
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
    struct config c = model_shape(0);
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
        cmocka_unit_test(tensors_have_places_of_their_own_on_a_device),
        cmocka_unit_test(parameters_come_back_as_they_were_put),
        cmocka_unit_test(what_a_weight_takes_beyond_its_numbers_is_zero),
        cmocka_unit_test(model_opens_whole_or_not_at_all),
        cmocka_unit_test(buffers_open_whole_or_not_at_all),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
