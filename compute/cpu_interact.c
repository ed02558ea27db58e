/* compute/cpu_interact.c - dot products between all pairs of a sample's F + 1 vectors, and back.
 *
 * Forward: a dot product is a sum along d, which may not be split into lanes that a wider machine
 * would split otherwise. So lanes are sixteen different dots, of one vector i with sixteen vectors
 * j, and each is summed along d in ascending order. That needs the vectors transposed: they are, in
 * blocks of sixteen vectors and TILE_D values each, with a pass for every TILE_D values. Vector i's
 * values come from a transposed block, too: there they lie side by side, at fixed distances.
 * Backward: dt[i] = sum over j != i of dz[i,j] t[j]; lanes are sixteen values of d. Both work on
 * many vectors i at a time: as many sums under way as the machine has registers for. */
#include "compute/cpu.h"
#include "compute/cpu_vec.h"

/* The first KEPT transposed blocks of a sample are kept until it is done: all of them, in the first
 * cache, for any usual number of tables. */
enum { TILE_D = 64, BLOCK = TILE_D * LANES, KEPT = 6 };
#ifdef __AVX512F__
enum { AT_ONCE = 16, BACK_AT_ONCE = 9 }; /* of 32 registers of a vec each */
#else
enum { AT_ONCE = 4, BACK_AT_ONCE = 4 };  /* of 16 registers of half a vec */
#endif

/* Loops over the sums under way are written out early: then each sum is a register throughout. */
#define UNROLLED _Pragma("GCC unroll 16")

static inline uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Where row i of the strict lower triangle starts: pairs (i, 0..i-1). */
static inline size_t triangle(size_t i)
{
    return i * (i - 1) / 2;
}

/* tile[k][l] = t[l][k] for l < n, k < width; what is in other lanes does not matter. */
static void transpose_tile(const float *restrict t, uint32_t D, uint32_t n, uint32_t width,
                           float *restrict tile)
{
    vec row[LANES];
    if (n == LANES && width == LANES)
        for (uint32_t l = 0; l < LANES; l++) row[l] = vec_load(t + (size_t)l * D);
    else
        for (uint32_t l = 0; l < LANES; l++) {
            row[l] = vec_load_n(t, width);
            if (l + 1 < n) t += D;
        }
    vec_transpose(row);
    for (uint32_t k = 0; k < LANES; k++) vec_store(tile + k * LANES, &row[k], LANES);
}

/* Vectors j0.. of one sample's V, values d0..: block[d][l] = t[j0 + l][d0 + d]. */
static void transpose(const float *t, uint32_t V, uint32_t D, uint32_t j0, uint32_t d0,
                      float *block)
{
    uint32_t end = least(D, d0 + TILE_D);
    for (uint32_t d = d0; d < end; d += LANES, block += LANES * LANES)
        transpose_tile(t + (size_t)j0 * D + d, D, least(V - j0, LANES), least(end - d, LANES),
                       block);
}

/* sum[u][l] = dot of vector u of one block with vector l of another, on top of itself where `more`.
 * `rows` is a constant to the compiler. */
static inline void dots(const float *restrict of_i, const float *restrict of_j, uint32_t depth,
                        bool more, vec *restrict sum, const uint32_t rows)
{
    vec acc[AT_ONCE] = {{0}};
    if (more)
        UNROLLED for (uint32_t u = 0; u < rows; u++) acc[u] = sum[u];
    for (uint32_t d = 0; d < depth; d++, of_i += LANES, of_j += LANES) {
        vec j = vec_load(of_j);
        UNROLLED for (uint32_t u = 0; u < rows; u++)
            acc[u] = vec_fma(vec_splat(of_i[u]), j, acc[u]);
    }
    UNROLLED for (uint32_t u = 0; u < rows; u++) sum[u] = acc[u];
}

/* Sixteen columns of z, from j0 on, for n <= AT_ONCE vectors i..; of_i and of_j: transposed, from
 * these vectors on. With d0 > 0, z holds the sums over d < d0. */
static void dots_rows(const float *of_i, const float *of_j, uint32_t D, uint32_t d0, uint32_t i,
                      uint32_t n, uint32_t j0, float *z)
{
    vec sum[AT_ONCE];
    bool more = d0 > 0;
    uint32_t depth = least(D - d0, TILE_D);
    float *at = z + triangle(i) + j0;
    for (uint32_t u = 0; u < n && more; at += i + u, u++)
        sum[u] = vec_load_n(at, least(i + u - j0, LANES));
    switch ((n + 3) / 4) { /* a few sums too many are cheaper than a loop for each number */
    case 1: dots(of_i, of_j, depth, more, sum, 4); break;
    case 2: dots(of_i, of_j, depth, more, sum, least(AT_ONCE, 8)); break;
    case 3: dots(of_i, of_j, depth, more, sum, least(AT_ONCE, 12)); break;
    case 4: dots(of_i, of_j, depth, more, sum, least(AT_ONCE, 16)); break;
    }
    at = z + triangle(i) + j0;
    for (uint32_t u = 0; u < n; at += i + u, u++)
        vec_store(at, &sum[u], least(i + u - j0, LANES));
}

/* The dots of one sample, over values d0.., at most TILE_D. */
static void dots_sample(const float *t, uint32_t V, uint32_t D, uint32_t d0, float *z)
{
    _Alignas(64) float block[KEPT + 2][BLOCK];
    for (uint32_t i0 = 0; i0 < V; i0 += LANES) {
        const float *of_i = block[least(i0 / LANES, KEPT)];
        transpose(t, V, D, i0, d0, block[least(i0 / LANES, KEPT)]);
        for (uint32_t j0 = 0; j0 <= i0; j0 += LANES) {
            const float *of_j = block[least(j0 / LANES, KEPT)];
            if (j0 / LANES >= KEPT && j0 != i0) {
                transpose(t, V, D, j0, d0, block[KEPT + 1]);
                of_j = block[KEPT + 1];
            }
            uint32_t n = least(V - i0, LANES);
            for (uint32_t u = 0; u < n; u += AT_ONCE)
                dots_rows(of_i + u, of_j, D, d0, i0 + u, least(n - u, AT_ONCE), j0, z);
        }
    }
}

enum st cpu_interact_forward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                             const float *t, float *r)
{
    (void)dev;
    (void)lane;
    uint32_t V = F + 1;
    for (uint32_t b = 0; b < B; b++, t += (size_t)V * D, r += D + triangle(V)) {
        memcpy(r, t, D * sizeof(*r));
        for (uint32_t d = 0; d < D; d += TILE_D) dots_sample(t, V, D, d, r + D);
    }
    return ST_OK;
}

/* dt[i..i+rows-1][0..n): each 0, plus the terms of j = 0..V-1 in this order, j != i. `rows` is a
 * constant to the compiler. */
static inline void back_block(const float *restrict t, uint32_t V, uint32_t D, uint32_t i,
                              uint32_t n, const float *restrict dz, float *restrict dt,
                              const uint32_t rows)
{
    vec acc[BACK_AT_ONCE] = {{0}};
    const float *dz_of[BACK_AT_ONCE];
    UNROLLED for (uint32_t u = 0; u < rows; u++) dz_of[u] = dz + triangle(i + u);
    for (uint32_t j = 0; j < i; j++, t += D) {
        vec of_j = vec_load_n(t, n);
        UNROLLED for (uint32_t u = 0; u < rows; u++)
            acc[u] = vec_fma(vec_splat(dz_of[u][j]), of_j, acc[u]);
    }
    UNROLLED for (uint32_t v = 0; v < rows; v++, t += D) {
        vec of_j = vec_load_n(t, n);
        UNROLLED for (uint32_t u = 0; u < rows; u++)
            if (u != v)
                acc[u] = vec_fma(vec_splat(u > v ? dz_of[u][i + v] : dz_of[v][i + u]), of_j,
                                 acc[u]);
    }
    dz += triangle(i + rows) + i;
    for (uint32_t j = i + rows; j < V; dz += j, j++, t += D) {
        vec of_j = vec_load_n(t, n);
        UNROLLED for (uint32_t u = 0; u < rows; u++)
            acc[u] = vec_fma(vec_splat(dz[u]), of_j, acc[u]);
    }
    UNROLLED for (uint32_t u = 0; u < rows; u++) vec_store(dt + (size_t)(i + u) * D, &acc[u], n);
}

/* All vectors of dt, for n <= 16 values of d. */
static void back_values(const float *t, uint32_t V, uint32_t D, uint32_t n, const float *dz,
                        float *dt)
{
    uint32_t i = 0;
    for (; i + BACK_AT_ONCE <= V; i += BACK_AT_ONCE)
        back_block(t, V, D, i, n, dz, dt, BACK_AT_ONCE);
    for (; i < V; i++) back_block(t, V, D, i, n, dz, dt, 1);
}

enum st cpu_interact_backward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F,
                              uint32_t D, const float *t, const float *dr, float *dt)
{
    (void)dev;
    (void)lane;
    uint32_t V = F + 1;
    for (uint32_t b = 0; b < B; b++, t += (size_t)V * D, dt += (size_t)V * D) {
        const float *dz = dr + D;
        for (uint32_t d = 0; d < D; d += LANES)
            back_values(t + d, V, D, least(D - d, LANES), dz, dt + d);
        for (uint32_t d = 0; d < D; d++) dt[d] += dr[d]; /* r[0..D) is t[0] itself */
        dr = dz + triangle(V);
    }
    return ST_OK;
}
