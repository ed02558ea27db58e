/* base/digest.h - one number for a whole training state. Rows are hashed one by one and added up,
 * so the sum does not care how rows are spread over servers or in which order they are met. */
#ifndef CHANTER_BASE_DIGEST_H
#define CHANTER_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

struct digest { uint64_t lo, hi; }; /* a 128-bit sum; {0} is empty */

enum { DIGEST_HEX_BYTES = 33 };     /* 32 digits and the end */

/* Add the hash of (key, bytes). Key: a row id, or the number of a dense tensor with the top bit
 * set. XXH3-128 of the bytes, seeded by the key. */
void digest_add(struct digest *d, uint64_t key, const void *p, size_t n);
void digest_merge(struct digest *d, struct digest other);
void digest_hex(struct digest d, char out[DIGEST_HEX_BYTES]);

#endif
