/* tests/support/floats.h - float buffers for kernel tests: any alignment, guard zones on both
 * sides, reproducible contents, and comparisons that say where they differ. */
#ifndef CHANTER_TESTS_SUPPORT_FLOATS_H
#define CHANTER_TESTS_SUPPORT_FLOATS_H

#include <stddef.h>
#include <stdint.h>

struct floats {
    float *p;        /* [n], `shift` floats behind a 64-byte boundary; all NaN at first */
    size_t n, shift;
};

struct floats floats_open(size_t n, size_t shift);
/* With n values drawn from `seed`, uniform in [-1, 1). */
struct floats floats_random(size_t n, size_t shift, uint64_t seed);
/* Likewise, times 2^k for random k in -12..12: sums in different orders get different bits. */
struct floats floats_rough(size_t n, size_t shift, uint64_t seed);
/* Fails the test when a byte outside [0, n) was written. */
void floats_close(struct floats f);

/* Fails the test with the first place that differs. */
void assert_same_bits(const float *got, const float *want, size_t n, const char *what);
/* `terms` products or summands in f32, in any order, against a sum in f64 with the sum of their
 * magnitudes: the classic bound terms * 2^-24 * magnitude (Higham, gamma_n). */
void assert_near(float got, double want, double magnitude, double terms, const char *what,
                 size_t at);
uint32_t draw(uint64_t seed, uint64_t index); /* 32 random bits */

#endif
