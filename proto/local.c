/* proto/local.c - roles as threads of one process: a call is a function call. rpc_send runs the
 * handler on the caller's thread; whoever answers runs the callback on his.
 *
 * A call ends once on each side. For the client it ends when somebody calls `done`: the answer, the
 * timer or the closing server, whoever first sets `ended`. For the server it ends when the handler
 * has returned and the call is answered; an answer that comes too late for the client is dropped.
 * The struct lives until both have ended. One lock guards it all and is never held across a
 * handler or a callback. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/transport_impl.h"

struct local_call;
struct local_server;

struct local {
    struct transport base;
    pthread_t timer;               /* calls back for calls whose deadline has passed           */
    pthread_mutex_t lock;          /* guards the rest, and what is said to be `locked` below   */
    pthread_cond_t ended;          /* something ended: for those who close                     */
    pthread_cond_t sooner;         /* for the timer: look again, or stop                       */
    bool stop;
    uint64_t wake_ns;              /* when the timer looks next by itself; UINT64_MAX: never   */
    struct local_call *calls;      /* those whose client waits                                 */
    struct local_server *servers;
    size_t n_peers;
};

struct local_server {
    struct rpc_server base;
    struct local *t;
    rpc_handler *fn;
    void *ctx;
    size_t open;                   /* locked: handlers running + answers owed                  */
    struct local_server *next;     /* locked                                                   */
    char address[];
};

struct local_peer {
    struct rpc_peer base;
    struct local *t;
    size_t waiting;                /* locked: calls that have not called back                  */
    bool cancelled;                /* locked: no call is made any more                         */
    char address[];
};

struct local_call {
    struct rpc_call base;
    struct local *t;
    struct local_server *server;   /* valid until the server's side has ended                  */
    struct local_peer *peer;       /* valid until the client's side has ended                  */
    struct msg *req;
    rpc_done *done;
    void *done_ctx;
    uint32_t timeout_ms;
    uint64_t deadline_ns;
    bool ended;                    /* locked: somebody has called `done`, or is about to       */
    int refs;                      /* locked: callback owed, handler running, answer owed      */
    struct local_call *prev, *next;/* locked                                                   */
};

static const struct transport_ops OPS;

static struct timespec timespec_of(uint64_t ns)
{
    return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

/* Locked. */
static void call_unref(struct local_call *c)
{
    if (--c->refs == 0) mem_free(c);
}

/* Locked. True for the one caller who now has to run the callback. */
static bool call_claim(struct local_call *c)
{
    if (c->ended) return false;
    c->ended = true;
    if (c->prev != NULL) c->prev->next = c->next;
    else c->t->calls = c->next;
    if (c->next != NULL) c->next->prev = c->prev;
    return true;
}

/* Not locked; after call_claim. `c` may be gone afterwards. */
static void call_back(struct local_call *c, enum st st, struct msg *reply, const char *text)
{
    struct local *t = c->t;
    c->done(c->done_ctx, st, reply, text);
    pthread_mutex_lock(&t->lock);
    c->peer->waiting--;
    call_unref(c);
    pthread_cond_broadcast(&t->ended);
    pthread_mutex_unlock(&t->lock);
}

/* Not locked. The handler has returned, or has answered. */
static void server_side_done(struct local_call *c)
{
    struct local *t = c->t;
    pthread_mutex_lock(&t->lock);
    c->server->open--;
    call_unref(c);
    pthread_cond_broadcast(&t->ended);
    pthread_mutex_unlock(&t->lock);
}

static void local_answer(struct rpc_call *call, enum st st, struct msg *reply, const char *text)
{
    struct local_call *c = (struct local_call *)call;
    msg_close(c->req);
    pthread_mutex_lock(&c->t->lock);
    bool first = call_claim(c);
    pthread_mutex_unlock(&c->t->lock);
    if (first) call_back(c, st, reply, text == NULL ? "" : text);
    else msg_close(reply);
    server_side_done(c);
}

/* --- the timer ----------------------------------------------------------------------------- */

/* Locked. A call that is over time, or NULL and *next_ns = the earliest deadline. A plain walk:
 * it happens once a timeout, not once a call. */
static struct local_call *timer_find(struct local *t, uint64_t *next_ns)
{
    uint64_t now = clock_now_ns();
    *next_ns = UINT64_MAX;
    for (struct local_call *c = t->calls; c != NULL; c = c->next) {
        if (c->deadline_ns <= now) return c;
        if (c->deadline_ns < *next_ns) *next_ns = c->deadline_ns;
    }
    return NULL;
}

static void *timer_main(void *arg)
{
    struct local *t = arg;
    pthread_setname_np(pthread_self(), "rpc-timer");
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        struct local_call *c = timer_find(t, &t->wake_ns);
        if (c != NULL) {
            call_claim(c);
            pthread_mutex_unlock(&t->lock);
            char text[64];
            snprintf(text, sizeof(text), "no answer within %u ms", c->timeout_ms);
            call_back(c, ST_TIMEOUT, NULL, text);
            pthread_mutex_lock(&t->lock);
        } else if (t->wake_ns == UINT64_MAX) {
            pthread_cond_wait(&t->sooner, &t->lock);
        } else {
            struct timespec until = timespec_of(t->wake_ns);
            pthread_cond_timedwait(&t->sooner, &t->lock, &until);
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* --- the client's end ---------------------------------------------------------------------- */

static enum st local_connect(struct transport *base, const char *address, struct rpc_peer **out)
{
    struct local *t = (struct local *)base;
    size_t n = strlen(address) + 1;
    struct local_peer *p = mem_zalloc(1, sizeof(*p) + n);
    if (p == NULL) return log_fail(ST_NOMEM, address, "no memory for a connection");
    memcpy(p->address, address, n);
    p->base = (struct rpc_peer){&OPS, p->address};
    p->t = t;
    pthread_mutex_lock(&t->lock);
    t->n_peers++;
    pthread_mutex_unlock(&t->lock);
    *out = &p->base;
    return ST_OK;
}

static void local_peer_cancel(struct rpc_peer *base)
{
    struct local_peer *p = (struct local_peer *)base;
    struct local *t = p->t;
    pthread_mutex_lock(&t->lock);
    p->cancelled = true;
    for (;;) {
        struct local_call *c = t->calls;
        while (c != NULL && c->peer != p) c = c->next;
        if (c == NULL) break;
        call_claim(c);
        pthread_mutex_unlock(&t->lock);
        call_back(c, ST_CANCELLED, NULL, "given up by this side");
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
}

static void local_peer_close(struct rpc_peer *base)
{
    struct local_peer *p = (struct local_peer *)base;
    struct local *t = p->t;
    pthread_mutex_lock(&t->lock);
    while (p->waiting > 0) pthread_cond_wait(&t->ended, &t->lock); /* ends: calls have deadlines */
    t->n_peers--;
    pthread_mutex_unlock(&t->lock);
    mem_free(p);
}

/* Locked. */
static struct local_server *server_find(struct local *t, const char *address)
{
    struct local_server *s = t->servers;
    while (s != NULL && strcmp(s->address, address) != 0) s = s->next;
    return s;
}

/* Locked. */
static void call_start(struct local_call *c)
{
    struct local *t = c->t;
    c->refs = 3;
    c->server->open += 2;
    c->peer->waiting++;
    c->next = t->calls;
    if (c->next != NULL) c->next->prev = c;
    t->calls = c;
    if (c->deadline_ns < t->wake_ns) {
        t->wake_ns = c->deadline_ns;
        pthread_cond_signal(&t->sooner);
    }
}

static void local_send(struct rpc_peer *base, enum rpc_method method, struct msg *req,
                       uint32_t timeout_ms, rpc_done *done, void *ctx)
{
    struct local_peer *p = (struct local_peer *)base;
    struct local *t = p->t;
    struct local_call *c = mem_alloc(1, sizeof(*c));
    if (c == NULL) {
        msg_close(req);
        done(ctx, ST_NOMEM, NULL, "no memory for a call");
        return;
    }
    *c = (struct local_call){.base = {&OPS}, .t = t, .peer = p, .req = req, .done = done,
                             .done_ctx = ctx, .timeout_ms = timeout_ms};
    c->deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000u;
    pthread_mutex_lock(&t->lock);
    bool cancelled = p->cancelled;
    c->server = cancelled ? NULL : server_find(t, p->address);
    if (c->server != NULL) call_start(c);
    pthread_mutex_unlock(&t->lock);
    if (c->server == NULL) {
        mem_free(c);
        msg_close(req);
        if (cancelled) done(ctx, ST_CANCELLED, NULL, "given up by this side");
        else done(ctx, ST_UNAVAILABLE, NULL, "nobody serves there");
        return;
    }
    c->server->fn(c->server->ctx, &c->base, method, req->data, req->len);
    server_side_done(c);
}

/* --- the server's end ---------------------------------------------------------------------- */

static enum st local_serve(struct transport *base, const char *address, rpc_handler *fn, void *ctx,
                           struct rpc_server **out)
{
    struct local *t = (struct local *)base;
    size_t n = strlen(address) + 1;
    struct local_server *s = mem_zalloc(1, sizeof(*s) + n);
    if (s == NULL) return log_fail(ST_NOMEM, address, "no memory for a server");
    memcpy(s->address, address, n);
    s->base = (struct rpc_server){&OPS, s->address};
    s->t = t;
    s->fn = fn;
    s->ctx = ctx;
    pthread_mutex_lock(&t->lock);
    bool taken = server_find(t, address) != NULL;
    if (!taken) {
        s->next = t->servers;
        t->servers = s;
    }
    pthread_mutex_unlock(&t->lock);
    if (taken) {
        mem_free(s);
        return log_fail(ST_CANTCREATE, address, "already in use or not ours; choose another name");
    }
    *out = &s->base;
    return ST_OK;
}

/* Locked. Wait until no call is open; false after `ms`. */
static bool server_idle(struct local_server *s, uint32_t ms)
{
    struct timespec until = timespec_of(clock_now_ns() + (uint64_t)ms * 1000000u);
    while (s->open > 0)
        if (pthread_cond_timedwait(&s->t->ended, &s->t->lock, &until) != 0) return s->open == 0;
    return true;
}

/* Locked on entry and return. End the calls of `s` on the clients' side. */
static void server_cancel(struct local_server *s)
{
    struct local *t = s->t;
    for (;;) {
        struct local_call *c = t->calls;
        while (c != NULL && c->server != s) c = c->next;
        if (c == NULL) return;
        call_claim(c);
        pthread_mutex_unlock(&t->lock);
        call_back(c, ST_UNAVAILABLE, NULL, "the server was closed");
        pthread_mutex_lock(&t->lock);
    }
}

static void local_server_close(struct rpc_server *base)
{
    struct local_server *s = (struct local_server *)base;
    struct local *t = s->t;
    pthread_mutex_lock(&t->lock);
    struct local_server **at = &t->servers;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    if (!server_idle(s, RPC_GRACE_MS)) {
        server_cancel(s);
        CHECK(server_idle(s, RPC_FORGOTTEN_MS), "a handler answers every call");
    }
    pthread_mutex_unlock(&t->lock);
    mem_free(s);
}

/* --- the transport ------------------------------------------------------------------------- */

static void local_close(struct transport *base)
{
    struct local *t = (struct local *)base;
    pthread_mutex_lock(&t->lock);
    CHECK(t->servers == NULL && t->n_peers == 0, "servers and peers are closed first");
    CHECK(t->calls == NULL, "no call is live");
    t->stop = true;
    pthread_cond_signal(&t->sooner);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->timer, NULL);
    pthread_cond_destroy(&t->sooner);
    pthread_cond_destroy(&t->ended);
    pthread_mutex_destroy(&t->lock);
    mem_free(t);
}

static const struct transport_ops OPS = {
    .close = local_close,
    .serve = local_serve,
    .server_close = local_server_close,
    .connect = local_connect,
    .peer_cancel = local_peer_cancel,
    .peer_close = local_peer_close,
    .send = local_send,
    .answer = local_answer,
};

enum st local_transport_open(struct transport **out)
{
    struct local *t = mem_zalloc(1, sizeof(*t));
    if (t == NULL) return log_fail(ST_NOMEM, NULL, "no memory for the local transport");
    t->base.ops = &OPS;
    t->wake_ns = UINT64_MAX;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->ended, &monotonic);
    pthread_cond_init(&t->sooner, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&t->timer, NULL, timer_main, t) != 0) {
        pthread_cond_destroy(&t->sooner);
        pthread_cond_destroy(&t->ended);
        pthread_mutex_destroy(&t->lock);
        mem_free(t);
        return log_fail(ST_NOMEM, NULL, "cannot start the timer thread of the local transport");
    }
    *out = &t->base;
    return ST_OK;
}
