/* The oracle over the local transport: which samples make which batch, where evaluations come, that
 * plans are bounded, repeatable and end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/oracle_case.h"

/* The plans of one step, decoded, a trainer each. NULL behind the last. */
static bool pull(struct oracle_case *f, uint64_t seq, struct plan *plan[N])
{
    struct plan_limits lim = {.n_trainers = N, .n_tables = F, .dense_features = DENSE,
                              .cap_rows = config_cache_rows(&f->config)};
    for (uint32_t t = 0; t < N; t++) {
        struct msg *reply;
        struct rpc_header h;
        enum st st = oracle_ask(f, t, seq, &reply, NULL);
        if (st == ST_END) return false;
        assert_int_equal(st, ST_OK);
        assert_int_equal(plan_decode(reply->data, reply->len, &lim, &h, &plan[t]), ST_OK);
        msg_close(reply);
        assert_true(h.job == JOB);
        assert_int_equal(h.attempt, ATTEMPT);
        assert_int_equal(h.role, ROLE_ORACLE);
        assert_int_equal(h.iteration, plan[t]->iteration);
        assert_true(plan[t]->seq == seq);
    }
    return true;
}

/* The global batch of a step holds samples first, first + 1, ... (mod `wrap`) of the file. */
static void assert_samples(struct plan *const plan[N], uint32_t n, int first, int wrap)
{
    uint32_t at = 0;
    for (uint32_t t = 0; t < N; t++) {
        assert_int_equal(plan[t]->batch_total, n);
        for (uint32_t b = 0; b < plan[t]->n_samples; b++, at++) {
            int row = (first + (int)at) % wrap;
            assert_true(plan[t]->dense[b * DENSE] == (float)log1p(row));
            assert_true(plan[t]->label[b] == (float)(row % 2));
        }
    }
    assert_int_equal(at, n);
}

/* Follow the whole job. Steps as text: "T8" a training iteration of 8 samples, "e8" and "E8" an
 * evaluation batch and the last of its evaluation, "F" the flush. Training samples follow each
 * other modulo `rows`; every evaluation reads the file's samples from `eval_first` on. */
static void assert_steps(struct oracle_case *f, int rows, int eval_first, const char *want)
{
    char steps[512] = "";
    struct plan *plan[N];
    int trained = 0, evaluated = 0, iteration = 0;
    uint64_t seq = 0;
    oracle_begin(f);
    for (; pull(f, seq, plan); seq++) {
        char step[16] = "F";
        uint32_t n = plan[0]->batch_total;
        assert_int_equal(plan[0]->iteration, iteration);
        if (plan[0]->kind == PLAN_TRAIN) {
            snprintf(step, sizeof(step), "T%u", n);
            assert_samples(plan, n, trained, rows);
            trained += (int)n;
            iteration++;
        } else if (plan[0]->kind == PLAN_EVAL) {
            snprintf(step, sizeof(step), "%c%u", plan[0]->eval_last ? 'E' : 'e', n);
            assert_samples(plan, n, eval_first + evaluated, 1 << 20);
            evaluated = plan[0]->eval_last ? 0 : evaluated + (int)n;
        }
        if (seq > 0) strcat(steps, " ");
        strcat(steps, step);
        for (uint32_t t = 0; t < N; t++) plan_close(plan[t]);
    }
    assert_string_equal(steps, want);
    for (uint32_t t = 0; t < N; t++) { /* as often as one likes */
        assert_oracle_refuses(f, t, seq, ST_END, "no more plans");
        assert_oracle_refuses(f, t, seq, ST_END, "no more plans");
    }
    assert_int_equal(oracle_status(f->oracle), ST_OK);
    assert_int_equal(oracle_told(f->oracle), 0);
    oracle_end(f);
}

/* --- which samples ---------------------------------------------------------------------------- */

static void iterations_run_over_the_end_of_the_data_into_its_start(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.iterations = 5;
    assert_steps(&f, 10, 0, "T8 T8 T8 T8 T8 F");
    f.config.train.iterations = 1;
    assert_steps(&f, 10, 0, "T8 F");
    oracle_teardown(&f);
}

static void a_batch_may_be_longer_than_the_data(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 3);
    f.config.train.iterations = 2;
    assert_steps(&f, 3, 0, "T8 T8 F");
    oracle_teardown(&f);
}

static void epochs_end_with_a_short_batch_where_they_do_not_divide(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.epochs = 3;
    assert_steps(&f, 10, 0, "T8 T8 T8 T6 F");
    f.config.train.epochs = 4;
    assert_steps(&f, 10, 0, "T8 T8 T8 T8 T8 F");
    f.config.data.train_rows = 5;
    f.config.data.eval_rows = 1;
    f.config.train.epochs = 1;
    assert_steps(&f, 5, 5, "T5 F E1");
    oracle_teardown(&f);
}

static void evaluations_come_between_iterations_and_after_the_flush(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 23);
    f.config.data.train_rows = 10;
    f.config.train.iterations = 5;
    assert_steps(&f, 10, 10, "T8 T8 T8 T8 T8 F e8 E5");
    f.config.run.eval_every = 2;
    assert_steps(&f, 10, 10, "T8 T8 e8 E5 T8 T8 e8 E5 T8 F e8 E5");
    f.config.train.iterations = 4; /* none between the last iteration and the flush */
    assert_steps(&f, 10, 10, "T8 T8 e8 E5 T8 T8 F e8 E5");
    f.config.oracle.lookahead = 0;
    assert_steps(&f, 10, 10, "T8 T8 e8 E5 T8 T8 F e8 E5");
    f.config.train.iterations = 0;
    f.config.train.epochs = 2; /* the end is met, not known */
    assert_steps(&f, 10, 10, "T8 T8 e8 E5 T4 F e8 E5");
    f.config.run.eval_every = 3;
    assert_steps(&f, 10, 10, "T8 T8 T4 F e8 E5");
    oracle_teardown(&f);
}

static void an_evaluation_that_fills_its_last_batch_has_no_empty_one(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    oracle_data(f.eval_path, 100, 16, -1);
    f.config.data.eval_path = f.eval_path;
    f.config.train.iterations = 2;
    f.config.run.eval_every = 1;
    assert_steps(&f, 10, 100, "T8 e8 E8 T8 F e8 E8");
    f.config.data.eval_rows = 8;
    assert_steps(&f, 10, 100, "T8 E8 T8 F E8");
    oracle_teardown(&f);
}

/* --- handing out ------------------------------------------------------------------------------ */

static void a_plan_asked_for_again_is_the_same_bytes(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.iterations = 5;
    oracle_begin(&f);
    for (uint64_t seq = 0; seq < 6; seq++) {
        struct msg *a, *b;
        assert_int_equal(oracle_ask(&f, 1, seq, &a, NULL), ST_OK);
        assert_int_equal(oracle_ask(&f, 1, seq, &b, NULL), ST_OK);
        assert_int_equal(a->len, b->len);
        assert_memory_equal(a->data, b->data, a->len);
        msg_close(a);
        msg_close(b);
        assert_int_equal(oracle_ask(&f, 0, seq, &a, NULL), ST_OK); /* lets the planner go on */
        msg_close(a);
    }
    oracle_teardown(&f);
}

static void another_oracle_makes_the_same_plans(void **state)
{
    enum { STEPS = 6 };
    struct msg *first[STEPS];
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.iterations = STEPS - 1;
    f.config.cluster.trainers = 1;
    for (int again = 0; again < 2; again++) {
        oracle_begin(&f);
        for (uint64_t seq = 0; seq < STEPS; seq++) {
            struct msg *plan;
            assert_int_equal(oracle_ask(&f, 0, seq, &plan, NULL), ST_OK);
            if (again == 0) {
                first[seq] = plan;
                continue;
            }
            assert_int_equal(plan->len, first[seq]->len);
            assert_memory_equal(plan->data, first[seq]->data, plan->len);
            msg_close(plan);
            msg_close(first[seq]);
        }
        oracle_end(&f);
    }
    oracle_teardown(&f);
}

static void plans_out_of_order_are_refused(void **state)
{
    struct oracle_case f;
    struct msg *reply;
    oracle_setup(&f, 10);
    f.config.train.iterations = 5;
    oracle_begin(&f);
    assert_oracle_refuses(&f, 0, 3, ST_BADMSG, "plan 3 asked before plan 0");
    for (uint64_t seq = 0; seq < 2; seq++) {
        assert_int_equal(oracle_ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    assert_oracle_refuses(&f, 0, 0, ST_BADMSG, "plan 0 asked after 1");
    assert_oracle_refuses(&f, 0, 3, ST_BADMSG, "plan 3 asked after 1");
    assert_oracle_refuses(&f, 0, UINT64_MAX, ST_BADMSG, "asked after 1");
    assert_int_equal(oracle_ask(&f, 0, 1, &reply, NULL), ST_OK); /* none of this changed anything */
    msg_close(reply);
    oracle_teardown(&f);
}

static void the_planner_waits_for_the_slowest_trainer(void **state)
{
    enum { MOST = QUEUE + 1 }; /* plans kept for a trainer that has not asked */
    struct oracle_case f;
    struct msg *reply;
    struct pending slow, p;
    oracle_setup(&f, 10);
    f.config.train.iterations = 50;
    oracle_begin(&f);
    for (uint64_t seq = 0; seq < MOST; seq++) {
        assert_int_equal(oracle_ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    oracle_ask_start(&f, &slow, 0, MOST, 200);
    assert_int_equal(pending_wait(&slow, &reply), ST_TIMEOUT); /* trainer 1 holds it up */
    oracle_ask_start(&f, &slow, 0, MOST, PENDING_MS);
    for (uint64_t seq = 0; seq < 2; seq++) { /* it starts, and has done with plan 0 */
        assert_false(pending_done(&slow));
        assert_int_equal(oracle_ask(&f, 1, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    assert_int_equal(pending_wait(&slow, &reply), ST_OK);
    msg_close(reply);
    oracle_ask_start(&f, &slow, 0, MOST + 1, PENDING_MS); /* and now this one is not there */
    oracle_ask_start(&f, &p, 0, MOST + 1, PENDING_MS);
    assert_int_equal(pending_wait(&slow, &reply), ST_CANCELLED);
    assert_oracle_refuses(&f, 0, MOST + 2, ST_BADMSG, "plan 5 asked before plan 4 was there");
    assert_false(pending_done(&p));
    assert_int_equal(oracle_ask(&f, 1, 2, &reply, NULL), ST_OK);
    msg_close(reply);
    assert_int_equal(pending_wait(&p, &reply), ST_OK);
    msg_close(reply);
    oracle_teardown(&f);
}

static void closing_fails_who_waits(void **state)
{
    struct oracle_case f;
    struct msg *reply;
    struct pending p;
    oracle_setup(&f, 10);
    f.config.train.iterations = 50;
    oracle_begin(&f);
    for (uint64_t seq = 0; seq <= QUEUE; seq++) {
        assert_int_equal(oracle_ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    oracle_ask_start(&f, &p, 0, QUEUE + 1, PENDING_MS);
    oracle_end(&f);
    assert_int_equal(pending_wait(&p, &reply), ST_CANCELLED);
    assert_string_equal(p.text, "the oracle is closing");
    oracle_teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(iterations_run_over_the_end_of_the_data_into_its_start),
        cmocka_unit_test(a_batch_may_be_longer_than_the_data),
        cmocka_unit_test(epochs_end_with_a_short_batch_where_they_do_not_divide),
        cmocka_unit_test(evaluations_come_between_iterations_and_after_the_flush),
        cmocka_unit_test(an_evaluation_that_fills_its_last_batch_has_no_empty_one),
        cmocka_unit_test(a_plan_asked_for_again_is_the_same_bytes),
        cmocka_unit_test(another_oracle_makes_the_same_plans),
        cmocka_unit_test(plans_out_of_order_are_refused),
        cmocka_unit_test(the_planner_waits_for_the_slowest_trainer),
        cmocka_unit_test(closing_fails_who_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
