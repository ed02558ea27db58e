/* proto/codec.h - structs <-> bytes: the only code that knows the layout of the .proto files. Every
 * decode checks all lengths and counts against the bytes that are there and changes nothing when
 * it says ST_BADMSG; it logs nothing then: the caller knows who sent it. Rows travel as the last
 * field of a message, so that a sender gathers them straight into the outgoing buffer and a
 * receiver scatters them straight from the incoming one; any protobuf library reads and writes the
 * same bytes. */
#ifndef CHANTER_PROTO_CODEC_H
#define CHANTER_PROTO_CODEC_H

#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"
#include "proto/msg.h"
#include "proto/plan.h"

enum rpc_role { ROLE_ORACLE = 1, ROLE_SERVER = 2, ROLE_TRAINER = 3, ROLE_TOOL = 4 };

/* Stamped on every request and reply; a message of another job or attempt is refused. */
struct rpc_header {
    uint64_t job;        /* random, per job        */
    uint32_t attempt;    /* incarnation of the job */
    enum rpc_role role;  /* sender                 */
    uint32_t rank;       /* sender                 */
    int64_t iteration;   /* of the sender          */
};

/* Plans. */
MUST_USE enum st plan_request_encode(const struct rpc_header *h, uint64_t seq, struct msg **out);
MUST_USE enum st plan_request_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                     uint64_t *seq);
/* What a plan's arrays are measured with; the same on both sides. */
struct plan_limits { uint32_t n_trainers, n_tables, dense_features; uint64_t cap_rows; };
/* Uses n_tables and dense_features of `lim`; the plan is the planner's, taken as it is. */
MUST_USE enum st plan_encode(const struct rpc_header *h, const struct plan_limits *lim,
                             const struct plan *plan, struct msg **out);
/* Checks every slot < cap_rows (eval: < eval_rows), counts, list lengths; `n_trainers`, F and
 * dense_features must match what the plan holds. */
MUST_USE enum st plan_decode(const uint8_t *p, size_t n, const struct plan_limits *lim,
                             struct rpc_header *h, struct plan **out);

/* Rows of `row_floats` floats that a fetch or a write-back may carry: few enough that other messages
 * of the connection need not wait long behind it, and far below what the transport takes. */
enum { CODEC_MAX_ROWS = 4096, CODEC_MAX_ROW_BYTES = 4 << 20 };
static inline uint32_t codec_max_rows(uint32_t row_floats)
{
    uint32_t fit = CODEC_MAX_ROW_BYTES / (row_floats * (uint32_t)sizeof(float));
    return fit == 0 ? 1 : fit < CODEC_MAX_ROWS ? fit : (uint32_t)CODEC_MAX_ROWS;
}

/* Fetch: rows of one shard. Reply rows: n * row_floats floats, in request order. */
struct fetch_request {
    uint32_t shard, n;
    uint8_t owned;            /* 1: whole records; 0: values only                              */
    const uint8_t *row_id;    /* [n] u64, little endian, unaligned: read with codec_u64        */
    const uint8_t *need;      /* [n] i64, likewise                                             */
};
MUST_USE enum st fetch_request_encode(const struct rpc_header *h, uint32_t shard, uint8_t owned,
                                      const uint64_t *row_id, const int64_t *need, uint32_t n,
                                      struct msg **out);
MUST_USE enum st fetch_request_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                      struct fetch_request *out);
/* Makes a reply with room for the rows: the caller writes n versions and n * row_floats floats at
 * *version and *rows (unaligned: memcpy). */
MUST_USE enum st fetch_reply_begin(const struct rpc_header *h, uint32_t n, uint32_t row_floats,
                                   struct msg **out, uint8_t **version, uint8_t **rows);
struct fetch_reply {
    uint32_t n, row_floats;
    const uint8_t *version;   /* [n] i64                                                       */
    const uint8_t *rows;      /* [n][row_floats] f32                                           */
};
MUST_USE enum st fetch_reply_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                    struct fetch_reply *out);

/* Write-back: whole records of one shard, each stamped (header.attempt, version). */
struct write_back {
    uint32_t shard, n, row_floats;
    const uint8_t *row_id, *version, *rows; /* [n] u64, [n] i64, [n][row_floats] f32           */
};
MUST_USE enum st write_back_begin(const struct rpc_header *h, uint32_t shard,
                                  const uint64_t *row_id, const int64_t *version, uint32_t n,
                                  uint32_t row_floats, struct msg **out, uint8_t **rows);
MUST_USE enum st write_back_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                   struct write_back *out);
/* An answer that says only "done" (write-back), and a request that says only who asks (digest). */
MUST_USE enum st plain_encode(const struct rpc_header *h, struct msg **out);
MUST_USE enum st plain_decode(const uint8_t *p, size_t n, struct rpc_header *h);

MUST_USE enum st digest_reply_encode(const struct rpc_header *h, struct digest d,
                                     struct msg **out);
MUST_USE enum st digest_reply_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                     struct digest *d);

/* Export: the rows of one table that live on one server, `first`.. in steps of the server's own
 * order; answered with a fetch_reply (whole records) plus row ids being implied:
 * row numbers first, first + 1, ... of those that the server holds, up to `count` row numbers. */
struct export_request { uint32_t table; uint64_t first; uint32_t count; };
MUST_USE enum st export_request_encode(const struct rpc_header *h, const struct export_request *e,
                                       struct msg **out);
MUST_USE enum st export_request_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                                       struct export_request *out);

uint64_t codec_u64(const uint8_t *p, uint32_t i); /* element i of an unaligned array */

#endif
