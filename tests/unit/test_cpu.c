/* The CPU device: layers, interaction, loss, rows and memory. Sums and updates: test_cpu_sums.c. */
#include <math.h>
#include <omp.h>
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

/* --- layers --------------------------------------------------------------------------------- */

struct linear {
    uint32_t B, K, N, ldy;
    int relu;
    struct floats x, w, b, y, dy, dw, db, dx;
};

static struct linear linear_open(uint32_t B, uint32_t K, uint32_t N, uint32_t ldy, int relu,
                                 size_t shift)
{
    return (struct linear){
        .B = B, .K = K, .N = N, .ldy = ldy, .relu = relu,
        .x = floats_random((size_t)B * K, shift, 1),
        .w = floats_random((size_t)N * K, shift, 2),
        .b = floats_random(N, shift, 3),
        .y = floats_open((size_t)(B - 1) * ldy + N, shift),
        .dy = floats_random((size_t)(B - 1) * ldy + N, shift, 4),
        .dw = floats_open((size_t)N * K, shift),
        .db = floats_open(N, shift),
        .dx = floats_open((size_t)B * K, shift),
    };
}

static void linear_close(struct linear *l)
{
    struct floats all[] = {l->x, l->w, l->b, l->y, l->dy, l->dw, l->db, l->dx};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) floats_close(all[i]);
}

static void linear_run(struct linear *l, uint32_t lane)
{
    assert_int_equal(dev->ops->linear_forward(dev, lane, l->B, l->K, l->N, l->x.p, l->w.p, l->b.p,
                                              l->relu, l->y.p, l->ldy), ST_OK);
    assert_int_equal(dev->ops->linear_backward(dev, lane, l->B, l->K, l->N, l->x.p, l->w.p,
                                               l->y.p, l->ldy, l->relu, l->dy.p, l->dw.p, l->db.p,
                                               l->dx.p), ST_OK);
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

static void check_forward(const struct linear *l)
{
    for (size_t b = 0; b < l->B; b++) {
        for (size_t n = 0; n < l->N; n++) {
            double size, z = dot(l->x.p + b * l->K, 1, l->w.p + n * l->K, 1, l->K, &size);
            z += (double)l->b.p[n];
            size += fabs((double)l->b.p[n]);
            if (l->relu && z < 0) z = 0;
            assert_near(l->y.p[b * l->ldy + n], z, size, l->K + 1, "y", b * l->ldy + n);
        }
        for (size_t n = l->N; n < l->ldy && b + 1 < l->B; n++)
            assert_true(isnan(l->y.p[b * l->ldy + n])); /* between rows: not ours */
    }
}

static void check_backward(const struct linear *l, const float *dy_before)
{
    for (size_t n = 0; n < l->N; n++) {
        float db = 0;
        for (size_t i = n, b = 0; b < l->B; b++, i += l->ldy) {
            float masked = l->relu && l->y.p[i] == 0 ? 0 : dy_before[i];
            assert_same_bits(&l->dy.p[i], &masked, 1, "masked dy");
            db = b == 0 ? masked : db + masked;
        }
        assert_same_bits(&l->db.p[n], &db, 1, "db in sample order");
        for (size_t k = 0; k < l->K; k++) {
            double size, dw = dot(l->dy.p + n, l->ldy, l->x.p + k, l->K, l->B, &size);
            assert_near(l->dw.p[n * l->K + k], dw, size, l->B, "dw", n * l->K + k);
        }
    }
    for (size_t b = 0; b < l->B; b++)
        for (size_t k = 0; k < l->K; k++) {
            double size, dx = dot(l->dy.p + b * l->ldy, 1, l->w.p + k, l->K, l->N, &size);
            assert_near(l->dx.p[b * l->K + k], dx, size, l->N, "dx", b * l->K + k);
        }
}

static void layers_agree_with_sums_in_double(void **state)
{
    static const uint32_t BATCH[] = {1, 2, 7, 16, 33}, IN[] = {1, 2, 13, 16, 17, 70},
                          OUT[] = {1, 2, 3, 16, 19, 64};
    for (int i = 0; i < 5 * 6 * 6 * 2 * 2; i++) {
        uint32_t B = BATCH[i % 5], K = IN[i / 5 % 6], N = OUT[i / 30 % 6];
        struct linear l = linear_open(B, K, N, N + (uint32_t)(i / 360) * 5, i / 180 % 2, 0);
        struct floats dy = floats_random(l.dy.n, 0, 4);
        linear_run(&l, 0);
        check_forward(&l);
        check_backward(&l, dy.p);
        floats_close(dy);
        linear_close(&l);
    }
}

static void first_layer_asks_for_no_input_gradient(void **state)
{
    for (uint32_t N = 1; N <= 8; N += 7) {
        struct linear with = linear_open(5, 13, N, N, 1, 0);
        struct linear without = linear_open(5, 13, N, N, 1, 0);
        linear_run(&with, 0);
        memcpy(without.y.p, with.y.p, with.y.n * sizeof(float));
        assert_int_equal(dev->ops->linear_backward(dev, 0, 5, 13, N, without.x.p, without.w.p,
                                                   without.y.p, N, 1, without.dy.p, without.dw.p,
                                                   without.db.p, NULL), ST_OK);
        assert_same_bits(without.dw.p, with.dw.p, with.dw.n, "dw");
        assert_same_bits(without.db.p, with.db.p, with.db.n, "db");
        linear_close(&with);
        linear_close(&without);
    }
}

static void relu_lets_nan_through(void **state)
{
    for (uint32_t N = 1; N <= 18; N += 17) {
        struct linear l = linear_open(3, 4, N, N, 1, 0);
        l.x.p[1 * 4 + 2] = NAN;
        linear_run(&l, 0);
        for (uint32_t n = 0; n < N; n++) {
            assert_false(isnan(l.y.p[n]));
            assert_true(isnan(l.y.p[N + n]));
            assert_false(isnan(l.y.p[2 * N + n]));
        }
        linear_close(&l);
    }
}

/* The layers of a Criteo model, at a slice's size: what oneDNN has special paths for. */
static const uint32_t LAYERS[][3] = {{64, 13, 512}, {64, 512, 256}, {64, 64, 16}, {64, 367, 512},
                                     {64, 256, 1},  {1, 367, 512},  {3, 256, 64}, {32, 64, 48}};
enum { N_LAYERS = sizeof(LAYERS) / sizeof(LAYERS[0]), THREADS = 4 };

struct shifted_run { uint32_t lane; struct linear l[N_LAYERS]; };

static void *run_layers(void *arg)
{
    struct shifted_run *r = arg;
    for (int i = 0; i < N_LAYERS; i++) linear_run(&r->l[i], r->lane);
    return NULL;
}

static void shifted_open(struct shifted_run *r, uint32_t lane, size_t shift)
{
    r->lane = lane;
    for (int i = 0; i < N_LAYERS; i++) {
        const uint32_t *s = LAYERS[i];
        r->l[i] = linear_open(s[0], s[1], s[2], s[2], 1, shift);
    }
}

static void shifted_compare_and_close(struct shifted_run *r, const struct shifted_run *want)
{
    for (int i = 0; i < N_LAYERS; i++) {
        struct linear *l = &r->l[i];
        const struct linear *w = &want->l[i];
        assert_same_bits(l->y.p, w->y.p, w->y.n, "y");
        assert_same_bits(l->dw.p, w->dw.p, w->dw.n, "dw");
        assert_same_bits(l->db.p, w->db.p, w->db.n, "db");
        assert_same_bits(l->dx.p, w->dx.p, w->dx.n, "dx");
        linear_close(l);
    }
}

static void same_shapes_give_the_same_bits_at_any_address_on_any_thread(void **state)
{
    static const size_t SHIFT[THREADS] = {0, 1, 7, 12}; /* floats: 16 is a cache line */
    struct shifted_run want, run[THREADS];
    pthread_t thread[THREADS];
    shifted_open(&want, 0, 0);
    run_layers(&want);
    for (int round = 0; round < 3; round++) {
        for (uint32_t t = 0; t < THREADS; t++) shifted_open(&run[t], t, SHIFT[t] + round);
        for (int t = 0; t < THREADS; t++)
            assert_int_equal(pthread_create(&thread[t], NULL, run_layers, &run[t]), 0);
        for (int t = 0; t < THREADS; t++) pthread_join(thread[t], NULL);
        for (int t = 0; t < THREADS; t++) shifted_compare_and_close(&run[t], &want);
    }
    for (int i = 0; i < N_LAYERS; i++) linear_close(&want.l[i]);
}

static int threads_of_this_process(void)
{
    char line[256];
    int n = 0;
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "Threads: %d", &n) == 1) break;
    fclose(f);
    return n;
}

/* On a thread of its own: what OpenMP may do is a setting of the calling thread. */
static void *run_one_big_layer(void *arg)
{
    int *grown = arg, before = threads_of_this_process();
    struct linear l = linear_open(256, 512, 512, 512, 1, 0);
    omp_set_num_threads(4); /* as OMP_NUM_THREADS=4 would */
    linear_run(&l, 0);
    *grown = threads_of_this_process() - before;
    linear_close(&l);
    return NULL;
}

static void a_product_starts_no_threads_of_its_own(void **state)
{
    pthread_t thread;
    int grown = -1;
    assert_int_equal(pthread_create(&thread, NULL, run_one_big_layer, &grown), 0);
    pthread_join(thread, NULL);
    assert_int_equal(grown, 0);
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
        cmocka_unit_test(layers_agree_with_sums_in_double),
        cmocka_unit_test(first_layer_asks_for_no_input_gradient),
        cmocka_unit_test(relu_lets_nan_through),
        cmocka_unit_test(same_shapes_give_the_same_bits_at_any_address_on_any_thread),
        cmocka_unit_test(a_product_starts_no_threads_of_its_own),
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
