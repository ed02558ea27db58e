/* Plans on the wire: random plans survive bit for bit; plans that a trainer could not follow are
 * refused, one broken rule at a time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "proto/codec.h"
#include "proto/oracle.pb-c.h"
#include "tests/support/hostile.h"

static const struct rpc_header HEADER = {.job = 7, .attempt = 2, .role = ROLE_ORACLE, .rank = 0,
                                         .iteration = 12};
static const struct plan_limits LIMITS = {.n_trainers = 3, .n_tables = 5, .dense_features = 4,
                                          .cap_rows = 1000};
enum { ARENA_BYTES = 1 << 16 };

/* --- random plans -------------------------------------------------------------------------- */

struct maker { uint64_t s; uint8_t *arena; size_t used; };

static void *take(struct maker *k, size_t n, size_t size)
{
    void *p = k->arena + k->used;
    k->used += (n * size + 7) / 8 * 8;
    assert_true(k->used <= ARENA_BYTES);
    return p;
}

static uint32_t up_to(struct maker *k, uint64_t most)
{
    return (uint32_t)(test_rand(&k->s) % (most + 1));
}

static uint32_t *slots(struct maker *k, size_t n, uint64_t limit)
{
    uint32_t *p = take(k, n, sizeof(*p));
    for (size_t i = 0; i < n; i++) p[i] = up_to(k, limit - 1);
    return p;
}

static uint8_t *bytes(struct maker *k, size_t n, uint64_t most)
{
    uint8_t *p = take(k, n, 1);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)up_to(k, most);
    return p;
}

static int64_t *numbers(struct maker *k, size_t n, int64_t least)
{
    int64_t *p = take(k, n, sizeof(*p));
    for (size_t i = 0; i < n; i++) p[i] = least + (int64_t)(test_rand(&k->s) >> 2);
    if (n > 0) p[0] = least;
    return p;
}

static uint64_t *row_ids(struct maker *k, size_t n)
{
    uint64_t *p = take(k, n, sizeof(*p));
    for (size_t i = 0; i < n; i++)
        p[i] = row_id(up_to(k, LIMITS.n_tables - 1), test_rand(&k->s) >> 16);
    return p;
}

static float *floats(struct maker *k, size_t n)
{
    static const uint32_t ODD[] = {0x7fc00001, 0xff800123, 0x80000000, 1, 0x7f800000};
    float *p = take(k, n, sizeof(*p));
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = up_to(k, 3) == 0 ? ODD[i % 5] : (uint32_t)test_rand(&k->s);
        memcpy(&p[i], &bits, sizeof(bits));
    }
    return p;
}

static struct plan_grads grads(struct maker *k, uint32_t n)
{
    return (struct plan_grads){.n = n, .n_urgent = up_to(k, n),
                               .slot = slots(k, n, LIMITS.cap_rows), .node = bytes(k, n, 63)};
}

static struct plan_values values(struct maker *k, uint32_t n, bool eval, uint64_t rows)
{
    return (struct plan_values){.n = n, .n_urgent = eval ? n : up_to(k, n),
                                .slot = slots(k, n, rows)};
}

/* Few: short lists, most of them empty. */
static struct plan *plan_random(uint64_t seed, enum plan_kind kind, bool few)
{
    struct maker k = {seed * 2 + 1, mem_zalloc(1, ARENA_BYTES), 0};
    struct plan *p = mem_zalloc(1, sizeof(*p));
    bool eval = kind == PLAN_EVAL;
    uint32_t most = few ? 1 : 40;
    *p = (struct plan){.seq = test_rand(&k.s), .kind = kind, .arena = k.arena,
                       .iteration = (int64_t)(test_rand(&k.s) >> 1),
                       .settled = (int64_t)test_rand(&k.s), .eval_last = eval && up_to(&k, 1)};
    p->n_samples = kind == PLAN_FLUSH ? 0 : up_to(&k, most);
    p->batch_total = p->n_samples + up_to(&k, 100);
    p->fetch.n = up_to(&k, most) + eval;
    p->n_eval_copy = eval ? up_to(&k, most) : 0;
    p->eval_rows = eval ? p->fetch.n + p->n_eval_copy : 0;
    uint64_t rows = eval ? p->eval_rows : LIMITS.cap_rows;
    p->dense = floats(&k, (size_t)p->n_samples * LIMITS.dense_features);
    p->label = floats(&k, p->n_samples);
    p->slot = slots(&k, (size_t)p->n_samples * LIMITS.n_tables, rows);
    p->fetch.row_id = row_ids(&k, p->fetch.n);
    p->fetch.slot = slots(&k, p->fetch.n, rows);
    p->fetch.need = numbers(&k, p->fetch.n, PLAN_NEED_SETTLED);
    p->fetch.owned = bytes(&k, p->fetch.n, eval ? 0 : 1);
    p->evict.n = eval ? 0 : up_to(&k, most);
    p->evict.row_id = row_ids(&k, p->evict.n);
    p->evict.slot = slots(&k, p->evict.n, LIMITS.cap_rows);
    p->evict.version = numbers(&k, p->evict.n, 0);
    p->eval_from = slots(&k, p->n_eval_copy, LIMITS.cap_rows);
    p->eval_to = slots(&k, p->n_eval_copy, rows);
    p->n_peers = LIMITS.n_trainers;
    p->peer = take(&k, p->n_peers, sizeof(*p->peer));
    for (uint32_t i = 0; i < p->n_peers; i++)
        p->peer[i] = (struct plan_peer){grads(&k, eval ? 0 : up_to(&k, most)),
                                        grads(&k, eval ? 0 : up_to(&k, most)),
                                        values(&k, up_to(&k, most), eval, rows),
                                        values(&k, up_to(&k, most), eval, rows)};
    return p;
}

/* --- comparison ---------------------------------------------------------------------------- */

#define SAME(a, b, n) assert_true((n) == 0 || memcmp((a), (b), (n) * sizeof(*(a))) == 0)

static void assert_same_grads(const struct plan_grads *a, const struct plan_grads *b)
{
    assert_int_equal(a->n, b->n);
    assert_int_equal(a->n_urgent, b->n_urgent);
    SAME(a->slot, b->slot, a->n);
    SAME(a->node, b->node, a->n);
}

static void assert_same_values(const struct plan_values *a, const struct plan_values *b)
{
    assert_int_equal(a->n, b->n);
    assert_int_equal(a->n_urgent, b->n_urgent);
    SAME(a->slot, b->slot, a->n);
}

static void assert_same_lists(const struct plan *a, const struct plan *b)
{
    size_t n = a->n_samples;
    SAME(a->dense, b->dense, n * LIMITS.dense_features);
    SAME(a->label, b->label, n);
    SAME(a->slot, b->slot, n * LIMITS.n_tables);
    assert_int_equal(a->fetch.n, b->fetch.n);
    SAME(a->fetch.row_id, b->fetch.row_id, a->fetch.n);
    SAME(a->fetch.slot, b->fetch.slot, a->fetch.n);
    SAME(a->fetch.need, b->fetch.need, a->fetch.n);
    SAME(a->fetch.owned, b->fetch.owned, a->fetch.n);
    assert_int_equal(a->evict.n, b->evict.n);
    SAME(a->evict.row_id, b->evict.row_id, a->evict.n);
    SAME(a->evict.slot, b->evict.slot, a->evict.n);
    SAME(a->evict.version, b->evict.version, a->evict.n);
    SAME(a->eval_from, b->eval_from, a->n_eval_copy);
    SAME(a->eval_to, b->eval_to, a->n_eval_copy);
}

static void assert_same_plan(const struct plan *a, const struct plan *b)
{
    assert_int_equal(a->seq, b->seq);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->iteration, b->iteration);
    assert_int_equal(a->settled, b->settled);
    assert_int_equal(a->batch_total, b->batch_total);
    assert_int_equal(a->eval_last, b->eval_last);
    assert_int_equal(a->n_samples, b->n_samples);
    assert_int_equal(a->eval_rows, b->eval_rows);
    assert_int_equal(a->n_eval_copy, b->n_eval_copy);
    assert_same_lists(a, b);
    assert_int_equal(a->n_peers, b->n_peers);
    for (uint32_t i = 0; i < a->n_peers; i++) {
        assert_same_grads(&a->peer[i].grad_send, &b->peer[i].grad_send);
        assert_same_grads(&a->peer[i].grad_recv, &b->peer[i].grad_recv);
        assert_same_values(&a->peer[i].value_send, &b->peer[i].value_send);
        assert_same_values(&a->peer[i].value_recv, &b->peer[i].value_recv);
    }
}

static struct msg *encoded(const struct plan *p)
{
    struct msg *m;
    assert_int_equal(plan_encode(&HEADER, &LIMITS, p, &m), ST_OK);
    return m;
}

/* Decodes; what comes out must encode to a plan that decodes to the same. */
static enum st try_plan(const uint8_t *p, size_t n)
{
    struct plan *const none = (struct plan *)&LIMITS;
    struct plan *a = none, *b;
    struct rpc_header h = {.rank = 4242};
    enum st st = plan_decode(p, n, &LIMITS, &h, &a);
    if (st != ST_OK) {
        assert_ptr_equal(a, none);
        assert_int_equal(h.rank, 4242);
        return st;
    }
    struct msg *m = encoded(a);
    assert_int_equal(plan_decode(m->data, m->len, &LIMITS, &h, &b), ST_OK);
    assert_same_plan(a, b);
    msg_close(m);
    plan_close(a);
    plan_close(b);
    return ST_OK;
}

/* --- tests --------------------------------------------------------------------------------- */

static void random_plans_survive_bit_for_bit(void **state)
{
    size_t live = mem_live();
    for (uint64_t seed = 0; seed < 300; seed++) {
        struct plan *p = plan_random(seed, PLAN_TRAIN + seed % 3, seed % 2 == 0), *q = NULL;
        struct msg *m = encoded(p);
        struct rpc_header h;
        assert_int_equal(plan_decode(m->data, m->len, &LIMITS, &h, &q), ST_OK);
        assert_int_equal(h.iteration, HEADER.iteration);
        assert_same_plan(p, q);
        msg_close(m);
        plan_close(p);
        plan_close(q);
    }
    assert_int_equal(mem_live(), live);
}

static void damaged_plans_are_refused_or_make_sense(void **state)
{
    size_t live = mem_live();
    for (uint64_t seed = 0; seed < 6; seed++) {
        struct plan *p = plan_random(seed, PLAN_TRAIN + seed % 3, true);
        struct msg *m = encoded(p);
        assert_int_equal(try_plan(m->data, m->len), ST_OK);
        hostile_prefixes(m->data, m->len, try_plan);
        struct hostile_count c = hostile_flips(m->data, m->len, seed + 1, 4000, try_plan);
        assert_true(c.ok > 10 && c.bad > 1000);
        msg_close(m);
        plan_close(p);
    }
    assert_int_equal(mem_live(), live);
}

static void other_limits_refuse_a_plan(void **state)
{
    struct plan *p = plan_random(3, PLAN_TRAIN, false), *q = NULL;
    struct msg *m = encoded(p);
    struct rpc_header h;
    for (int i = 0; i < 5; i++) {
        struct plan_limits lim = LIMITS;
        if (i == 1) lim.n_trainers++;
        if (i == 2) lim.n_tables++;
        if (i == 3) lim.dense_features++;
        if (i == 4) lim.cap_rows = 10;
        enum st st = plan_decode(m->data, m->len, &lim, &h, &q);
        assert_int_equal(st, i == 0 ? ST_OK : ST_BADMSG);
        if (i == 0) plan_close(q);
    }
    msg_close(m);
    plan_close(p);
}

static struct plan_evict one_evict = {1, (uint64_t[]){0}, (uint32_t[]){0}, (int64_t[]){0}};

/* One rule each; 0: the plan has no such list to break. */
static int break_rule(struct plan *p, int rule)
{
    bool eval = p->kind == PLAN_EVAL;
    uint32_t rows = eval ? p->eval_rows : (uint32_t)LIMITS.cap_rows;
    struct plan_peer *q = &p->peer[1];
    switch (rule) {
    case 0: p->kind = 0; return 1;
    case 1: p->kind = PLAN_FLUSH + 1; return 1;
    case 2: p->iteration = -1; return 1;
    case 3: return p->n_samples == 0 ? 0 : (p->batch_total = p->n_samples - 1, 1);
    case 4: return p->n_samples == 0 ? 0 : (p->slot[p->n_samples] = rows, 1);
    case 5: return p->fetch.n == 0 ? 0 : (p->fetch.slot[p->fetch.n - 1] = rows, 1);
    case 6: return p->fetch.n == 0 ? 0 : (p->fetch.need[0] = -2, 1);
    case 7: return p->fetch.n == 0 ? 0 : (p->fetch.owned[0] = eval ? 1 : 2, 1);
    case 8: return p->fetch.n == 0 ? 0 : (p->fetch.row_id[0] = row_id(LIMITS.n_tables, 0), 1);
    case 9: return p->evict.n == 0 ? 0 : (p->evict.slot[0] = (uint32_t)LIMITS.cap_rows, 1);
    case 10: return p->evict.n == 0 ? 0 : (p->evict.version[0] = -1, 1);
    case 11: return p->evict.n == 0 ? 0 : (p->evict.row_id[0] = UINT64_MAX, 1);
    case 12: return q->grad_send.n == 0 ? 0 : (q->grad_send.node[0] = 64, 1);
    case 13: return q->grad_recv.n == 0 ? 0 : (q->grad_recv.node[0] = 255, 1);
    case 14: return q->grad_send.n == 0 ? 0 : (q->grad_send.slot[0] = rows, 1);
    case 15: return q->grad_recv.n == 0 ? 0 : (q->grad_recv.slot[0] = rows, 1);
    case 16: /* sent from the cache, in evaluations too */
        return q->value_send.n == 0 ? 0 : (q->value_send.slot[0] = (uint32_t)LIMITS.cap_rows, 1);
    case 17: return q->value_recv.n == 0 ? 0 : (q->value_recv.slot[0] = rows, 1);
    case 18: q->grad_send.n_urgent = q->grad_send.n + 1; return 1;
    case 19: q->value_recv.n_urgent = q->value_recv.n + 1; return 1;
    case 20: p->n_peers--; return 1;
    case 21: return eval ? 0 : (p->eval_rows = 1, 1);
    case 22: return eval ? 0 : (p->eval_last = 1, 1);
    case 23: return !eval || p->n_eval_copy == 0 ? 0 : (p->eval_to[0] = rows, 1);
    case 24: return !eval || p->n_eval_copy == 0 ? 0 : (p->eval_from[0] = 1000, 1);
    case 25: return !eval || q->value_recv.n == 0 ? 0 : (q->value_recv.n_urgent--, 1);
    case 26: return !eval || q->value_send.n == 0 ? 0 : (q->value_send.n_urgent--, 1);
    case 27: return !eval ? 0 : (p->eval_rows += 1000, 1); /* more rows than are filled */
    case 28: return p->n_samples == 0 ? 0 : (p->kind = PLAN_FLUSH, 1);
    case 29: return !eval ? 0 : (p->evict = one_evict, 1);
    default: return -1;
    }
}

static void every_broken_rule_is_refused(void **state)
{
    for (int rule = 0;; rule++) {
        size_t broken = 0;
        for (uint64_t seed = 0; seed < 60; seed++) {
            struct plan *p = plan_random(seed, PLAN_TRAIN + seed % 3, false);
            int done = break_rule(p, rule);
            if (done == 1) {
                struct msg *m = encoded(p);
                if (try_plan(m->data, m->len) != ST_BADMSG) fail_msg("rule %d passed", rule);
                msg_close(m);
                broken++;
            }
            plan_close(p);
            if (done < 0) {
                assert_int_equal(rule, 30);
                return;
            }
        }
        assert_true(broken > 10);
    }
}

/* Lists that only generated code can write: each shorter by one, or a part left out. */
static bool shorten(Chanter__PlanReply *m, int what)
{
    Chanter__PlanPeer *q = m->peer[1];
    switch (what) {
    case 0: m->fetch->n_row_id--; return true;
    case 1: m->fetch->n_slot--; return true;
    case 2: m->fetch->n_need--; return true;
    case 3: m->fetch->owned.len--; return true;
    case 4: m->evict->n_row_id--; return true;
    case 5: m->evict->n_slot--; return true;
    case 6: m->evict->n_version--; return true;
    case 7: q->grad_send->n_slot--; q->grad_send->n_urgent = 0; return true;
    case 8: q->grad_recv->node.len--; return true;
    case 9: m->n_label--; return true;
    case 10: m->n_dense--; return true;
    case 11: m->n_slot--; return true;
    case 12: m->fetch = NULL; return true;
    case 13: m->evict = NULL; return true;
    case 14: q->grad_send = NULL; return true;
    case 15: q->value_recv = NULL; return true;
    case 16: m->n_eval_to = 1, m->eval_to = m->slot; return true;
    case 17: m->header = NULL; return true;
    default: return false;
    }
}

static void lists_of_different_lengths_are_refused(void **state)
{
    struct plan *p = plan_random(6, PLAN_TRAIN, false);
    struct msg *m = encoded(p);
    assert_true(p->n_samples > 0 && p->fetch.n > 0 && p->evict.n > 0);
    assert_true(p->peer[1].grad_send.n > 0 && p->peer[1].grad_recv.n > 0);
    for (int what = 0;; what++) {
        Chanter__PlanReply *g = chanter__plan_reply__unpack(NULL, m->len, m->data);
        Chanter__PlanReply whole = *g;
        Chanter__PlanPeer peer = *g->peer[1];
        bool broken = shorten(g, what);
        size_t n = chanter__plan_reply__get_packed_size(g);
        uint8_t *bytes_out = malloc(n);
        chanter__plan_reply__pack(g, bytes_out);
        if (try_plan(bytes_out, n) != (broken ? ST_BADMSG : ST_OK)) fail_msg("case %d", what);
        free(bytes_out);
        whole.peer = g->peer, *g = whole, *g->peer[1] = peer; /* to be freed as it came */
        chanter__plan_reply__free_unpacked(g, NULL);
        if (!broken) break;
    }
    msg_close(m);
    plan_close(p);
}

static void ignore_line(void *ctx, const char *line)
{
}

static void a_plan_without_memory_leaves_nothing_behind(void **state)
{
    struct plan *p = plan_random(4, PLAN_TRAIN, false), *q;
    struct msg *m = encoded(p), *const untouched = (struct msg *)p;
    size_t live = mem_live(), injected = 0;
    log_set_sink(ignore_line, NULL);
    for (size_t nth = 1;; nth++, injected++) {
        struct msg *again = untouched;
        mem_fail_at(nth);
        enum st st = plan_encode(&HEADER, &LIMITS, p, &again);
        if (!mem_fail_stop()) {
            msg_close(again);
            break;
        }
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(again, untouched);
        assert_int_equal(mem_live(), live);
    }
    assert_int_equal(injected, 3);
    injected = 0;
    for (size_t nth = 1;; nth++, injected++) {
        struct rpc_header h;
        q = p;
        mem_fail_at(nth);
        enum st st = plan_decode(m->data, m->len, &LIMITS, &h, &q);
        if (!mem_fail_stop()) {
            plan_close(q);
            break;
        }
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(q, p);
        assert_int_equal(mem_live(), live);
    }
    log_set_sink(NULL, NULL);
    assert_true(injected > 30); /* one for each list and part */
    msg_close(m);
    plan_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_plans_survive_bit_for_bit),
        cmocka_unit_test(damaged_plans_are_refused_or_make_sense),
        cmocka_unit_test(other_limits_refuse_a_plan),
        cmocka_unit_test(every_broken_rule_is_refused),
        cmocka_unit_test(lists_of_different_lengths_are_refused),
        cmocka_unit_test(a_plan_without_memory_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
