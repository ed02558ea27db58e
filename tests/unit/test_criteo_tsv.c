/* Criteo's text format through data/source.h: the bundled sample against a parser written here,
 * every kind of bad line with the words a user reads, and files that change or end too early. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "data/source.h"
#include "tests/support/data_fixture.h"

#define SAMPLE "data/sample/day_0.tsv"
enum { SAMPLE_ROWS = 10000, F = FIXTURE_TABLES, ND = FIXTURE_DENSE, LINE_ROOM = 70000 };

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

static struct samples room_for(uint32_t n)
{
    struct samples s;
    assert_int_equal(samples_open(n, ND, F, &s), ST_OK);
    return s;
}

static void assert_same(const struct samples *a, const struct samples *b, size_t from_a,
                        size_t from_b, size_t n)
{
    assert_memory_equal(a->dense + from_a * ND, b->dense + from_b * ND, n * ND * sizeof(float));
    assert_memory_equal(a->label + from_a, b->label + from_b, n * sizeof(float));
    assert_memory_equal(a->id + from_a * F, b->id + from_b * F, n * F * sizeof(uint64_t));
}

static void read_sample(struct fixture *f, struct samples *out)
{
    uint32_t rows;
    *out = room_for(SAMPLE_ROWS + 500);
    f->cfg.data.path = (char *)SAMPLE;
    assert_int_equal(fixture_read_all(f, 0, out, &rows), ST_OK);
    assert_int_equal(rows, SAMPLE_ROWS);
}

static void every_value_of_the_sample_is_what_strtol_reads(void **state)
{
    struct fixture *f = *state;
    struct samples got;
    size_t bytes;
    for (int t = 0; t < F; t++) f->tables[t] = 1000003u * (unsigned)(t + 1);
    read_sample(f, &got);
    char *text = fixture_read(SAMPLE, &bytes), *p = text;
    unsigned clicks = 0;
    for (size_t i = 0; i < SAMPLE_ROWS; i++) {
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
    struct samples plain, packed = room_for(SAMPLE_ROWS + 500);
    size_t bytes;
    uint32_t rows;
    read_sample(f, &plain);
    char *text = fixture_read(SAMPLE, &bytes);
    f->cfg.data.path = (char *)fixture_write_gzip(f, "day.gz", text, bytes);
    assert_int_equal(fixture_read_all(f, 0, &packed, &rows), ST_OK);
    assert_int_equal(rows, SAMPLE_ROWS);
    assert_same(&plain, &packed, 0, 0, SAMPLE_ROWS);
    free(text);
    samples_close(&plain);
    samples_close(&packed);
}

static void pieces_and_rewinds_give_the_rows_of_one_pass(void **state)
{
    struct fixture *f = *state;
    struct samples whole, piece = room_for(SAMPLE_ROWS + 500);
    struct source *s;
    read_sample(f, &whole);
    assert_int_equal(source_open(&f->cfg, 0, &s), ST_OK);
    for (uint32_t pass = 0, n, got; pass < 2; pass++) {
        for (n = 0; n < SAMPLE_ROWS; n += got) {
            uint32_t want = 1 + n % 1777;
            assert_int_equal(source_read(s, &piece, n, want, &got), ST_OK);
            assert_int_equal(got, want < SAMPLE_ROWS - n ? want : SAMPLE_ROWS - n);
        }
        assert_same(&whole, &piece, 0, 0, SAMPLE_ROWS);
        memset(piece.id, 0, SAMPLE_ROWS * F * sizeof(uint64_t));
        assert_int_equal(source_read(s, &piece, 0, 5, &got), ST_OK);
        assert_int_equal(got, 0);
        assert_int_equal(source_rewind(s), ST_OK);
    }
    source_close(s);
    samples_close(&whole);
    samples_close(&piece);
}

static void training_and_held_out_rows_split_the_file(void **state)
{
    struct fixture *f = *state;
    struct samples whole, part = room_for(SAMPLE_ROWS + 500);
    uint32_t rows;
    read_sample(f, &whole);
    f->cfg.data.train_rows = 7000;
    assert_int_equal(fixture_read_all(f, 0, &part, &rows), ST_OK);
    assert_int_equal(rows, 7000);
    assert_same(&whole, &part, 0, 0, 7000);
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 3000);
    assert_same(&whole, &part, 7000, 0, 3000);
    f->cfg.data.eval_rows = 123;
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 123);
    assert_same(&whole, &part, 7000, 0, 123);
    f->cfg.data.eval_path = (char *)SAMPLE; /* a file of its own is read from its start */
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 123);
    assert_same(&whole, &part, 0, 0, 123);
    samples_close(&whole);
    samples_close(&part);
}

static void held_out_rows_can_be_read_again(void **state)
{
    struct fixture *f = *state;
    struct samples a = room_for(600), b = room_for(600);
    struct source *s;
    uint32_t got;
    f->cfg.data.path = (char *)SAMPLE;
    f->cfg.data.train_rows = 9500;
    assert_int_equal(source_open(&f->cfg, 1, &s), ST_OK);
    assert_int_equal(source_read(s, &a, 0, 600, &got), ST_OK);
    assert_int_equal(got, 500);
    assert_int_equal(source_rewind(s), ST_OK);
    assert_int_equal(source_read(s, &b, 0, 600, &got), ST_OK);
    assert_int_equal(got, 500);
    assert_same(&a, &b, 0, 0, 500);
    source_close(s);
    samples_close(&a);
    samples_close(&b);
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
    fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: 41 fields, expected 40");
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

static void what_real_files_do_is_accepted(void **state)
{
    struct fixture *f = *state;
    char text[4096], line[1024];
    struct samples s = room_for(600);
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
    assert_same(&s, &s, 0, 6, 1);                               /* BOM, CR LF, no last newline */
    assert_true(s.label[0] == 1.0f && s.label[2] == 0.0f);
    assert_true(s.dense[1 * ND + 1] == 0.0f);                   /* negative */
    assert_true(s.dense[2 * ND + 12] == (float)log1p(13.0));
    assert_true(s.id[2 * F + 25] == row_id(25, 0));             /* padded */
    assert_true(s.dense[3 * ND] == 0.0f && s.id[3 * F] == row_id(0, 0)); /* all empty */
    assert_true(s.dense[4 * ND] == (float)log1p(9223372036854775807.0));
    assert_true(s.id[5 * F + 25] == row_id(25, UINT32_MAX));
    samples_close(&s);
}

static void a_last_line_that_was_cut_is_not_a_sample(void **state)
{
    struct fixture *f = *state;
    char line[1024];
    size_t whole = strlen(good_line(line, ""));
    for (size_t n = 2; n < whole; n++) { /* cut anywhere: in a field, behind a TAB, in the last id */
        enum st st = read_second_line(f, line, n);
        fixture_assert_failed(f, st, ST_DATA, "t.tsv:2: last line incomplete (file truncated?)");
    }
    assert_int_equal(read_second_line(f, line, whole), ST_OK);
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

static void paths_that_cannot_be_read_are_named(void **state)
{
    struct fixture *f = *state;
    struct source *untouched = (struct source *)f, *s = untouched;
    f->cfg.data.path = (char *)"no/such/file.tsv";
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_NOINPUT,
                          "no/such/file.tsv: no such file");
    f->cfg.data.path = f->dir;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_PERM, "is a directory");
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", "1", 1);
    assert_int_equal(chmod(f->path, 0), 0);
    uid_t user = geteuid();
    if (user == 0) assert_int_equal(seteuid(65534), 0); /* root may read everything */
    enum st st = source_open(&f->cfg, 0, &s);
    assert_int_equal(seteuid(user), 0);
    fixture_assert_failed(f, st, ST_PERM, "t.tsv: permission denied");
    char pipe_path[128];
    snprintf(pipe_path, sizeof(pipe_path), "%s/pipe", f->dir);
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    f->cfg.data.path = pipe_path;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_DATA, "not a regular file");
    f->cfg.data.path = NULL;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_CONFIG, "data.path: is not set");
    assert_ptr_equal(s, untouched);
    assert_int_equal(st_exit_code(ST_NOINPUT), 66);
    assert_int_equal(st_exit_code(ST_PERM), 77);
}

static void a_torn_or_damaged_gzip_file_is_no_short_file(void **state)
{
    struct fixture *f = *state;
    size_t bytes, packed_bytes;
    uint32_t rows;
    char *text = fixture_read(SAMPLE, &bytes);
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

static void a_file_that_changes_under_the_job_stops_it(void **state)
{
    struct fixture *f = *state;
    struct samples s = room_for(8);
    struct source *src;
    char text[4096], line[1024];
    uint32_t got;
    good_line(line, "\n");
    size_t n = (size_t)sprintf(text, "%s%s", line, line);
    char want[128];
    snprintf(want, sizeof(want), "t.tsv: changed since start (size %zu -> %zu)", n, n - 2);

    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, n);   /* found at the end */
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    assert_int_equal(truncate(f->path, (off_t)n - 2), 0);
    fixture_assert_failed(f, source_read(src, &s, 0, 8, &got), ST_DATA, want);
    source_close(src);

    fixture_write(f, "t.tsv", text, n);                              /* found at the rewind */
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    assert_int_equal(source_read(src, &s, 0, 8, &got), ST_OK);
    assert_int_equal(got, 2);
    assert_int_equal(truncate(f->path, (off_t)n - 2), 0);
    fixture_assert_failed(f, source_rewind(src), ST_DATA, want);
    source_close(src);

    fixture_write(f, "t.tsv", text, n);                              /* same size, other contents */
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    const struct timespec other[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_int_equal(utimensat(0, f->path, other, 0), 0);
    fixture_assert_failed(f, source_rewind(src), ST_DATA, "changed since start");
    source_close(src);
    samples_close(&s);
}

static void damage_done_by_a_writer_is_reported_as_a_change(void **state)
{
    struct fixture *f = *state;
    struct samples s = room_for(SAMPLE_ROWS);
    struct source *src;
    uint32_t got;
    size_t bytes;
    char *text = fixture_read(SAMPLE, &bytes);
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, bytes);
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    assert_int_equal(truncate(f->path, (off_t)bytes / 2), 0); /* leaves half a line at the end */
    enum st st = source_read(src, &s, 0, SAMPLE_ROWS, &got);
    fixture_assert_failed(f, st, ST_DATA, "changed since start");
    source_close(src);
    free(text);
    samples_close(&s);
}

static void asking_for_more_rows_than_there_are_is_refused(void **state)
{
    struct fixture *f = *state;
    uint32_t rows;
    f->cfg.data.path = (char *)SAMPLE;
    f->cfg.data.train_rows = SAMPLE_ROWS + 1;
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "data.train_rows is 10001, but the file holds 10000 samples");
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "data.train_rows is 10001, but the file holds 10000 samples");
    f->cfg.data.train_rows = SAMPLE_ROWS;
    assert_int_equal(fixture_read_all(f, 0, NULL, &rows), ST_OK);
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "nothing is held out: data.train_rows takes all 10000 samples");
    f->cfg.data.train_rows = 0;
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "no rows are held out");
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

static void every_allocation_may_fail(void **state)
{
    struct fixture *f = *state;
    f->cfg.data.path = (char *)SAMPLE;
    unsigned injected = 0;
    size_t before = mem_live();
    for (size_t nth = 1;; nth++) {
        struct source *untouched = (struct source *)f, *s = untouched;
        mem_fail_at(nth);
        enum st st = source_open(&f->cfg, 0, &s);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            source_close(s);
            break;
        }
        injected++;
        fixture_assert_failed(f, st, ST_NOMEM, "out of memory");
        assert_ptr_equal(s, untouched);
        assert_int_equal(mem_live(), before);
    }
    assert_int_equal(injected, 6); /* source 3, reader 3 */
    assert_int_equal(mem_live(), before);
}

#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(every_value_of_the_sample_is_what_strtol_reads),
        WITH_FIXTURE(a_gzipped_copy_reads_the_same),
        WITH_FIXTURE(pieces_and_rewinds_give_the_rows_of_one_pass),
        WITH_FIXTURE(training_and_held_out_rows_split_the_file),
        WITH_FIXTURE(held_out_rows_can_be_read_again),
        WITH_FIXTURE(a_bad_field_stops_with_its_line_and_name),
        WITH_FIXTURE(a_bad_line_stops_with_its_number),
        WITH_FIXTURE(a_line_may_have_64_kib_and_not_one_byte_more),
        WITH_FIXTURE(what_real_files_do_is_accepted),
        WITH_FIXTURE(a_last_line_that_was_cut_is_not_a_sample),
        WITH_FIXTURE(an_empty_file_has_too_few_samples),
        WITH_FIXTURE(paths_that_cannot_be_read_are_named),
        WITH_FIXTURE(a_torn_or_damaged_gzip_file_is_no_short_file),
        WITH_FIXTURE(a_file_that_changes_under_the_job_stops_it),
        WITH_FIXTURE(damage_done_by_a_writer_is_reported_as_a_change),
        WITH_FIXTURE(asking_for_more_rows_than_there_are_is_refused),
        WITH_FIXTURE(other_shapes_are_read_alike),
        WITH_FIXTURE(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
