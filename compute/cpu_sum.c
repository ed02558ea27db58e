/* compute/cpu_sum.c - sums over slices in the order of base/tree.h (I1).
 *
 * Contributions come in ascending positions. Between neighbours p < q, the highest bit of p ^ q is
 * the level of the lowest node that covers both, and no two such levels that meet are equal. So
 * the tree is built with a stack, like a binary counter: before q is pushed, top entries whose
 * common node is lower than the node that will join them with q are complete, and are added. The
 * stack's levels fall from bottom to top: at most log2(64) + 1 entries. Equal to splitting the list
 * by tree_split recursively, without a recursion and without a vector for every slice.
 *
 * Everything is element-wise, so long vectors are summed in chunks that stay on the C stack. A
 * single contribution is copied, never added to 0: -0.0 stays -0.0. */
#include <string.h>

#include "base/check.h"
#include "base/tree.h"
#include "compute/cpu.h"
#include "compute/cpu_vec.h"

enum { CHUNK = 128, DEPTH = 7 }; /* floats; log2(TREE_MAX_SLICES) + 1 entries */
enum { COLUMNS = 4, AHEAD = 16 }; /* sums of a vec each under way; rows asked for ahead */
_Static_assert(TREE_MAX_SLICES == 1 << (DEPTH - 1), "one entry a level and the leaf");

struct stack {
    uint32_t depth, width;      /* entries; floats of each in use */
    uint32_t pos[DEPTH];        /* a position inside each entry   */
    float sum[DEPTH][CHUNK];
};

static void copy(uint32_t n, const float *restrict from, float *restrict to)
{
    memcpy(to, from, n * sizeof(*to));
}

static void add(uint32_t n, const float *restrict v, float *restrict sum)
{
    for (uint32_t i = 0; i < n; i++) sum[i] += v[i];
}

/* Are the two top entries a node of their own, seen from the next position? */
static int complete(const struct stack *s, uint32_t next)
{
    if (s->depth < 2) return 0;
#ifdef BUG_slice_order
    (void)next;
    return 1; /* planted: from left to right */
#else
    uint32_t a = s->pos[s->depth - 2], b = s->pos[s->depth - 1];
    return (a ^ b) < (b ^ next);
#endif
}

static void join_top(struct stack *s)
{
    add(s->width, s->sum[s->depth - 1], s->sum[s->depth - 2]);
    s->depth--;
}

/* Room for the contribution of position `pos`, above all before: the caller writes s->width
 * floats there. */
static float *push(struct stack *s, uint32_t pos)
{
    while (complete(s, pos)) join_top(s);
    CHECK(s->depth < DEPTH && pos < TREE_MAX_SLICES, "I1: slices of one batch, in order");
    s->pos[s->depth] = pos;
    return s->sum[s->depth++];
}

static void finish(struct stack *s, float *out)
{
    while (s->depth > 1) join_top(s);
    copy(s->width, s->sum[0], out);
}

struct lookups { /* the look-up gradients inside dt (B,F+1,D) */
    const float *dt;
    uint32_t F, D;
    uint32_t first_slice, items_per_slice;
    uint64_t inverse;        /* 2^63 / F, rounded up                     */
    const uint32_t *end;     /* behind all items                         */
};

static inline const float *lookup(const struct lookups *v, uint32_t item)
{
    uint32_t b = (uint32_t)((unsigned __int128)item * v->inverse >> 63); /* item / F */
    return v->dt + ((size_t)item + b + 1) * v->D; /* (b (F+1) + f + 1) D */
}

/* out[0..16 (columns - 1) + last) = items' sum in list order, floats from d0 on. `columns` is a
 * constant to the compiler. */
static inline void sum_columns(const struct lookups *v, const uint32_t *item, uint32_t n,
                               uint32_t d0, uint32_t last, float *out, const uint32_t columns)
{
    vec sum[COLUMNS] = {{0}};
    for (uint32_t k = 0; k < n; k++) {
        const float *g = lookup(v, item[k]) + d0;
        if (v->end - item > k + AHEAD) {
            const float *ahead = lookup(v, item[k + AHEAD]) + d0;
#pragma GCC unroll 4
            for (uint32_t c = 0; c < columns; c++) __builtin_prefetch(ahead + c * LANES);
        }
#pragma GCC unroll 4
        for (uint32_t c = 0; c < columns; c++) {
            vec x = c + 1 < columns ? vec_load(g + c * LANES) : vec_load_n(g + c * LANES, last);
            sum[c] = k == 0 ? x : sum[c] + x;
        }
    }
#pragma GCC unroll 4
    for (uint32_t c = 0; c < columns; c++)
        vec_store(out + c * LANES, &sum[c], c + 1 < columns ? LANES : last);
}

/* out[0..width) = items' sum in list order, floats from d0 on: the uses of a row in one slice. */
static void sum_run(const struct lookups *v, const uint32_t *item, uint32_t n, uint32_t d0,
                    uint32_t width, float *out)
{
    for (uint32_t d = 0; d < width; d += COLUMNS * LANES) {
        uint32_t left = width - d, last = left % LANES == 0 ? LANES : left % LANES;
        switch ((left + LANES - 1) / LANES) {
        case 1: sum_columns(v, item, n, d0 + d, last, out + d, 1); break;
        case 2: sum_columns(v, item, n, d0 + d, last, out + d, 2); break;
        case 3: sum_columns(v, item, n, d0 + d, last, out + d, 3); break;
        case 4: sum_columns(v, item, n, d0 + d, last, out + d, 4); break;
        default: sum_columns(v, item, n, d0 + d, LANES, out + d, 4); break;
        }
    }
}

/* One row's gradient, floats [d0, d0 + s->width) of it, from its n uses. */
static void sum_uses(struct stack *s, const struct lookups *v, const uint32_t *item, uint32_t n,
                     uint32_t d0, float *out)
{
    s->depth = 0;
    for (uint32_t k = 0, end; k < n; k = end) {
        uint32_t slice = item[k] / v->items_per_slice;
        uint64_t behind = ((uint64_t)slice + 1) * v->items_per_slice;
        for (end = k + 1; end < n && item[end] < behind;) end++;
        sum_run(v, item + k, end - k, d0, s->width, push(s, v->first_slice + slice));
    }
    finish(s, out);
}

struct row_grads { struct lookups v; const struct seg_list *s; float *out; };

static void row_grads_range(void *ctx, size_t lo, size_t hi)
{
    const struct row_grads *g = ctx;
    const struct seg_list *s = g->s;
    uint32_t D = g->v.D;
    struct stack stack;
    for (size_t i = lo; i < hi; i++) {
        const uint32_t *item = s->item + s->begin[i];
        uint32_t n = s->begin[i + 1] - s->begin[i], q = g->v.items_per_slice;
        float *out = g->out + i * D;
        if (n == 1 || item[0] / q == item[n - 1] / q) { /* most rows: one use, or one slice */
            sum_run(&g->v, item, n, 0, D, out);
            continue;
        }
        for (uint32_t d0 = 0; d0 < D; d0 += CHUNK) {
            stack.width = D - d0 < CHUNK ? D - d0 : CHUNK;
            sum_uses(&stack, &g->v, item, n, d0, out + d0);
        }
    }
}

enum st cpu_row_grads(struct device *d, const float *dt, uint32_t F, uint32_t D,
                      const struct seg_list *s, uint32_t first_slice, uint32_t items_per_slice,
                      float *out)
{
    uint64_t inverse = (UINT64_C(1) << 63) / F + ((UINT64_C(1) << 63) % F != 0);
    struct lookups v = {dt, F, D, first_slice, items_per_slice, inverse, s->item + s->begin[s->n]};
    struct row_grads g = {v, s, out};
    cpu_over(d, s->n, CPU_PIECE, row_grads_range, &g);
    return ST_OK;
}

struct tree_sums { const float *from; uint32_t D; const struct seg_list *s; const uint8_t *pos;
                   float *out; };

static void tree_sum_range(void *ctx, size_t lo, size_t hi)
{
    const struct tree_sums *t = ctx;
    uint32_t D = t->D;
    struct stack stack;
    for (size_t i = lo; i < hi; i++) {
        for (uint32_t d0 = 0; d0 < D; d0 += CHUNK) {
            stack.width = D - d0 < CHUNK ? D - d0 : CHUNK;
            stack.depth = 0;
            for (uint32_t k = t->s->begin[i]; k < t->s->begin[i + 1]; k++)
                copy(stack.width, t->from + (size_t)t->s->item[k] * D + d0,
                     push(&stack, t->pos[k]));
            finish(&stack, t->out + i * D + d0);
        }
    }
}

enum st cpu_tree_sum(struct device *d, const float *from, uint32_t D, const struct seg_list *s,
                     const uint8_t *pos, float *out)
{
    struct tree_sums t = {from, D, s, pos, out};
    cpu_over(d, s->n, CPU_PIECE, tree_sum_range, &t);
    return ST_OK;
}

struct dense_sums { const float *const *part; const uint8_t *pos; uint32_t n_parts; float *out; };

static void dense_sum_range(void *ctx, size_t lo, size_t hi)
{
    const struct dense_sums *t = ctx;
    struct stack stack;
    for (size_t i = lo; i < hi; i += CHUNK) {
        stack.width = hi - i < CHUNK ? (uint32_t)(hi - i) : CHUNK;
        stack.depth = 0;
        for (uint32_t k = 0; k < t->n_parts; k++)
            copy(stack.width, t->part[k] + i, push(&stack, t->pos[k]));
        finish(&stack, t->out + i);
    }
}

enum { DENSE_PIECE = 1 << 15 }; /* floats: 128 KiB of each part */

enum st cpu_dense_sum(struct device *d, const float *const *part, const uint8_t *pos,
                      uint32_t n_parts, size_t n, float *out)
{
    struct dense_sums t = {part, pos, n_parts, out};
    cpu_over(d, n, DENSE_PIECE, dense_sum_range, &t);
    return ST_OK;
}
