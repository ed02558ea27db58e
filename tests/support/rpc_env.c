#include "tests/support/rpc_env.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"

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

void assert_logged(const char *part)
{
    pthread_mutex_lock(&log_lock);
    if (log_lines != 1 || strstr(log_last, part) == NULL)
        fail_msg("%d lines, last: %s; expected one with: %s", log_lines, log_last, part);
    log_lines = 0;
    pthread_mutex_unlock(&log_lock);
}

void log_forget(void)
{
    pthread_mutex_lock(&log_lock);
    log_lines = 0;
    pthread_mutex_unlock(&log_lock);
}

/* --- a server that echoes, fails or parks, by method --------------------------------------- */

struct msg *msg_copy(const void *p, size_t n)
{
    struct msg *m;
    if (msg_open(n, &m) != ST_OK) return NULL;
    if (n > 0) memcpy(m->data, p, n);
    m->len = n;
    return m;
}

static void park(struct rpc_env *e, struct rpc_call *call, struct msg *reply)
{
    pthread_mutex_lock(&e->lock);
    CHECK(e->n_parked < MAX_PARKED, "room for parked calls");
    e->parked[e->n_parked] = call;
    e->parked_reply[e->n_parked++] = reply;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

void rpc_env_handler(void *ctx, struct rpc_call *call, enum rpc_method method, const uint8_t *req,
                     size_t len)
{
    struct rpc_env *e = ctx;
    if (method == RPC_DIGEST) {
        char text[4096];
        snprintf(text, sizeof(text), "%.*s", (int)len - 1, (const char *)req + 1);
        rpc_fail(call, (enum st)req[0], text);
        return;
    }
    struct msg *m = msg_copy(req, len);
    if (m == NULL) rpc_fail(call, ST_NOMEM, "no memory");
    else if (method == RPC_WRITE_BACK) park(e, call, m);
    else rpc_reply(call, m);
}

static struct timespec deadline(uint64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += (time_t)(ms / 1000);
    return t;
}

void rpc_env_wait_parked(struct rpc_env *e, size_t n)
{
    struct timespec until = deadline(LONG_MS);
    pthread_mutex_lock(&e->lock);
    while (e->n_parked < n)
        assert_int_equal(pthread_cond_timedwait(&e->changed, &e->lock, &until), 0);
    pthread_mutex_unlock(&e->lock);
}

int rpc_env_setup(void **state)
{
    struct rpc_env *e = calloc(1, sizeof(*e));
    e->kind = *(enum transport_kind *)*state;
    log_set_sink(log_sink, NULL);
    log_forget();
    e->live_before = mem_live();
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    assert_int_equal(transport_open(e->kind, &e->t), ST_OK);
    assert_int_equal(rpc_serve(e->t, "127.0.0.1:0", rpc_env_handler, e, &e->server), ST_OK);
    assert_int_equal(rpc_connect(e->t, rpc_address(e->server), &e->peer), ST_OK);
    *state = e;
    return 0;
}

bool live_is(size_t n)
{
    uint64_t until = clock_now_ns() + UINT64_C(10000000000);
    while (mem_live() != n && clock_now_ns() < until) sched_yield();
    return mem_live() == n;
}

int rpc_env_teardown(void **state)
{
    struct rpc_env *e = *state;
    rpc_peer_close(e->peer);
    rpc_server_close(e->server);
    transport_close(e->t);
    assert_true(live_is(e->live_before));
    assert_int_equal(log_lines, 0); /* nothing was said that the test did not expect */
    log_set_sink(NULL, NULL);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
    return 0;
}

/* --- a client's wait ----------------------------------------------------------------------- */

void result_done(void *ctx, enum st st, struct msg *reply, const char *text)
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

void result_wait(struct result *r)
{
    struct timespec until = deadline(LONG_MS);
    pthread_mutex_lock(&r->lock);
    while (r->calls == 0)
        assert_int_equal(pthread_cond_timedwait(&r->changed, &r->lock, &until), 0);
    pthread_mutex_unlock(&r->lock);
}

int result_calls(struct result *r)
{
    pthread_mutex_lock(&r->lock);
    int calls = r->calls;
    pthread_mutex_unlock(&r->lock);
    return calls;
}

struct msg *random_msg(uint64_t seed, size_t n)
{
    struct msg *m;
    CHECK(msg_open(n, &m) == ST_OK, "memory for a test");
    for (size_t i = 0; i < n; i += 4) {
        uint32_t w[4];
        if (i % 4096 == 0) rng_words(seed, RNG_SYNTHETIC, i, 0, w);
        w[0] = w[0] * 2654435761u + 1;
        memcpy(m->data + i, w, n - i < 4 ? n - i : 4);
    }
    m->len = n;
    return m;
}

void assert_msg(const struct msg *m, const uint8_t *p, size_t n)
{
    assert_non_null(m);
    assert_int_equal(m->len, n);
    assert_int_equal((uintptr_t)m->data % 64, 0);
    assert_true(n == 0 || memcmp(m->data, p, n) == 0);
}

bool echo_ok(struct rpc_peer *p, uint64_t seed, size_t n)
{
    struct msg *sent = random_msg(seed, n), *req = msg_copy(sent->data, n), *reply;
    if (rpc_call_wait(p, RPC_FETCH, req, LONG_MS, &reply) != ST_OK) return false;
    bool same = reply->len == n && (n == 0 || memcmp(reply->data, sent->data, n) == 0);
    msg_close(reply);
    msg_close(sent);
    return same;
}
