#include "proto/transport.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/check.h"
#include "base/log.h"
#include "proto/transport_impl.h"

enum st transport_open(enum transport_kind kind, struct transport **out)
{
    if (kind == TRANSPORT_LOCAL) return local_transport_open(out);
    CHECK(kind == TRANSPORT_GRPC, "a transport of config.h");
    return grpc_transport_open(out);
}

void transport_close(struct transport *t)
{
    if (t != NULL) t->ops->close(t);
}

enum st rpc_serve(struct transport *t, const char *address, rpc_handler *fn, void *ctx,
                  struct rpc_server **out)
{
    return t->ops->serve(t, address, fn, ctx, out);
}

const char *rpc_address(const struct rpc_server *s)
{
    return s->address;
}

void rpc_server_close(struct rpc_server *s)
{
    if (s != NULL) s->ops->server_close(s);
}

enum st rpc_connect(struct transport *t, const char *address, struct rpc_peer **out)
{
    return t->ops->connect(t, address, out);
}

void rpc_peer_cancel(struct rpc_peer *p)
{
    p->ops->peer_cancel(p);
}

void rpc_peer_close(struct rpc_peer *p)
{
    if (p != NULL) p->ops->peer_close(p);
}

void rpc_send(struct rpc_peer *p, enum rpc_method method, struct msg *req, uint32_t timeout_ms,
              rpc_done *done, void *ctx)
{
    CHECK((unsigned)method < RPC_N, "a method of the table");
    p->ops->send(p, method, req, timeout_ms, done, ctx);
}

void rpc_reply(struct rpc_call *call, struct msg *reply)
{
    call->ops->answer(call, ST_OK, reply, "");
}

void rpc_fail(struct rpc_call *call, enum st st, const char *text)
{
    CHECK(st > ST_OK && st < ST_N, "a failure has a code");
    call->ops->answer(call, st, NULL, text);
}

void rpc_failf(struct rpc_call *call, enum st st, const char *fmt, ...)
{
    char text[RPC_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    rpc_fail(call, st, text);
}

const char *rpc_method_name(enum rpc_method method)
{
    static const char *const NAME[RPC_N] = {
        [RPC_PLAN] = "Plan",     [RPC_FETCH] = "Fetch",   [RPC_WRITE_BACK] = "WriteBack",
        [RPC_DIGEST] = "Digest", [RPC_EXPORT] = "Export",
    };
    return NAME[method];
}

/* One thread that waits for one call. */
struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool called; /* this and all below: under lock */
    enum st st;
    struct msg *reply;
    char text[RPC_TEXT_BYTES];
};

static void waiter_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct waiter *w = ctx;
    pthread_mutex_lock(&w->lock);
    w->called = true;
    w->st = st;
    w->reply = reply;
    snprintf(w->text, sizeof(w->text), "%s", text);
    pthread_cond_signal(&w->cond); /* under the lock: w is gone as soon as the other side sees it */
    pthread_mutex_unlock(&w->lock);
}

enum st rpc_call_wait(struct rpc_peer *p, enum rpc_method method, struct msg *req,
                      uint32_t timeout_ms, struct msg **reply)
{
    struct waiter w = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    rpc_send(p, method, req, timeout_ms, waiter_done, &w);
    pthread_mutex_lock(&w.lock);
    while (!w.called) pthread_cond_wait(&w.cond, &w.lock); /* ends: rpc_send has the deadline */
    pthread_mutex_unlock(&w.lock);
    pthread_cond_destroy(&w.cond);
    pthread_mutex_destroy(&w.lock);
    if (w.st == ST_OK) {
        *reply = w.reply;
        return ST_OK;
    }
    bool gone = w.st == ST_TIMEOUT || w.st == ST_UNAVAILABLE;
    return log_fail(w.st, p->address, "%s: %s%s", rpc_method_name(method), w.text,
                    gone ? "; is that process still running?" : "");
}
