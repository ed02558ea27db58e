/* tests/support/hostile.h - messages as an enemy would send them: cut off, or bytes changed. */
#ifndef CHANTER_TESTS_HOSTILE_H
#define CHANTER_TESTS_HOSTILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Small generator for tests (xorshift64*); *s != 0. */
uint64_t test_rand(uint64_t *s);

/* Decode p[0..n), check what came out, return the status. p is exactly n bytes long, so that the
 * address sanitizer sees one read too many. */
typedef enum st hostile_fn(const uint8_t *p, size_t n);

struct hostile_count { size_t ok, bad; };
/* Every prefix, the whole message excepted. Fails on any status but ST_OK and ST_BADMSG. */
struct hostile_count hostile_prefixes(const uint8_t *p, size_t n, hostile_fn *fn);
/* `times` copies with 1 to 4 random bytes changed. */
struct hostile_count hostile_flips(const uint8_t *p, size_t n, uint64_t seed, size_t times,
                                   hostile_fn *fn);

#endif
