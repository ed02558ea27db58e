/* The compute threads of a trainer: every task once, whoever runs it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "compute/lanes.h"

enum { MOST_LANES = 5, MOST_TASKS = 300, ROUNDS = 400 };

struct work {
    uint32_t n_lanes;
    uint32_t done[MOST_TASKS];            /* written by whoever has the task: a race shows */
    atomic_bool inside[MOST_LANES];       /* a task runs on this lane                      */
    atomic_uint wrong;
    uint32_t fail_from;                   /* these and every third after fail              */
    enum st failure;
};

static enum st count_task(void *ctx, uint32_t lane, uint32_t task)
{
    struct work *w = ctx;
    if (lane >= w->n_lanes || task >= MOST_TASKS || atomic_exchange(&w->inside[lane], true)) {
        atomic_fetch_add(&w->wrong, 1);
        return ST_OK;
    }
    w->done[task]++;
    atomic_store(&w->inside[lane], false);
    if (task < w->fail_from || (task - w->fail_from) % 3 != 0) return ST_OK;
    return task == w->fail_from ? w->failure : ST_INTERNAL;
}

static void run(struct lanes *l, struct work *w, uint32_t n_tasks, enum st want)
{
    memset(w->done, 0, sizeof(w->done));
    assert_int_equal(lanes_run(l, n_tasks, count_task, w), want);
    for (uint32_t k = 0; k < MOST_TASKS; k++) assert_int_equal(w->done[k], k < n_tasks);
    assert_int_equal(atomic_load(&w->wrong), 0);
}

static void every_task_runs_once_on_a_lane_of_its_own_round_after_round(void **state)
{
    for (uint32_t n = 1; n <= MOST_LANES; n++) {
        struct work w = {.n_lanes = n, .fail_from = UINT32_MAX};
        struct lanes *l;
        assert_int_equal(lanes_open(n, &l), ST_OK);
        assert_int_equal(lanes_count(l), n);
        for (uint32_t round = 0; round < ROUNDS; round++)
            run(l, &w, round * 7 % (MOST_TASKS + 1), ST_OK);
        lanes_close(l);
    }
}

/* Later tasks fail with another status and often earlier in time. */
static void the_first_failure_in_task_order_is_reported_and_the_others_still_run(void **state)
{
    struct work w = {.n_lanes = MOST_LANES};
    struct lanes *l;
    assert_int_equal(lanes_open(MOST_LANES, &l), ST_OK);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        w.fail_from = round % MOST_TASKS;
        w.failure = round % 2 == 0 ? ST_DATA : ST_NOMEM;
        run(l, &w, MOST_TASKS, w.failure);
        w.fail_from = UINT32_MAX; /* and the next round is a new one */
        run(l, &w, MOST_TASKS, ST_OK);
    }
    lanes_close(l);
}

struct sum { const uint32_t *from; uint32_t *to; };

static enum st add_up(void *ctx, uint32_t lane, uint32_t task)
{
    struct sum *s = ctx;
    s->to[task] = s->from[task] + s->from[MOST_TASKS - 1 - task];
    return ST_OK;
}

/* What a round wrote is there for all lanes of the next, without an atomic in sight. */
static void a_round_sees_what_the_round_before_has_written(void **state)
{
    static uint32_t a[MOST_TASKS], b[MOST_TASKS];
    struct lanes *l;
    assert_int_equal(lanes_open(MOST_LANES, &l), ST_OK);
    for (uint32_t k = 0; k < MOST_TASKS; k++) a[k] = k;
    for (uint32_t round = 0; round < 20; round += 2) {
        assert_int_equal(lanes_run(l, MOST_TASKS, add_up, &(struct sum){a, b}), ST_OK);
        assert_int_equal(lanes_run(l, MOST_TASKS, add_up, &(struct sum){b, a}), ST_OK);
    }
    for (uint32_t k = 0; k < MOST_TASKS; k++) assert_int_equal(a[k], (MOST_TASKS - 1) << 19);
    lanes_close(l);
}

static void opening_survives_every_failed_allocation(void **state)
{
    struct lanes *l;
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = lanes_open(3, &l);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            assert_int_equal(nth, 5); /* itself, the list, one argument for each thread */
            break;
        }
        assert_int_equal(st, ST_NOMEM);
    }
    lanes_close(l);
    lanes_close(NULL);
}

static int all_is_given_back(void **state)
{
    return mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once_on_a_lane_of_its_own_round_after_round),
        cmocka_unit_test(the_first_failure_in_task_order_is_reported_and_the_others_still_run),
        cmocka_unit_test(a_round_sees_what_the_round_before_has_written),
        cmocka_unit_test(opening_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, all_is_given_back);
}
