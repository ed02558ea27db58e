/* The CPU device: sums over slices in tree order (I1). Bits are compared with plain f32 code of
 * this file's own, on a device with one lane and on one with four. Updates: test_cpu_update.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/tree.h"
#include "tests/support/cpu_device.h"
#include "tests/support/floats.h"

/* Lists this long are dealt to lanes in several pieces: of 1024 rows, of 32768 dense floats. */
enum { MANY_ROWS = 2500, MANY_FLOATS = 70001 };

/* --- tree order ----------------------------------------------------------------------------- */

/* Sum of leaf[lo..lo+size) as base/tree.h draws it, for one float; size a power of two. Says
 * whether any slice contributes. */
static int tree(const int *present, const float *leaf, uint32_t lo, uint32_t size, float *sum)
{
    float left, right;
    if (size == 1) {
        *sum = leaf[lo];
        return present[lo];
    }
    int has_left = tree(present, leaf, lo, size / 2, &left);
    int has_right = tree(present, leaf, lo + size / 2, size / 2, &right);
    *sum = has_left && has_right ? left + right : has_left ? left : right;
    return has_left || has_right;
}

static float tree_of(const int *present, const float *leaf)
{
    float sum = 0;
    assert_true(tree(present, leaf, 0, TREE_MAX_SLICES, &sum));
    return sum;
}

/* Slices [first, first + n) of a trainer with q samples each; uses of n_seg rows, drawn so that
 * about one item in `thin` is used at all. */
struct uses {
    uint32_t first, n_slices, q, F, D, n_seg;
    struct floats dt, out;
    uint32_t *begin, *item;
};

static struct uses uses_open(uint32_t first, uint32_t n_slices, uint32_t q, uint32_t F, uint32_t D,
                             uint32_t n_seg, uint32_t thin, uint64_t seed)
{
    struct uses u = {first, n_slices, q, F, D, n_seg, {0}, {0}, NULL, NULL};
    uint32_t items = n_slices * q * F, used = 0;
    u.dt = floats_rough((size_t)n_slices * q * (F + 1) * D, 0, seed);
    u.out = floats_open((size_t)n_seg * D, 0);
    u.begin = mem_zalloc(n_seg + 1, sizeof(*u.begin));
    u.item = mem_zalloc(items + n_seg, sizeof(*u.item));
    for (uint32_t i = 0; i < n_seg; i++) {
        uint32_t at_least_one = draw(seed, i) % items;
        for (uint32_t k = 0; k < items; k++)
            if (k == at_least_one || draw(seed, (uint64_t)i << 32 | k) % (n_seg * thin) == i)
                if (used < items + n_seg) u.item[used++] = k;
        u.begin[i + 1] = used;
    }
    return u;
}

static void uses_close(struct uses *u)
{
    floats_close(u->dt);
    floats_close(u->out);
    mem_free(u->begin);
    mem_free(u->item);
}

static float expected(const struct uses *u, uint32_t seg, uint32_t d)
{
    int present[TREE_MAX_SLICES] = {0};
    float leaf[TREE_MAX_SLICES] = {0};
    for (uint32_t k = u->begin[seg]; k < u->begin[seg + 1]; k++) {
        uint32_t b = u->item[k] / u->F, f = u->item[k] % u->F, s = u->first + b / u->q;
        float g = u->dt.p[((size_t)b * (u->F + 1) + 1 + f) * u->D + d];
        leaf[s] = present[s] ? leaf[s] + g : g;
        present[s] = 1;
    }
    return tree_of(present, leaf);
}

static void run_uses(struct device *d, struct uses *u)
{
    struct seg_list s = {u->n_seg, u->begin, u->item};
    assert_int_equal(d->ops->row_grads(d, u->dt.p, u->F, u->D, &s, u->first, u->q * u->F,
                                       u->out.p), ST_OK);
}

static void check_uses(const struct uses *u)
{
    for (uint32_t i = 0; i < u->n_seg; i++)
        for (uint32_t d = 0; d < u->D; d++) {
            float want = expected(u, i, d);
            assert_same_bits(&u->out.p[i * u->D + d], &want, 1, "row gradient");
        }
}

static void slices_are_summed_in_tree_order(void **state)
{
    static const uint32_t DIM[] = {1, 4, 16, 48};
    for (uint32_t S = 1; S <= TREE_MAX_SLICES; S++) {
        struct uses u = uses_open(0, S, 3, 2, DIM[S % 4], 5, 1 + S % 3, S);
        run_uses(dev, &u);
        check_uses(&u);
        uses_close(&u);
    }
}

static void slices_count_from_the_trainers_first(void **state)
{
    for (uint32_t first = 0; first < TREE_MAX_SLICES; first += 5)
        for (uint32_t n = 1; first + n <= TREE_MAX_SLICES; n += 6) {
            struct uses u = uses_open(first, n, 2, 3, 4, 3, 2, first * 64 + n);
            run_uses(dev, &u);
            check_uses(&u);
            uses_close(&u);
        }
}

static void long_rows_are_summed_in_the_same_order(void **state)
{
    for (uint32_t D = 127; D <= 1024; D = D < 130 ? D + 1 : D * 2) {
        struct uses u = uses_open(3, 11, 2, 2, D, 2, 1, D);
        run_uses(dev, &u);
        check_uses(&u);
        uses_close(&u);
    }
}

static void many_rows_have_the_same_bits_on_one_lane_and_on_four(void **state)
{
    struct uses u = uses_open(8, 24, 5, 4, 16, MANY_ROWS, 2, 77);
    run_uses(dev, &u);
    check_uses(&u);
    floats_close(u.out);
    u.out = floats_open((size_t)u.n_seg * u.D, 0);
    run_uses(lone, &u);
    check_uses(&u);
    uses_close(&u);
}

/* A random set of positions, never empty; ascending in pos. */
static uint32_t draw_positions(uint64_t seed, int present[TREE_MAX_SLICES],
                               uint8_t pos[TREE_MAX_SLICES])
{
    uint32_t n = 0, thin = 1 + draw(seed, 0) % 6, always = draw(seed, 1) % TREE_MAX_SLICES;
    for (uint32_t s = 0; s < TREE_MAX_SLICES; s++) {
        present[s] = s == always || draw(seed, 2 + s) % thin == 0;
        if (present[s]) pos[n++] = (uint8_t)s;
    }
    return n;
}

/* Segments of vectors at drawn positions; what is expected of them. */
struct parts {
    uint32_t n_seg, D, *begin, *item;
    uint8_t *pos;
    struct floats vec, want;
};

enum { VECS = 90 };

static void expect_parts(struct parts *p, uint32_t seg, const int present[TREE_MAX_SLICES])
{
    for (uint32_t d = 0; d < p->D; d++) {
        float leaf[TREE_MAX_SLICES] = {0};
        for (uint32_t k = p->begin[seg]; k < p->begin[seg + 1]; k++)
            leaf[p->pos[k]] = p->vec.p[p->item[k] * p->D + d];
        p->want.p[seg * p->D + d] = tree_of(present, leaf);
    }
}

static struct parts parts_open(uint32_t n_seg, uint32_t D)
{
    size_t most = (size_t)n_seg * TREE_MAX_SLICES;
    struct parts p = {n_seg, D, mem_zalloc(n_seg + 1, sizeof(uint32_t)),
                      mem_zalloc(most, sizeof(uint32_t)), mem_zalloc(most, 1),
                      floats_rough((size_t)VECS * D, 0, 21), floats_open((size_t)n_seg * D, 0)};
    for (uint32_t i = 0; i < n_seg; i++) {
        int present[TREE_MAX_SLICES];
        p.begin[i + 1] = p.begin[i] + draw_positions(100 + i, present, p.pos + p.begin[i]);
        for (uint32_t k = p.begin[i]; k < p.begin[i + 1]; k++) p.item[k] = draw(22, k) % VECS;
        expect_parts(&p, i, present);
    }
    return p;
}

static void check_parts(struct device *d, uint32_t n_seg, uint32_t D)
{
    struct parts p = parts_open(n_seg, D);
    struct floats out = floats_open(p.want.n, 0);
    struct seg_list s = {n_seg, p.begin, p.item};
    assert_int_equal(d->ops->tree_sum(d, p.vec.p, D, &s, p.pos, out.p), ST_OK);
    assert_same_bits(out.p, p.want.p, out.n, "tree sum");
    floats_close(out);
    floats_close(p.vec);
    floats_close(p.want);
    mem_free(p.begin);
    mem_free(p.item);
    mem_free(p.pos);
}

static void parts_of_rows_are_summed_in_tree_order(void **state)
{
    check_parts(dev, 60, 1);
    check_parts(dev, 60, 20);
    check_parts(dev, 60, 300);
    check_parts(dev, MANY_ROWS, 3);
    check_parts(lone, MANY_ROWS, 3);
}

static void check_dense(struct device *d, size_t n, uint64_t seed, const struct floats *all)
{
    int present[TREE_MAX_SLICES];
    uint8_t pos[TREE_MAX_SLICES];
    const float *part[TREE_MAX_SLICES];
    uint32_t n_parts = draw_positions(200 + seed, present, pos);
    struct floats out = floats_open(n, seed % 16), want = floats_open(n, 0);
    for (uint32_t k = 0; k < n_parts; k++) part[k] = all->p + pos[k] * n;
    for (size_t i = 0; i < n; i++) {
        float leaf[TREE_MAX_SLICES];
        for (uint32_t k = 0; k < TREE_MAX_SLICES; k++) leaf[k] = all->p[k * n + i];
        want.p[i] = tree_of(present, leaf);
    }
    assert_int_equal(d->ops->dense_sum(d, part, pos, n_parts, n, out.p), ST_OK);
    assert_same_bits(out.p, want.p, n, "dense sum");
    floats_close(out);
    floats_close(want);
}

static void dense_parts_are_summed_in_tree_order(void **state)
{
    struct floats some = floats_rough((size_t)TREE_MAX_SLICES * 391, 0, 31);
    struct floats many = floats_rough((size_t)TREE_MAX_SLICES * MANY_FLOATS, 0, 32);
    for (uint64_t seed = 0; seed < 40; seed++) check_dense(dev, 391, seed, &some);
    check_dense(dev, MANY_FLOATS, 40, &many);
    check_dense(lone, MANY_FLOATS, 40, &many);
    floats_close(some);
    floats_close(many);
}

/* 0 + -0.0 is +0.0: so a zero that is added anywhere shows. */
static void nothing_is_added_to_what_contributes(void **state)
{
    static const float minus_zero[2] = {-0.0f, -0.0f};
    static const uint32_t begin[] = {0, 1, 3, 6}, item[] = {4, 0, 7, 0, 1, 7};
    static const uint8_t pos[] = {9, 0, 5, 1, 2, 63};
    struct seg_list s = {3, begin, item};
    float dt[8 * 2 * 2], vec[8 * 2], out[6];
    const float *part[] = {minus_zero, minus_zero, minus_zero};
    for (int i = 0; i < 32; i++) dt[i] = -0.0f;
    for (int i = 0; i < 16; i++) vec[i] = -0.0f;
    assert_int_equal(dev->ops->row_grads(dev, dt, 1, 2, &s, 1, 2, out), ST_OK);
    for (int i = 0; i < 6; i++) assert_same_bits(&out[i], minus_zero, 1, "row_grads");
    assert_int_equal(dev->ops->tree_sum(dev, vec, 2, &s, pos, out), ST_OK);
    for (int i = 0; i < 6; i++) assert_same_bits(&out[i], minus_zero, 1, "tree_sum");
    for (uint32_t n = 1; n <= 3; n++) {
        assert_int_equal(dev->ops->dense_sum(dev, part, pos + 3, n, 2, out), ST_OK);
        assert_same_bits(out, minus_zero, 2, "dense_sum");
    }
}

static void lists_without_entries_are_no_work(void **state)
{
    static const uint32_t begin[1] = {0};
    struct seg_list none = {0, begin, NULL};
    struct floats f = floats_random(64, 0, 65), before = floats_random(64, 0, 65);
    const float *part[] = {f.p};
    const uint8_t pos[] = {0};
    assert_int_equal(dev->ops->row_grads(dev, f.p, 1, 4, &none, 0, 4, f.p), ST_OK);
    assert_int_equal(dev->ops->tree_sum(dev, f.p, 4, &none, NULL, f.p), ST_OK);
    assert_int_equal(dev->ops->dense_sum(dev, part, pos, 1, 0, f.p), ST_OK);
    assert_same_bits(f.p, before.p, 64, "everything");
    floats_close(f);
    floats_close(before);
}

enum { SPLIT_N = 5 }; /* floats of a part */

struct node_sums {
    uint32_t n;
    uint8_t pos[TREE_MAX_SLICES];
    float sum[TREE_MAX_SLICES][SPLIT_N];
};

/* One trainer's share: a sum for each maximal node of its slices. leaf (S, SPLIT_N) */
static void add_node_sums(uint32_t lo, uint32_t hi, uint32_t S, const float *leaf,
                          struct node_sums *out)
{
    struct tree_node node[TREE_MAX_NODES];
    uint32_t n = tree_nodes(lo, hi, S, node);
    for (uint32_t k = 0; k < n; k++) {
        const float *part[TREE_MAX_SLICES];
        uint8_t pos[TREE_MAX_SLICES];
        uint32_t parts = 0;
        for (uint32_t s = node[k].pos; s < node[k].end; s++) {
            pos[parts] = (uint8_t)s;
            part[parts++] = leaf + (size_t)s * SPLIT_N;
        }
        float *sum = out->sum[out->n];
        assert_int_equal(dev->ops->dense_sum(dev, part, pos, parts, SPLIT_N, sum), ST_OK);
        out->pos[out->n++] = node[k].pos;
    }
}

static void check_split(uint32_t n_trainers, uint32_t S, const float *leaf, const float *want)
{
    struct node_sums nodes = {0};
    const float *part[TREE_MAX_SLICES];
    float got[SPLIT_N];
    for (uint32_t t = 0; t < n_trainers; t++)
        add_node_sums(tree_run_start(t, n_trainers, S), tree_run_start(t + 1, n_trainers, S), S,
                      leaf, &nodes);
    for (uint32_t k = 0; k < nodes.n; k++) part[k] = nodes.sum[k];
    assert_int_equal(dev->ops->dense_sum(dev, part, nodes.pos, nodes.n, SPLIT_N, got), ST_OK);
    assert_same_bits(got, want, SPLIT_N, "sum of sums");
}

/* What trainers do: each sums its run's nodes, the nodes' sums are summed. For any split, the
 * bits of the whole (I1). */
static void any_split_over_trainers_gives_the_same_bits(void **state)
{
    struct floats leaf = floats_rough((size_t)TREE_MAX_SLICES * SPLIT_N, 0, 41);
    for (uint32_t S = 1; S <= TREE_MAX_SLICES; S++) {
        int present[TREE_MAX_SLICES] = {0};
        float want[SPLIT_N], one[TREE_MAX_SLICES];
        for (uint32_t s = 0; s < S; s++) present[s] = 1;
        for (uint32_t i = 0; i < SPLIT_N; i++) {
            for (uint32_t s = 0; s < S; s++) one[s] = leaf.p[s * SPLIT_N + i];
            want[i] = tree_of(present, one);
        }
        for (uint32_t n = 1; n <= S; n++) check_split(n, S, leaf.p, want);
    }
    floats_close(leaf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_are_summed_in_tree_order),
        cmocka_unit_test(slices_count_from_the_trainers_first),
        cmocka_unit_test(long_rows_are_summed_in_the_same_order),
        cmocka_unit_test(many_rows_have_the_same_bits_on_one_lane_and_on_four),
        cmocka_unit_test(parts_of_rows_are_summed_in_tree_order),
        cmocka_unit_test(dense_parts_are_summed_in_tree_order),
        cmocka_unit_test(nothing_is_added_to_what_contributes),
        cmocka_unit_test(lists_without_entries_are_no_work),
        cmocka_unit_test(any_split_over_trainers_gives_the_same_bits),
    };
    return cmocka_run_group_tests(tests, cpu_devices_open, cpu_devices_close);
}
