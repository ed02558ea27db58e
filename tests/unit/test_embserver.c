/* An embedding server over the local transport: parked fetches (I2), write-backs (I3), refused
 * messages (I5), deadlines (I6), digest and export. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/row.h"
#include "embserver/service.h"
#include "embserver/store.h"
#include "proto/codec.h"
#include "tests/support/caught.h"
#include "tests/support/pending.h"

enum { D = 3, STATE = 3, W = D + STATE, F = 4, MAX_SERVERS = 2 };
static uint64_t ROWS[F] = {1, 10, 9000, 1 << 20};
static const uint64_t JOB = 0xabcdef;
enum { ATTEMPT = 4, SEED = 7, NOW = 500 /* iteration of the sender */ };

struct fixture {
    struct config config;
    struct transport *transport;
    struct embserver *server[MAX_SERVERS];
    struct rpc_peer *peer[MAX_SERVERS];
};

static void setup(struct fixture *f, uint32_t servers, uint32_t threads, uint32_t timeout_s)
{
    *f = (struct fixture){0};
    f->config.model.tables = ROWS;
    f->config.model.n_tables = F;
    f->config.model.dim = D;
    f->config.train.optimizer = OPT_ADAGRAD;
    f->config.train.seed = SEED;
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

static void teardown(struct fixture *f)
{
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        embserver_close(f->server[i]); /* ends every call, which rpc_peer_close waits for */
        rpc_peer_close(f->peer[i]);
    }
    transport_close(f->transport);
}

static const struct rpc_header HEAD = {.job = 0xabcdef, .attempt = ATTEMPT, .role = ROLE_TRAINER,
                                       .rank = 1, .iteration = NOW};

/* --- requests --------------------------------------------------------------------------------- */

static uint32_t shard_of(const struct fixture *f, uint64_t id)
{
    return row_shard(id, f->config.cluster.servers * f->config.cluster.server_threads);
}

static struct rpc_peer *peer_of(const struct fixture *f, uint64_t id)
{
    return f->peer[shard_of(f, id) / f->config.cluster.server_threads];
}

/* A row's record as of a version: no two are alike. */
static void make_record(uint64_t id, int64_t version, float out[W])
{
    for (int i = 0; i < W; i++)
        out[i] = (float)row_table(id) + (float)row_number(id) / 16 + (float)version * 64 +
                 (float)i / 1024;
}

static struct msg *write_back_msg(const struct rpc_header *h, uint32_t shard, const uint64_t *id,
                                  const int64_t *version, uint32_t n)
{
    struct msg *m;
    uint8_t *rows;
    assert_int_equal(write_back_begin(h, shard, id, version, n, W, &m, &rows), ST_OK);
    for (uint32_t i = 0; i < n; i++) {
        float record[W];
        make_record(id[i], version[i], record);
        memcpy(rows + i * sizeof(record), record, sizeof(record));
    }
    return m;
}

static struct msg *fetch_msg(uint32_t shard, int owned, const uint64_t *id, const int64_t *need,
                             uint32_t n)
{
    struct msg *m;
    assert_int_equal(fetch_request_encode(&HEAD, shard, (uint8_t)owned, id, need, n, &m), ST_OK);
    return m;
}

static enum st ask(struct rpc_peer *peer, enum rpc_method method, struct msg *req,
                   struct msg **reply, char text[256])
{
    struct pending p;
    pending_send(&p, peer, method, req, PENDING_MS);
    enum st st = pending_wait(&p, reply);
    if (text != NULL) memcpy(text, p.text, sizeof(p.text));
    return st;
}

static void assert_header(const struct rpc_header *h, uint32_t rank)
{
    assert_true(h->job == JOB);
    assert_int_equal(h->attempt, ATTEMPT);
    assert_int_equal(h->role, ROLE_SERVER);
    assert_int_equal(h->rank, rank);
    assert_int_equal(h->iteration, NOW);
}

static void write_back(struct fixture *f, uint64_t id, int64_t version)
{
    struct msg *reply;
    struct rpc_header h;
    assert_int_equal(ask(peer_of(f, id), RPC_WRITE_BACK,
                         write_back_msg(&HEAD, shard_of(f, id), &id, &version, 1), &reply, NULL),
                     ST_OK);
    assert_int_equal(plain_decode(reply->data, reply->len, &h), ST_OK);
    assert_header(&h, shard_of(f, id) / f->config.cluster.server_threads);
    msg_close(reply);
}

static void fetch_start(struct fixture *f, struct pending *p, uint64_t id, int64_t need)
{
    pending_send(p, peer_of(f, id), RPC_FETCH, fetch_msg(shard_of(f, id), 1, &id, &need, 1),
                 PENDING_MS);
}

/* Row i of a reply is `id` as of `version`; STORE_NEVER: its initial record. */
static void assert_reply_row(const struct fetch_reply *r, uint32_t i, uint64_t id, int64_t version)
{
    float want[W], got[W];
    if (version == STORE_NEVER) store_initial(SEED, id, ROWS[row_table(id)], D, STATE, want);
    else make_record(id, version, want);
    assert_true((int64_t)codec_u64(r->version, i) == version);
    size_t bytes = r->row_floats * sizeof(float);
    memcpy(got, r->rows + i * bytes, bytes);
    assert_memory_equal(got, want, bytes);
}

static void assert_fetched(struct pending *p, uint64_t id, int64_t version)
{
    struct msg *reply;
    struct rpc_header h;
    struct fetch_reply r;
    assert_int_equal(pending_wait(p, &reply), ST_OK);
    assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
    assert_int_equal(r.n, 1);
    assert_int_equal(r.row_floats, W);
    assert_reply_row(&r, 0, id, version);
    msg_close(reply);
}

/* Digest over all servers. Comes back after all that was sent before: queues are in order. */
static struct digest digest_now(struct fixture *f)
{
    struct digest sum = {0};
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        struct msg *req, *reply;
        struct rpc_header h;
        struct digest d;
        assert_int_equal(plain_encode(&HEAD, &req), ST_OK);
        assert_int_equal(ask(f->peer[i], RPC_DIGEST, req, &reply, NULL), ST_OK);
        assert_int_equal(digest_reply_decode(reply->data, reply->len, &h, &d), ST_OK);
        assert_header(&h, i);
        digest_merge(&sum, d);
        msg_close(reply);
    }
    return sum;
}

static void assert_digest(struct digest a, struct digest b)
{
    assert_true(a.lo == b.lo);
    assert_true(a.hi == b.hi);
}

/* --- fetches and write-backs ------------------------------------------------------------------ */

static void a_fetch_gives_versions_and_rows_in_request_order(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    uint64_t id[3] = {row_id(2, 8999), row_id(0, 0), row_id(1, 5)};
    int64_t need[3] = {PLAN_NEED_SETTLED, PLAN_NEED_SETTLED, 7};
    write_back(&f, id[0], 6);
    write_back(&f, id[2], 7);
    for (int owned = 0; owned < 2; owned++) {
        struct msg *reply;
        struct rpc_header h;
        struct fetch_reply r;
        assert_int_equal(ask(f.peer[0], RPC_FETCH, fetch_msg(0, owned, id, need, 3), &reply, NULL),
                         ST_OK);
        assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
        assert_header(&h, 0);
        assert_int_equal(r.n, 3);
        assert_int_equal(r.row_floats, owned ? W : D);
        assert_reply_row(&r, 0, id[0], 6);
        assert_reply_row(&r, 1, id[1], STORE_NEVER);
        assert_reply_row(&r, 2, id[2], 7);
        msg_close(reply);
    }
    teardown(&f);
}

static void a_fetch_before_its_write_back_is_answered_after_it(void **state)
{
    struct fixture f;
    setup(&f, 2, 3, 20);
    for (uint64_t row = 0; row < 10; row++) { /* every shard */
        uint64_t id = row_id(2, row);
        struct pending p;
        fetch_start(&f, &p, id, 5);
        digest_now(&f);
        assert_false(pending_done(&p));
        write_back(&f, id, 4); /* not yet what it needs */
        digest_now(&f);
        assert_false(pending_done(&p));
        write_back(&f, id, 5);
        assert_fetched(&p, id, 5);
    }
    teardown(&f);
}

static void a_fetch_waits_for_all_its_rows_in_whatever_order_they_come(void **state)
{
    static const int ORDER[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1},
                                    {2, 1, 0}};
    struct fixture f;
    setup(&f, 1, 1, 20);
    for (int k = 0; k < 6; k++) {
        uint64_t id[3] = {row_id(1, 1), row_id(2, 4096), row_id(1, 9)};
        int64_t need[3] = {k, k, k};
        struct pending p;
        pending_send(&p, f.peer[0], RPC_FETCH, fetch_msg(0, 1, id, need, 3), PENDING_MS);
        for (int i = 0; i < 3; i++) {
            digest_now(&f);
            assert_false(pending_done(&p));
            write_back(&f, id[ORDER[k][i]], k);
        }
        struct msg *reply;
        struct rpc_header h;
        struct fetch_reply r;
        assert_int_equal(pending_wait(&p, &reply), ST_OK);
        assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
        for (uint32_t i = 0; i < 3; i++) assert_reply_row(&r, i, id[i], k);
        msg_close(reply);
    }
    teardown(&f);
}

static void a_write_back_gets_past_a_thousand_parked_fetches(void **state)
{
    enum { N = 1000 };
    static struct pending p[N];
    struct fixture f;
    setup(&f, 1, 1, 20);
    for (uint64_t i = 0; i < N; i++) /* three fetches wait for each row */
        fetch_start(&f, &p[i], row_id(2, i / 3), 5);
    write_back(&f, row_id(1, 3), 5); /* comes back: it did not wait */
    for (int i = 0; i < N; i++) assert_false(pending_done(&p[i]));
    for (uint64_t row = 0; row <= (N - 1) / 3; row++) write_back(&f, row_id(2, row), 5);
    for (uint64_t i = 0; i < N; i++) assert_fetched(&p[i], row_id(2, i / 3), 5);
    teardown(&f);
}

static void one_write_back_ends_the_fetches_of_all_its_rows(void **state)
{
    enum { N = 60 };
    struct pending p[N];
    uint64_t id[N];
    int64_t version[N];
    struct fixture f;
    setup(&f, 1, 1, 20);
    for (uint64_t i = 0; i < N; i++) {
        id[i] = row_id(2, i * 7);
        version[i] = 20 - (int64_t)(i % 20);
        fetch_start(&f, &p[i], id[i], version[i]);
    }
    struct msg *reply;
    assert_int_equal(ask(f.peer[0], RPC_WRITE_BACK, write_back_msg(&HEAD, 0, id, version, N),
                         &reply, NULL), ST_OK);
    msg_close(reply);
    for (uint64_t i = 0; i < N; i++) assert_fetched(&p[i], id[i], version[i]);
    teardown(&f);
}

static void late_and_repeated_write_backs_change_nothing(void **state)
{
    struct fixture f;
    setup(&f, 1, 2, 20);
    uint64_t id = row_id(2, 77);
    write_back(&f, id, 8);
    struct digest before = digest_now(&f), want = {0};
    float record[W];
    make_record(id, 8, record);
    digest_add(&want, id, record, sizeof(record));
    assert_digest(before, want);
    write_back(&f, id, 8);
    write_back(&f, id, 3);
    assert_digest(digest_now(&f), before);
    struct pending p;
    fetch_start(&f, &p, id, 8);
    assert_fetched(&p, id, 8);
    teardown(&f);
}

/* --- refused ---------------------------------------------------------------------------------- */

static void assert_refused(struct fixture *f, enum rpc_method method, struct msg *req,
                           const char *why)
{
    struct digest before = digest_now(f);
    struct msg *reply;
    char text[256];
    assert_int_equal(ask(f->peer[0], method, req, &reply, text), ST_BADMSG);
    assert_null(reply);
    if (strstr(text, why) == NULL) fail_msg("'%s' is not in '%s'", why, text);
    assert_digest(digest_now(f), before);
}

static void write_backs_that_break_the_contract_change_nothing(void **state)
{
    struct fixture f;
    setup(&f, 2, 2, 20); /* shards 0 and 1 are on server 0; row (2, r) is on shard (r + 2) % 4 */
    uint64_t here[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    write_back(&f, here[0], 9);
    const struct { uint64_t id; int64_t version; const char *why; } bad[] = {
        {row_id(4, 0), 9, "table 4 of 4"},
        {row_id(1, 10), 9, "table 1 has 10 rows, no row 10"},
        {row_id(2, 9), 9, "row (2, 9) belongs to shard 3, not 0"},
        {row_id(2, 10), NOW + 1, "row (2, 10) of iteration 501, sent at iteration 500"},
        {row_id(2, 10), -1, "iteration -1"},
        {row_id(2, 6), 9, "row (2, 6) twice in one write-back"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        uint64_t id[3] = {row_id(2, 6), row_id(2, 14), bad[i].id};
        int64_t version[3] = {9, 9, bad[i].version};
        assert_refused(&f, RPC_WRITE_BACK, write_back_msg(&HEAD, 0, id, version, 3), bad[i].why);
    }
    assert_refused(&f, RPC_WRITE_BACK, write_back_msg(&HEAD, 1, here, nine, 2), "not 1");
    assert_refused(&f, RPC_WRITE_BACK, write_back_msg(&HEAD, 2, here, nine, 2),
                   "shard 2 is not on server 0");
    assert_refused(&f, RPC_WRITE_BACK, write_back_msg(&HEAD, UINT32_MAX, here, nine, 2),
                   "is not on server 0");
    teardown(&f);
}

static void records_of_the_wrong_width_or_not_finite_are_refused(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    for (uint32_t width = W - 1; width <= W + 1; width += 2) {
        struct msg *m;
        uint8_t *rows;
        assert_int_equal(write_back_begin(&HEAD, 0, id, nine, 2, width, &m, &rows), ST_OK);
        memset(rows, 0, 2 * width * sizeof(float));
        assert_refused(&f, RPC_WRITE_BACK, m, "a record has 6");
    }
    const float bad[3] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 3; k++)
        for (int at = 0; at < W; at++) {
            struct msg *m;
            uint8_t *rows;
            assert_int_equal(write_back_begin(&HEAD, 0, id, nine, 2, W, &m, &rows), ST_OK);
            memset(rows, 0, 2 * W * sizeof(float));
            memcpy(rows + (size_t)(W + at) * sizeof(float), &bad[k], sizeof(float));
            assert_refused(&f, RPC_WRITE_BACK, m, "NaN or infinity in row (2, 6)@9");
        }
    teardown(&f);
}

static void a_second_writer_is_refused_before_any_row_is_taken(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    write_back(&f, id[1], 9);
    struct msg *m = write_back_msg(&HEAD, 0, id, nine, 2);
    m->data[m->len - 2] ^= 1; /* in the last float; rows come last */
    assert_refused(&f, RPC_WRITE_BACK, m, "two writers for row (2, 6)@9");
    teardown(&f);
}

static void requests_of_other_jobs_and_attempts_are_refused(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    struct rpc_header job = HEAD, stale = HEAD, newer = HEAD;
    job.job ^= 1;
    stale.attempt = ATTEMPT - 1;
    newer.attempt = ATTEMPT + 1;
    const struct { const struct rpc_header *h; const char *why; } bad[] = {
        {&job, "job 0000000000abcdee"},
        {&stale, "attempt 3 < 4: stale process"},
        {&newer, "attempt 5 > 4"},
    };
    uint64_t id = row_id(1, 1);
    int64_t version = 9, need = PLAN_NEED_SETTLED;
    struct export_request page = {.table = 1, .count = 5};
    for (size_t i = 0; i < 3; i++) {
        struct msg *m;
        assert_refused(&f, RPC_WRITE_BACK, write_back_msg(bad[i].h, 0, &id, &version, 1),
                       bad[i].why);
        assert_int_equal(fetch_request_encode(bad[i].h, 0, 1, &id, &need, 1, &m), ST_OK);
        assert_refused(&f, RPC_FETCH, m, bad[i].why);
        assert_int_equal(plain_encode(bad[i].h, &m), ST_OK);
        assert_refused(&f, RPC_DIGEST, m, bad[i].why);
        assert_int_equal(export_request_encode(bad[i].h, &page, &m), ST_OK);
        assert_refused(&f, RPC_EXPORT, m, bad[i].why);
    }
    teardown(&f);
}

static void fetches_and_exports_of_rows_that_are_not_here_are_refused(void **state)
{
    struct fixture f;
    setup(&f, 2, 2, 20);
    const struct { uint64_t id; int64_t need; uint32_t shard; const char *why; } bad[] = {
        {row_id(4, 0), 0, 0, "table 4 of 4"},
        {row_id(1, 10), 0, 0, "table 1 has 10 rows, no row 10"},
        {row_id(2, 9), 0, 0, "row (2, 9) belongs to shard 3, not 0"},
        {row_id(2, 2), -2, 0, "row (2, 2) needs iteration -2"},
        {row_id(2, 0), 0, 2, "shard 2 is not on server 0"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        assert_refused(&f, RPC_FETCH, fetch_msg(bad[i].shard, 1, &bad[i].id, &bad[i].need, 1),
                       bad[i].why);
    assert_refused(&f, RPC_FETCH, fetch_msg(0, 1, NULL, NULL, 0), "no rows");
    assert_refused(&f, RPC_WRITE_BACK, write_back_msg(&HEAD, 0, NULL, NULL, 0), "no rows");
    const struct { struct export_request e; const char *why; } page[] = {
        {{.table = 4, .count = 1}, "table 4 of 4"},
        {{.table = 1, .first = 11, .count = 1}, "table 1 has 10 rows, no row 11"},
        {{.table = 1, .first = UINT64_MAX, .count = 1}, "no row 18446744073709551615"},
        {{.table = 3, .count = UINT32_MAX}, "ask for fewer"},
    };
    for (size_t i = 0; i < sizeof(page) / sizeof(*page); i++) {
        struct msg *m;
        assert_int_equal(export_request_encode(&HEAD, &page[i].e, &m), ST_OK);
        assert_refused(&f, RPC_EXPORT, m, page[i].why);
    }
    teardown(&f);
}

static void bytes_that_are_no_request_are_refused(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 0), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    struct msg *whole = write_back_msg(&HEAD, 0, id, nine, 2);
    for (size_t n = 0; n < whole->len; n++) { /* cut off anywhere */
        struct msg *m;
        assert_int_equal(msg_open(n, &m), ST_OK);
        memcpy(m->data, whole->data, n);
        m->len = n;
        assert_refused(&f, RPC_WRITE_BACK, m, "");
    }
    for (int method = RPC_PLAN; method < RPC_N; method++) {
        struct msg *m;
        assert_int_equal(msg_open(64, &m), ST_OK);
        memset(m->data, 0xff, 64);
        m->len = 64;
        assert_refused(&f, (enum rpc_method)method, m,
                       method == RPC_PLAN ? "no plans" : "malformed request of 64 bytes");
    }
    msg_close(whole);
    teardown(&f);
}

/* --- deadlines, export, opening --------------------------------------------------------------- */

static void a_fetch_that_waits_too_long_is_failed_by_name(void **state)
{
    struct fixture f;
    setup(&f, 1, 2, 1);
    struct pending p[2];
    struct msg *reply;
    write_back(&f, row_id(2, 3), 4);
    fetch_start(&f, &p[0], row_id(2, 3), 5);
    fetch_start(&f, &p[1], row_id(2, 5), 6);
    assert_int_equal(pending_wait(&p[0], &reply), ST_TIMEOUT);
    assert_string_equal(p[0].text, "shard 1: row (2, 3) needs the write-back of iteration 5, "
                                   "has 4 after 1 s");
    assert_int_equal(pending_wait(&p[1], &reply), ST_TIMEOUT);
    write_back(&f, row_id(2, 3), 5); /* finds nobody */
    fetch_start(&f, &p[0], row_id(2, 3), 5);
    assert_fetched(&p[0], row_id(2, 3), 5);
    teardown(&f);
}

static void closing_fails_what_is_parked(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    struct pending p[2];
    struct msg *reply;
    fetch_start(&f, &p[0], row_id(1, 1), 5);
    fetch_start(&f, &p[1], row_id(1, 2), 5);
    teardown(&f);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pending_wait(&p[i], &reply), ST_CANCELLED);
        assert_string_equal(p[i].text, "the server is closing");
    }
}

/* Ask every server for rows [first, first + count) of a table and put them together. */
static void check_page(struct fixture *f, uint32_t table, uint64_t first, uint32_t count)
{
    struct msg *reply[MAX_SERVERS];
    struct fetch_reply r[MAX_SERVERS];
    uint32_t next[MAX_SERVERS] = {0};
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        struct export_request e = {.table = table, .first = first, .count = count};
        struct msg *req;
        struct rpc_header h;
        assert_int_equal(export_request_encode(&HEAD, &e, &req), ST_OK);
        assert_int_equal(ask(f->peer[i], RPC_EXPORT, req, &reply[i], NULL), ST_OK);
        assert_int_equal(fetch_reply_decode(reply[i]->data, reply[i]->len, &h, &r[i]), ST_OK);
        assert_header(&h, i);
        assert_int_equal(r[i].row_floats, W);
    }
    for (uint64_t row = first; row < first + count && row < ROWS[table]; row++) {
        uint64_t id = row_id(table, row);
        uint32_t i = shard_of(f, id) / f->config.cluster.server_threads;
        assert_in_range(next[i], 0, r[i].n - 1);
        assert_reply_row(&r[i], next[i]++, id, row % 3 == 0 ? (int64_t)(row % NOW) : STORE_NEVER);
    }
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        assert_int_equal(next[i], r[i].n);
        msg_close(reply[i]);
    }
}

static void export_pages_put_together_are_the_table(void **state)
{
    static const uint32_t LAYOUT[3][2] = {{1, 1}, {2, 3}, {2, 1}};
    for (int k = 0; k < 3; k++) {
        struct fixture f;
        setup(&f, LAYOUT[k][0], LAYOUT[k][1], 20);
        for (uint32_t t = 0; t < 3; t++)
            for (uint64_t row = 0; row < ROWS[t] && row < 300; row += 3)
                write_back(&f, row_id(t, row), (int64_t)(row % NOW));
        check_page(&f, 0, 0, 5);
        for (uint64_t first = 0; first < 10; first++)
            for (uint32_t count = 0; count < 12; count++) check_page(&f, 1, first, count);
        for (uint64_t first = 0; first < 290; first += 7) check_page(&f, 2, first, 7);
        check_page(&f, 1, 10, 5); /* behind the end: nothing */
        teardown(&f);
    }
}

static void the_digest_does_not_depend_on_the_number_of_servers(void **state)
{
    struct digest d[2];
    for (int k = 0; k < 2; k++) {
        struct fixture f;
        if (k == 0) setup(&f, 1, 1, 20);
        else setup(&f, 2, 3, 20);
        assert_digest(digest_now(&f), (struct digest){0});
        for (uint64_t row = 0; row < 200; row++) write_back(&f, row_id(2, row * 44), 1);
        d[k] = digest_now(&f);
        teardown(&f);
    }
    assert_digest(d[0], d[1]);
    assert_true(d[0].lo != 0);
}

static void starting_survives_every_failed_allocation(void **state)
{
    struct fixture f;
    setup(&f, 1, 1, 20);
    struct embserver_cfg cfg = {.config = &f.config, .transport = f.transport, .address = "again",
                                .job = JOB};
    struct embserver *const untouched = (struct embserver *)&f;
    size_t injected = 0, live = mem_live();
    caught_start();
    for (size_t nth = 1;; nth++) {
        struct embserver *s = untouched;
        caught_reset();
        mem_fail_at(nth);
        enum st st = embserver_start(&cfg, &s);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            embserver_close(s);
            break;
        }
        injected++;
        assert_int_equal(caught_lines, 1); /* said once */
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(s, untouched);
        assert_int_equal(mem_live(), live);
    }
    caught_stop();
    assert_in_range(injected, 8, 20);
    assert_int_equal(mem_live(), live);
    teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fetch_gives_versions_and_rows_in_request_order),
        cmocka_unit_test(a_fetch_before_its_write_back_is_answered_after_it),
        cmocka_unit_test(a_fetch_waits_for_all_its_rows_in_whatever_order_they_come),
        cmocka_unit_test(a_write_back_gets_past_a_thousand_parked_fetches),
        cmocka_unit_test(one_write_back_ends_the_fetches_of_all_its_rows),
        cmocka_unit_test(late_and_repeated_write_backs_change_nothing),
        cmocka_unit_test(write_backs_that_break_the_contract_change_nothing),
        cmocka_unit_test(records_of_the_wrong_width_or_not_finite_are_refused),
        cmocka_unit_test(a_second_writer_is_refused_before_any_row_is_taken),
        cmocka_unit_test(requests_of_other_jobs_and_attempts_are_refused),
        cmocka_unit_test(fetches_and_exports_of_rows_that_are_not_here_are_refused),
        cmocka_unit_test(bytes_that_are_no_request_are_refused),
        cmocka_unit_test(a_fetch_that_waits_too_long_is_failed_by_name),
        cmocka_unit_test(closing_fails_what_is_parked),
        cmocka_unit_test(export_pages_put_together_are_the_table),
        cmocka_unit_test(the_digest_does_not_depend_on_the_number_of_servers),
        cmocka_unit_test(starting_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
