/* launch/output.h - where a command may write. Asked before hours of work, not after. */
#ifndef CHANTER_LAUNCH_OUTPUT_H
#define CHANTER_LAUNCH_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/* May `path` be written, by a command that reads input[0..n) (NULL entries: none)? Logs why not:
 * ST_USAGE: it is missing (NULL) or is an input; ST_CANTCREATE: it is there and not a regular file,
 * or is one and `replace` is not set, or the directory it would be in is not there. */
MUST_USE enum st output_check(const char *path, const char *const *input, size_t n, bool replace);

#endif
