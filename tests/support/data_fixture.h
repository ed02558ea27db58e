/* tests/support/data_fixture.h - what tests of data files share: a temporary directory, a
 * configuration of the Criteo shape, and what was logged. */
#ifndef CHANTER_TESTS_DATA_FIXTURE_H
#define CHANTER_TESTS_DATA_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "data/source.h"

#define FIXTURE_SAMPLE "data/sample/day_0.tsv" /* the bundled log */
enum { FIXTURE_TABLES = 26, FIXTURE_DENSE = 13, FIXTURE_SAMPLE_ROWS = 10000 };

struct fixture {
    char dir[64];                 /* made by mkdtemp; removed with all files in it */
    char path[128];               /* of the last file written */
    struct config cfg;            /* criteo_tsv, 13 dense features, 26 tables of 1000 rows */
    uint64_t tables[FIXTURE_TABLES];
    char log[2048];               /* last line logged as an error */
    unsigned errors;              /* how many were */
};

int fixture_setup(void **state);  /* cmocka setup and teardown; *state is the fixture */
int fixture_teardown(void **state);

/* Write n bytes to `name` in the directory; returns its path, valid until the next call. */
const char *fixture_write(struct fixture *f, const char *name, const void *p, size_t n);
/* The same through gzip. */
const char *fixture_write_gzip(struct fixture *f, const char *name, const void *p, size_t n);
/* The whole file, NUL-terminated; free() it. */
char *fixture_read(const char *path, size_t *n);
/* One error has been logged, with this exit code's status and the fragment in it; forget it. */
void fixture_assert_failed(struct fixture *f, enum st st, enum st want, const char *fragment);
/* Open, read to the end (or the first error), close. Samples go to `out` if not NULL. */
enum st fixture_read_all(const struct fixture *f, int eval, struct samples *out, uint32_t *rows);
/* Room for n samples of the fixture's shape; samples_close it. */
struct samples fixture_room_for(uint32_t n);
/* Samples [from_a, from_a + n) of a are [from_b, ..) of b, bit for bit. */
void fixture_assert_same(const struct samples *a, const struct samples *b, size_t from_a,
                         size_t from_b, size_t n);
/* The bundled log, all of it, into `out`: made here, with some room to spare. */
void fixture_read_sample(struct fixture *f, struct samples *out);

#endif
