/* tests/support/server_case.h - embedding servers over the local transport, requests to them. */
#ifndef CHANTER_TESTS_SUPPORT_SERVER_CASE_H
#define CHANTER_TESTS_SUPPORT_SERVER_CASE_H

#include <stdint.h>

#include "embserver/service.h"
#include "proto/codec.h"
#include "tests/support/pending.h"

/* Four tables of three values and three floats of state. */
enum { D = 3, STATE = 3, W = D + STATE, F = 4, MAX_SERVERS = 2 };
extern uint64_t SERVER_ROWS[F];
enum { JOB = 0xabcdef, ATTEMPT = 4, SEED = 7, NOW = 500 /* iteration of the sender */ };
extern const struct rpc_header SERVER_HEAD; /* a good request's */

struct server_case {
    struct config config;
    struct transport *transport;
    struct embserver *server[MAX_SERVERS];
    struct rpc_peer *peer[MAX_SERVERS];
};

void server_setup(struct server_case *f, uint32_t servers, uint32_t threads, uint32_t timeout_s);
void server_teardown(struct server_case *f);
uint32_t server_shard_of(const struct server_case *f, uint64_t id);

/* A row's record as of a version: no two are alike. */
void server_record(uint64_t id, int64_t version, float out[W]);
/* Requests. */
struct msg *server_write_back_msg(const struct rpc_header *h, uint32_t shard, const uint64_t *id,
                                  const int64_t *version, uint32_t n);
struct msg *server_fetch_msg(uint32_t shard, int owned, const uint64_t *id, const int64_t *need,
                             uint32_t n);
enum st server_ask(struct rpc_peer *peer, enum rpc_method method, struct msg *req,
                   struct msg **reply, char text[256]);

/* Write one row back, and see the answer. */
void server_write_back(struct server_case *f, uint64_t id, int64_t version);
/* Fetch one whole row; the answer has to be assert_server_fetched. */
void server_fetch_start(struct server_case *f, struct pending *p, uint64_t id, int64_t need);
void assert_server_fetched(struct pending *p, uint64_t id, int64_t version);
/* Row i of a reply is `id` as of `version`; STORE_NEVER: its initial record. */
void assert_server_row(const struct fetch_reply *r, uint32_t i, uint64_t id, int64_t version);
void assert_server_header(const struct rpc_header *h, uint32_t rank);

/* Digest over all servers. Comes back after all that was sent before: queues are in order. */
struct digest server_digest_now(struct server_case *f);
void assert_same_digest(struct digest a, struct digest b);

#endif
