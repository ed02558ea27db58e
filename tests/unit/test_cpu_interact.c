/* The CPU device's interaction: dots of all pairs of a sample's vectors, and their gradient. */
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

struct interact {
    uint32_t B, F, D, R;         /* R: floats of one r                          */
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

/* Sample b against sums in double. Pairs in the order (1,0), (2,0), (2,1), (3,0), ... */
static void check_sample(const struct interact *a, uint32_t b)
{
    const float *t = a->t.p + (size_t)b * (a->F + 1) * a->D, *r = a->r.p + (size_t)b * a->R;
    const float *dr = a->dr.p + (size_t)b * a->R, *dt = a->dt.p + (size_t)b * (a->F + 1) * a->D;
    size_t n = (size_t)(a->F + 1) * a->D, at = a->D;
    double *want = mem_zalloc(2 * n, sizeof(*want)), *size = want + n;
    assert_same_bits(r, t, a->D, "r[0..D)");
    for (uint32_t d = 0; d < a->D; d++) want[d] = (double)dr[d], size[d] = fabs(want[d]);
    for (uint32_t i = 0; i <= a->F; i++)
        for (uint32_t j = 0; j < i; j++, at++) {
            const float *ti = t + i * a->D, *tj = t + j * a->D;
            double z = 0, z_size = 0, dz = (double)dr[at];
            for (uint32_t d = 0; d < a->D; d++) {
                double term = (double)ti[d] * (double)tj[d];
                double to_i = dz * (double)tj[d], to_j = dz * (double)ti[d];
                z += term, z_size += fabs(term);
                want[i * a->D + d] += to_i, size[i * a->D + d] += fabs(to_i);
                want[j * a->D + d] += to_j, size[j * a->D + d] += fabs(to_j);
            }
            assert_near(r[at], z, z_size, a->D, "dot", at);
        }
    for (size_t k = 0; k < n; k++) assert_near(dt[k], want[k], size[k], a->F + 1, "dt", k);
    mem_free(want);
}

static void check_shape(uint32_t B, uint32_t F, uint32_t D)
{
    struct interact a = interact_open(B, F, D, 0);
    interact_run(&a);
    for (uint32_t b = 0; b < B; b++) check_sample(&a, b);
    interact_close(&a);
}

static void dots_and_gradients_agree_with_sums_in_double(void **state)
{
    static const uint32_t DIM[] = {1, 2, 3, 15, 16, 17, 48, 64, 65, 100, 128, 130};
    for (uint32_t F = 1; F <= 40; F++)
        for (uint32_t k = 0; k < 12; k++) check_shape(1 + (F + k) % 3, F, DIM[k]);
}

static void so_do_those_of_many_tables(void **state)
{
    static const uint32_t TABLES[] = {95, 96, 100, 111, 112, 127, 150, 200};
    for (uint32_t k = 0; k < 8; k++) {
        check_shape(2, TABLES[k], 16);
        check_shape(1, TABLES[k], k % 2 == 0 ? 67 : 3);
    }
}

/* sum of dr r, for small integers: exact in any order. */
static double weighted(const struct interact *a)
{
    double sum = 0;
    assert_int_equal(dev->ops->interact_forward(dev, 0, a->B, a->F, a->D, a->t.p, a->r.p), ST_OK);
    for (size_t k = 0; k < a->r.n; k++) sum += (double)a->dr.p[k] * (double)a->r.p[k];
    return sum;
}

static void fill_with_integers(struct floats f, uint64_t seed)
{
    for (size_t k = 0; k < f.n; k++) f.p[k] = (float)(draw(seed, k) % 9) - 4.0f;
}

/* r is of second degree in t, so that (f(t + 1) - f(t - 1)) / 2 is its derivative. */
static void gradients_are_finite_differences(void **state)
{
    static const uint32_t SHAPE[][2] = {{1, 1}, {2, 5}, {9, 16}, {26, 16}, {33, 7}, {5, 70}};
    for (uint32_t s = 0; s < 6; s++) {
        struct interact a = interact_open(1, SHAPE[s][0], SHAPE[s][1], 0);
        fill_with_integers(a.t, 20 + s);
        fill_with_integers(a.dr, 30 + s);
        interact_run(&a);
        for (size_t k = 0; k < a.t.n; k++) {
            float at = a.t.p[k];
            a.t.p[k] = at + 1;
            double above = weighted(&a);
            a.t.p[k] = at - 1;
            double slope = (above - weighted(&a)) / 2;
            a.t.p[k] = at;
            assert_true((double)a.dt.p[k] == slope);
        }
        interact_close(&a);
    }
}

static void the_bits_do_not_depend_on_addresses(void **state)
{
    for (size_t shift = 1; shift < 16; shift += 2) {
        uint32_t F = shift % 4 == 1 ? 26 : 37, D = shift < 8 ? 70 : 16;
        struct interact a = interact_open(2, F, D, 0), b = interact_open(2, F, D, shift);
        interact_run(&a);
        interact_run(&b);
        assert_same_bits(b.r.p, a.r.p, a.r.n, "r");
        assert_same_bits(b.dt.p, a.dt.p, a.dt.n, "dt");
        interact_close(&a);
        interact_close(&b);
    }
}

static void the_bits_of_a_sample_do_not_depend_on_the_others(void **state)
{
    enum { B = 5, F = 26, D = 48, T = (F + 1) * D };
    struct interact all = interact_open(B, F, D, 0), one = interact_open(1, F, D, 0);
    interact_run(&all);
    for (uint32_t b = 0; b < B; b++) {
        memcpy(one.t.p, all.t.p + b * T, T * sizeof(float));
        memcpy(one.dr.p, all.dr.p + b * one.R, one.R * sizeof(float));
        interact_run(&one);
        assert_same_bits(one.r.p, all.r.p + b * one.R, one.R, "r");
        assert_same_bits(one.dt.p, all.dt.p + b * T, T, "dt");
    }
    interact_close(&all);
    interact_close(&one);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dots_and_gradients_agree_with_sums_in_double),
        cmocka_unit_test(so_do_those_of_many_tables),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(the_bits_do_not_depend_on_addresses),
        cmocka_unit_test(the_bits_of_a_sample_do_not_depend_on_the_others),
        cmocka_unit_test(one_vectors_nan_stays_in_its_own_pairs),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
