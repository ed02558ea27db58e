/* tests/gpu/device_pair.c - every call of the device table on the GPU, against the CPU device.
 *
 *   device_pair [--small]
 *
 * --small is for compute-sanitizer: small sizes, and no guard zones, so that it sees where memory
 * ends. Without a GPU: exit status 77. On the emulated GPU sizes are always small. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/tree.h"
#include "tests/gpu/pair.h"

/* --- bytes and rows ------------------------------------------------------------------------- */

static void bytes_go_there_and_back(void **state)
{
    const size_t most = small ? 1 << 18 : (size_t)150 << 20;     /* more than is staged at once */
    const size_t size[] = {0, 1, 3, 63, 4097, most};
    unsigned char *from = mem_alloc(1, most), *to = mem_alloc(1, most);
    unsigned char *p = gpu->ops->alloc(gpu, most + 3), *pinned = gpu->ops->host_alloc(gpu, most);
    for (size_t i = 0; i < most; i++) from[i] = (unsigned char)(i * 2654435761u >> 13);
    OK(gpu->ops->copy_out(gpu, p, to, most, NULL));
    for (size_t i = 0; i < most; i++) assert_true(to[i] == 0);   /* alloc: zeroed */
    assert_true(gpu->ops->free_bytes(gpu) > 0);
    for (size_t k = 0; k < LENGTH(size); k++) {
        uint64_t mark = 0;
        size_t off = k % 4;
        OK(gpu->ops->copy_in(gpu, p + off, from, size[k]));
        OK(gpu->ops->copy_out(gpu, p + off, to, size[k], NULL));
        OK(gpu->ops->copy_out(gpu, p + off, pinned, size[k], &mark));
        OK(gpu->ops->wait(gpu, mark));
        assert_true(memcmp(to, from, size[k]) == 0 && memcmp(pinned, from, size[k]) == 0);
    }
    gpu->ops->host_free(gpu, pinned, most);
    gpu->ops->free(gpu, p, most + 3);
    mem_free(from);
    mem_free(to);
}

struct rows_case { uint32_t n, width, stride; };

static void draw_slots(uint32_t n, uint32_t cap, uint32_t *slot)
{
    for (uint32_t i = 0; i < n; i++) slot[i] = cap - 1 - 2 * i;  /* distinct; cap >= 2 n */
}

static void move_rows(struct device *d, const void *the_case, struct results *r)
{
    const struct rows_case *c = the_case;
    uint32_t cap = 2 * c->n + 1, *slot = mem_alloc(c->n + (size_t)1, sizeof(*slot));
    size_t n = (size_t)c->n * c->width, bytes = (n + 1) * sizeof(float);
    struct floats host = floats_random(n, 0, 1), copy = floats_open(n, 0);
    float *packed = nan_room(d, n);
    float *table = put_numbers(d, (size_t)cap * c->stride, 2, false);
    float *pinned = d->ops->host_alloc(d, bytes);
    uint64_t mark = 0;
    draw_slots(c->n, cap, slot);
    OK(d->ops->rows_put(d, table, c->stride, slot, c->n, host.p, c->width));
    OK(d->ops->rows_copy(d, table, c->stride, slot, c->n, packed, c->width, NULL, c->width));
    for (uint32_t i = 0; i < c->n; i++) slot[i]--;               /* host arrays were read */
    OK(d->ops->rows_copy(d, packed, c->width, slot, 0, table, c->stride, slot, c->width));
    OK(d->ops->rows_get(d, table, c->stride, slot, c->n, pinned, c->width, &mark));
    OK(d->ops->wait(d, mark));
    if (n > 0) memcpy(copy.p, pinned, n * sizeof(float));
    result(r, "rows_get", copy, 0);
    result(r, "rows_put", take(d, table, (size_t)cap * c->stride), 0);
    result(r, "rows_copy", take(d, packed, n), 0);
    d->ops->host_free(d, pinned, bytes);
    floats_close(host);
    mem_free(slot);
}

static const uint32_t DIM[] = {1, 3, 16, 48, 64, 128};

static void rows_move_bit_for_bit(void **state)
{
    for (uint32_t i = 0; i < LENGTH(DIM) * 4; i++) {
        uint32_t many = small ? 301 : 20011;
        struct rows_case c = {(uint32_t[]){0, 1, 85, many}[i / 6], DIM[i % 6], DIM[i % 6] + i % 3};
        shift = i % 5 == 4;
        compare(gpu, move_rows, &c);
    }
    shift = 0;
}

struct sample_case { uint32_t B, F, D; };

static void gather(struct device *d, const void *the_case, struct results *r)
{
    const struct sample_case *c = the_case;
    enum { CAP = 500 };
    size_t n = (size_t)c->B * (c->F + 1) * c->D, uses = (size_t)c->B * c->F;
    uint32_t stride = 2 * c->D, *slot = mem_alloc(uses, sizeof(*slot));
    for (size_t i = 0; i < uses; i++) slot[i] = i % 3 == 0 ? 7 : draw(4, i) % CAP;
    float *table = put_numbers(d, (size_t)CAP * stride, 3, false), *t = nan_room(d, n);
    uint32_t *on_device = d->ops->alloc(d, uses * sizeof(*slot));
    OK(d->ops->copy_in(d, on_device, slot, uses * sizeof(*slot)));
    OK(d->ops->gather(d, 0, c->B, c->F, c->D, table, stride, on_device, t));
    result(r, "gather", take(d, t, n), 0);
    d->ops->free(d, on_device, uses * sizeof(*slot));
    mem_free(slot);
}

static void interact(struct device *d, const void *the_case, struct results *r)
{
    const struct sample_case *c = the_case;
    uint32_t V = c->F + 1, R = c->D + c->F * V / 2;
    size_t n_t = (size_t)c->B * V * c->D, n_r = (size_t)c->B * R;
    float *t = put_numbers(d, n_t, 5, false), *dr = put_numbers(d, n_r, 6, false);
    float *out = nan_room(d, n_r), *dt = nan_room(d, n_t);
    OK(d->ops->interact_forward(d, 0, c->B, c->F, c->D, t, out));
    OK(d->ops->interact_backward(d, 0, c->B, c->F, c->D, t, dr, dt));
    result(r, "interact_forward", take(d, out, n_r), 2 * c->D);
    result(r, "interact_backward", take(d, dt, n_t), 2 * (V + 1));
}

static void look_ups_and_interactions_agree(void **state)
{
    static const uint32_t TABLES[] = {1, 3, 26};
    for (uint32_t i = 0; i < LENGTH(DIM) * LENGTH(TABLES) * 2; i++) {
        uint32_t many = small ? 37 : 2049, B = i / 18 == 0 ? 1 : many;
        struct sample_case c = {B, TABLES[i / 6 % 3], DIM[i % 6]};
        shift = i % 4 == 3;
        compare(gpu, gather, &c);
        compare(gpu, interact, &c);
    }
    shift = 0;
}

static void bce(struct device *d, const void *the_case, struct results *r)
{
    uint32_t B = *(const uint32_t *)the_case;
    struct floats z = floats_rough(B, 0, 9), y = floats_random(B, 0, 10), size = floats_open(B, 0);
    for (uint32_t b = 0; b < B; b++) y.p[b] = y.p[b] > 0 ? 1 : 0;
    for (uint32_t b = 0; b < B; b++) size.p[b] = 0.25f;
    float *logit = put(d, z.p, B), *label = put(d, y.p, B), *dz = nan_room(d, B);
    float *loss = nan_room(d, 1), *alone = nan_room(d, 1), *prob = nan_room(d, B);
    OK(d->ops->bce(d, 0, B, logit, label, 0.25f, dz, loss, prob));
    OK(d->ops->bce(d, 0, B, logit, label, 0.25f, NULL, alone, NULL));
    result(r, "dlogit", magnitudes ? size : take(d, dz, B), 4);
    result(r, "loss", take(d, loss, 1), 4);
    result(r, "loss alone", take(d, alone, 1), 4);
    result(r, "prob", take(d, prob, B), 4);
    if (!magnitudes) floats_close(size);
    floats_close(z);
    floats_close(y);
}

static void losses_agree(void **state)
{
    static const uint32_t BATCH[] = {1, 31, 257, 2048, 5000};
    for (size_t i = 0; i < LENGTH(BATCH); i++) compare(gpu, bce, &BATCH[i]);
}

/* --- sums ----------------------------------------------------------------------------------- */

struct uses_case { uint32_t F, D, first_slice, slices, items_per_slice, n; };

/* Uses of n rows, spread over all look-ups; hot rows have long lists over many slices. */
static struct seg_list draw_uses(const struct uses_case *c)
{
    static const uint32_t USES[] = {1, 2, 65, 1, 7, 300, 64, 2000};
    uint32_t items = c->slices * c->items_per_slice, at = 0;
    uint32_t *begin = mem_alloc(c->n + 1 + (size_t)c->n * 2000, sizeof(*begin));
    uint32_t *item = begin + c->n + 1;
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t m = USES[i % 8] < items ? USES[i % 8] : items, step = items / m;
        uint32_t from = draw(21, i) % (items - step * (m - 1));
        begin[i] = at;
        for (uint32_t k = 0; k < m; k++) item[at++] = from + k * step;
    }
    begin[c->n] = at;
    return (struct seg_list){c->n, begin, item};
}

static void row_grads(struct device *d, const void *the_case, struct results *r)
{
    const struct uses_case *c = the_case;
    size_t B = (size_t)c->slices * c->items_per_slice / c->F, n = (size_t)c->n * c->D;
    struct seg_list s = draw_uses(c);
    float *dt = put_numbers(d, B * (c->F + 1) * c->D, 22, true), *out = nan_room(d, n);
    OK(d->ops->row_grads(d, dt, c->F, c->D, &s, c->first_slice, c->items_per_slice, out));
    result(r, "row_grads", take(d, out, n), 0);
    mem_free((void *)s.begin);
}

static void gradients_of_rows_are_added_in_one_order(void **state)
{
    static const uint32_t TABLES[] = {1, 3, 26};
    const uint32_t N[] = {0, 1, 8, small ? 17 : 203};
    for (uint32_t i = 0; i < LENGTH(DIM) * 4 * 2; i++) {
        uint32_t F = TABLES[i % 3], slices = i < 24 ? 4 : TREE_MAX_SLICES;
        uint32_t per = (small ? 256 : 1024) / slices;
        struct uses_case c = {F, DIM[i % 6], i < 24 ? i : 0, slices, F * per, N[i / 6 % 4]};
        shift = i % 5 == 4;
        compare(gpu, row_grads, &c);
    }
    shift = 0;
}

enum { PARTS = 40, VECS = 90 };

/* Positions of a segment: some of TREE_MAX_SLICES, ascending, one at least. */
static uint32_t draw_positions(uint64_t seed, uint8_t *pos)
{
    uint32_t n = 0, thin = 1 + draw(seed, 0) % 6, always = draw(seed, 1) % TREE_MAX_SLICES;
    for (uint32_t s = 0; s < TREE_MAX_SLICES; s++)
        if (s == always || draw(seed, 2 + s) % thin == 0) pos[n++] = (uint8_t)s;
    return n;
}

static void parts(struct device *d, const void *the_case, struct results *r)
{
    uint32_t D = *(const uint32_t *)the_case, begin[PARTS + 1] = {0};
    uint32_t item[PARTS * TREE_MAX_SLICES];
    uint8_t pos[PARTS * TREE_MAX_SLICES];
    const float *part[TREE_MAX_SLICES];
    float *vec = put_numbers(d, VECS * D, 31, true);
    float *out = nan_room(d, PARTS * D), *sum = nan_room(d, D);
    for (uint32_t i = 0; i < PARTS; i++)
        begin[i + 1] = begin[i] + draw_positions(i, pos + begin[i]);
    for (uint32_t k = 0; k < begin[PARTS]; k++) item[k] = draw(32, k) % VECS;
    struct seg_list s = {PARTS, begin, item}, none = {0, begin, item};
    OK(d->ops->tree_sum(d, vec, D, &s, pos, out));
    OK(d->ops->tree_sum(d, vec, D, &none, pos, out));
    for (uint32_t k = 0; k < begin[1]; k++) part[k] = vec + (size_t)item[k] * D;
    OK(d->ops->dense_sum(d, part, pos, begin[1], D, sum));
    result(r, "tree_sum", take(d, out, PARTS * D), 0);
    result(r, "dense_sum", take(d, sum, D), 0);
}

static void parts_are_added_in_one_order(void **state)
{
    static const uint32_t SIZE[] = {1, 3, 16, 48, 64, 128, 1025, 20003};
    for (uint32_t i = 0; i < LENGTH(SIZE) - small; i++) {
        shift = i % 2;
        compare(gpu, parts, &SIZE[i]);
    }
    shift = 0;
}

/* --- updates -------------------------------------------------------------------------------- */

struct update_case { enum optimizer kind; uint32_t D, n; };

/* Values and state, state not negative. With `magnitudes` the step goes up: w + lr g / .. */
static void update(struct device *d, const void *the_case, struct results *r)
{
    const struct update_case *c = the_case;
    struct opt_step o = {c->kind, magnitudes ? -0.37f : 0.37f, 1e-8f};
    uint32_t stride = 2 * c->D, cap = 2 * c->n + 1, *slot = mem_alloc(cap, sizeof(*slot));
    size_t n = (size_t)cap * stride, n_g = (size_t)c->n * c->D;
    struct floats t = numbers(n, 41, false);
    for (size_t i = 0; i < n; i++)
        if (i % stride >= c->D) t.p[i] = fabsf(t.p[i]);
    float *table = put(d, t.p, n), *g = put_numbers(d, n_g, 42, c->kind != OPT_ROWWISE_ADAGRAD);
    float *w = put_numbers(d, n_g, 43, false);
    for (size_t i = 0; i < n_g && i < n; i++) t.p[i] = fabsf(t.p[i]);
    float *state = put(d, t.p, n_g);
    draw_slots(c->n, cap, slot);
    OK(d->ops->row_update(d, &o, table, stride, c->D, slot, g, c->n));
    OK(d->ops->dense_update(d, &o, w, state, g, n_g));
    /* A row's mean of squares is added in each device's own order. */
    double terms = c->kind == OPT_ROWWISE_ADAGRAD ? 2 * (c->D + 4) : 0;
    result(r, "row_update", take(d, table, n), terms);
    result(r, "dense_update", take(d, w, n_g), 0);
    result(r, "state", take(d, state, n_g), 0);
    mem_free(slot);
    floats_close(t);
}

static void updates_agree(void **state)
{
    for (uint32_t i = 0; i < LENGTH(DIM) * 3 * 3; i++) {
        uint32_t many = small ? 211 : 9001;
        struct update_case c = {(enum optimizer)(i % 3), DIM[i / 3 % 6],
                                (uint32_t[]){0, 1, many}[i / 18]};
        shift = i % 5 == 4;
        compare(gpu, update, &c);
    }
    shift = 0;
}

static struct device_fault fault_of(struct device *d)
{
    struct device_fault f;
    OK(d->ops->wait(d, 0));
    OK(d->ops->fault(d, &f));
    return f;
}

/* `i`: which kind meets the gradient that is not finite, and what that is. */
static void check_fault(struct device *d, uint32_t i)
{
    enum { D = 16, N = 50, BAD = 33 };
    static const float VALUE[] = {NAN, INFINITY, -INFINITY};
    struct opt_step o = {OPT_ADAGRAD, 0.1f, 1e-8f};
    uint32_t slot[N];
    struct floats g = floats_random(N * D, 0, 51), w = floats_random(2 * N * 2 * D, 0, 52);
    float *table = put(d, w.p, w.n), *good = put(d, g.p, g.n);
    g.p[BAD * D + i % D] = VALUE[i % 3];
    float *bad = put(d, g.p, g.n);
    draw_slots(N, 2 * N, slot);
    assert_true(!fault_of(d).row && !fault_of(d).dense);
    for (int again = 0; again < 2; again++) {
        if (i % 2 == 0) OK(d->ops->row_update(d, &o, table, 2 * D, D, slot, bad, N));
        else OK(d->ops->dense_update(d, &o, table, table + w.n / 2, bad, g.n));
        OK(d->ops->row_update(d, &o, table, 2 * D, D, slot, good, N));
        OK(d->ops->dense_update(d, &o, table, table + w.n / 2, good, g.n));
        struct device_fault f = fault_of(d);
        assert_int_equal(f.row, i % 2 == 0);
        assert_int_equal(f.dense, i % 2 == 1);
        if (f.row) assert_int_equal(f.slot, slot[BAD]);
    }
    struct floats after = take(d, table, w.n);
    assert_same_bits(after.p, w.p, w.n, "table");
    floats_close(after);
    floats_close(g);
    floats_close(w);
    release();
}

static void a_gradient_that_is_not_finite_stops_all_updates_from_then_on(void **state)
{
    for (uint32_t i = 0; i < 6; i++) {
        struct device *g = must_open(DEVICE_CUDA, PRECISION_FP32, 1);
        check_fault(g, i);
        device_close(g);
    }
}

/* --- all ------------------------------------------------------------------------------------ */

/* Without a GPU there is nothing to compare. */
static void open_pair(void)
{
    struct device_cfg cfg = {.lanes = 4, .precision = PRECISION_FP32};
    if (device_open(DEVICE_CUDA, &cfg, &gpu) != ST_OK) exit(77);
    if (device_open(DEVICE_CPU, &cfg, &cpu) != ST_OK) exit(1);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_go_there_and_back),
        cmocka_unit_test(rows_move_bit_for_bit),
        cmocka_unit_test(look_ups_and_interactions_agree),
        cmocka_unit_test(losses_agree),
        cmocka_unit_test(gradients_of_rows_are_added_in_one_order),
        cmocka_unit_test(parts_are_added_in_one_order),
        cmocka_unit_test(updates_agree),
        cmocka_unit_test(a_gradient_that_is_not_finite_stops_all_updates_from_then_on),
    };
    if (argc > 2 || (argc == 2 && strcmp(argv[1], "--small") != 0)) {
        fprintf(stderr, "usage: device_pair [--small]\n");
        return 2;
    }
    if (argc == 2) {
        small = true;
        guard = 0;
    }
    open_pair();
    int failed = cmocka_run_group_tests(tests, NULL, NULL) + test_layers();
    device_close(gpu);
    device_close(cpu);
    return failed > 0;
}
