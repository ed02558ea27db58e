/* What an oracle refuses, and that trainers hear of what stopped it (I5). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "tests/support/caught.h"
#include "tests/support/oracle_case.h"

static void requests_that_are_not_a_trainers_are_refused(void **state)
{
    struct oracle_case f;
    struct msg *req, *reply;
    struct pending p;
    oracle_setup(&f, 10);
    f.config.train.iterations = 5;
    oracle_begin(&f);
    struct rpc_header bad[5];
    for (int i = 0; i < 5; i++) bad[i] = oracle_header(0);
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
    oracle_teardown(&f);
}

/* Both trainers ask until they hear `want`, and hear it again. */
static void assert_all_told(struct oracle_case *f, enum st want, const char *logged)
{
    caught_start();
    oracle_begin(f);
    for (uint32_t t = 0; t < N; t++) {
        assert_int_equal(oracle_told(f->oracle), 0);
        struct msg *reply;
        char text[256];
        uint64_t seq = 0;
        enum st st;
        while ((st = oracle_ask(f, t, seq, &reply, text)) == ST_OK) {
            msg_close(reply);
            seq++;
        }
        assert_int_equal(st, want);
        assert_non_null(strstr(text, "planning stopped"));
        assert_oracle_refuses(f, t, seq, want, "planning stopped");
    }
    assert_int_equal(oracle_told(f->oracle), 1);
    assert_int_equal(oracle_status(f->oracle), want);
    caught_stop();
    assert_int_equal(caught_lines, 1);
    if (strstr(caught_line, logged) == NULL) fail_msg("'%s' is not in '%s'", logged, caught_line);
    oracle_end(f);
}

static void trainers_hear_of_data_that_cannot_be_read(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.iterations = 50;
    oracle_data(f.path, 0, 40, 2); /* in the first batch */
    assert_all_told(&f, ST_DATA, "train.tsv:3");
    f.config.data.train_rows = 2;
    f.config.train.iterations = 1;
    assert_all_told(&f, ST_DATA, "train.tsv:3"); /* in the held-out rows */
    unlink(f.path);
    assert_all_told(&f, ST_NOINPUT, "train.tsv");
    oracle_teardown(&f);
}

static void data_without_a_sample_are_an_error(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 0);
    f.config.train.iterations = 5;
    assert_all_told(&f, ST_DATA, "0 samples");
    f.config.train.iterations = 0;
    f.config.train.epochs = 2;
    assert_all_told(&f, ST_DATA, "0 samples");
    oracle_teardown(&f);
}

static void a_batch_that_no_cache_can_hold_is_an_error(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 10);
    f.config.train.iterations = 5;
    f.config.cluster.cache_rows = 2;
    assert_all_told(&f, ST_CONFIG, "cache_rows");
    oracle_teardown(&f);
}

/* Ask for plan `seq`, once more if the fault hit the request. */
static enum st ask_again(struct oracle_case *f, uint32_t rank, uint64_t seq)
{
    struct rpc_header h = oracle_header(rank);
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
static enum st run_through(struct oracle_case *f)
{
    for (uint64_t seq = 0;; seq++)
        for (uint32_t t = 0; t < N; t++) {
            enum st st = ask_again(f, t, seq);
            if (st != ST_OK) return st;
        }
}

static void whatever_allocation_fails_trainers_are_told_and_nothing_leaks(void **state)
{
    struct oracle_case f;
    oracle_setup(&f, 5);
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
    oracle_teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_that_are_not_a_trainers_are_refused),
        cmocka_unit_test(trainers_hear_of_data_that_cannot_be_read),
        cmocka_unit_test(data_without_a_sample_are_an_error),
        cmocka_unit_test(a_batch_that_no_cache_can_hold_is_an_error),
        cmocka_unit_test(whatever_allocation_fails_trainers_are_told_and_nothing_leaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
