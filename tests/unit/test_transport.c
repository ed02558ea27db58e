/* The same cases over both transports; what only gRPC has is at the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "proto/transport.h"

enum { LONG_MS = 20000, MAX_PARKED = 64 };

/* --- what was logged ----------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_last[1200]; /* under log_lock */
static int log_lines;       /* likewise       */

static void log_sink(void *ctx, const char *line)
{
    pthread_mutex_lock(&log_lock);
    snprintf(log_last, sizeof(log_last), "%s", line);
    log_lines++;
    pthread_mutex_unlock(&log_lock);
}

/* Exactly one line since the last look, and it has `part` in it. */
static void assert_logged(const char *part)
{
    pthread_mutex_lock(&log_lock);
    if (log_lines != 1 || strstr(log_last, part) == NULL)
        fail_msg("%d lines, last: %s; expected one with: %s", log_lines, log_last, part);
    log_lines = 0;
    pthread_mutex_unlock(&log_lock);
}

static void log_forget(void)
{
    pthread_mutex_lock(&log_lock);
    log_lines = 0;
    pthread_mutex_unlock(&log_lock);
}

/* --- a server that echoes, fails or parks, by method --------------------------------------- */

struct env {
    enum transport_kind kind;
    size_t live_before;
    struct transport *t;
    struct rpc_server *server;
    struct rpc_peer *peer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct rpc_call *parked[MAX_PARKED]; /* under lock */
    struct msg *parked_reply[MAX_PARKED];
    size_t n_parked;
};

static struct msg *msg_copy(const void *p, size_t n)
{
    struct msg *m;
    if (msg_open(n, &m) != ST_OK) return NULL;
    if (n > 0) memcpy(m->data, p, n);
    m->len = n;
    return m;
}

static void env_park(struct env *e, struct rpc_call *call, struct msg *reply)
{
    pthread_mutex_lock(&e->lock);
    assert_true(e->n_parked < MAX_PARKED);
    e->parked[e->n_parked] = call;
    e->parked_reply[e->n_parked++] = reply;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Fetch: the request. Digest: failure number req[0] with text req[1..). WriteBack: park. */
static void handler(void *ctx, struct rpc_call *call, enum rpc_method method, const uint8_t *req,
                    size_t len)
{
    struct env *e = ctx;
    if (method == RPC_DIGEST) {
        char text[4096];
        snprintf(text, sizeof(text), "%.*s", (int)len - 1, (const char *)req + 1);
        rpc_fail(call, (enum st)req[0], text);
        return;
    }
    struct msg *m = msg_copy(req, len);
    if (m == NULL) rpc_fail(call, ST_NOMEM, "no memory");
    else if (method == RPC_WRITE_BACK) env_park(e, call, m);
    else rpc_reply(call, m);
}

static struct timespec deadline(uint64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += (time_t)(ms / 1000);
    return t;
}

static void env_wait_parked(struct env *e, size_t n)
{
    struct timespec until = deadline(LONG_MS);
    pthread_mutex_lock(&e->lock);
    while (e->n_parked < n)
        assert_int_equal(pthread_cond_timedwait(&e->changed, &e->lock, &until), 0);
    pthread_mutex_unlock(&e->lock);
}

static int setup(void **state)
{
    struct env *e = calloc(1, sizeof(*e));
    e->kind = *(enum transport_kind *)*state;
    log_forget();
    e->live_before = mem_live();
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    assert_int_equal(transport_open(e->kind, &e->t), ST_OK);
    assert_int_equal(rpc_serve(e->t, "127.0.0.1:0", handler, e, &e->server), ST_OK);
    assert_int_equal(rpc_connect(e->t, rpc_address(e->server), &e->peer), ST_OK);
    *state = e;
    return 0;
}

/* gRPC lets go of messages on threads of its own: wait for it. */
static bool live_is(size_t n)
{
    uint64_t until = clock_now_ns() + UINT64_C(10000000000);
    while (mem_live() != n && clock_now_ns() < until) sched_yield();
    return mem_live() == n;
}

static int teardown(void **state)
{
    struct env *e = *state;
    rpc_peer_close(e->peer);
    rpc_server_close(e->server);
    transport_close(e->t);
    assert_true(live_is(e->live_before));
    assert_int_equal(log_lines, 0); /* nothing was said that the test did not expect */
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
    return 0;
}

/* --- a client's wait ----------------------------------------------------------------------- */

struct result {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int calls; /* under lock, as the rest */
    enum st st;
    struct msg *reply;
    char text[2048];
};
#define RESULT_INIT {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER}

static void result_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct result *r = ctx;
    pthread_mutex_lock(&r->lock);
    r->calls++;
    r->st = st;
    r->reply = reply;
    snprintf(r->text, sizeof(r->text), "%s", text);
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void result_wait(struct result *r)
{
    struct timespec until = deadline(LONG_MS);
    pthread_mutex_lock(&r->lock);
    while (r->calls == 0)
        assert_int_equal(pthread_cond_timedwait(&r->changed, &r->lock, &until), 0);
    pthread_mutex_unlock(&r->lock);
}

static struct msg *random_msg(uint64_t seed, size_t n)
{
    struct msg *m;
    assert_int_equal(msg_open(n, &m), ST_OK);
    for (size_t i = 0; i < n; i += 4) {
        uint32_t w[4];
        if (i % 4096 == 0) rng_words(seed, RNG_SYNTHETIC, i, 0, w);
        w[0] = w[0] * 2654435761u + 1;
        memcpy(m->data + i, w, n - i < 4 ? n - i : 4);
    }
    m->len = n;
    return m;
}

static void assert_msg(const struct msg *m, const uint8_t *p, size_t n)
{
    assert_non_null(m);
    assert_int_equal(m->len, n);
    assert_int_equal((uintptr_t)m->data % 64, 0);
    assert_true(n == 0 || memcmp(m->data, p, n) == 0);
}

/* Send n random bytes, get them back. */
static void echo(struct rpc_peer *p, uint64_t seed, size_t n)
{
    struct msg *sent = random_msg(seed, n);
    struct msg *req = msg_copy(sent->data, n), *reply = NULL;
    assert_int_equal(rpc_call_wait(p, RPC_FETCH, req, LONG_MS, &reply), ST_OK);
    assert_msg(reply, sent->data, n);
    msg_close(reply);
    msg_close(sent);
}

/* --- over both ----------------------------------------------------------------------------- */

static void messages_of_any_size_come_back_as_they_were(void **state)
{
    struct env *e = *state;
    const size_t size[] = {0, 1, 63, 64, 65, 4095, 65536, 1000003, 8 << 20, 0, 7};
    for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++) echo(e->peer, i, size[i]);
}

static void parked_calls_are_answered_in_any_order_from_another_thread(void **state)
{
    struct env *e = *state;
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
    env_wait_parked(e, N);
    for (size_t i = 0; i < N; i++) assert_int_equal(r[i].calls, 0);
    for (size_t i = N; i-- > 0;) rpc_reply(e->parked[i], e->parked_reply[i]);
    for (size_t i = 0; i < N; i++) {
        result_wait(&r[i]);
        assert_int_equal(r[i].st, ST_OK);
        assert_msg(r[i].reply, sent[i]->data, sent[i]->len);
        msg_close(r[i].reply);
        msg_close(sent[i]);
    }
}

struct echoer { struct rpc_peer *peer; uint64_t seed; };

static void *echoer_main(void *arg)
{
    struct echoer *c = arg;
    for (uint64_t i = 0; i < 100; i++) echo(c->peer, c->seed * 1000 + i, i * 97 * (c->seed % 3));
    return NULL;
}

static void many_threads_share_one_peer(void **state)
{
    struct env *e = *state;
    enum { N = 16 };
    pthread_t thread[N];
    struct echoer c[N];
    for (uint64_t i = 0; i < N; i++) {
        c[i] = (struct echoer){e->peer, i};
        assert_int_equal(pthread_create(&thread[i], NULL, echoer_main, &c[i]), 0);
    }
    for (int i = 0; i < N; i++) pthread_join(thread[i], NULL);
}

static void a_call_that_nobody_answers_ends_at_its_deadline(void **state)
{
    struct env *e = *state;
    struct result r = RESULT_INIT, later = RESULT_INIT;
    uint64_t start = clock_now_ns();
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), LONG_MS, result_done, &later);
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("y", 1), 60, result_done, &r);
    result_wait(&r);
    uint64_t ms = (clock_now_ns() - start) / 1000000;
    assert_int_equal(r.st, ST_TIMEOUT);
    assert_null(r.reply);
    assert_string_equal(r.text, "no answer within 60 ms");
    assert_in_range(ms, 58, 5000);
    assert_int_equal(later.calls, 0);

    env_wait_parked(e, 2); /* the late answers are dropped by the one, taken by the other */
    for (int i = 0; i < 2; i++) rpc_reply(e->parked[i], e->parked_reply[i]);
    result_wait(&later);
    assert_int_equal(later.st, ST_OK);
    msg_close(later.reply);
    echo(e->peer, 1, 100);
    assert_int_equal(r.calls, 1);
}

static void a_late_failure_is_dropped_too(void **state)
{
    struct env *e = *state;
    struct msg *reply = NULL;
    enum st st = rpc_call_wait(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), 30, &reply);
    assert_int_equal(st, ST_TIMEOUT);
    assert_null(reply);
    assert_logged("WriteBack: no answer within 30 ms; is that process still running?");
    env_wait_parked(e, 1);
    msg_close(e->parked_reply[0]);
    rpc_fail(e->parked[0], ST_CANCELLED, "closing");
    echo(e->peer, 1, 100);
}

static void every_failure_arrives_as_it_was_sent(void **state)
{
    struct env *e = *state;
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
    struct env *e = *state;
    echo(e->peer, 1, 100);
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
    struct env *e = *state;
    struct result r[3];
    for (int i = 0; i < 3; i++) {
        r[i] = (struct result)RESULT_INIT;
        rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("abc", (size_t)i), LONG_MS, result_done, &r[i]);
    }
    env_wait_parked(e, 3);
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
    for (int i = 0; i < 3; i++) assert_int_equal(r[i].calls, 1);
}

static void closing_a_peer_waits_for_its_calls(void **state)
{
    struct env *e = *state;
    struct result r = RESULT_INIT;
    rpc_send(e->peer, RPC_WRITE_BACK, msg_copy("x", 1), 150, result_done, &r);
    env_wait_parked(e, 1);
    rpc_peer_close(e->peer);
    e->peer = NULL;
    assert_int_equal(r.calls, 1);
    assert_int_equal(r.st, ST_TIMEOUT);
    rpc_reply(e->parked[0], e->parked_reply[0]);
}

static void a_second_server_at_an_address_is_refused(void **state)
{
    struct env *e = *state;
    struct rpc_server *second = NULL;
    assert_int_equal(rpc_serve(e->t, rpc_address(e->server), handler, e, &second), ST_CANTCREATE);
    assert_null(second);
    assert_logged("already in use or not ours");
    echo(e->peer, 1, 100);
}

/* Let the nth allocation of a call fail, wherever it is: the call ends with ST_NOMEM, and the
 * server answers the next one. */
static void a_call_without_memory_fails_alone(void **state)
{
    struct env *e = *state;
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
        echo(e->peer, nth, 100);
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
    struct env *e = *state;
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
        enum st st = rpc_serve(e->t, "localhost:0", handler, e, &s);
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

/* --- gRPC only ----------------------------------------------------------------------------- */

static void other_machines_are_refused_without_tls(void **state)
{
    struct env *e = *state;
    static const char *const AWAY[] = {"0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.org:80",
                                       "localhost.example.org:80", "dns:///127.0.0.1:80",
                                       "127.0.0.1.example.org:80", "*:80", "", "127.0.0.10:80"};
    for (size_t i = 0; i < sizeof(AWAY) / sizeof(AWAY[0]); i++) {
        struct rpc_server *s = NULL;
        struct rpc_peer *p = NULL;
        assert_int_equal(rpc_serve(e->t, AWAY[i], handler, e, &s), ST_PERM);
        assert_logged("refusing a non-loopback address without TLS");
        assert_int_equal(rpc_connect(e->t, AWAY[i], &p), ST_PERM);
        assert_logged("refusing a non-loopback address without TLS");
        assert_null(s);
        assert_null(p);
    }
    static const char *const BAD[] = {"127.0.0.1:", "127.0.0.1:x", "localhost:65536",
                                      "127.0.0.1:80,10.0.0.1:80", "[::1]:-1", "127.0.0.1: 80"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct rpc_peer *p = NULL;
        assert_int_equal(rpc_connect(e->t, BAD[i], &p), ST_CONFIG);
        assert_logged("not a port");
        assert_null(p);
    }
}

static void the_kernel_chooses_a_port_that_localhost_reaches(void **state)
{
    struct env *e = *state;
    unsigned port = 0;
    assert_int_equal(sscanf(rpc_address(e->server), "127.0.0.1:%u", &port), 1);
    assert_in_range(port, 1, 65535);
    char name[32];
    snprintf(name, sizeof(name), "localhost:%u", port);
    struct rpc_peer *p;
    assert_int_equal(rpc_connect(e->t, name, &p), ST_OK);
    echo(p, 1, 1000);
    rpc_peer_close(p);
}

static void a_call_waits_for_a_server_that_starts_later(void **state)
{
    struct env *e = *state;
    char dir[] = "/tmp/chanter-test-XXXXXX", address[64];
    assert_non_null(mkdtemp(dir));
    snprintf(address, sizeof(address), "unix:%s/socket", dir);
    struct rpc_peer *p;
    struct rpc_server *s, *second = NULL;
    struct result r = RESULT_INIT;
    assert_int_equal(rpc_connect(e->t, address, &p), ST_OK);
    rpc_send(p, RPC_FETCH, msg_copy("early", 5), LONG_MS, result_done, &r);
    assert_int_equal(rpc_serve(e->t, address, handler, e, &s), ST_OK);
    assert_string_equal(rpc_address(s), address);
    result_wait(&r);
    assert_int_equal(r.st, ST_OK);
    assert_msg(r.reply, (const uint8_t *)"early", 5);
    msg_close(r.reply);
    assert_int_equal(rpc_serve(e->t, address, handler, e, &second), ST_CANTCREATE);
    assert_logged("already in use or not ours");
    echo(p, 1, 1000);
    rpc_peer_close(p);
    rpc_server_close(s);
    unlink(address + strlen("unix:"));
    assert_int_equal(rmdir(dir), 0);
}

static void a_message_above_the_limit_is_refused(void **state)
{
    struct env *e = *state;
    struct result r = RESULT_INIT;
    struct msg *m;
    assert_int_equal(msg_open((64 << 20) + 1, &m), ST_OK);
    m->len = m->cap;
    memset(m->data, 0, m->len);
    rpc_send(e->peer, RPC_FETCH, m, LONG_MS, result_done, &r);
    result_wait(&r);
    assert_int_equal(r.st, ST_BADMSG);
    echo(e->peer, 1, 1000);
}

/* By hand, as a foreign client: returns the status of an empty call of `path`. */
static grpc_status_code foreign_call(const char *address, const char *path)
{
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    grpc_arg direct = {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ENABLE_HTTP_PROXY};
    grpc_channel_args args = {1, &direct};
    grpc_channel *channel = grpc_channel_create(address, plain, &args);
    grpc_completion_queue *cq = grpc_completion_queue_create_for_next(NULL);
    gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                      gpr_time_from_millis(LONG_MS, GPR_TIMESPAN));
    grpc_call *call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                               grpc_slice_from_static_string(path), NULL, until,
                                               NULL);
    grpc_metadata_array initial, trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    grpc_status_code code = GRPC_STATUS_OK;
    grpc_slice details;
    grpc_op op[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                     {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                     {.op = GRPC_OP_RECV_INITIAL_METADATA},
                     {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    op[2].data.recv_initial_metadata.recv_initial_metadata = &initial;
    op[3].data.recv_status_on_client.trailing_metadata = &trailing;
    op[3].data.recv_status_on_client.status = &code;
    op[3].data.recv_status_on_client.status_details = &details;
    assert_int_equal(grpc_call_start_batch(call, op, 4, NULL, NULL), GRPC_CALL_OK);
    assert_int_equal(grpc_completion_queue_next(cq, until, NULL).type, GRPC_OP_COMPLETE);
    grpc_slice_unref(details);
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_call_unref(call);
    grpc_channel_destroy(channel);
    grpc_channel_credentials_release(plain);
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, until, NULL).type != GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(cq);
    return code;
}

static void foreign_calls_that_make_no_sense_are_refused_at_once(void **state)
{
    struct env *e = *state;
    const char *at = rpc_address(e->server);
    for (int i = 0; i < 3; i++)
        assert_int_equal(foreign_call(at, "/chanter.EmbServer/Nope"), GRPC_STATUS_UNIMPLEMENTED);
    assert_int_equal(foreign_call(at, "/chanter.EmbServer/Fetch"), GRPC_STATUS_INVALID_ARGUMENT);
    echo(e->peer, 1, 1000);
}

/* --- table --------------------------------------------------------------------------------- */

static enum transport_kind local_kind = TRANSPORT_LOCAL, grpc_kind = TRANSPORT_GRPC;

#define CASE(kind, test) {#test " (" #kind ")", test, setup, teardown, &kind##_kind}
#define CASES_OF_BOTH(kind)                                                      \
    CASE(kind, messages_of_any_size_come_back_as_they_were),                     \
    CASE(kind, parked_calls_are_answered_in_any_order_from_another_thread),      \
    CASE(kind, many_threads_share_one_peer),                                     \
    CASE(kind, a_call_that_nobody_answers_ends_at_its_deadline),                 \
    CASE(kind, a_late_failure_is_dropped_too),                                   \
    CASE(kind, every_failure_arrives_as_it_was_sent),                            \
    CASE(kind, a_server_that_is_gone_is_unavailable_or_times_out),               \
    CASE(kind, closing_a_server_ends_its_calls_once),                            \
    CASE(kind, closing_a_peer_waits_for_its_calls),                              \
    CASE(kind, a_second_server_at_an_address_is_refused),                        \
    CASE(kind, a_call_without_memory_fails_alone),                               \
    CASE(kind, starting_without_memory_leaves_nothing_behind)

int main(void)
{
    log_set_sink(log_sink, NULL);
    const struct CMUnitTest local[] = {CASES_OF_BOTH(local)};
    int failed = cmocka_run_group_tests(local, NULL, NULL);
#ifndef __SANITIZE_THREAD__ /* gRPC is not instrumented: its threads look like races */
    const struct CMUnitTest grpc[] = {
        CASES_OF_BOTH(grpc),
        CASE(grpc, other_machines_are_refused_without_tls),
        CASE(grpc, the_kernel_chooses_a_port_that_localhost_reaches),
        CASE(grpc, a_call_waits_for_a_server_that_starts_later),
        CASE(grpc, a_message_above_the_limit_is_refused),
        CASE(grpc, foreign_calls_that_make_no_sense_are_refused_at_once),
    };
    failed += cmocka_run_group_tests(grpc, NULL, NULL);
#endif
    return failed;
}
