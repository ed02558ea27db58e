#include "tests/support/floats.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"

enum { GUARD = 64 }; /* floats on each side; a multiple of 16 keeps the alignment */
static const uint32_t PATTERN = 0x7FA5C3E1u; /* a NaN: reading a guard shows, too */

struct floats floats_open(size_t n, size_t shift)
{
    size_t all = GUARD + shift + n + GUARD;
    float *base = mem_alloc(all, sizeof(*base));
    assert_non_null(base);
    for (size_t i = 0; i < all; i++) memcpy(base + i, &PATTERN, sizeof(PATTERN));
    return (struct floats){base + GUARD + shift, n, shift};
}

struct floats floats_random(size_t n, size_t shift, uint64_t seed)
{
    struct floats f = floats_open(n, shift);
    rng_uniform(seed, RNG_SYNTHETIC, 0, 1.0f, f.p, n);
    return f;
}

struct floats floats_rough(size_t n, size_t shift, uint64_t seed)
{
    struct floats f = floats_random(n, shift, seed);
    for (size_t i = 0; i < n; i++) f.p[i] = ldexpf(f.p[i], (int)(draw(seed + 1, i) % 25) - 12);
    return f;
}

void floats_close(struct floats f)
{
    const float *base = f.p - f.shift - GUARD;
    size_t before = GUARD + f.shift;
    for (size_t i = 0; i < before; i++) assert_memory_equal(base + i, &PATTERN, sizeof(PATTERN));
    for (size_t i = 0; i < GUARD; i++)
        assert_memory_equal(f.p + f.n + i, &PATTERN, sizeof(PATTERN));
    mem_free((void *)base);
}

void assert_same_bits(const float *got, const float *want, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(got + i, want + i, sizeof(*got)) != 0)
            fail_msg("%s: [%zu] is %.9g (%a), not %.9g (%a)", what, i, (double)got[i],
                     (double)got[i], (double)want[i], (double)want[i]);
}

void assert_near(float got, double want, double magnitude, double terms, const char *what,
                 size_t at)
{
    /* 1.01: the bound's second-order part. 1e-37: products below f32's normal range. */
    double bound = 1.01 * terms * 0x1p-24 * magnitude + 1e-37;
    if (!(fabs((double)got - want) <= bound))
        fail_msg("%s: [%zu] is %.9g, not %.12g +- %.3g", what, at, (double)got, want, bound);
}

uint32_t draw(uint64_t seed, uint64_t index)
{
    uint32_t w[4];
    rng_words(seed, RNG_SYNTHETIC + 1, index, 0, w);
    return w[0];
}
