/* proto/transport.h - the seam between roles: calls with one request and one reply, as bytes.
 * Behind it: grpc*.c (the only files with gRPC) and local.c (roles as threads of one process).
 * Knows nothing of what the bytes mean: that is codec.h. */
#ifndef CHANTER_PROTO_TRANSPORT_H
#define CHANTER_PROTO_TRANSPORT_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "proto/msg.h"

enum rpc_method { RPC_PLAN, RPC_FETCH, RPC_WRITE_BACK, RPC_DIGEST, RPC_EXPORT, RPC_N };

struct transport;    /* one per process (grpc) or per job (local) */
struct rpc_server;   /* one listening role                        */
struct rpc_peer;     /* a client's end of one server              */
struct rpc_call;     /* one request being answered                */

/* Server side. Called on a transport thread (grpc: its queue's; local: the caller's): it must not
 * block. `req` lives until the call is answered. Exactly one rpc_reply or rpc_fail follows,
 * from any thread, then or later: that is how a fetch is parked. */
typedef void rpc_handler(void *ctx, struct rpc_call *call, enum rpc_method method,
                         const uint8_t *req, size_t len);
void rpc_reply(struct rpc_call *call, struct msg *reply);                /* takes reply */
/* `text`: one line for the other side's log, copied. */
void rpc_fail(struct rpc_call *call, enum st st, const char *text);
void rpc_failf(struct rpc_call *call, enum st st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Client side. Called once per rpc_send, on a transport thread, a server's or the sender's own, and
 * possibly before rpc_send returns: it must not block and not hold what rpc_send's caller holds.
 * reply: taken by the callback; NULL unless st == ST_OK. `text`: why not, valid for the call. */
typedef void rpc_done(void *ctx, enum st st, struct msg *reply, const char *text);

MUST_USE enum st transport_open(enum transport_kind kind, struct transport **out);
void transport_close(struct transport *t); /* NULL ok; after all servers and peers */

/* Serve at `address` ("127.0.0.1:0" lets the kernel choose; local: any name unique in `t`). grpc:
 * 127.0.0.1, localhost, [::1] or unix: only, also in rpc_connect: ST_PERM. */
MUST_USE enum st rpc_serve(struct transport *t, const char *address, rpc_handler *fn, void *ctx,
                           struct rpc_server **out);
const char *rpc_address(const struct rpc_server *s); /* "127.0.0.1:41234"; lives as long as s */
/* Refuse new calls, wait for the open ones up to a grace, cancel what is left, free. The handler's
 * owner must have answered or failed every parked call before (or does so from another thread). */
void rpc_server_close(struct rpc_server *s); /* NULL ok */

MUST_USE enum st rpc_connect(struct transport *t, const char *address, struct rpc_peer **out);
/* Every call under way, and every one sent from now on, calls back with ST_CANCELLED at once: for a
 * client that has failed and wants to leave. Any thread. */
void rpc_peer_cancel(struct rpc_peer *p);
/* Waits until every call sent has called back. */
void rpc_peer_close(struct rpc_peer *p); /* NULL ok */
/* Takes req. `done` is always called, exactly once; with ST_TIMEOUT after timeout_ms, with
 * ST_UNAVAILABLE when the peer is gone, with what rpc_fail was given otherwise. Any thread. */
void rpc_send(struct rpc_peer *p, enum rpc_method method, struct msg *req, uint32_t timeout_ms,
              rpc_done *done, void *ctx);
/* rpc_send and wait. On ST_OK *reply is the caller's; otherwise it logs who did not answer what. */
MUST_USE enum st rpc_call_wait(struct rpc_peer *p, enum rpc_method method, struct msg *req,
                               uint32_t timeout_ms, struct msg **reply);

#endif
