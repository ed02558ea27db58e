/* proto/grpc_client.c - the client's end over gRPC: one channel a peer, one batch of six operations
 * a call, all completions on the transport's one queue. A call ends when its batch does: answered,
 * refused, cut off or over time; gRPC keeps the deadline. */
#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "proto/grpc_impl.h"

static const char GIVEN_UP[] = "given up by this side";

struct client_end {
    struct rpc_peer base;
    struct grpc_transport *t;
    grpc_channel *channel;
    void *method[RPC_N];           /* gRPC's handles                        */
    pthread_mutex_t lock;
    pthread_cond_t none_waiting;
    size_t waiting;                /* locked: calls not yet called back     */
    struct client_call *calls;     /* locked: those gRPC still works on     */
    bool cancelled;                /* locked: later calls end at once, too  */
};

struct client_call {
    struct rpc_tag tag;
    struct client_end *peer;
    rpc_done *done;
    void *done_ctx;
    uint32_t timeout_ms;
    uint64_t deadline_ns;
    grpc_call *call;
    grpc_byte_buffer *request, *reply;
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice details;
    struct client_call *prev, *next; /* locked by the peer */
};

/* False: the peer has given up, the call is not to be made. */
static bool call_link(struct client_call *c)
{
    struct client_end *p = c->peer;
    pthread_mutex_lock(&p->lock);
    bool open = !p->cancelled;
    if (open) {
        p->waiting++;
        c->next = p->calls;
        if (c->next != NULL) c->next->prev = c;
        p->calls = c;
    }
    pthread_mutex_unlock(&p->lock);
    return open;
}

/* Has the peer given up meanwhile? */
static bool call_unlink(struct client_call *c)
{
    struct client_end *p = c->peer;
    pthread_mutex_lock(&p->lock);
    if (c->prev != NULL) c->prev->next = c->next;
    else p->calls = c->next;
    if (c->next != NULL) c->next->prev = c->prev;
    bool cancelled = p->cancelled;
    pthread_mutex_unlock(&p->lock);
    return cancelled;
}

/* What became of the call; *reply only with ST_OK. */
static enum st call_result(struct client_call *c, struct msg **reply, char text[RPC_TEXT_BYTES])
{
    text[0] = '\0';
    if (c->code != GRPC_STATUS_OK) {
        enum st st = rpc_status_get(c->code, c->details, text);
        bool gone = c->code == GRPC_STATUS_CANCELLED && st == ST_UNAVAILABLE;
        /* The deadline runs on both sides: when the server's is first, it hangs up. */
        bool late = gone && clock_now_ns() >= c->deadline_ns;
        if (late || (c->code == GRPC_STATUS_DEADLINE_EXCEEDED &&
                     strcmp(text, "Deadline Exceeded") == 0)) {
            snprintf(text, RPC_TEXT_BYTES, "no answer within %u ms", c->timeout_ms);
            return ST_TIMEOUT;
        }
        return st;
    }
    enum st st = rpc_buffer_read(c->reply, reply);
    if (st != ST_OK) snprintf(text, RPC_TEXT_BYTES, "the answer cannot be read");
    return st;
}

static void call_free(struct client_call *c)
{
    grpc_call_unref(c->call);
    grpc_byte_buffer_destroy(c->request);
    grpc_byte_buffer_destroy(c->reply); /* NULL ok */
    grpc_metadata_array_destroy(&c->initial);
    grpc_metadata_array_destroy(&c->trailing);
    grpc_slice_unref(c->details);
    mem_free(c);
}

/* The batch is complete: the queue's thread. */
static void call_done(void *ctx, bool ok)
{
    struct client_call *c = ctx;
    struct msg *reply = NULL;
    char text[RPC_TEXT_BYTES];
    enum st st = call_result(c, &reply, text);
    if (call_unlink(c) && c->code == GRPC_STATUS_CANCELLED) {
        st = ST_CANCELLED; /* by this side: a closing server would be ST_UNAVAILABLE */
        snprintf(text, sizeof(text), "%s", GIVEN_UP);
    }
    struct client_end *p = c->peer;
    c->done(c->done_ctx, st, reply, text);
    call_free(c);
    pthread_mutex_lock(&p->lock);
    if (--p->waiting == 0) pthread_cond_signal(&p->none_waiting);
    pthread_mutex_unlock(&p->lock);
}

static void call_start(struct client_call *c)
{
    grpc_op op[6] = {
        {.op = GRPC_OP_SEND_INITIAL_METADATA,
         .flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                  GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET},
        {.op = GRPC_OP_SEND_MESSAGE},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
        {.op = GRPC_OP_RECV_INITIAL_METADATA},
        {.op = GRPC_OP_RECV_MESSAGE},
        {.op = GRPC_OP_RECV_STATUS_ON_CLIENT},
    };
    op[1].data.send_message.send_message = c->request;
    op[3].data.recv_initial_metadata.recv_initial_metadata = &c->initial;
    op[4].data.recv_message.recv_message = &c->reply;
    op[5].data.recv_status_on_client.trailing_metadata = &c->trailing;
    op[5].data.recv_status_on_client.status = &c->code;
    op[5].data.recv_status_on_client.status_details = &c->details;
    grpc_call_error e = grpc_call_start_batch(c->call, op, 6, &c->tag, NULL);
    CHECK(e == GRPC_CALL_OK, "gRPC takes a batch of these six operations");
}

void rpc_grpc_send(struct rpc_peer *base, enum rpc_method method, struct msg *req,
                   uint32_t timeout_ms, rpc_done *done, void *ctx)
{
    struct client_end *p = (struct client_end *)base;
    struct client_call *c = mem_zalloc(1, sizeof(*c));
    if (c == NULL) {
        msg_close(req);
        done(ctx, ST_NOMEM, NULL, "no memory for a call");
        return;
    }
    c->tag = (struct rpc_tag){call_done, c};
    c->peer = p;
    c->done = done;
    c->done_ctx = ctx;
    c->timeout_ms = timeout_ms;
    c->deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000u;
    c->details = grpc_empty_slice();
    c->request = rpc_buffer_of(req);
    grpc_metadata_array_init(&c->initial);
    grpc_metadata_array_init(&c->trailing);
    gpr_timespec deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                         gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
    c->call = grpc_channel_create_registered_call(p->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                                  p->t->clients.cq, p->method[method], deadline,
                                                  NULL);
    if (call_link(c)) {
        call_start(c);
    } else {
        call_free(c);
        done(ctx, ST_CANCELLED, NULL, GIVEN_UP);
    }
}

enum st rpc_grpc_connect(struct transport *base, const char *address, struct rpc_peer **out)
{
    struct rpc_address a;
    enum st st = rpc_address_parse(address, &a);
    if (st != ST_OK) return st;
    st = ST_NOMEM;
    struct client_end *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) goto err;
    char *target = rpc_address_text(a.scheme, &a);
    if (target == NULL) goto err_peer;
    p->base = (struct rpc_peer){&RPC_GRPC_OPS, mem_strdup(address)};
    if (p->base.address == NULL) goto err_target;

    p->t = (struct grpc_transport *)base;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->none_waiting, NULL);
    grpc_channel_args args = rpc_grpc_client_args();
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    p->channel = grpc_channel_create(target, plain, &args);
    grpc_channel_credentials_release(plain);
    for (int i = 0; i < RPC_N; i++)
        p->method[i] = grpc_channel_register_call(p->channel, RPC_GRPC_PATH[i], NULL, NULL);
    rpc_grpc_count_peer(p->t, 1);
    mem_free(target);
    *out = &p->base;
    return ST_OK;

err_target:
    mem_free(target);
err_peer:
    mem_free(p);
err:
    return log_fail(st, address, "no memory for a connection");
}

void rpc_grpc_peer_cancel(struct rpc_peer *base)
{
    struct client_end *p = (struct client_end *)base;
    pthread_mutex_lock(&p->lock);
    p->cancelled = true;
    for (struct client_call *c = p->calls; c != NULL; c = c->next)
        grpc_call_cancel(c->call, NULL); /* it calls back on the queue's thread */
    pthread_mutex_unlock(&p->lock);
}

void rpc_grpc_peer_close(struct rpc_peer *base)
{
    struct client_end *p = (struct client_end *)base;
    pthread_mutex_lock(&p->lock);
    while (p->waiting > 0) pthread_cond_wait(&p->none_waiting, &p->lock); /* ends: deadlines */
    pthread_mutex_unlock(&p->lock);
    grpc_channel_destroy(p->channel);
    rpc_grpc_count_peer(p->t, -1);
    pthread_cond_destroy(&p->none_waiting);
    pthread_mutex_destroy(&p->lock);
    mem_free(p->base.address);
    mem_free(p);
}
