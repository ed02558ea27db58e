/* Small jobs whose plans can be worked out by hand. One table, one sample a slice: batches are
 * lists of row numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "tests/support/planner_case.h"

/* --- plans as text ------------------------------------------------------------------------------
 *   slot 0 1          the look-ups' slots
 *   fetch 7>0* 8>1@3  row 7 into slot 0, owned; row 8 into slot 1, value only, need 3
 *   evict 7<0@2       row 7 from slot 0, version 2
 *   g>1 0.2 | 3.2     gradients to trainer 1: slot 0 node 2 urgent; slot 3 node 2 deferred
 *   v<1 | 4           values from trainer 1: none urgent; slot 4 deferred
 *   copy 0>1          evaluation: cache slot 0 to scratch row 1                                  */

struct text { char s[1000]; size_t n; };

__attribute__((format(printf, 2, 3))) static void say(struct text *x, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    x->n += (size_t)vsnprintf(x->s + x->n, sizeof(x->s) - x->n, fmt, ap);
    va_end(ap);
    assert_true(x->n < sizeof(x->s));
}

static void say_grads(struct text *x, char way, uint32_t peer, const struct plan_grads *g)
{
    if (g->n > 0) say(x, " g%c%u", way, peer);
    for (uint32_t k = 0; k < g->n; k++)
        say(x, "%s %u.%u", k == g->n_urgent ? " |" : "", g->slot[k], g->node[k]);
}

static void say_values(struct text *x, char way, uint32_t peer, const struct plan_values *v)
{
    if (v->n > 0) say(x, " v%c%u", way, peer);
    for (uint32_t k = 0; k < v->n; k++) say(x, "%s %u", k == v->n_urgent ? " |" : "", v->slot[k]);
}

static struct text text_of(const struct plan *pl)
{
    struct text x = {.n = 0};
    say(&x, "slot");
    for (uint32_t k = 0; k < pl->n_samples; k++) say(&x, " %u", pl->slot[k]);
    if (pl->fetch.n > 0) say(&x, " fetch");
    for (uint32_t k = 0; k < pl->fetch.n; k++) {
        say(&x, " %llu>%u%s", (unsigned long long)pl->fetch.row_id[k], pl->fetch.slot[k],
            pl->fetch.owned[k] ? "*" : "");
        if (pl->fetch.need[k] != PLAN_NEED_SETTLED) say(&x, "@%lld", (long long)pl->fetch.need[k]);
    }
    if (pl->evict.n > 0) say(&x, " evict");
    for (uint32_t k = 0; k < pl->evict.n; k++)
        say(&x, " %llu<%u@%lld", (unsigned long long)pl->evict.row_id[k], pl->evict.slot[k],
            (long long)pl->evict.version[k]);
    for (uint32_t r = 0; r < pl->n_peers; r++) {
        say_grads(&x, '>', r, &pl->peer[r].grad_send);
        say_grads(&x, '<', r, &pl->peer[r].grad_recv);
        say_values(&x, '>', r, &pl->peer[r].value_send);
        say_values(&x, '<', r, &pl->peer[r].value_recv);
    }
    if (pl->n_eval_copy > 0) say(&x, " copy");
    for (uint32_t k = 0; k < pl->n_eval_copy; k++)
        say(&x, " %u>%u", pl->eval_from[k], pl->eval_to[k]);
    return x;
}

/* --- jobs ------------------------------------------------------------------------------------- */

enum { MAX = 8 };

/* Pull the next step's plans and compare them with want[0..trainers). */
static void expect(struct planner *p, const char *const *want)
{
    struct plan *plan[MAX];
    assert_int_equal(planner_pull(p, plan), ST_OK);
    uint32_t n = plan[0]->n_peers;
    for (uint32_t t = 0; t < n; t++) {
        struct text x = text_of(plan[t]);
        assert_string_equal(x.s, want[t]);
    }
    case_close_plans(plan, n);
    planner_validate(p);
}

/* The whole job: batches as rows[n_batches][slices]; want[n_batches + 1][trainers], flush last. */
static void expect_job(const struct planner_cfg *cfg, uint32_t n_batches, const uint64_t *rows,
                       const char *const *want)
{
    struct planner_case c = case_by_hand(cfg, n_batches, rows);
    struct planner *p = case_planner(&c);
    struct plan *plan[MAX];
    for (uint32_t i = 0; i <= n_batches; i++) expect(p, want + i * cfg->n_trainers);
    assert_int_equal(planner_pull(p, plan), ST_END);
    planner_close(p);
    case_close(&c);
}

/* --- rows in and out -------------------------------------------------------------------------- */

static void without_lookahead_every_row_goes_home_after_each_use(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 2, 0);
    expect_job(&cfg, 2, (const uint64_t[]){7, 8, 8, 9},
               (const char *const[]){"slot 0 1 fetch 7>0* 8>1*",
                                     "slot 1 0 fetch 8>1*@0 9>0* evict 7<0@0 8<1@0",
                                     "slot evict 8<1@1 9<0@1"});
}

static void a_row_stays_iff_its_next_use_is_at_most_lookahead_iterations_on(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 1, 2);
    expect_job(&cfg, 6, (const uint64_t[]){7, 8, 7, 9, 9, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0*",
                   "slot 1 fetch 8>1*",              /* 7 stays: next use at 0 + 2    */
                   "slot 0 evict 8<1@1",
                   "slot 0 fetch 9>0* evict 7<0@2",  /* 7 goes: next use at 5 > 2 + 2 */
                   "slot 0",
                   "slot 0 fetch 7>0*@2 evict 9<0@4",
                   "slot evict 7<0@5",
               });
}

static void a_full_cache_gives_up_the_row_used_farthest_ahead(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 1, 9);
    cfg.cap_rows = 2;
    expect_job(&cfg, 5, (const uint64_t[]){7, 8, 9, 8, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0*",
                   "slot 1 fetch 8>1*",
                   "slot 0 fetch 9>0* evict 7<0@0", /* 7 is used at 4, 8 at 3 */
                   "slot 1 evict 9<0@2",
                   "slot 1 fetch 7>1*@0 evict 8<1@3",
                   "slot evict 7<1@4",
               });
}

/* Trainer 0 owns row 7, which only trainer 1 uses at 1, and needs its one slot for row 9. */
static void a_row_that_only_others_use_moves_when_its_owner_is_full(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 9);
    cfg.cap_rows = 1;
    expect_job(&cfg, 2, (const uint64_t[]){7, 8, 9, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0*",
                   "slot 0 fetch 8>0*",
                   "slot 0 fetch 9>0* evict 7<0@0",
                   "slot 0 fetch 7>0*@0 evict 8<0@0",
                   "slot evict 9<0@1",
                   "slot evict 7<0@1",
               });
}

static void a_version_forgotten_is_settled(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 1, 1);
    cfg.remember = 2;
    struct planner_case c = case_by_hand(&cfg, 7, (const uint64_t[]){7, 1, 7, 2, 3, 7, 4});
    struct planner *p = case_planner(&c);
    const int64_t need[7] = {-1, -1, 0, -1, -1, -1, -1}; /* left at 1, again at 3: 3 <= 5 - 2 */
    const int64_t settled[7] = {0, 0, 0, 1, 2, 3, 4};
    for (int i = 0; i < 7; i++) {
        struct plan *plan;
        assert_int_equal(planner_pull(p, &plan), ST_OK);
        assert_int_equal(plan->fetch.n, 1);
        assert_int_equal(plan->fetch.need[0], need[i]);
        assert_int_equal(plan->settled, settled[i]);
        plan_close(plan);
    }
    planner_close(p);
    case_close(&c);
}

static void lists_are_grouped_by_shard(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 6, 0);
    cfg.n_shards = 3;
    expect_job(&cfg, 1, (const uint64_t[]){5, 4, 3, 2, 1, 0},
               (const char *const[]){
                   "slot 0 1 2 3 4 5 fetch 3>2* 0>5* 4>1* 1>4* 5>0* 2>3*",
                   "slot evict 3<2@0 0<5@0 4<1@0 1<4@0 5<0@0 2<3@0",
               });
}

/* --- exchanges -------------------------------------------------------------------------------- */

static void a_row_used_again_at_once_is_exchanged_urgently(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 5);
    expect_job(&cfg, 2, (const uint64_t[]){7, 7, 7, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0* g<1 0.1 v>1 0", "slot 0 fetch 7>0 g>0 0.1 v<0 0",
                   "slot 0 g<1 0.1", "slot 0 g>0 0.1",
                   "slot evict 7<0@1", "slot",
               });
}

static void a_row_used_again_two_later_sends_its_gradient_now_and_its_value_late(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 5);
    expect_job(&cfg, 3, (const uint64_t[]){7, 7, 1, 2, 7, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0* g<1 0.1", "slot 0 fetch 7>0 g>0 0.1",
                   "slot 1 fetch 1>1* v>1 | 0", "slot 0 fetch 2>0* v<0 | 0",
                   "slot 0 evict 1<1@1 g<1 0.1", "slot 0 evict 2<0@1 g>0 0.1",
                   "slot evict 7<0@2", "slot",
               });
}

static void a_row_used_again_three_later_defers_both(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 5);
    expect_job(&cfg, 4, (const uint64_t[]){7, 7, 1, 2, 1, 2, 7, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0* g<1 | 0.1", "slot 0 fetch 7>0 g>0 | 0.1",
                   "slot 1 fetch 1>1*", "slot 0 fetch 2>0*",
                   "slot 1 v>1 | 0", "slot 0 v<0 | 0",
                   "slot 0 evict 1<1@2 g<1 0.1", "slot 0 evict 2<0@2 g>0 0.1",
                   "slot evict 7<0@3", "slot",
               });
}

/* As above, but trainer 0 must give row 7 up at boundary 1, with its gradient in. */
static void a_row_that_leaves_at_the_next_boundary_defers_nothing(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 5);
    cfg.cap_rows = 1;
    expect_job(&cfg, 4, (const uint64_t[]){7, 7, 1, 2, 1, 2, 7, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0* g<1 0.1", "slot 0 fetch 7>0 g>0 0.1",
                   "slot 0 fetch 1>0* evict 7<0@0", "slot 0 fetch 2>0*",
                   "slot 0", "slot 0",
                   "slot 0 fetch 7>0*@0 evict 1<0@2 g<1 0.1",
                   "slot 0 fetch 7>0@0 evict 2<0@2 g>0 0.1",
                   "slot evict 7<0@3", "slot",
               });
}

/* Three trainers of eight slices: runs [0,2), [2,5), [5,8); nodes 0 | 2, 4 | 5, 6. */
static void a_trainer_sends_one_sum_for_each_node_of_its_run(void **state)
{
    struct planner_cfg cfg = case_cfg(3, 8, 0);
    expect_job(&cfg, 1, (const uint64_t[]){7, 7, 9, 7, 7, 9, 7, 9},
               (const char *const[]){
                   "slot 0 0 fetch 7>0* g<1 0.2 0.4 g<2 0.6",
                   "slot 1 0 0 fetch 7>0 9>1* g>0 0.2 0.4 g<2 1.5 1.6",
                   "slot 1 0 1 fetch 7>0 9>1 g>0 0.6 g>1 1.5 1.6",
                   "slot evict 7<0@0",
                   "slot evict 9<1@0",
                   "slot",
               });
}

static void a_user_that_uses_the_row_again_becomes_its_owner(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 5);
    expect_job(&cfg, 2, (const uint64_t[]){7, 7, 8, 7},
               (const char *const[]){
                   "slot 0 fetch 7>0 g>1 0.0", "slot 0 fetch 7>0* g<0 0.0",
                   "slot 0 fetch 8>0*", "slot 0",
                   "slot evict 8<0@1", "slot evict 7<0@1",
               });
}

static void else_the_user_that_owns_fewest_rows_does(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 4, 0); /* trainer 0: two samples, trainer 1: two */
    expect_job(&cfg, 1, (const uint64_t[]){5, 7, 7, 7},
               (const char *const[]){
                   "slot 0 1 fetch 5>0* 7>1 g>1 1.0", "slot 0 0 fetch 7>0* g<0 0.0",
                   "slot evict 5<0@0", "slot evict 7<0@0",
               });
}

/* --- evaluation ------------------------------------------------------------------------------- */

static void expect_eval(struct planner *p, const struct samples *s, int64_t iteration,
                        const char *const *want)
{
    struct plan *plan[MAX];
    assert_int_equal(planner_eval(p, s, 1, plan), ST_OK);
    uint32_t n = plan[0]->n_peers;
    for (uint32_t t = 0; t < n; t++) {
        struct text x = text_of(plan[t]);
        assert_string_equal(x.s, want[t]);
        assert_int_equal(plan[t]->kind, PLAN_EVAL);
        assert_int_equal(plan[t]->iteration, iteration);
        assert_int_equal(plan[t]->eval_last, 1);
    }
    case_close_plans(plan, n);
}

/* Row 7 is evicted and row 9 fetched at boundary 1, which is decided when plan 0 is out: an
 * evaluation before it still finds 7 with its owner and 9 on its server. */
static void evaluation_reads_rows_where_they_are_before_the_next_boundary(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 0);
    struct planner_case c = case_by_hand(&cfg, 2, (const uint64_t[]){7, 8, 9, 9});
    struct planner_case e = case_by_hand(&cfg, 2, (const uint64_t[]){7, 7, 9, 8});
    struct planner *p = case_planner(&c);
    expect_eval(p, &e.batch[0], 0, (const char *const[]){"slot 0 fetch 7>0", "slot 0 fetch 7>0"});
    expect(p, (const char *const[]){"slot 0 fetch 7>0*", "slot 0 fetch 8>0*"});
    expect_eval(p, &e.batch[0], 1, (const char *const[]){"slot 0 v>1 0 copy 0>0", "slot 0 v<0 0"});
    expect_eval(p, &e.batch[1], 1, (const char *const[]){"slot 0 fetch 9>0", "slot 0 copy 0>0"});
    expect(p, (const char *const[]){"slot 0 fetch 9>0* evict 7<0@0 g<1 0.1",
                                    "slot 0 fetch 9>0 evict 8<0@0 g>0 0.1"});
    expect_eval(p, &e.batch[1], 2, (const char *const[]){"slot 0 copy 0>0", "slot 0 fetch 8>0@0"});
    expect(p, (const char *const[]){"slot evict 9<0@1", "slot"});
    expect_eval(p, &e.batch[1], 2,
                (const char *const[]){"slot 0 fetch 9>0@1", "slot 0 fetch 8>0@0"});
    planner_close(p);
    case_close(&c);
    case_close(&e);
}

static void steps_are_numbered_over_all_kinds(void **state)
{
    struct planner_cfg cfg = case_cfg(2, 2, 0);
    struct planner_case c = case_by_hand(&cfg, 1, (const uint64_t[]){7, 8});
    struct planner *p = case_planner(&c);
    struct plan *plan[2];
    for (uint64_t seq = 0; seq < 4; seq++) {
        bool eval = seq == 1 || seq == 3;
        assert_int_equal(eval ? planner_eval(p, &c.batch[0], 0, plan) : planner_pull(p, plan),
                         ST_OK);
        assert_int_equal(plan[0]->seq, seq);
        assert_int_equal(plan[1]->seq, seq);
        case_close_plans(plan, 2);
    }
    planner_close(p);
    case_close(&c);
}

/* --- the ends of a job ------------------------------------------------------------------------ */

static void no_batches_no_plans(void **state)
{
    struct planner_cfg cfg = case_cfg(1, 1, 3);
    struct planner *p = case_open(&cfg);
    struct plan *plan;
    assert_int_equal(planner_pull(p, &plan), ST_BUSY);
    planner_end(p);
    assert_int_equal(planner_pull(p, &plan), ST_END);
    planner_close(p);
}

static void a_plan_waits_for_lookahead_batches_behind_it(void **state)
{
    const uint32_t lookahead[] = {0, 1, 2, 3}, needed[] = {2, 2, 3, 4};
    for (int k = 0; k < 4; k++) {
        struct planner_cfg cfg = case_cfg(1, 1, lookahead[k]);
        struct planner_case c = case_by_hand(&cfg, 4, (const uint64_t[]){1, 2, 3, 4});
        struct planner *p = case_open(&cfg);
        struct plan *plan;
        for (uint32_t i = 0; i < needed[k]; i++) {
            assert_int_equal(planner_pull(p, &plan), ST_BUSY);
            assert_int_equal(planner_push(p, &c.batch[i]), ST_OK);
        }
        assert_int_equal(planner_pull(p, &plan), ST_OK);
        plan_close(plan);
        assert_int_equal(planner_pull(p, &plan), ST_BUSY);
        planner_close(p);
        case_close(&c);
    }
}

/* Three samples of eight: slice 0 is full, slice 1 has one, slices 2 and 3 have none. */
static void a_short_last_batch_fills_the_first_slices(void **state)
{
    struct planner_cfg cfg = case_cfg(3, 4, 0); /* runs [0,1), [1,2), [2,4) */
    cfg.global_batch = 8;
    struct planner_case c = case_by_hand(&cfg, 1, (const uint64_t[]){1, 2, 3, 4, 5, 6, 7, 8});
    const uint32_t n_samples[3] = {2, 1, 0};
    c.batch[0].n = 3;
    struct planner *p = case_planner(&c);
    struct plan *plan[3];
    assert_int_equal(planner_pull(p, plan), ST_OK);
    for (int t = 0; t < 3; t++) {
        assert_int_equal(plan[t]->batch_total, 3);
        assert_int_equal(plan[t]->n_samples, n_samples[t]);
    }
    assert_true(plan[0]->label[1] == 1.0f && plan[1]->label[0] == 2.0f);
    case_close_plans(plan, 3);
    planner_close(p);
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_lookahead_every_row_goes_home_after_each_use),
        cmocka_unit_test(a_row_stays_iff_its_next_use_is_at_most_lookahead_iterations_on),
        cmocka_unit_test(a_full_cache_gives_up_the_row_used_farthest_ahead),
        cmocka_unit_test(a_row_that_only_others_use_moves_when_its_owner_is_full),
        cmocka_unit_test(a_version_forgotten_is_settled),
        cmocka_unit_test(lists_are_grouped_by_shard),
        cmocka_unit_test(a_row_used_again_at_once_is_exchanged_urgently),
        cmocka_unit_test(a_row_used_again_two_later_sends_its_gradient_now_and_its_value_late),
        cmocka_unit_test(a_row_used_again_three_later_defers_both),
        cmocka_unit_test(a_row_that_leaves_at_the_next_boundary_defers_nothing),
        cmocka_unit_test(a_trainer_sends_one_sum_for_each_node_of_its_run),
        cmocka_unit_test(a_user_that_uses_the_row_again_becomes_its_owner),
        cmocka_unit_test(else_the_user_that_owns_fewest_rows_does),
        cmocka_unit_test(evaluation_reads_rows_where_they_are_before_the_next_boundary),
        cmocka_unit_test(steps_are_numbered_over_all_kinds),
        cmocka_unit_test(no_batches_no_plans),
        cmocka_unit_test(a_plan_waits_for_lookahead_batches_behind_it),
        cmocka_unit_test(a_short_last_batch_fills_the_first_slices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
