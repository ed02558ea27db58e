/* The prefetch stage: plans from an oracle that has them all, rows from servers that answer when,
 * and what, the test likes. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "tests/support/caught.h"
#include "tests/support/floats.h"
#include "tests/support/held.h"
#include "trainer/prefetch.h"

enum { D = 3, STATE = 2, STRIDE = D + STATE, CAP = 40000, SERVERS = 2, THREADS = 2 };
enum { SHARDS = SERVERS * THREADS, DEPTH = 3, LONG_MS = 20000, MOST_PLANS = 64, MOST_ROWS = 30000 };
static const struct rpc_header HEAD = {.job = 77, .attempt = 2, .role = ROLE_TRAINER, .rank = 0};
static const struct plan_limits LIMITS = {1, 1, 1, CAP};

/* What the oracle answers, and how far ahead it was asked. */
struct plans {
    struct plan plan[MOST_PLANS];
    uint32_t n;
    enum st end;               /* behind them; not ST_OK                                  */
    pthread_mutex_t lock;
    pthread_cond_t asked_more;
    uint32_t asked, taken;     /* plans asked for; plans that COMPUTE has asked for       */
    uint32_t most_ahead;       /* most plans asked for and not yet taken                  */
};

struct fixture {
    struct transport *transport;
    struct rpc_server *oracle;
    struct plans plans;
    struct held server[SERVERS];
    struct rpc_peer *oracle_peer, *peer[SERVERS];
    struct device *device;
    struct prefetch *p;
    float *table;              /* [CAP][STRIDE], all -1 at first */
};

/* --- plans ---------------------------------------------------------------------------------- */

static void answer_plan(void *ctx, struct rpc_call *call, enum rpc_method method,
                        const uint8_t *req, size_t len)
{
    struct plans *o = ctx;
    struct rpc_header h;
    struct msg *m;
    uint64_t seq;
    if (plan_request_decode(req, len, &h, &seq) != ST_OK || seq != o->asked) abort();
    pthread_mutex_lock(&o->lock);
    o->asked++;
    if (o->asked - o->taken > o->most_ahead) o->most_ahead = o->asked - o->taken;
    pthread_cond_broadcast(&o->asked_more);
    pthread_mutex_unlock(&o->lock);
    if (seq >= o->n) rpc_fail(call, o->end, "that is all");
    else if (plan_encode(&HEAD, &LIMITS, &o->plan[seq], &m) != ST_OK) abort();
    else rpc_reply(call, m);
}

static void wait_asked(struct plans *o, uint32_t n)
{
    pthread_mutex_lock(&o->lock);
    while (o->asked < n) pthread_cond_wait(&o->asked_more, &o->lock);
    pthread_mutex_unlock(&o->lock);
}

/* Plan number n: one sample, no rows yet. */
static struct plan_fetch *add_plan(struct fixture *f)
{
    static float dense[1], label[1];
    static uint32_t slot[1];
    static struct plan_peer peer[1];
    struct plans *o = &f->plans;
    o->plan[o->n] = (struct plan){.seq = o->n, .kind = PLAN_TRAIN, .iteration = o->n,
                                  .settled = (int64_t)o->n - 20, .batch_total = 1, .n_samples = 1,
                                  .dense = dense, .label = label, .slot = slot, .peer = peer,
                                  .n_peers = 1};
    return &o->plan[o->n++].fetch;
}

static struct rows { uint64_t row_id[MOST_ROWS]; uint32_t slot[MOST_ROWS]; int64_t need[MOST_ROWS];
                     uint8_t owned[MOST_ROWS]; } rows;

/* n rows of one shard, every third a value only. For one plan at a time: all share `rows`. */
static void add_rows(struct plan_fetch *l, uint32_t shard, uint32_t n, int64_t need)
{
    *l = (struct plan_fetch){l->n, rows.row_id, rows.slot, rows.need, rows.owned};
    for (uint32_t i = 0; i < n; i++, l->n++) {
        rows.row_id[l->n] = row_id(0, shard + i * (uint64_t)SHARDS);
        rows.slot[l->n] = (l->n * 7919) % CAP; /* prime to CAP */
        rows.need[l->n] = need;
        rows.owned[l->n] = i % 3 != 0;
    }
}

/* --- rows ----------------------------------------------------------------------------------- */

static float cell(uint64_t id, uint32_t column)
{
    return (float)(row_number(id) * 8 + column);
}

/* The right answer to held call i, but for the version of its last row. */
static struct msg *answer(const struct held *h, uint32_t i, int64_t last_version)
{
    struct rpc_header from;
    struct fetch_request q;
    struct msg *m;
    uint8_t *version, *to;
    assert_int_equal(h->call[i].method, RPC_FETCH);
    assert_int_equal(fetch_request_decode(h->call[i].req, h->call[i].len, &from, &q), ST_OK);
    assert_true(from.job == HEAD.job && from.attempt == HEAD.attempt);
    assert_in_range(q.n, 1, 4096);
    uint32_t width = q.owned ? D + STATE : D;
    assert_int_equal(fetch_reply_begin(&HEAD, q.n, width, &m, &version, &to), ST_OK);
    for (uint32_t k = 0; k < q.n; k++) {
        uint64_t id = codec_u64(q.row_id, k);
        float row[D + STATE];
        int64_t v = k + 1 < q.n ? (int64_t)codec_u64(q.need, k) : last_version;
        assert_int_equal(row_shard(id, SHARDS), q.shard);
        for (uint32_t j = 0; j < width; j++) row[j] = cell(id, j);
        memcpy(version + k * sizeof(v), &v, sizeof(v));
        memcpy(to + (size_t)k * width * sizeof(float), row, width * sizeof(float));
    }
    return m;
}

static void check_table(const struct fixture *f, const struct plan_fetch *l)
{
    uint8_t *seen = calloc(CAP, 1);
    assert_non_null(seen);
    for (uint32_t i = 0; i < l->n; i++) {
        const float *row = f->table + (size_t)l->slot[i] * STRIDE;
        for (uint32_t j = 0; j < STRIDE; j++)
            assert_true(row[j] == (j < D || l->owned[i] ? cell(l->row_id[i], j) : -1));
        seen[l->slot[i]] = 1;
    }
    for (uint32_t i = 0; i < CAP * STRIDE; i++) assert_true(seen[i / STRIDE] || f->table[i] == -1);
    free(seen);
}

/* --- fixture -------------------------------------------------------------------------------- */

static void begin(struct fixture *f)
{
    *f = (struct fixture){.plans = {.end = ST_END, .lock = PTHREAD_MUTEX_INITIALIZER,
                                    .asked_more = PTHREAD_COND_INITIALIZER}};
    memset(&rows, 0, sizeof(rows));
}

static void open_with(struct fixture *f, int ahead, uint32_t timeout_ms)
{
    assert_int_equal(transport_open(TRANSPORT_LOCAL, &f->transport), ST_OK);
    assert_int_equal(rpc_serve(f->transport, "oracle", answer_plan, &f->plans, &f->oracle), ST_OK);
    assert_int_equal(rpc_connect(f->transport, "oracle", &f->oracle_peer), ST_OK);
    for (uint32_t s = 0; s < SERVERS; s++) {
        char address[16];
        snprintf(address, sizeof(address), "server-%u", s);
        held_open(&f->server[s], f->transport, address);
        assert_int_equal(rpc_connect(f->transport, address, &f->peer[s]), ST_OK);
    }
    assert_int_equal(device_open(DEVICE_CPU, &(struct device_cfg){.lanes = 1}, &f->device), ST_OK);
    f->table = f->device->ops->alloc(f->device, CAP * STRIDE * sizeof(float));
    assert_non_null(f->table);
    for (uint32_t i = 0; i < CAP * STRIDE; i++) f->table[i] = -1;
    caught_start();
    struct prefetch_cfg cfg = {.oracle = f->oracle_peer, .server = f->peer, .n_servers = SERVERS,
                               .threads = THREADS, .header = HEAD, .limits = LIMITS, .dim = D,
                               .state = STATE, .depth = DEPTH, .ahead = ahead,
                               .timeout_ms = timeout_ms};
    assert_int_equal(prefetch_open(&cfg, &f->p), ST_OK);
}

static void close_all(struct fixture *f)
{
    for (uint32_t s = 0; s < SERVERS; s++) rpc_peer_cancel(f->peer[s]);
    prefetch_close(f->p);
    for (uint32_t s = 0; s < SERVERS; s++) held_close(&f->server[s]);
    rpc_server_close(f->oracle);
    for (uint32_t s = 0; s < SERVERS; s++) rpc_peer_close(f->peer[s]);
    rpc_peer_close(f->oracle_peer);
    transport_close(f->transport);
    f->device->ops->free(f->device, f->table, CAP * STRIDE * sizeof(float));
    device_close(f->device);
    caught_stop();
    assert_int_equal(mem_live(), 0);
}

static enum st next(struct fixture *f, struct ticket **t)
{
    uint64_t waited = 0;
    pthread_mutex_lock(&f->plans.lock);
    f->plans.taken++;
    pthread_mutex_unlock(&f->plans.lock);
    return prefetch_next(f->p, t, &waited);
}

static enum st wait(struct fixture *f, struct ticket *t)
{
    uint64_t waited = 0;
    return prefetch_wait(f->p, t, &waited);
}

/* --- plans ---------------------------------------------------------------------------------- */

static void plans_come_in_order_and_then_the_end(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    while (f.plans.n < MOST_PLANS) add_plan(&f);
    open_with(&f, 1, LONG_MS);
    for (uint32_t i = 0; i < MOST_PLANS; i++) {
        assert_int_equal(next(&f, &t), ST_OK);
        assert_int_equal(t->plan->seq, i);
        assert_int_equal(wait(&f, t), ST_OK);
        assert_int_equal(prefetch_install(f.p, t, f.device, f.table, STRIDE), ST_OK);
        ticket_close(t);
    }
    assert_int_equal(next(&f, &t), ST_END);
    assert_int_equal(next(&f, &t), ST_END);
    assert_int_equal(caught_lines, 0);
    close_all(&f);
}

/* DEPTH ready ones and one that waits for its place among them, besides the one that COMPUTE is
 * about to take. */
static void plans_run_ahead_as_far_as_the_depth_and_no_farther(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    while (f.plans.n < MOST_PLANS) add_plan(&f);
    open_with(&f, 1, LONG_MS);
    for (uint32_t i = 0; i < MOST_PLANS - DEPTH; i++) {
        wait_asked(&f.plans, i + DEPTH + 1);
        assert_int_equal(next(&f, &t), ST_OK);
        ticket_close(t);
    }
    assert_int_equal(f.plans.most_ahead, DEPTH + 1);
    close_all(&f);
}

static void what_the_oracle_has_logged_is_not_logged_again(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    f.plans.end = ST_DATA;
    open_with(&f, 1, LONG_MS);
    assert_int_equal(next(&f, &t), ST_DATA);
    assert_int_equal(caught_lines, 0);
    close_all(&f);

    begin(&f);
    f.plans.end = ST_BADMSG; /* a refusal: only this side can say what that stops */
    open_with(&f, 1, LONG_MS);
    assert_int_equal(next(&f, &t), ST_BADMSG);
    assert_int_equal(caught_lines, 1);
    assert_string_equal(caught_line, "chanter: error[E-BADMSG]: oracle: no plan: that is all");
    close_all(&f);
}

static void a_plan_out_of_place_is_refused(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    add_plan(&f);
    f.plans.plan[0].seq = 1;
    open_with(&f, 1, LONG_MS);
    assert_int_equal(next(&f, &t), ST_BADMSG);
    assert_non_null(strstr(caught_line, "plan 1 came in place of 0"));
    close_all(&f);
}

/* --- rows ----------------------------------------------------------------------------------- */

/* Values and records of a shard are asked for apart, each in parts of 4096. */
static void replies_in_any_order_end_in_the_right_slots(void **state)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        struct fixture f;
        struct ticket *t;
        begin(&f);
        struct plan_fetch *l = add_plan(&f);
        add_rows(l, 0, 3 * 2048 + 3, 5);    /* 2049 values, 4098 records: 1 + 2 parts */
        add_rows(l, 1, 2, 6);               /* one of each: 1 + 1 */
        add_rows(l, 3, 3 * 4096 + 1, 7);    /* 4097 values, 8192 records: 2 + 2 */
        open_with(&f, 1, LONG_MS);
        assert_int_equal(next(&f, &t), ST_OK);
        uint32_t left[SERVERS], n[SERVERS];
        for (uint32_t s = 0; s < SERVERS; s++) {
            held_wait(&f.server[s], 1);
            n[s] = left[s] = held_count(&f.server[s]);
        }
        assert_int_equal(n[0], 5);
        assert_int_equal(n[1], 4);
        uint32_t open = n[0] + n[1];
        for (uint64_t k = 0; open > 0; k++) {
            uint32_t s = draw(seed, 2 * k) % SERVERS, i = draw(seed, 2 * k + 1) % n[s];
            if (f.server[s].call[i].call == NULL) continue;
            held_reply(&f.server[s], i, answer(&f.server[s], i, s == 0 ? (i < 3 ? 5 : 6) : 7));
            open--;
        }
        assert_int_equal(wait(&f, t), ST_OK);
        assert_int_equal(prefetch_install(f.p, t, f.device, f.table, STRIDE), ST_OK);
        check_table(&f, l);
        assert_true(prefetch_row_bytes(f.p) > (uint64_t)l->n * D * sizeof(float));
        ticket_close(t);
        close_all(&f);
    }
}

/* One row of plan 30 (settled: 10) that needs `need` comes as `version`. */
static enum st install_version(int64_t need, int64_t version)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    struct plan_fetch *l = add_plan(&f);
    f.plans.plan[0].iteration = 30;
    f.plans.plan[0].settled = 10;
    add_rows(l, 1, 1, need);
    open_with(&f, 1, LONG_MS);
    assert_int_equal(next(&f, &t), ST_OK);
    held_wait(&f.server[0], 1);
    held_reply(&f.server[0], 0, answer(&f.server[0], 0, version));
    assert_int_equal(wait(&f, t), ST_OK);
    enum st st = prefetch_install(f.p, t, f.device, f.table, STRIDE);
    if (st == ST_OK) {
        assert_int_equal(caught_lines, 0);
        check_table(&f, l);
    } else {
        assert_int_equal(caught_lines, 1);
        assert_non_null(strstr(caught_line, "error[E-INTERNAL]: I2: iteration 30: row 1 of table 0 "
                                            "came as version "));
        for (uint32_t i = 0; i < CAP * STRIDE; i++) assert_true(f.table[i] == -1);
    }
    ticket_close(t);
    close_all(&f);
    return st;
}

static void a_row_of_another_version_than_needed_stops_the_run(void **state)
{
    assert_int_equal(install_version(25, 25), ST_OK);
    assert_int_equal(install_version(25, 24), ST_INTERNAL);  /* stale */
    assert_int_equal(install_version(25, 26), ST_INTERNAL);  /* from the future */
    assert_int_equal(install_version(0, -1), ST_INTERNAL);   /* never written */
    assert_int_equal(install_version(PLAN_NEED_SETTLED, -1), ST_OK);
    assert_int_equal(install_version(PLAN_NEED_SETTLED, 9), ST_OK);
    assert_int_equal(install_version(PLAN_NEED_SETTLED, 10), ST_INTERNAL);
}

static void in_the_baseline_rows_are_asked_for_when_told_to(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    struct plan_fetch *l = add_plan(&f);
    add_rows(l, 0, 2, 4);
    open_with(&f, 0, LONG_MS);
    assert_int_equal(next(&f, &t), ST_OK);
    assert_int_equal(held_count(&f.server[0]), 0);
    assert_int_equal(prefetch_send(f.p, t), ST_OK);
    held_wait(&f.server[0], 2);
    for (uint32_t i = 0; i < 2; i++)
        held_reply(&f.server[0], i, answer(&f.server[0], i, 4));
    assert_int_equal(wait(&f, t), ST_OK);
    assert_int_equal(prefetch_install(f.p, t, f.device, f.table, STRIDE), ST_OK);
    check_table(&f, l);
    ticket_close(t);
    close_all(&f);
}

/* --- failures ------------------------------------------------------------------------------- */

static void rows_that_do_not_come_are_told_of_once(void **state)
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    add_rows(add_plan(&f), 2, 9000, 4);
    open_with(&f, 1, 50);
    assert_int_equal(next(&f, &t), ST_OK);
    assert_int_equal(wait(&f, t), ST_TIMEOUT);
    assert_int_equal(caught_lines, 1); /* of three requests */
    assert_string_equal(caught_line, "chanter: error[E-TIMEOUT]: server 1: rows for iteration 0 "
                                     "did not come: no answer within 50 ms");
    assert_int_equal(held_count(&f.server[1]), 3);
    ticket_close(t);
    close_all(&f);
}

/* Answer the one request with something that is not an answer to it. */
static void assert_refused(struct msg *(*make)(const struct held *h))
{
    struct fixture f;
    struct ticket *t;
    begin(&f);
    add_rows(add_plan(&f), 0, 1, 4);
    open_with(&f, 1, LONG_MS);
    assert_int_equal(next(&f, &t), ST_OK);
    held_wait(&f.server[0], 1);
    held_reply(&f.server[0], 0, make(&f.server[0]));
    assert_int_equal(wait(&f, t), ST_OK);
    assert_int_equal(prefetch_install(f.p, t, f.device, f.table, STRIDE), ST_BADMSG);
    assert_int_equal(caught_lines, 1);
    assert_non_null(strstr(caught_line, "shard 0 answered a fetch with something else"));
    for (uint32_t i = 0; i < CAP * STRIDE; i++) assert_true(f.table[i] == -1);
    ticket_close(t);
    close_all(&f);
}

static struct msg *make_reply(struct rpc_header h, uint32_t n, uint32_t width)
{
    struct msg *m;
    uint8_t *version, *to;
    assert_int_equal(fetch_reply_begin(&h, n, width, &m, &version, &to), ST_OK);
    memset(version, 0, n * sizeof(int64_t));
    version[0] = 4;
    memset(to, 0, (size_t)n * width * sizeof(float));
    return m;
}

static struct msg *too_many_rows(const struct held *h) { return make_reply(HEAD, 2, D); }
static struct msg *too_wide(const struct held *h) { return make_reply(HEAD, 1, D + STATE); }
static struct msg *other_job(const struct held *h)
{
    struct rpc_header head = HEAD;
    head.job++;
    return make_reply(head, 1, D);
}
static struct msg *other_attempt(const struct held *h)
{
    struct rpc_header head = HEAD;
    head.attempt--;
    return make_reply(head, 1, D);
}
static struct msg *cut_short(const struct held *h)
{
    struct msg *m = make_reply(HEAD, 1, D);
    m->len--;
    return m;
}

static void replies_that_are_no_answer_are_refused(void **state)
{
    assert_refused(too_many_rows);
    assert_refused(too_wide);
    assert_refused(other_job);
    assert_refused(other_attempt);
    assert_refused(cut_short);
}

/* COMPUTE has failed elsewhere: tickets are queued, their rows unanswered. */
static void closing_gives_back_what_is_under_way(void **state)
{
    struct fixture f;
    begin(&f);
    for (uint32_t i = 0; i < 2 * DEPTH; i++) add_rows(add_plan(&f), i % SHARDS, 1, 4);
    open_with(&f, 1, LONG_MS);
    wait_asked(&f.plans, DEPTH + 1);
    assert_true(held_count(&f.server[0]) > 0);
    close_all(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_come_in_order_and_then_the_end),
        cmocka_unit_test(plans_run_ahead_as_far_as_the_depth_and_no_farther),
        cmocka_unit_test(what_the_oracle_has_logged_is_not_logged_again),
        cmocka_unit_test(a_plan_out_of_place_is_refused),
        cmocka_unit_test(replies_in_any_order_end_in_the_right_slots),
        cmocka_unit_test(a_row_of_another_version_than_needed_stops_the_run),
        cmocka_unit_test(in_the_baseline_rows_are_asked_for_when_told_to),
        cmocka_unit_test(rows_that_do_not_come_are_told_of_once),
        cmocka_unit_test(replies_that_are_no_answer_are_refused),
        cmocka_unit_test(closing_gives_back_what_is_under_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
