/* data/infile.h - opening a data file for reading, with errors that name it, and noticing when it
 * changes under a running job. */
#ifndef CHANTER_DATA_INFILE_H
#define CHANTER_DATA_INFILE_H

#include <stdint.h>
#include <time.h>

#include "base/status.h"

struct infile {
    int fd;
    uint64_t size;            /* bytes, at open       */
    struct timespec changed;  /* its mtime, at open   */
};

/* ST_NOINPUT when it is missing, ST_PERM when it is a directory or unreadable, ST_DATA when it is
 * no regular file. Logs. */
MUST_USE enum st infile_open(const char *path, struct infile *out);
/* ST_DATA, logged, if size or modification time differ from those at open. */
MUST_USE enum st infile_unchanged(const struct infile *f, const char *path);
/* Exactly `n` bytes at `offset`; ST_DATA, logged, when the file ends before. */
MUST_USE enum st infile_read(const struct infile *f, const char *path, uint64_t offset, void *p,
                             uint64_t n);

#endif
