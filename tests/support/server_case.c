#include "tests/support/server_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/row.h"
#include "embserver/store.h"

uint64_t SERVER_ROWS[F] = {1, 10, 9000, 1 << 20};
const struct rpc_header SERVER_HEAD = {.job = 0xabcdef, .attempt = ATTEMPT, .role = ROLE_TRAINER,
                                       .rank = 1, .iteration = NOW};

void server_setup(struct server_case *f, uint32_t servers, uint32_t threads, uint32_t timeout_s)
{
    *f = (struct server_case){0};
    f->config.model.tables = SERVER_ROWS;
    f->config.model.n_tables = F;
    f->config.model.dim = D;
    f->config.train.optimizer = OPT_ADAGRAD;
    f->config.train.seed = SEED;
    f->config.cluster.trainers = 2;
    f->config.cluster.servers = servers;
    f->config.cluster.server_threads = threads;
    f->config.cluster.timeout_s = timeout_s;
    assert_int_equal(transport_open(TRANSPORT_LOCAL, &f->transport), ST_OK);
    for (uint32_t i = 0; i < servers; i++) {
        char address[24];
        snprintf(address, sizeof(address), "server-%u", i);
        struct embserver_cfg cfg = {.config = &f->config, .transport = f->transport,
                                    .address = address, .rank = i, .job = JOB,
                                    .attempt = ATTEMPT};
        assert_int_equal(embserver_start(&cfg, &f->server[i]), ST_OK);
        assert_string_equal(embserver_address(f->server[i]), address);
        assert_int_equal(rpc_connect(f->transport, address, &f->peer[i]), ST_OK);
    }
}

void server_teardown(struct server_case *f)
{
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        embserver_close(f->server[i]); /* ends every call, which rpc_peer_close waits for */
        rpc_peer_close(f->peer[i]);
    }
    transport_close(f->transport);
}

uint32_t server_shard_of(const struct server_case *f, uint64_t id)
{
    return row_shard(id, f->config.cluster.servers * f->config.cluster.server_threads);
}

static struct rpc_peer *peer_of(const struct server_case *f, uint64_t id)
{
    return f->peer[server_shard_of(f, id) / f->config.cluster.server_threads];
}

void server_record(uint64_t id, int64_t version, float out[W])
{
    for (int i = 0; i < W; i++)
        out[i] = (float)row_table(id) + (float)row_number(id) / 16 + (float)version * 64 +
                 (float)i / 1024;
}

struct msg *server_write_back_msg(const struct rpc_header *h, uint32_t shard, const uint64_t *id,
                                  const int64_t *version, uint32_t n)
{
    struct msg *m;
    uint8_t *rows;
    assert_int_equal(write_back_begin(h, shard, id, version, n, W, &m, &rows), ST_OK);
    for (uint32_t i = 0; i < n; i++) {
        float record[W];
        server_record(id[i], version[i], record);
        memcpy(rows + i * sizeof(record), record, sizeof(record));
    }
    return m;
}

struct msg *server_fetch_msg(uint32_t shard, int owned, const uint64_t *id, const int64_t *need,
                             uint32_t n)
{
    struct msg *m;
    enum st st = fetch_request_encode(&SERVER_HEAD, shard, (uint8_t)owned, id, need, n, &m);
    assert_int_equal(st, ST_OK);
    return m;
}

enum st server_ask(struct rpc_peer *peer, enum rpc_method method, struct msg *req,
                   struct msg **reply, char text[256])
{
    struct pending p;
    pending_send(&p, peer, method, req, PENDING_MS);
    enum st st = pending_wait(&p, reply);
    if (text != NULL) memcpy(text, p.text, sizeof(p.text));
    return st;
}

void assert_server_header(const struct rpc_header *h, uint32_t rank)
{
    assert_true(h->job == JOB);
    assert_int_equal(h->attempt, ATTEMPT);
    assert_int_equal(h->role, ROLE_SERVER);
    assert_int_equal(h->rank, rank);
    assert_int_equal(h->iteration, NOW);
}

void server_write_back(struct server_case *f, uint64_t id, int64_t version)
{
    struct msg *reply;
    struct rpc_header h;
    struct msg *req = server_write_back_msg(&SERVER_HEAD, server_shard_of(f, id), &id, &version, 1);
    assert_int_equal(server_ask(peer_of(f, id), RPC_WRITE_BACK, req, &reply, NULL), ST_OK);
    assert_int_equal(plain_decode(reply->data, reply->len, &h), ST_OK);
    assert_server_header(&h, server_shard_of(f, id) / f->config.cluster.server_threads);
    msg_close(reply);
}

void server_fetch_start(struct server_case *f, struct pending *p, uint64_t id, int64_t need)
{
    struct msg *req = server_fetch_msg(server_shard_of(f, id), 1, &id, &need, 1);
    pending_send(p, peer_of(f, id), RPC_FETCH, req, PENDING_MS);
}

void assert_server_row(const struct fetch_reply *r, uint32_t i, uint64_t id, int64_t version)
{
    float want[W], got[W];
    if (version == STORE_NEVER) store_initial(SEED, id, SERVER_ROWS[row_table(id)], D, STATE, want);
    else server_record(id, version, want);
    assert_true((int64_t)codec_u64(r->version, i) == version);
    size_t bytes = r->row_floats * sizeof(float);
    memcpy(got, r->rows + i * bytes, bytes);
    assert_memory_equal(got, want, bytes);
}

void assert_server_fetched(struct pending *p, uint64_t id, int64_t version)
{
    struct msg *reply;
    struct rpc_header h;
    struct fetch_reply r;
    assert_int_equal(pending_wait(p, &reply), ST_OK);
    assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.row_floats, W);
    assert_server_row(&r, 0, id, version);
    msg_close(reply);
}

struct digest server_digest_now(struct server_case *f)
{
    struct digest sum = {0};
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        struct msg *req, *reply;
        struct rpc_header h;
        struct digest d;
        assert_int_equal(plain_encode(&SERVER_HEAD, &req), ST_OK);
        assert_int_equal(server_ask(f->peer[i], RPC_DIGEST, req, &reply, NULL), ST_OK);
        assert_int_equal(digest_reply_decode(reply->data, reply->len, &h, &d), ST_OK);
        assert_server_header(&h, i);
        digest_merge(&sum, d);
        msg_close(reply);
    }
    return sum;
}

void assert_same_digest(struct digest a, struct digest b)
{
    assert_true(a.lo == b.lo);
    assert_true(a.hi == b.hi);
}
