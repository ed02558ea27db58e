/* The rows at rest: initial values, the guarded PUT (I3), the digest (I1), huge tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/row.h"
#include "embserver/store.h"
#include "tests/support/caught.h"

enum { D = 3, STATE = 2, W = D + STATE, F = 3 };
static const uint64_t ROWS[F] = {1, 10, 9000}; /* the last spans blocks of 4096 */
static const uint64_t SEED = 7;

static struct store *open_shard(uint32_t shard, uint32_t n_shards)
{
    struct store_cfg cfg = {.shard = shard, .n_shards = n_shards, .n_tables = F, .dim = D,
                            .state = STATE, .table_rows = ROWS, .seed = SEED};
    struct store *s = NULL;
    assert_int_equal(store_open(&cfg, &s), ST_OK);
    return s;
}

static void make_record(float out[W], float x)
{
    for (int i = 0; i < W; i++) out[i] = x + (float)i;
}

static enum st put(struct store *s, uint64_t id, uint32_t attempt, int64_t version, float x)
{
    float record[W];
    make_record(record, x);
    return store_put(s, id, attempt, version, (const uint8_t *)record);
}

static void assert_row(struct store *s, uint64_t id, int64_t version, float x)
{
    float want[W], got[W];
    make_record(want, x);
    store_read(s, id, W, (uint8_t *)got);
    assert_memory_equal(got, want, sizeof(want));
    assert_int_equal(store_version(s, id), version);
}

static void assert_digest(struct digest a, struct digest b)
{
    assert_true(a.lo == b.lo);
    assert_true(a.hi == b.hi);
}

static void an_unwritten_row_reads_as_its_initial_value(void **state)
{
    struct store *s = open_shard(0, 1);
    for (uint32_t t = 0; t < F; t++) {
        uint64_t rows[2] = {0, ROWS[t] - 1};
        for (int k = 0; k < 2; k++) {
            float want[W] = {0};
            rng_uniform(SEED, RNG_TABLE_0 + t, rows[k], (float)sqrt(1.0 / (double)ROWS[t]), want,
                        D);
            uint8_t got[W * sizeof(float) + 1]; /* read to an odd address */
            store_read(s, row_id(t, rows[k]), W, got + 1);
            assert_memory_equal(got + 1, want, sizeof(want));
            assert_int_equal(store_version(s, row_id(t, rows[k])), STORE_NEVER);
        }
    }
    store_close(s);
}

static void a_narrow_read_gives_the_value_alone(void **state)
{
    struct store *s = open_shard(0, 1);
    assert_int_equal(put(s, row_id(1, 4), 0, 0, 5), ST_OK);
    for (uint64_t row = 3; row <= 4; row++) {
        float whole[W], got[D + 1];
        store_read(s, row_id(1, row), W, (uint8_t *)whole);
        got[D] = 99;
        store_read(s, row_id(1, row), D, (uint8_t *)got);
        assert_memory_equal(got, whole, D * sizeof(float));
        assert_true(got[D] == 99);
    }
    store_close(s);
}

static void a_newer_put_replaces_the_whole_record(void **state)
{
    struct store *s = open_shard(0, 1);
    uint64_t id = row_id(2, 8999);
    assert_int_equal(put(s, id, 1, 5, 10), ST_OK);
    assert_row(s, id, 5, 10);
    assert_int_equal(put(s, id, 1, 6, 20), ST_OK);
    assert_row(s, id, 6, 20);
    assert_int_equal(put(s, id, 2, 3, 30), ST_OK); /* the attempt counts first */
    assert_row(s, id, 3, 30);
    store_close(s);
}

static void an_older_put_changes_nothing(void **state)
{
    struct store *s = open_shard(0, 1);
    uint64_t id = row_id(1, 9);
    assert_int_equal(put(s, id, 2, 5, 10), ST_OK);
    struct digest before = store_digest(s);
    assert_int_equal(put(s, id, 2, 4, 20), ST_BUSY);
    assert_int_equal(put(s, id, 1, 1000, 20), ST_BUSY);
    assert_row(s, id, 5, 10);
    assert_digest(store_digest(s), before);
    store_close(s);
}

static void an_equal_put_is_a_copy_or_a_second_writer(void **state)
{
    struct store *s = open_shard(0, 1);
    uint64_t id = row_id(0, 0);
    assert_int_equal(put(s, id, 1, 0, 10), ST_OK);
    assert_int_equal(put(s, id, 1, 0, 10), ST_OK);
    assert_row(s, id, 0, 10);
    assert_int_equal(put(s, id, 1, 0, 11), ST_BADMSG);
    assert_row(s, id, 0, 10);
    float last_float_differs[W];
    make_record(last_float_differs, 10);
    last_float_differs[W - 1] = 0;
    assert_int_equal(store_put(s, id, 1, 0, (const uint8_t *)last_float_differs), ST_BADMSG);
    assert_row(s, id, 0, 10);
    store_close(s);
}

static void a_stamp_that_does_not_fit_is_refused(void **state)
{
    struct store *s = open_shard(0, 1);
    uint64_t id = row_id(1, 1);
    const int64_t top = (INT64_C(1) << 40) - 2;
    assert_int_equal(put(s, id, 0, -1, 1), ST_BADMSG);
    assert_int_equal(put(s, id, 0, top + 1, 1), ST_BADMSG);
    assert_int_equal(put(s, id, 1u << 24, 0, 1), ST_BADMSG);
    assert_int_equal(store_version(s, id), STORE_NEVER);
    assert_int_equal(put(s, id, 0, top, 1), ST_OK);
    assert_row(s, id, top, 1);
    assert_int_equal(put(s, id, (1u << 24) - 1, 0, 2), ST_OK);
    assert_row(s, id, 0, 2);
    store_close(s);
}

static void a_check_says_what_a_put_would_and_changes_nothing(void **state)
{
    struct store *s = open_shard(0, 1);
    uint64_t id = row_id(1, 2);
    float a[W], b[W];
    make_record(a, 1);
    make_record(b, 2);
    assert_int_equal(store_check(s, id, 1, 3, (const uint8_t *)a), ST_OK);
    assert_int_equal(store_version(s, id), STORE_NEVER);
    assert_int_equal(put(s, id, 1, 3, 1), ST_OK);
    assert_int_equal(store_check(s, id, 1, 3, (const uint8_t *)a), ST_OK);
    assert_int_equal(store_check(s, id, 1, 3, (const uint8_t *)b), ST_BADMSG);
    assert_int_equal(store_check(s, id, 1, 2, (const uint8_t *)b), ST_BUSY);
    assert_int_equal(store_check(s, id, 1, 4, (const uint8_t *)b), ST_OK);
    assert_row(s, id, 3, 1);
    store_close(s);
}

static void every_row_is_on_exactly_one_shard(void **state)
{
    enum { G = 7 };
    struct store *s[G];
    for (uint32_t g = 0; g < G; g++) s[g] = open_shard(g, G);
    for (uint32_t t = 0; t < F; t++)
        for (uint64_t row = 0; row < ROWS[t] + 10; row++) {
            int homes = 0;
            for (uint32_t g = 0; g < G; g++) homes += store_has(s[g], row_id(t, row));
            assert_int_equal(homes, row < ROWS[t] ? 1 : 0);
        }
    assert_false(store_has(s[0], row_id(F, 0)));
    assert_false(store_has(s[0], UINT64_MAX));
    for (uint32_t g = 0; g < G; g++) store_close(s[g]);
}

/* Write a third of all rows, spread over n_shards, and add the shards' digests up. */
static struct digest spread_digest(uint32_t n_shards)
{
    struct digest sum = {0};
    for (uint32_t g = 0; g < n_shards; g++) {
        struct store *s = open_shard(g, n_shards);
        for (uint32_t t = 0; t < F; t++)
            for (uint64_t row = 0; row < ROWS[t]; row += 3)
                if (store_has(s, row_id(t, row)))
                    assert_int_equal(put(s, row_id(t, row), 1, (int64_t)row, (float)row), ST_OK);
        for (uint32_t t = 0; t < F; t++) /* and no row fell on another's place */
            for (uint64_t row = 0; row < ROWS[t]; row += 3)
                if (store_has(s, row_id(t, row)))
                    assert_row(s, row_id(t, row), (int64_t)row, (float)row);
        digest_merge(&sum, store_digest(s));
        store_close(s);
    }
    return sum;
}

static void the_digest_is_the_sum_over_changed_rows_however_they_are_spread(void **state)
{
    struct digest want = {0};
    for (uint32_t t = 0; t < F; t++)
        for (uint64_t row = 0; row < ROWS[t]; row += 3) {
            float record[W];
            make_record(record, (float)row);
            digest_add(&want, row_id(t, row), record, sizeof(record));
        }
    assert_digest(spread_digest(1), want);
    assert_digest(spread_digest(3), want);
    assert_digest(spread_digest(3 * 2), want);
    assert_digest(spread_digest(64), want); /* more shards than rows in two tables */
}

static void rows_equal_to_their_initial_record_add_nothing(void **state)
{
    struct store *s = open_shard(0, 1);
    float record[W];
    for (uint64_t row = 0; row < ROWS[2]; row++)
        store_read(s, row_id(2, row), W, (uint8_t *)record);
    assert_digest(store_digest(s), (struct digest){0});
    uint64_t id = row_id(2, 5000);
    store_initial(SEED, id, ROWS[2], D, STATE, record);
    assert_int_equal(store_put(s, id, 1, 9, (const uint8_t *)record), ST_OK);
    assert_int_equal(store_version(s, id), 9);
    assert_digest(store_digest(s), (struct digest){0});
    record[W - 1] = -0.0f; /* bits count, not values */
    assert_int_equal(store_put(s, id, 1, 10, (const uint8_t *)record), ST_OK);
    struct digest want = {0}, of_file = {0};
    digest_add(&want, id, record, sizeof(record));
    assert_digest(store_digest(s), want);
    store_digest_row(SEED, id, ROWS[2], D, STATE, record, &of_file);
    assert_digest(of_file, want);
    store_close(s);
}

#if defined(__SANITIZE_THREAD__)
enum { HUGE_BITS = 34 }; /* its shadow leaves less address space */
#else
enum { HUGE_BITS = 40 };
#endif

static void a_huge_table_opens_reads_and_digests_at_once(void **state)
{
    const uint64_t rows[1] = {UINT64_C(1) << HUGE_BITS};
    struct store_cfg cfg = {.n_shards = 1, .n_tables = 1, .dim = 2, .table_rows = rows, .seed = 1};
    struct store *s = NULL;
    assert_int_equal(store_open(&cfg, &s), ST_OK);
    uint64_t last = row_id(0, rows[0] - 1);
    float value[2] = {0}, same[2];
    store_read(s, last, 2, (uint8_t *)value);
    rng_uniform(1, RNG_TABLE_0, rows[0] - 1, ldexpf(1, -HUGE_BITS / 2), same, 2);
    assert_memory_equal(value, same, sizeof(same));
    value[0] = 3;
    assert_int_equal(store_put(s, last, 1, 1, (const uint8_t *)value), ST_OK);
    struct digest want = {0};
    digest_add(&want, last, value, sizeof(value));
    assert_digest(store_digest(s), want);
    store_close(s);
}

static void sizes_that_cannot_be_are_refused_by_name(void **state)
{
    struct store *const untouched = (struct store *)caught_line;
    struct store *s = untouched;
    const uint64_t too_many[2] = {5, (UINT64_C(1) << ROW_BITS) + 1};
    const uint64_t all_rows[1] = {UINT64_C(1) << ROW_BITS};
    struct store_cfg cfg = {.n_shards = 1, .n_tables = 2, .dim = 4, .table_rows = too_many};
    caught_start();
    assert_int_equal(store_open(&cfg, &s), ST_CONFIG);
    assert_non_null(strstr(caught_line, "table 1"));
    cfg = (struct store_cfg){.n_shards = 1, .n_tables = 1, .dim = STORE_MAX_DIM,
                             .state = STORE_MAX_DIM, .table_rows = all_rows};
    assert_int_equal(store_open(&cfg, &s), ST_NOMEM); /* 2^63 bytes: no kernel maps that */
    assert_non_null(strstr(caught_line, "table 0"));
    assert_non_null(strstr(caught_line, "does not map"));
    cfg.dim = STORE_MAX_DIM + 1;
    assert_int_equal(store_open(&cfg, &s), ST_CONFIG);
    cfg.dim = 0;
    assert_int_equal(store_open(&cfg, &s), ST_CONFIG);
    caught_stop();
    assert_ptr_equal(s, untouched);
}

static void opening_survives_every_failed_allocation(void **state)
{
    struct store *const untouched = (struct store *)caught_line;
    size_t injected = 0, live = mem_live();
    caught_start();
    for (size_t nth = 1;; nth++) {
        struct store *s = untouched;
        struct store_cfg cfg = {.n_shards = 1, .n_tables = F, .dim = D, .table_rows = ROWS};
        caught_reset();
        mem_fail_at(nth);
        enum st st = store_open(&cfg, &s);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            store_close(s);
            break;
        }
        injected++;
        assert_int_equal(caught_lines, 1); /* said once */
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(s, untouched);
        assert_int_equal(mem_live(), live);
    }
    caught_stop();
    assert_int_equal(injected, 2);
    assert_int_equal(mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unwritten_row_reads_as_its_initial_value),
        cmocka_unit_test(a_narrow_read_gives_the_value_alone),
        cmocka_unit_test(a_newer_put_replaces_the_whole_record),
        cmocka_unit_test(an_older_put_changes_nothing),
        cmocka_unit_test(an_equal_put_is_a_copy_or_a_second_writer),
        cmocka_unit_test(a_stamp_that_does_not_fit_is_refused),
        cmocka_unit_test(a_check_says_what_a_put_would_and_changes_nothing),
        cmocka_unit_test(every_row_is_on_exactly_one_shard),
        cmocka_unit_test(the_digest_is_the_sum_over_changed_rows_however_they_are_spread),
        cmocka_unit_test(rows_equal_to_their_initial_record_add_nothing),
        cmocka_unit_test(a_huge_table_opens_reads_and_digests_at_once),
        cmocka_unit_test(sizes_that_cannot_be_are_refused_by_name),
        cmocka_unit_test(opening_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
