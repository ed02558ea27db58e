/* What the planner refuses, how much memory it takes, and what it does when there is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "oracle/planner_internal.h"
#include "tests/support/planner_case.h"

enum { MAX = 8 };

static char line[1024];
static void keep_line(void *ctx, const char *text)
{
    snprintf(line, sizeof(line), "%s", text);
}

static void a_batch_that_does_not_fit_is_refused_with_the_rows_it_takes(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 4, 3);
    cfg.cap_rows = 1;
    struct planner_case c = case_by_hand(&cfg, 2, (const uint64_t[]){1, 1, 2, 2, 1, 1, 2, 3});
    struct planner *p = case_open(&cfg);
    struct plan *plan[2];
    assert_int_equal(planner_push(p, &c.batch[0]), ST_OK);
    log_set_sink(keep_line, NULL);
    assert_int_equal(planner_push(p, &c.batch[1]), ST_CONFIG);
    log_set_sink(NULL, NULL);
    assert_non_null(strstr(line, "cluster.cache_rows"));
    assert_non_null(strstr(line, "takes 2 rows on trainer 1"));
    planner_validate(p); /* as if it had not been pushed */
    planner_end(p);
    assert_int_equal(planner_pull(p, plan), ST_OK);
    case_close_plans(plan, 2);
    planner_close(p);
    case_close(&c);
}

static void stats_count_what_the_plans_say(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 1);
    struct planner_case c = case_by_hand(&cfg, 3, (const uint64_t[]){7, 7, 8, 9, 7, 9});
    struct planner *p = case_planner(&c);
    struct plan *plan[2];
    while (planner_pull(p, plan) == ST_OK) case_close_plans(plan, 2);
    struct planner_stats s = planner_stats(p);
    assert_int_equal(s.fetches, 5);     /* 7 twice at 0; 8, 9; 7 again */
    assert_int_equal(s.refetches, 1);
    assert_int_equal(s.write_backs, 4); /* 7, 8, 7, 9 */
    assert_int_equal(s.peak_rows, 1);
    assert_int_equal(s.live_rows, 0);
    planner_close(p);
    case_close(&c);
}

/* 2000 rows pass, each used once: only those of L + remember iterations are known at a time. */
static void memory_is_the_windows_not_the_tables(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 4, 8);
    cfg.remember = 5;
    uint64_t rows[2000];
    for (uint64_t k = 0; k < 2000; k++) rows[k] = k;
    struct planner_case c = case_by_hand(&cfg, 500, rows);
    struct planner *p = case_open(&cfg);
    struct plan *plan;
    for (uint32_t i = 0; i < 500; i++) {
        assert_int_equal(planner_push(p, &c.batch[i]), ST_OK);
        if (planner_pull(p, &plan) == ST_OK) plan_close(plan);
    }
    assert_true(p->n_row <= 4 * (8 + 5 + 2));
    assert_true(p->index.cap <= 256);
    assert_true(p->cap_ring <= 16);
    assert_int_equal(p->cache[0].n_slots, 4);
    planner_validate(p);
    planner_close(p);
    case_close(&c);
}

static void the_map_of_rows_agrees_with_an_array(void **state)
{
    struct idmap m = {0};
    uint32_t want[512];
    uint64_t draw = 1;
    memset(want, 0xff, sizeof(want));
    for (int step = 0; step < 20000; step++) {
        uint64_t key = case_draw(&draw, 512);
        assert_int_equal(idmap_get(&m, key << 40), want[key]);
        if (want[key] == NONE) {
            want[key] = (uint32_t)step;
            assert_int_equal(idmap_put(&m, key << 40, want[key]), ST_OK);
        } else {
            want[key] = NONE;
            idmap_remove(&m, key << 40);
        }
    }
    for (uint64_t key = 0; key < 512; key++) assert_int_equal(idmap_get(&m, key << 40), want[key]);
    idmap_clear(&m);
    assert_int_equal(idmap_get(&m, 0), NONE);
    idmap_fini(&m);
}

/* --- memory faults ---------------------------------------------------------------------------- */

static void opening_survives_any_failed_allocation(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 4, 3);
    struct planner *untouched = (struct planner *)&cfg;
    size_t before = mem_live();
    int injected = 0;
    for (size_t nth = 1;; nth++) {
        struct planner *p = untouched;
        mem_fail_at(nth);
        enum st st = planner_open(&cfg, &p);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            planner_close(p);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(p, untouched);
        assert_int_equal(mem_live(), before);
    }
    assert_int_equal(injected, 6);
}

/* A job with an evaluation after every step, up to the first call that fails. */
static enum st whole_job(struct planner *p, const struct planner_case *c)
{
    struct plan *plan[MAX];
    enum st st;
    for (uint32_t i = 0; i < c->n_batches; i++) {
        st = planner_push(p, &c->batch[i]);
        if (st != ST_OK) return st;
    }
    planner_end(p);
    for (;;) {
        st = planner_pull(p, plan);
        if (st != ST_OK) return st;
        case_close_plans(plan, c->cfg.n_trainers);
        st = planner_eval(p, &c->batch[0], 1, plan);
        if (st != ST_OK) return st;
        case_close_plans(plan, c->cfg.n_trainers);
    }
}

static void a_job_ends_cleanly_at_any_failed_allocation(void **state)
{
    struct planner_cfg cfg = case_cfg(3, 8, 5);
    uint64_t rows[160];
    for (uint64_t k = 0; k < 160; k++) rows[k] = k * 7 % 40;
    cfg.cap_rows = 8;
    struct planner_case c = case_by_hand(&cfg, 20, rows);
    size_t before = mem_live();
    int injected = 0;
    for (size_t nth = 1;; nth++) {
        struct planner *p = case_open(&cfg);
        mem_fail_at(nth);
        enum st st = whole_job(p, &c);
        bool fired = mem_fail_stop();
        planner_close(p);
        assert_int_equal(mem_live(), before);
        assert_int_equal(st, fired ? ST_NOMEM : ST_END);
        if (!fired) break;
        injected++;
    }
    assert_true(injected > 250); /* 41 steps of 3 plans, 2 blocks each, and the planner's own */
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_that_does_not_fit_is_refused_with_the_rows_it_takes),
        cmocka_unit_test(stats_count_what_the_plans_say),
        cmocka_unit_test(memory_is_the_windows_not_the_tables),
        cmocka_unit_test(the_map_of_rows_agrees_with_an_array),
        cmocka_unit_test(opening_survives_any_failed_allocation),
        cmocka_unit_test(a_job_ends_cleanly_at_any_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
