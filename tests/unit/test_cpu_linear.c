/* The CPU device's fully connected layers: every shape of two Criteo models and odd ones, against
 * sums in double; layout, lanes, addresses, NaN, bf16. The rest of the device: test_cpu.c. */
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
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"

enum { THREADS = 4 };

/* --- one layer -------------------------------------------------------------------------------- */

/* weight, dw_host: row-major (N,K); w, dw, prepared: as the device lays them out. */
struct layer {
    struct device *d;
    uint32_t B, ldy;
    struct linear l;
    struct floats x, weight, w, b, prepared, y, dy, dw, dw_host, db, dx;
};

static void layer_prepare(struct layer *a)
{
    const struct device_ops *ops = a->d->ops;
    assert_int_equal(ops->weight_put(a->d, a->l.K, a->l.N, a->weight.p, a->w.p), ST_OK);
    assert_int_equal(ops->prepare(a->d, 0, &a->l), ST_OK);
}

static struct layer layer_on(struct device *d, uint32_t B, uint32_t K, uint32_t N, uint32_t ldy,
                             bool relu, size_t shift)
{
    size_t n_w = d->ops->weight_floats(d, K, N), bytes = d->ops->prepared_bytes(d, K, N);
    struct layer a = {
        .d = d, .B = B, .ldy = ldy,
        .x = floats_random((size_t)B * K, shift, 1),
        .weight = floats_random((size_t)N * K, shift, 2),
        .w = floats_open(n_w, shift),
        .b = floats_random(N, shift, 3),
        .prepared = floats_open((bytes + 3) / 4, shift),
        .y = floats_open((size_t)(B - 1) * ldy + N, shift),
        .dy = floats_random((size_t)(B - 1) * ldy + N, shift, 4),
        .dw = floats_open(n_w, shift),
        .dw_host = floats_open((size_t)N * K, shift),
        .db = floats_open(N, shift),
        .dx = floats_open((size_t)B * K, shift),
    };
    a.l = (struct linear){K, N, relu, a.w.p, a.b.p, a.prepared.p};
    layer_prepare(&a);
    return a;
}

static struct layer layer_open(uint32_t B, uint32_t K, uint32_t N, uint32_t ldy, bool relu,
                               size_t shift)
{
    return layer_on(dev, B, K, N, ldy, relu, shift);
}

static void layer_close(struct layer *a)
{
    struct floats all[] = {a->x, a->weight, a->w, a->b, a->prepared, a->y, a->dy, a->dw,
                           a->dw_host, a->db, a->dx};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) floats_close(all[i]);
}

static void layer_run(struct layer *a, uint32_t lane)
{
    const struct device_ops *ops = a->d->ops;
    assert_int_equal(ops->linear_forward(a->d, lane, a->B, &a->l, a->x.p, a->y.p, a->ldy), ST_OK);
    assert_int_equal(ops->linear_backward(a->d, lane, a->B, &a->l, a->x.p, a->y.p, a->ldy,
                                          a->dy.p, a->dw.p, a->db.p, a->dx.p), ST_OK);
    assert_int_equal(ops->weight_get(a->d, a->l.K, a->l.N, a->dw.p, a->dw_host.p), ST_OK);
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

/* Elements of big layers are drawn, so that a check costs about as much as the product. All, where
 * there are no more than `most`. */
static size_t pick(size_t i, size_t n, size_t most)
{
    return n <= most ? i : ((size_t)draw(99, i) << 16 ^ draw(98, i)) % n;
}

enum { MOST = 3000 };

/* How far from exact, in units of 2^-24 of the magnitudes: for each term, and in all. */
struct bound { double per_term, fixed; };
static const struct bound F32 = {1, 1}, EXACT = {0, 0};
/* Two factors, each off by at most 2^-8 of itself; 1 % for the product of both errors. */
static const struct bound BF16 = {1, 131072 * 1.01};

static double terms(struct bound r, uint32_t n)
{
    return r.per_term * n + r.fixed;
}

static void check_forward(const struct layer *a, struct bound r)
{
    uint32_t K = a->l.K, N = a->l.N;
    size_t n = (size_t)a->B * N;
    for (size_t i = 0; i < n && i < MOST; i++) {
        size_t at = pick(i, n, MOST), b = at / N, o = at % N;
        double size, z = dot(a->x.p + b * K, 1, a->weight.p + o * K, 1, K, &size);
        z += (double)a->b.p[o];
        size += fabs((double)a->b.p[o]);
        if (a->l.relu && z < 0) z = 0;
        assert_near(a->y.p[b * a->ldy + o], z, size, terms(r, K), "y", at);
    }
    for (size_t b = 0; b + 1 < a->B; b++)
        for (size_t o = N; o < a->ldy; o++)
            assert_true(isnan(a->y.p[b * a->ldy + o])); /* between rows: not ours */
}

static void check_mask_and_db(const struct layer *a, const float *dy_before)
{
    for (size_t n = 0; n < a->l.N; n++) {
        float db = 0;
        for (size_t i = n, b = 0; b < a->B; b++, i += a->ldy) {
            float masked = a->l.relu && a->y.p[i] == 0 ? 0 : dy_before[i];
            assert_same_bits(&a->dy.p[i], &masked, 1, "masked dy");
            db = b == 0 ? masked : db + masked;
        }
        assert_same_bits(&a->db.p[n], &db, 1, "db in sample order");
    }
}

static void check_backward(const struct layer *a, struct bound r)
{
    uint32_t B = a->B, K = a->l.K, N = a->l.N;
    size_t n_dw = (size_t)N * K, n_dx = (size_t)B * K;
    for (size_t i = 0; i < n_dw && i < MOST; i++) {
        size_t at = pick(i, n_dw, MOST);
        double size, dw = dot(a->dy.p + at / K, a->ldy, a->x.p + at % K, K, B, &size);
        assert_near(a->dw_host.p[at], dw, size, terms(r, B), "dw", at);
    }
    for (size_t i = 0; i < n_dx && i < MOST; i++) {
        size_t at = pick(i, n_dx, MOST);
        double size, dx = dot(a->dy.p + at / K * a->ldy, 1, a->weight.p + at % K, K, N, &size);
        assert_near(a->dx.p[at], dx, size, terms(r, N), "dx", at);
    }
}

static void run_and_check(struct layer *a, struct bound r)
{
    struct floats dy = floats_random(a->dy.n, 0, 4);
    layer_run(a, 0);
    check_forward(a, r);
    check_mask_and_db(a, dy.p);
    check_backward(a, r);
    floats_close(dy);
    layer_close(a);
}

/* --- right ------------------------------------------------------------------------------------ */

static void odd_layers_agree_with_sums_in_double(void **state)
{
    static const uint32_t BATCH[] = {1, 2, 7, 15, 63, 64, 65};
    static const uint32_t SIZE[] = {1, 2, 3, 13, 16, 17, 48, 64, 100, 367};
    for (uint32_t i = 0; i < 7 * 10 * 10; i++) {
        uint32_t B = BATCH[i % 7], K = SIZE[i / 7 % 10], N = SIZE[i / 70];
        struct layer a = layer_open(B, K, N, N + i % 3 * 5, i % 2, 0);
        run_and_check(&a, F32);
    }
}

/* Inputs and outputs of all layers of two models; their slices. */
static const uint32_t MODEL[][2] = {
    {13, 512}, {512, 256}, {256, 64}, {64, 16}, {367, 512}, {256, 1}, {13, 1024}, {1024, 1024},
    {1024, 512}, {64, 48}, {399, 1024}};
enum { N_MODEL = sizeof(MODEL) / sizeof(MODEL[0]) };

static void layers_of_both_models_agree_with_sums_in_double(void **state)
{
    static const uint32_t BATCH[] = {64, 256, 300, 1024};
    for (uint32_t i = 0; i < N_MODEL * 4; i++) {
        uint32_t B = BATCH[i / N_MODEL], K = MODEL[i % N_MODEL][0], N = MODEL[i % N_MODEL][1];
        struct layer a = layer_open(B, K, N, N, i % 2, 0);
        run_and_check(&a, F32);
    }
}

/* More inputs, outputs or samples than fit where rows and columns are copied to. */
static void very_long_layers_agree_with_sums_in_double(void **state)
{
    static const uint32_t SHAPE[][3] = {
        {20, 6144, 40}, {9, 40, 6144}, {2, 600000, 2}, {5000, 3, 3}};
    for (int i = 0; i < 4; i++) {
        struct layer a = layer_open(SHAPE[i][0], SHAPE[i][1], SHAPE[i][2], SHAPE[i][2], false, 0);
        run_and_check(&a, F32);
    }
}

/* The loss sum(c y) moves by as much as the gradients say. Powers of two as steps; no ReLU, so that
 * it is linear in each, and f32's rounding is all there is. */
static void gradients_are_finite_differences(void **state)
{
    enum { B = 6, K = 20, N = 35 };
    struct layer a = layer_open(B, K, N, N, false, 0);
    struct floats c = floats_random(B * N, 0, 4); /* what dy starts as */
    layer_run(&a, 0);
    struct { float *at; float gradient; } probe[] = {
        {&a.weight.p[3 * K + 7], a.dw_host.p[3 * K + 7]},
        {&a.weight.p[34 * K + 19], a.dw_host.p[34 * K + 19]},
        {&a.b.p[11], a.db.p[11]}, {&a.x.p[2 * K + 5], a.dx.p[2 * K + 5]}};
    for (int i = 0; i < 4; i++) {
        double loss[2], size;
        for (int side = 0; side < 2; side++) {
            float kept = *probe[i].at;
            *probe[i].at += side ? 0.5f : -0.5f;
            layer_prepare(&a);
            assert_int_equal(dev->ops->linear_forward(dev, 0, B, &a.l, a.x.p, a.y.p, N), ST_OK);
            loss[side] = dot(a.y.p, 1, c.p, 1, B * N, &size);
            *probe[i].at = kept;
        }
        assert_float_equal(loss[1] - loss[0], probe[i].gradient, 1e-3);
    }
    floats_close(c);
    layer_close(&a);
}

static void first_layer_asks_for_no_input_gradient(void **state)
{
    for (uint32_t N = 1; N <= 40; N += 39) {
        struct layer with = layer_open(5, 13, N, N, true, 0);
        struct layer without = layer_open(5, 13, N, N, true, 0);
        layer_run(&with, 0);
        memcpy(without.y.p, with.y.p, with.y.n * sizeof(float));
        assert_int_equal(dev->ops->linear_backward(dev, 0, 5, &without.l, without.x.p, without.y.p,
                                                   N, without.dy.p, without.dw.p, without.db.p,
                                                   NULL), ST_OK);
        assert_same_bits(without.dw.p, with.dw.p, with.dw.n, "dw");
        assert_same_bits(without.db.p, with.db.p, with.db.n, "db");
        layer_close(&with);
        layer_close(&without);
    }
}

static void relu_lets_nan_through(void **state)
{
    static const uint32_t OUT[] = {1, 18, 64};
    for (int i = 0; i < 3; i++) {
        uint32_t N = OUT[i];
        struct layer a = layer_open(3, 4, N, N, true, 0);
        a.x.p[1 * 4 + 2] = NAN;
        layer_run(&a, 0);
        for (uint32_t n = 0; n < N; n++) {
            assert_false(isnan(a.y.p[n]));
            assert_true(isnan(a.y.p[N + n]));
            assert_false(isnan(a.y.p[2 * N + n]));
            assert_true(isnan(a.dw_host.p[n * 4 + 2]));
            assert_false(isnan(a.dw_host.p[n * 4 + 1]));
        }
        layer_close(&a);
    }
}

/* --- layout ----------------------------------------------------------------------------------- */

static void weights_come_back_as_they_were_put(void **state)
{
    static const uint32_t SIZE[] = {1, 13, 16, 17, 64, 367};
    for (int i = 0; i < 6 * 6; i++) {
        uint32_t K = SIZE[i % 6], N = SIZE[i / 6];
        size_t n = dev->ops->weight_floats(dev, K, N), real = (size_t)K * N;
        struct floats host = floats_random(real, 1, 2), w = floats_open(n, 3);
        struct floats back = floats_open(real, 2);
        assert_int_equal(dev->ops->weight_put(dev, K, N, host.p, w.p), ST_OK);
        assert_int_equal(dev->ops->weight_get(dev, K, N, w.p, back.p), ST_OK);
        assert_same_bits(back.p, host.p, real, "weight");
        size_t zeros = 0;
        for (size_t k = 0; k < n; k++) zeros += w.p[k] == 0;
        assert_int_equal(zeros, n - real); /* the drawn numbers are none */
        floats_close(host);
        floats_close(w);
        floats_close(back);
    }
}

static void a_gradients_padding_is_zero(void **state)
{
    static const uint32_t OUT[] = {3, 16, 17, 48, 100};
    for (int i = 0; i < 5; i++) {
        struct layer a = layer_open(300, 21, OUT[i], OUT[i], false, 0);
        layer_run(&a, 0);
        size_t zeros = 0;
        for (size_t k = 0; k < a.dw.n; k++) zeros += a.dw.p[k] == 0;
        assert_int_equal(zeros, a.dw.n - a.dw_host.n);
        layer_close(&a);
    }
}

/* --- the same bits (I1) ----------------------------------------------------------------------- */

struct shifted_run { uint32_t lane; struct layer a[N_MODEL]; };

static void *run_layers(void *arg)
{
    struct shifted_run *r = arg;
    for (uint32_t i = 0; i < N_MODEL; i++)
        layer_run(&r->a[(i + 3 * r->lane) % N_MODEL], r->lane); /* beside other layers */
    return NULL;
}

static void shifted_open(struct device *d, struct shifted_run *r, uint32_t lane, size_t shift)
{
    r->lane = lane;
    for (int i = 0; i < N_MODEL; i++)
        r->a[i] = layer_on(d, 33, MODEL[i][0], MODEL[i][1], MODEL[i][1], true, shift);
}

static void shifted_close(struct shifted_run *r, const struct shifted_run *want)
{
    for (int i = 0; i < N_MODEL; i++) {
        struct layer *a = &r->a[i];
        const struct layer *w = &want->a[i];
        assert_same_bits(a->y.p, w->y.p, w->y.n, "y");
        assert_same_bits(a->dw.p, w->dw.p, w->dw.n, "dw");
        assert_same_bits(a->db.p, w->db.p, w->db.n, "db");
        assert_same_bits(a->dx.p, w->dx.p, w->dx.n, "dx");
        if (r != want) layer_close(a);
    }
}

static void check_same_bits_on_all_lanes(struct device *d)
{
    static const size_t SHIFT[THREADS] = {0, 1, 7, 12}; /* floats: 16 is a cache line */
    static struct shifted_run want, run[THREADS];
    pthread_t thread[THREADS];
    shifted_open(d, &want, 0, 0);
    run_layers(&want);
    for (uint32_t t = 0; t < THREADS; t++) shifted_open(d, &run[t], t, SHIFT[t]);
    for (int t = 0; t < THREADS; t++)
        assert_int_equal(pthread_create(&thread[t], NULL, run_layers, &run[t]), 0);
    for (int t = 0; t < THREADS; t++) pthread_join(thread[t], NULL);
    for (int t = 0; t < THREADS; t++) shifted_close(&run[t], &want);
    for (int i = 0; i < N_MODEL; i++) layer_close(&want.a[i]);
}

static void same_shapes_give_the_same_bits_at_any_address_on_any_thread(void **state)
{
    check_same_bits_on_all_lanes(dev);
}

/* Every sum is one chain: a slice's first samples get the same y and dx in any company, and the
 * chain over samples is not broken where long slices are cut. */
static void a_samples_result_does_not_depend_on_its_neighbours(void **state)
{
    enum { K = 70, N = 50, MANY = 600 };
    struct layer all = layer_open(MANY, K, N, N, true, 0);
    layer_run(&all, 0);
    for (uint32_t B = 1; B < 40; B++) {
        struct layer a = layer_open(B, K, N, N, true, 0);
        layer_run(&a, 0);
        assert_same_bits(a.y.p, all.y.p, a.y.n, "y");
        assert_same_bits(a.dx.p, all.dx.p, a.dx.n, "dx");
        layer_close(&a);
    }
    struct layer a = layer_open(MANY, K, N, N, true, 0);
    memset(a.x.p + 2 * K, 0, (MANY - 2) * K * sizeof(float)); /* what follows adds 0 */
    struct layer two = layer_open(2, K, N, N, true, 0);
    layer_run(&a, 0);
    layer_run(&two, 0);
    assert_same_bits(a.dw.p, two.dw.p, two.dw.n, "dw");
    layer_close(&a);
    layer_close(&two);
    layer_close(&all);
}

/* --- bf16 ------------------------------------------------------------------------------------- */

static void keep_line(void *ctx, const char *line)
{
    snprintf(ctx, 256, "%s", line);
}

/* NULL where this CPU has no such products: then it has said so, and there is nothing to test. */
static struct device *open_bf16(void)
{
    char line[256] = "";
    struct device_cfg cfg = {.lanes = THREADS, .precision = PRECISION_BF16};
    struct device *d = NULL;
    log_set_sink(keep_line, line);
    enum st st = device_open(DEVICE_CPU, &cfg, &d);
    log_set_sink(NULL, NULL);
    if (st == ST_OK) return d;
    assert_int_equal(st, ST_CONFIG);
    assert_non_null(strstr(line, "error[E-CONFIG]: device.precision: oneDNN has no bf16"));
    assert_null(d);
    return NULL;
}

static void bf16_layers_agree_within_their_rounding(void **state)
{
    static const uint32_t BATCH[] = {1, 17, 64}, SIZE[] = {2, 13, 48, 100};
    struct device *d = open_bf16();
    if (d == NULL) skip();
    for (uint32_t i = 0; i < 4 * 4 * 3 * 2; i++) {
        uint32_t B = BATCH[i / 16 % 3], K = SIZE[i % 4], N = SIZE[i / 4 % 4];
        struct layer a = layer_on(d, B, K, N, N + i / 48 * 3, i % 2, 0);
        run_and_check(&a, BF16);
    }
    device_close(d);
}

/* Factors that bf16 holds exactly, few enough for exact sums: then bf16 gets them all right. */
static void bf16_rounds_factors_only(void **state)
{
    enum { B = 9, K = 24, N = 34 };
    struct device *d = open_bf16();
    if (d == NULL) skip();
    struct layer a = layer_on(d, B, K, N, N, false, 0);
    struct floats *all[] = {&a.x, &a.weight, &a.b, &a.dy};
    for (int i = 0; i < 4; i++)
        for (size_t k = 0; k < all[i]->n; k++) all[i]->p[k] = (float)(draw(7, k) % 255) - 127;
    layer_prepare(&a);
    layer_run(&a, 0);
    check_forward(&a, EXACT);
    check_backward(&a, EXACT);
    a.weight.p[5] = 1.00390625f;                  /* 1 + 2^-8: a tie, rounded to 1 */
    memset(a.x.p, 0, a.x.n * sizeof(float));
    a.x.p[5] = 1;
    a.b.p[0] = 0;
    layer_prepare(&a);
    layer_run(&a, 0);
    assert_true(a.y.p[0] == 1.0f);
    layer_close(&a);
    device_close(d);
}

static void bf16_keeps_nan_and_the_same_bits(void **state)
{
    struct device *d = open_bf16();
    if (d == NULL) skip();
    struct layer a = layer_on(d, 3, 4, 18, 18, true, 0);
    uint32_t all_ones = 0x7FFFFFFF; /* the NaN that rounding up would turn into -0 */
    memcpy(a.x.p + 1 * 4 + 2, &all_ones, sizeof(all_ones));
    layer_run(&a, 0);
    for (uint32_t i = 0; i < 3 * 18; i++) assert_int_equal(isnan(a.y.p[i]) != 0, i / 18 == 1);
    layer_close(&a);
    check_same_bits_on_all_lanes(d);
    device_close(d);
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
    struct device *d = arg;
    static int grown;
    int before = threads_of_this_process();
    struct layer a = layer_on(d, 256, 512, 512, 512, true, 0);
    omp_set_num_threads(4); /* as OMP_NUM_THREADS=4 would */
    layer_run(&a, 0);
    grown = threads_of_this_process() - before;
    layer_close(&a);
    return &grown;
}

static void a_product_starts_no_threads_of_its_own(void **state)
{
    struct device *all[] = {dev, open_bf16()};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        void *grown;
        if (all[i] == NULL) continue;
        assert_int_equal(pthread_create(&thread, NULL, run_one_big_layer, all[i]), 0);
        pthread_join(thread, &grown);
        assert_int_equal(*(int *)grown, 0);
    }
    device_close(all[1]);
}

static void a_cpu_refuses_tf32(void **state)
{
    char line[256] = "";
    struct device_cfg cfg = {.lanes = 1, .precision = PRECISION_TF32};
    struct device *d = NULL;
    size_t live = mem_live();
    log_set_sink(keep_line, line);
    assert_int_equal(device_open(DEVICE_CPU, &cfg, &d), ST_CONFIG);
    log_set_sink(NULL, NULL);
    assert_string_equal(line, "chanter: error[E-CONFIG]: device.precision: a CPU has no tf32; "
                              "use fp32 or bf16");
    assert_null(d);
    assert_int_equal(mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_layers_agree_with_sums_in_double),
        cmocka_unit_test(layers_of_both_models_agree_with_sums_in_double),
        cmocka_unit_test(very_long_layers_agree_with_sums_in_double),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(first_layer_asks_for_no_input_gradient),
        cmocka_unit_test(relu_lets_nan_through),
        cmocka_unit_test(weights_come_back_as_they_were_put),
        cmocka_unit_test(a_gradients_padding_is_zero),
        cmocka_unit_test(same_shapes_give_the_same_bits_at_any_address_on_any_thread),
        cmocka_unit_test(a_samples_result_does_not_depend_on_its_neighbours),
        cmocka_unit_test(bf16_layers_agree_within_their_rounding),
        cmocka_unit_test(bf16_rounds_factors_only),
        cmocka_unit_test(bf16_keeps_nan_and_the_same_bits),
        cmocka_unit_test(a_product_starts_no_threads_of_its_own),
        cmocka_unit_test(a_cpu_refuses_tf32),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
