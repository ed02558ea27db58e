/* compute/cpu_vec.h - sixteen floats at a time, in the compiler's own vector type: one AVX-512
 * register, or two or four smaller ones. Not a SIMD library: just what keeps sums in registers, in
 * an order that we and not the auto-vectoriser choose. One machine always gives the same bits;
 * machines with and without fused multiply-add differ in the last one. */
#ifndef CHANTER_COMPUTE_CPU_VEC_H
#define CHANTER_COMPUTE_CPU_VEC_H

#include <stdint.h>
#include <string.h>

#ifdef __FMA__
#include <immintrin.h>
#endif

enum { LANES = 16 };
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

static inline vec vec_load(const float *p) /* any alignment */
{
    vec v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline vec vec_splat(float x)
{
    return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

/* a * b + c, in one rounding where the machine can. By name, because -ffp-contract=off keeps the
 * compiler from fusing, and its own choice would depend on what it tunes for. */
static inline vec vec_fma(vec a, vec b, vec c)
{
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union { vec v; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.v;
#else
    return a * b + c;
#endif
}

/* The first n <= LANES lanes are p[0..n), the others 0; nothing behind p[n - 1] is read. Without
 * masks, in pieces of fixed size: no call, no loop. */
static inline vec vec_load_n(const float *p, uint32_t n)
{
#ifdef __AVX512F__
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    vec v = {0};
    float *q = (float *)&v;
    if (n == LANES) return vec_load(p);
    for (uint32_t piece = LANES / 2; piece != 0; piece /= 2) {
        if ((n & piece) == 0) continue;
        memcpy(q, p, piece * sizeof(*p));
        p += piece;
        q += piece;
    }
    return v;
#endif
}

/* p[0..n) = the first n <= LANES lanes. */
static inline void vec_store(float *p, const vec *v, uint32_t n)
{
#ifdef __AVX512F__
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)*v);
#else
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
#endif
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

/* row[i][j] <-> row[j][i]: first inside the 4x4 squares, each a quarter of four vectors, then the
 * quarters among each other. The masks are single instructions where a vec is one register, and
 * slower elsewhere. */
static inline void vec_transpose(vec row[LANES])
{
    typedef int32_t lanes __attribute__((vector_size(LANES * sizeof(int32_t))));
    static const lanes
        LO1 = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29},
        HI1 = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31},
        LO2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
        HI2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
        EVEN4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
        ODD4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    vec a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = __builtin_shuffle(row[i], row[i + 1], LO1);
        a[i + 1] = __builtin_shuffle(row[i], row[i + 1], HI1);
    }
    /* a[4k + {0, 1}]: rows 4k, 4k + 1; b[4k + c]: column 4q + c of rows 4k.. in quarter q. */
    for (int i = 0; i < LANES; i += 4) {
        b[i] = __builtin_shuffle(a[i], a[i + 2], LO2);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 2], HI2);
        b[i + 2] = __builtin_shuffle(a[i + 1], a[i + 3], LO2);
        b[i + 3] = __builtin_shuffle(a[i + 1], a[i + 3], HI2);
    }
    /* Quarters: even ones of both, odd ones of both, twice. */
    for (int c = 0; c < 4; c++)
        for (int h = 0; h < 2; h++) {
            a[8 * h + c] = __builtin_shuffle(b[8 * h + c], b[8 * h + 4 + c], EVEN4);
            a[8 * h + 4 + c] = __builtin_shuffle(b[8 * h + c], b[8 * h + 4 + c], ODD4);
        }
    for (int c = 0; c < 4; c++)
        for (int h = 0; h < 2; h++) {
            row[4 * h + c] = __builtin_shuffle(a[4 * h + c], a[8 + 4 * h + c], EVEN4);
            row[8 + 4 * h + c] = __builtin_shuffle(a[4 * h + c], a[8 + 4 * h + c], ODD4);
        }
}

#endif
