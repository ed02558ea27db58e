/* data/outfile.h - a file that appears whole or not at all: written aside as PATH.part, fsynced,
 * renamed. Buffered; not for files that are appended to. */
#ifndef CHANTER_DATA_OUTFILE_H
#define CHANTER_DATA_OUTFILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct outfile; /* opaque; one thread */

/* Can a file of this name be made? Logs why not, ST_CANTCREATE: something is there that is not a
 * regular file (renaming would replace a device or a pipe), or its directory is not. */
MUST_USE enum st outfile_check(const char *path);
/* Makes the same check. */
MUST_USE enum st outfile_create(const char *path, struct outfile **out);
MUST_USE enum st outfile_write(struct outfile *o, const void *p, size_t n);
/* Overwrite bytes that were written before (a header whose contents are known last). */
MUST_USE enum st outfile_rewrite(struct outfile *o, uint64_t offset, const void *p, size_t n);
MUST_USE enum st outfile_commit(struct outfile *o); /* frees o, also on failure */
void outfile_abandon(struct outfile *o);            /* NULL ok; removes the file aside */

#endif
