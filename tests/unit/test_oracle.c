/* The oracle over the local transport: which samples make which batch, where evaluations come, that
 * plans are bounded, repeatable and end, and that trainers hear of what went wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/row.h"
#include "oracle/oracle.h"
#include "oracle/outbox.h"
#include "proto/codec.h"
#include "tests/support/caught.h"
#include "tests/support/pending.h"

enum { B = 8, S = 4, N = 2, F = 3, DENSE = 2, QUEUE = 2, ATTEMPT = 3 };
static uint64_t TABLES[F] = {50, 7, 1000};
static const uint64_t JOB = 0x1234;

struct fixture {
    char dir[32], path[64], eval_path[64];
    struct config config;
    struct transport *transport;
    struct oracle *oracle;
    struct rpc_peer *peer;
};

/* Sample `row` of a file: its first dense value says which it is. `bad`: a line that is none. */
static void write_file(const char *path, int first, int rows, int bad)
{
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    for (int r = first; r < first + rows; r++) {
        if (r == bad) fprintf(out, "1\tthis is no sample\n");
        else fprintf(out, "%d\t%d\t1\t%x\t%x\t%x\n", r % 2, r, r, r * 3, r * 7);
    }
    assert_int_equal(fclose(out), 0);
}

/* A job on a file of `rows` samples; trains on all of them unless told otherwise. */
static void setup(struct fixture *f, int rows)
{
    *f = (struct fixture){.dir = "/tmp/test_oracle_XXXXXX"};
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof(f->path), "%s/train.tsv", f->dir);
    snprintf(f->eval_path, sizeof(f->eval_path), "%s/eval.tsv", f->dir);
    write_file(f->path, 0, rows, -1);
    struct config *c = &f->config;
    c->data.format = DATA_CRITEO_TSV;
    c->data.path = f->path;
    c->model.dense_features = DENSE;
    c->model.dim = 4;
    c->model.tables = TABLES;
    c->model.n_tables = F;
    c->train.global_batch = B;
    c->train.slices = S;
    c->oracle.lookahead = 3;
    c->oracle.queue = QUEUE;
    c->cluster.trainers = N;
    c->cluster.servers = c->cluster.server_threads = 1;
    c->cluster.timeout_s = 20;
    assert_int_equal(transport_open(TRANSPORT_LOCAL, &f->transport), ST_OK);
}

static void start(struct fixture *f)
{
    struct oracle_cfg cfg = {.config = &f->config, .transport = f->transport, .address = "oracle",
                             .job = JOB, .attempt = ATTEMPT};
    assert_int_equal(oracle_start(&cfg, &f->oracle), ST_OK);
    assert_string_equal(oracle_address(f->oracle), "oracle");
    assert_int_equal(rpc_connect(f->transport, "oracle", &f->peer), ST_OK);
}

static void stop(struct fixture *f)
{
    oracle_close(f->oracle);
    rpc_peer_close(f->peer);
    f->oracle = NULL;
}

static void teardown(struct fixture *f)
{
    if (f->oracle != NULL) stop(f);
    transport_close(f->transport);
    unlink(f->path);
    unlink(f->eval_path);
    rmdir(f->dir);
}

static struct rpc_header header(uint32_t rank)
{
    return (struct rpc_header){.job = JOB, .attempt = ATTEMPT, .role = ROLE_TRAINER, .rank = rank};
}

static void ask_start(struct fixture *f, struct pending *p, uint32_t rank, uint64_t seq,
                      uint32_t timeout_ms)
{
    struct rpc_header h = header(rank);
    struct msg *req;
    assert_int_equal(plan_request_encode(&h, seq, &req), ST_OK);
    pending_send(p, f->peer, RPC_PLAN, req, timeout_ms);
}

static enum st ask(struct fixture *f, uint32_t rank, uint64_t seq, struct msg **reply,
                   char text[256])
{
    struct pending p;
    ask_start(f, &p, rank, seq, PENDING_MS);
    enum st st = pending_wait(&p, reply);
    if (text != NULL) memcpy(text, p.text, sizeof(p.text));
    return st;
}

static void assert_refused(struct fixture *f, uint32_t rank, uint64_t seq, enum st want,
                           const char *why)
{
    struct msg *reply;
    char text[256];
    assert_int_equal(ask(f, rank, seq, &reply, text), want);
    if (strstr(text, why) == NULL) fail_msg("'%s' is not in '%s'", why, text);
}

/* The plans of one step, decoded, a trainer each. NULL behind the last. */
static bool pull(struct fixture *f, uint64_t seq, struct plan *plan[N])
{
    struct plan_limits lim = {.n_trainers = N, .n_tables = F, .dense_features = DENSE,
                              .cap_rows = config_cache_rows(&f->config)};
    for (uint32_t t = 0; t < N; t++) {
        struct msg *reply;
        struct rpc_header h;
        enum st st = ask(f, t, seq, &reply, NULL);
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
static void assert_steps(struct fixture *f, int rows, int eval_first, const char *want)
{
    char steps[512] = "";
    struct plan *plan[N];
    int trained = 0, evaluated = 0, iteration = 0;
    uint64_t seq = 0;
    start(f);
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
        assert_refused(f, t, seq, ST_END, "no more plans");
        assert_refused(f, t, seq, ST_END, "no more plans");
    }
    assert_int_equal(oracle_status(f->oracle), ST_OK);
    assert_int_equal(oracle_told(f->oracle), 0);
    stop(f);
}

/* --- which samples ---------------------------------------------------------------------------- */

static void iterations_run_over_the_end_of_the_data_into_its_start(void **state)
{
    struct fixture f;
    setup(&f, 10);
    f.config.train.iterations = 5;
    assert_steps(&f, 10, 0, "T8 T8 T8 T8 T8 F");
    f.config.train.iterations = 1;
    assert_steps(&f, 10, 0, "T8 F");
    teardown(&f);
}

static void a_batch_may_be_longer_than_the_data(void **state)
{
    struct fixture f;
    setup(&f, 3);
    f.config.train.iterations = 2;
    assert_steps(&f, 3, 0, "T8 T8 F");
    teardown(&f);
}

static void epochs_end_with_a_short_batch_where_they_do_not_divide(void **state)
{
    struct fixture f;
    setup(&f, 10);
    f.config.train.epochs = 3;
    assert_steps(&f, 10, 0, "T8 T8 T8 T6 F");
    f.config.train.epochs = 4;
    assert_steps(&f, 10, 0, "T8 T8 T8 T8 T8 F");
    f.config.data.train_rows = 5;
    f.config.data.eval_rows = 1;
    f.config.train.epochs = 1;
    assert_steps(&f, 5, 5, "T5 F E1");
    teardown(&f);
}

static void evaluations_come_between_iterations_and_after_the_flush(void **state)
{
    struct fixture f;
    setup(&f, 23);
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
    teardown(&f);
}

static void an_evaluation_that_fills_its_last_batch_has_no_empty_one(void **state)
{
    struct fixture f;
    setup(&f, 10);
    write_file(f.eval_path, 100, 16, -1);
    f.config.data.eval_path = f.eval_path;
    f.config.train.iterations = 2;
    f.config.run.eval_every = 1;
    assert_steps(&f, 10, 100, "T8 e8 E8 T8 F e8 E8");
    f.config.data.eval_rows = 8;
    assert_steps(&f, 10, 100, "T8 E8 T8 F E8");
    teardown(&f);
}

/* --- handing out ------------------------------------------------------------------------------ */

static void a_plan_asked_for_again_is_the_same_bytes(void **state)
{
    struct fixture f;
    setup(&f, 10);
    f.config.train.iterations = 5;
    start(&f);
    for (uint64_t seq = 0; seq < 6; seq++) {
        struct msg *a, *b;
        assert_int_equal(ask(&f, 1, seq, &a, NULL), ST_OK);
        assert_int_equal(ask(&f, 1, seq, &b, NULL), ST_OK);
        assert_int_equal(a->len, b->len);
        assert_memory_equal(a->data, b->data, a->len);
        msg_close(a);
        msg_close(b);
        assert_int_equal(ask(&f, 0, seq, &a, NULL), ST_OK); /* lets the planner go on */
        msg_close(a);
    }
    teardown(&f);
}

static void another_oracle_makes_the_same_plans(void **state)
{
    enum { STEPS = 6 };
    struct msg *first[STEPS];
    struct fixture f;
    setup(&f, 10);
    f.config.train.iterations = STEPS - 1;
    f.config.cluster.trainers = 1;
    for (int again = 0; again < 2; again++) {
        start(&f);
        for (uint64_t seq = 0; seq < STEPS; seq++) {
            struct msg *plan;
            assert_int_equal(ask(&f, 0, seq, &plan, NULL), ST_OK);
            if (again == 0) {
                first[seq] = plan;
                continue;
            }
            assert_int_equal(plan->len, first[seq]->len);
            assert_memory_equal(plan->data, first[seq]->data, plan->len);
            msg_close(plan);
            msg_close(first[seq]);
        }
        stop(&f);
    }
    teardown(&f);
}

static void plans_out_of_order_are_refused(void **state)
{
    struct fixture f;
    struct msg *reply;
    setup(&f, 10);
    f.config.train.iterations = 5;
    start(&f);
    assert_refused(&f, 0, 3, ST_BADMSG, "plan 3 asked before plan 0");
    for (uint64_t seq = 0; seq < 2; seq++) {
        assert_int_equal(ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    assert_refused(&f, 0, 0, ST_BADMSG, "plan 0 asked after 1");
    assert_refused(&f, 0, 3, ST_BADMSG, "plan 3 asked after 1");
    assert_refused(&f, 0, UINT64_MAX, ST_BADMSG, "asked after 1");
    assert_int_equal(ask(&f, 0, 1, &reply, NULL), ST_OK); /* none of this changed anything */
    msg_close(reply);
    teardown(&f);
}

static void the_planner_waits_for_the_slowest_trainer(void **state)
{
    enum { MOST = QUEUE + 1 }; /* plans kept for a trainer that has not asked */
    struct fixture f;
    struct msg *reply;
    struct pending slow, p;
    setup(&f, 10);
    f.config.train.iterations = 50;
    start(&f);
    for (uint64_t seq = 0; seq < MOST; seq++) {
        assert_int_equal(ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    ask_start(&f, &slow, 0, MOST, 200);
    assert_int_equal(pending_wait(&slow, &reply), ST_TIMEOUT); /* trainer 1 holds it up */
    ask_start(&f, &slow, 0, MOST, PENDING_MS);
    for (uint64_t seq = 0; seq < 2; seq++) { /* it starts, and has done with plan 0 */
        assert_false(pending_done(&slow));
        assert_int_equal(ask(&f, 1, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    assert_int_equal(pending_wait(&slow, &reply), ST_OK);
    msg_close(reply);
    ask_start(&f, &slow, 0, MOST + 1, PENDING_MS); /* and now this one is not there */
    ask_start(&f, &p, 0, MOST + 1, PENDING_MS);
    assert_int_equal(pending_wait(&slow, &reply), ST_CANCELLED);
    assert_refused(&f, 0, MOST + 2, ST_BADMSG, "plan 5 asked before plan 4 was there");
    assert_false(pending_done(&p));
    assert_int_equal(ask(&f, 1, 2, &reply, NULL), ST_OK);
    msg_close(reply);
    assert_int_equal(pending_wait(&p, &reply), ST_OK);
    msg_close(reply);
    teardown(&f);
}

static void closing_fails_who_waits(void **state)
{
    struct fixture f;
    struct msg *reply;
    struct pending p;
    setup(&f, 10);
    f.config.train.iterations = 50;
    start(&f);
    for (uint64_t seq = 0; seq <= QUEUE; seq++) {
        assert_int_equal(ask(&f, 0, seq, &reply, NULL), ST_OK);
        msg_close(reply);
    }
    ask_start(&f, &p, 0, QUEUE + 1, PENDING_MS);
    stop(&f);
    assert_int_equal(pending_wait(&p, &reply), ST_CANCELLED);
    assert_string_equal(p.text, "the oracle is closing");
    teardown(&f);
}

static void requests_that_are_not_a_trainers_are_refused(void **state)
{
    struct fixture f;
    struct msg *req, *reply;
    struct pending p;
    setup(&f, 10);
    f.config.train.iterations = 5;
    start(&f);
    struct rpc_header bad[5];
    for (int i = 0; i < 5; i++) bad[i] = header(0);
    bad[0].job++;
    bad[1].attempt--;
    bad[2].attempt++;
    bad[3].rank = N;
    bad[4].role = ROLE_TOOL;
    static const char *const WHY[5] = {"job 0000000000001235", "attempt 2 < 3: stale process",
                                       "attempt 4 > 3", "trainers 0 to 1", "trainers 0 to 1"};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(plan_request_encode(&bad[i], 0, &req), ST_OK);
        pending_send(&p, f.peer, RPC_PLAN, req, PENDING_MS);
        assert_int_equal(pending_wait(&p, &reply), ST_BADMSG);
        assert_non_null(strstr(p.text, WHY[i]));
    }
    for (int method = 0; method < RPC_N; method++) {
        assert_int_equal(msg_open(16, &req), ST_OK);
        memset(req->data, 0xff, 16);
        req->len = 16;
        pending_send(&p, f.peer, (enum rpc_method)method, req, PENDING_MS);
        assert_int_equal(pending_wait(&p, &reply), ST_BADMSG);
        assert_non_null(strstr(p.text, method == RPC_PLAN ? "malformed" : "no rows"));
    }
    teardown(&f);
}

/* --- what goes wrong -------------------------------------------------------------------------- */

/* Both trainers ask until they hear `want`, and hear it again. */
static void assert_all_told(struct fixture *f, enum st want, const char *logged)
{
    caught_start();
    start(f);
    for (uint32_t t = 0; t < N; t++) {
        assert_int_equal(oracle_told(f->oracle), 0);
        struct msg *reply;
        char text[256];
        uint64_t seq = 0;
        enum st st;
        while ((st = ask(f, t, seq, &reply, text)) == ST_OK) {
            msg_close(reply);
            seq++;
        }
        assert_int_equal(st, want);
        assert_non_null(strstr(text, "planning stopped"));
        assert_refused(f, t, seq, want, "planning stopped");
    }
    assert_int_equal(oracle_told(f->oracle), 1);
    assert_int_equal(oracle_status(f->oracle), want);
    caught_stop();
    assert_int_equal(caught_lines, 1);
    if (strstr(caught_line, logged) == NULL) fail_msg("'%s' is not in '%s'", logged, caught_line);
    stop(f);
}

static void trainers_hear_of_data_that_cannot_be_read(void **state)
{
    struct fixture f;
    setup(&f, 10);
    f.config.train.iterations = 50;
    write_file(f.path, 0, 40, 2); /* in the first batch */
    assert_all_told(&f, ST_DATA, "train.tsv:3");
    f.config.data.train_rows = 2;
    f.config.train.iterations = 1;
    assert_all_told(&f, ST_DATA, "train.tsv:3"); /* in the held-out rows */
    unlink(f.path);
    assert_all_told(&f, ST_NOINPUT, "train.tsv");
    teardown(&f);
}

static void data_without_a_sample_are_an_error(void **state)
{
    struct fixture f;
    setup(&f, 0);
    f.config.train.iterations = 5;
    assert_all_told(&f, ST_DATA, "0 samples");
    f.config.train.iterations = 0;
    f.config.train.epochs = 2;
    assert_all_told(&f, ST_DATA, "0 samples");
    teardown(&f);
}

static void a_batch_that_no_cache_can_hold_is_an_error(void **state)
{
    struct fixture f;
    setup(&f, 10);
    f.config.train.iterations = 5;
    f.config.cluster.cache_rows = 2;
    assert_all_told(&f, ST_CONFIG, "cache_rows");
    teardown(&f);
}

/* Ask for plan `seq`, once more if the fault hit the request. */
static enum st ask_again(struct fixture *f, uint32_t rank, uint64_t seq)
{
    struct rpc_header h = header(rank);
    enum st st = ST_NOMEM;
    for (int attempt = 0; attempt < 2 && st == ST_NOMEM; attempt++) {
        struct msg *req, *reply;
        struct pending p;
        if (plan_request_encode(&h, seq, &req) != ST_OK) continue;
        pending_send(&p, f->peer, RPC_PLAN, req, PENDING_MS);
        st = pending_wait(&p, &reply);
        if (st == ST_OK) msg_close(reply);
    }
    return st;
}

/* All trainers ask for all plans; what the first that got none was told. */
static enum st run_through(struct fixture *f)
{
    for (uint64_t seq = 0;; seq++)
        for (uint32_t t = 0; t < N; t++) {
            enum st st = ask_again(f, t, seq);
            if (st != ST_OK) return st;
        }
}

static void whatever_allocation_fails_trainers_are_told_and_nothing_leaks(void **state)
{
    struct fixture f;
    setup(&f, 5);
    f.config.train.iterations = 2;
    f.config.data.train_rows = 3;
    struct oracle_cfg cfg = {.config = &f.config, .transport = f.transport, .address = "oracle",
                             .job = JOB, .attempt = ATTEMPT};
    size_t live = mem_live(), not_started = 0, stopped = 0;
    bool fired = true;
    assert_int_equal(rpc_connect(f.transport, "oracle", &f.peer), ST_OK);
    size_t with_peer = mem_live();
    caught_start();
    for (size_t nth = 1; fired; nth++) {
        struct oracle *const untouched = (struct oracle *)&f;
        struct oracle *o = untouched;
        mem_fail_at(nth);
        enum st st = oracle_start(&cfg, &o);
        if (st == ST_OK) {
            enum st told = run_through(&f);
            fired = mem_fail_stop();
            assert_true(told == ST_END || (fired && told == ST_NOMEM));
            stopped += told == ST_NOMEM;
            oracle_close(o);
        } else {
            assert_true(mem_fail_stop());
            assert_int_equal(st, ST_NOMEM);
            assert_ptr_equal(o, untouched);
            not_started++;
        }
        assert_int_equal(mem_live(), with_peer);
    }
    caught_stop();
    assert_in_range(not_started, 4, 10);
    assert_in_range(stopped, 30, 1000);
    rpc_peer_close(f.peer);
    assert_int_equal(mem_live(), live);
    teardown(&f);
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
        cmocka_unit_test(requests_that_are_not_a_trainers_are_refused),
        cmocka_unit_test(trainers_hear_of_data_that_cannot_be_read),
        cmocka_unit_test(data_without_a_sample_are_an_error),
        cmocka_unit_test(a_batch_that_no_cache_can_hold_is_an_error),
        cmocka_unit_test(whatever_allocation_fails_trainers_are_told_and_nothing_leaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
