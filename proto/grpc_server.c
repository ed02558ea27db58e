/* proto/grpc_server.c - the server's end over gRPC: one queue, one thread, which also runs the
 * handler. For every method a few requests are posted, each with the struct that will carry the
 * call; a request that comes true posts the next one. One more is posted for methods that we do not
 * have: without it such a call would hang until its deadline.
 *
 *   posted --request--> open --answer sent and client's end seen--> freed
 *      '----shutdown----------------------------------------------->'
 *
 * A call has two tags under way while it is open: RECV_CLOSE, started at once, and the answer. It
 * is freed by the queue's thread when both have come back, so nobody else counts. */
#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/grpc_impl.h"

enum { POSTED_PER_METHOD = 32 };
enum { UNKNOWN_METHOD = RPC_N };

struct server_end {
    struct rpc_server base;
    struct grpc_transport *t;
    rpc_handler *fn;
    void *ctx;
    grpc_server *server;
    void *method[RPC_N];           /* gRPC's handles                              */
    struct rpc_queue queue;
    struct rpc_tag stop_tag;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopped;                  /* locked: gRPC has let go of every call       */
    size_t calls;                  /* locked: posted or open                      */
};

struct server_call {
    struct rpc_call base;
    struct server_end *server;
    int method;                    /* enum rpc_method, or UNKNOWN_METHOD          */
    struct rpc_tag arrived, closed, answered;
    grpc_call *call;
    gpr_timespec deadline;         /* the client's; gRPC wants to tell us         */
    grpc_metadata_array metadata;
    grpc_byte_buffer *payload;
    grpc_call_details unknown;     /* UNKNOWN_METHOD only                         */
    struct msg *req;
    grpc_byte_buffer *reply;       /* lives until `answered`                      */
    grpc_slice details;            /* likewise                                    */
    int cancelled;                 /* written by gRPC with `closed`; no use to us */
    int tags;                      /* queue's thread: closed, answered to come    */
    bool post_again;               /* there was no memory for a successor         */
};

static void call_arrived(void *ctx, bool ok);
static void call_closed(void *ctx, bool ok);
static void call_answered(void *ctx, bool ok);

/* --- one call ------------------------------------------------------------------------------ */

static void calls_add(struct server_end *s, int by)
{
    pthread_mutex_lock(&s->lock);
    s->calls += (size_t)by;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* Hand `c` to gRPC for the next request of its method; comes back as `arrived`. */
static void call_post(struct server_call *c)
{
    struct server_end *s = c->server;
    grpc_completion_queue *cq = s->queue.cq;
    int method = c->method;
    *c = (struct server_call){.base = {&RPC_GRPC_OPS}, .server = s, .method = method,
                              .arrived = {call_arrived, c}, .closed = {call_closed, c},
                              .answered = {call_answered, c}, .tags = 2};
    c->details = grpc_empty_slice();
    grpc_metadata_array_init(&c->metadata);
    grpc_call_details_init(&c->unknown);
    grpc_call_error e;
    if (method == UNKNOWN_METHOD)
        e = grpc_server_request_call(s->server, &c->call, &c->unknown, &c->metadata, cq, cq,
                                     &c->arrived);
    else
        e = grpc_server_request_registered_call(s->server, s->method[method], &c->call,
                                                &c->deadline, &c->metadata, &c->payload, cq, cq,
                                                &c->arrived);
    CHECK(e == GRPC_CALL_OK, "gRPC takes a posted request");
}

static bool call_post_new(struct server_end *s, int method)
{
    struct server_call *c = mem_alloc(1, sizeof(*c));
    if (c == NULL) return false;
    c->server = s;
    c->method = method;
    calls_add(s, 1);
    call_post(c);
    return true;
}

/* gRPC has let go of it. Queue's thread. */
static void call_free(struct server_call *c)
{
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_details_destroy(&c->unknown);
    grpc_slice_unref(c->details);
    if (c->call != NULL) grpc_call_unref(c->call);
    if (c->post_again) {
        call_post(c);
        return;
    }
    struct server_end *s = c->server;
    mem_free(c);
    calls_add(s, -1);
}

static void call_tag_done(struct server_call *c)
{
    if (--c->tags == 0) call_free(c);
}

static void call_closed(void *ctx, bool ok)
{
    call_tag_done(ctx);
}

static void call_answered(void *ctx, bool ok)
{
    struct server_call *c = ctx;
    grpc_byte_buffer_destroy(c->reply); /* NULL ok */
    call_tag_done(c);
}

static void call_watch_close(struct server_call *c)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &c->cancelled;
    grpc_call_error e = grpc_call_start_batch(c->call, &op, 1, &c->closed, NULL);
    CHECK(e == GRPC_CALL_OK, "gRPC takes the watch for the client's end");
}

/* c->reply and c->details are set. A client that is gone makes no difference. `c` may be gone
 * afterwards. */
static void call_send(struct server_call *c, grpc_status_code code)
{
    grpc_op op[3] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                     {.op = GRPC_OP_SEND_STATUS_FROM_SERVER},
                     {.op = GRPC_OP_SEND_MESSAGE}};
    op[1].data.send_status_from_server.status = code;
    op[1].data.send_status_from_server.status_details = &c->details;
    op[2].data.send_message.send_message = c->reply;
    size_t n = c->reply == NULL ? 2 : 3;
    grpc_call_error e = grpc_call_start_batch(c->call, op, n, &c->answered, NULL);
    CHECK(e == GRPC_CALL_OK, "a call is answered once");
}

void rpc_grpc_answer(struct rpc_call *call, enum st st, struct msg *reply, const char *text)
{
    struct server_call *c = (struct server_call *)call;
    grpc_status_code code = GRPC_STATUS_OK;
    msg_close(c->req);
    c->req = NULL;
    if (st == ST_OK) c->reply = rpc_buffer_of(reply);
    else c->details = rpc_status_put(st, text == NULL ? "" : text, &code);
    call_send(c, code);
}

static void call_arrived(void *ctx, bool ok)
{
    struct server_call *c = ctx;
    struct server_end *s = c->server;
    if (!ok) { /* the server is shutting down */
        call_free(c);
        return;
    }
    call_watch_close(c);
    c->post_again = !call_post_new(s, c->method);
    if (c->method == UNKNOWN_METHOD) {
        c->details = grpc_slice_from_static_string("no such method");
        call_send(c, GRPC_STATUS_UNIMPLEMENTED);
        return;
    }
    enum st st = rpc_buffer_read(c->payload, &c->req);
    grpc_byte_buffer_destroy(c->payload); /* NULL ok */
    if (st == ST_OK) s->fn(s->ctx, &c->base, (enum rpc_method)c->method, c->req->data, c->req->len);
    else rpc_fail(&c->base, st, "the request cannot be read");
}

/* --- start --------------------------------------------------------------------------------- */

/* gRPC unlinks a socket file before it binds, also one that a live server listens at. */
static bool path_in_use(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (strncmp(path, "//", 2) == 0) path += 2; /* unix:///absolute */
    if (strlen(path) >= sizeof(at.sun_path)) return false; /* gRPC will refuse it */
    strcpy(at.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    bool used = connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0;
    close(fd);
    return used;
}

/* Binds; sets s->base.address to what was bound. */
static enum st server_bind(struct server_end *s, const char *address)
{
    struct rpc_address a;
    enum st st = rpc_address_parse(address, &a);
    if (st != ST_OK) return st;
    bool path = strcmp(a.scheme, "unix:") == 0;
    char *wanted = rpc_address_text("", &a);
    if (wanted == NULL) return log_fail(ST_NOMEM, address, "no memory for a server");
    int port = 0;
    if (!path || !path_in_use(a.host)) {
        grpc_server_credentials *plain = grpc_insecure_server_credentials_create();
        port = grpc_server_add_http2_port(s->server, wanted, plain);
        grpc_server_credentials_release(plain);
    }
    mem_free(wanted);
    if (port == 0)
        return log_fail(ST_CANTCREATE, address, "already in use or not ours; choose another");
    if (!path) a.port = (unsigned)port;
    s->base.address = rpc_address_text("", &a);
    return ST_OK;
}

static void server_stop_done(void *ctx, bool ok)
{
    struct server_end *s = ctx;
    pthread_mutex_lock(&s->lock);
    s->stopped = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static bool server_wait_stopped(struct server_end *s, uint32_t ms)
{
    uint64_t ns = clock_now_ns() + (uint64_t)ms * 1000000u;
    struct timespec until = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    pthread_mutex_lock(&s->lock);
    while (!s->stopped || s->calls > 0)
        if (pthread_cond_timedwait(&s->changed, &s->lock, &until) != 0) break;
    bool done = s->stopped && s->calls == 0;
    pthread_mutex_unlock(&s->lock);
    return done;
}

/* From bound or started to nothing under way. */
static void server_stop(struct server_end *s)
{
    s->stop_tag = (struct rpc_tag){server_stop_done, s};
    grpc_server_shutdown_and_notify(s->server, s->queue.cq, &s->stop_tag);
    if (server_wait_stopped(s, RPC_GRACE_MS)) return;
    grpc_server_cancel_all_calls(s->server);
    CHECK(server_wait_stopped(s, RPC_FORGOTTEN_MS), "a handler answers every call");
}

static void server_init(struct server_end *s, struct grpc_transport *t, rpc_handler *fn, void *ctx)
{
    s->base.ops = &RPC_GRPC_OPS;
    s->t = t;
    s->fn = fn;
    s->ctx = ctx;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static void server_fini(struct server_end *s)
{
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    mem_free(s->base.address);
    mem_free(s);
}

static void server_create(struct server_end *s)
{
    grpc_channel_args args = rpc_grpc_server_args();
    s->server = grpc_server_create(&args, NULL);
    grpc_server_register_completion_queue(s->server, s->queue.cq, NULL);
    for (int i = 0; i < RPC_N; i++)
        s->method[i] = grpc_server_register_method(s->server, RPC_GRPC_PATH[i], NULL,
                                                   GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
}

static enum st server_post_all(struct server_end *s)
{
    bool ok = s->base.address != NULL && call_post_new(s, UNKNOWN_METHOD);
    for (int m = 0; ok && m < RPC_N; m++)
        for (int i = 0; ok && i < POSTED_PER_METHOD; i++) ok = call_post_new(s, m);
    return ok ? ST_OK : log_fail(ST_NOMEM, NULL, "no memory for a server");
}

enum st rpc_grpc_serve(struct transport *base, const char *address, rpc_handler *fn, void *ctx,
                       struct rpc_server **out)
{
    enum st st;
    struct server_end *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) return log_fail(ST_NOMEM, address, "no memory for a server");
    server_init(s, (struct grpc_transport *)base, fn, ctx);
    TRY(rpc_queue_open(&s->queue, "rpc-server"), err_server);
    server_create(s);
    TRY(server_bind(s, address), err_queue);
    grpc_server_start(s->server);
    TRY(server_post_all(s), err_started);
    rpc_grpc_count_server(s->t, 1);
    *out = &s->base;
    return ST_OK;

err_started:
    server_stop(s);
err_queue:
    grpc_server_destroy(s->server);
    rpc_queue_close(&s->queue);
err_server:
    server_fini(s);
    return st;
}

void rpc_grpc_server_close(struct rpc_server *base)
{
    struct server_end *s = (struct server_end *)base;
    server_stop(s);
    grpc_server_destroy(s->server);
    rpc_queue_close(&s->queue);
    rpc_grpc_count_server(s->t, -1);
    server_fini(s);
}
