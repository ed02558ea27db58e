/* The GPU's queues, with CUDA on the CPU: a script of calls, drawn from a seed, is run on the CPU
 * device and, in many of the orders that streams and events allow, on the CUDA device. All that
 * comes back has the same bits. Host memory that a call has read is overwritten when it returns. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "compute/cuda.h"
#include "tests/support/floats.h"

enum {
    CAP = 40, D = 6, STRIDE = 12, F = 3, B = 8, SLICES = 4, /* D values, D of state a row */
    GETS = 5, SAID = 1 << 16, DENSE = 50, STEPS = 120
};

struct get { float *host; uint64_t mark; uint32_t n; }; /* one under way; n 0: none */

struct script {
    struct device *d;
    uint64_t seed, drawn;
    float *table, *other, *t, *grad, *vec, *dense, *part[3];
    uint32_t *slots;                    /* device [B][F] */
    void *graph;
    struct get get[GETS];
    float *said;                        /* all that came back, in order */
    size_t n_said;
};

static uint32_t any(struct script *s, uint32_t below)
{
    return draw(s->seed, s->drawn++) % below;
}

static float number(struct script *s)
{
    return (float)any(s, 1000) / 256.0f - 2.0f;
}

static void say(struct script *s, const float *p, size_t n)
{
    assert_true(s->n_said + n <= SAID);
    memcpy(s->said + s->n_said, p, n * sizeof(*p));
    s->n_said += n;
}

#define OK(call) assert_int_equal((call), ST_OK)

/* n distinct slots, in any order. */
static void draw_slots(struct script *s, uint32_t n, uint32_t *slot)
{
    uint32_t all[CAP];
    for (uint32_t i = 0; i < CAP; i++) all[i] = i;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i + any(s, CAP - i), chosen = all[k];
        all[k] = all[i];
        all[i] = slot[i] = chosen;
    }
}

/* --- steps ---------------------------------------------------------------------------------- */

static void put_rows(struct script *s)
{
    uint32_t n = 1 + any(s, CAP), slot[CAP];
    float rows[CAP * STRIDE];
    draw_slots(s, n, slot);
    for (uint32_t i = 0; i < n * STRIDE; i++) rows[i] = number(s) * number(s) + 1.0f;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = D; k < STRIDE; k++) rows[i * STRIDE + k] = 0.5f; /* state: >= 0 */
    OK(s->d->ops->rows_put(s->d, any(s, 2) ? s->table : s->other, STRIDE, slot, n, rows, STRIDE));
    memset(rows, 0xFF, sizeof(rows));
    memset(slot, 0xFF, sizeof(slot));
}

static void settle(struct script *s, struct get *g)
{
    if (g->n == 0) return;
    OK(s->d->ops->wait(s->d, g->mark));
    say(s, g->host, g->n * D);
    memset(g->host, 0xFF, CAP * D * sizeof(float));
    g->n = 0;
}

static void get_rows(struct script *s)
{
    struct get *g = &s->get[any(s, GETS)];
    uint32_t n = 1 + any(s, CAP), slot[CAP];
    const float *table = any(s, 2) ? s->table : s->other;
    draw_slots(s, n, slot);
    settle(s, g);
    if (any(s, 3) == 0) {
        float rows[CAP * D];
        OK(s->d->ops->rows_get(s->d, table, STRIDE, slot, n, rows, D, NULL));
        say(s, rows, n * D);
        return;
    }
    OK(s->d->ops->rows_get(s->d, table, STRIDE, slot, n, g->host, D, &g->mark));
    g->n = n;
    memset(slot, 0xFF, sizeof(slot));
}

static void copy_rows(struct script *s)
{
    uint32_t n = 1 + any(s, CAP), from[CAP], to[CAP];
    draw_slots(s, n, from);
    draw_slots(s, n, to);
    if (any(s, 2))
        OK(s->d->ops->rows_copy(s->d, s->table, STRIDE, from, n, s->other, STRIDE, to, STRIDE));
    else
        OK(s->d->ops->rows_copy(s->d, s->other, STRIDE, from, n, s->vec, D, NULL, D));
    memset(from, 0xFF, sizeof(from));
    memset(to, 0xFF, sizeof(to));
}

/* --- one slice: gather, in lanes, maybe recorded -------------------------------------------- */

static enum st slice(void *ctx, uint32_t lane, uint32_t task)
{
    struct script *s = ctx;
    uint32_t b = B / SLICES;
    return s->d->ops->gather(s->d, lane, b, F, D, s->table, STRIDE, s->slots + task * b * F,
                             s->t + (size_t)task * b * (F + 1) * D);
}

static enum st slices(void *ctx)
{
    struct script *s = ctx;
    return s->d->ops->parallel(s->d, SLICES, slice, s);
}

static void gather(struct script *s)
{
    uint32_t slot[B * F];
    for (uint32_t i = 0; i < B * F; i++) slot[i] = any(s, CAP);
    OK(s->d->ops->copy_in(s->d, s->slots, slot, sizeof(slot)));
    memset(slot, 0xFF, sizeof(slot));
    if (any(s, 3) == 0)
        OK(slices(s));
    else
        OK(s->d->ops->repeat(s->d, &s->graph, slices, s));
}

/* --- sums and updates ----------------------------------------------------------------------- */

static void sum_grads(struct script *s)
{
    uint32_t begin[B * F + 1], item[B * F], n = 0;
    begin[0] = 0;
    for (uint32_t k = 0; k < B * F; k++) {
        item[k] = k;
        if (k + 1 == B * F || any(s, 3) == 0) begin[++n] = k + 1;
    }
    struct seg_list list = {n, begin, item};
    OK(s->d->ops->row_grads(s->d, s->t, F, D, &list, 0, B / SLICES * F, s->grad));
    memset(item, 0xFF, sizeof(item));
}

static void sum_vectors(struct script *s)
{
    uint32_t begin[9] = {0}, item[16];
    uint8_t pos[16];
    for (uint32_t i = 0; i < 8; i++) {
        begin[i + 1] = begin[i] + 1 + any(s, 2);
        for (uint32_t k = begin[i]; k < begin[i + 1]; k++) {
            item[k] = any(s, CAP);
            pos[k] = (uint8_t)(2 * (k - begin[i]) + any(s, 2));
        }
    }
    struct seg_list list = {8, begin, item};
    OK(s->d->ops->tree_sum(s->d, s->vec, D, &list, pos, s->grad));
    memset(pos, 0xFF, sizeof(pos));
    memset(begin, 0xFF, sizeof(begin));
}

static void update_rows(struct script *s)
{
    /* Not rowwise: a GPU sums up the squares of a row in another order. */
    struct opt_step o = {(enum optimizer)any(s, 2), 0.125f, 0.25f};
    uint32_t slot[8];
    draw_slots(s, 8, slot);
    OK(s->d->ops->row_update(s->d, &o, s->table, STRIDE, D, slot, s->grad, 8));
    memset(slot, 0xFF, sizeof(slot));
}

static void update_dense(struct script *s)
{
    struct opt_step o = {OPT_SGD, 0.5f, 0.0f};
    const float *part[3] = {s->part[0], s->part[1], s->part[2]};
    uint8_t pos[3] = {0, 1, 2};
    float in[DENSE], out[DENSE];
    for (uint32_t i = 0; i < DENSE; i++) in[i] = number(s);
    OK(s->d->ops->copy_in(s->d, s->part[any(s, 3)], in, sizeof(in)));
    OK(s->d->ops->dense_sum(s->d, part, pos, 3, DENSE, s->vec));
    OK(s->d->ops->dense_update(s->d, &o, s->dense, NULL, s->vec, DENSE));
    if (any(s, 4) != 0) return;
    OK(s->d->ops->copy_out(s->d, s->dense, out, sizeof(out), NULL));
    say(s, out, DENSE);
}

/* --- the whole ------------------------------------------------------------------------------ */

static void *zeros(struct script *s, size_t floats)
{
    void *p = s->d->ops->alloc(s->d, floats * sizeof(float));
    assert_non_null(p);
    return p;
}

static void give_back(struct script *s)
{
    const struct device_ops *ops = s->d->ops;
    ops->graph_free(s->d, s->graph);
    for (uint32_t i = 0; i < GETS; i++)
        ops->host_free(s->d, s->get[i].host, CAP * D * sizeof(float));
    for (uint32_t i = 0; i < 3; i++) ops->free(s->d, s->part[i], DENSE * sizeof(float));
    ops->free(s->d, s->dense, DENSE * sizeof(float));
    ops->free(s->d, s->slots, B * F * sizeof(float));
    ops->free(s->d, s->vec, CAP * STRIDE * sizeof(float));
    ops->free(s->d, s->grad, (B * F + 8) * D * sizeof(float));
    ops->free(s->d, s->t, B * (F + 1) * D * sizeof(float));
    ops->free(s->d, s->other, CAP * STRIDE * sizeof(float));
    ops->free(s->d, s->table, CAP * STRIDE * sizeof(float));
}

static void run_steps(struct script *s)
{
    static void (*const STEP[])(struct script *s) = {
        put_rows, get_rows, copy_rows, gather, sum_grads, sum_vectors, update_rows, update_dense,
    };
    for (uint32_t i = 0; i < STEPS; i++) STEP[any(s, sizeof(STEP) / sizeof(STEP[0]))](s);
    for (uint32_t i = 0; i < GETS; i++) settle(s, &s->get[i]);
}

/* What script `seed` hears from a device, which it closes; free() it. */
static float *run_script(struct device *d, uint64_t seed, size_t *n)
{
    struct script s = {.d = d, .seed = seed};
    s.said = malloc(SAID * sizeof(float));
    s.table = zeros(&s, CAP * STRIDE);
    s.other = zeros(&s, CAP * STRIDE);
    s.t = zeros(&s, B * (F + 1) * D);
    s.grad = zeros(&s, (B * F + 8) * D);
    s.vec = zeros(&s, CAP * STRIDE);
    s.slots = zeros(&s, B * F);
    s.dense = zeros(&s, DENSE);
    for (uint32_t i = 0; i < 3; i++) s.part[i] = zeros(&s, DENSE);
    for (uint32_t i = 0; i < GETS; i++)
        s.get[i].host = d->ops->host_alloc(d, CAP * D * sizeof(float));
    run_steps(&s);
    struct device_fault fault;
    OK(d->ops->wait(d, 0));
    OK(d->ops->fault(d, &fault));
    assert_false(fault.dense || fault.row);
    give_back(&s);
    device_close(d);
    *n = s.n_said;
    return s.said;
}

static struct device *gpu(uint32_t lanes, size_t stage_bytes)
{
    struct device_cfg cfg = {.lanes = lanes};
    struct cuda_tuning tuning = {stage_bytes, 1 << 12};
    struct device *d;
    OK(cuda_open_tuned(&cfg, &tuning, &d));
    return d;
}

static void any_order_gives_the_bits_of_the_cpu(void **state)
{
    /* Staging memory: all fits; one piece at a time and less; grown by nearly every list. */
    static const size_t STAGE[] = {1 << 20, 1 << 13, 1 << 8};
    struct device_cfg cfg = {.lanes = 1};
    for (uint64_t script = 1; script <= 8; script++) {
        struct device *cpu;
        size_t n_want, n_got;
        OK(device_open(DEVICE_CPU, &cfg, &cpu));
        float *want = run_script(cpu, script, &n_want);
        assert_true(n_want > 1000);
        for (uint64_t seed = 0; seed < 24; seed++) {
            emu_seed(script * 1000 + seed);
            float *got = run_script(gpu(1 + seed % 3, STAGE[seed % 3]), script, &n_got);
            assert_int_equal(n_got, n_want);
            assert_same_bits(got, want, n_want, "what came back");
            free(got);
        }
        free(want);
    }
    assert_int_equal(emu_live(), 0);
    assert_int_equal(mem_live(), 0);
}

/* A copy that waits for arithmetic is hidden behind nothing. */
static void rows_come_in_while_earlier_kernels_wait(void **state)
{
    struct device *d = gpu(1, 1 << 20);
    float *table = d->ops->alloc(d, CAP * STRIDE * sizeof(float));
    float rows[CAP * D] = {0};
    uint32_t slot[CAP];
    bool ahead = false;
    for (uint32_t i = 0; i < CAP; i++) slot[i] = i;
    for (uint64_t seed = 0; seed < 60; seed++) {
        const struct emu_record *r;
        uint32_t kernels = 0;
        emu_seed(seed);
        emu_record(1);
        for (int i = 0; i < 3; i++) OK(d->ops->rows_put(d, table, STRIDE, slot, CAP, rows, D));
        OK(d->ops->wait(d, 0));
        size_t n = emu_records(&r);
        assert_int_equal(n, 6);
        for (size_t i = 0; i < n; i++) {
            if (strcmp(r[i].kind, "kernel") == 0) kernels++;
            if (strcmp(r[i].kind, "h2d") == 0 && i == 2) ahead |= kernels == 0;
        }
    }
    emu_record(0);
    assert_true(ahead); /* three copies before the first kernel */
    d->ops->free(d, table, CAP * STRIDE * sizeof(float));
    device_close(d);
}

static void lanes_run_beside_each_other(void **state)
{
    struct device *d = gpu(2, 1 << 20);
    struct script s = {.d = d};
    bool swapped = false;
    s.table = zeros(&s, CAP * STRIDE);
    s.t = zeros(&s, B * (F + 1) * D);
    s.slots = zeros(&s, B * F);
    for (uint64_t seed = 0; seed < 60 && !swapped; seed++) {
        const struct emu_record *r;
        emu_seed(seed);
        emu_record(1);
        OK(slices(&s));
        OK(d->ops->wait(d, 0));
        assert_int_equal(emu_records(&r), SLICES);
        for (uint32_t i = 1; i < SLICES; i++) swapped |= r[i].issued < r[i - 1].issued;
    }
    emu_record(0);
    assert_true(swapped);
    d->ops->free(d, s.slots, B * F * sizeof(float));
    d->ops->free(d, s.t, B * (F + 1) * D * sizeof(float));
    d->ops->free(d, s.table, CAP * STRIDE * sizeof(float));
    device_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_bits_of_the_cpu),
        cmocka_unit_test(rows_come_in_while_earlier_kernels_wait),
        cmocka_unit_test(lanes_run_beside_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
