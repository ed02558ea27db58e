/* base/rng.h - counter-based random numbers: a pure function of (seed, stream, index), so that any
 * process can make any row's initial value at any time (Philox 4x32-10: Salmon, Moraes, Dror and
 * Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Not for secrets. */
#ifndef CHANTER_BASE_RNG_H
#define CHANTER_BASE_RNG_H

#include <stddef.h>
#include <stdint.h>

/* Streams: who draws. Tables use their number as it is, so that streams never meet. */
enum rng_stream {
    RNG_TABLE_0 = 0,           /* + table number (< 65536)                     */
    RNG_DENSE_0 = 1 << 20,     /* + number of the dense tensor in model order  */
    RNG_SYNTHETIC = 1 << 21,   /* + whatever the synthetic source numbers      */
};

/* Four 32-bit words for (seed, stream, index, lane). Any thread. */
void rng_words(uint64_t seed, uint32_t stream, uint64_t index, uint32_t lane, uint32_t out[4]);
/* out[0..n): uniform in [-bound, +bound), as values [lane 0.. ) of `index`: a row's initial value
 * with index = row. Any thread. */
void rng_uniform(uint64_t seed, uint32_t stream, uint64_t index, float bound, float *out, size_t n);
/* out[0..n): normal, mean 0, given deviation (Box-Muller), values [first, first + n) of `stream`.
 * `first` must be even. Any thread. */
void rng_normal(uint64_t seed, uint32_t stream, uint64_t first, float deviation, float *out,
                size_t n);

#endif
