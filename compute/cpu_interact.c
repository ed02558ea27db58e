/* compute/cpu_interact.c - dot products between all pairs of a sample's F + 1 vectors, and back.
 *
 * Forward: a dot product is a sum along d, which may not be split into lanes that a wider machine
 * would split otherwise. So lanes are sixteen different dots, of one vector i with sixteen
 * vectors j, and each is summed along d in ascending order. That needs the sixteen vectors
 * transposed, TILE_D values at a time, so that the tile stays in the first cache for any D.
 * Backward: dt[i] = sum over j != i of dz[i,j] t[j]; lanes are sixteen values of d. */
#include "compute/cpu.h"
#include "compute/cpu_vec.h"

enum { TILE_D = 64 };

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

/* Dots of each vector i > j0 with vectors j0..j0+15 (those below i), over `depth` values of d;
 * the first time (d0 == 0) from 0, then on top of what z holds. */
static void dots(const float *restrict t, uint32_t V, uint32_t D, uint32_t j0, uint32_t d0,
                 uint32_t depth, const vec *restrict tile, float *restrict z)
{
    for (uint32_t i = j0 + 1; i < V; i++) {
        const float *ti = t + (size_t)i * D + d0;
        float *out = z + triangle(i) + j0;
        uint32_t n = i - j0 < LANES ? i - j0 : LANES;
        vec acc = {0};
        if (d0 != 0) memcpy(&acc, out, n * sizeof(*out));
        for (uint32_t d = 0; d < depth; d++) acc += ti[d] * tile[d];
        vec_store(out, &acc, n);
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
                transpose(t + (size_t)j0 * D + d0, D, n, depth, tile);
                dots(t, V, D, j0, d0, depth, tile, r + D);
            }
    }
    return ST_OK;
}

/* dt[i][d0..d0+16) for one i: 0, plus the terms of j = 0..V-1 in this order, j != i. */
static void back_block(const float *restrict t, uint32_t V, uint32_t D, uint32_t i, uint32_t d0,
                       const float *restrict dz, float *restrict out)
{
    vec acc = {0};
    for (uint32_t j = 0; j < i; j++)
        acc += dz[triangle(i) + j] * vec_load(t + (size_t)j * D + d0);
    for (uint32_t j = i + 1; j < V; j++)
        acc += dz[triangle(j) + i] * vec_load(t + (size_t)j * D + d0);
    vec_store(out, &acc, LANES);
}

/* The same for one d: what is left of D behind the last full block. */
static float back_one(const float *restrict t, uint32_t V, uint32_t D, uint32_t i, uint32_t d,
                      const float *restrict dz)
{
    float acc = 0.0f;
    for (uint32_t j = 0; j < i; j++) acc += dz[triangle(i) + j] * t[(size_t)j * D + d];
    for (uint32_t j = i + 1; j < V; j++) acc += dz[triangle(j) + i] * t[(size_t)j * D + d];
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
        for (uint32_t i = 0; i < V; i++) {
            float *out = dt + (size_t)i * D;
            uint32_t d = 0;
            for (; d + LANES <= D; d += LANES) back_block(t, V, D, i, d, dz, out + d);
            for (; d < D; d++) out[d] = back_one(t, V, D, i, d, dz);
        }
        for (uint32_t d = 0; d < D; d++) dt[d] += dr[d]; /* r[0..D) is t[0] itself */
        dr = dz + triangle(V);
    }
    return ST_OK;
}
