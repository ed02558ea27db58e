/* The CUDA device, with CUDA on the CPU: opening, memory, failures, marks, graphs. Order:
 * test_cuda_order.c; layers: test_cuda_linear.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "compute/cuda.h"
#include "tests/support/caught.h"
#include "tests/support/floats.h"

#define OK(call) assert_int_equal((call), ST_OK)

enum { N = 100 }; /* floats that tests move about */

static const struct cuda_tuning SMALL = {1 << 12, 1 << 10};

static enum st try_open(struct device **d)
{
    struct device_cfg cfg = {.lanes = 2, .precision = PRECISION_BF16};
    return cuda_open_tuned(&cfg, &SMALL, d);
}

static struct device *must_open(void)
{
    struct device *d;
    OK(try_open(&d));
    return d;
}

static int start(void **state)
{
    emu_seed(3);
    emu_devices(1);
    emu_memory((size_t)1 << 30);
    caught_start();
    return 0;
}

static int stop(void **state)
{
    caught_stop();
    return emu_live() == 0 && mem_live() == 0 ? 0 : -1;
}

/* --- opening and memory --------------------------------------------------------------------- */

static void without_a_gpu_it_says_so(void **state)
{
    struct device *d = (struct device *)1;
    emu_devices(0);
    assert_int_equal(try_open(&d), ST_CONFIG);
    assert_ptr_equal(d, (struct device *)1);
    assert_int_equal(caught_lines, 1);
    assert_non_null(strstr(caught_line, "no CUDA-capable device"));
}

static void trainers_of_a_machine_take_its_gpus_in_turn(void **state)
{
    emu_devices(3);
    for (uint32_t rank = 0; rank < 7; rank++) {
        struct device_cfg cfg = {.lanes = 1, .local_rank = rank};
        struct device *d;
        OK(cuda_open_tuned(&cfg, &SMALL, &d));
        assert_int_equal(cuda_of(d)->ordinal, rank % 3);
        assert_int_equal(d->siblings, 3);
        assert_false(d->host_memory);
        device_close(d);
    }
}

static void memory_is_zero_and_what_there_is_can_be_asked_for(void **state)
{
    static const float zero[N];
    struct device *d = must_open();
    size_t before = d->ops->free_bytes(d);
    float *p = d->ops->alloc(d, N * sizeof(*p)), got[N];
    float *host = d->ops->host_alloc(d, N * sizeof(*p));
    assert_int_equal((uintptr_t)p % 64, 0);
    assert_int_equal(before - d->ops->free_bytes(d), N * sizeof(*p));
    OK(d->ops->copy_out(d, p, got, sizeof(got), NULL));
    assert_same_bits(got, zero, N, "new memory");
    assert_same_bits(host, zero, N, "new host memory");
    d->ops->host_free(d, host, N * sizeof(*p));
    d->ops->free(d, p, N * sizeof(*p));
    assert_int_equal(d->ops->free_bytes(d), before);
    device_close(d);
}

static void running_out_of_memory_is_said_and_ends_nothing(void **state)
{
    struct device *d = must_open();
    assert_null(d->ops->alloc(d, (size_t)1 << 40));
    assert_int_equal(caught_lines, 1);
    assert_non_null(strstr(caught_line, "E-NOMEM"));
    assert_non_null(strstr(caught_line, "cluster.cache_rows"));
    void *p = d->ops->alloc(d, 100);
    assert_non_null(p);
    d->ops->free(d, p, 100);
    device_close(d);
}

/* --- marks ---------------------------------------------------------------------------------- */

static void a_mark_waits_for_its_copy_and_no_mark_for_all(void **state)
{
    enum { COPIES = 3 * CUDA_MARKS };
    struct device *d = must_open();
    float *p = d->ops->alloc(d, sizeof(*p)), *host = d->ops->host_alloc(d, COPIES * sizeof(*p));
    uint64_t mark[COPIES];
    for (uint32_t i = 0; i < COPIES; i++) {
        float x = (float)i + 1.0f;
        OK(d->ops->copy_in(d, p, &x, sizeof(x)));
        OK(d->ops->copy_out(d, p, &host[i], sizeof(x), &mark[i]));
        assert_true(mark[i] > (i > 0 ? mark[i - 1] : 0));
    }
    emu_seed(3); /* nothing is carried out unless it is waited for */
    for (uint32_t i = 0; i < COPIES; i++) {
        OK(d->ops->wait(d, mark[i]));
        assert_true(host[i] == (float)i + 1.0f);
    }
    float x = -1.0f;
    OK(d->ops->copy_in(d, p, &x, sizeof(x)));
    OK(d->ops->copy_out(d, p, &host[0], sizeof(x), &mark[0]));
    OK(d->ops->wait(d, mark[1])); /* passed: asks the GPU for nothing */
    assert_true(host[0] == 1.0f);
    OK(d->ops->wait(d, mark[0]));
    assert_true(host[0] == -1.0f);
    x = -2.0f;
    OK(d->ops->copy_in(d, p, &x, sizeof(x)));
    OK(d->ops->copy_out(d, p, &host[1], sizeof(x), &mark[1]));
    OK(d->ops->wait(d, 0));
    assert_true(host[1] == -2.0f);
    d->ops->host_free(d, host, COPIES * sizeof(*p));
    d->ops->free(d, p, sizeof(*p));
    device_close(d);
}

/* --- graphs --------------------------------------------------------------------------------- */

enum { TASKS = 5 };

struct work { struct device *d; const float *table; const uint32_t *slot; float *t; int calls; };

/* t[task] = [left alone, table[slot[task]]], of N / TASKS / 2 floats each */
static enum st gather_one(void *ctx, uint32_t lane, uint32_t task)
{
    struct work *w = ctx;
    return w->d->ops->gather(w->d, lane, 1, 1, N / TASKS / 2, w->table, N / TASKS / 2,
                             w->slot + task, w->t + task * (N / TASKS));
}

static enum st gather_all(void *ctx)
{
    struct work *w = ctx;
    w->calls++;
    return w->d->ops->parallel(w->d, TASKS, gather_one, w);
}

static void work_open(struct work *w)
{
    float table[N];
    float *to;
    for (uint32_t i = 0; i < N; i++) table[i] = (float)i;
    *w = (struct work){.d = must_open()};
    w->table = to = w->d->ops->alloc(w->d, N * sizeof(float));
    w->slot = w->d->ops->alloc(w->d, TASKS * sizeof(uint32_t));
    w->t = w->d->ops->alloc(w->d, N * sizeof(float));
    OK(w->d->ops->copy_in(w->d, to, table, sizeof(table)));
}

static void work_close(struct work *w)
{
    w->d->ops->free(w->d, w->t, N * sizeof(float));
    w->d->ops->free(w->d, (void *)(uintptr_t)w->slot, TASKS * sizeof(uint32_t));
    w->d->ops->free(w->d, (void *)(uintptr_t)w->table, N * sizeof(float));
    device_close(w->d);
}

/* Slots first, first + 1, ..: put in, gathered, looked at. */
static void gather_and_check(struct work *w, void **graph, uint32_t first)
{
    uint32_t slot[TASKS];
    float t[N];
    for (uint32_t i = 0; i < TASKS; i++) slot[i] = first + i;
    OK(w->d->ops->copy_in(w->d, (void *)(uintptr_t)w->slot, slot, sizeof(slot)));
    OK(w->d->ops->repeat(w->d, graph, gather_all, w));
    OK(w->d->ops->copy_out(w->d, w->t, t, sizeof(t), NULL));
    for (uint32_t i = 0; i < TASKS; i++)
        for (uint32_t k = 0; k < N / TASKS / 2; k++)
            assert_true(t[i * (N / TASKS) + N / TASKS / 2 + k] ==
                        (float)((first + i) * (N / TASKS / 2) + k));
}

static void what_repeats_is_issued_twice_and_then_by_the_gpu(void **state)
{
    struct work w;
    void *graph = NULL;
    work_open(&w);
    for (uint32_t i = 0; i < 5; i++) gather_and_check(&w, &graph, i);
    assert_int_equal(w.calls, 2);
    assert_int_equal(caught_lines, 0);
    w.d->ops->graph_free(w.d, graph);
    w.d->ops->graph_free(w.d, NULL);
    work_close(&w);
}

static void what_cannot_be_recorded_is_issued_each_time(void **state)
{
    struct work w;
    void *graph = NULL;
    work_open(&w);
    gather_and_check(&w, &graph, 0);
    uint32_t slot[TASKS] = {1, 2, 3, 4, 5};
    OK(w.d->ops->copy_in(w.d, (void *)(uintptr_t)w.slot, slot, sizeof(slot)));
    emu_fail_at(7, cudaErrorStreamCaptureUnsupported, 0); /* inside of the recording */
    OK(w.d->ops->repeat(w.d, &graph, gather_all, &w));
    assert_int_equal(emu_fail_stop(), 1);
    assert_int_equal(caught_lines, 1);
    assert_non_null(strstr(caught_line, "cannot be recorded"));
    for (uint32_t i = 0; i < 4; i++) gather_and_check(&w, &graph, i);
    assert_int_equal(w.calls, 3 + 4);
    assert_int_equal(caught_lines, 1);
    w.d->ops->graph_free(w.d, graph);
    work_close(&w);
}

/* --- tasks ---------------------------------------------------------------------------------- */

struct tasks { uint32_t ran, lanes; enum st at_2, at_4; };

static enum st note_task(void *ctx, uint32_t lane, uint32_t task)
{
    struct tasks *t = ctx;
    t->ran |= 1u << task;
    t->lanes |= 1u << lane;
    return task == 2 ? t->at_2 : task == 4 ? t->at_4 : ST_OK;
}

static void all_tasks_run_and_the_first_failure_is_returned(void **state)
{
    struct device *d = must_open();
    struct tasks t = {.at_2 = ST_DATA, .at_4 = ST_IO};
    assert_int_equal(d->ops->parallel(d, 6, note_task, &t), ST_DATA);
    assert_int_equal(t.ran, 63);
    assert_int_equal(t.lanes, 3);
    OK(d->ops->parallel(d, 0, note_task, &t));
    device_close(d);
}

/* --- the fault ------------------------------------------------------------------------------ */

static void a_gradient_that_is_not_finite_is_found_when_its_update_is_done(void **state)
{
    struct device *d = must_open();
    struct opt_step o = {OPT_SGD, 1.0f, 0.0f};
    float *table = d->ops->alloc(d, N * sizeof(*table));
    float *grad = d->ops->alloc(d, 4 * sizeof(*grad));
    float bad[4] = {1.0f, 1.0f, 1.0f, 0.0f}, got[4];
    uint32_t slot[2] = {3, 7};
    struct device_fault f;
    bad[3] /= bad[3];
    emu_seed(3);
    OK(d->ops->copy_in(d, grad, bad, sizeof(bad)));
    OK(d->ops->row_update(d, &o, table, 2, 2, slot, grad, 2));
    OK(d->ops->fault(d, &f)); /* does not wait for what is still to come */
    OK(d->ops->wait(d, 0));
    OK(d->ops->fault(d, &f));
    assert_true(f.row && !f.dense);
    assert_int_equal(f.slot, 7);
    OK(d->ops->rows_get(d, table, 2, slot, 2, got, 2, NULL));
    assert_true(got[0] == 0.0f && got[1] == 0.0f && got[2] == 0.0f && got[3] == 0.0f);
    d->ops->free(d, grad, 4 * sizeof(*grad));
    d->ops->free(d, table, N * sizeof(*table));
    device_close(d);
}

/* --- failures ------------------------------------------------------------------------------- */

/* A bit of everything that a trainer does, as far as it gets. */
static enum st session(struct device *d, struct work *w, void **graph, float *host)
{
    const struct device_ops *ops = d->ops;
    struct linear l = {5, 4, true, w->table, w->table + 64, w->t + 64};
    struct device_fault f;
    uint32_t slot[TASKS] = {0, 1, 2, 3, 4}, begin[2] = {0, 1}, item[1] = {0};
    struct seg_list list = {1, begin, item};
    uint64_t mark;
    float x[N] = {0};
    enum st st;
    TRY(ops->copy_in(d, (void *)(uintptr_t)w->table, x, sizeof(x)), err);
    TRY(ops->rows_put(d, w->t, 2, slot, TASKS, x, 2), err);
    for (int i = 0; i < 3; i++) TRY(ops->repeat(d, graph, gather_all, w), err);
    TRY(ops->prepare(d, 0, &l), err);
    TRY(ops->linear_forward(d, 0, 2, &l, w->table, w->t, 4), err);
    TRY(ops->row_grads(d, w->t, 1, 4, &list, 0, 1, w->t + 32), err);
    TRY(ops->rows_copy(d, w->table, 2, slot, TASKS, w->t, 2, NULL, 2), err);
    TRY(ops->rows_get(d, w->t, 2, slot, TASKS, host, 2, &mark), err);
    TRY(ops->wait(d, mark), err);
    TRY(ops->copy_out(d, w->t, x, sizeof(x), NULL), err);
    TRY(ops->wait(d, 0), err);
    st = ops->fault(d, &f);
err: return st;
}

static enum st session_from_open_to_close(void)
{
    struct work w = {0};
    void *graph = NULL;
    enum st st = try_open(&w.d);
    if (st != ST_OK) return st;
    w.table = w.d->ops->alloc(w.d, N * sizeof(float));
    w.slot = w.d->ops->alloc(w.d, TASKS * sizeof(uint32_t));
    w.t = w.d->ops->alloc(w.d, N * sizeof(float));
    float *host = w.d->ops->host_alloc(w.d, N * sizeof(float));
    st = ST_NOMEM;
    if (w.table != NULL && w.slot != NULL && w.t != NULL && host != NULL)
        st = session(w.d, &w, &graph, host);
    w.d->ops->graph_free(w.d, graph);
    w.d->ops->host_free(w.d, host, N * sizeof(float));
    work_close(&w);
    return st;
}

/* `all`: the GPU is gone from then on. Otherwise one call fails. Inside of a recording that changes
 * nothing but speed; in what only gives back, it is too late to matter. */
static void sweep(int all, uint64_t *n_failed, uint64_t *n_passed)
{
    for (uint64_t nth = 1;; nth++) {
        emu_seed(nth);
        caught_reset();
        emu_fail_at(nth, cudaErrorLaunchFailure, all);
        enum st st = session_from_open_to_close();
        uint64_t fired = emu_fail_stop();
        assert_int_equal(emu_live(), 0);
        assert_int_equal(mem_live(), 0);
        assert_true(st == ST_OK || caught_lines == 1);
        assert_true(caught_lines <= 1);
        *n_failed += st != ST_OK;
        if (fired == 0) break;
        *n_passed += st == ST_OK;
    }
}

static void a_call_that_fails_is_said_once_and_nothing_is_leaked(void **state)
{
    uint64_t failed = 0, passed = 0;
    sweep(0, &failed, &passed);
    assert_true(failed > 500);
    failed = passed = 0;
    sweep(1, &failed, &passed);
    assert_true(failed > 500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(without_a_gpu_it_says_so, start, stop),
        cmocka_unit_test_setup_teardown(trainers_of_a_machine_take_its_gpus_in_turn, start, stop),
        cmocka_unit_test_setup_teardown(memory_is_zero_and_what_there_is_can_be_asked_for, start,
                                        stop),
        cmocka_unit_test_setup_teardown(running_out_of_memory_is_said_and_ends_nothing, start,
                                        stop),
        cmocka_unit_test_setup_teardown(a_mark_waits_for_its_copy_and_no_mark_for_all, start,
                                        stop),
        cmocka_unit_test_setup_teardown(what_repeats_is_issued_twice_and_then_by_the_gpu, start,
                                        stop),
        cmocka_unit_test_setup_teardown(what_cannot_be_recorded_is_issued_each_time, start, stop),
        cmocka_unit_test_setup_teardown(all_tasks_run_and_the_first_failure_is_returned, start,
                                        stop),
        cmocka_unit_test_setup_teardown(
            a_gradient_that_is_not_finite_is_found_when_its_update_is_done, start, stop),
        cmocka_unit_test_setup_teardown(a_call_that_fails_is_said_once_and_nothing_is_leaked,
                                        start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
