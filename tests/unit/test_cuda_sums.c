/* Kernels of the GPU, run on the CPU: sums over slices and optimizer steps. What only adds, or is
 * element by element, has the bits of the CPU device, which test_cpu_sums.c holds to plain code. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/tree.h"
#include "compute/cuda_kernels.h"
#include "compute/device.h"
#include "compute/emulated/block.h"
#include "tests/support/floats.h"

enum { ORDERS = 3 };         /* seeds of emu_shuffle, from 0 on */

static cudaStream_t stream;
static struct device *cpu;

static int open_both(void **state)
{
    struct device_cfg cfg = {.lanes = 1};
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return -1;
    return device_open(DEVICE_CPU, &cfg, &cpu) == ST_OK ? 0 : -1;
}

static int close_both(void **state)
{
    emu_shuffle(0);
    device_close(cpu);
    return cudaStreamDestroy(stream) == cudaSuccess ? 0 : -1;
}

static void done(cudaError_t e)
{
    assert_int_equal(e, cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
}

static void cpu_done(enum st st)
{
    assert_int_equal(st, ST_OK);
    assert_int_equal(cpu->ops->wait(cpu, 0), ST_OK);
}

/* --- gradients of rows ---------------------------------------------------------------------- */

/* Uses of n rows among items_per_slice * slices look-ups: uses[i % 8] of row i, spread out evenly
 * from a drawn first one. */
struct rows {
    uint32_t n, F, D, first_slice, slices, items_per_slice;
    size_t shift;
};

static struct seg_list draw_uses(const struct rows *c, const uint32_t uses[8])
{
    uint32_t items = c->slices * c->items_per_slice, total = 0;
    for (uint32_t i = 0; i < c->n; i++) total += uses[i % 8];
    uint32_t *begin = mem_alloc(c->n + 1 + (size_t)total, sizeof(*begin)), *item = begin + c->n + 1;
    begin[0] = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t m = uses[i % 8], step = items / m, from = draw(21, i) % (items - step * (m - 1));
        assert_true(m <= items);
        for (uint32_t k = 0; k < m; k++) item[begin[i] + k] = from + k * step;
        begin[i + 1] = begin[i] + m;
    }
    return (struct seg_list){c->n, begin, item};
}

static void check_rows(const struct rows *c, const uint32_t uses[8])
{
    size_t B = (size_t)c->slices * c->items_per_slice / c->F;
    struct seg_list s = draw_uses(c, uses);
    struct floats dt = floats_rough(B * (c->F + 1) * c->D, c->shift, 22);
    struct floats want = floats_open((size_t)c->n * c->D, 0);
    cpu_done(cpu->ops->row_grads(cpu, dt.p, c->F, c->D, &s, c->first_slice, c->items_per_slice,
                                 want.p));
    for (uint64_t o = 0; o < ORDERS; o++) {
        struct floats out = floats_open((size_t)c->n * c->D, c->shift);
        emu_shuffle(o);
        done(cuda_row_grads(stream, dt.p, c->F, c->D, c->n, s.begin, s.item, c->first_slice,
                            c->items_per_slice, out.p));
        assert_same_bits(out.p, want.p, want.n, "row gradient");
        floats_close(out);
    }
    emu_shuffle(0);
    mem_free((void *)s.begin);
    floats_close(dt);
    floats_close(want);
}

static void rows_with_few_uses_are_summed_in_tree_order(void **state)
{
    static const uint32_t ONE[8] = {1, 1, 1, 1, 1, 1, 1, 1}, FEW[8] = {1, 2, 1, 3, 64, 5, 1, 17};
    static const uint32_t DIM[] = {1, 3, 4, 48, 1040};
    for (uint32_t i = 0; i < 5 * 4; i++) {
        struct rows c = {1 + i * 13, 2, DIM[i % 5], i % 7, 1u << i / 5 * 2, 0, i % 3 == 2};
        if (c.first_slice + c.slices > TREE_MAX_SLICES) c.first_slice = 0;
        c.items_per_slice = c.D > 1000 ? 64 : 3 * 64;
        check_rows(&c, ONE);
        check_rows(&c, FEW);
    }
}

static void rows_with_many_uses_are_summed_in_tree_order(void **state)
{
    static const uint32_t MANY[8] = {65, 1, 66, 2, 128, 1000, 300, 64};
    static const uint32_t DIM[] = {1, 4, 7, 8, 12, 48};
    for (uint32_t i = 0; i < 6 * 3; i++) {
        struct rows c = {9, 3, DIM[i % 6], 0, (uint32_t[]){1, 5, 64}[i / 6], 0, i % 4 == 3};
        c.items_per_slice = 3 * (1200 / 3 / c.slices + 1);
        check_rows(&c, MANY);
    }
}

/* All look-ups of all samples at one row; then slices of which some have none of its uses. */
static void a_row_may_be_used_by_every_sample_or_by_some_slices_only(void **state)
{
    static const uint32_t ALL[8] = {4096}, SOME[8] = {70};
    struct rows all = {1, 1, 16, 3, 4, 1024, 0}, some = {1, 1, 16, 0, 64, 3, 0};
    check_rows(&all, ALL);
    check_rows(&some, SOME);
    for (some.items_per_slice = 1; some.items_per_slice < 8; some.items_per_slice += 2) {
        some.first_slice = 64 - (70 + some.items_per_slice - 1) / some.items_per_slice;
        some.slices = 64 - some.first_slice;
        if (some.slices * some.items_per_slice >= 70 && some.slices <= 64) check_rows(&some, SOME);
    }
}

static void long_rows_are_found_wherever_they_are(void **state)
{
    static const uint32_t AT[8] = {1, 1, 1, 1, 1, 1, 1, 66};
    static const uint32_t MOST[8] = {66, 66, 66, 66, 66, 66, 66, 1};
    struct rows c = {3000, 1, 4, 0, 2, 100, 0};
    check_rows(&c, AT);
    c.n = 600;
    check_rows(&c, MOST);
}

/* --- other sums ----------------------------------------------------------------------------- */

/* A random set of positions, ascending, never empty. */
static uint32_t draw_positions(uint64_t seed, uint8_t pos[TREE_MAX_SLICES])
{
    uint32_t n = 0, thin = 1 + draw(seed, 0) % 6, always = draw(seed, 1) % TREE_MAX_SLICES;
    for (uint32_t s = 0; s < TREE_MAX_SLICES; s++)
        if (s == always || draw(seed, 2 + s) % thin == 0) pos[n++] = (uint8_t)s;
    return n;
}

static void check_parts(uint32_t D, size_t shift)
{
    enum { SEGS = 60, VECS = 90 };
    struct floats vec = floats_rough((size_t)VECS * D, shift, 31);
    struct floats out = floats_open(SEGS * D, shift), want = floats_open(SEGS * D, 0);
    uint32_t begin[SEGS + 1] = {0}, item[SEGS * TREE_MAX_SLICES];
    uint8_t pos[SEGS * TREE_MAX_SLICES];
    for (uint32_t i = 0; i < SEGS; i++) begin[i + 1] = begin[i] + draw_positions(i, pos + begin[i]);
    for (uint32_t k = 0; k < begin[SEGS]; k++) item[k] = draw(32, k) % VECS;
    struct seg_list s = {SEGS, begin, item};
    cpu_done(cpu->ops->tree_sum(cpu, vec.p, D, &s, pos, want.p));
    done(cuda_tree_sum(stream, vec.p, D, SEGS, begin, item, pos, out.p));
    assert_same_bits(out.p, want.p, want.n, "tree sum");
    floats_close(vec);
    floats_close(out);
    floats_close(want);
}

static void parts_of_rows_are_summed_in_tree_order(void **state)
{
    check_parts(1, 0);
    check_parts(20, 0);
    check_parts(20, 1);
    check_parts(1030, 0);
}

static void dense_parts_are_summed_in_tree_order(void **state)
{
    static const uint32_t SIZE[] = {1, 3, 4, 391, 1024, 1025};
    struct floats all = floats_rough((size_t)TREE_MAX_SLICES * 1028, 0, 33);
    for (uint32_t i = 0; i < 6 * 20; i++) {
        struct cuda_parts parts = {.n = 0};
        const float *part[TREE_MAX_SLICES];
        uint32_t n = SIZE[i % 6];
        struct floats out = floats_open(n, i / 6 % 2), want = floats_open(n, 0);
        parts.n = draw_positions(200 + i, parts.pos);
        for (uint32_t k = 0; k < parts.n; k++)
            part[k] = parts.part[k] = all.p + (size_t)parts.pos[k] * 1028 + (i % 5 == 4 && k == 0);
        cpu_done(cpu->ops->dense_sum(cpu, part, parts.pos, parts.n, n, want.p));
        done(cuda_dense_sum(stream, &parts, n, out.p));
        assert_same_bits(out.p, want.p, n, "dense sum");
        floats_close(out);
        floats_close(want);
    }
    floats_close(all);
}

/* 0 + -0.0 is +0.0: so a zero that is added anywhere shows. */
static void nothing_is_added_to_what_contributes(void **state)
{
    enum { USES = 200 };
    static const float minus_zero[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
    static const uint32_t begin[] = {0, 1, 3, 3 + USES};
    static const uint8_t pos[] = {9, 0, 5};
    uint32_t item[3 + USES] = {4, 0, 7};
    float dt[USES * 2 * 4], out[3 * 4];
    struct cuda_parts parts = {{minus_zero, minus_zero, minus_zero}, {1, 2, 63}, 3};
    for (uint32_t k = 0; k < USES; k++) item[3 + k] = k;
    for (int i = 0; i < USES * 2 * 4; i++) dt[i] = -0.0f;
    done(cuda_row_grads(stream, dt, 1, 4, 3, begin, item, 1, 30, out));
    for (int i = 0; i < 12; i++) assert_same_bits(&out[i], minus_zero, 1, "row_grads");
    done(cuda_tree_sum(stream, dt, 4, 2, begin, item, pos, out));
    for (int i = 0; i < 8; i++) assert_same_bits(&out[i], minus_zero, 1, "tree_sum");
    done(cuda_dense_sum(stream, &parts, 4, out));
    assert_same_bits(out, minus_zero, 4, "dense_sum");
}

/* --- updates -------------------------------------------------------------------------------- */

static const enum optimizer KIND[] = {OPT_SGD, OPT_ADAGRAD, OPT_ROWWISE_ADAGRAD};

enum { CAP = 300, ROWS = 150 };
static const struct cuda_fault NO_FAULT;

static struct floats state_like(size_t n, size_t shift, uint64_t seed)
{
    struct floats f = floats_random(n, shift, seed);
    for (size_t i = 0; i < n; i++) f.p[i] = fabsf(f.p[i]); /* state is not negative */
    return f;
}

static void draw_slots(uint32_t slot[ROWS])
{
    for (uint32_t i = 0; i < ROWS; i++) slot[i] = (7 * i + 11) % CAP; /* distinct: 7, 300 */
}

/* The row's mean of squares is a sum, in the kernel's own order; the rest is element by element. */
static void check_rowwise_row(const struct cuda_opt *o, uint32_t D, const float *g,
                              const float *before, const float *after)
{
    double mean = 0;
    for (uint32_t j = 0; j < D; j++) mean += (double)g[j] * (double)g[j] / D;
    double want = (double)before[D] + mean;
    assert_near(after[D], want, want, D + 2, "state", D);
    for (uint32_t j = 0; j < D; j++) {
        float w = before[j] - o->learning_rate * g[j] / (sqrtf(after[D]) + o->epsilon);
        assert_same_bits(&after[j], &w, 1, "value");
    }
}

static void check_row_update(enum optimizer kind, uint32_t D, uint32_t pad, size_t shift)
{
    uint32_t stride = D + (kind == OPT_ADAGRAD ? D : kind == OPT_SGD ? 0 : 1) + pad, slot[ROWS];
    struct cuda_opt o = {(int)kind, 0.37f, 1e-8f};
    struct opt_step step = {kind, 0.37f, 1e-8f};
    struct cuda_fault fault = NO_FAULT;
    struct floats table = state_like((size_t)CAP * stride, shift, 41);
    struct floats want = state_like((size_t)CAP * stride, shift, 41);
    struct floats g = floats_rough((size_t)ROWS * D, shift, 42);
    draw_slots(slot);
    done(cuda_row_update(stream, &o, table.p, stride, D, slot, g.p, ROWS, &fault));
    for (uint32_t i = 0; i < ROWS && kind == OPT_ROWWISE_ADAGRAD; i++) {
        float *at = want.p + (size_t)slot[i] * stride, *row = table.p + (size_t)slot[i] * stride;
        check_rowwise_row(&o, D, g.p + (size_t)i * D, at, row);
        memcpy(at, row, (D + 1) * sizeof(float));
    }
    if (kind != OPT_ROWWISE_ADAGRAD)
        cpu_done(cpu->ops->row_update(cpu, &step, want.p, stride, D, slot, g.p, ROWS));
    assert_same_bits(table.p, want.p, want.n, "table"); /* rows without a name too */
    assert_memory_equal(&fault, &NO_FAULT, sizeof(fault));
    floats_close(table);
    floats_close(want);
    floats_close(g);
}

static void rows_step_as_on_the_cpu(void **state)
{
    static const uint32_t DIM[] = {1, 3, 4, 48, 130, 1100};
    for (int i = 0; i < 3 * 6 * 2; i++) {
        emu_shuffle((uint64_t)i % 4);
        check_row_update(KIND[i % 3], DIM[i / 3 % 6], i / 18 ? 3 : 0, i % 5 == 4);
    }
    emu_shuffle(0);
}

static void dense_weights_step_as_on_the_cpu(void **state)
{
    static const uint32_t SIZE[] = {1, 3, 4, 1003, 4096};
    for (int i = 0; i < 3 * 5 * 2; i++) {
        uint32_t n = SIZE[i / 3 % 5];
        size_t shift = i / 15;
        struct cuda_opt o = {(int)KIND[i % 3], 0.05f, 1e-4f};
        struct opt_step step = {KIND[i % 3], 0.05f, 1e-4f};
        struct cuda_fault fault = NO_FAULT;
        struct floats w = floats_random(n, shift, 51), want = floats_random(n, 0, 51);
        struct floats s = state_like(n, shift, 52), want_s = state_like(n, 0, 52);
        struct floats g = floats_rough(n, shift, 53);
        done(cuda_dense_update(stream, &o, w.p, s.p, g.p, n, &fault));
        cpu_done(cpu->ops->dense_update(cpu, &step, want.p, want_s.p, g.p, n));
        assert_same_bits(w.p, want.p, n, "weights");
        assert_same_bits(s.p, want_s.p, n, "state");
        assert_memory_equal(&fault, &NO_FAULT, sizeof(fault));
        struct floats all[] = {w, want, s, want_s, g};
        for (int k = 0; k < 5; k++) floats_close(all[k]);
    }
}

/* --- faults --------------------------------------------------------------------------------- */

static const float BAD[] = {NAN, INFINITY, -INFINITY};

/* Rows at two places of the list are bad: the first is named, and nothing is written, neither then
 * nor by later updates of either kind. */
static void check_row_fault(enum optimizer kind, uint32_t D, uint32_t first, uint32_t at)
{
    uint32_t stride = 2 * D, slot[ROWS];
    struct cuda_opt o = {(int)kind, 0.1f, 1e-8f};
    struct cuda_fault fault = NO_FAULT;
    struct floats table = state_like((size_t)CAP * stride, 0, 61);
    struct floats want = state_like((size_t)CAP * stride, 0, 61);
    struct floats g = floats_random((size_t)ROWS * D, 0, 62), good = floats_random(D, 0, 63);
    draw_slots(slot);
    g.p[(size_t)first * D + at % D] = BAD[at % 3];
    g.p[(size_t)(ROWS - 1) * D] = NAN;
    done(cuda_row_update(stream, &o, table.p, stride, D, slot, g.p, ROWS, &fault));
    assert_int_equal(fault.row, 1 + slot[first]);
    assert_int_equal(fault.dense, 0);
    g.p[0] = INFINITY; /* an earlier place, but a later update */
    done(cuda_row_update(stream, &o, table.p, stride, D, slot, g.p, ROWS, &fault));
    done(cuda_row_update(stream, &o, table.p, stride, D, slot, good.p, 1, &fault));
    done(cuda_dense_update(stream, &o, table.p, table.p + D, good.p, D, &fault));
    done(cuda_dense_update(stream, &o, table.p, table.p + D, g.p, D, &fault));
    assert_int_equal(fault.row, 1 + slot[first]);
    assert_int_equal(fault.dense, 0);
    assert_same_bits(table.p, want.p, want.n, "table");
    floats_close(table);
    floats_close(want);
    floats_close(g);
    floats_close(good);
}

static void a_row_gradient_that_is_not_finite_stops_all_updates(void **state)
{
    for (uint32_t i = 0; i < 3 * 30; i++) {
        emu_shuffle(i);
        check_row_fault(KIND[i % 3], (uint32_t[]){1, 4, 19}[i / 3 % 3], draw(64, i) % ROWS, i);
    }
    emu_shuffle(0);
}

static void a_dense_gradient_that_is_not_finite_stops_all_updates(void **state)
{
    enum { N = 1030 };
    static const uint32_t slot[] = {3};
    for (uint32_t i = 0; i < 60; i++) {
        struct cuda_opt o = {(int)KIND[i % 3], 0.1f, 1e-8f};
        struct cuda_fault fault = NO_FAULT;
        struct floats w = floats_random(N, 0, 71), s = state_like(N, 0, 72);
        struct floats w0 = floats_random(N, 0, 71), s0 = state_like(N, 0, 72);
        struct floats g = floats_random(N, 0, 73), good = floats_random(N, 0, 74);
        emu_shuffle(i);
        g.p[i < 8 ? N - 1 - i : draw(75, i) % N] = BAD[i % 3];
        done(cuda_dense_update(stream, &o, w.p, s.p, g.p, N, &fault));
        assert_int_equal(fault.dense, 1);
        done(cuda_dense_update(stream, &o, w.p, s.p, good.p, N, &fault));
        done(cuda_row_update(stream, &o, w.p, 8, 4, slot, good.p, 1, &fault));
        done(cuda_row_update(stream, &o, w.p, 8, 4, slot, BAD, 0, &fault));
        good.p[1] = NAN;
        done(cuda_row_update(stream, &o, w.p, 8, 4, slot, good.p, 1, &fault));
        assert_int_equal(fault.row, 0);
        assert_same_bits(w.p, w0.p, N, "weights");
        assert_same_bits(s.p, s0.p, N, "state");
        struct floats all[] = {w, s, w0, s0, g, good};
        for (int k = 0; k < 6; k++) floats_close(all[k]);
    }
    emu_shuffle(0);
}

static void nothing_is_launched_for_nothing(void **state)
{
    struct cuda_opt o = {(int)OPT_SGD, 0.1f, 1e-8f};
    struct cuda_parts parts = {.n = 1};
    done(cuda_row_grads(stream, NULL, 1, 4, 0, NULL, NULL, 0, 1, NULL));
    done(cuda_tree_sum(stream, NULL, 4, 0, NULL, NULL, NULL, NULL));
    done(cuda_dense_sum(stream, &parts, 0, NULL));
    done(cuda_row_update(stream, &o, NULL, 4, 4, NULL, NULL, 0, NULL));
    done(cuda_dense_update(stream, &o, NULL, NULL, NULL, 0, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_with_few_uses_are_summed_in_tree_order),
        cmocka_unit_test(rows_with_many_uses_are_summed_in_tree_order),
        cmocka_unit_test(a_row_may_be_used_by_every_sample_or_by_some_slices_only),
        cmocka_unit_test(long_rows_are_found_wherever_they_are),
        cmocka_unit_test(parts_of_rows_are_summed_in_tree_order),
        cmocka_unit_test(dense_parts_are_summed_in_tree_order),
        cmocka_unit_test(nothing_is_added_to_what_contributes),
        cmocka_unit_test(rows_step_as_on_the_cpu),
        cmocka_unit_test(dense_weights_step_as_on_the_cpu),
        cmocka_unit_test(a_row_gradient_that_is_not_finite_stops_all_updates),
        cmocka_unit_test(a_dense_gradient_that_is_not_finite_stops_all_updates),
        cmocka_unit_test(nothing_is_launched_for_nothing),
    };
    return cmocka_run_group_tests(tests, open_both, close_both);
}
