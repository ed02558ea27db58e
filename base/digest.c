#include "base/digest.h"

#include <stdio.h>
#include <xxhash.h>

void digest_add(struct digest *d, uint64_t key, const void *p, size_t n)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(p, n, key);
    digest_merge(d, (struct digest){h.low64, h.high64});
}

void digest_merge(struct digest *d, struct digest other)
{
    uint64_t lo = d->lo + other.lo;
    d->hi += other.hi + (lo < other.lo);
    d->lo = lo;
}

void digest_hex(struct digest d, char out[DIGEST_HEX_BYTES])
{
    snprintf(out, DIGEST_HEX_BYTES, "%016llx%016llx", (unsigned long long)d.hi,
             (unsigned long long)d.lo);
}
