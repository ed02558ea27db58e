/* The same cases over both transports. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tests/support/rpc_env.h"

/* Long enough for a request to reach the server on a busy machine, and no more. */
enum { SHORT_MS = 500 };

static void messages_of_any_size_come_back_as_they_were(void **state)
{
    struct rpc_env *e = *state;
    const size_t size[] = {0, 1, 63, 64, 65, 4095, 65536, 1000003, 8 << 20, 0, 7};
    for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++)
        assert_true(echo_ok(e->peer, i, size[i]));
}

static void parked_calls_are_answered_in_any_order_from_another_thread(void **state)
{
    struct rpc_env *e = *state;
    enum { N = 16 };
    static const size_t SIZE[4] = {0, 100, 70000, 8 << 20};
    struct result r[N];
    struct msg *sent[N];
    for (size_t i = 0; i < N; i++) {
        r[i] = (struct result)RESULT_INIT;
        sent[i] = random_msg(i, SIZE[i % 4] + i);
        rpc_send(e->peer, RPC_WRITE_BACK, msg_copy(sent[i]->data, sent[i]->len), LONG_MS,
                 result_done, &r[i]);
    }
    rpc_env_wait_parked(e, N);
    for (size_t i = 0; i < N; i++) assert_int_equal(result_calls(&r[i]), 0);
    for (size_t i = N; i-- > 0;) rpc_reply(e->parked[i], e->parked_reply[i]);
    for (size_t i = 0; i < N; i++) {
        result_wait(&r[i]);
        assert_int_equal(r[i].st, ST_OK);
        assert_msg(r[i].reply, sent[i]->data, sent[i]->len);
        msg_close(r[i].reply);
        msg_close(sent[i]);
    }
}

struct echoer { struct rpc_peer *peer; uint64_t seed; bool ok; };

static void *echoer_main(void *arg)
{
    struct echoer *c = arg;
    for (uint64_t i = 0; i < 100; i++)
        c->ok = echo_ok(c->peer, c->seed * 1000 + i, i * 97 * (c->seed % 3)) && c->ok;
    return NULL;
}

static void many_threads_share_one_peer(void **state)
{
    struct rpc_env *e = *state;
    enum { N = 16 };
    pthread_t thread[N];
    struct echoer c[N];
    for (uint64_t i = 0; i < N; i++) {
        c[i] = (struct echoer){e->peer, i, true};
        assert_int_equal(pthread_create(&thread[i], NULL, echoer_main, &c[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], NULL);
        assert_true(c[i].ok);
    }
}

static void a_call_that_nobody_answers_ends_at_its_deadline(void **state)
{
    struct rpc_env *e = *state;
    enum { N = 3 };
    struct result r[N], later = RESULT_INIT;
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), LONG_MS, result_done, &later);
    for (size_t i = 0; i < N; i++) { /* again and again, a later deadline waiting */
        r[i] = (struct result)RESULT_INIT;
        uint64_t start = clock_now_ns();
        rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("y", 1), SHORT_MS, result_done, &r[i]);
        result_wait(&r[i]);
        assert_in_range((clock_now_ns() - start) / 1000000, SHORT_MS - 2, 10000);
        assert_int_equal(r[i].st, ST_TIMEOUT);
        assert_null(r[i].reply);
        assert_string_equal(r[i].text, "no answer within 500 ms");
        assert_true(echo_ok(e->peer, 1, 1 << 20));
    }
    assert_int_equal(result_calls(&later), 0);

    rpc_env_wait_parked(e, 1 + N); /* late answers are dropped; the one in time is not */
    for (int i = 0; i < 1 + N; i++) rpc_reply(e->parked[i], e->parked_reply[i]);
    result_wait(&later);
    assert_int_equal(later.st, ST_OK);
    msg_close(later.reply);
    assert_true(echo_ok(e->peer, 1, 100));
    for (size_t i = 0; i < N; i++) assert_int_equal(result_calls(&r[i]), 1);
}

static void a_late_failure_is_dropped_too(void **state)
{
    struct rpc_env *e = *state;
    struct msg *reply = NULL;
    enum st st = rpc_call_wait(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), SHORT_MS, &reply);
    assert_int_equal(st, ST_TIMEOUT);
    assert_null(reply);
    assert_logged("WriteBack: no answer within 500 ms; is that process still running?");
    rpc_env_wait_parked(e, 1);
    msg_close(e->parked_reply[0]);
    rpc_fail(e->parked[0], ST_CANCELLED, "closing");
    assert_true(echo_ok(e->peer, 1, 100));
}

static void a_peer_that_gives_up_hears_of_all_its_calls_at_once(void **state)
{
    struct rpc_env *e = *state;
    struct result before = RESULT_INIT, after = RESULT_INIT;
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), LONG_MS, result_done, &before);
    rpc_env_wait_parked(e, 1);
    uint64_t start = clock_now_ns();
    rpc_peer_cancel(e->peer);
    result_wait(&before);
    assert_int_equal(before.st, ST_CANCELLED);
    rpc_send(e->peer, RPC_FETCH, msg_copy("y", 1), LONG_MS, result_done, &after);
    result_wait(&after);
    assert_int_equal(after.st, ST_CANCELLED);
    assert_in_range((clock_now_ns() - start) / 1000000, 0, LONG_MS / 2); /* not the deadline */
    rpc_reply(e->parked[0], e->parked_reply[0]); /* too late, and harmless */
    assert_int_equal(result_calls(&before), 1);
    assert_int_equal(result_calls(&after), 1);
}

static void every_failure_arrives_as_it_was_sent(void **state)
{
    struct rpc_env *e = *state;
    static const char *const TEXT[] = {"", "shard 3: row 7 of table 1 is out of range",
                                       "100% of \"E-IO: x\", \xc3\xa9"};
    for (int st = ST_OK + 1; st < ST_N; st++) {
        for (int k = 0; k < 3; k++) {
            struct result r = RESULT_INIT;
            struct msg *req = msg_copy(TEXT[k], strlen(TEXT[k]));
            struct msg *with_code;
            assert_int_equal(msg_open(req->len + 1, &with_code), ST_OK);
            with_code->data[0] = (uint8_t)st;
            memcpy(with_code->data + 1, req->data, req->len);
            with_code->len = req->len + 1;
            msg_close(req);
            rpc_send(e->peer, RPC_DIGEST, with_code, LONG_MS, result_done, &r);
            result_wait(&r);
            assert_int_equal(r.st, st);
            assert_null(r.reply);
            assert_string_equal(r.text, TEXT[k]);
        }
    }
    struct msg *reply;
    uint8_t refusal[] = {ST_PERM, 'n', 'o'};
    assert_int_equal(rpc_call_wait(e->peer, RPC_DIGEST, msg_copy(refusal, 3), LONG_MS, &reply),
                     ST_PERM);
    assert_logged("error[E-PERM]: 127.0.0.1:");
}

static void a_server_that_is_gone_is_unavailable_or_times_out(void **state)
{
    struct rpc_env *e = *state;
    assert_true(echo_ok(e->peer, 1, 100));
    rpc_server_close(e->server);
    e->server = NULL;
    struct msg *reply = NULL;
    enum st st = rpc_call_wait(e->peer, RPC_FETCH, msg_copy("x", 1), 200, &reply);
    assert_true(st == ST_UNAVAILABLE || st == ST_TIMEOUT);
    assert_null(reply);
    assert_logged("is that process still running?");
}

static void *close_server(void *server)
{
    rpc_server_close(server);
    return NULL;
}

static void closing_a_server_ends_its_calls_once(void **state)
{
    struct rpc_env *e = *state;
    struct result r[3];
    for (int i = 0; i < 3; i++) {
        r[i] = (struct result)RESULT_INIT;
        rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("abc", (size_t)i), LONG_MS, result_done, &r[i]);
    }
    rpc_env_wait_parked(e, 3);
    pthread_t closer;
    assert_int_equal(pthread_create(&closer, NULL, close_server, e->server), 0);
    e->server = NULL;
    rpc_reply(e->parked[0], e->parked_reply[0]); /* within the grace */
    for (int i = 0; i < 3; i++) result_wait(&r[i]);
    size_t ok = 0, gone = 0;
    for (int i = 0; i < 3; i++) {
        ok += r[i].st == ST_OK;
        gone += r[i].st == ST_UNAVAILABLE;
        msg_close(r[i].reply);
    }
    assert_int_equal(ok, 1);
    assert_int_equal(gone, 2);
    rpc_reply(e->parked[1], e->parked_reply[1]); /* after the cancelling: the server waits for us */
    msg_close(e->parked_reply[2]);
    rpc_fail(e->parked[2], ST_CANCELLED, "closing");
    pthread_join(closer, NULL);
    rpc_peer_close(e->peer);
    e->peer = NULL;
    for (int i = 0; i < 3; i++) assert_int_equal(result_calls(&r[i]), 1);
}

static void closing_a_peer_waits_for_its_calls(void **state)
{
    struct rpc_env *e = *state;
    struct result r = RESULT_INIT;
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), 150, result_done, &r);
    rpc_env_wait_parked(e, 1);
    rpc_peer_close(e->peer);
    e->peer = NULL;
    assert_int_equal(result_calls(&r), 1);
    assert_int_equal(r.st, ST_TIMEOUT);
    rpc_reply(e->parked[0], e->parked_reply[0]);
}

static void a_second_server_at_an_address_is_refused(void **state)
{
    struct rpc_env *e = *state;
    struct rpc_server *second = NULL;
    const char *taken = rpc_address(e->server);
    assert_int_equal(rpc_serve(e->t, taken, rpc_env_handler, e, &second), ST_CANTCREATE);
    assert_null(second);
    assert_logged("already in use or not ours");
    assert_true(echo_ok(e->peer, 1, 100));
}

/* Let the nth allocation of a call fail, wherever it is: the call ends with ST_NOMEM, and the
 * server answers the next one. */
static void a_call_without_memory_fails_alone(void **state)
{
    struct rpc_env *e = *state;
    size_t injected = 0, failed = 0;
    for (size_t nth = 1;; nth++) {
        struct result r = RESULT_INIT;
        struct msg *req = msg_copy("x", 1);
        mem_fail_at(nth);
        rpc_send(e->peer, RPC_FETCH, req, LONG_MS, result_done, &r);
        result_wait(&r);
        bool fired = mem_fail_stop();
        if (r.st == ST_OK) assert_msg(r.reply, (const uint8_t *)"x", 1);
        else assert_int_equal(r.st, ST_NOMEM);
        msg_close(r.reply);
        log_forget();
        assert_true(echo_ok(e->peer, nth, 100));
        if (!fired) break;
        injected++;
        failed += r.st == ST_NOMEM;
    }
    /* local: call, reply. grpc: call, next request, request's copy, reply, reply's copy; without
     * the next request the call still succeeds. */
    assert_int_equal(injected, e->kind == TRANSPORT_LOCAL ? 2 : 5);
    assert_int_equal(failed, e->kind == TRANSPORT_LOCAL ? 2 : 4);
}

static void starting_without_memory_leaves_nothing_behind(void **state)
{
    struct rpc_env *e = *state;
    size_t injected[3] = {0};
    size_t live = mem_live();
    struct transport *const no_t = (struct transport *)e;
    for (size_t nth = 1;; nth++) {
        struct transport *t = no_t;
        mem_fail_at(nth);
        enum st st = transport_open(e->kind, &t);
        if (!mem_fail_stop()) {
            transport_close(t);
            break;
        }
        injected[0]++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(t, no_t);
        assert_true(live_is(live));
    }
    for (size_t nth = 1;; nth += 1 + nth / 4) { /* grpc posts many requests, all alike */
        struct rpc_server *s = NULL;
        mem_fail_at(nth);
        enum st st = rpc_serve(e->t, "localhost:0", rpc_env_handler, e, &s);
        if (!mem_fail_stop()) {
            rpc_server_close(s);
            break;
        }
        injected[1]++;
        assert_int_equal(st, ST_NOMEM);
        assert_null(s);
        assert_true(live_is(live));
    }
    for (size_t nth = 1;; nth++) {
        struct rpc_peer *p = NULL;
        mem_fail_at(nth);
        enum st st = rpc_connect(e->t, "127.0.0.1:1", &p);
        if (!mem_fail_stop()) {
            rpc_peer_close(p);
            break;
        }
        injected[2]++;
        assert_int_equal(st, ST_NOMEM);
        assert_null(p);
        assert_true(live_is(live));
    }
    log_forget();
    bool local = e->kind == TRANSPORT_LOCAL;
    assert_int_equal(injected[0], 1);
    assert_true(local ? injected[1] == 1 : injected[1] > 10);
    assert_int_equal(injected[2], local ? 1 : 3);
}

static enum transport_kind local_kind = TRANSPORT_LOCAL, grpc_kind = TRANSPORT_GRPC;

#ifdef __SANITIZE_THREAD__
enum { GRPC_TOO = 0 }; /* gRPC is not instrumented: its locking would look like races */
#else
enum { GRPC_TOO = 1 };
#endif

#define CASE(kind, test) {#test " (" #kind ")", test, rpc_env_setup, rpc_env_teardown, &kind##_kind}
#define CASES(kind)                                                              \
    CASE(kind, messages_of_any_size_come_back_as_they_were),                     \
    CASE(kind, parked_calls_are_answered_in_any_order_from_another_thread),      \
    CASE(kind, many_threads_share_one_peer),                                     \
    CASE(kind, a_call_that_nobody_answers_ends_at_its_deadline),                 \
    CASE(kind, a_late_failure_is_dropped_too),                                   \
    CASE(kind, a_peer_that_gives_up_hears_of_all_its_calls_at_once),             \
    CASE(kind, every_failure_arrives_as_it_was_sent),                            \
    CASE(kind, a_server_that_is_gone_is_unavailable_or_times_out),               \
    CASE(kind, closing_a_server_ends_its_calls_once),                            \
    CASE(kind, closing_a_peer_waits_for_its_calls),                              \
    CASE(kind, a_second_server_at_an_address_is_refused),                        \
    CASE(kind, a_call_without_memory_fails_alone),                               \
    CASE(kind, starting_without_memory_leaves_nothing_behind)

int main(void)
{
    const struct CMUnitTest local[] = {CASES(local)}, grpc[] = {CASES(grpc)};
    int failed = cmocka_run_group_tests(local, NULL, NULL);
    if (GRPC_TOO) failed += cmocka_run_group_tests(grpc, NULL, NULL);
    return failed;
}
