/* Criteo's text format through data/source.h: the bundled sample against a parser written here,
 * every kind of bad line with the words a user reads, and files that end too early. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <cmocka.h>

#include "base/log.h"
#include "base/row.h"
#include "data/source.h"
#include "tests/support/data_fixture.h"

enum { F = FIXTURE_TABLES, ND = FIXTURE_DENSE, LINE_ROOM = 70000 };

/* A good line: label, I1..I13 = 1..13, ids 00000001.. */
static char *good_line(char *out, const char *end)
{
    int n = sprintf(out, "1");
    for (int i = 1; i <= ND; i++) n += sprintf(out + n, "\t%d", i);
    for (int t = 1; t <= F; t++) n += sprintf(out + n, "\t%08x", (unsigned)t);
    strcpy(out + n, end);
    return out;
}

/* The same with field `at` (0 = label) replaced. */
static char *line_with(char *out, int at, const char *text, size_t n)
{
    char good[1024], *p = out;
    good_line(good, "");
    int k = 0;
    for (char *field = good; field != NULL; k++) {
        char *tab = strchr(field, '\t');
        size_t len = tab != NULL ? (size_t)(tab - field) : strlen(field);
        if (k > 0) *p++ = '\t';
        memcpy(p, k == at ? text : field, k == at ? n : len);
        p += k == at ? n : len;
        field = tab != NULL ? tab + 1 : NULL;
    }
    strcpy(p, "\n");
    return out;
}

static void every_value_of_the_sample_is_what_strtol_reads(void **state)
{
    struct fixture *f = *state;
    struct samples got;
    size_t bytes;
    for (int t = 0; t < F; t++) f->tables[t] = 1000003u * (unsigned)(t + 1);
    fixture_read_sample(f, &got);
    char *text = fixture_read(FIXTURE_SAMPLE, &bytes), *p = text;
    unsigned clicks = 0;
    for (size_t i = 0; i < FIXTURE_SAMPLE_ROWS; i++) {
        assert_int_equal((int)got.label[i], strtol(p, &p, 10));
        clicks += got.label[i] == 1.0f;
        for (int k = 0; k < ND; k++) {
            p++;
            double v = *p == '\t' ? 0.0 : (double)strtoll(p, &p, 10);
            float want = (float)log1p(v > 0.0 ? v : 0.0);
            assert_memory_equal(&got.dense[i * ND + (size_t)k], &want, sizeof(want));
        }
        for (int t = 0; t < F; t++) {
            p++;
            uint64_t v = *p == '\t' || *p == '\n' ? 0 : strtoull(p, &p, 16);
            assert_true(got.id[i * F + (size_t)t] == row_id((uint32_t)t, v % f->tables[t]));
        }
        assert_int_equal(*p++, '\n');
    }
    assert_int_equal(clicks, 265);
    free(text);
    samples_close(&got);
}

static void a_gzipped_copy_reads_the_same(void **state)
{
    struct fixture *f = *state;
    struct samples plain, packed = fixture_room_for(FIXTURE_SAMPLE_ROWS + 500);
    size_t bytes;
    uint32_t rows;
    fixture_read_sample(f, &plain);
    char *text = fixture_read(FIXTURE_SAMPLE, &bytes);
    f->cfg.data.path = (char *)fixture_write_gzip(f, "day.gz", text, bytes);
    assert_int_equal(fixture_read_all(f, 0, &packed, &rows), ST_OK);
    assert_int_equal(rows, FIXTURE_SAMPLE_ROWS);
    fixture_assert_same(&plain, &packed, 0, 0, FIXTURE_SAMPLE_ROWS);
    free(text);
    samples_close(&plain);
    samples_close(&packed);
}

/* Write `text` behind a good line, read all; the error names line 2. */
static enum st read_second_line(struct fixture *f, const char *text, size_t n)
{
    char *all = malloc(LINE_ROOM + n);
    uint32_t rows;
    good_line(all, "\n");
    size_t first = strlen(all);
    memcpy(all + first, text, n);
    fixture_write(f, "t.tsv", all, first + n);
    free(all);
    return fixture_read_all(f, 0, NULL, &rows);
}

static void a_bad_field_stops_with_its_line_and_name(void **state)
{
    static const struct { int field; const char *text, *fragment; } CASES[] = {
        {0, "2", "t.tsv:2: label '2' not 0/1"},
        {0, "-1", "t.tsv:2: label '-1' not 0/1"},
        {0, "", "t.tsv:2: label '' not 0/1"},
        {0, "01", "t.tsv:2: label '01' not 0/1"},
        {3, "abc", "t.tsv:2: dense I3 'abc'"},
        {3, "1e999", "t.tsv:2: dense I3 '1e999' out of range"},
        {3, "nan", "t.tsv:2: dense I3 'nan'"},
        {3, "inf", "t.tsv:2: dense I3 'inf'"},
        {1, "1.0", "t.tsv:2: dense I1 '1.0'"},
        {1, "-", "t.tsv:2: dense I1 '-'"},
        {1, "+5", "t.tsv:2: dense I1 '+5'"},
        {1, " 5", "t.tsv:2: dense I1 ' 5'"},
        {13, "9223372036854775808", "dense I13 '9223372036854775808' out of range"},
        {13, "-9223372036854775809", "dense I13 '-9223372036854775809' out of range"},
        {2, "1234567890123456789012345678901234567890", "'12345678901234567890123456789012...'"},
        {20, "zz91", "t.tsv:2: C7 'zz91' is not hex"},
        {20, "-5", "t.tsv:2: C7 '-5' is not hex"},
        {20, "0x12", "t.tsv:2: C7 '0x12' is not hex"},
        {39, "123456789", "t.tsv:2: C26 '123456789' is not hex"},
        {14, "g", "t.tsv:2: C1 'g' is not hex"},
        {14, "@", "t.tsv:2: C1 '@' is not hex"},
        {14, "\x01\xff", "t.tsv:2: C1 '?" "?' is not hex"},
    };
    char line[1024];
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        line_with(line, CASES[i].field, CASES[i].text, strlen(CASES[i].text));
        enum st st = read_second_line(*state, line, strlen(line));
        fixture_assert_failed(*state, st, ST_DATA, CASES[i].fragment);
    }
}

static void a_bad_line_stops_with_its_number(void **state)
{
    struct fixture *f = *state;
    char good[1024], line[2048];
    good_line(good, "\n");

    /* 39 fields: Kaggle's test.txt */
    enum st st = read_second_line(f, strchr(good, '\t') + 1, strlen(strchr(good, '\t') + 1));
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 39 fields, expected 40 (label missing? this "
                                          "looks like a test file)");
    line_with(line, 0, "2\t3", 3);
    st = read_second_line(f, line, strlen(line));
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 41 fields, expected 40 (label + 13 of "
                                          "model.dense_features + 26 of model.tables)");
    st = read_second_line(f, "1\t2\t3\n", 6);
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 3 fields, expected 40");
    st = read_second_line(f, "1,2,3\n", 6);
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 1 field; separator must be TAB");
    st = read_second_line(f, "\n", 1);
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 1 field; separator must be TAB");
    snprintf(line, sizeof(line), "%s", good);
    line[16] = '\0';
    st = read_second_line(f, line, strlen(good));
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: NUL byte at column 17");
    assert_int_equal(st_exit_code(ST_DATA), 65);
}

static void a_line_may_have_64_kib_and_not_one_byte_more(void **state)
{
    struct fixture *f = *state;
    enum { LIMIT = 64 << 10 };
    char *zeros = malloc(LINE_ROOM), *line = malloc(LINE_ROOM + 1024), good[1024];
    memset(zeros, '0', LINE_ROOM);
    size_t fixed = strlen(good_line(good, "")) - 1; /* all but I2, whose digit is replaced */
    line_with(line, 2, zeros, LIMIT - fixed);
    assert_int_equal(strlen(line), LIMIT + 1);
    assert_int_equal(read_second_line(f, line, strlen(line)), ST_OK);
    line_with(line, 2, zeros, LIMIT - fixed + 1);
    enum st st = read_second_line(f, line, strlen(line));
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: line longer than 64 KiB");
    char *huge = malloc(10 << 20);
    memset(huge, 'x', 10 << 20);
    st = read_second_line(f, huge, 10 << 20);
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: line longer than 64 KiB");
    free(huge);
    free(line);
    free(zeros);
}

static void a_line_may_end_anywhere_in_the_buffer(void **state)
{
    struct fixture *f = *state;
    enum { BUFFER = 256 << 10, LONG = 60000, LINES = 6 };
    char *zeros = malloc(LINE_ROOM), *text = malloc(BUFFER + 2 * LINE_ROOM), good[1024];
    memset(zeros, '0', LINE_ROOM);
    size_t fixed = strlen(good_line(good, "\n")) - 1; /* all but I2 */
    for (size_t end = BUFFER - 3; end <= BUFFER + 3; end++) { /* of the fifth line */
        size_t n = 0;
        uint32_t rows;
        for (int i = 0; i < LINES; i++) {
            size_t want = i == 4 ? end - n : LONG;
            line_with(text + n, 2, zeros, want - fixed);
            n += want;
        }
        fixture_write(f, "t.tsv", text, n);
        assert_int_equal(fixture_read_all(f, 0, NULL, &rows), ST_OK);
        assert_int_equal(rows, LINES);
    }
    free(text);
    free(zeros);
}

static void what_real_files_do_is_accepted(void **state)
{
    struct fixture *f = *state;
    char text[4096], line[1024];
    struct samples s = fixture_room_for(600);
    uint32_t rows;
    size_t n = (size_t)sprintf(text, "\xEF\xBB\xBF%s", good_line(line, "\r\n"));
    n += (size_t)sprintf(text + n, "%s", line_with(line, 2, "-2", 2));
    n += (size_t)sprintf(text + n, "0\t1\t2\t3\t4\t5\t6\t7\t8\t9\t10\t11\t12\t13\n"); /* stripped */
    n += (size_t)sprintf(text + n, "0%s\n", "\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t"
                                             "\t\t\t\t\t\t\t\t\t\t\t\t");
    n += (size_t)sprintf(text + n, "%s", line_with(line, 1, "9223372036854775807", 19));
    n += (size_t)sprintf(text + n, "%s", line_with(line, 39, "FfFfFfFf", 8));
    n += (size_t)sprintf(text + n, "%s", good_line(line, ""));
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, n);
    f->tables[25] = (uint64_t)1 << 40;
    assert_int_equal(fixture_read_all(f, 0, &s, &rows), ST_OK);
    assert_int_equal(rows, 7);
    fixture_assert_same(&s, &s, 0, 6, 1);                       /* BOM, CR LF, no last newline */
    assert_true(s.label[0] == 1.0f && s.label[2] == 0.0f);
    assert_true(s.dense[1 * ND + 1] == 0.0f);                   /* negative */
    assert_true(s.dense[2 * ND + 12] == (float)log1p(13.0));
    assert_true(s.id[2 * F + 25] == row_id(25, 0));             /* padded */
    assert_true(s.dense[3 * ND] == 0.0f && s.id[3 * F] == row_id(0, 0)); /* all empty */
    assert_true(s.dense[4 * ND] == (float)log1p(9223372036854775807.0));
    assert_true(s.id[5 * F + 25] == row_id(25, UINT32_MAX));
    samples_close(&s);
}

/* Write `n` lines of 17 fields (13 integers, 3 ids), then `end`; read all with 26 tables. */
static enum st read_narrow(struct fixture *f, int n, const char *end)
{
    char text[64 << 10];
    uint32_t rows;
    size_t at = 0;
    for (int i = 0; i < n; i++)
        at += (size_t)sprintf(text + at, "0\t1\t2\t3\t4\t5\t6\t7\t8\t9\t0\t1\t2\t3\ta\tb\tc\n");
    at += (size_t)sprintf(text + at, "%s", end);
    fixture_write(f, "t.tsv", text, at);
    return fixture_read_all(f, 0, NULL, &rows);
}

static void a_file_that_is_never_as_wide_as_the_model_is_refused(void **state)
{
    struct fixture *f = *state;
    char line[1024];
    fixture_assert_failed(f, read_narrow(f, 1, ""), ST_DATA,
                          "t.tsv: no line has 40 fields (label + 13 of model.dense_features + 26 "
                          "of model.tables); the longest of the first 1 has 17");
    fixture_assert_failed(f, read_narrow(f, 1000, good_line(line, "\n")), ST_DATA,
                          "the longest of the first 1000 has 17");
    assert_int_equal(read_narrow(f, 999, good_line(line, "\n")), ST_OK); /* stripped, then whole */
    f->cfg.data.train_rows = 5; /* not even of the few rows that are asked for */
    fixture_assert_failed(f, read_narrow(f, 20, ""), ST_DATA, "the longest of the first 20 has 17");
}

static void count_notes(void *ctx, const char *line)
{
    unsigned *n = ctx;
    if (strstr(line, "accepted") != NULL) ++*n;
}

static void what_is_accepted_is_noted_once_however_often_it_is_read(void **state)
{
    struct fixture *f = *state;
    char text[1024], line[1000];
    unsigned notes = 0;
    uint32_t rows;
    snprintf(text, sizeof(text), "\xEF\xBB\xBF%s", good_line(line, "\r\n"));
    fixture_write(f, "t.tsv", text, strlen(text));
    log_set_sink(count_notes, &notes);
    for (int reader = 0; reader < 3; reader++)
        assert_int_equal(fixture_read_all(f, 0, NULL, &rows), ST_OK);
    assert_int_equal(notes, 2);
}

static void a_last_line_that_was_cut_is_not_a_sample(void **state)
{
    struct fixture *f = *state;
    char line[1024];
    size_t whole = strlen(good_line(line, ""));
    for (size_t n = 2; n < whole; n++) { /* in a field, behind a TAB, in the last id */
        enum st st = read_second_line(f, line, n);
        fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: last line incomplete (file truncated?)");
    }
    assert_int_equal(read_second_line(f, line, whole), ST_OK);
}

static void a_prepared_file_is_not_read_as_text(void **state)
{
    struct fixture *f = *state;
    uint32_t rows;
    fixture_write(f, "t.chp", "CHANTERP\x01\0\0\0", 12);
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "t.chp: is a prepared file; set data.format=prepared");
}

static void an_empty_file_has_too_few_samples(void **state)
{
    struct fixture *f = *state;
    uint32_t rows;
    fixture_write(f, "t.tsv", "", 0);
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "t.tsv: 0 samples; need >= 1");
    fixture_write_gzip(f, "t.gz", "", 0);
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "t.gz: 0 samples; need >= 1");
    fixture_write(f, "t.tsv", "\xEF\xBB\xBF", 3);
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "t.tsv: 0 samples; need >= 1");
}

static void a_torn_or_damaged_gzip_file_is_no_short_file(void **state)
{
    struct fixture *f = *state;
    size_t bytes, packed_bytes;
    uint32_t rows;
    char *text = fixture_read(FIXTURE_SAMPLE, &bytes);
    char *packed = fixture_read(fixture_write_gzip(f, "t.gz", text, bytes), &packed_bytes);
    const size_t cuts[] = {12, 100, packed_bytes / 2, packed_bytes - 9, packed_bytes - 1};
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        fixture_write(f, "t.gz", packed, cuts[i]);
        enum st st = fixture_read_all(f, 0, NULL, &rows);
        fixture_assert_failed(f, st, ST_DATA, "t.gz: gzip ends early after ");
    }
    packed[packed_bytes - 6] ^= 1; /* in the checksum */
    fixture_write(f, "t.gz", packed, packed_bytes);
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA, "gzip is damaged after");
    free(packed);
    free(text);
}

static void other_shapes_are_read_alike(void **state)
{
    struct fixture *f = *state;
    struct samples s;
    uint32_t rows;
    f->cfg.model.dense_features = 2;
    f->cfg.model.n_tables = 3;
    const char text[] = "1\t7\t\t0000000a\tb\t3ec\n";
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, sizeof(text) - 1);
    assert_int_equal(samples_open(600, 2, 3, &s), ST_OK);
    assert_int_equal(fixture_read_all(f, 0, &s, &rows), ST_OK);
    assert_int_equal(rows, 1);
    assert_true(s.dense[0] == (float)log1p(7.0) && s.dense[1] == 0.0f);
    assert_true(s.id[0] == row_id(0, 10) && s.id[1] == row_id(1, 11) && s.id[2] == row_id(2, 4));
    samples_close(&s);
}

#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(every_value_of_the_sample_is_what_strtol_reads),
        WITH_FIXTURE(a_gzipped_copy_reads_the_same),
        WITH_FIXTURE(a_bad_field_stops_with_its_line_and_name),
        WITH_FIXTURE(a_bad_line_stops_with_its_number),
        WITH_FIXTURE(a_line_may_have_64_kib_and_not_one_byte_more),
        WITH_FIXTURE(a_line_may_end_anywhere_in_the_buffer),
        WITH_FIXTURE(what_is_accepted_is_noted_once_however_often_it_is_read),
        WITH_FIXTURE(what_real_files_do_is_accepted),
        WITH_FIXTURE(a_file_that_is_never_as_wide_as_the_model_is_refused),
        WITH_FIXTURE(a_prepared_file_is_not_read_as_text),
        WITH_FIXTURE(a_last_line_that_was_cut_is_not_a_sample),
        WITH_FIXTURE(an_empty_file_has_too_few_samples),
        WITH_FIXTURE(a_torn_or_damaged_gzip_file_is_no_short_file),
        WITH_FIXTURE(other_shapes_are_read_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
