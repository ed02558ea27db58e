#include "tests/support/hostile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

uint64_t test_rand(uint64_t *s)
{
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * UINT64_C(2685821657736338717);
}

static void count(struct hostile_count *c, enum st st)
{
    assert_true(st == ST_OK || st == ST_BADMSG);
    if (st == ST_OK) c->ok++;
    else c->bad++;
}

struct hostile_count hostile_prefixes(const uint8_t *p, size_t n, hostile_fn *fn)
{
    struct hostile_count c = {0, 0};
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *copy = malloc(cut > 0 ? cut : 1);
        memcpy(copy, p, cut);
        count(&c, fn(copy, cut));
        free(copy);
    }
    return c;
}

struct hostile_count hostile_flips(const uint8_t *p, size_t n, uint64_t seed, size_t times,
                                   hostile_fn *fn)
{
    struct hostile_count c = {0, 0};
    uint64_t s = seed;
    uint8_t *copy = malloc(n);
    for (size_t i = 0; i < times; i++) {
        memcpy(copy, p, n);
        for (size_t k = 1 + test_rand(&s) % 4; k > 0; k--)
            copy[test_rand(&s) % n] ^= (uint8_t)(1 + test_rand(&s) % 255);
        count(&c, fn(copy, n));
    }
    free(copy);
    return c;
}
