/* tests/gpu/pair_layers.c - layers on the GPU against the CPU device, and a whole step of them: it
 * has the same bits at any address, on any lane, issued or repeated. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/gpu/pair.h"

/* --- layers --------------------------------------------------------------------------------- */

struct layer_case { uint32_t B, K, N, ldy; bool relu; double narrow; };

static void layer_open(struct device *d, const struct layer_case *c, struct linear *l)
{
    struct floats w = numbers((size_t)c->N * c->K, 11, false);
    size_t bytes = d->ops->prepared_bytes(d, c->K, c->N);
    float *on_device = nan_room(d, d->ops->weight_floats(d, c->K, c->N));
    OK(d->ops->weight_put(d, c->K, c->N, w.p, on_device));
    struct floats back = floats_open(w.n, 0);
    OK(d->ops->weight_get(d, c->K, c->N, on_device, back.p));
    assert_same_bits(back.p, w.p, w.n, "weight_get");
    void *prepared = bytes > 0 ? d->ops->alloc(d, bytes) : NULL;
    *l = (struct linear){c->K, c->N, c->relu, on_device, put_numbers(d, c->N, 12, false), prepared};
    OK(d->ops->prepare(d, 0, l));
    floats_close(w);
    floats_close(back);
}

static void layer_close(struct device *d, struct linear *l)
{
    d->ops->free(d, l->prepared, d->ops->prepared_bytes(d, l->K, l->N));
}

/* Forward, and backward from a y that does not depend on it. */
static void layer(struct device *d, const void *the_case, struct results *r)
{
    const struct layer_case *c = the_case;
    size_t n_x = (size_t)c->B * c->K, n_y = (size_t)(c->B - 1) * c->ldy + c->N;
    struct linear l;
    layer_open(d, c, &l);
    struct floats given = floats_random(n_y, 0, 13), dw = floats_open((size_t)c->N * c->K, 0);
    for (size_t i = 0; i < n_y; i++) given.p[i] = given.p[i] < 0 ? 0 : given.p[i];
    float *x = put_numbers(d, n_x, 14, false), *y = put_numbers(d, n_y, 15, false);
    float *y_given = put(d, given.p, n_y), *dy = put_numbers(d, n_y, 16, false);
    float *dw_at = nan_room(d, d->ops->weight_floats(d, c->K, c->N)), *db = nan_room(d, c->N);
    float *dx = nan_room(d, n_x);
    OK(d->ops->linear_forward(d, 0, c->B, &l, x, y, c->ldy));
    OK(d->ops->linear_backward(d, 0, c->B, &l, x, y_given, c->ldy, dy, dw_at, db, dx));
    OK(d->ops->weight_get(d, c->K, c->N, dw_at, dw.p));
    double narrow = c->N > 1 ? c->narrow : 0;
    result(r, "y", take(d, y, n_y), 2 * (c->K + 2) + narrow);
    result(r, "dw", dw, 2 * (c->B + 1) + narrow);
    result(r, "db", take(d, db, c->N), 2 * c->B);
    result(r, "dx", take(d, dx, n_x), 2 * (c->N + 1) + narrow);
    floats_close(given);
    layer_close(d, &l);
}

static const uint32_t LAYERS[][3] = { /* K, N, floats from one y to the next: model A, then B */
    {13, 512, 512}, {512, 256, 256}, {256, 64, 64}, {64, 16, 27 * 16}, {367, 512, 512},
    {256, 1, 1}, {5, 3, 4},
    {13, 1024, 1024}, {1024, 1024, 1024}, {1024, 512, 512}, {512, 256, 256}, {64, 48, 27 * 48},
    {399, 1024, 1024},
};
enum { SMALL_LAYERS = 7 };

/* `narrow`: what rounding both factors may cost, in roundings of f32. */
static void layers_agree(enum precision precision, double narrow)
{
    struct device *g = must_open(DEVICE_CUDA, precision, 1);
    for (uint32_t i = 0; i < (small ? SMALL_LAYERS : LENGTH(LAYERS)) * 2; i++) {
        const uint32_t *at = LAYERS[i / 2], B = small ? 7 : 2048;
        struct layer_case c = {i % 2 == 0 ? B : B / 2 - 1, at[0], at[1], at[2], i % 4 != 3, narrow};
        shift = i % 3 == 2;
        compare(g, layer, &c);
    }
    shift = 0;
    device_close(g);
}

static void layers_agree_in_fp32(void **state)
{
    layers_agree(PRECISION_FP32, 0);
}

static void layers_agree_in_tf32(void **state)
{
    layers_agree(PRECISION_TF32, 0x1p24 * 0x1p-9);  /* 10 bits of two factors, cut off */
}

static void layers_agree_in_bf16(void **state)
{
    layers_agree(PRECISION_BF16, 0x1p24 * 0x1.01p-7); /* 8 bits of two factors, rounded */
}

static void nan_goes_through_relu(void **state)
{
    for (uint32_t i = 0; i < 3 * 2; i++) {
        struct device *g = must_open(DEVICE_CUDA, (enum precision)(i % 3), 1);
        struct layer_case c = {8, 64, i < 3 ? 16 : 1, i < 3 ? 16 : 1, true, 0};
        struct linear l;
        layer_open(g, &c, &l);
        struct floats x = floats_random(8 * 64, 0, 17);
        x.p[3 * 64 + 5] = NAN;                                   /* of sample 3 */
        float *y = nan_room(g, 8 * c.N), *in = put(g, x.p, x.n);
        OK(g->ops->linear_forward(g, 0, 8, &l, in, y, c.N));
        struct floats got = take(g, y, 8 * c.N);
        for (size_t k = 0; k < got.n; k++) assert_true(isnan(got.p[k]) == (k / c.N == 3));
        floats_close(got);
        floats_close(x);
        layer_close(g, &l);
        release();
        device_close(g);
    }
}

/* --- a step --------------------------------------------------------------------------------- */

enum { SLICES = 6, B = 33, F = 3, D = 16, K = 13, R = D + F * (F + 1) / 2, CAP = 40 };

/* What the slices of a step share, and memory of each, one behind the other. */
struct step_case {
    struct device *d;
    struct linear bottom, top;
    float *table, *x, *label, *t, *r, *z, *dz, *loss, *dr, *dt, *dw[2], *db[2];
    uint32_t *slot;
    size_t n_dw[2];                  /* floats of the gradient of a weight: top, bottom */
};

static enum st slice(void *ctx, uint32_t lane, uint32_t task)
{
    const struct step_case *s = ctx;
    struct device *d = s->d;
    const struct device_ops *ops = d->ops;
    size_t i = task, n_t = (F + 1) * D;
    const float *x = s->x + i * B * K;
    float *t = s->t + i * B * n_t, *r = s->r + i * B * R, *z = s->z + i * B, *dz = s->dz + i * B;
    float *dr = s->dr + i * B * R, *dt = s->dt + i * B * n_t;
    enum st st;
    TRY(ops->gather(d, lane, B, F, D, s->table, D, s->slot + i * B * F, t), err);
    TRY(ops->linear_forward(d, lane, B, &s->bottom, x, t, n_t), err);
    TRY(ops->interact_forward(d, lane, B, F, D, t, r), err);
    TRY(ops->linear_forward(d, lane, B, &s->top, r, z, 1), err);
    TRY(ops->bce(d, lane, B, z, s->label + i * B, 0.1f, dz, s->loss + i, NULL), err);
    TRY(ops->linear_backward(d, lane, B, &s->top, r, z, 1, dz, s->dw[0] + i * s->n_dw[0],
                             s->db[0] + i, dr), err);
    TRY(ops->interact_backward(d, lane, B, F, D, t, dr, dt), err);
    st = ops->linear_backward(d, lane, B, &s->bottom, x, t, n_t, dt, s->dw[1] + i * s->n_dw[1],
                              s->db[1] + i * D, NULL);
err: return st;
}

static enum st all_slices(void *ctx)
{
    struct step_case *s = ctx;
    return s->d->ops->parallel(s->d, SLICES, slice, s);
}

/* `n` numbers, the same for each slice. */
static float *for_each(struct device *d, size_t n, uint64_t seed)
{
    struct floats one = floats_random(n, 0, seed), all = floats_open(SLICES * n, 0);
    for (uint32_t i = 0; i < SLICES; i++) memcpy(all.p + i * n, one.p, n * sizeof(float));
    float *p = put(d, all.p, all.n);
    floats_close(one);
    floats_close(all);
    return p;
}

static void step_open(struct device *d, struct step_case *s)
{
    const struct layer_case bottom = {B, K, D, (F + 1) * D, true, 0}, top = {B, R, 1, 1, false, 0};
    uint32_t slot[SLICES * B * F];
    *s = (struct step_case){.d = d, .n_dw = {d->ops->weight_floats(d, R, 1),
                                             d->ops->weight_floats(d, K, D)}};
    layer_open(d, &top, &s->top);
    layer_open(d, &bottom, &s->bottom);
    s->table = put_numbers(d, CAP * D, 61, false);
    s->x = for_each(d, B * K, 62);
    s->label = for_each(d, B, 63);
    float **out[] = {&s->t, &s->r, &s->z, &s->dz, &s->loss, &s->dr, &s->dt, &s->dw[0], &s->db[0],
                     &s->dw[1], &s->db[1]};
    const size_t n[] = {B * (F + 1) * D, B * R, B, B, 1, B * R, B * (F + 1) * D, s->n_dw[0],
                        1, s->n_dw[1], D};
    for (size_t i = 0; i < LENGTH(out); i++) *out[i] = nan_room(d, SLICES * n[i]);
    for (uint32_t i = 0; i < SLICES * B * F; i++) slot[i] = draw(64, i % (B * F)) % CAP;
    s->slot = d->ops->alloc(d, sizeof(slot));
    OK(d->ops->copy_in(d, s->slot, slot, sizeof(slot)));
}

struct way { uint32_t lanes, times; };

static void forget(struct device *d, float *p, size_t n)
{
    struct floats nan = floats_open(n, 0);
    OK(d->ops->copy_in(d, p, nan.p, n * sizeof(float)));
    floats_close(nan);
}

/* A step, issued `times` by repeat, or with 0 by itself. Results: those of all slices. */
static void step(struct device *d, const void *the_case, struct results *r)
{
    const struct way *w = the_case;
    struct step_case s;
    void *graph = NULL;
    step_open(d, &s);
    if (w->times == 0) OK(all_slices(&s));
    for (uint32_t k = 0; k < w->times; k++) {
        forget(d, s.t, SLICES * B * (F + 1) * D);
        forget(d, s.loss, SLICES);
        forget(d, s.dw[1], SLICES * s.n_dw[1]);
        OK(d->ops->repeat(d, &graph, all_slices, &s));
    }
    result(r, "loss", take(d, s.loss, SLICES), 0);
    result(r, "dt", take(d, s.dt, SLICES * B * (F + 1) * D), 0);
    result(r, "dw of the top", take(d, s.dw[0], SLICES * s.n_dw[0]), 0);
    result(r, "dw of the bottom", take(d, s.dw[1], SLICES * s.n_dw[1]), 0);
    d->ops->graph_free(d, graph);
    d->ops->free(d, s.slot, SLICES * B * F * sizeof(*s.slot));
    layer_close(d, &s.top);
    layer_close(d, &s.bottom);
}

static void check_way(struct device *d, const struct way *w, const struct results *want)
{
    struct results got = run(d, step, w);
    for (uint32_t k = 0; k < got.n; k++) {
        size_t n = got.of[k].n / SLICES;
        for (uint32_t at = 0; at < SLICES; at++)
            assert_same_bits(got.of[k].p + at * n, want->of[k].p, n, got.name[k]);
    }
    results_close(&got);
}

static void a_slice_has_the_same_bits_anywhere_and_repeated(void **state)
{
    static const struct way WAYS[] = {{1, 0}, {1, 3}, {4, 0}, {4, 1}, {4, 4}};
    for (uint32_t p = 0; p < 3; p++) {
        struct device *one = must_open(DEVICE_CUDA, (enum precision)p, 1);
        struct device *four = must_open(DEVICE_CUDA, (enum precision)p, 4);
        struct results want = run(one, step, &WAYS[0]);
        for (size_t i = 0; i < LENGTH(WAYS); i++)
            check_way(WAYS[i].lanes == 1 ? one : four, &WAYS[i], &want);
        results_close(&want);
        device_close(one);
        device_close(four);
    }
}

int test_layers(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_agree_in_fp32),
        cmocka_unit_test(layers_agree_in_tf32),
        cmocka_unit_test(layers_agree_in_bf16),
        cmocka_unit_test(nan_goes_through_relu),
        cmocka_unit_test(a_slice_has_the_same_bits_anywhere_and_repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
