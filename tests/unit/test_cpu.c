/* The CPU device: interaction, loss, rows and memory. Layers: test_cpu_linear.c; sums and updates:
 * test_cpu_sums.c. */
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
#include "compute/device.h"
#include "tests/support/floats.h"

static struct device *dev;

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

/* sum of p[i * dp] q[i * dq] over n, and of the magnitudes. */
static double dot(const float *p, size_t dp, const float *q, size_t dq, uint32_t n, double *size)
{
    double sum = 0;
    *size = 0;
    for (size_t i = 0; i < n; i++) {
        double term = (double)p[i * dp] * (double)q[i * dq];
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

/* --- interaction ---------------------------------------------------------------------------- */

struct interact {
    uint32_t B, F, D, R;
    struct floats t, r, dr, dt;
};

static struct interact interact_open(uint32_t B, uint32_t F, uint32_t D, size_t shift)
{
    uint32_t R = D + F * (F + 1) / 2;
    size_t n = (size_t)B * (F + 1) * D;
    return (struct interact){B, F, D, R,
                             floats_random(n, shift, 5), floats_open((size_t)B * R, shift),
                             floats_random((size_t)B * R, shift, 6), floats_open(n, shift)};
}

static void interact_run(const struct interact *a)
{
    assert_int_equal(dev->ops->interact_forward(dev, 1, a->B, a->F, a->D, a->t.p, a->r.p), ST_OK);
    assert_int_equal(dev->ops->interact_backward(dev, 1, a->B, a->F, a->D, a->t.p, a->dr.p,
                                                 a->dt.p), ST_OK);
}

static void interact_close(struct interact *a)
{
    floats_close(a->t);
    floats_close(a->r);
    floats_close(a->dr);
    floats_close(a->dt);
}

/* Pairs in the reference's order: (1,0), (2,0), (2,1), (3,0), ... */
static void check_interact(const struct interact *a, uint32_t b)
{
    const float *t = a->t.p + (size_t)b * (a->F + 1) * a->D, *r = a->r.p + (size_t)b * a->R;
    const float *dr = a->dr.p + (size_t)b * a->R, *dt = a->dt.p + (size_t)b * (a->F + 1) * a->D;
    size_t n = (size_t)(a->F + 1) * a->D, at = a->D;
    double *want = mem_zalloc(2 * n, sizeof(*want)), *size = want + n;
    assert_same_bits(r, t, a->D, "r[0..D)");
    for (uint32_t d = 0; d < a->D; d++) want[d] = (double)dr[d], size[d] = fabs(want[d]);
    for (uint32_t i = 0; i <= a->F; i++)
        for (uint32_t j = 0; j < i; j++, at++) {
            double s, z = dot(t + i * a->D, 1, t + j * a->D, 1, a->D, &s);
            assert_near(r[at], z, s, a->D, "dot", at);
            for (uint32_t d = 0; d < a->D; d++) {
                double to_i = (double)dr[at] * (double)t[j * a->D + d];
                double to_j = (double)dr[at] * (double)t[i * a->D + d];
                want[i * a->D + d] += to_i, size[i * a->D + d] += fabs(to_i);
                want[j * a->D + d] += to_j, size[j * a->D + d] += fabs(to_j);
            }
        }
    for (size_t k = 0; k < n; k++) assert_near(dt[k], want[k], size[k], a->F + 1, "dt", k);
    mem_free(want);
}

static void interaction_agrees_with_sums_in_double(void **state)
{
    static const uint32_t TABLES[] = {1, 3, 15, 16, 17, 26, 40};
    static const uint32_t DIM[] = {1, 4, 15, 16, 48, 67, 130};
    for (int i = 0; i < 7 * 7 * 2; i++) {
        struct interact a = interact_open(i / 49 ? 1 : 3, TABLES[i % 7], DIM[i / 7 % 7], 0);
        interact_run(&a);
        for (uint32_t b = 0; b < a.B; b++) check_interact(&a, b);
        interact_close(&a);
    }
}

static void interaction_has_the_same_bits_at_any_address(void **state)
{
    for (size_t shift = 1; shift < 16; shift += 3) {
        struct interact a = interact_open(2, 26, 70, 0), b = interact_open(2, 26, 70, shift);
        interact_run(&a);
        interact_run(&b);
        assert_same_bits(b.r.p, a.r.p, a.r.n, "r");
        assert_same_bits(b.dt.p, a.dt.p, a.dt.n, "dt");
        interact_close(&a);
        interact_close(&b);
    }
}

static void one_vectors_nan_stays_in_its_own_pairs(void **state)
{
    struct interact a = interact_open(2, 20, 20, 0);
    a.t.p[17 * 20 + 3] = NAN; /* sample 0, vector 17 */
    interact_run(&a);
    size_t at = 20;
    for (uint32_t i = 0; i <= 20; i++)
        for (uint32_t j = 0; j < i; j++, at++)
            assert_int_equal(isnan(a.r.p[at]) != 0, i == 17 || j == 17);
    for (uint32_t k = 0; k < a.R; k++) assert_false(isnan(a.r.p[a.R + k]));
    for (uint32_t i = 0; i <= 20; i++) assert_int_equal(isnan(a.dt.p[i * 20 + 3]) != 0, i != 17);
    interact_close(&a);
}

/* --- loss ----------------------------------------------------------------------------------- */

static void loss_agrees_with_its_definition(void **state)
{
    enum { B = 33 };
    struct floats z = floats_random(B, 0, 7), y = floats_random(B, 0, 8), dz = floats_open(B, 0);
    struct floats loss = floats_open(2, 0), p = floats_open(B, 0);
    long double sum = 0;
    for (int b = 0; b < B; b++) {
        z.p[b] *= 20.0f;
        y.p[b] = y.p[b] > 0 ? 1.0f : 0.0f;
        long double prob = 1 / (1 + expl(-(long double)z.p[b]));
        sum -= y.p[b] > 0 ? logl(prob) : logl(1 - prob);
    }
    assert_int_equal(dev->ops->bce(dev, 0, B, z.p, y.p, 0.125f, dz.p, loss.p, p.p), ST_OK);
    assert_int_equal(dev->ops->bce(dev, 0, B, z.p, y.p, 0, NULL, loss.p + 1, NULL), ST_OK);
    assert_near(loss.p[0], (double)sum, (double)sum, 1, "loss", 0);
    assert_same_bits(loss.p + 1, loss.p, 1, "loss of evaluation");
    for (int b = 0; b < B; b++) {
        double prob = (double)(1 / (1 + expl(-(long double)z.p[b])));
        double want = (prob - (double)y.p[b]) * 0.125;
        assert_near(p.p[b], prob, prob, 1, "prob", (size_t)b);
        assert_near(dz.p[b], want, fabs(want), 2, "dlogit", (size_t)b);
    }
    floats_close(z);
    floats_close(y);
    floats_close(dz);
    floats_close(loss);
    floats_close(p);
}

static void loss_of_extreme_logits_is_exact_and_of_nan_is_nan(void **state)
{
    static const struct { float z, y, loss, dz, prob; } CASE[] = {
        {1e4f, 1, 0, 0, 1}, {1e4f, 0, 1e4f, 1, 1}, {-1e4f, 0, 0, 0, 0}, {-1e4f, 1, 1e4f, -1, 0}};
    float loss, dz, prob, y = 0, nan = NAN;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(dev->ops->bce(dev, 0, 1, &CASE[i].z, &CASE[i].y, 1, &dz, &loss, &prob),
                         ST_OK);
        assert_true(loss == CASE[i].loss && dz == CASE[i].dz && prob == CASE[i].prob);
    }
    assert_int_equal(dev->ops->bce(dev, 0, 1, &nan, &y, 1, &dz, &loss, &prob), ST_OK);
    assert_true(isnan(loss) && isnan(dz) && isnan(prob));
}

/* --- rows, memory, opening ------------------------------------------------------------------ */

static void rows_go_in_and_out_at_any_alignment(void **state)
{
    enum { CAP = 9, STRIDE = 7, WIDTH = 5, N = 3 };
    static const uint32_t SLOT[N] = {8, 0, 4};
    struct floats table = floats_random(CAP * STRIDE, 0, 9);
    struct floats before = floats_random(CAP * STRIDE, 0, 9);
    struct floats rows = floats_random(N * WIDTH, 0, 10);
    char host[N * WIDTH * sizeof(float) + 1], back[N * WIDTH * sizeof(float) + 1];
    memcpy(host + 1, rows.p, N * WIDTH * sizeof(float));
    assert_int_equal(dev->ops->rows_put(dev, table.p, STRIDE, SLOT, N, host + 1, WIDTH), ST_OK);
    for (int i = 0; i < N; i++)
        memcpy(before.p + SLOT[i] * STRIDE, rows.p + i * WIDTH, WIDTH * sizeof(float));
    assert_same_bits(table.p, before.p, table.n, "table");
    assert_int_equal(dev->ops->rows_get(dev, table.p, STRIDE, SLOT, N, back + 1, WIDTH), ST_OK);
    assert_memory_equal(back + 1, host + 1, N * WIDTH * sizeof(float));
    floats_close(table);
    floats_close(before);
    floats_close(rows);
}

static void gather_fills_all_vectors_but_the_first(void **state)
{
    enum { B = 5, F = 7, CAP = 50 };
    for (uint32_t D = 1; D <= 48; D = D == 1 ? 16 : D + 32) {
        uint32_t stride = D + 3, slot[B * F];
        struct floats table = floats_random((size_t)CAP * stride, 0, 11);
        struct floats t = floats_open((size_t)B * (F + 1) * D, 0);
        for (uint32_t i = 0; i < B * F; i++) slot[i] = draw(12, i) % CAP;
        assert_int_equal(dev->ops->gather(dev, 0, B, F, D, table.p, stride, slot, t.p), ST_OK);
        for (uint32_t b = 0; b < B; b++)
            for (uint32_t v = 0; v <= F; v++) {
                const float *got = t.p + ((size_t)b * (F + 1) + v) * D;
                if (v == 0)
                    assert_true(isnan(got[0]) && isnan(got[D - 1]));
                else
                    assert_same_bits(got, table.p + (size_t)slot[b * F + v - 1] * stride, D, "t");
            }
        floats_close(table);
        floats_close(t);
    }
}

static void memory_is_aligned_and_zero(void **state)
{
    static const size_t BYTES[] = {1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 4};
    for (int i = 0; i < 5; i++) {
        char *p = dev->ops->alloc(dev, BYTES[i]);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t k = 0; k < BYTES[i]; k++) assert_true(p[k] == 0);
        memset(p, 0xFF, BYTES[i]);
        dev->ops->free(dev, p, BYTES[i]);
    }
}

static void keep_line(void *ctx, const char *line)
{
    snprintf(ctx, 256, "%s", line);
}

static void a_device_opens_whole_or_says_why_not(void **state)
{
    char line[256] = "";
    struct device_cfg cfg = {.lanes = 3};
    struct device *untouched = (struct device *)&cfg, *d = untouched;
    size_t live = mem_live();
    log_set_sink(keep_line, line);
    mem_fail_at(1);
    assert_int_equal(device_open(DEVICE_CPU, &cfg, &d), ST_NOMEM);
    assert_true(mem_fail_stop());
    assert_string_equal(line, "chanter: error[E-NOMEM]: cpu device: out of memory; free some");
    assert_int_equal(device_open((enum device_kind)77, &cfg, &d), ST_CONFIG);
    assert_non_null(strstr(line, "error[E-CONFIG]: cluster.device:"));
    log_set_sink(NULL, NULL);
    assert_ptr_equal(d, untouched);
    assert_int_equal(mem_live(), live);
    assert_int_equal(device_open(DEVICE_CPU, &cfg, &d), ST_OK);
    assert_string_equal(d->ops->name, "cpu");
    assert_int_equal(d->lanes, 3);
    device_close(d);
    device_close(NULL);
    assert_int_equal(mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(interaction_agrees_with_sums_in_double),
        cmocka_unit_test(interaction_has_the_same_bits_at_any_address),
        cmocka_unit_test(one_vectors_nan_stays_in_its_own_pairs),
        cmocka_unit_test(loss_agrees_with_its_definition),
        cmocka_unit_test(loss_of_extreme_logits_is_exact_and_of_nan_is_nan),
        cmocka_unit_test(rows_go_in_and_out_at_any_alignment),
        cmocka_unit_test(gather_fills_all_vectors_but_the_first),
        cmocka_unit_test(memory_is_aligned_and_zero),
        cmocka_unit_test(a_device_opens_whole_or_says_why_not),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
