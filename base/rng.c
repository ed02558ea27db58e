#include "base/rng.h"

#include <math.h>

enum { ROUNDS = 10 };
static const uint32_t MUL_0 = 0xD2511F53u, MUL_1 = 0xCD9E8D57u;   /* SC 2011, table 2 */
static const uint32_t WEYL_0 = 0x9E3779B9u, WEYL_1 = 0xBB67AE85u;

void rng_words(uint64_t seed, uint32_t stream, uint64_t index, uint32_t lane, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = stream, c3 = lane;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t p0 = (uint64_t)MUL_0 * c0, p1 = (uint64_t)MUL_1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void rng_uniform(uint64_t seed, uint32_t stream, uint64_t index, float bound, float *out, size_t n)
{
    uint32_t w[4];
    for (size_t i = 0; i < n; i++) {
        if (i % 4 == 0) rng_words(seed, stream, index, (uint32_t)(i / 4), w);
        float unit = (float)(w[i % 4] >> 8) * 0x1p-24f; /* [0, 1) on a grid of 2^-24 */
        out[i] = (2.0f * unit - 1.0f) * bound;
    }
}

void rng_normal(uint64_t seed, uint32_t stream, uint64_t first, float deviation, float *out,
                size_t n)
{
    for (size_t i = 0; i < n; i += 2) {
        uint32_t w[4];
        rng_words(seed, stream, (first + i) / 2, 0, w);
        double u = ((double)w[0] + 1.0) * 0x1p-32, v = (double)w[1] * 0x1p-32; /* u in (0, 1] */
        double radius = sqrt(-2.0 * log(u)) * (double)deviation;
        out[i] = (float)(radius * cos(6.283185307179586 * v));
        if (i + 1 < n) out[i + 1] = (float)(radius * sin(6.283185307179586 * v));
    }
}
