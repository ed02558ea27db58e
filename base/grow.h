/* base/grow.h - a buffer that is asked for a size before each use and settles at the largest: after
 * warm-up it never allocates. Not a vector: contents are lost when it grows. */
#ifndef CHANTER_BASE_GROW_H
#define CHANTER_BASE_GROW_H

#include <stddef.h>

#include "base/status.h"

struct grow { void *p; size_t bytes; }; /* {0} is empty; owns p */

/* Make room for n items of `size` bytes. On ST_NOMEM the buffer is as it was. */
MUST_USE enum st grow_reserve(struct grow *g, size_t n, size_t size);
void grow_fini(struct grow *g);

#endif
