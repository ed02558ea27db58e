/* launch/output.h - where a command may write. Asked before hours of work, not after. */
#ifndef CHANTER_LAUNCH_OUTPUT_H
#define CHANTER_LAUNCH_OUTPUT_H

#include <stdbool.h>

#include "base/status.h"

/* May `path` be written, by a command that reads `input` (NULL: none)? ST_USAGE, logged: it is
 * missing (NULL) or is the input; ST_CANTCREATE: it is there already and `replace` is not set. */
MUST_USE enum st output_check(const char *path, const char *input, bool replace);

#endif
