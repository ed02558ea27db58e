/* compute/cpu_gemm.c - matrix products from one piece: a tile of ROWS x WIDTH sums that stays in
 * registers while the whole summed dimension passes by. Each step loads WIDTH weights, and one
 * number for each row, multiplies and adds. ROWS x WIDTH fills the register file: 28 of the 32
 * registers with AVX-512, 12 of the 16 with AVX or SSE.
 *
 * What keeps it near the peak, in the order in which it was found by measuring:
 * - weights in panels, read from front to back, and fetched AHEAD steps early;
 * - samples not copied: a tile reads its rows of x where they are. But rows a multiple of 4 KB
 *   apart share the same few lines of the first cache; those are copied, a little further apart;
 * - BLOCK samples pass a panel before the next panel comes: they and it stay in the second cache;
 * - sums over samples (dw): both factors would be read down their columns, so they are copied
 *   first, into the order in which the tiles read them, SAMPLES x TALL x WIDE at a time;
 * - rows cut evenly: 64 are 5 tiles of 12 or 13, not 4 of 14 and one of 8.
 *
 * I1: every sum is one chain, in ascending order, whatever tile it is computed in; where a chain
 * is interrupted (GEMM_SAMPLES), its value passes through memory unchanged. This file alone is
 * compiled with -ffp-contract=fast: a product and its sum are one rounding where the machine has
 * such an instruction, in every tile. */
#include "compute/cpu_gemm.h"

#include <string.h>

#include "base/check.h"

#if defined(__AVX512F__)
enum { VEC = 16, ROWS = 14, STRIDE = 16 };
#elif defined(__AVX__)
enum { VEC = 8, ROWS = 6, STRIDE = 8 };
#else
enum { VEC = 4, ROWS = 6, STRIDE = 8 };
#endif
enum {
    WIDTH = 2 * VEC,             /* of a panel                                                  */
    BASES = (ROWS + 2) / 3,
    BLOCK = 140,                 /* samples that pass a panel together                          */
    TALL = 256, WIDE = 1024,     /* of dw at a time: inputs, outputs                            */
    TILES = TALL / ROWS + 1,     /* rows of x for dw lie STRIDE >= ROWS floats apart            */
    AHEAD = 32 * 32 / WIDTH,     /* steps: 4 KB of weights                                      */
    APART = 16                   /* floats between copies, lest they collide in the cache       */
};
_Static_assert(TILES * (GEMM_SAMPLES * STRIDE + APART) + WIDE / WIDTH *
               (GEMM_SAMPLES * WIDTH + APART) <= GEMM_SCRATCH, "scratch");

typedef float vec __attribute__((vector_size(VEC * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(VEC * sizeof(float))));
typedef float loose __attribute__((vector_size(VEC * sizeof(float)), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline)) /* `rows` becomes a constant */

/* One tile: c[i][0..WIDTH) = init[i][0..WIDTH) + sum over k of a(i,k) b[k][0..WIDTH). */
struct tile {
    uint32_t K;
    const float *a;              /* by_row: a[i * lda + k]; else a[k * STRIDE + i]              */
    size_t lda;
    const float *b;
    const float *init;           /* rows ldi floats apart: 0 for the same row for all           */
    size_t ldi;
    float *c;
    size_t ldc;
    bool relu;
};

INLINE vec spread(float v)
{
    return v - (vec){0};         /* exact, and a NaN's or -0's sign is kept                     */
}

/* The k-th step. Rows 3j, 3j + 1 and 3j + 2 are addressed from q[j]: few registers for all. */
INLINE void step(uint32_t rows, bool by_row, const float *const *q, size_t lda, uint32_t k,
                 const float *b, vec acc[ROWS][2])
{
    const float *bk = b + (size_t)k * WIDTH;
    vec b0 = *(const loose *)bk, b1 = *(const loose *)(bk + VEC);
    __builtin_prefetch(bk + AHEAD * WIDTH);
    __builtin_prefetch(bk + AHEAD * WIDTH + VEC);
#pragma GCC unroll 14
    for (uint32_t i = 0; i < rows; i++) {
        vec a = spread(by_row ? q[i / 3][i % 3 * lda + k] : q[0][(size_t)k * STRIDE + i]);
        acc[i][0] += a * b0;
        acc[i][1] += a * b1;
    }
}

INLINE void load(uint32_t rows, const struct tile *t, vec acc[ROWS][2])
{
#pragma GCC unroll 14
    for (uint32_t i = 0; i < rows; i++) {
        const float *init = t->init + i * t->ldi;
        acc[i][0] = *(const loose *)init;
        acc[i][1] = *(const loose *)(init + VEC);
        __builtin_prefetch(t->c + i * t->ldc, 1);
        __builtin_prefetch(t->c + i * t->ldc + VEC, 1);
        __builtin_prefetch(t->c + i * t->ldc + WIDTH - 1, 1);
    }
}

/* 0 only where a sum is really negative: a NaN stays, so that it reaches the loss (I5). */
INLINE vec relu_of(vec v)
{
    return (vec)((ivec)v & ~(v < (vec){0}));
}

INLINE void store(uint32_t rows, const struct tile *t, vec acc[ROWS][2])
{
    if (t->relu)
#pragma GCC unroll 14
        for (uint32_t i = 0; i < rows; i++) {
            acc[i][0] = relu_of(acc[i][0]);
            acc[i][1] = relu_of(acc[i][1]);
        }
#pragma GCC unroll 14
    for (uint32_t i = 0; i < rows; i++) {
        *(loose *)(t->c + i * t->ldc) = acc[i][0];
        *(loose *)(t->c + i * t->ldc + VEC) = acc[i][1];
    }
}

INLINE void compute(uint32_t rows, bool by_row, const struct tile *t)
{
    vec acc[ROWS][2];
    const float *q[BASES], *b = t->b;
    size_t lda = t->lda;
    load(rows, t, acc);
#pragma GCC unroll 5
    for (uint32_t j = 0; j < BASES; j++) q[j] = t->a + (by_row && 3 * j < rows ? 3 * j * lda : 0);
    /* Left to gcc to unroll: written as groups of four steps, it ran 14 % slower (gcc 12). */
#pragma GCC unroll 4
    for (uint32_t k = 0, K = t->K; k < K; k++) step(rows, by_row, q, lda, k, b, acc);
    store(rows, t, acc);
}

/* For each number of rows a function of its own, in which `rows` is a constant. */
#define TILE(rows) \
    static void by_row_##rows(const struct tile *t) { compute(rows, true, t); } \
    static void by_step_##rows(const struct tile *t) { compute(rows, false, t); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if defined(__AVX512F__)
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif

typedef void tile_fn(const struct tile *t);
#define FIRST_SIX(kind) NULL, kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6
#if defined(__AVX512F__)
#define ALL(kind) FIRST_SIX(kind), kind##_7, kind##_8, kind##_9, kind##_10, kind##_11, kind##_12, \
                  kind##_13, kind##_14
#else
#define ALL(kind) FIRST_SIX(kind)
#endif
static tile_fn *const BY_ROW[ROWS + 1] = {ALL(by_row)}, *const BY_STEP[ROWS + 1] = {ALL(by_step)};

static uint32_t at_most(uint32_t n, uint32_t limit)
{
    return n < limit ? n : limit;
}

static uint32_t pieces(uint32_t n, uint32_t limit)
{
    return (n + limit - 1) / limit;
}

/* n things cut into `parts` that differ by 1 at most, the longer ones first. */
struct cuts { uint32_t parts, least, longer; };

static struct cuts cut(uint32_t n, uint32_t limit)
{
    uint32_t parts = pieces(n, limit);
    return (struct cuts){parts, n / parts, n % parts};
}

static uint32_t length(const struct cuts *c, uint32_t part)
{
    return c->least + (part < c->longer);
}

/* --- samples ---------------------------------------------------------------------------------- */

/* WIDTH or fewer outputs from n0 on, of all of g's samples. Where a panel is not full, its tiles
 * are stored on the side and their real part copied. */
static void panel(const struct gemm_rows *g, uint32_t n0)
{
    static const float zero[WIDTH];
    float side[ROWS * WIDTH], bias[WIDTH] = {0};
    uint32_t n = at_most(WIDTH, g->N - n0);
    struct cuts cuts = cut(g->B, ROWS);
    bool full = n == WIDTH;
    if (g->b != NULL && !full) memcpy(bias, g->b + n0, n * sizeof(*bias));
    struct tile t = {.K = g->K, .lda = g->ldx, .b = g->w + (size_t)n0 * g->K, .relu = g->relu,
                     .init = g->b == NULL ? zero : full ? g->b + n0 : bias,
                     .a = g->x, .c = side, .ldc = full ? g->ldy : WIDTH};
    float *y = g->y + n0;
    for (uint32_t p = 0; p < cuts.parts; p++) {
        uint32_t rows = length(&cuts, p);
        if (full) t.c = y;
        BY_ROW[rows](&t);
        for (uint32_t i = 0; i < rows && !full; i++)
            memcpy(y + (size_t)i * g->ldy, side + i * WIDTH, n * sizeof(*y));
        t.a += (size_t)rows * g->ldx;
        y += (size_t)rows * g->ldy;
    }
}

/* x's rows of this block, where they are or, if they collide in the cache and there is room for
 * them, copied to scratch. */
static void spread_rows(struct gemm_rows *g, float *scratch)
{
    size_t ld = (size_t)g->K + APART;
    if (g->ldx % 1024 != 0 || g->B == 1 || g->B * ld > GEMM_SCRATCH) return;
    for (size_t i = 0; i < g->B; i++)
        memcpy(scratch + i * ld, g->x + i * g->ldx, g->K * sizeof(*g->x));
    g->x = scratch;
    g->ldx = (uint32_t)ld;
}

void gemm_rows(const struct gemm_rows *g, float *scratch)
{
    struct cuts cuts = cut(g->B, BLOCK);
    size_t at = 0;
    for (uint32_t i = 0; i < cuts.parts; at += length(&cuts, i), i++) {
        struct gemm_rows block = *g;
        block.B = length(&cuts, i);
        block.x += at * g->ldx;
        block.y += at * g->ldy;
        spread_rows(&block, scratch);
        for (uint32_t n = 0; n < g->N; n += WIDTH) panel(&block, n);
    }
}

/* --- sums over samples ------------------------------------------------------------------------ */

/* From one copy of B rows to the next. */
static size_t apart(uint32_t B, uint32_t width)
{
    return (size_t)B * width + APART;
}

/* dy's columns n0.. as panels [][B][WIDTH], the last filled up with 0. */
static void copy_wide(const struct gemm_weights *g, uint32_t n0, uint32_t n, float *out)
{
    for (size_t b = 0; b < g->B; b++) {
        const float *dy = g->dy + b * g->ldy + n0;
        float *o = out + b * WIDTH;
        uint32_t i = 0;
        for (; i + WIDTH <= n; i += WIDTH, o += apart(g->B, WIDTH))
            memcpy(o, dy + i, WIDTH * sizeof(*o));
        if (i == n) continue;
        memset(o, 0, WIDTH * sizeof(*o));
        memcpy(o, dy + i, (n - i) * sizeof(*o));
    }
}

/* x's columns k0.. as [parts][B][STRIDE], in each the columns of one tile. STRIDE are copied where
 * x's row has so many: not more is used than a tile has, but a copy of fixed size is fast. */
static void copy_tall(const struct gemm_weights *g, uint32_t k0, const struct cuts *cuts,
                      float *out)
{
    for (size_t b = 0; b < g->B; b++) {
        const float *x = g->x + b * g->K;
        float *o = out + b * STRIDE;
        uint32_t k = k0, n;
        for (uint32_t p = 0; p < cuts->parts; p++, o += apart(g->B, STRIDE), k += n) {
            n = length(cuts, p);
            if (k + STRIDE <= g->K)
                memcpy(o, x + k, STRIDE * sizeof(*o));
            else
                memcpy(o, x + k, n * sizeof(*o));
        }
    }
}

/* dw for the outputs that lie copied in `wide` and inputs k0.. */
static void sum_tall(const struct gemm_weights *g, uint32_t n0, uint32_t n, const float *wide,
                     uint32_t k0, float *tall)
{
    static const float zero[WIDTH];
    struct cuts cuts = cut(at_most(TALL, g->K - k0), ROWS);
    copy_tall(g, k0, &cuts, tall);
    for (uint32_t i = 0; i < n; i += WIDTH) {
        struct tile t = {.K = g->B, .a = tall, .b = wide + i / WIDTH * apart(g->B, WIDTH),
                         .c = g->dw + (size_t)(n0 + i) * g->K + (size_t)k0 * WIDTH,
                         .ldc = WIDTH};
        for (uint32_t p = 0; p < cuts.parts; p++) {
            uint32_t rows = length(&cuts, p);
            t.init = g->add ? t.c : zero;
            t.ldi = g->add ? WIDTH : 0;
            BY_STEP[rows](&t);
            t.a += apart(g->B, STRIDE);
            t.c += (size_t)rows * WIDTH;
        }
    }
}

void gemm_weights(const struct gemm_weights *g, float *scratch)
{
    CHECK(g->B <= GEMM_SAMPLES, "scratch holds no more");
    float *tall = scratch + WIDE / WIDTH * apart(GEMM_SAMPLES, WIDTH);
    for (uint32_t n0 = 0; n0 < g->N; n0 += WIDE) {
        uint32_t n = at_most(WIDE, g->N - n0);
        copy_wide(g, n0, n, scratch);
        for (uint32_t k0 = 0; k0 < g->K; k0 += TALL) sum_tall(g, n0, n, scratch, k0, tall);
    }
}

/* --- panels ----------------------------------------------------------------------------------- */

size_t gemm_floats(uint32_t K, uint32_t N)
{
    return (size_t)pieces(N, WIDTH) * WIDTH * K;
}

void gemm_put(uint32_t K, uint32_t N, const float *host, float *w)
{
    for (uint32_t n0 = 0; n0 < N; n0 += WIDTH)
        for (uint32_t k = 0; k < K; k++, w += WIDTH)
            for (uint32_t i = 0; i < WIDTH; i++)
                w[i] = n0 + i < N ? host[(size_t)(n0 + i) * K + k] : 0.0f;
}

void gemm_get(uint32_t K, uint32_t N, const float *w, float *host)
{
    for (uint32_t n0 = 0; n0 < N; n0 += WIDTH)
        for (uint32_t k = 0; k < K; k++, w += WIDTH)
            for (uint32_t i = 0; i < at_most(WIDTH, N - n0); i++)
                host[(size_t)(n0 + i) * K + k] = w[i];
}

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t pick __attribute__((vector_size(16)));

/* out[j * WIDTH + i] = in[i * WIDTH + j] for i, j < 4. */
static inline void transpose_four(const float *in, float *out)
{
    four a = *(const four *)in, b = *(const four *)(in + WIDTH);
    four c = *(const four *)(in + 2 * WIDTH), d = *(const four *)(in + 3 * WIDTH);
    four ab = __builtin_shuffle(a, b, (pick){0, 4, 1, 5});
    four cd = __builtin_shuffle(c, d, (pick){0, 4, 1, 5});
    *(four *)out = __builtin_shuffle(ab, cd, (pick){0, 1, 4, 5});
    *(four *)(out + WIDTH) = __builtin_shuffle(ab, cd, (pick){2, 3, 6, 7});
    ab = __builtin_shuffle(a, b, (pick){2, 6, 3, 7});
    cd = __builtin_shuffle(c, d, (pick){2, 6, 3, 7});
    *(four *)(out + 2 * WIDTH) = __builtin_shuffle(ab, cd, (pick){0, 1, 4, 5});
    *(four *)(out + 3 * WIDTH) = __builtin_shuffle(ab, cd, (pick){2, 3, 6, 7});
}

/* A square of WIDTH x WIDTH, of which rows x cols are real. in: `rows` rows; out: `cols` rows, each
 * filled up with 0. */
static void transpose_square(uint32_t rows, uint32_t cols, const float *in, float *out)
{
    if (rows == WIDTH && cols == WIDTH) {
        for (uint32_t i = 0; i < WIDTH; i += 4)
            for (uint32_t j = 0; j < WIDTH; j += 4)
                transpose_four(in + j * WIDTH + i, out + i * WIDTH + j);
        return;
    }
    for (uint32_t j = 0; j < cols; j++)
        for (uint32_t i = 0; i < WIDTH; i++)
            out[j * WIDTH + i] = i < rows ? in[i * WIDTH + j] : 0.0f;
}

void gemm_transpose(uint32_t K, uint32_t N, const float *w, float *out)
{
    for (uint32_t k = 0; k < K; k += WIDTH)
        for (uint32_t n = 0; n < N; n += WIDTH)
            transpose_square(at_most(WIDTH, K - k), at_most(WIDTH, N - n),
                             w + (size_t)n * K + (size_t)k * WIDTH,
                             out + (size_t)k * N + (size_t)n * WIDTH);
}
