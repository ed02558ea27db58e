/* proto/grpc.c - gRPC's C core: start and stop, settings, addresses, messages and statuses; the two
 * ends of a call are in grpc_server.c and grpc_client.c.
 *
 * Settings that are not obvious: without the malloc settings the heap is given back and taken again
 * at every large message, several times slower; so_reuseport would let two servers share a port in
 * silence; a shared subchannel pool would put all peers of one address on one connection; an
 * http_proxy in the environment would even catch 127.0.0.1; retries keep requests in memory until
 * the answer. tcp_tx_zerocopy is never set: it was seen to deliver wrong bytes. */
#define _GNU_SOURCE
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/grpc_impl.h"

const char *const RPC_GRPC_PATH[RPC_N] = {
    [RPC_PLAN] = "/chanter.Oracle/Plan",
    [RPC_FETCH] = "/chanter.EmbServer/Fetch",
    [RPC_WRITE_BACK] = "/chanter.EmbServer/WriteBack",
    [RPC_DIGEST] = "/chanter.EmbServer/Digest",
    [RPC_EXPORT] = "/chanter.EmbServer/Export",
};

/* --- settings ------------------------------------------------------------------------------ */

enum {
    MAX_MESSAGE_BYTES = 64 << 20,
    KEEPALIVE_MS = 2000,          /* a silent peer is asked this often ...            */
    KEEPALIVE_TIMEOUT_MS = 5000,  /* ... and given up after this: also a stopped one  */
    PING_MIN_MS = 1000,           /* below KEEPALIVE_MS, or the server hangs up       */
    BACKOFF_MIN_MS = 50,
    BACKOFF_MAX_MS = 500,
};

#define ARG(name, number) \
    {.type = GRPC_ARG_INTEGER, .key = (char *)(name), .value = {.integer = (number)}}
#define ARGS_OF_BOTH                                              \
    ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, MAX_MESSAGE_BYTES),  \
    ARG(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, MAX_MESSAGE_BYTES),     \
    ARG(GRPC_ARG_ENABLE_CHANNELZ, 0),                             \
    ARG(GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS),                \
    ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_TIMEOUT_MS),     \
    ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),              \
    ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0)

/* gRPC does not write to its arguments; its type only says so. */
static grpc_arg server_args[] = {
    ARGS_OF_BOTH,
    ARG(GRPC_ARG_ALLOW_REUSEPORT, 0),
    ARG(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, PING_MIN_MS),
    ARG(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
};
static grpc_arg client_args[] = {
    ARGS_OF_BOTH,
    ARG(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
    ARG(GRPC_ARG_ENABLE_RETRIES, 0),
    ARG(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
    ARG(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MIN_MS),
    ARG(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, BACKOFF_MIN_MS),
    ARG(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS),
};

grpc_channel_args rpc_grpc_server_args(void)
{
    return (grpc_channel_args){sizeof(server_args) / sizeof(server_args[0]), server_args};
}

grpc_channel_args rpc_grpc_client_args(void)
{
    return (grpc_channel_args){sizeof(client_args) / sizeof(client_args[0]), client_args};
}

/* --- addresses ----------------------------------------------------------------------------- */

enum st rpc_address_parse(const char *address, struct rpc_address *out)
{
    static const struct { const char *written, *scheme, *host; } HOST[] = {
        {"127.0.0.1:", "ipv4:", "127.0.0.1"},
        {"localhost:", "ipv4:", "127.0.0.1"}, /* not looked up: no name server has a say */
        {"[::1]:", "ipv6:", "[::1]"},
    };
    static const char UNIX[] = "unix:";
    if (strncmp(address, UNIX, strlen(UNIX)) == 0 && address[strlen(UNIX)] != '\0') {
        *out = (struct rpc_address){UNIX, address + strlen(UNIX), 0};
        return ST_OK;
    }
    for (size_t i = 0; i < sizeof(HOST) / sizeof(HOST[0]); i++) {
        size_t n = strlen(HOST[i].written);
        if (strncmp(address, HOST[i].written, n) != 0) continue;
        char *end;
        unsigned long port = strtoul(address + n, &end, 10);
        if (address[n] < '0' || address[n] > '9' || *end != '\0' || port > 65535)
            return log_fail(ST_CONFIG, address, "not a port; write HOST:PORT, PORT 0 to 65535");
        *out = (struct rpc_address){HOST[i].scheme, HOST[i].host, (unsigned)port};
        return ST_OK;
    }
    return log_fail(ST_PERM, address, "refusing a non-loopback address without TLS; use 127.0.0.1, "
                    "[::1], localhost or unix:");
}

char *rpc_address_text(const char *scheme, const struct rpc_address *a)
{
    size_t n = strlen(scheme) + strlen(a->host) + sizeof(":65535");
    char *text = mem_alloc(n, 1);
    if (text == NULL) return NULL;
    bool path = strcmp(a->scheme, "unix:") == 0;
    if (path) snprintf(text, n, "unix:%s", a->host);
    else snprintf(text, n, "%s%s:%u", scheme, a->host, a->port);
    return text;
}

/* --- messages ------------------------------------------------------------------------------ */

static void release_msg(void *m)
{
    msg_close(m);
}

grpc_byte_buffer *rpc_buffer_of(struct msg *m)
{
    grpc_slice slice = grpc_slice_new_with_user_data(m->data, m->len, release_msg, m);
    grpc_byte_buffer *b = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice); /* the buffer has its own reference */
    return b;
}

enum st rpc_buffer_read(grpc_byte_buffer *b, struct msg **out)
{
    grpc_byte_buffer_reader reader;
    if (b == NULL || !grpc_byte_buffer_reader_init(&reader, b)) return ST_BADMSG;
    struct msg *m;
    enum st st = msg_open(grpc_byte_buffer_length(reader.buffer_out), &m);
    if (st != ST_OK) goto out;
    grpc_slice *slice;
    while (grpc_byte_buffer_reader_peek(&reader, &slice)) {
        size_t n = GRPC_SLICE_LENGTH(*slice);
        CHECK(n <= m->cap - m->len, "a buffer is as long as its slices");
        memcpy(m->data + m->len, GRPC_SLICE_START_PTR(*slice), n);
        m->len += n;
    }
    *out = m;
out:
    grpc_byte_buffer_reader_destroy(&reader);
    return st;
}

/* --- statuses ------------------------------------------------------------------------------ */

/* For clients that are not ours; ours read the code in the text. */
static const grpc_status_code CODE[ST_N] = {
    [ST_BUSY] = GRPC_STATUS_UNAVAILABLE,
    [ST_END] = GRPC_STATUS_OUT_OF_RANGE,
    [ST_USAGE] = GRPC_STATUS_FAILED_PRECONDITION,
    [ST_DATA] = GRPC_STATUS_FAILED_PRECONDITION,
    [ST_NOINPUT] = GRPC_STATUS_NOT_FOUND,
    [ST_CONFIG] = GRPC_STATUS_FAILED_PRECONDITION,
    [ST_PERM] = GRPC_STATUS_PERMISSION_DENIED,
    [ST_CANTCREATE] = GRPC_STATUS_ALREADY_EXISTS,
    [ST_TIMEOUT] = GRPC_STATUS_DEADLINE_EXCEEDED,
    [ST_UNAVAILABLE] = GRPC_STATUS_UNAVAILABLE,
    [ST_BADMSG] = GRPC_STATUS_INVALID_ARGUMENT,
    [ST_NOMEM] = GRPC_STATUS_RESOURCE_EXHAUSTED,
    [ST_IO] = GRPC_STATUS_DATA_LOSS,
    [ST_DEVICE] = GRPC_STATUS_INTERNAL,
    [ST_COMM] = GRPC_STATUS_INTERNAL,
    [ST_INTERNAL] = GRPC_STATUS_INTERNAL,
    [ST_CANCELLED] = GRPC_STATUS_CANCELLED,
};

grpc_slice rpc_status_put(enum st st, const char *text, grpc_status_code *code)
{
    char line[RPC_TEXT_BYTES + 32];
    int n = snprintf(line, sizeof(line), "E-%s: %.*s", st_name(st), RPC_TEXT_BYTES - 1, text);
    *code = CODE[st];
    return grpc_slice_from_copied_buffer(line, (size_t)n);
}

/* gRPC's own failures: what can the caller do about it? */
static enum st status_of(grpc_status_code code)
{
    switch (code) {
    case GRPC_STATUS_DEADLINE_EXCEEDED: return ST_TIMEOUT;
    case GRPC_STATUS_PERMISSION_DENIED:
    case GRPC_STATUS_UNAUTHENTICATED: return ST_PERM;
    case GRPC_STATUS_UNIMPLEMENTED:      /* another program, or another version      */
    case GRPC_STATUS_INVALID_ARGUMENT:
    case GRPC_STATUS_RESOURCE_EXHAUSTED: /* a message above MAX_MESSAGE_BYTES        */
        return ST_BADMSG;
    default: return ST_UNAVAILABLE;
    }
}

enum st rpc_status_get(grpc_status_code code, grpc_slice details, char text[RPC_TEXT_BYTES])
{
    char line[RPC_TEXT_BYTES + 32];
    size_t n = GRPC_SLICE_LENGTH(details);
    if (n >= sizeof(line)) n = sizeof(line) - 1;
    memcpy(line, GRPC_SLICE_START_PTR(details), n);
    line[n] = '\0';
    for (int st = ST_OK + 1; st < ST_N; st++) {
        char prefix[32];
        int len = snprintf(prefix, sizeof(prefix), "E-%s: ", st_name((enum st)st));
        if (strncmp(line, prefix, (size_t)len) != 0) continue;
        snprintf(text, RPC_TEXT_BYTES, "%.*s", RPC_TEXT_BYTES - 1, line + len);
        return (enum st)st;
    }
    snprintf(text, RPC_TEXT_BYTES, "%.*s", RPC_TEXT_BYTES - 1, line);
    return status_of(code);
}

/* --- queues -------------------------------------------------------------------------------- */

static void *queue_main(void *arg)
{
    struct rpc_queue *q = arg;
    pthread_setname_np(pthread_self(), q->name);
    for (;;) {
        grpc_event e =
            grpc_completion_queue_next(q->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN) return NULL;
        struct rpc_tag *tag = e.tag;
        tag->fn(tag->ctx, e.success != 0);
    }
}

enum st rpc_queue_open(struct rpc_queue *q, const char *name)
{
    q->name = name;
    q->cq = grpc_completion_queue_create_for_next(NULL);
    if (pthread_create(&q->thread, NULL, queue_main, q) == 0) return ST_OK;
    grpc_completion_queue_shutdown(q->cq);
    while (grpc_completion_queue_next(q->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(q->cq);
    return log_fail(ST_NOMEM, NULL, "cannot start thread %s", name);
}

void rpc_queue_close(struct rpc_queue *q)
{
    grpc_completion_queue_shutdown(q->cq);
    pthread_join(q->thread, NULL);
    grpc_completion_queue_destroy(q->cq);
}

/* --- the transport ------------------------------------------------------------------------- */

/* What gRPC logs comes back as a status too, and is then said once, in our words. */
static void silent(gpr_log_func_args *args)
{
}

static void process_init(void)
{
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_TOP_PAD, 64 << 20);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    if (getenv("GRPC_VERBOSITY") == NULL) gpr_set_log_function(silent);
}

void rpc_grpc_count_server(struct grpc_transport *t, int by)
{
    pthread_mutex_lock(&t->lock);
    t->n_servers += (size_t)by;
    pthread_mutex_unlock(&t->lock);
}

void rpc_grpc_count_peer(struct grpc_transport *t, int by)
{
    pthread_mutex_lock(&t->lock);
    t->n_peers += (size_t)by;
    pthread_mutex_unlock(&t->lock);
}

static void grpc_transport_close(struct transport *base)
{
    struct grpc_transport *t = (struct grpc_transport *)base;
    pthread_mutex_lock(&t->lock);
    CHECK(t->n_servers == 0 && t->n_peers == 0, "servers and peers are closed first");
    pthread_mutex_unlock(&t->lock);
    rpc_queue_close(&t->clients);
    grpc_shutdown();
    pthread_mutex_destroy(&t->lock);
    mem_free(t);
}

const struct transport_ops RPC_GRPC_OPS = {
    .close = grpc_transport_close,
    .serve = rpc_grpc_serve,
    .server_close = rpc_grpc_server_close,
    .connect = rpc_grpc_connect,
    .peer_cancel = rpc_grpc_peer_cancel,
    .peer_close = rpc_grpc_peer_close,
    .send = rpc_grpc_send,
    .answer = rpc_grpc_answer,
};

enum st grpc_transport_open(struct transport **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, process_init);
    enum st st = ST_NOMEM;
    struct grpc_transport *t = mem_zalloc(1, sizeof(*t));
    if (t == NULL) return log_fail(st, NULL, "no memory for the grpc transport");
    t->base.ops = &RPC_GRPC_OPS;
    pthread_mutex_init(&t->lock, NULL);
    grpc_init();
    TRY(rpc_queue_open(&t->clients, "rpc-client"), err);
    *out = &t->base;
    return ST_OK;

err:
    grpc_shutdown();
    pthread_mutex_destroy(&t->lock);
    mem_free(t);
    return st;
}
