/* Random jobs through the planner, their plans followed by a dumb cluster that knows what every
 * look-up must read (tests/support/planner_world.h). One sweep over all seeds runs first; each test
 * then asks whether one property was ever the first to break, and names the seed.
 *
 * PLANNER_SEED=n runs one seed, PLANNER_CASES=n another number of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "tests/support/planner_world.h"

enum { DEFAULT_CASES = 1500, MAX_TRAINERS = 8 };

static struct { uint64_t seed, n; char why[200]; } broken[FAULT_N];
static struct world_seen seen;
static uint64_t n_cases;

static void note(enum world_fault fault, uint64_t seed, const char *why)
{
    if (fault == FAULT_NONE || broken[fault].n++ > 0) return;
    broken[fault].seed = seed;
    snprintf(broken[fault].why, sizeof(broken[fault].why), "%s", why);
}

/* --- one job, in one of three orders of calls ------------------------------------------------- */

enum order { PULL_EARLY, PUSH_ALL_FIRST, RANDOM_WITH_EVALS, N_ORDERS };

struct job {
    const struct planner_case *c;
    enum order order;
    uint64_t draw;
    struct planner *p;
    struct world *w;
    struct plan_bytes bytes;
    uint32_t pushed;
    bool stopped; /* at a fault: not all plans were pulled */
};

static void feed(struct job *j)
{
    if (j->pushed < j->c->n_batches) {
        assert_int_equal(planner_push(j->p, &j->c->batch[j->pushed]), ST_OK);
        j->pushed++;
    } else {
        planner_end(j->p);
    }
}

/* Evaluate batches of the job itself, and rows that training never meets. */
static void evaluate(struct job *j)
{
    struct plan *plan[MAX_TRAINERS];
    const struct samples *s = &j->c->batch[case_draw(&j->draw, j->c->n_batches)];
    int last = (int)case_draw(&j->draw, 2);
    assert_int_equal(planner_eval(j->p, s, last, plan), ST_OK);
    world_eval(j->w, s, last, plan);
}

static enum st pull(struct job *j)
{
    struct plan *plan[MAX_TRAINERS];
    enum st st = planner_pull(j->p, plan);
    if (st != ST_OK) return st;
    for (uint32_t t = 0; t < j->c->cfg.n_trainers; t++)
        plan_bytes_add(&j->bytes, &j->c->cfg, plan[t]);
    world_step(j->w, plan);
    if (case_draw(&j->draw, 8) == 0) planner_validate(j->p);
    return st;
}

static void run_job(struct job *j)
{
    assert_int_equal(planner_open(&j->c->cfg, &j->p), ST_OK);
    j->w = world_open(j->c, &seen);
    const char *why = "";
    bool evals = j->order == RANDOM_WITH_EVALS && j->c->n_batches > 0;
    if (j->order == PUSH_ALL_FIRST)
        for (uint32_t i = 0; i <= j->c->n_batches; i++) feed(j);
    for (enum st st = ST_BUSY; st != ST_END && !j->stopped;) {
        if (evals && case_draw(&j->draw, 3) == 0) evaluate(j);
        st = pull(j);
        if (st == ST_BUSY) feed(j);
        if (evals && j->pushed < j->c->n_batches && case_draw(&j->draw, 3) == 0) feed(j);
        assert_true(st == ST_OK || st == ST_BUSY || st == ST_END);
        j->stopped = world_fault(j->w, &why) != FAULT_NONE;
    }
    if (evals) evaluate(j);
    planner_validate(j->p);
    note(world_fault(j->w, &why), j->c->seed, why);
    struct planner_stats s = planner_stats(j->p);
    if (s.peak_rows > j->c->cfg.cap_rows) note(FAULT_SLOT, j->c->seed, "peak_rows");
    world_close(j->w);
    planner_close(j->p);
}

static bool same_plans(const struct plan_bytes *a, const struct plan_bytes *b)
{
    return a->n == b->n && (a->n == 0 || memcmp(a->p, b->p, a->n) == 0);
}

static void run_seed(uint64_t seed)
{
    struct planner_case c = case_random(seed);
    struct job job[N_ORDERS];
    for (int order = 0; order < N_ORDERS; order++) {
        job[order] = (struct job){.c = &c, .order = (enum order)order, .draw = seed};
        run_job(&job[order]);
        if (!job[0].stopped && !job[order].stopped && !same_plans(&job[0].bytes, &job[order].bytes))
            note(FAULT_PLANS_DIFFER, seed, order == PUSH_ALL_FIRST ? "push all first" : "evals");
    }
    for (int order = 0; order < N_ORDERS; order++) free(job[order].bytes.p);
    case_close(&c);
    n_cases++;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

static int sweep(void **state)
{
    uint64_t only = number("PLANNER_SEED", 0), n = number("PLANNER_CASES", DEFAULT_CASES);
    for (uint64_t seed = only != 0 ? only : 1; seed <= (only != 0 ? only : n); seed++)
        run_seed(seed);
    return 0;
}

/* --- properties ------------------------------------------------------------------------------- */

static void never(enum world_fault fault)
{
    if (broken[fault].n > 0)
        fail_msg("PLANNER_SEED=%llu: %s (%llu runs in all)", (unsigned long long)broken[fault].seed,
                 broken[fault].why, (unsigned long long)broken[fault].n);
}

static void each_trainer_gets_its_samples(void **state)
{
    never(FAULT_SAMPLES);
}
static void every_look_up_reads_the_right_row_at_the_right_version(void **state)
{
    never(FAULT_READ);
}
static void a_fetch_needs_exactly_the_last_version_written(void **state)
{
    never(FAULT_NEED);
}
static void the_owner_writes_back_the_updated_row_once(void **state)
{
    never(FAULT_WRITE_BACK);
}
static void no_gradient_is_lost_or_doubled(void **state)
{
    never(FAULT_GRADIENT);
}
static void both_sides_of_an_exchange_have_the_same_list(void **state)
{
    never(FAULT_LISTS);
}
static void a_slot_holds_one_row_and_no_cache_overflows(void **state)
{
    never(FAULT_SLOT);
}
static void a_row_is_live_as_long_as_the_window_says_with_one_owner(void **state)
{
    never(FAULT_WINDOW);
}
static void the_servers_end_with_every_last_value(void **state)
{
    never(FAULT_FINAL);
}
static void an_evaluation_reads_the_weights_between_two_iterations(void **state)
{
    never(FAULT_EVAL);
}
static void plans_do_not_depend_on_how_far_ahead_batches_come_or_on_evaluations(void **state)
{
    never(FAULT_PLANS_DIFFER);
}

static void the_sweep_met_every_kind_of_case(void **state)
{
    if (getenv("PLANNER_SEED") != NULL || getenv("PLANNER_CASES") != NULL) skip();
    assert_int_equal(n_cases, DEFAULT_CASES);
    const uint64_t *count = (const uint64_t *)&seen;
    for (size_t k = 0; k < sizeof(seen) / sizeof(*count); k++) assert_true(count[k] > 1000);
}

static void nothing_is_left_in_memory(void **state)
{
    assert_int_equal(mem_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_trainer_gets_its_samples),
        cmocka_unit_test(every_look_up_reads_the_right_row_at_the_right_version),
        cmocka_unit_test(a_fetch_needs_exactly_the_last_version_written),
        cmocka_unit_test(the_owner_writes_back_the_updated_row_once),
        cmocka_unit_test(no_gradient_is_lost_or_doubled),
        cmocka_unit_test(both_sides_of_an_exchange_have_the_same_list),
        cmocka_unit_test(a_slot_holds_one_row_and_no_cache_overflows),
        cmocka_unit_test(a_row_is_live_as_long_as_the_window_says_with_one_owner),
        cmocka_unit_test(the_servers_end_with_every_last_value),
        cmocka_unit_test(an_evaluation_reads_the_weights_between_two_iterations),
        cmocka_unit_test(plans_do_not_depend_on_how_far_ahead_batches_come_or_on_evaluations),
        cmocka_unit_test(the_sweep_met_every_kind_of_case),
        cmocka_unit_test(nothing_is_left_in_memory),
    };
    return cmocka_run_group_tests(tests, sweep, NULL);
}
