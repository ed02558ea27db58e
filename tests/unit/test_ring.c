/* The ring: order, many threads, deadlines, stop. */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/ring.h"

static const uint64_t LONG_NS = UINT64_C(30000000000); /* longer than any test may take */
static const uint64_t SHORT_NS = 3000000;

static struct ring *ring_of(size_t cap)
{
    struct ring *r;
    assert_int_equal(ring_open(cap, &r), ST_OK);
    return r;
}

static void items_come_out_in_order_around_the_end(void **state)
{
    int item[100];
    struct ring *r = ring_of(3);
    void *got;
    for (int i = 0; i < 100; i++) {
        assert_int_equal(ring_push(r, &item[i], 0), ST_OK);
        assert_int_equal(ring_len(r), i == 0 ? 1 : 2);
        if (i == 0) continue; /* one always stays inside */
        assert_int_equal(ring_pop(r, 0, &got), ST_OK);
        assert_ptr_equal(got, &item[i - 1]);
    }
    ring_close(r);
    ring_close(NULL);
}

static void waits_end_at_their_deadline(void **state)
{
    int item;
    struct ring *r = ring_of(2);
    void *got = &item;
    uint64_t start = clock_now_ns();
    assert_int_equal(ring_pop(r, SHORT_NS, &got), ST_TIMEOUT);
    assert_true(clock_now_ns() - start >= SHORT_NS);
    assert_ptr_equal(got, &item); /* outputs only on ST_OK */
    assert_int_equal(ring_push(r, &item, 0), ST_OK);
    assert_int_equal(ring_push(r, &item, 0), ST_OK);
    start = clock_now_ns();
    assert_int_equal(ring_push(r, &item, SHORT_NS), ST_TIMEOUT);
    assert_true(clock_now_ns() - start >= SHORT_NS);
    assert_int_equal(ring_len(r), 2);
    ring_close(r);
}

enum { PRODUCERS = 3, CONSUMERS = 3, EACH = 3000 };

struct crowd {
    struct ring *r;
    uint32_t item[PRODUCERS][EACH];    /* its own number                           */
    atomic_int seen[PRODUCERS][EACH];  /* times popped                             */
    atomic_int next_producer, disorder, failures;
};

static void *produce(void *arg)
{
    struct crowd *c = arg;
    int p = atomic_fetch_add(&c->next_producer, 1);
    for (uint32_t i = 0; i < EACH; i++)
        if (ring_push(c->r, &c->item[p][i], LONG_NS) != ST_OK) atomic_fetch_add(&c->failures, 1);
    return NULL;
}

static void *consume(void *arg)
{
    struct crowd *c = arg;
    int64_t last[PRODUCERS] = {-1, -1, -1};
    void *got;
    enum st st;
    while ((st = ring_pop(c->r, LONG_NS, &got)) == ST_OK) {
        uint32_t at = *(uint32_t *)got, p = at / EACH, i = at % EACH;
        atomic_fetch_add(&c->seen[p][i], 1);
        if (i <= last[p]) atomic_fetch_add(&c->disorder, 1);
        last[p] = i;
    }
    if (st != ST_CANCELLED) atomic_fetch_add(&c->failures, 1);
    return NULL;
}

static void every_item_reaches_one_of_many_consumers_in_its_producers_order(void **state)
{
    pthread_t producer[PRODUCERS], consumer[CONSUMERS];
    struct crowd *c = mem_zalloc(1, sizeof(*c));
    c->r = ring_of(5);
    for (uint32_t k = 0; k < PRODUCERS * EACH; k++) c->item[k / EACH][k % EACH] = k;
    for (int t = 0; t < CONSUMERS; t++) pthread_create(&consumer[t], NULL, consume, c);
    for (int t = 0; t < PRODUCERS; t++) pthread_create(&producer[t], NULL, produce, c);
    for (int t = 0; t < PRODUCERS; t++) pthread_join(producer[t], NULL);
    ring_stop(c->r); /* what is inside still comes out */
    for (int t = 0; t < CONSUMERS; t++) pthread_join(consumer[t], NULL);
    assert_int_equal(atomic_load(&c->failures), 0);
    assert_int_equal(atomic_load(&c->disorder), 0);
    for (uint32_t k = 0; k < PRODUCERS * EACH; k++)
        assert_int_equal(atomic_load(&c->seen[k / EACH][k % EACH]), 1);
    ring_close(c->r);
    mem_free(c);
}

static void stop_hands_out_what_is_inside_and_refuses_more(void **state)
{
    int item[2];
    struct ring *r = ring_of(4);
    void *got;
    assert_int_equal(ring_push(r, &item[0], 0), ST_OK);
    assert_int_equal(ring_push(r, &item[1], 0), ST_OK);
    ring_stop(r);
    ring_stop(r);
    assert_int_equal(ring_push(r, &item[0], LONG_NS), ST_CANCELLED);
    assert_int_equal(ring_pop(r, LONG_NS, &got), ST_OK);
    assert_ptr_equal(got, &item[0]);
    assert_int_equal(ring_pop(r, LONG_NS, &got), ST_OK);
    assert_ptr_equal(got, &item[1]);
    assert_int_equal(ring_pop(r, LONG_NS, &got), ST_CANCELLED);
    ring_close(r);
}

struct waiter { struct ring *r; atomic_int started; uint64_t timeout_ns; enum st pop, push; };

static void *wait_to_pop(void *arg)
{
    struct waiter *w = arg;
    void *got;
    atomic_store(&w->started, 1);
    w->pop = ring_pop(w->r, w->timeout_ns, &got);
    return NULL;
}

static void *wait_to_push(void *arg)
{
    struct waiter *w = arg;
    atomic_store(&w->started, 1);
    w->push = ring_push(w->r, w, w->timeout_ns);
    return NULL;
}

static void start_waiting(pthread_t *t, void *(*fn)(void *), struct waiter *w)
{
    atomic_store(&w->started, 0);
    assert_int_equal(pthread_create(t, NULL, fn, w), 0);
    while (!atomic_load(&w->started)) sched_yield();
}

/* Rounds: in some of them the other thread has not begun to wait; that must end well, too. */
enum { ROUNDS = 100 };

static void stop_wakes_those_who_wait(void **state)
{
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t t[2];
        struct waiter empty = {.r = ring_of(1), .timeout_ns = LONG_NS};
        struct waiter full = {.r = ring_of(1), .timeout_ns = LONG_NS};
        assert_int_equal(ring_push(full.r, &full, 0), ST_OK);
        start_waiting(&t[0], wait_to_pop, &empty);
        start_waiting(&t[1], wait_to_push, &full);
        ring_stop(empty.r);
        ring_stop(full.r);
        pthread_join(t[0], NULL);
        pthread_join(t[1], NULL);
        assert_int_equal(empty.pop, ST_CANCELLED);
        assert_int_equal(full.push, ST_CANCELLED);
        ring_close(empty.r);
        ring_close(full.r);
    }
}

static void the_longest_timeout_is_not_a_short_one(void **state)
{
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t t;
        struct waiter w = {.r = ring_of(1), .timeout_ns = UINT64_MAX};
        start_waiting(&t, wait_to_pop, &w);
        assert_int_equal(ring_push(w.r, &w, 0), ST_OK);
        pthread_join(t, NULL);
        assert_int_equal(w.pop, ST_OK);
        ring_close(w.r);
    }
}

static void ring_opens_whole_or_not_at_all(void **state)
{
    size_t injected = 0, live = mem_live();
    for (size_t nth = 1;; nth++) {
        struct ring *untouched = (struct ring *)&live, *r = untouched;
        mem_fail_at(nth);
        enum st st = ring_open(8, &r);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            ring_close(r);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(r, untouched);
        assert_int_equal(mem_live(), live);
    }
    assert_int_equal(injected, 2);
    assert_int_equal(mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_come_out_in_order_around_the_end),
        cmocka_unit_test(waits_end_at_their_deadline),
        cmocka_unit_test(every_item_reaches_one_of_many_consumers_in_its_producers_order),
        cmocka_unit_test(stop_hands_out_what_is_inside_and_refuses_more),
        cmocka_unit_test(stop_wakes_those_who_wait),
        cmocka_unit_test(the_longest_timeout_is_not_a_short_one),
        cmocka_unit_test(ring_opens_whole_or_not_at_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
