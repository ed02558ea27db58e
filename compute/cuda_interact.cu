/* compute/cuda_interact.cu - dot products between all pairs of a sample's V = F + 1 vectors, and
 * back. A block brings a few samples into shared memory, once, and works in registers from there:
 * 4 x 4 numbers a thread.
 *
 * Forward: the vectors are dealt out to G groups, vector i to group i % G, and a thread takes the
 * 16 dots between two groups: the groups' members lie G apart, so that the threads beside it read
 * neighbouring vectors, which lie in different banks (the distance between vectors is an odd
 * number of quads). Each dot is one sum along d, ascending.
 * Backward: dt[i] = sum over j of dz[i,j] t[j], in ascending j, with dz as a full symmetric matrix
 * and 0 on its diagonal; a thread takes four i and four d.
 *
 * D, and for backward V, may be larger than fits: then the loop is over pieces, and sums go on. */
#include "compute/cuda_kernels.h"

#include <math.h>

#include "compute/cuda_kernel.h"

enum { MAX_DEPTH = 64 };     /* floats of a vector that are in shared memory at once  */
enum { ENOUGH_BLOCKS = 256 }; /* more samples a block only where there are this many  */

DEVICE uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

HOST uint32_t min_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Where row i of the strict lower triangle starts: pairs (i, 0..i-1). */
DEVICE uint32_t triangle(uint32_t i)
{
    return i * (i - 1) / 2;
}

/* The i with triangle(i) <= k < triangle(i + 1): the root, which may be off by a rounding. */
DEVICE uint32_t triangle_row(uint32_t k)
{
    uint32_t i = (uint32_t)((1.0f + sqrtf(1.0f + 8.0f * (float)k)) / 2.0f);
    while (triangle(i) > k) i--;
    while (triangle(i + 1) <= k) i++;
    return i;
}

/* Samples a block works on at once: as many as threads and shared memory allow, but rather more
 * blocks than many samples in each. */
HOST uint32_t samples_at_once(uint32_t B, uint32_t threads_each, uint32_t floats_each)
{
    uint32_t n = min_of(BLOCK / threads_each, SHARED_FLOATS / floats_each);
    n = min_of(n, B / ENOUGH_BLOCKS);
    return n == 0 ? 1 : n;
}

/* Whole warps, and at least two: loads and stores are for all threads. */
HOST uint32_t block_for(uint32_t n_working)
{
    uint32_t threads = 32 * ceil_div(min_of(n_working, BLOCK), 32);
    return threads < 64 ? 64 : threads;
}

/* A piece of a sample: floats [d0, d0 + depth) of `some` of its V vectors. In shared memory vectors
 * are ld floats apart, and depth is whole quads: what is behind the `left` floats of D is 0. */
struct piece { uint32_t V, D, some, depth, left, ld; int by4; };

DEVICE uint32_t depth_of(uint32_t depth, uint32_t left)
{
    return least(depth, (left + 3) & ~3u);
}

DEVICE size_t place_in_t(const struct piece *p, uint32_t v)
{
    if (p->some == p->V) return v;
    uint32_t sample = v / p->some;
    return (size_t)sample * p->V + (v - sample * p->some);
}

/* n vectors of pieces whose first float is *t, in whole samples. */
DEVICE void bring(const float *t, uint32_t n, const struct piece *p, float *to)
{
    uint32_t width = p->by4 ? 4 : 1, units = p->depth / width;
    for (uint32_t u = threadIdx.x; u < n * units; u += blockDim.x) {
        uint32_t v = u / units, d = (u - v * units) * width;
        float *here = to + v * p->ld + d;
        const float *there = t + place_in_t(p, v) * p->D + d;
        if (d >= p->left)
            *here = 0.0f; /* the last quad of a D that is not whole quads */
        else if (p->by4)
            COPY_ASYNC(here, there, 16);
        else
            COPY_ASYNC(here, there, 4);
    }
}

/* --- forward -------------------------------------------------------------------------------- */

struct forward_args {
    const float *t;       /* (B, V, D)                                                        */
    float *r;             /* (B, D + P)                                                       */
    uint32_t B, V, D, P;
    uint32_t samples;     /* at once                                                          */
    uint32_t G, tiles;    /* groups of vectors; pairs of groups                               */
    uint32_t depth, ld;   /* of a piece of D; from vector to vector in shared memory          */
    int staged, by4;      /* the dots go through shared memory: stores are in order           */
};

/* The dots of groups gi and gj, over `quads` quads, on top of acc. */
DEVICE void add_dots(const struct forward_args *a, const float *x, uint32_t gi, uint32_t gj,
                     uint32_t quads, float acc[4][4])
{
    const float *pi[4], *pj[4];
    UNROLL
    for (uint32_t u = 0; u < 4; u++) {
        pi[u] = x + least(gi + u * a->G, a->V - 1) * a->ld;
        pj[u] = x + least(gj + u * a->G, a->V - 1) * a->ld;
    }
    UNROLL_NOT
    for (uint32_t q = 0; q < quads; q++) {
        float4 vi[4], vj[4];
        UNROLL
        for (uint32_t u = 0; u < 4; u++) {
            vi[u] = *(const float4 *)(pi[u] + 4 * q);
            vj[u] = *(const float4 *)(pj[u] + 4 * q);
        }
        UNROLL
        for (uint32_t k = 0; k < 16; k++) {
            float *sum = &acc[k / 4][k % 4];
            *sum = add_dot4(vi[k / 4], vj[k % 4], *sum);
        }
    }
}

/* Within one group each pair is there twice: once is enough. */
DEVICE void store_dots(const struct forward_args *a, uint32_t gi, uint32_t gj,
                       float acc[4][4], float *z)
{
    UNROLL
    for (uint32_t k = 0; k < 16; k++) {
        uint32_t i = gi + k / 4 * a->G, j = gj + k % 4 * a->G;
        if (i >= a->V || j >= a->V || i == j || (gi == gj && i < j)) continue;
        z[i > j ? triangle(i) + j : triangle(j) + i] = acc[k / 4][k % 4];
    }
}

/* r[0..D) is the sample's first vector: its piece from d0 on. */
DEVICE void pass_first(const struct forward_args *a, const float *tile, uint32_t n, float *r,
                       uint32_t left)
{
    uint32_t width = least(a->depth, left);
    for (uint32_t u = threadIdx.x; u < n * width; u += blockDim.x) {
        uint32_t s = u / width, d = u - s * width;
        r[(size_t)s * (a->D + a->P) + d] = tile[s * a->V * a->ld + d];
    }
}

KERNEL_THAT_WAITS(interact_forward, forward_args, a, BLOCK)
{
    SHARED(float, tile);                                     /* [samples][V][ld]              */
    float *staged = tile + a.samples * a.V * a.ld;           /* [samples][P]                  */
    uint32_t b0 = blockIdx.x * a.samples, n = least(a.samples, a.B - b0);
    float *r = a.r + (size_t)b0 * (a.D + a.P);
    for (uint32_t w0 = 0; w0 < n * a.tiles; w0 += blockDim.x) {
        uint32_t w = w0 + threadIdx.x, s = w / a.tiles, pair = w - s * a.tiles;
        uint32_t gi = triangle_row(pair) - 1, gj = pair - triangle(gi + 1); /* gj <= gi */
        float acc[4][4] = {{0.0f}};
        for (uint32_t d0 = 0; d0 < a.D; d0 += a.depth) {
            uint32_t left = a.D - d0;
            struct piece p = {a.V, a.D, a.V, depth_of(a.depth, left), left, a.ld, a.by4};
            if (w0 == 0 || a.D > a.depth) {
                __syncthreads(); /* the piece before is done with */
                bring(a.t + (size_t)b0 * a.V * a.D + d0, n * a.V, &p, tile);
                COPY_COMMIT();
                COPY_WAIT(0);
                __syncthreads();
            }
            if (w0 == 0) pass_first(&a, tile, n, r + d0, left);
            if (s < n) add_dots(&a, tile + s * a.V * a.ld, gi, gj, p.depth / 4, acc);
        }
        if (s >= n) continue;
        float *z = a.staged ? staged + s * a.P : r + (size_t)s * (a.D + a.P) + a.D;
        store_dots(&a, gi, gj, acc, z);
    }
    if (!a.staged) return;
    __syncthreads();
    for (uint32_t s = 0; s < n; s++)
        for (uint32_t k = threadIdx.x; k < a.P; k += blockDim.x)
            r[(size_t)s * (a.D + a.P) + a.D + k] = staged[s * a.P + k];
}

/* From vector to vector: an odd number of quads. */
HOST uint32_t odd_quads(uint32_t depth)
{
    return depth / 4 % 2 == 0 ? depth + 4 : depth;
}

cudaError_t cuda_interact_forward(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                                  const float *t, float *r)
{
    uint32_t V = F + 1, P = V * F / 2, G = ceil_div(V, 4);
    uint32_t depth = min_of(4 * quads_of(D), MAX_DEPTH);
    int staged = P <= SHARED_FLOATS / 2;
    if (B == 0 || D == 0) return cudaSuccess;
    while (V * odd_quads(depth) + (staged ? P : 0) > SHARED_FLOATS) {
        if (depth == 4) return cudaErrorInvalidValue; /* thousands of tables */
        depth -= 4;
    }
    struct forward_args a = {t, r, B, V, D, P, 0, G, G * (G + 1) / 2, depth, odd_quads(depth),
                             staged, is_by4(t, D, D)};
    uint32_t floats = V * a.ld + (staged ? P : 0);
    a.samples = samples_at_once(B, min_of(a.tiles, BLOCK), floats);
    return LAUNCH(s, interact_forward, dim(ceil_div(B, a.samples), 1),
                  dim(block_for(a.samples * a.tiles), 1), a.samples * floats * sizeof(float), &a);
}

/* --- backward ------------------------------------------------------------------------------- */

enum { MAX_SOME = 64, MAX_WIDE = 32 }; /* vectors j at once; vectors i of a block */

struct backward_args {
    const float *t, *dr;  /* (B, V, D), (B, D + P)                                            */
    float *dt;            /* (B, V, D)                                                        */
    uint32_t B, V, D, P;
    uint32_t samples;     /* at once                                                          */
    uint32_t depth;       /* of a piece of D: a block's                                       */
    uint32_t some;        /* vectors j at once                                                */
    uint32_t wide;        /* vectors i of a block: a power of two, 4 .. MAX_WIDE              */
    uint32_t fours;       /* groups of four i with work, at most wide / 4                     */
    uint32_t n_pieces;    /* of D; blockIdx.y: piece + n_pieces * (i / wide)                  */
    int by4;
};

/* z[s][j][i] = dz of the pair of vectors j0 + j and i0 + i, 0 where there is none. */
DEVICE void bring_pairs(const struct backward_args *a, const float *dz, uint32_t n, uint32_t j0,
                        uint32_t i0, uint32_t some, float *z)
{
    for (uint32_t u = threadIdx.x; u < n * some * a->wide; u += blockDim.x) {
        uint32_t row = u / a->wide, i = i0 + (u & (a->wide - 1)), s = row / some;
        uint32_t j = j0 + row - s * some;
        const float *from = dz + (size_t)s * (a->D + a->P);
        if (i == j || i >= a->V)
            z[u] = 0.0f;
        else
            COPY_ASYNC(z + u, from + (i > j ? triangle(i) + j : triangle(j) + i), 4);
    }
}

/* acc[u] += sum over j of z[j][u] t[j], for a thread's four i and its quad of d. */
DEVICE void add_terms(const float *t, uint32_t ld, const float *z, uint32_t wide, uint32_t some,
                      float4 acc[4])
{
    for (uint32_t j = 0; j < some; j++) {
        float4 v = *(const float4 *)(t + j * ld), by = *(const float4 *)(z + j * wide);
        acc[0] = multiply_add4(by.x, v, acc[0]);
        acc[1] = multiply_add4(by.y, v, acc[1]);
        acc[2] = multiply_add4(by.z, v, acc[2]);
        acc[3] = multiply_add4(by.w, v, acc[3]);
    }
}

KERNEL_THAT_WAITS(interact_backward, backward_args, a, BLOCK)
{
    SHARED(float, tile);                                     /* [samples][some][depth]        */
    float *z = tile + a.samples * a.some * a.depth;          /* [samples][some][wide]         */
    uint32_t b0 = blockIdx.x * a.samples, n = least(a.samples, a.B - b0);
    uint32_t i0 = blockIdx.y / a.n_pieces * a.wide, d0 = blockIdx.y % a.n_pieces * a.depth;
    uint32_t quads = a.depth / 4, each = a.fours * quads;    /* threads of a sample           */
    uint32_t s = threadIdx.x / each, rest = threadIdx.x - s * each;
    uint32_t four = rest / quads, d = 4 * (rest - four * quads), i = i0 + 4 * four;
    int mine = s < n && i < a.V && d0 + d < a.D;
    float4 acc[4], first = fill4(0.0f);
    UNROLL
    for (uint32_t u = 0; u < 4; u++) acc[u] = fill4(0.0f);
    const float *dr = a.dr + (size_t)b0 * (a.D + a.P);
    if (mine && i == 0) /* r[0..D) is t[0] itself */
        first = load4(dr + (size_t)s * (a.D + a.P) + d0 + d, a.D - d0 - d, 0);
    for (uint32_t j0 = 0; j0 < a.V; j0 += a.some) {
        uint32_t some = least(a.some, a.V - j0);
        uint32_t left = a.D - d0;
        struct piece p = {a.V, a.D, some, depth_of(a.depth, left), left, a.depth, a.by4};
        __syncthreads(); /* the piece before is done with */
        bring(a.t + ((size_t)b0 * a.V + j0) * a.D + d0, n * some, &p, tile);
        bring_pairs(&a, dr + a.D, n, j0, i0, some, z);
        COPY_COMMIT();
        COPY_WAIT(0);
        __syncthreads();
        if (mine)
            add_terms(tile + s * some * a.depth + d, a.depth, z + s * some * a.wide + 4 * four,
                      a.wide, some, acc);
    }
    if (!mine) return;
    if (i == 0) acc[0] = add4(acc[0], first);
    float *dt = a.dt + ((size_t)(b0 + s) * a.V + i) * a.D + d0 + d;
    UNROLL
    for (uint32_t u = 0; u < 4; u++)
        if (i + u < a.V) store4(dt + (size_t)u * a.D, a.D - d0 - d, a.by4, acc[u]);
}

cudaError_t cuda_interact_backward(cudaStream_t s, uint32_t B, uint32_t F, uint32_t D,
                                   const float *t, const float *dr, float *dt)
{
    uint32_t V = F + 1, depth = min_of(4 * quads_of(D), MAX_DEPTH), some = min_of(V, MAX_SOME);
    uint32_t wide = 4;
    if (B == 0 || D == 0) return cudaSuccess;
    while (wide < V && wide < MAX_WIDE) wide *= 2;
    struct backward_args a = {t, dr, dt, B, V, D, V * F / 2, 0, depth, some, wide,
                              ceil_div(min_of(V, wide), 4), ceil_div(D, depth),
                              is_by4(t, D, D) && is_by4(dt, D, D)};
    uint32_t each = a.fours * depth / 4, floats = some * (depth + wide);
    uint32_t slabs = a.n_pieces * ceil_div(V, wide);
    if (slabs > UINT16_MAX) return cudaErrorInvalidValue;
    a.samples = samples_at_once(B, each, floats);
    return LAUNCH(s, interact_backward, dim(ceil_div(B, a.samples), slabs),
                  dim(block_for(a.samples * each), 1), a.samples * floats * sizeof(float), &a);
}
