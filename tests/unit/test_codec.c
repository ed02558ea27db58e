/* Headers, small messages and bulk messages: round trips, the generated packer as reference, and
 * messages that break the contract. Plans are in test_codec_plan.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "proto/codec.h"
#include "proto/embserver.pb-c.h"
#include "proto/oracle.pb-c.h"
#include "tests/support/hostile.h"

static const struct rpc_header HEADER = {.job = UINT64_C(0x8123456789abcdef), .attempt = 3,
                                         .role = ROLE_TRAINER, .rank = 129, .iteration = -77};

static void assert_header(const struct rpc_header *h, const struct rpc_header *want)
{
    assert_int_equal(h->job, want->job);
    assert_int_equal(h->attempt, want->attempt);
    assert_int_equal(h->role, want->role);
    assert_int_equal(h->rank, want->rank);
    assert_int_equal(h->iteration, want->iteration);
}

/* --- small messages ------------------------------------------------------------------------ */

static void headers_survive_at_their_extremes(void **state)
{
    const struct rpc_header all[] = {
        HEADER,
        {0, 0, ROLE_ORACLE, 0, 0},
        {UINT64_MAX, UINT32_MAX, ROLE_TOOL, UINT32_MAX, INT64_MAX},
        {1, 1, ROLE_SERVER, 1, INT64_MIN},
    };
    for (size_t i = 0; i < 4; i++) {
        struct msg *m;
        struct rpc_header h = {0};
        assert_int_equal(plain_encode(&all[i], &m), ST_OK);
        assert_int_equal(plain_decode(m->data, m->len, &h), ST_OK);
        assert_header(&h, &all[i]);
        msg_close(m);
    }
}

static void small_messages_survive(void **state)
{
    const uint64_t value[] = {0, 1, 127, 128, UINT32_MAX, UINT64_MAX};
    for (size_t i = 0; i < sizeof(value) / sizeof(value[0]); i++) {
        struct msg *m;
        struct rpc_header h = {0};
        uint64_t seq = 99;
        assert_int_equal(plan_request_encode(&HEADER, value[i], &m), ST_OK);
        assert_int_equal(plan_request_decode(m->data, m->len, &h, &seq), ST_OK);
        assert_int_equal(seq, value[i]);
        assert_header(&h, &HEADER);
        msg_close(m);

        struct digest d = {0};
        const struct digest sent = {value[i], ~value[i]};
        assert_int_equal(digest_reply_encode(&HEADER, sent, &m), ST_OK);
        assert_int_equal(digest_reply_decode(m->data, m->len, &h, &d), ST_OK);
        assert_memory_equal(&d, &sent, sizeof(d));
        msg_close(m);

        struct export_request e = {0};
        const struct export_request want = {(uint32_t)value[i], value[i], (uint32_t)~value[i]};
        assert_int_equal(export_request_encode(&HEADER, &want, &m), ST_OK);
        assert_int_equal(export_request_decode(m->data, m->len, &h, &e), ST_OK);
        assert_int_equal(e.table, want.table);
        assert_int_equal(e.first, want.first);
        assert_int_equal(e.count, want.count);
        msg_close(m);
    }
}

static enum st try_plain(const uint8_t *p, size_t n)
{
    struct rpc_header h = {.rank = 4242};
    enum st st = plain_decode(p, n, &h);
    if (st == ST_OK) assert_in_range(h.role, ROLE_ORACLE, ROLE_TOOL);
    else assert_int_equal(h.rank, 4242); /* nothing written */
    return st;
}

static void messages_without_a_proper_header_are_refused(void **state)
{
    static const uint8_t NO_HEADER[1], NO_ROLE[] = {0x0a, 2, 0x20, 1};
    static const uint8_t ROLE_9[] = {0x0a, 2, 0x18, 9};
    static const uint8_t FINE[] = {0x0a, 2, 0x18, 3}, UNKNOWN[] = {0x0a, 2, 0x18, 3, 0x78, 1};
    static const uint8_t UNKNOWN_IN_HEADER[] = {0x0a, 4, 0x18, 3, 0x78, 1};
    static const uint8_t LONG_LENGTH[] = {0x0a, 3, 0x18, 3}, TRAILING[] = {0x0a, 2, 0x18, 3, 0};
    static const uint8_t HUGE_LENGTH[] = {0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
    assert_int_equal(try_plain(FINE, sizeof(FINE)), ST_OK);
    assert_int_equal(try_plain(NO_HEADER, 0), ST_BADMSG);
    assert_int_equal(try_plain(NO_ROLE, sizeof(NO_ROLE)), ST_BADMSG);
    assert_int_equal(try_plain(ROLE_9, sizeof(ROLE_9)), ST_BADMSG);
    assert_int_equal(try_plain(UNKNOWN, sizeof(UNKNOWN)), ST_BADMSG);
    assert_int_equal(try_plain(UNKNOWN_IN_HEADER, sizeof(UNKNOWN_IN_HEADER)), ST_BADMSG);
    assert_int_equal(try_plain(LONG_LENGTH, sizeof(LONG_LENGTH)), ST_BADMSG);
    assert_int_equal(try_plain(TRAILING, sizeof(TRAILING)), ST_BADMSG);
    assert_int_equal(try_plain(HUGE_LENGTH, sizeof(HUGE_LENGTH)), ST_BADMSG);
}

/* --- bulk messages: what was sent ---------------------------------------------------------- */

enum { MAX_ROWS = 300, MAX_FLOATS = 20 };

struct bulk {
    uint32_t shard, n, row_floats;
    uint64_t row_id[MAX_ROWS];
    int64_t number[MAX_ROWS]; /* versions, or needs */
    float rows[MAX_ROWS * MAX_FLOATS];
};

static struct bulk *bulk_random(uint64_t seed, uint32_t n, uint32_t row_floats)
{
    struct bulk *b = calloc(1, sizeof(*b));
    uint64_t s = seed * 2 + 1;
    *b = (struct bulk){.shard = (uint32_t)test_rand(&s) % 300, .n = n, .row_floats = row_floats};
    for (uint32_t i = 0; i < n; i++) {
        b->row_id[i] = test_rand(&s);
        b->number[i] = (int64_t)test_rand(&s);
    }
    for (uint32_t i = 0; i < n * row_floats; i++) { /* any bits: NaN with payload, -0, denormals */
        uint32_t bits = (uint32_t)(test_rand(&s) >> 32);
        if (i % 7 == 0) bits = 0x7f800001u + i;
        if (i % 11 == 0) bits = 0x80000000u;
        memcpy(&b->rows[i], &bits, sizeof(bits));
    }
    return b;
}

static size_t rows_bytes(const struct bulk *b)
{
    return (size_t)b->n * b->row_floats * sizeof(float);
}

static struct msg *fetch_request_of(const struct bulk *b)
{
    struct msg *m;
    assert_int_equal(fetch_request_encode(&HEADER, b->shard, b->n % 2 == 1, b->row_id, b->number,
                                          b->n, &m), ST_OK);
    return m;
}

static struct msg *fetch_reply_of(const struct bulk *b)
{
    struct msg *m;
    uint8_t *version, *rows;
    assert_int_equal(fetch_reply_begin(&HEADER, b->n, b->row_floats, &m, &version, &rows), ST_OK);
    memcpy(version, b->number, b->n * sizeof(b->number[0]));
    memcpy(rows, b->rows, rows_bytes(b));
    return m;
}

static struct msg *write_back_of(const struct bulk *b)
{
    struct msg *m;
    uint8_t *rows;
    assert_int_equal(write_back_begin(&HEADER, b->shard, b->row_id, b->number, b->n,
                                      b->row_floats, &m, &rows), ST_OK);
    memcpy(rows, b->rows, rows_bytes(b));
    return m;
}

static void assert_fetch_request(const uint8_t *p, size_t n, const struct bulk *b)
{
    struct rpc_header h = {0};
    struct fetch_request f = {0};
    assert_int_equal(fetch_request_decode(p, n, &h, &f), ST_OK);
    assert_header(&h, &HEADER);
    assert_int_equal(f.shard, b->shard);
    assert_int_equal(f.n, b->n);
    assert_int_equal(f.owned, b->n % 2);
    assert_memory_equal(f.row_id, b->row_id, b->n * 8);
    assert_memory_equal(f.need, b->number, b->n * 8);
    for (uint32_t i = 0; i < b->n; i++) assert_int_equal(codec_u64(f.row_id, i), b->row_id[i]);
}

static void assert_fetch_reply(const uint8_t *p, size_t n, const struct bulk *b)
{
    struct rpc_header h = {0};
    struct fetch_reply f = {0};
    assert_int_equal(fetch_reply_decode(p, n, &h, &f), ST_OK);
    assert_header(&h, &HEADER);
    assert_int_equal(f.n, b->n);
    assert_int_equal(f.row_floats, b->row_floats);
    assert_memory_equal(f.version, b->number, b->n * 8);
    assert_memory_equal(f.rows, b->rows, rows_bytes(b));
}

static void assert_write_back(const uint8_t *p, size_t n, const struct bulk *b)
{
    struct rpc_header h = {0};
    struct write_back w = {0};
    assert_int_equal(write_back_decode(p, n, &h, &w), ST_OK);
    assert_header(&h, &HEADER);
    assert_int_equal(w.shard, b->shard);
    assert_int_equal(w.n, b->n);
    assert_int_equal(w.row_floats, b->row_floats);
    assert_memory_equal(w.row_id, b->row_id, b->n * 8);
    assert_memory_equal(w.version, b->number, b->n * 8);
    assert_memory_equal(w.rows, b->rows, rows_bytes(b));
}

/* --- bulk messages: the generated code as reference ---------------------------------------- */

static Chanter__Header generated_header(void)
{
    Chanter__Header h = CHANTER__HEADER__INIT;
    h.job = HEADER.job;
    h.attempt = HEADER.attempt;
    h.role = CHANTER__ROLE__ROLE_TRAINER;
    h.rank = HEADER.rank;
    h.iteration = HEADER.iteration;
    return h;
}

/* `m` has the bytes that generated code packs from `ref`, and generated code reads them. */
static void assert_packs_to(const struct msg *m, const ProtobufCMessage *ref)
{
    size_t n = protobuf_c_message_get_packed_size(ref);
    uint8_t *packed = malloc(n);
    protobuf_c_message_pack(ref, packed);
    assert_int_equal(m->len, n);
    assert_memory_equal(m->data, packed, n);
    ProtobufCMessage *back = protobuf_c_message_unpack(ref->descriptor, NULL, m->len, m->data);
    assert_non_null(back);
    assert_int_equal(back->n_unknown_fields, 0);
    assert_int_equal(protobuf_c_message_get_packed_size(back), n);
    protobuf_c_message_free_unpacked(back, NULL);
    free(packed);
}

static void bulk_messages_are_what_generated_code_writes_and_reads(void **state)
{
    static const uint32_t SIZES[][2] = {{0, 0}, {0, 16}, {1, 1}, {1, 16}, {2, 3}, {15, 1},
                                        {16, 17}, {17, 16}, {63, 2}, {255, 16}, {300, 20}};
    Chanter__Header h = generated_header();
    for (size_t i = 0; i < sizeof(SIZES) / sizeof(SIZES[0]); i++) {
        struct bulk *b = bulk_random(i, SIZES[i][0], SIZES[i][1]);
        struct msg *m = fetch_request_of(b);
        Chanter__FetchRequest q = CHANTER__FETCH_REQUEST__INIT;
        q.header = &h, q.shard = b->shard, q.owned = b->n % 2 == 1;
        q.n_row_id = q.n_need = b->n, q.row_id = b->row_id, q.need = b->number;
        assert_packs_to(m, &q.base);
        assert_fetch_request(m->data, m->len, b);
        msg_close(m);

        m = fetch_reply_of(b);
        Chanter__FetchReply r = CHANTER__FETCH_REPLY__INIT;
        r.header = &h, r.row_floats = b->row_floats, r.n_version = b->n, r.version = b->number;
        r.n_rows = (size_t)b->n * b->row_floats, r.rows = b->rows;
        assert_packs_to(m, &r.base);
        assert_fetch_reply(m->data, m->len, b);
        msg_close(m);

        m = write_back_of(b);
        Chanter__WriteBackRequest w = CHANTER__WRITE_BACK_REQUEST__INIT;
        w.header = &h, w.shard = b->shard, w.row_floats = b->row_floats;
        w.n_row_id = w.n_version = b->n, w.row_id = b->row_id, w.version = b->number;
        w.n_rows = (size_t)b->n * b->row_floats, w.rows = b->rows;
        assert_packs_to(m, &w.base);
        assert_write_back(m->data, m->len, b);
        msg_close(m);
        free(b);
    }
}

static void small_messages_are_what_generated_code_writes_and_reads(void **state)
{
    Chanter__Header h = generated_header();
    struct msg *m;
    Chanter__Plain p = CHANTER__PLAIN__INIT;
    p.header = &h;
    assert_int_equal(plain_encode(&HEADER, &m), ST_OK);
    assert_packs_to(m, &p.base);
    msg_close(m);
    Chanter__DigestReply d = CHANTER__DIGEST_REPLY__INIT;
    d.header = &h, d.lo = 5, d.hi = 6;
    assert_int_equal(digest_reply_encode(&HEADER, (struct digest){5, 6}, &m), ST_OK);
    assert_packs_to(m, &d.base);
    msg_close(m);
    Chanter__ExportRequest e = CHANTER__EXPORT_REQUEST__INIT;
    e.header = &h, e.table = 7, e.first = 8, e.count = 9;
    assert_int_equal(export_request_encode(&HEADER, &(struct export_request){7, 8, 9}, &m), ST_OK);
    assert_packs_to(m, &e.base);
    msg_close(m);
    Chanter__PlanRequest q = CHANTER__PLAN_REQUEST__INIT;
    q.header = &h, q.seq = 10;
    assert_int_equal(plan_request_encode(&HEADER, 10, &m), ST_OK);
    assert_packs_to(m, &q.base);
    msg_close(m);
}

/* --- bulk messages that break the contract ------------------------------------------------- */

static uint64_t read_all(const uint8_t *p, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += p[i];
    return sum;
}

static volatile uint64_t read_sum; /* so that the reads are not optimised away */

static enum st try_fetch_request(const uint8_t *p, size_t n)
{
    struct rpc_header h = {.rank = 4242};
    struct fetch_request f = {.n = 4242};
    enum st st = fetch_request_decode(p, n, &h, &f);
    if (st == ST_OK) {
        assert_true(f.owned <= 1);
        read_sum += read_all(f.row_id, f.n * 8ul) + read_all(f.need, f.n * 8ul);
    } else {
        assert_true(h.rank == 4242 && f.n == 4242);
    }
    return st;
}

static enum st try_fetch_reply(const uint8_t *p, size_t n)
{
    struct rpc_header h = {.rank = 4242};
    struct fetch_reply f = {.n = 4242};
    enum st st = fetch_reply_decode(p, n, &h, &f);
    if (st == ST_OK)
        read_sum += read_all(f.version, f.n * 8ul) + read_all(f.rows, f.n * 4ul * f.row_floats);
    else
        assert_true(h.rank == 4242 && f.n == 4242);
    return st;
}

static enum st try_write_back(const uint8_t *p, size_t n)
{
    struct rpc_header h = {.rank = 4242};
    struct write_back w = {.n = 4242};
    enum st st = write_back_decode(p, n, &h, &w);
    if (st == ST_OK)
        read_sum += read_all(w.row_id, w.n * 8ul) + read_all(w.version, w.n * 8ul) +
                    read_all(w.rows, w.n * 4ul * w.row_floats);
    else
        assert_true(h.rank == 4242 && w.n == 4242);
    return st;
}

static void damaged_messages_are_refused_or_make_sense(void **state)
{
    struct bulk *b = bulk_random(9, 21, 3);
    struct msg *plain;
    assert_int_equal(plain_encode(&HEADER, &plain), ST_OK);
    struct { struct msg *m; hostile_fn *fn; size_t whole_prefixes; } all[] = {
        {fetch_request_of(b), try_fetch_request, 3}, /* of the head, with no rows at all */
        {fetch_reply_of(b), try_fetch_reply, 2},
        {write_back_of(b), try_write_back, 3},
        {plain, try_plain, 0},
    };
    for (size_t i = 0; i < 4; i++) {
        const struct msg *m = all[i].m;
        assert_int_equal(all[i].fn(m->data, m->len), ST_OK);
        struct hostile_count c = hostile_prefixes(m->data, m->len, all[i].fn);
        assert_int_equal(c.ok, all[i].whole_prefixes);
        c = hostile_flips(m->data, m->len, 17 + i, 20000, all[i].fn);
        assert_true(c.ok > 100 && c.bad > 100); /* both happen: the flips do their work */
        msg_close(all[i].m);
    }
    free(b);
}

/* A fetch reply by hand: header, row_floats, then `tail`. */
static enum st try_reply_tail(const uint8_t *tail, size_t n)
{
    uint8_t m[64] = {0x0a, 2, 0x18, 3, 0x10, 1}; /* role trainer; one float a row */
    memcpy(m + 6, tail, n);
    return try_fetch_reply(m, 6 + n);
}
#define TRY_TAIL(...) \
    try_reply_tail((const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__}))
#define ONE_VERSION 0x1a, 8, 1, 2, 3, 4, 5, 6, 7, 8
#define ONE_ROW 0x22, 4, 1, 2, 3, 4

static void lists_that_do_not_fit_are_refused(void **state)
{
    assert_int_equal(TRY_TAIL(ONE_VERSION, ONE_ROW), ST_OK);
    assert_int_equal(TRY_TAIL(0x1a, 0, 0x22, 0), ST_OK);                  /* empty, but there  */
    assert_int_equal(TRY_TAIL(ONE_VERSION), ST_BADMSG);                   /* no rows           */
    assert_int_equal(TRY_TAIL(ONE_ROW), ST_BADMSG);                       /* no versions       */
    assert_int_equal(TRY_TAIL(ONE_ROW, ONE_VERSION), ST_BADMSG);          /* wrong order       */
    assert_int_equal(TRY_TAIL(ONE_VERSION, ONE_VERSION, ONE_ROW), ST_BADMSG);     /* twice     */
    assert_int_equal(TRY_TAIL(ONE_VERSION, ONE_ROW, 0x10, 1), ST_BADMSG); /* head behind lists */
    assert_int_equal(TRY_TAIL(ONE_VERSION, ONE_ROW, 0x2a, 0), ST_BADMSG); /* unknown field     */
    assert_int_equal(TRY_TAIL(ONE_VERSION, ONE_ROW, 0), ST_BADMSG);       /* trailing byte     */
    assert_int_equal(TRY_TAIL(0x1a, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, ONE_ROW), ST_BADMSG);
    assert_int_equal(TRY_TAIL(ONE_VERSION, 0x22, 3, 1, 2, 3), ST_BADMSG);
    assert_int_equal(TRY_TAIL(0x19, 1, 2, 3, 4, 5, 6, 7, 8, ONE_ROW), ST_BADMSG); /* not packed */
    assert_int_equal(TRY_TAIL(0x1b, ONE_VERSION, 0x1c, ONE_ROW), ST_BADMSG);      /* a group    */
    assert_int_equal(TRY_TAIL(0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1),
                     ST_BADMSG); /* a length of more than 64 bits */
}

static void ignore_line(void *ctx, const char *line)
{
}

static void row_counts_that_overflow_are_refused(void **state)
{
    /* 2 rows of 2^31 floats are 2^34 bytes: 0 in 32 bits, and that is how many are there. */
    Chanter__Header h = generated_header();
    Chanter__FetchReply r = CHANTER__FETCH_REPLY__INIT;
    r.header = &h;
    r.row_floats = UINT32_C(1) << 31;
    int64_t version[2] = {0};
    uint8_t packed[128];
    r.n_version = 2, r.version = version;
    size_t n = protobuf_c_message_pack(&r.base, packed);
    assert_int_equal(try_fetch_reply(packed, n), ST_BADMSG);

    struct msg *const none = (struct msg *)&r;
    struct msg *m = none;
    uint8_t *v, *rows;
    log_set_sink(ignore_line, NULL);
    assert_int_equal(fetch_reply_begin(&HEADER, UINT32_MAX, UINT32_MAX, &m, &v, &rows), ST_NOMEM);
    log_set_sink(NULL, NULL);
    assert_ptr_equal(m, none);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers_survive_at_their_extremes),
        cmocka_unit_test(small_messages_survive),
        cmocka_unit_test(messages_without_a_proper_header_are_refused),
        cmocka_unit_test(bulk_messages_are_what_generated_code_writes_and_reads),
        cmocka_unit_test(small_messages_are_what_generated_code_writes_and_reads),
        cmocka_unit_test(damaged_messages_are_refused_or_make_sense),
        cmocka_unit_test(lists_that_do_not_fit_are_refused),
        cmocka_unit_test(row_counts_that_overflow_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
