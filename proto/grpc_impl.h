/* proto/grpc_impl.h - what grpc.c, grpc_server.c and grpc_client.c share; the only files that see
 * gRPC. */
#ifndef CHANTER_PROTO_GRPC_IMPL_H
#define CHANTER_PROTO_GRPC_IMPL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/transport_impl.h"

/* What a completion queue hands back: embedded in the struct that waits. */
struct rpc_tag {
    void (*fn)(void *ctx, bool ok); /* on the queue's thread; must not block */
    void *ctx;
};

/* A completion queue and the one thread that runs its tags. */
struct rpc_queue {
    grpc_completion_queue *cq;
    pthread_t thread;
    const char *name; /* of the thread */
};
MUST_USE enum st rpc_queue_open(struct rpc_queue *q, const char *name);
void rpc_queue_close(struct rpc_queue *q); /* no batch is started from here on; drains, joins */

struct grpc_transport {
    struct transport base;
    struct rpc_queue clients;      /* of all peers                          */
    pthread_mutex_t lock;          /* guards the rest                       */
    size_t n_servers, n_peers;
};
/* by: +1 or -1. */
void rpc_grpc_count_server(struct grpc_transport *t, int by);
void rpc_grpc_count_peer(struct grpc_transport *t, int by);

extern const struct transport_ops RPC_GRPC_OPS;
extern const char *const RPC_GRPC_PATH[RPC_N]; /* "/chanter.Oracle/Plan" */

/* An address of this machine, split up. Others are refused and logged: there is no TLS yet, and
 * whoever reaches a port may read and write tables. */
struct rpc_address {
    const char *scheme; /* "ipv4:", "ipv6:", "unix:": of gRPC's target names           */
    const char *host;   /* "127.0.0.1", "[::1]"; unix: the path, a part of what was parsed */
    unsigned port;      /* unix: 0                                                      */
};
MUST_USE enum st rpc_address_parse(const char *address, struct rpc_address *out);
char *rpc_address_text(const char *scheme, const struct rpc_address *a); /* mem_free; NULL */

grpc_channel_args rpc_grpc_server_args(void);
grpc_channel_args rpc_grpc_client_args(void);

/* Bytes of `m` by reference: m is freed when gRPC lets go of them, on any thread. Takes m. */
grpc_byte_buffer *rpc_buffer_of(struct msg *m);
/* Copy of a received message in one piece. NULL: ST_BADMSG. */
MUST_USE enum st rpc_buffer_read(grpc_byte_buffer *b, struct msg **out);

/* A failure of ours <-> a gRPC status. The text carries the code: "E-BADMSG: ...". */
grpc_slice rpc_status_put(enum st st, const char *text, grpc_status_code *code);
/* text: where the rest of the details goes. Details without our code: by the gRPC code. */
enum st rpc_status_get(grpc_status_code code, grpc_slice details, char text[RPC_TEXT_BYTES]);

enum st rpc_grpc_serve(struct transport *t, const char *address, rpc_handler *fn, void *ctx,
                       struct rpc_server **out);
void rpc_grpc_server_close(struct rpc_server *s);
void rpc_grpc_answer(struct rpc_call *call, enum st st, struct msg *reply, const char *text);
enum st rpc_grpc_connect(struct transport *t, const char *address, struct rpc_peer **out);
void rpc_grpc_peer_cancel(struct rpc_peer *p);
void rpc_grpc_peer_close(struct rpc_peer *p);
void rpc_grpc_send(struct rpc_peer *p, enum rpc_method method, struct msg *req,
                   uint32_t timeout_ms, rpc_done *done, void *ctx);

#endif
