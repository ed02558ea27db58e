#include "tests/support/data_fixture.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <cmocka.h>

#include "base/log.h"

static void keep_line(void *ctx, const char *line)
{
    struct fixture *f = ctx;
    if (strstr(line, "error[") == NULL) return;
    snprintf(f->log, sizeof(f->log), "%s", line);
    f->errors++;
}

int fixture_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    if (f == NULL) return -1;
    strcpy(f->dir, "/tmp/chanter-data-XXXXXX");
    if (mkdtemp(f->dir) == NULL) return -1;
    for (int t = 0; t < FIXTURE_TABLES; t++) f->tables[t] = 1000;
    f->cfg.data.format = DATA_CRITEO_TSV;
    f->cfg.data.path = f->path;
    f->cfg.data.seed = 1;
    f->cfg.model.dense_features = FIXTURE_DENSE;
    f->cfg.model.tables = f->tables;
    f->cfg.model.n_tables = FIXTURE_TABLES;
    log_set_sink(keep_line, f);
    *state = f;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    log_set_sink(NULL, NULL);
    DIR *d = opendir(f->dir);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", f->dir, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    if (d != NULL) closedir(d);
    int left = rmdir(f->dir);
    unsigned errors = f->errors;
    free(f);
    return left != 0 || errors != 0 ? -1 : 0; /* an error nobody expected fails the test */
}

const char *fixture_write(struct fixture *f, const char *name, const void *p, size_t n)
{
    snprintf(f->path, sizeof(f->path), "%s/%s", f->dir, name);
    FILE *file = fopen(f->path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(p, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    return f->path;
}

const char *fixture_write_gzip(struct fixture *f, const char *name, const void *p, size_t n)
{
    snprintf(f->path, sizeof(f->path), "%s/%s", f->dir, name);
    gzFile gz = gzopen(f->path, "wb");
    assert_non_null(gz);
    assert_int_equal(gzwrite(gz, p, (unsigned)n), n);
    assert_int_equal(gzclose(gz), Z_OK);
    return f->path;
}

char *fixture_read(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *n = (size_t)ftell(file);
    rewind(file);
    char *p = malloc(*n + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, *n, file), *n);
    p[*n] = '\0';
    fclose(file);
    return p;
}

void fixture_assert_failed(struct fixture *f, enum st st, enum st want, const char *fragment)
{
    if (st != want || f->errors != 1 || strstr(f->log, fragment) == NULL)
        fail_msg("%s with %u errors logged, last \"%s\"; want %s and \"%s\"", st_name(st),
                 f->errors, f->log, st_name(want), fragment);
    f->errors = 0;
    f->log[0] = '\0';
}

enum st fixture_read_all(const struct fixture *f, int eval, struct samples *out, uint32_t *rows)
{
    enum { STEP = 500 };
    struct source *s;
    struct samples own = {0};
    enum st st = source_open(&f->cfg, eval, &s);
    if (st != ST_OK) return st;
    if (out == NULL)
        assert_int_equal(samples_open(STEP, f->cfg.model.dense_features, f->cfg.model.n_tables,
                                      &own), ST_OK);
    uint32_t n = 0, got = 1;
    while (st == ST_OK && got > 0) {
        st = out == NULL ? source_read(s, &own, 0, STEP, &got)
                         : source_read(s, out, n, STEP, &got);
        if (st == ST_OK) n += got;
    }
    *rows = n;
    samples_close(&own);
    source_close(s);
    return st;
}

struct samples fixture_room_for(uint32_t n)
{
    struct samples s;
    assert_int_equal(samples_open(n, FIXTURE_DENSE, FIXTURE_TABLES, &s), ST_OK);
    return s;
}

void fixture_assert_same(const struct samples *a, const struct samples *b, size_t from_a,
                         size_t from_b, size_t n)
{
    assert_memory_equal(a->dense + from_a * FIXTURE_DENSE, b->dense + from_b * FIXTURE_DENSE,
                        n * FIXTURE_DENSE * sizeof(float));
    assert_memory_equal(a->label + from_a, b->label + from_b, n * sizeof(float));
    assert_memory_equal(a->id + from_a * FIXTURE_TABLES, b->id + from_b * FIXTURE_TABLES,
                        n * FIXTURE_TABLES * sizeof(uint64_t));
}

void fixture_read_sample(struct fixture *f, struct samples *out)
{
    uint32_t rows;
    *out = fixture_room_for(FIXTURE_SAMPLE_ROWS + 500);
    f->cfg.data.path = (char *)FIXTURE_SAMPLE;
    assert_int_equal(fixture_read_all(f, 0, out, &rows), ST_OK);
    assert_int_equal(rows, FIXTURE_SAMPLE_ROWS);
}
