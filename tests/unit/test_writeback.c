/* The write-back stage against servers that answer when, and what, the test likes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "tests/support/caught.h"
#include "tests/support/held.h"
#include "trainer/writeback.h"

enum { D = 3, STATE = 1, W = D + STATE, STRIDE = 5, SLOTS = 12000 };
enum { SERVERS = 2, THREADS = 2, LONG_MS = 20000, SHORT_MS = 100 };
static const struct rpc_header HEAD = {.job = 77, .attempt = 2, .role = ROLE_TRAINER, .rank = 1};

struct fixture {
    struct transport *transport;
    struct held server[SERVERS];
    struct rpc_peer *peer[SERVERS];
    struct device *device;
    struct writeback *w;
    float *table;             /* [SLOTS][STRIDE] */
};

static float cell(uint32_t slot, uint32_t column)
{
    return (float)(slot * 8 + column);
}

static void open_with(struct fixture *f, uint32_t timeout_ms)
{
    assert_int_equal(transport_open(TRANSPORT_LOCAL, &f->transport), ST_OK);
    for (uint32_t s = 0; s < SERVERS; s++) {
        char address[16];
        snprintf(address, sizeof(address), "server-%u", s);
        held_open(&f->server[s], f->transport, address);
        assert_int_equal(rpc_connect(f->transport, address, &f->peer[s]), ST_OK);
    }
    assert_int_equal(device_open(DEVICE_CPU, &(struct device_cfg){.lanes = 1}, &f->device), ST_OK);
    f->table = f->device->ops->alloc(f->device, SLOTS * STRIDE * sizeof(float));
    assert_non_null(f->table);
    for (uint32_t i = 0; i < SLOTS * STRIDE; i++) f->table[i] = cell(i / STRIDE, i % STRIDE);
    struct writeback_cfg cfg = {f->peer, SERVERS, THREADS, HEAD, D, STATE,
                                f->device, timeout_ms, NULL};
    assert_int_equal(writeback_open(&cfg, &f->w), ST_OK);
    caught_start();
}

static void close_all(struct fixture *f)
{
    for (uint32_t s = 0; s < SERVERS; s++) held_close(&f->server[s]);
    writeback_close(f->w);
    for (uint32_t s = 0; s < SERVERS; s++) rpc_peer_close(f->peer[s]);
    transport_close(f->transport);
    f->device->ops->free(f->device, f->table, SLOTS * STRIDE * sizeof(float));
    device_close(f->device);
    caught_stop();
    assert_int_equal(mem_live(), 0);
}

/* A plan that evicts n rows of one table: row numbers first, first + 4, ..: all of one shard. */
struct evictions {
    struct plan plan;
    uint64_t row_id[SLOTS];
    uint32_t slot[SLOTS];
    int64_t version[SLOTS];
};

static void add_rows(struct evictions *e, uint64_t first, uint32_t n)
{
    struct plan_evict *v = &e->plan.evict;
    *v = (struct plan_evict){v->n, e->row_id, e->slot, e->version};
    for (uint32_t i = 0; i < n; i++, v->n++) {
        v->row_id[v->n] = row_id(0, first + i * (uint64_t)(SERVERS * THREADS));
        v->slot[v->n] = (v->n * 7919) % SLOTS; /* prime to SLOTS: each slot once */
        v->version[v->n] = e->plan.iteration - 1 - i % 3;
    }
}

/* One boundary: the rows leave their slots, then the trainer. */
static enum st take_and_send(struct fixture *f, const struct plan *plan)
{
    enum st st = writeback_take(f->w, plan, f->table, STRIDE);
    return st == ST_OK ? writeback_send(f->w, plan) : st;
}

static enum st send(struct fixture *f, int64_t iteration, uint64_t first, uint32_t n)
{
    static struct evictions e;
    e.plan = (struct plan){.kind = PLAN_TRAIN, .iteration = iteration};
    add_rows(&e, first, n);
    return take_and_send(f, &e.plan);
}

static struct msg *ack(void)
{
    struct msg *m;
    assert_int_equal(plain_encode(&HEAD, &m), ST_OK);
    return m;
}

/* --- what is sent --------------------------------------------------------------------------- */

/* One message holds entries [lo, hi) of the evictions, rows as they were in the table. */
static void check_message(const struct held_call *c, const struct evictions *e, uint32_t lo,
                          uint32_t hi)
{
    struct rpc_header h;
    struct write_back m;
    assert_int_equal(c->method, RPC_WRITE_BACK);
    assert_int_equal(write_back_decode(c->req, c->len, &h, &m), ST_OK);
    assert_true(h.job == HEAD.job && h.attempt == HEAD.attempt && h.rank == HEAD.rank);
    assert_int_equal(h.iteration, e->plan.iteration);
    assert_int_equal(m.row_floats, W);
    assert_int_equal(m.n, hi - lo);
    assert_int_equal(m.shard, row_shard(e->row_id[lo], SERVERS * THREADS));
    for (uint32_t i = 0; i < m.n; i++) {
        float row[W];
        assert_int_equal(codec_u64(m.row_id, i), e->row_id[lo + i]);
        assert_int_equal((int64_t)codec_u64(m.version, i), e->version[lo + i]);
        memcpy(row, m.rows + i * sizeof(row), sizeof(row));
        for (uint32_t j = 0; j < W; j++) assert_true(row[j] == cell(e->slot[lo + i], j));
    }
}

static void rows_go_to_their_shard_in_messages_of_at_most_4096(void **state)
{
    static struct evictions e;
    struct fixture f;
    open_with(&f, LONG_MS);
    e.plan = (struct plan){.kind = PLAN_TRAIN, .iteration = 9};
    add_rows(&e, 0, 5000);              /* shard 0: two messages */
    add_rows(&e, 2, 3);                 /* shard 2, the first of server 1 */
    add_rows(&e, 3, 4096);              /* shard 3: just one */
    assert_int_equal(take_and_send(&f, &e.plan), ST_OK);
    /* What becomes of the slots is not what was sent. */
    memset(f.table, 0, SLOTS * STRIDE * sizeof(float));
    held_wait(&f.server[0], 2);
    held_wait(&f.server[1], 2);
    check_message(&f.server[0].call[0], &e, 0, 4096);
    check_message(&f.server[0].call[1], &e, 4096, 5000);
    check_message(&f.server[1].call[0], &e, 5000, 5003);
    check_message(&f.server[1].call[1], &e, 5003, 5003 + 4096);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < 4; i++) {
        bytes += f.server[i / 2].call[i % 2].len;
        held_reply(&f.server[i / 2], i % 2, ack());
    }
    assert_int_equal(writeback_drain(f.w), ST_OK);
    assert_int_equal(writeback_bytes(f.w), bytes);
    assert_int_equal(held_count(&f.server[0]) + held_count(&f.server[1]), 4);
    assert_int_equal(caught_lines, 0);
    close_all(&f);
}

/* The slots are free from there on (I4), although an accelerator's trainer sends only later. */
static void what_is_sent_is_what_was_taken(void **state)
{
    static struct evictions e[3];
    struct fixture f;
    uint32_t sent = 0;
    open_with(&f, LONG_MS);
    for (uint32_t i = 0; i < 3; i++) { /* fewer rows, and more than there was room for */
        e[i].plan = (struct plan){.kind = PLAN_TRAIN, .iteration = 9 + i};
        add_rows(&e[i], 0, (uint32_t[]){7, 3, 4000}[i]);
        assert_int_equal(writeback_take(f.w, &e[i].plan, f.table, STRIDE), ST_OK);
        assert_int_equal(held_count(&f.server[0]), sent);
        memset(f.table, 0xFF, SLOTS * STRIDE * sizeof(float));
        assert_int_equal(writeback_send(f.w, &e[i].plan), ST_OK);
        held_wait(&f.server[0], ++sent);
        check_message(&f.server[0].call[i], &e[i], 0, e[i].plan.evict.n);
        held_reply(&f.server[0], i, ack());
        for (uint32_t k = 0; k < SLOTS * STRIDE; k++) f.table[k] = cell(k / STRIDE, k % STRIDE);
    }
    assert_int_equal(writeback_drain(f.w), ST_OK);
    close_all(&f);
}

static void a_boundary_without_evictions_sends_nothing(void **state)
{
    struct fixture f;
    open_with(&f, LONG_MS);
    for (int64_t i = 0; i < 3 * WRITEBACK_WINDOW; i++) assert_int_equal(send(&f, i, 0, 0), ST_OK);
    assert_int_equal(writeback_drain(f.w), ST_OK);
    assert_int_equal(held_count(&f.server[0]) + held_count(&f.server[1]), 0);
    close_all(&f);
}

/* --- how far answers may lag ---------------------------------------------------------------- */

/* The wait of iteration 16 for iteration 0 is seen by what ends it: the deadline of the call. */
static void sixteen_iterations_may_be_unanswered_and_the_next_waits(void **state)
{
    struct fixture f;
    open_with(&f, SHORT_MS);
    for (int64_t i = 0; i < WRITEBACK_WINDOW; i++) assert_int_equal(send(&f, i, 0, 1), ST_OK);
    assert_int_equal(held_count(&f.server[0]), WRITEBACK_WINDOW);
    assert_int_equal(send(&f, WRITEBACK_WINDOW, 0, 1), ST_TIMEOUT);
    assert_int_equal(held_count(&f.server[0]), WRITEBACK_WINDOW); /* and was not sent */
    assert_non_null(strstr(caught_line, "server 0: rows were not written back: no answer"));
    assert_int_equal(writeback_drain(f.w), ST_TIMEOUT);
    assert_int_equal(caught_lines, 1); /* for all of them */
    close_all(&f);
}

static void an_iteration_waits_only_for_the_one_sixteen_before_it(void **state)
{
    struct fixture f;
    open_with(&f, LONG_MS);
    for (int64_t i = 0; i < WRITEBACK_WINDOW; i++) assert_int_equal(send(&f, i, 0, 1), ST_OK);
    for (uint32_t i = 0; i < 2 * WRITEBACK_WINDOW; i++) {
        held_reply(&f.server[0], i, ack()); /* of iteration i alone */
        assert_int_equal(send(&f, i + WRITEBACK_WINDOW, 0, 1), ST_OK);
    }
    for (uint32_t i = 3 * WRITEBACK_WINDOW; i-- > 2 * WRITEBACK_WINDOW;)
        held_reply(&f.server[0], i, ack());
    assert_int_equal(writeback_drain(f.w), ST_OK);
    close_all(&f);
}

struct answers { struct held *server; uint32_t n; };

static void *answer_backwards(void *p)
{
    struct answers *a = p;
    for (uint32_t i = a->n; i-- > 0;) held_reply(a->server, i, ack());
    return NULL;
}

static void a_drain_ends_when_all_are_answered(void **state)
{
    struct fixture f;
    pthread_t thread;
    open_with(&f, LONG_MS);
    for (int64_t i = 0; i < WRITEBACK_WINDOW; i++) assert_int_equal(send(&f, i, 0, 1), ST_OK);
    struct answers a = {&f.server[0], WRITEBACK_WINDOW};
    assert_int_equal(pthread_create(&thread, NULL, answer_backwards, &a), 0);
    assert_int_equal(writeback_drain(f.w), ST_OK);
    for (uint32_t i = 0; i < WRITEBACK_WINDOW; i++) assert_null(f.server[0].call[i].call);
    pthread_join(thread, NULL);
    close_all(&f);
}

/* --- failures ------------------------------------------------------------------------------- */

static void a_refusal_stops_what_comes_after_and_names_the_server(void **state)
{
    struct fixture f;
    open_with(&f, LONG_MS);
    assert_int_equal(send(&f, 0, 2, 1), ST_OK);
    assert_int_equal(send(&f, 1, 3, 1), ST_OK);
    held_fail(&f.server[1], 1, ST_BADMSG, "not your row");
    held_fail(&f.server[1], 0, ST_NOMEM, "likewise");
    assert_int_equal(send(&f, 2, 0, 1), ST_BADMSG);
    assert_int_equal(held_count(&f.server[0]), 0);
    assert_int_equal(writeback_drain(f.w), ST_BADMSG);
    assert_int_equal(caught_lines, 1);
    assert_string_equal(caught_line, "chanter: error[E-BADMSG]: server 1: rows were not written "
                                     "back: not your row");
    close_all(&f);
}

static void an_answer_that_cannot_be_read_is_a_failure(void **state)
{
    struct fixture f;
    struct msg *m;
    open_with(&f, LONG_MS);
    assert_int_equal(send(&f, 0, 0, 1), ST_OK);
    assert_int_equal(msg_open(3, &m), ST_OK);
    memcpy(m->data, "\xff\xff\xff", 3);
    m->len = 3;
    held_reply(&f.server[0], 0, m);
    assert_int_equal(writeback_drain(f.w), ST_BADMSG);
    assert_non_null(strstr(caught_line, "the answer cannot be read"));
    close_all(&f);
}

/* Before the call is made the caller is told, and can go on; after that the call has failed. */
static void without_memory_nothing_is_sent_and_somebody_is_told(void **state)
{
    struct fixture f;
    enum st st = ST_NOMEM;
    size_t nth = 0;
    uint32_t slot = 0;
    open_with(&f, LONG_MS);
    mem_fail_at(1);
    assert_int_equal(send(&f, 0, 0, 1), ST_NOMEM); /* no room to take rows to */
    assert_true(mem_fail_stop());
    assert_int_equal(writeback_take(f.w, &(struct plan){.evict.n = 1, .evict.slot = &slot}, f.table,
                                    STRIDE), ST_OK);
    while (st == ST_NOMEM) {
        assert_int_equal(writeback_drain(f.w), ST_OK);
        mem_fail_at(++nth);
        st = send(&f, 0, 0, 1);
        assert_true(mem_fail_stop());
    }
    assert_int_equal(st, ST_OK);
    assert_int_equal(nth, 3); /* the note, the message; then the transport's call */
    assert_int_equal(writeback_drain(f.w), ST_NOMEM);
    assert_int_equal(held_count(&f.server[0]), 0);
    close_all(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_go_to_their_shard_in_messages_of_at_most_4096),
        cmocka_unit_test(what_is_sent_is_what_was_taken),
        cmocka_unit_test(a_boundary_without_evictions_sends_nothing),
        cmocka_unit_test(sixteen_iterations_may_be_unanswered_and_the_next_waits),
        cmocka_unit_test(an_iteration_waits_only_for_the_one_sixteen_before_it),
        cmocka_unit_test(a_drain_ends_when_all_are_answered),
        cmocka_unit_test(a_refusal_stops_what_comes_after_and_names_the_server),
        cmocka_unit_test(an_answer_that_cannot_be_read_is_a_failure),
        cmocka_unit_test(without_memory_nothing_is_sent_and_somebody_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
