/* The CPU device: sums over slices in tree order (I1), and optimizer steps. Bits are compared with
 * plain f32 code of this file's own. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/tree.h"
#include "compute/device.h"
#include "tests/support/floats.h"

static struct device *dev;

static int open_device(void **state)
{
    struct device_cfg cfg = {.lanes = 4};
    return device_open(DEVICE_CPU, &cfg, &dev) == ST_OK ? 0 : -1;
}

static int close_device(void **state)
{
    device_close(dev);
    return mem_live() == 0 ? 0 : -1;
}

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

static void run_uses(struct uses *u, uint32_t lane, uint32_t lo, uint32_t hi)
{
    struct seg_list s = {u->n_seg, u->begin, u->item};
    assert_int_equal(dev->ops->row_grads(dev, lane, u->dt.p, u->F, u->D, &s, lo, hi, u->first,
                                         u->q * u->F, u->out.p), ST_OK);
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
        run_uses(&u, 0, 0, u.n_seg);
        check_uses(&u);
        uses_close(&u);
    }
}

static void slices_count_from_the_trainers_first(void **state)
{
    for (uint32_t first = 0; first < TREE_MAX_SLICES; first += 5)
        for (uint32_t n = 1; first + n <= TREE_MAX_SLICES; n += 6) {
            struct uses u = uses_open(first, n, 2, 3, 4, 3, 2, first * 64 + n);
            run_uses(&u, 0, 0, u.n_seg);
            check_uses(&u);
            uses_close(&u);
        }
}

static void long_rows_are_summed_in_the_same_order(void **state)
{
    for (uint32_t D = 127; D <= 1024; D = D < 130 ? D + 1 : D * 2) {
        struct uses u = uses_open(3, 11, 2, 2, D, 2, 1, D);
        run_uses(&u, 0, 0, u.n_seg);
        check_uses(&u);
        uses_close(&u);
    }
}

struct part { struct uses *u; uint32_t lane, lo, hi; };

static void *run_part(void *arg)
{
    struct part *p = arg;
    run_uses(p->u, p->lane, p->lo, p->hi);
    return NULL;
}

static void segments_may_be_dealt_to_threads(void **state)
{
    struct uses u = uses_open(8, 24, 5, 4, 16, 101, 1, 77);
    pthread_t thread[4];
    struct part part[4];
    for (uint32_t t = 0; t < 4; t++) {
        part[t] = (struct part){&u, t, t * 101 / 4, (t + 1) * 101 / 4};
        assert_int_equal(pthread_create(&thread[t], NULL, run_part, &part[t]), 0);
    }
    for (int t = 0; t < 4; t++) pthread_join(thread[t], NULL);
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

static void check_parts(uint32_t D)
{
    enum { SEGS = 60, VECS = 90 };
    struct floats vec = floats_rough((size_t)VECS * D, 0, 21), out = floats_open(SEGS * D, 0);
    uint32_t begin[SEGS + 1] = {0}, item[SEGS * TREE_MAX_SLICES];
    uint8_t pos[SEGS * TREE_MAX_SLICES];
    int present[SEGS][TREE_MAX_SLICES];
    for (uint32_t i = 0; i < SEGS; i++)
        begin[i + 1] = begin[i] + draw_positions(100 + i, present[i], pos + begin[i]);
    for (uint32_t k = 0; k < begin[SEGS]; k++) item[k] = draw(22, k) % VECS;
    struct seg_list s = {SEGS, begin, item};
    assert_int_equal(dev->ops->tree_sum(dev, 0, vec.p, D, &s, pos, 0, SEGS / 2, out.p), ST_OK);
    assert_int_equal(dev->ops->tree_sum(dev, 1, vec.p, D, &s, pos, SEGS / 2, SEGS, out.p), ST_OK);
    for (uint32_t i = 0; i < SEGS; i++)
        for (uint32_t d = 0; d < D; d++) {
            float leaf[TREE_MAX_SLICES] = {0};
            for (uint32_t k = begin[i]; k < begin[i + 1]; k++)
                leaf[pos[k]] = vec.p[item[k] * D + d];
            float want = tree_of(present[i], leaf);
            assert_same_bits(&out.p[i * D + d], &want, 1, "tree sum");
        }
    floats_close(vec);
    floats_close(out);
}

static void parts_of_rows_are_summed_in_tree_order(void **state)
{
    check_parts(1);
    check_parts(20);
    check_parts(300);
}

static void dense_parts_are_summed_in_tree_order(void **state)
{
    enum { N = 391 };
    struct floats all = floats_rough((size_t)TREE_MAX_SLICES * N, 0, 31);
    for (uint64_t seed = 0; seed < 40; seed++) {
        int present[TREE_MAX_SLICES];
        uint8_t pos[TREE_MAX_SLICES];
        const float *part[TREE_MAX_SLICES];
        uint32_t n_parts = draw_positions(200 + seed, present, pos);
        struct floats out = floats_open(N, seed % 16);
        for (uint32_t k = 0; k < n_parts; k++) part[k] = all.p + (size_t)pos[k] * N;
        assert_int_equal(dev->ops->dense_sum(dev, part, pos, n_parts, N, out.p), ST_OK);
        for (uint32_t i = 0; i < N; i++) {
            float leaf[TREE_MAX_SLICES];
            for (uint32_t k = 0; k < TREE_MAX_SLICES; k++) leaf[k] = all.p[(size_t)k * N + i];
            float want = tree_of(present, leaf);
            assert_same_bits(&out.p[i], &want, 1, "dense sum");
        }
        floats_close(out);
    }
    floats_close(all);
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
    assert_int_equal(dev->ops->row_grads(dev, 0, dt, 1, 2, &s, 0, 3, 1, 2, out), ST_OK);
    for (int i = 0; i < 6; i++) assert_same_bits(&out[i], minus_zero, 1, "row_grads");
    assert_int_equal(dev->ops->tree_sum(dev, 0, vec, 2, &s, pos, 0, 3, out), ST_OK);
    for (int i = 0; i < 6; i++) assert_same_bits(&out[i], minus_zero, 1, "tree_sum");
    for (uint32_t n = 1; n <= 3; n++) {
        assert_int_equal(dev->ops->dense_sum(dev, part, pos + 3, n, 2, out), ST_OK);
        assert_same_bits(out, minus_zero, 2, "dense_sum");
    }
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

/* --- updates -------------------------------------------------------------------------------- */

static const enum optimizer KIND[] = {OPT_SGD, OPT_ADAGRAD, OPT_ROWWISE_ADAGRAD};

/* The formulas of device.h for one row, a rounding an operation. */
static void step_row(const struct opt_step *o, uint32_t D, const float *g, float *w, float *state)
{
    float squares = 0;
    for (uint32_t j = 0; j < D; j++) squares = squares + g[j] * g[j];
    if (o->kind == OPT_ROWWISE_ADAGRAD) *state = *state + squares / (float)D;
    for (uint32_t j = 0; j < D; j++) {
        float s = o->kind == OPT_ROWWISE_ADAGRAD ? *state : 0;
        if (o->kind == OPT_ADAGRAD) s = state[j] = state[j] + g[j] * g[j];
        float by = o->learning_rate * g[j];
        w[j] = w[j] - (o->kind == OPT_SGD ? by : by / (sqrtf(s) + o->epsilon));
    }
}

static void step_record(const struct opt_step *o, uint32_t D, const float *g, float *record)
{
    step_row(o, D, g, record, record + D);
}

static void rows_step_as_the_formulas_say(void **state)
{
    enum { CAP = 12, N = 5 };
    static const uint32_t SLOT[N] = {11, 0, 3, 4, 7};
    for (int i = 0; i < 3 * 4; i++) {
        uint32_t D = (uint32_t[]){1, 4, 16, 48}[i / 3], stride = 2 * D + 1, bad = 99;
        struct opt_step o = {KIND[i % 3], 0.37f, 1e-8f};
        struct floats table = floats_random((size_t)CAP * stride, 0, 51);
        struct floats want = floats_random((size_t)CAP * stride, 0, 51);
        for (int iteration = 0; iteration < 3; iteration++) {
            struct floats g = floats_rough((size_t)N * D, 0, 52 + (uint64_t)iteration);
            for (size_t k = 0; k < table.n && iteration == 0; k++) /* state is not negative */
                want.p[k] = table.p[k] = fabsf(table.p[k]);
            for (uint32_t r = 0; r < N; r++)
                step_record(&o, D, g.p + r * D, want.p + SLOT[r] * stride);
            assert_int_equal(dev->ops->row_update(dev, &o, table.p, stride, D, SLOT, g.p, N, &bad),
                             ST_OK);
            assert_same_bits(table.p, want.p, table.n, "table");
            floats_close(g);
        }
        assert_int_equal(bad, 99);
        floats_close(table);
        floats_close(want);
    }
}

static void dense_weights_step_as_the_formulas_say(void **state)
{
    enum { N = 1003 };
    for (int i = 0; i < 3; i++) {
        struct opt_step o = {KIND[i], 0.05f, 1e-4f};
        struct opt_step element = {KIND[i] == OPT_SGD ? OPT_SGD : OPT_ADAGRAD, 0.05f, 1e-4f};
        struct floats w = floats_random(N, 0, 61), want = floats_random(N, 0, 61);
        struct floats s = floats_open(N, 0), want_s = floats_open(N, 0), g = floats_rough(N, 0, 62);
        memset(s.p, 0, N * sizeof(float));
        memset(want_s.p, 0, N * sizeof(float));
        for (int iteration = 0; iteration < 3; iteration++) {
            for (uint32_t k = 0; k < N; k++)
                step_row(&element, 1, g.p + k, want.p + k, want_s.p + k);
            assert_int_equal(dev->ops->dense_update(dev, &o, w.p, s.p, g.p, N), ST_OK);
            assert_same_bits(w.p, want.p, N, "weights");
            assert_same_bits(s.p, want_s.p, N, "state");
        }
        floats_close(w);
        floats_close(want);
        floats_close(s);
        floats_close(want_s);
        floats_close(g);
    }
}

static void a_gradient_that_is_not_finite_stops_before_its_row(void **state)
{
    enum { D = 19, N = 4 };
    static const uint32_t SLOT[N] = {3, 1, 0, 2};
    for (int i = 0; i < 3 * 3 * D; i++) {
        struct opt_step o = {KIND[i % 3], 0.1f, 1e-8f};
        uint32_t stride = 2 * D, bad = 99;
        struct floats table = floats_open(N * stride, 0), want = floats_open(N * stride, 0);
        struct floats g = floats_random(N * D, 0, 71);
        for (size_t k = 0; k < table.n; k++) want.p[k] = table.p[k] = 1.0f;
        g.p[2 * D + i / 9] = (float[]){NAN, INFINITY, -INFINITY}[i / 3 % 3];
        for (uint32_t r = 0; r < 2; r++)
            step_record(&o, D, g.p + r * D, want.p + SLOT[r] * stride);
        assert_int_equal(dev->ops->row_update(dev, &o, table.p, stride, D, SLOT, g.p, N, &bad),
                         ST_DATA);
        assert_int_equal(bad, 2);
        assert_same_bits(table.p, want.p, table.n, "table");
        floats_close(table);
        floats_close(want);
        floats_close(g);
    }
}

static void dense_weights_are_not_touched_by_a_gradient_that_is_not_finite(void **state)
{
    enum { N = 100 };
    struct opt_step o = {OPT_ADAGRAD, 0.1f, 1e-8f};
    for (uint32_t at = 0; at < N; at++) {
        struct floats w = floats_random(N, 0, 81), s = floats_random(N, 0, 82);
        struct floats w0 = floats_random(N, 0, 81), s0 = floats_random(N, 0, 82);
        struct floats g = floats_random(N, 0, 83);
        g.p[at] = (float[]){NAN, INFINITY, -INFINITY}[at % 3];
        assert_int_equal(dev->ops->dense_update(dev, &o, w.p, s.p, g.p, N), ST_DATA);
        assert_same_bits(w.p, w0.p, N, "weights");
        assert_same_bits(s.p, s0.p, N, "state");
        floats_close(w);
        floats_close(s);
        floats_close(w0);
        floats_close(s0);
        floats_close(g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_are_summed_in_tree_order),
        cmocka_unit_test(slices_count_from_the_trainers_first),
        cmocka_unit_test(long_rows_are_summed_in_the_same_order),
        cmocka_unit_test(segments_may_be_dealt_to_threads),
        cmocka_unit_test(parts_of_rows_are_summed_in_tree_order),
        cmocka_unit_test(dense_parts_are_summed_in_tree_order),
        cmocka_unit_test(nothing_is_added_to_what_contributes),
        cmocka_unit_test(any_split_over_trainers_gives_the_same_bits),
        cmocka_unit_test(rows_step_as_the_formulas_say),
        cmocka_unit_test(dense_weights_step_as_the_formulas_say),
        cmocka_unit_test(a_gradient_that_is_not_finite_stops_before_its_row),
        cmocka_unit_test(dense_weights_are_not_touched_by_a_gradient_that_is_not_finite),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
