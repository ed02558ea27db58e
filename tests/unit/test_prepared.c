/* The prepared format: same samples as the text it was made from, and a named error for every
 * byte that is not what was written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include <cmocka.h>

#include "base/mem.h"
#include "data/prepared.h"
#include "data/source.h"
#include "tests/support/data_fixture.h"

#define SAMPLE "data/sample/day_0.tsv"
enum { ROWS = 10000, F = FIXTURE_TABLES, ND = FIXTURE_DENSE, HEADER = 64, BLOCK_ROWS = 4096 };
enum { BLOCK = 64 + BLOCK_ROWS * 4 * ND + BLOCK_ROWS * 4 * F + BLOCK_ROWS }; /* all 64-aligned */

static char *chp_path(const struct fixture *f, char out[128])
{
    snprintf(out, 128, "%s/day.chp", f->dir);
    return out;
}

/* The sample as a prepared file in the fixture's directory, which the configuration then names. */
static char *prepare_sample(struct fixture *f, char path[128])
{
    uint64_t rows = 0;
    f->cfg.data.format = DATA_CRITEO_TSV;
    f->cfg.data.path = (char *)SAMPLE;
    assert_int_equal(prepare_write(&f->cfg, chp_path(f, path), NULL, NULL, &rows), ST_OK);
    assert_int_equal(rows, ROWS);
    f->cfg.data.format = DATA_PREPARED;
    f->cfg.data.path = path;
    return path;
}

static struct samples room_for_sample(void)
{
    struct samples s;
    assert_int_equal(samples_open(ROWS + 500, ND, F, &s), ST_OK);
    return s;
}

static void assert_same(const struct samples *a, size_t from, const struct samples *b, size_t n)
{
    assert_memory_equal(a->dense + from * ND, b->dense, n * ND * sizeof(float));
    assert_memory_equal(a->label + from, b->label, n * sizeof(float));
    assert_memory_equal(a->id + from * F, b->id, n * F * sizeof(uint64_t));
}

static void one_file_gives_the_samples_of_the_text_for_any_table_sizes(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct samples text = room_for_sample(), prepared = room_for_sample();
    uint32_t rows;
    prepare_sample(f, path);
    for (uint64_t size = 7; size < (uint64_t)1 << 40; size *= 100003) {
        for (int t = 0; t < F; t++) f->tables[t] = size + (uint64_t)t;
        f->cfg.data.format = DATA_CRITEO_TSV;
        f->cfg.data.path = (char *)SAMPLE;
        assert_int_equal(fixture_read_all(f, 0, &text, &rows), ST_OK);
        f->cfg.data.format = DATA_PREPARED;
        f->cfg.data.path = path;
        assert_int_equal(fixture_read_all(f, 0, &prepared, &rows), ST_OK);
        assert_int_equal(rows, ROWS);
        assert_same(&text, 0, &prepared, ROWS);
    }
    samples_close(&text);
    samples_close(&prepared);
}

static void windows_and_rewinds_start_at_any_row(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct samples all = room_for_sample(), part = room_for_sample();
    struct source *s;
    uint32_t rows, got;
    prepare_sample(f, path);
    assert_int_equal(fixture_read_all(f, 0, &all, &rows), ST_OK);
    const uint64_t starts[] = {1, 4095, 4096, 4097, 8192, 9999};
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
        f->cfg.data.train_rows = starts[i];
        assert_int_equal(source_open(&f->cfg, 1, &s), ST_OK);
        for (int pass = 0; pass < 2; pass++) {
            assert_int_equal(source_read(s, &part, 0, ROWS, &got), ST_OK);
            assert_int_equal(got, ROWS - starts[i]);
            assert_same(&all, starts[i], &part, got);
            assert_int_equal(source_rewind(s), ST_OK);
        }
        source_close(s);
    }
    f->cfg.data.train_rows = ROWS + 1;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_DATA,
                          "data.train_rows is 10001, but the file holds 10000 samples");
    f->cfg.data.train_rows = ROWS;
    fixture_assert_failed(f, source_open(&f->cfg, 1, &s), ST_DATA, "nothing is held out");
    samples_close(&all);
    samples_close(&part);
}

static void the_bytes_are_those_of_the_layout(void **state)
{
    struct fixture *f = *state;
    char path[128];
    size_t n;
    uint64_t rows;
    f->cfg.model.dense_features = 2;
    f->cfg.model.n_tables = 3;
    static const char text[] = "1\t0\t\t1\t\tff\n0\t\t\t2\t3\t4\n";
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, sizeof(text) - 1);
    assert_int_equal(prepare_write(&f->cfg, chp_path(f, path), NULL, NULL, &rows), ST_OK);
    assert_int_equal(rows, 2);

    char want[HEADER + 64 + 64 + 64 + 64] = "CHANTERP";
    const uint32_t shape[] = {1, 2, 3, 4096}, ids[] = {1, 0, 255, 2, 3, 4}, block_rows = 2;
    memcpy(want + 8, shape, sizeof(shape));
    memcpy(want + 24, &rows, 8);
    strcpy(want + 32, "log1p");
    uint64_t sum = XXH3_64bits(want, 56);
    memcpy(want + 56, &sum, 8);
    char *block = want + HEADER;
    memcpy(block + 8, &block_rows, 4);
    memcpy(block + 128, ids, sizeof(ids)); /* the dense section before it is zero */
    block[192] = 1;
    sum = XXH3_64bits_withSeed(block + 64, 192, 0);
    memcpy(block, &sum, 8);

    char *got = fixture_read(path, &n);
    assert_int_equal(n, sizeof(want));
    assert_memory_equal(got, want, n);
    free(got);
}

static void a_flipped_bit_is_found_in_its_block_when_it_is_read(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct samples s = room_for_sample();
    struct source *src;
    size_t n;
    uint64_t rows = 77;
    uint32_t got;
    char *bytes = fixture_read(prepare_sample(f, path), &n);
    const size_t places[] = {0, 9, 64, 100000, BLOCK - 1};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        bytes[HEADER + BLOCK + places[i]] ^= 4;
        fixture_write(f, "day.chp", bytes, n);
        bytes[HEADER + BLOCK + places[i]] ^= 4;
        assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
        assert_int_equal(source_read(src, &s, 0, BLOCK_ROWS, &got), ST_OK); /* block 0 is whole */
        fixture_assert_failed(f, source_read(src, &s, 0, 1, &got), ST_DATA,
                              "checksum mismatch in block 1 (rows 4096 to 8191)");
        source_close(src);
        fixture_assert_failed(f, prepared_verify(path, &rows), ST_DATA,
                              "checksum mismatch in block 1 (rows 4096 to 8191)");
        assert_int_equal(rows, 77);
    }
    fixture_write(f, "day.chp", bytes, n);
    assert_int_equal(prepared_verify(path, &rows), ST_OK);
    assert_int_equal(rows, ROWS);
    memcpy(bytes + HEADER, bytes + HEADER + BLOCK, BLOCK); /* a good block in another's place */
    fixture_write(f, "day.chp", bytes, n);
    fixture_assert_failed(f, prepared_verify(path, &rows), ST_DATA, "checksum mismatch in block 0");
    free(bytes);
    samples_close(&s);
}

/* Put `value` (4 bytes) at `at` of the header, with a checksum that fits, and open. */
static enum st open_with_header(struct fixture *f, const char *bytes, size_t n, size_t at,
                                const void *value, size_t value_bytes)
{
    struct source *src;
    char *copy = malloc(n);
    memcpy(copy, bytes, n);
    memcpy(copy + at, value, value_bytes);
    uint64_t sum = XXH3_64bits(copy, 56);
    memcpy(copy + 56, &sum, 8);
    fixture_write(f, "day.chp", copy, n);
    free(copy);
    return source_open(&f->cfg, 0, &src);
}

static void a_header_that_does_not_fit_is_refused(void **state)
{
    struct fixture *f = *state;
    char path[128];
    size_t n;
    char *bytes = fixture_read(prepare_sample(f, path), &n);
    static const struct {
        size_t at, size;
        uint64_t value;
        const char *fragment;
    } CASES[] = {
        {0, 4, 0x5A5A5A5A, "day.chp: not a prepared file; make one with `chanter prepare`"},
        {8, 4, 9, "day.chp: format version 9, this program reads 1; rebuild"},
        {16, 4, 24, "header says 10000 rows, file holds"},
        {20, 4, 0, "impossible header"},
        {20, 4, UINT32_MAX, "impossible header"},
        {12, 4, UINT32_MAX, "impossible header"},
        {24, 8, 1000000000, "header says 1000000000 rows, file holds 10000; rebuild"},
        {24, 8, UINT64_MAX, "header says 18446744073709551615 rows, file holds 10000; rebuild"},
        {24, 8, 9999, "header says 9999 rows, file holds 10000; rebuild"},
        {32, 8, 0x327472717473, "built with dense transform 'stqrt2', need 'log1p'; rebuild"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        enum st st = open_with_header(f, bytes, n, CASES[i].at, &CASES[i].value, CASES[i].size);
        fixture_assert_failed(f, st, ST_DATA, CASES[i].fragment);
    }
    fixture_write(f, "day.chp", bytes, n);
    struct source *src;
    bytes[50] ^= 1;
    fixture_write(f, "day.chp", bytes, n);
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA, "header checksum mismatch");
    free(bytes);
}

static void a_file_of_another_shape_has_to_be_rebuilt(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct source *src;
    prepare_sample(f, path);
    f->cfg.model.n_tables = 24;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA,
                          "day.chp: built for 26 tables, need 24; rebuild");
    f->cfg.model.n_tables = F;
    f->cfg.model.dense_features = 14;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA,
                          "day.chp: built for 13 dense features, need 14; rebuild");
}

static void a_file_of_another_length_is_refused(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct source *src;
    size_t n;
    char *bytes = fixture_read(prepare_sample(f, path), &n);
    static const struct { long more; const char *fragment; } CASES[] = {
        {-1, "header says 10000 rows, file holds 9"},
        {-64, "header says 10000 rows, file holds 99"},
        {-2 * BLOCK, "header says 10000 rows, file holds "},
        {1, "header says 10000 rows, file holds 10000 and a part"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        fixture_write(f, "day.chp", bytes, n);
        assert_int_equal(truncate(path, (off_t)n + CASES[i].more), 0);
        fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA, CASES[i].fragment);
    }
    fixture_write(f, "day.chp", bytes, HEADER);
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA,
                          "header says 10000 rows, file holds 0");
    fixture_write(f, "day.chp", bytes, HEADER - 1);
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA,
                          "day.chp: not a prepared file: 63 bytes");
    fixture_write(f, "day.chp", "", 0);
    fixture_assert_failed(f, source_open(&f->cfg, 0, &src), ST_DATA,
                          "not a prepared file: 0 bytes");
    free(bytes);
}

static void a_file_that_shrinks_under_the_job_stops_it(void **state)
{
    struct fixture *f = *state;
    char path[128], want[128];
    struct samples s = room_for_sample();
    struct source *src;
    size_t n;
    uint32_t got;
    free(fixture_read(prepare_sample(f, path), &n));
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    assert_int_equal(source_read(src, &s, 0, 10, &got), ST_OK);
    assert_int_equal(truncate(path, HEADER + BLOCK), 0);
    snprintf(want, sizeof(want), "changed since start (size %zu -> %d)", n, HEADER + BLOCK);
    fixture_assert_failed(f, source_read(src, &s, 0, ROWS, &got), ST_DATA, want);
    fixture_assert_failed(f, source_rewind(src), ST_DATA, want);
    source_close(src);
    samples_close(&s);
}

static void count_progress(void *ctx, uint64_t rows)
{
    uint64_t *seen = ctx; /* calls, last */
    seen[0]++;
    seen[1] = rows;
}

static void progress_is_told_after_each_block(void **state)
{
    struct fixture *f = *state;
    char path[128];
    uint64_t seen[2] = {0}, rows;
    f->cfg.data.path = (char *)SAMPLE;
    assert_int_equal(prepare_write(&f->cfg, chp_path(f, path), count_progress, seen, &rows), ST_OK);
    assert_int_equal(seen[0], 3);
    assert_int_equal(seen[1], ROWS);
}

static void nothing_is_left_behind_when_the_text_is_bad(void **state)
{
    struct fixture *f = *state;
    char path[128], part[160];
    size_t n;
    uint64_t rows = 77;
    char *text = fixture_read(SAMPLE, &n);
    text[n - 1000] = 'x';
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, n);
    enum st st = prepare_write(&f->cfg, chp_path(f, path), NULL, NULL, &rows);
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:99");
    snprintf(part, sizeof(part), "%s.part", path);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_not_equal(access(part, F_OK), 0);
    assert_int_equal(rows, 77);
    f->cfg.data.path = (char *)SAMPLE;
    st = prepare_write(&f->cfg, "/no/such/directory/x.chp", NULL, NULL, &rows);
    fixture_assert_failed(f, st, ST_CANTCREATE, "/no/such/directory/x.chp: cannot create");
    free(text);
}

static void every_allocation_may_fail(void **state)
{
    struct fixture *f = *state;
    char path[128], part[160];
    chp_path(f, path);
    snprintf(part, sizeof(part), "%s.part", path);
    f->cfg.data.path = (char *)SAMPLE;
    unsigned injected = 0;
    for (size_t nth = 1;; nth++) {
        uint64_t rows = 77;
        size_t before = mem_live();
        mem_fail_at(nth);
        enum st st = prepare_write(&f->cfg, path, NULL, NULL, &rows);
        bool fired = mem_fail_stop();
        assert_int_equal(mem_live(), before);
        if (!fired) {
            assert_int_equal(st, ST_OK);
            break;
        }
        injected++;
        fixture_assert_failed(f, st, ST_NOMEM, "out of memory");
        assert_int_equal(rows, 77);
        assert_int_not_equal(access(part, F_OK), 0);
    }
    assert_int_equal(injected, 10); /* reader 3, block, outfile 4, the directory's name twice */
}

#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(one_file_gives_the_samples_of_the_text_for_any_table_sizes),
        WITH_FIXTURE(windows_and_rewinds_start_at_any_row),
        WITH_FIXTURE(the_bytes_are_those_of_the_layout),
        WITH_FIXTURE(a_flipped_bit_is_found_in_its_block_when_it_is_read),
        WITH_FIXTURE(a_header_that_does_not_fit_is_refused),
        WITH_FIXTURE(a_file_of_another_shape_has_to_be_rebuilt),
        WITH_FIXTURE(a_file_of_another_length_is_refused),
        WITH_FIXTURE(a_file_that_shrinks_under_the_job_stops_it),
        WITH_FIXTURE(progress_is_told_after_each_block),
        WITH_FIXTURE(nothing_is_left_behind_when_the_text_is_bad),
        WITH_FIXTURE(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
