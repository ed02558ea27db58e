/* What an embedding server refuses (I5): each time with the reason, and with nothing changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "base/row.h"
#include "tests/support/server_case.h"

static void assert_refused(struct server_case *f, enum rpc_method method, struct msg *req,
                           const char *why)
{
    struct digest before = server_digest_now(f);
    struct msg *reply;
    char text[256];
    assert_int_equal(server_ask(f->peer[0], method, req, &reply, text), ST_BADMSG);
    assert_null(reply);
    if (strstr(text, why) == NULL) fail_msg("'%s' is not in '%s'", why, text);
    assert_same_digest(server_digest_now(f), before);
}

static void assert_write_back_refused(struct server_case *f, uint32_t shard, const uint64_t *id,
                                      const int64_t *version, uint32_t n, const char *why)
{
    assert_refused(f, RPC_WRITE_BACK, server_write_back_msg(&SERVER_HEAD, shard, id, version, n),
                   why);
}

static void assert_fetch_refused(struct server_case *f, uint32_t shard, const uint64_t *id,
                                 const int64_t *need, uint32_t n, const char *why)
{
    assert_refused(f, RPC_FETCH, server_fetch_msg(shard, 1, id, need, n), why);
}

static void write_backs_that_break_the_contract_change_nothing(void **state)
{
    struct server_case f;
    server_setup(&f, 2, 2, 20); /* server 0: shards 0 and 1; row (2, r): shard (r + 2) % 4 */
    uint64_t here[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    server_write_back(&f, here[0], 9);
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
        assert_write_back_refused(&f, 0, id, version, 3, bad[i].why);
    }
    assert_write_back_refused(&f, 1, here, nine, 2, "not 1");
    assert_write_back_refused(&f, 2, here, nine, 2, "shard 2 is not on server 0");
    assert_write_back_refused(&f, UINT32_MAX, here, nine, 2, "is not on server 0");
    server_teardown(&f);
}

static void rows_are_for_the_trainers_of_the_job_and_a_bounded_number_at_a_time(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    struct rpc_header tool = SERVER_HEAD, third = SERVER_HEAD;
    tool.role = ROLE_TOOL;
    third.rank = 2; /* of 2 */
    uint64_t id = row_id(2, 2);
    int64_t nine = 9;
    assert_refused(&f, RPC_WRITE_BACK, server_write_back_msg(&tool, 0, &id, &nine, 1),
                   "rows are for trainers 0 to 1");
    assert_refused(&f, RPC_WRITE_BACK, server_write_back_msg(&third, 0, &id, &nine, 1),
                   "rows are for trainers 0 to 1");
    assert_write_back_refused(&f, 0, &id, &nine, 0, "no rows");
    static uint64_t many[CODEC_MAX_ROWS + 1];
    static int64_t settled[CODEC_MAX_ROWS + 1];
    for (uint32_t i = 0; i <= CODEC_MAX_ROWS; i++) {
        many[i] = row_id(3, i);
        settled[i] = PLAN_NEED_SETTLED;
    }
    assert_fetch_refused(&f, 0, many, settled, CODEC_MAX_ROWS + 1, "want 1 to 4096");
    assert_int_equal(codec_max_rows(D), CODEC_MAX_ROWS);
    assert_int_equal(codec_max_rows(8192) * 8192u * sizeof(float), CODEC_MAX_ROW_BYTES);
    assert_int_equal(codec_max_rows(UINT32_MAX / 8), 1);
    server_teardown(&f);
}

static void records_of_the_wrong_width_or_not_finite_are_refused(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    for (uint32_t width = W - 1; width <= W + 1; width += 2) {
        struct msg *m;
        uint8_t *rows;
        assert_int_equal(write_back_begin(&SERVER_HEAD, 0, id, nine, 2, width, &m, &rows), ST_OK);
        memset(rows, 0, 2 * width * sizeof(float));
        assert_refused(&f, RPC_WRITE_BACK, m, "a record has 6");
    }
    const float bad[3] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 3; k++)
        for (int at = 0; at < W; at++) {
            struct msg *m;
            uint8_t *rows;
            assert_int_equal(write_back_begin(&SERVER_HEAD, 0, id, nine, 2, W, &m, &rows), ST_OK);
            memset(rows, 0, 2 * W * sizeof(float));
            memcpy(rows + (size_t)(W + at) * sizeof(float), &bad[k], sizeof(float));
            assert_refused(&f, RPC_WRITE_BACK, m, "NaN or infinity in row (2, 6)@9");
        }
    server_teardown(&f);
}

static void a_second_writer_is_refused_before_any_row_is_taken(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 2), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    server_write_back(&f, id[1], 9);
    struct msg *m = server_write_back_msg(&SERVER_HEAD, 0, id, nine, 2);
    m->data[m->len - 2] ^= 1; /* in the last float; rows come last */
    assert_refused(&f, RPC_WRITE_BACK, m, "two writers for row (2, 6)@9");
    server_teardown(&f);
}

static void requests_of_other_jobs_and_attempts_are_refused(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    struct rpc_header job = SERVER_HEAD, stale = SERVER_HEAD, newer = SERVER_HEAD;
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
        assert_refused(&f, RPC_WRITE_BACK, server_write_back_msg(bad[i].h, 0, &id, &version, 1),
                       bad[i].why);
        assert_int_equal(fetch_request_encode(bad[i].h, 0, 1, &id, &need, 1, &m), ST_OK);
        assert_refused(&f, RPC_FETCH, m, bad[i].why);
        assert_int_equal(plain_encode(bad[i].h, &m), ST_OK);
        assert_refused(&f, RPC_DIGEST, m, bad[i].why);
        assert_int_equal(export_request_encode(bad[i].h, &page, &m), ST_OK);
        assert_refused(&f, RPC_EXPORT, m, bad[i].why);
    }
    server_teardown(&f);
}

static void fetches_and_exports_of_rows_that_are_not_here_are_refused(void **state)
{
    struct server_case f;
    server_setup(&f, 2, 2, 20);
    const struct { uint64_t id; int64_t need; uint32_t shard; const char *why; } bad[] = {
        {row_id(4, 0), 0, 0, "table 4 of 4"},
        {row_id(1, 10), 0, 0, "table 1 has 10 rows, no row 10"},
        {row_id(2, 9), 0, 0, "row (2, 9) belongs to shard 3, not 0"},
        {row_id(2, 2), -2, 0, "row (2, 2) needs iteration -2"},
        {row_id(2, 0), 0, 2, "shard 2 is not on server 0"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        assert_fetch_refused(&f, bad[i].shard, &bad[i].id, &bad[i].need, 1,
                             bad[i].why);
    assert_fetch_refused(&f, 0, NULL, NULL, 0, "no rows");
    assert_write_back_refused(&f, 0, NULL, NULL, 0, "no rows");
    const struct { struct export_request e; const char *why; } page[] = {
        {{.table = 4, .count = 1}, "table 4 of 4"},
        {{.table = 1, .first = 11, .count = 1}, "table 1 has 10 rows, no row 11"},
        {{.table = 1, .first = UINT64_MAX, .count = 1}, "no row 18446744073709551615"},
        {{.table = 3, .count = UINT32_MAX}, "ask for fewer"},
    };
    for (size_t i = 0; i < sizeof(page) / sizeof(*page); i++) {
        struct msg *m;
        assert_int_equal(export_request_encode(&SERVER_HEAD, &page[i].e, &m), ST_OK);
        assert_refused(&f, RPC_EXPORT, m, page[i].why);
    }
    server_teardown(&f);
}

static void bytes_that_are_no_request_are_refused(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    uint64_t id[2] = {row_id(2, 0), row_id(2, 6)};
    int64_t nine[2] = {9, 9};
    struct msg *whole = server_write_back_msg(&SERVER_HEAD, 0, id, nine, 2);
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
    server_teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(write_backs_that_break_the_contract_change_nothing),
        cmocka_unit_test(rows_are_for_the_trainers_of_the_job_and_a_bounded_number_at_a_time),
        cmocka_unit_test(records_of_the_wrong_width_or_not_finite_are_refused),
        cmocka_unit_test(a_second_writer_is_refused_before_any_row_is_taken),
        cmocka_unit_test(requests_of_other_jobs_and_attempts_are_refused),
        cmocka_unit_test(fetches_and_exports_of_rows_that_are_not_here_are_refused),
        cmocka_unit_test(bytes_that_are_no_request_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
