/* The CPU device: loss, rows, bytes, order, memory. Layers: test_cpu_linear.c, interaction:
 * test_cpu_interact.c, sums: test_cpu_sums.c, updates: test_cpu_update.c. */
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"

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

/* --- rows and bytes --------------------------------------------------------------------------- */

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
    assert_int_equal(dev->ops->rows_get(dev, table.p, STRIDE, SLOT, N, back + 1, WIDTH, NULL),
                     ST_OK);
    assert_memory_equal(back + 1, host + 1, N * WIDTH * sizeof(float));
    floats_close(table);
    floats_close(before);
    floats_close(rows);
}

/* What was asked for with a mark is there after waiting for it, and is what the table held when it
 * was asked for. */
static void what_is_got_with_a_mark_is_there_after_waiting_for_it(void **state)
{
    enum { CAP = 9, STRIDE = 7, WIDTH = 5, N = 4 };
    static const uint32_t SLOT[N] = {8, 0, 4, 4};
    size_t bytes = CAP * STRIDE * sizeof(float);
    struct floats table = floats_random(CAP * STRIDE, 0, 13);
    struct floats before = floats_random(CAP * STRIDE, 0, 13);
    float *rows = dev->ops->host_alloc(dev, N * WIDTH * sizeof(float));
    float *all = dev->ops->host_alloc(dev, bytes), *zero = mem_zalloc(1, bytes);
    uint64_t rows_mark = UINT64_MAX, all_mark = UINT64_MAX;
    assert_true((uintptr_t)rows % 64 == 0 && (uintptr_t)all % 64 == 0);
    assert_int_equal(dev->ops->rows_get(dev, table.p, STRIDE, SLOT, N, rows, WIDTH, &rows_mark),
                     ST_OK);
    assert_int_equal(dev->ops->copy_out(dev, table.p, all, bytes, &all_mark), ST_OK);
    assert_int_equal(dev->ops->copy_in(dev, table.p, zero, bytes), ST_OK);
    assert_int_equal(dev->ops->wait(dev, rows_mark), ST_OK);
    for (int i = 0; i < N; i++)
        assert_same_bits(rows + i * WIDTH, before.p + SLOT[i] * STRIDE, WIDTH, "row");
    assert_int_equal(dev->ops->wait(dev, all_mark), ST_OK);
    assert_same_bits(all, before.p, before.n, "bytes");
    assert_int_equal(dev->ops->copy_out(dev, table.p, all, bytes, NULL), ST_OK);
    assert_same_bits(all, zero, before.n, "bytes, at once");
    assert_int_equal(dev->ops->wait(dev, 0), ST_OK);
    dev->ops->host_free(dev, rows, N * WIDTH * sizeof(float));
    dev->ops->host_free(dev, all, bytes);
    mem_free(zero);
    floats_close(table);
    floats_close(before);
}

static void rows_are_copied_from_slot_to_slot(void **state)
{
    enum { CAP = 8, FROM = 6, TO = 7, WIDTH = 5, N = 4 };
    static const uint32_t FROM_SLOT[N] = {7, 0, 3, 3}, TO_SLOT[N] = {1, 6, 0, 4};
    struct floats from = floats_random(CAP * FROM, 0, 14);
    for (int named = 0; named < 2; named++) {
        struct floats to = floats_random(CAP * TO, 0, 15), want = floats_random(CAP * TO, 0, 15);
        for (uint32_t i = 0; i < N; i++)
            memcpy(want.p + (named ? TO_SLOT[i] : i) * TO, from.p + FROM_SLOT[i] * FROM,
                   WIDTH * sizeof(float));
        assert_int_equal(dev->ops->rows_copy(dev, from.p, FROM, FROM_SLOT, N, to.p, TO,
                                             named ? TO_SLOT : NULL, WIDTH), ST_OK);
        assert_same_bits(to.p, want.p, to.n, "rows");
        floats_close(to);
        floats_close(want);
    }
    floats_close(from);
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

/* --- order ---------------------------------------------------------------------------------- */

enum { TASKS = 100, SPINS = 1 << 24 /* far more than it ever takes */ };

struct tasks {
    uint32_t n;
    uint32_t done[TASKS];     /* written by whoever has the task: a race shows */
    uint32_t fail_from;       /* this and every third after it fail            */
    atomic_uint later, wrong; /* failures after it so far                      */
};

/* With as many later failures begun as there are lanes, one has been told: its lane went on. */
static void be_late(struct tasks *t)
{
    if (t->fail_from + 3 * dev->lanes >= t->n) return; /* not so many */
    for (uint32_t i = 0; i < SPINS && atomic_load(&t->later) < dev->lanes; i++) sched_yield();
}

static enum st count_task(void *ctx, uint32_t lane, uint32_t task)
{
    struct tasks *t = ctx;
    if (lane >= dev->lanes || task >= TASKS) {
        atomic_fetch_add(&t->wrong, 1);
        return ST_OK;
    }
    t->done[task]++;
    if (task < t->fail_from || (task - t->fail_from) % 3 != 0) return ST_OK;
    if (task == t->fail_from)
        be_late(t);
    else
        atomic_fetch_add(&t->later, 1);
    return task == t->fail_from ? ST_DATA : ST_NOMEM;
}

static void parallel_runs_each_task_once_and_tells_the_first_failure(void **state)
{
    for (uint32_t n = 0; n <= TASKS; n++)
        for (uint32_t fail_from = 0; fail_from <= TASKS; fail_from += 5) {
            struct tasks t = {.n = n, .fail_from = fail_from};
            assert_int_equal(dev->ops->parallel(dev, n, count_task, &t),
                             fail_from < n ? ST_DATA : ST_OK);
            assert_int_equal(atomic_load(&t.wrong), 0);
            for (uint32_t k = 0; k < TASKS; k++) assert_int_equal(t.done[k], k < n);
        }
}

struct script {
    uint32_t calls;
    float *table, *t;         /* device (4, 2) and (2, 2, 2): a gather of one table */
    uint32_t *slot;           /* device [2]                                         */
    enum st then;
};

static enum st gather_slots(void *ctx, uint32_t lane, uint32_t task)
{
    struct script *s = ctx;
    return dev->ops->gather(dev, lane, 1, 1, 2, s->table, 2, s->slot + task, s->t + 4 * task);
}

static enum st play(void *ctx)
{
    struct script *s = ctx;
    s->calls++;
    enum st st = dev->ops->parallel(dev, 2, gather_slots, s);
    return st == ST_OK ? s->then : st;
}

/* The same calls every time, on what is in device memory at that time. */
static void a_repetition_works_on_what_is_in_memory_then(void **state)
{
    static const float TABLE[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const struct device_ops *ops = dev->ops;
    void *graph = NULL;
    struct script s = {.table = ops->alloc(dev, sizeof(TABLE)), .t = ops->alloc(dev, 32),
                       .slot = ops->alloc(dev, 8)};
    assert_int_equal(ops->copy_in(dev, s.table, TABLE, sizeof(TABLE)), ST_OK);
    for (uint32_t i = 0; i < 16; i++) {
        const uint32_t slot[2] = {i % 4, i / 4};
        float t[8];
        assert_int_equal(ops->copy_in(dev, s.slot, slot, sizeof(slot)), ST_OK);
        assert_int_equal(ops->repeat(dev, &graph, play, &s), ST_OK);
        assert_int_equal(ops->copy_out(dev, s.t, t, sizeof(t), NULL), ST_OK);
        assert_int_equal(s.calls, i + 1); /* the CPU plays it anew each time */
        for (int k = 0; k < 2; k++) assert_memory_equal(t + 4 * k + 2, TABLE + 2 * slot[k], 8);
    }
    s.then = ST_NOMEM;
    assert_int_equal(ops->repeat(dev, &graph, play, &s), ST_NOMEM);
    ops->graph_free(dev, graph);
    ops->graph_free(dev, NULL);
    ops->free(dev, s.table, sizeof(TABLE));
    ops->free(dev, s.t, 32);
    ops->free(dev, s.slot, 8);
}

/* --- memory, opening -------------------------------------------------------------------------- */

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

static void some_memory_is_free_and_nothing_is_given_back_twice(void **state)
{
    size_t live = mem_live();
    assert_true(dev->ops->free_bytes(dev) > 1 << 20);
    void *nothing = dev->ops->alloc(dev, 0); /* what a layer without preparation needs */
    assert_non_null(nothing);
    dev->ops->free(dev, nothing, 0);
    dev->ops->free(dev, NULL, 0);
    dev->ops->free(dev, NULL, 5 << 20);
    dev->ops->host_free(dev, NULL, 100);
    assert_int_equal(mem_live(), live);
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
    size_t live = mem_live(), nth = 0;
    enum st st = ST_NOMEM;
    log_set_sink(keep_line, line);
    while (st == ST_NOMEM) {
        mem_fail_at(++nth);
        st = device_open(DEVICE_CPU, &cfg, &d);
        if (!mem_fail_stop()) break;
        assert_int_equal(st, ST_NOMEM);
        assert_string_equal(line, "chanter: error[E-NOMEM]: cpu device: out of memory; free some");
        assert_ptr_equal(d, untouched);
        assert_int_equal(mem_live(), live);
    }
    assert_int_equal(st, ST_OK);
    assert_int_equal(nth, 7); /* itself, layers; its lanes, their list, two threads' arguments */
    assert_string_equal(d->ops->name, "cpu");
    assert_int_equal(d->lanes, 3);
    assert_true(d->host_memory);
    device_close(d);
    d = untouched;
    assert_int_equal(device_open((enum device_kind)77, &cfg, &d), ST_CONFIG);
    assert_non_null(strstr(line, "error[E-CONFIG]: cluster.device:"));
    assert_ptr_equal(d, untouched);
    log_set_sink(NULL, NULL);
    device_close(NULL);
    assert_int_equal(mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loss_agrees_with_its_definition),
        cmocka_unit_test(loss_of_extreme_logits_is_exact_and_of_nan_is_nan),
        cmocka_unit_test(rows_go_in_and_out_at_any_alignment),
        cmocka_unit_test(what_is_got_with_a_mark_is_there_after_waiting_for_it),
        cmocka_unit_test(rows_are_copied_from_slot_to_slot),
        cmocka_unit_test(gather_fills_all_vectors_but_the_first),
        cmocka_unit_test(parallel_runs_each_task_once_and_tells_the_first_failure),
        cmocka_unit_test(a_repetition_works_on_what_is_in_memory_then),
        cmocka_unit_test(memory_is_aligned_and_zero),
        cmocka_unit_test(some_memory_is_free_and_nothing_is_given_back_twice),
        cmocka_unit_test(a_device_opens_whole_or_says_why_not),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
