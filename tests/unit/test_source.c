/* What data/source.h does for every format, tried with the bundled sample: windows of rows,
 * rewinds, paths that cannot be read, files that change under the job. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "data/source.h"
#include "tests/support/data_fixture.h"

enum { F = FIXTURE_TABLES, ND = FIXTURE_DENSE };

static void pieces_and_rewinds_give_the_rows_of_one_pass(void **state)
{
    struct fixture *f = *state;
    struct samples whole, piece = fixture_room_for(FIXTURE_SAMPLE_ROWS + 500);
    struct source *s;
    fixture_read_sample(f, &whole);
    assert_int_equal(source_open(&f->cfg, 0, &s), ST_OK);
    for (uint32_t pass = 0, n, got; pass < 2; pass++) {
        for (n = 0; n < FIXTURE_SAMPLE_ROWS; n += got) {
            uint32_t want = 1 + n % 1777;
            assert_int_equal(source_read(s, &piece, n, want, &got), ST_OK);
            assert_int_equal(got, want < FIXTURE_SAMPLE_ROWS - n ? want : FIXTURE_SAMPLE_ROWS - n);
        }
        fixture_assert_same(&whole, &piece, 0, 0, FIXTURE_SAMPLE_ROWS);
        memset(piece.id, 0, FIXTURE_SAMPLE_ROWS * F * sizeof(uint64_t));
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
    struct samples whole, part = fixture_room_for(FIXTURE_SAMPLE_ROWS + 500);
    uint32_t rows;
    fixture_read_sample(f, &whole);
    f->cfg.data.train_rows = 7000;
    assert_int_equal(fixture_read_all(f, 0, &part, &rows), ST_OK);
    assert_int_equal(rows, 7000);
    fixture_assert_same(&whole, &part, 0, 0, 7000);
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 3000);
    fixture_assert_same(&whole, &part, 7000, 0, 3000);
    f->cfg.data.eval_rows = 123;
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 123);
    fixture_assert_same(&whole, &part, 7000, 0, 123);
    f->cfg.data.eval_path = (char *)FIXTURE_SAMPLE; /* a file of its own is read from its start */
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 123);
    fixture_assert_same(&whole, &part, 0, 0, 123);
    samples_close(&whole);
    samples_close(&part);
}

static void held_out_rows_can_be_read_again(void **state)
{
    struct fixture *f = *state;
    struct samples a = fixture_room_for(600), b = fixture_room_for(600);
    struct source *s;
    uint32_t got;
    f->cfg.data.path = (char *)FIXTURE_SAMPLE;
    f->cfg.data.train_rows = 9500;
    assert_int_equal(source_open(&f->cfg, 1, &s), ST_OK);
    assert_int_equal(source_read(s, &a, 0, 600, &got), ST_OK);
    assert_int_equal(got, 500);
    assert_int_equal(source_rewind(s), ST_OK);
    assert_int_equal(source_read(s, &b, 0, 600, &got), ST_OK);
    assert_int_equal(got, 500);
    fixture_assert_same(&a, &b, 0, 0, 500);
    source_close(s);
    samples_close(&a);
    samples_close(&b);
}

static void paths_that_cannot_be_read_are_named(void **state)
{
    struct fixture *f = *state;
    struct source *untouched = (struct source *)f, *s = untouched;
    f->cfg.data.path = (char *)"no/such/file.tsv";
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_NOINPUT,
                          "no/such/file.tsv: no such file (relative to the current directory)");
    f->cfg.data.path = (char *)"/no/such/file.tsv";
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_NOINPUT, "/file.tsv: no such file");
    f->cfg.data.path = f->dir;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_NOINPUT, "is a directory");
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

static void a_file_that_changes_under_the_job_stops_it(void **state)
{
    struct fixture *f = *state;
    struct samples s = fixture_room_for(8);
    struct source *src;
    char text[4096], want[128];
    uint32_t got;
    size_t n;
    char *all = fixture_read(FIXTURE_SAMPLE, &n);
    n = (size_t)(strchr(strchr(all, '\n') + 1, '\n') + 1 - all); /* two lines */
    memcpy(text, all, n);
    free(all);
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
    struct stat now;
    assert_int_equal(stat(f->path, &now), 0);
    now.st_mtim.tv_sec -= 1; /* and not a nanosecond else */
    const struct timespec other[2] = {now.st_mtim, now.st_mtim};
    assert_int_equal(utimensat(0, f->path, other, 0), 0);
    fixture_assert_failed(f, source_rewind(src), ST_DATA, "changed since start");
    source_close(src);
    samples_close(&s);
}

static void damage_done_by_a_writer_is_reported_as_a_change(void **state)
{
    struct fixture *f = *state;
    struct samples s = fixture_room_for(FIXTURE_SAMPLE_ROWS);
    struct source *src;
    uint32_t got;
    size_t bytes;
    char *text = fixture_read(FIXTURE_SAMPLE, &bytes);
    f->cfg.data.path = (char *)fixture_write(f, "t.tsv", text, bytes);
    assert_int_equal(source_open(&f->cfg, 0, &src), ST_OK);
    assert_int_equal(truncate(f->path, (off_t)bytes / 2), 0); /* leaves half a line at the end */
    enum st st = source_read(src, &s, 0, FIXTURE_SAMPLE_ROWS, &got);
    fixture_assert_failed(f, st, ST_DATA, "changed since start");
    source_close(src);
    free(text);
    samples_close(&s);
}

static void asking_for_more_rows_than_there_are_is_refused(void **state)
{
    struct fixture *f = *state;
    uint32_t rows;
    f->cfg.data.path = (char *)FIXTURE_SAMPLE;
    f->cfg.data.train_rows = FIXTURE_SAMPLE_ROWS + 1;
    fixture_assert_failed(f, fixture_read_all(f, 0, NULL, &rows), ST_DATA,
                          "data.train_rows is 10001, but the file holds 10000 samples");
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "data.train_rows is 10001, but the file holds 10000 samples");
    f->cfg.data.train_rows = FIXTURE_SAMPLE_ROWS;
    assert_int_equal(fixture_read_all(f, 0, NULL, &rows), ST_OK);
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "nothing is held out: data.train_rows takes all 10000 samples");
    f->cfg.data.train_rows = 0;
    fixture_assert_failed(f, fixture_read_all(f, 1, NULL, &rows), ST_DATA,
                          "no rows are held out");
}

static void every_allocation_may_fail(void **state)
{
    struct fixture *f = *state;
    f->cfg.data.path = (char *)FIXTURE_SAMPLE;
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
        WITH_FIXTURE(pieces_and_rewinds_give_the_rows_of_one_pass),
        WITH_FIXTURE(training_and_held_out_rows_split_the_file),
        WITH_FIXTURE(held_out_rows_can_be_read_again),
        WITH_FIXTURE(paths_that_cannot_be_read_are_named),
        WITH_FIXTURE(a_file_that_changes_under_the_job_stops_it),
        WITH_FIXTURE(damage_done_by_a_writer_is_reported_as_a_change),
        WITH_FIXTURE(asking_for_more_rows_than_there_are_is_refused),
        WITH_FIXTURE(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
