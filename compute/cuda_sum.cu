/* compute/cuda_sum.cu - sums over slices in the order of base/tree.h (I1): bit for bit what
 * compute/cpu_sum.c gives, since both only add, in the same order.
 *
 * The tree is built as by a binary counter. `leaf` is the sum that is under way, of position pos
 * and of what was below it; node[l] is a complete left child of level l that waits for its right
 * one, where bit l of `waiting` is set. When the next position differs from pos in bit h at the
 * highest, leaf is complete up to level h: it joins what waits below h, and waits at h itself. */
#include "compute/cuda_kernels.h"

#include "compute/cuda_kernel.h"

enum { LEVELS = 6 };         /* log2 of the most slices, 64                                    */

struct tree {
    float4 node[LEVELS], leaf;
    uint32_t waiting, pos;
};

DEVICE void tree_start(struct tree *t, uint32_t pos, float4 v)
{
    UNROLL
    for (uint32_t l = 0; l < LEVELS; l++) t->node[l] = fill4(0.0f);
    t->leaf = v;
    t->waiting = 0;
    t->pos = pos;
}

/* The next contribution, at a position above all before. */
DEVICE void tree_push(struct tree *t, uint32_t pos, float4 v)
{
    uint32_t h = 31 - (uint32_t)__clz((int)(t->pos ^ pos));
    UNROLL
    for (uint32_t l = 0; l < LEVELS; l++) {
        if (l < h && (t->waiting >> l & 1)) t->leaf = add4(t->node[l], t->leaf);
        if (l == h) t->node[l] = t->leaf;
    }
    t->waiting = (t->waiting >> h | 1) << h;
    t->leaf = v;
    t->pos = pos;
}

DEVICE float4 tree_end(const struct tree *t)
{
    float4 sum = t->leaf;
    UNROLL
    for (uint32_t l = 0; l < LEVELS; l++)
        if (t->waiting >> l & 1) sum = add4(t->node[l], sum);
    return sum;
}

/* --- gradients of rows ---------------------------------------------------------------------- */
/* Most rows are used once: a copy. Up to LONG uses are summed by the row's threads, one after the
 * other. Rows with more are for a second kernel. */

enum { LONG = 64, AHEAD = 4 };

struct grads_args {
    const float *dt;                 /* (B, F + 1, D)                                        */
    const uint32_t *begin, *item;
    float *out;                      /* (n, D)                                               */
    uint32_t n, F, D, quads;
    uint32_t first_slice, items_per_slice;
    int by4;
};

/* The gradient of look-up `item`, from float d on. */
DEVICE const float *lookup(const struct grads_args *a, uint32_t item, uint32_t d)
{
    return a->dt + ((size_t)item + item / a->F + 1) * a->D + d; /* (b (F + 1) + f + 1) D */
}

DEVICE uint64_t slice_end(const struct grads_args *a, uint32_t slice)
{
    return ((uint64_t)slice + 1) * a->items_per_slice;
}

/* Quad d / 4 of one row's gradient, from its n >= 2 uses: AHEAD loads are on their way at once. */
DEVICE float4 sum_uses(const struct grads_args *a, const uint32_t *item, uint32_t n, uint32_t d)
{
    struct tree t;
    uint32_t left = a->D - d, slice = item[0] / a->items_per_slice;
    uint64_t end = slice_end(a, slice);
    tree_start(&t, a->first_slice + slice, load4(lookup(a, item[0], d), left, a->by4));
    UNROLL_NOT
    for (uint32_t k0 = 1; k0 < n; k0 += AHEAD) {
        uint32_t use[AHEAD];
        float4 g[AHEAD];
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++) use[k] = k0 + k < n ? item[k0 + k] : item[n - 1];
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++) g[k] = load4(lookup(a, use[k], d), left, a->by4);
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++) {
            if (k0 + k >= n) continue;
            if (use[k] < end) {
                t.leaf = add4(t.leaf, g[k]);
                continue;
            }
            slice = use[k] / a->items_per_slice;
            end = slice_end(a, slice);
            tree_push(&t, a->first_slice + slice, g[k]);
        }
    }
    return tree_end(&t);
}

KERNEL(short_grads, grads_args, a, BLOCK)
{
    uint32_t begin[ROWS_EACH], uses[ROWS_EACH], item[ROWS_EACH];
    UNROLL
    for (uint32_t k = 0; k < ROWS_EACH; k++) {
        uint32_t i = my_row(k);
        begin[k] = i < a.n ? a.begin[i] : 0;
        uses[k] = i < a.n ? a.begin[i + 1] - begin[k] : 0;
    }
    UNROLL
    for (uint32_t k = 0; k < ROWS_EACH; k++) item[k] = uses[k] == 1 ? a.item[begin[k]] : 0;
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x) {
        uint32_t d = 4 * q, left = a.D - d;
        float4 v[ROWS_EACH];
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++)
            v[k] = uses[k] == 1 ? load4(lookup(&a, item[k], d), left, a.by4) : fill4(0.0f);
        UNROLL
        for (uint32_t k = 0; k < ROWS_EACH; k++)
            if (uses[k] == 1) store4(a.out + (size_t)my_row(k) * a.D + d, left, a.by4, v[k]);
    }
    UNROLL_NOT
    for (uint32_t k = 0; k < ROWS_EACH; k++) {
        uint32_t i = my_row(k), from = i < a.n ? a.begin[i] : 0;
        uint32_t n = i < a.n ? a.begin[i + 1] - from : 0;
        if (n < 2 || n > LONG) continue;
        for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x)
            store4(a.out + (size_t)i * a.D + 4 * q, a.D - 4 * q, a.by4,
                   sum_uses(&a, a.item + from, n, 4 * q));
    }
}

/* --- rows with many uses -------------------------------------------------------------------- */
/* A block takes COLS floats of such a row: one memory sector of each use, so that a row that every
 * sample uses is read by many blocks. It sums up SLICES slices beside each other, each COLS threads
 * adding one use after the other. They read shared memory, into which all threads copy the uses,
 * ROWS of each slice at a time, BUFFERS - 1 such steps ahead. At last the slices' sums are summed
 * in the tree. */

enum { COLS = 8, SLICES = 8, ROWS = 32, BUFFERS = 4, MOST_SLICES = 1 << LEVELS };
enum { SLICE_FLOATS = ROWS * COLS + COLS };      /* slices start in different banks            */
enum { SCAN = 8, LONG_BLOCKS = 512 };            /* neighbouring rows that a block looks at    */

struct long_shared {
    float row[BUFFERS][SLICES * SLICE_FLOATS];   /* [slice][use][COLS]                         */
    float sum[MOST_SLICES][COLS];
    uint32_t bound[MOST_SLICES + 1];             /* slice's uses: [bound[i], bound[i + 1])     */
    uint32_t found[BLOCK], n_found;              /* rows with many uses                        */
};

/* The first of item[0..n) that is not below `at`. */
DEVICE uint32_t lower_bound(const uint32_t *item, uint32_t n, uint64_t at)
{
    uint32_t lo = 0;
    while (lo < n) {
        uint32_t middle = lo + (n - lo) / 2;
        if (item[middle] < at)
            lo = middle + 1;
        else
            n = middle;
    }
    return lo;
}

/* Floats [d0, d0 + COLS) of one use. */
DEVICE void bring_use(const struct grads_args *a, uint32_t item, uint32_t d0, float *to)
{
    const float *from = lookup(a, item, d0);
    uint32_t n = a->D - d0 < COLS ? a->D - d0 : COLS;
    if (a->by4) {
        for (uint32_t c = 0; c < n; c += 4) COPY_ASYNC(to + c, from + c, 16);
    } else {
        for (uint32_t c = 0; c < n; c++) COPY_ASYNC(to + c, from + c, 4);
    }
}

/* n uses in a column on top of sum. */
DEVICE float add_column(const float *row, uint32_t n, float sum)
{
    uint32_t r = 0;
    for (; r + 8 <= n; r += 8) {
        float v[8];
        UNROLL
        for (uint32_t k = 0; k < 8; k++) v[k] = row[(r + k) * COLS];
        UNROLL
        for (uint32_t k = 0; k < 8; k++) sum += v[k];
    }
    for (; r < n; r++) sum += row[r * COLS];
    return sum;
}

/* Slices [s0, s0 + SLICES) of a row: s->sum of those that have uses. A sum starts as -0, which is
 * no summand: -0 + x is x for every x. */
DEVICE void sum_slices(const struct grads_args *a, const uint32_t *item, uint32_t d0, uint32_t s0,
                       struct long_shared *s)
{
    const uint32_t *bound = s->bound + s0;
    uint32_t t = threadIdx.x, most = 0;
    uint32_t slice = t / ROWS, k = bound[slice] + t % ROWS, end = bound[slice + 1];
    float *mine = s->row[0] + slice * SLICE_FLOATS + t % ROWS * COLS;
    for (uint32_t i = 0; i < SLICES; i++)
        most = bound[i + 1] - bound[i] > most ? bound[i + 1] - bound[i] : most;
    uint32_t steps = (most + ROWS - 1) / ROWS, next = k < end ? item[k] : 0;
    uint32_t sums = t / COLS, column = t % COLS; /* for the first SLICES * COLS threads */
    float sum = -0.0f;
    for (uint32_t step = 0; step < steps + BUFFERS - 1; step++, k += ROWS) {
        uint32_t use = next;
        next = k < end && end - k > ROWS ? item[k + ROWS] : 0; /* one step ahead of its row */
        if (k < end) bring_use(a, use, d0, mine + step % BUFFERS * (SLICES * SLICE_FLOATS));
        COPY_COMMIT();
        if (step < BUFFERS - 1) continue;
        COPY_WAIT(BUFFERS - 1);
        __syncthreads();
        uint32_t done = (step - (BUFFERS - 1)) * ROWS;
        if (t < SLICES * COLS && bound[sums] + done < bound[sums + 1]) {
            uint32_t left = bound[sums + 1] - bound[sums] - done;
            const float *row = s->row[(step + 1) % BUFFERS] + sums * SLICE_FLOATS + column;
            sum = add_column(row, left < ROWS ? left : ROWS, sum);
        }
        __syncthreads();
    }
    if (t < SLICES * COLS) s->sum[s0 + sums][column] = sum;
}

DEVICE float4 tree_of_slices(const struct grads_args *a, const struct long_shared *s, uint32_t c)
{
    struct tree t;
    uint32_t i = 0;
    while (s->bound[i + 1] == 0) i++; /* the first slice with uses */
    tree_start(&t, a->first_slice + i, *(const float4 *)&s->sum[i][c]);
    UNROLL_NOT
    for (i++; i < MOST_SLICES; i++)
        if (s->bound[i] != s->bound[i + 1])
            tree_push(&t, a->first_slice + i, *(const float4 *)&s->sum[i][c]);
    return tree_end(&t);
}

DEVICE void sum_long(const struct grads_args *a, uint32_t row, uint32_t d0, struct long_shared *s)
{
    const uint32_t *item = a->item + a->begin[row];
    uint32_t n = a->begin[row + 1] - a->begin[row], t = threadIdx.x, d = d0 + 4 * t;
    if (t <= MOST_SLICES) s->bound[t] = lower_bound(item, n, (uint64_t)t * a->items_per_slice);
    __syncthreads();
    for (uint32_t s0 = 0; s0 < MOST_SLICES && s->bound[s0] < n; s0 += SLICES)
        sum_slices(a, item, d0, s0, s);
    __syncthreads();
    if (4 * t < COLS && d < a->D)
        store4(a->out + (size_t)row * a->D + d, a->D - d, a->by4, tree_of_slices(a, s, 4 * t));
    __syncthreads(); /* s is free again */
}

/* A block looks at SCAN rows beside each other, then at SCAN others far away, as long rows are
 * often neighbours: so many blocks have some. */
KERNEL_THAT_WAITS(long_grads, grads_args, a, BLOCK)
{
    SHARED(struct long_shared, s);
    uint32_t t = threadIdx.x;
    uint64_t mine = (uint64_t)(t / SCAN) * gridDim.x * SCAN + blockIdx.x * SCAN + t % SCAN;
    for (uint64_t base = 0; base < a.n; base += (uint64_t)gridDim.x * BLOCK) {
        uint64_t i = base + mine;
        if (t == 0) s->n_found = 0;
        __syncthreads();
        if (i < a.n && a.begin[i + 1] - a.begin[i] > LONG)
            s->found[atomicAdd(&s->n_found, 1u)] = (uint32_t)i;
        __syncthreads();
        for (uint32_t k = 0; k < s->n_found; k++) sum_long(&a, s->found[k], blockIdx.y * COLS, s);
        __syncthreads();
    }
}

cudaError_t cuda_row_grads(cudaStream_t s, const float *dt, uint32_t F, uint32_t D, uint32_t n,
                           const uint32_t *begin, const uint32_t *item, uint32_t first_slice,
                           uint32_t items_per_slice, float *out)
{
    struct grads_args a = {dt, begin, item, out, n, F, D, quads_of(D), first_slice,
                           items_per_slice, is_by4(dt, D, D) && is_by4(out, D, D)};
    if (n == 0 || D == 0) return cudaSuccess;
    dim3 block = row_block(a.quads);
    uint32_t blocks = ceil_div(n, BLOCK);
    cudaError_t e = LAUNCH(s, short_grads, row_grid(n, block), block, 0, &a);
    if (e != cudaSuccess) return e;
    return LAUNCH(s, long_grads, dim(blocks < LONG_BLOCKS ? blocks : LONG_BLOCKS,
                                     ceil_div(D, COLS)),
                  dim(BLOCK, 1), sizeof(struct long_shared), &a);
}

/* --- sums of vectors at positions ----------------------------------------------------------- */

struct tree_args {
    const float *vec;                /* (any number, D)                                      */
    const uint32_t *begin, *item;
    const uint8_t *pos;              /* beside item                                          */
    float *out;                      /* (n, D)                                               */
    uint32_t n, D, quads;
    int by4;
};

DEVICE float4 sum_parts(const struct tree_args *a, uint32_t from, uint32_t to, uint32_t d)
{
    struct tree t;
    uint32_t left = a->D - d;
    tree_start(&t, a->pos[from], load4(a->vec + (size_t)a->item[from] * a->D + d, left, a->by4));
    UNROLL_NOT
    for (uint32_t k0 = from + 1; k0 < to; k0 += AHEAD) {
        float4 v[AHEAD];
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++) {
            uint32_t at = k0 + k < to ? k0 + k : to - 1;
            v[k] = load4(a->vec + (size_t)a->item[at] * a->D + d, left, a->by4);
        }
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++)
            if (k0 + k < to) tree_push(&t, a->pos[k0 + k], v[k]);
    }
    return tree_end(&t);
}

KERNEL(tree_sum, tree_args, a, BLOCK)
{
    uint32_t i = blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= a.n || a.begin[i] == a.begin[i + 1]) return;
    for (uint32_t q = threadIdx.x; q < a.quads; q += blockDim.x)
        store4(a.out + (size_t)i * a.D + 4 * q, a.D - 4 * q, a.by4,
               sum_parts(&a, a.begin[i], a.begin[i + 1], 4 * q));
}

cudaError_t cuda_tree_sum(cudaStream_t s, const float *vec, uint32_t D, uint32_t n,
                          const uint32_t *begin, const uint32_t *item, const uint8_t *pos,
                          float *out)
{
    struct tree_args a = {vec, begin, item, pos, out, n, D, quads_of(D),
                          is_by4(vec, D, D) && is_by4(out, D, D)};
    if (n == 0 || D == 0) return cudaSuccess;
    dim3 block = row_block(a.quads);
    return LAUNCH(s, tree_sum, dim(ceil_div(n, block.y), 1), block, 0, &a);
}

struct parts_args {
    struct cuda_parts parts;
    float *out;
    size_t n;
    int by4;
};

KERNEL(dense_sum, parts_args, a, BLOCK)
{
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= a.n) return;
    uint32_t left = a.n - i < 4 ? (uint32_t)(a.n - i) : 4, n = a.parts.n;
    int by4 = a.by4 && left == 4;
    struct tree t;
    tree_start(&t, a.parts.pos[0], load4(a.parts.part[0] + i, left, by4));
    UNROLL_NOT
    for (uint32_t k0 = 1; k0 < n; k0 += AHEAD) {
        float4 v[AHEAD];
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++)
            v[k] = load4(a.parts.part[k0 + k < n ? k0 + k : n - 1] + i, left, by4);
        UNROLL
        for (uint32_t k = 0; k < AHEAD; k++)
            if (k0 + k < n) tree_push(&t, a.parts.pos[k0 + k], v[k]);
    }
    store4(a.out + i, left, by4, tree_end(&t));
}

cudaError_t cuda_dense_sum(cudaStream_t s, const struct cuda_parts *parts, size_t n, float *out)
{
    struct parts_args a = {*parts, out, n, is_by4(out, 4, 4)};
    if (n == 0) return cudaSuccess;
    if (parts->n == 0) return cudaErrorInvalidValue;
    for (uint32_t k = 0; k < parts->n; k++) a.by4 = a.by4 && is_by4(parts->part[k], 4, 4);
    return LAUNCH(s, dense_sum, dim(ceil_div(n, 4 * BLOCK), 1), dim(BLOCK, 1), 0, &a);
}
