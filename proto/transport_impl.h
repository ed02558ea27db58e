/* proto/transport_impl.h - what the implementations of transport.h share. For transport.c, local.c
 * and grpc*.c only. Each of them embeds these structs as the first member of its own. */
#ifndef CHANTER_PROTO_TRANSPORT_IMPL_H
#define CHANTER_PROTO_TRANSPORT_IMPL_H

#include "proto/transport.h"

/* A closing server gives open calls this long, then ends them on the client's side; a handler that
 * still owes an answer after the second time has forgotten it: a bug. */
enum { RPC_GRACE_MS = 2000, RPC_FORGOTTEN_MS = 10000 };
/* What rpc_fail carries at most, with the end; a log line is no longer. */
enum { RPC_TEXT_BYTES = 1024 };

/* See transport.h for what each has to do. */
struct transport_ops {
    void (*close)(struct transport *t);
    enum st (*serve)(struct transport *t, const char *address, rpc_handler *fn, void *ctx,
                     struct rpc_server **out);
    void (*server_close)(struct rpc_server *s);
    enum st (*connect)(struct transport *t, const char *address, struct rpc_peer **out);
    void (*peer_cancel)(struct rpc_peer *p);
    void (*peer_close)(struct rpc_peer *p);
    void (*send)(struct rpc_peer *p, enum rpc_method method, struct msg *req, uint32_t timeout_ms,
                 rpc_done *done, void *ctx);
    /* st == ST_OK: `reply`, taken. Otherwise `text`; reply is NULL. */
    void (*answer)(struct rpc_call *call, enum st st, struct msg *reply, const char *text);
};

struct transport { const struct transport_ops *ops; };
struct rpc_server { const struct transport_ops *ops; char *address; /* owned by the backend */ };
struct rpc_peer { const struct transport_ops *ops; char *address; /* likewise */ };
struct rpc_call { const struct transport_ops *ops; };

enum st local_transport_open(struct transport **out);
enum st grpc_transport_open(struct transport **out);

const char *rpc_method_name(enum rpc_method method); /* "Fetch" */

#endif
