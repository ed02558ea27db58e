/* compute/cpu_vec.h - sixteen floats at a time, in the compiler's own vector type: one AVX-512
 * register, or two or four smaller ones, with the same bits. Not a SIMD library: just enough to
 * keep a sum in registers, which the auto-vectoriser may not reorder without -ffast-math. */
#ifndef CHANTER_COMPUTE_CPU_VEC_H
#define CHANTER_COMPUTE_CPU_VEC_H

#include <stdint.h>
#include <string.h>

/* The compiler warns that passing such a vector differs between machines with and without
 * AVX-512. Nothing here is called from another file. */
#pragma GCC diagnostic ignored "-Wpsabi"

enum { LANES = 16 };
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

static inline vec vec_load(const float *p) /* any alignment */
{
    vec v;
    memcpy(&v, p, sizeof(v));
    return v;
}

/* p[0..n) = the first n <= LANES lanes. Pieces of fixed size: no call, no loop. */
static inline void vec_store(float *p, const vec *v, uint32_t n)
{
    const float *q = (const float *)v;
    if (n == LANES) {
        memcpy(p, q, sizeof(*v));
        return;
    }
    for (uint32_t piece = LANES / 2; piece != 0; piece /= 2) {
        if ((n & piece) == 0) continue;
        memcpy(p, q, piece * sizeof(*p));
        p += piece;
        q += piece;
    }
}

/* Sum of the lanes, halves folded onto each other: lane i + lane i + 8, and so on. */
static inline float vec_sum(const vec *v)
{
    float f[LANES];
    memcpy(f, v, sizeof(f));
    for (uint32_t half = LANES / 2; half != 0; half /= 2)
        for (uint32_t i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}

#endif
