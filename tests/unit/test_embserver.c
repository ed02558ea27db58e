/* An embedding server over the local transport: parked fetches (I2), write-backs (I3), deadlines
 * (I6), digest and export. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "base/mem.h"
#include "base/row.h"
#include "embserver/store.h"
#include "tests/support/caught.h"
#include "tests/support/server_case.h"

static void a_fetch_gives_versions_and_rows_in_request_order(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    uint64_t id[3] = {row_id(2, 8999), row_id(0, 0), row_id(1, 5)};
    int64_t need[3] = {PLAN_NEED_SETTLED, PLAN_NEED_SETTLED, 7};
    server_write_back(&f, id[0], 6);
    server_write_back(&f, id[2], 7);
    for (int owned = 0; owned < 2; owned++) {
        struct msg *reply;
        struct rpc_header h;
        struct fetch_reply r;
        struct msg *req = server_fetch_msg(0, owned, id, need, 3);
        assert_int_equal(server_ask(f.peer[0], RPC_FETCH, req, &reply, NULL), ST_OK);
        assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
        assert_server_header(&h, 0);
        assert_int_equal(r.n, 3);
        assert_int_equal(r.row_floats, owned ? W : D);
        assert_server_row(&r, 0, id[0], 6);
        assert_server_row(&r, 1, id[1], STORE_NEVER);
        assert_server_row(&r, 2, id[2], 7);
        msg_close(reply);
    }
    server_teardown(&f);
}

static void a_fetch_before_its_write_back_is_answered_after_it(void **state)
{
    struct server_case f;
    server_setup(&f, 2, 3, 20);
    for (uint64_t row = 0; row < 10; row++) { /* every shard */
        uint64_t id = row_id(2, row);
        struct pending p;
        server_fetch_start(&f, &p, id, 5);
        server_digest_now(&f);
        assert_false(pending_done(&p));
        server_write_back(&f, id, 4); /* not yet what it needs */
        server_digest_now(&f);
        assert_false(pending_done(&p));
        server_write_back(&f, id, 5);
        assert_server_fetched(&p, id, 5);
    }
    server_teardown(&f);
}

static void a_fetch_waits_for_all_its_rows_in_whatever_order_they_come(void **state)
{
    static const int ORDER[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1},
                                    {2, 1, 0}};
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    for (int k = 0; k < 6; k++) {
        uint64_t id[3] = {row_id(1, 1), row_id(2, 4096), row_id(1, 9)};
        int64_t need[3] = {k, k, k};
        struct pending p;
        pending_send(&p, f.peer[0], RPC_FETCH, server_fetch_msg(0, 1, id, need, 3), PENDING_MS);
        for (int i = 0; i < 3; i++) {
            server_digest_now(&f);
            assert_false(pending_done(&p));
            server_write_back(&f, id[ORDER[k][i]], k);
        }
        struct msg *reply;
        struct rpc_header h;
        struct fetch_reply r;
        assert_int_equal(pending_wait(&p, &reply), ST_OK);
        assert_int_equal(fetch_reply_decode(reply->data, reply->len, &h, &r), ST_OK);
        for (uint32_t i = 0; i < 3; i++) assert_server_row(&r, i, id[i], k);
        msg_close(reply);
    }
    server_teardown(&f);
}

static void a_write_back_gets_past_a_thousand_parked_fetches(void **state)
{
    enum { N = 1000 };
    static struct pending p[N];
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    for (uint64_t i = 0; i < N; i++) /* three fetches wait for each row */
        server_fetch_start(&f, &p[i], row_id(2, i / 3), 5);
    server_write_back(&f, row_id(1, 3), 5); /* comes back: it did not wait */
    for (int i = 0; i < N; i++) assert_false(pending_done(&p[i]));
    for (uint64_t row = 0; row <= (N - 1) / 3; row++) server_write_back(&f, row_id(2, row), 5);
    for (uint64_t i = 0; i < N; i++) assert_server_fetched(&p[i], row_id(2, i / 3), 5);
    server_teardown(&f);
}

static void one_write_back_ends_the_fetches_of_all_its_rows(void **state)
{
    enum { N = 60 };
    struct pending p[N];
    uint64_t id[N];
    int64_t version[N];
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    for (uint64_t i = 0; i < N; i++) {
        id[i] = row_id(2, i * 7);
        version[i] = 20 - (int64_t)(i % 20);
        server_fetch_start(&f, &p[i], id[i], version[i]);
    }
    struct msg *req = server_write_back_msg(&SERVER_HEAD, 0, id, version, N), *reply;
    assert_int_equal(server_ask(f.peer[0], RPC_WRITE_BACK, req, &reply, NULL), ST_OK);
    msg_close(reply);
    for (uint64_t i = 0; i < N; i++) assert_server_fetched(&p[i], id[i], version[i]);
    server_teardown(&f);
}

static void late_and_repeated_write_backs_change_nothing(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 2, 20);
    uint64_t id = row_id(2, 77);
    server_write_back(&f, id, 8);
    struct digest before = server_digest_now(&f), want = {0};
    float record[W];
    server_record(id, 8, record);
    digest_add(&want, id, record, sizeof(record));
    assert_same_digest(before, want);
    server_write_back(&f, id, 8);
    server_write_back(&f, id, 3);
    assert_same_digest(server_digest_now(&f), before);
    struct pending p;
    server_fetch_start(&f, &p, id, 8);
    assert_server_fetched(&p, id, 8);
    server_teardown(&f);
}

static void a_fetch_that_waits_too_long_is_failed_by_name(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 2, 1);
    struct pending p[2];
    struct msg *reply;
    server_write_back(&f, row_id(2, 3), 4);
    server_fetch_start(&f, &p[0], row_id(2, 3), 5);
    server_fetch_start(&f, &p[1], row_id(2, 5), 6);
    assert_int_equal(pending_wait(&p[0], &reply), ST_TIMEOUT);
    assert_string_equal(p[0].text, "shard 1: row (2, 3) needs the write-back of iteration 5, "
                                   "has 4 after 1 s");
    assert_int_equal(pending_wait(&p[1], &reply), ST_TIMEOUT);
    server_write_back(&f, row_id(2, 3), 5); /* finds nobody */
    server_fetch_start(&f, &p[0], row_id(2, 3), 5);
    assert_server_fetched(&p[0], row_id(2, 3), 5);
    server_teardown(&f);
}

static void closing_fails_what_is_parked(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
    struct pending p[2];
    struct msg *reply;
    server_fetch_start(&f, &p[0], row_id(1, 1), 5);
    server_fetch_start(&f, &p[1], row_id(1, 2), 5);
    server_teardown(&f);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pending_wait(&p[i], &reply), ST_CANCELLED);
        assert_string_equal(p[i].text, "the server is closing");
    }
}

/* Ask every server for rows [first, first + count) of a table and put them together. */
static void check_page(struct server_case *f, uint32_t table, uint64_t first, uint32_t count)
{
    struct msg *reply[MAX_SERVERS];
    struct fetch_reply r[MAX_SERVERS];
    uint32_t next[MAX_SERVERS] = {0};
    for (uint32_t i = 0; i < f->config.cluster.servers; i++) {
        struct export_request e = {.table = table, .first = first, .count = count};
        struct msg *req;
        struct rpc_header h;
        assert_int_equal(export_request_encode(&SERVER_HEAD, &e, &req), ST_OK);
        assert_int_equal(server_ask(f->peer[i], RPC_EXPORT, req, &reply[i], NULL), ST_OK);
        assert_int_equal(fetch_reply_decode(reply[i]->data, reply[i]->len, &h, &r[i]), ST_OK);
        assert_server_header(&h, i);
        assert_int_equal(r[i].row_floats, W);
    }
    for (uint64_t row = first; row < first + count && row < SERVER_ROWS[table]; row++) {
        uint64_t id = row_id(table, row);
        uint32_t i = server_shard_of(f, id) / f->config.cluster.server_threads;
        assert_in_range(next[i], 0, r[i].n - 1);
        assert_server_row(&r[i], next[i]++, id, row % 3 == 0 ? (int64_t)(row % NOW) : STORE_NEVER);
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
        struct server_case f;
        server_setup(&f, LAYOUT[k][0], LAYOUT[k][1], 20);
        for (uint32_t t = 0; t < 3; t++)
            for (uint64_t row = 0; row < SERVER_ROWS[t] && row < 300; row += 3)
                server_write_back(&f, row_id(t, row), (int64_t)(row % NOW));
        check_page(&f, 0, 0, 5);
        for (uint64_t first = 0; first < 10; first++)
            for (uint32_t count = 0; count < 12; count++) check_page(&f, 1, first, count);
        for (uint64_t first = 0; first < 290; first += 7) check_page(&f, 2, first, 7);
        check_page(&f, 1, 10, 5); /* behind the end: nothing */
        server_teardown(&f);
    }
}

static void the_digest_does_not_depend_on_the_number_of_servers(void **state)
{
    struct digest d[2];
    for (int k = 0; k < 2; k++) {
        struct server_case f;
        if (k == 0) server_setup(&f, 1, 1, 20);
        else server_setup(&f, 2, 3, 20);
        assert_same_digest(server_digest_now(&f), (struct digest){0});
        for (uint64_t row = 0; row < 200; row++) server_write_back(&f, row_id(2, row * 44), 1);
        d[k] = server_digest_now(&f);
        server_teardown(&f);
    }
    assert_same_digest(d[0], d[1]);
    assert_true(d[0].lo != 0);
}

static void starting_survives_every_failed_allocation(void **state)
{
    struct server_case f;
    server_setup(&f, 1, 1, 20);
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
    server_teardown(&f);
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
        cmocka_unit_test(a_fetch_that_waits_too_long_is_failed_by_name),
        cmocka_unit_test(closing_fails_what_is_parked),
        cmocka_unit_test(export_pages_put_together_are_the_table),
        cmocka_unit_test(the_digest_does_not_depend_on_the_number_of_servers),
        cmocka_unit_test(starting_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
