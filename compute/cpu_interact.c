/* compute/cpu_interact.c - dot products between all pairs of a sample's F + 1 vectors, and back.
 *
 * Forward: a dot product is a sum along d, which may not be split into lanes that a wider machine
 * would split otherwise. So lanes are sixteen different dots, of one vector i with sixteen
 * vectors j, and each is summed along d in ascending order. That needs the sixteen vectors
 * transposed, TILE_D values at a time, so that the tile stays in the first cache for any D.
 * Backward: dt[i] = sum over j != i of dz[i,j] t[j]; lanes are sixteen values of d. Both work on
 * AT_ONCE vectors i at a time: as many sums under way as an addition takes cycles. */
#include "compute/cpu.h"
#include "compute/cpu_vec.h"

enum { TILE_D = 64, AT_ONCE = 4 };

/* Where row i of the strict lower triangle starts: pairs (i, 0..i-1). */
static inline size_t triangle(size_t i)
{
    return i * (i - 1) / 2;
}

/* tile[d][l] = t[j0 + l][d0 + d] for l < n; lanes from n on hold what was there: never stored. */
static void transpose(const float *restrict t, uint32_t D, uint32_t n, uint32_t depth,
                      vec *restrict tile)
{
    for (uint32_t l = 0; l < n; l++)
        for (uint32_t d = 0; d < depth; d++) tile[d][l] = t[(size_t)l * D + d];
}

/* Dots of `rows` vectors from t with the tile's sixteen, over `depth` values of d, added to acc. */
static inline void dots(const float *restrict t, uint32_t D, uint32_t depth,
                        const vec *restrict tile, vec acc[AT_ONCE], const uint32_t rows)
{
    for (uint32_t d = 0; d < depth; d++)
        for (uint32_t u = 0; u < rows; u++) acc[u] += t[(size_t)u * D + d] * tile[d];
}

/* Dots of vectors i..i+rows-1, all > j0, with vectors j0..j0+15 (those below each): for d0 == 0
 * from 0, then on top of what z holds. `rows` is a constant to the compiler, 1 or AT_ONCE. */
static inline void dots_to(const float *restrict t, uint32_t D, uint32_t i, uint32_t j0,
                           uint32_t d0, uint32_t depth, const vec *restrict tile,
                           float *restrict z, const uint32_t rows)
{
    vec acc[AT_ONCE] = {{0}};
    for (uint32_t u = 0; u < rows && d0 != 0; u++) {
        uint32_t n = i + u - j0 < LANES ? i + u - j0 : LANES;
        memcpy(&acc[u], z + triangle(i + u) + j0, n * sizeof(*z));
    }
    dots(t + (size_t)i * D + d0, D, depth, tile, acc, rows);
    for (uint32_t u = 0; u < rows; u++) {
        uint32_t n = i + u - j0 < LANES ? i + u - j0 : LANES;
        vec_store(z + triangle(i + u) + j0, &acc[u], n);
    }
}

enum st cpu_interact_forward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F, uint32_t D,
                             const float *t, float *r)
{
    (void)dev;
    (void)lane;
    uint32_t V = F + 1;
    vec tile[TILE_D] = {{0}};
    for (uint32_t b = 0; b < B; b++, t += (size_t)V * D, r += D + triangle(V)) {
        memcpy(r, t, D * sizeof(*r));
        for (uint32_t j0 = 0; j0 + 1 < V; j0 += LANES)
            for (uint32_t d0 = 0; d0 < D; d0 += TILE_D) {
                uint32_t depth = D - d0 < TILE_D ? D - d0 : TILE_D;
                uint32_t n = V - j0 < LANES ? V - j0 : LANES;
                uint32_t i = j0 + 1;
                transpose(t + (size_t)j0 * D + d0, D, n, depth, tile);
                for (; i + AT_ONCE <= V; i += AT_ONCE)
                    dots_to(t, D, i, j0, d0, depth, tile, r + D, AT_ONCE);
                for (; i < V; i++) dots_to(t, D, i, j0, d0, depth, tile, r + D, 1);
            }
    }
    return ST_OK;
}

/* dz[i,j] = dz[j,i], i != j. */
static inline float pair(const float *dz, uint32_t i, uint32_t j)
{
    return j < i ? dz[triangle(i) + j] : dz[triangle(j) + i];
}

/* dt[i..i+rows-1][d0..d0+16): each 0, plus the terms of j = 0..V-1 in this order, j != i. */
static inline void back_block(const float *restrict t, uint32_t V, uint32_t D, uint32_t i,
                              uint32_t d0, const float *restrict dz, float *restrict dt,
                              const uint32_t rows)
{
    vec acc[AT_ONCE] = {{0}};
    t += d0;
    for (uint32_t j = 0; j < i; j++)
        for (uint32_t u = 0; u < rows; u++)
            acc[u] += dz[triangle(i + u) + j] * vec_load(t + (size_t)j * D);
    for (uint32_t j = i; j < i + rows; j++)
        for (uint32_t u = 0; u < rows; u++)
            if (j != i + u) acc[u] += pair(dz, i + u, j) * vec_load(t + (size_t)j * D);
    for (uint32_t j = i + rows; j < V; j++)
        for (uint32_t u = 0; u < rows; u++)
            acc[u] += dz[triangle(j) + i + u] * vec_load(t + (size_t)j * D);
    for (uint32_t u = 0; u < rows; u++) vec_store(dt + (size_t)(i + u) * D + d0, &acc[u], LANES);
}

/* The same for one d: what is left of D behind the last full block. */
static float back_one(const float *restrict t, uint32_t V, uint32_t D, uint32_t i, uint32_t d,
                      const float *restrict dz)
{
    float acc = 0.0f;
    for (uint32_t j = 0; j < V; j++)
        if (j != i) acc += pair(dz, i, j) * t[(size_t)j * D + d];
    return acc;
}

enum st cpu_interact_backward(struct device *dev, uint32_t lane, uint32_t B, uint32_t F,
                              uint32_t D, const float *t, const float *dr, float *dt)
{
    (void)dev;
    (void)lane;
    uint32_t V = F + 1;
    for (uint32_t b = 0; b < B; b++, t += (size_t)V * D, dt += (size_t)V * D) {
        const float *dz = dr + D;
        uint32_t d = 0;
        for (; d + LANES <= D; d += LANES) {
            uint32_t i = 0;
            for (; i + AT_ONCE <= V; i += AT_ONCE) back_block(t, V, D, i, d, dz, dt, AT_ONCE);
            for (; i < V; i++) back_block(t, V, D, i, d, dz, dt, 1);
        }
        for (; d < D; d++)
            for (uint32_t i = 0; i < V; i++) dt[(size_t)i * D + d] = back_one(t, V, D, i, d, dz);
        for (d = 0; d < D; d++) dt[d] += dr[d]; /* r[0..D) is t[0] itself */
        dr = dz + triangle(V);
    }
    return ST_OK;
}
