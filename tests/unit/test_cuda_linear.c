/* Layers on the CUDA device, with cuBLASLt on the CPU: which matrix is what, leading dimensions,
 * alignment, narrowing. Against plain sums in f64. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "compute/cuda.h"
#include "tests/support/floats.h"

#define OK(call) assert_int_equal((call), ST_OK)

static struct device *must_open(enum precision precision)
{
    struct device_cfg cfg = {.lanes = 2, .precision = precision};
    struct cuda_tuning tuning = {1 << 16, 1 << 10};
    struct device *d;
    emu_seed(5);
    OK(cuda_open_tuned(&cfg, &tuning, &d));
    return d;
}

/* One layer and what passes through it; host copies beside device memory. */
struct layer {
    struct device *d;
    struct linear l;
    uint32_t B, ldy, shift;      /* shift: floats behind an aligned address, of everything */
    float *x, *y, *dy, *dw, *db, *dx;   /* device */
    struct floats hx, hw, hb, hy, hdy, hdw, hdb, hdx;
    float *memory;
    size_t n_memory, used;
};

static float *place(struct layer *t, size_t n)
{
    float *p = t->memory + t->used + t->shift;
    t->used += (n + t->shift + 15) / 16 * 16;
    assert_true(t->used <= t->n_memory);
    return p;
}

static float *placed(struct layer *t, struct floats host)
{
    float *p = place(t, host.n);
    OK(t->d->ops->copy_in(t->d, p, host.p, host.n * sizeof(float)));
    return p;
}

static void fetch(struct layer *t, const float *p, struct floats to)
{
    OK(t->d->ops->copy_out(t->d, p, to.p, to.n * sizeof(float), NULL));
}

static void layer_open(struct layer *t, struct device *d, uint32_t B, uint32_t K, uint32_t N,
                       uint32_t ldy, bool relu, uint32_t shift)
{
    size_t n_y = (size_t)(B - 1) * ldy + N, n_w = (size_t)N * K;
    *t = (struct layer){.d = d, .B = B, .ldy = ldy, .shift = shift, .n_memory = 1 << 16};
    t->l = (struct linear){.K = K, .N = N, .relu = relu};
    t->memory = d->ops->alloc(d, t->n_memory * sizeof(float));
    t->hx = floats_random((size_t)B * K, 0, 1);
    t->hw = floats_random(n_w, 0, 2);
    t->hb = floats_random(N, 0, 3);
    t->hdy = floats_random(n_y, 0, 4);
    t->hy = floats_random(n_y, 0, 5);
    t->hdw = floats_open(n_w, 0);
    t->hdb = floats_open(N, 0);
    t->hdx = floats_open((size_t)B * K, 0);
    float *w = place(t, n_w);
    assert_int_equal(d->ops->weight_floats(d, K, N), n_w);
    OK(d->ops->weight_put(d, K, N, t->hw.p, w));
    t->l.w = w;
    t->l.b = placed(t, t->hb);
    t->x = placed(t, t->hx);
    t->y = placed(t, t->hy);
    t->dy = placed(t, t->hdy);
    t->dw = place(t, n_w);
    t->db = place(t, N);
    t->dx = place(t, (size_t)B * K);
    size_t bytes = d->ops->prepared_bytes(d, K, N);
    t->l.prepared = bytes > 0 ? d->ops->alloc(d, bytes) : NULL;
}

static void layer_close(struct layer *t)
{
    struct floats all[] = {t->hx, t->hw, t->hb, t->hy, t->hdy, t->hdw, t->hdb, t->hdx};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) floats_close(all[i]);
    t->d->ops->free(t->d, t->l.prepared, 0);
    t->d->ops->free(t->d, t->memory, 0);
}

static enum st run_layer(void *ctx, uint32_t lane, uint32_t task)
{
    struct layer *t = ctx;
    const struct device_ops *ops = t->d->ops;
    enum st st;
    TRY(ops->prepare(t->d, lane, &t->l), err);
    TRY(ops->linear_forward(t->d, lane, t->B, &t->l, t->x, t->y, t->ldy), err);
    st = ops->linear_backward(t->d, lane, t->B, &t->l, t->x, t->y, t->ldy, t->dy, t->dw, t->db,
                              t->dx);
err: return st;
}

/* Task 1 on lane 1: its scratch memory and workspace. */
static enum st run_second(void *ctx, uint32_t lane, uint32_t task)
{
    return task == 1 ? run_layer(ctx, lane, task) : ST_OK;
}

static float bf16(float x) /* to nearest, ties to even */
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* sum of p[i dp] q[i dq], factors narrowed or not. */
static double dot(const float *p, size_t dp, const float *q, size_t dq, uint32_t n, bool narrow,
                  double *size)
{
    double sum = 0;
    *size = 0;
    for (size_t i = 0; i < n; i++) {
        float a = p[i * dp], b = q[i * dq];
        double term = narrow ? (double)bf16(a) * (double)bf16(b) : (double)a * (double)b;
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

static void check_forward(const struct layer *t, const float *before, bool narrow)
{
    uint32_t K = t->l.K, N = t->l.N;
    for (uint32_t b = 0; b < t->B; b++)
        for (uint32_t n = 0; n < t->ldy && b * t->ldy + n < t->hy.n; n++) {
            size_t at = (size_t)b * t->ldy + n;
            double size;
            if (n >= N) {
                assert_true(t->hy.p[at] == before[at]); /* between rows: left alone */
                continue;
            }
            double want = dot(t->hx.p + b * K, 1, t->hw.p + n * K, 1, K, narrow, &size);
            want += (double)t->hb.p[n];
            if (t->l.relu && want < 0) want = 0;
            assert_near(t->hy.p[at], want, size + 1, K + 2, "y", at);
        }
}

/* hdy: masked by now. */
static void check_backward(const struct layer *t, bool narrow)
{
    uint32_t K = t->l.K, N = t->l.N, B = t->B;
    double size;
    for (uint32_t n = 0; n < N; n++) {
        const float one = 1.0f;
        double sum = dot(t->hdy.p + n, t->ldy, &one, 0, B, false, &size);
        assert_near(t->hdb.p[n], sum, size, B, "db", n);
        for (uint32_t k = 0; k < K; k++) {
            sum = dot(t->hdy.p + n, t->ldy, t->hx.p + k, K, B, narrow, &size);
            assert_near(t->hdw.p[n * K + k], sum, size, B + 1, "dw", n * K + k);
        }
    }
    for (uint32_t b = 0; b < B; b++)
        for (uint32_t k = 0; k < K; k++) {
            double sum = dot(t->hdy.p + b * t->ldy, 1, t->hw.p + k, K, N, narrow, &size);
            assert_near(t->hdx.p[b * K + k], sum, size, N + 1, "dx", b * K + k);
        }
}

static void check_layer(struct device *d, uint32_t B, uint32_t K, uint32_t N, uint32_t ldy,
                        bool relu, uint32_t shift)
{
    struct layer t;
    bool narrow = cuda_of(d)->precision == PRECISION_BF16 && N > 1;
    layer_open(&t, d, B, K, N, ldy, relu, shift);
    struct floats before = floats_random(t.hy.n, 0, 5), dy = floats_random(t.hdy.n, 0, 4);
    OK(d->ops->parallel(d, 2, run_second, &t));
    fetch(&t, t.y, t.hy);
    fetch(&t, t.dy, t.hdy);
    fetch(&t, t.dw, t.hdw);
    fetch(&t, t.db, t.hdb);
    fetch(&t, t.dx, t.hdx);
    check_forward(&t, before.p, narrow);
    for (uint32_t b = 0; b < B; b++)
        for (uint32_t n = 0; n < N; n++) {
            size_t at = (size_t)b * ldy + n;
            assert_true(t.hdy.p[at] == (relu && t.hy.p[at] == 0.0f ? 0.0f : dy.p[at]));
        }
    check_backward(&t, narrow);
    floats_close(dy);
    floats_close(before);
    layer_close(&t);
}

static const uint32_t SHAPES[][4] = { /* B K N ldy */
    {8, 13, 16, 16}, {5, 16, 8, 8}, {7, 31, 9, 20}, {16, 8, 32, 48}, {3, 24, 1, 1}, {4, 5, 1, 3},
    {1, 1, 2, 2}, {64, 40, 24, 24},
};

static void layers_agree(enum precision precision)
{
    struct device *d = must_open(precision);
    for (int again = 0; again < 2; again++) /* the second time, products are chosen already */
        for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++)
            for (uint32_t shift = 0; shift < 2; shift++)
                for (int relu = 0; relu < 2; relu++)
                    check_layer(d, SHAPES[i][0], SHAPES[i][1], SHAPES[i][2], SHAPES[i][3], relu,
                                shift);
    device_close(d);
    assert_int_equal(emu_live(), 0);
    assert_int_equal(mem_live(), 0);
}

static void layers_agree_with_plain_sums(void **state)
{
    layers_agree(PRECISION_FP32);
}

static void in_bf16_factors_are_narrowed_and_nothing_else(void **state)
{
    layers_agree(PRECISION_BF16);
}

static void each_shape_is_chosen_once(void **state)
{
    struct device *d = must_open(PRECISION_TF32);
    for (int i = 0; i < 3; i++) check_layer(d, 8, 16, 32, 32, true, 0);
    assert_int_equal(cuda_of(d)->n_products, 3); /* forward, dw, dx */
    check_layer(d, 9, 16, 32, 32, true, 0);
    assert_int_equal(cuda_of(d)->n_products, 6);
    device_close(d);
}

/* I1: where a slice lies may not choose its algorithm. */
static void slices_at_any_place_have_one_choice(void **state)
{
    enum { B = 3, K = 13, N = 6, SLICES = 4 };
    struct device *d = must_open(PRECISION_FP32);
    struct layer t;
    layer_open(&t, d, B * SLICES, K, N, N, true, 0);
    for (uint32_t i = 0; i < SLICES; i++)
        OK(d->ops->linear_forward(d, 0, B, &t.l, t.x + i * B * K, t.y + i * B * N, N));
    assert_int_equal(cuda_of(d)->n_products, 1);
    layer_close(&t);
    device_close(d);
}

static void nan_goes_through_relu_even_where_the_library_drops_it(void **state)
{
    for (int drops = 0; drops < 2; drops++) {
        struct device *d = must_open(PRECISION_FP32);
        struct layer t;
        emu_relu_drops_nan(drops);
        layer_open(&t, d, 4, 8, 4, 4, true, 0);
        t.hx.p[8] = NAN; /* sample 1 */
        OK(d->ops->copy_in(d, t.x, t.hx.p, t.hx.n * sizeof(float)));
        OK(d->ops->linear_forward(d, 0, 4, &t.l, t.x, t.y, 4));
        fetch(&t, t.y, t.hy);
        for (uint32_t i = 0; i < 16; i++) assert_int_equal(isnan(t.hy.p[i]) != 0, i / 4 == 1);
        layer_close(&t);
        check_layer(d, 8, 16, 32, 32, true, 0);
        device_close(d);
        emu_relu_drops_nan(0);
    }
}

static enum st forward_only(void *ctx)
{
    struct layer *t = ctx;
    return t->d->ops->linear_forward(t->d, 0, t->B, &t->l, t->x, t->y, t->ldy);
}

/* A recorded step holds addresses of scratch memory; a larger batch makes more of it. */
static void scratch_memory_of_a_recorded_step_stays(void **state)
{
    struct device *d = must_open(PRECISION_BF16);
    struct layer t;
    void *graph = NULL;
    layer_open(&t, d, 4, 16, 8, 8, false, 0);
    OK(d->ops->prepare(d, 0, &t.l));
    for (int i = 0; i < 2; i++) OK(d->ops->repeat(d, &graph, forward_only, &t));
    fetch(&t, t.y, t.hdy);
    check_layer(d, 64, 40, 24, 24, false, 0);
    struct layer large;
    layer_open(&large, d, 128, 64, 8, 8, false, 0);
    OK(d->ops->prepare(d, 0, &large.l));
    OK(d->ops->linear_forward(d, 0, 128, &large.l, large.x, large.y, 8));
    OK(d->ops->repeat(d, &graph, forward_only, &t));
    fetch(&t, t.y, t.hy);
    assert_same_bits(t.hy.p, t.hdy.p, t.hy.n, "y");
    layer_close(&large);
    d->ops->graph_free(d, graph);
    layer_close(&t);
    device_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_agree_with_plain_sums),
        cmocka_unit_test(in_bf16_factors_are_narrowed_and_nothing_else),
        cmocka_unit_test(each_shape_is_chosen_once),
        cmocka_unit_test(slices_at_any_place_have_one_choice),
        cmocka_unit_test(nan_goes_through_relu_even_where_the_library_drops_it),
        cmocka_unit_test(scratch_memory_of_a_recorded_step_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
