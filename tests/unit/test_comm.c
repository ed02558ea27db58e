/* Trainers' messages between threads of one process (trainer/comm_local.c). */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "tests/support/floats.h"
#include "trainer/comm.h"

enum { MOST_RANKS = 8, MOST_PARTS = 4, MOST_BYTES = 3000, ROUNDS = 200, LONG_MS = 20000 };
enum { CAP = MOST_RANKS * MOST_PARTS };

static char logged[4096]; /* lines of all ranks, newline behind each */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_line(void *ctx, const char *line)
{
    pthread_mutex_lock(&log_lock);
    size_t n = strlen(logged);
    snprintf(logged + n, sizeof(logged) - n, "%s\n", line);
    pthread_mutex_unlock(&log_lock);
}

static int setup(void **state)
{
    logged[0] = '\0';
    log_set_sink(keep_line, NULL);
    return 0;
}

static int teardown(void **state)
{
    log_set_sink(NULL, NULL);
    return mem_live() == 0 ? 0 : -1;
}

static void close_all(struct comm **c, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) c[r]->ops->close(c[r]);
}

/* --- random traffic ------------------------------------------------------------------------- */

/* Message k from one rank to another in one round: all of it follows from these numbers. */
static uint64_t seed_of(uint32_t round, uint32_t from, uint32_t to, uint32_t k)
{
    return ((uint64_t)round * MOST_RANKS + from) * 1000 + to * 10 + k;
}

static size_t bytes_of(uint64_t seed)
{
    return draw(seed, 0) % 4 == 0 ? 0 : draw(seed, 1) % MOST_BYTES + 1;
}

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    uint32_t x = draw(seed, 2);
    for (size_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        p[i] = (uint8_t)(x >> 24);
    }
}

struct rank {
    struct comm *comm;
    pthread_t thread;
    uint32_t wrong;
    enum st st;
    struct comm_part out[CAP], in[CAP];
    uint64_t out_seed[CAP], in_seed[CAP];
    uint8_t sent[CAP][MOST_BYTES];
    uint8_t got[CAP][MOST_BYTES + 1]; /* one more: nothing is written there */
};

/* Parts in random order but for those of one pair, which stay in order. */
static uint32_t make_list(const struct rank *r, uint32_t round, int outgoing,
                          struct comm_part *part, uint64_t *seed)
{
    uint32_t left[MOST_RANKS] = {0}, n = 0, open = 0, me = r->comm->rank;
    uint64_t order = seed_of(round, me, 0, 7) + (uint64_t)outgoing;
    for (uint32_t p = 0; p < r->comm->size; p++) {
        uint32_t from = outgoing ? me : p, to = outgoing ? p : me;
        left[p] = p == me ? 0 : draw(seed_of(round, from, to, 8), 0) % (MOST_PARTS + 1);
        open += left[p];
    }
    uint32_t all[MOST_RANKS];
    memcpy(all, left, sizeof(all));
    for (; n < open; n++) {
        uint32_t p = draw(order, n) % r->comm->size;
        while (left[p] == 0) p = (p + 1) % r->comm->size;
        uint32_t k = all[p] - left[p]--;
        seed[n] = outgoing ? seed_of(round, me, p, k) : seed_of(round, p, me, k);
        part[n] = (struct comm_part){p, NULL, bytes_of(seed[n])};
    }
    return n;
}

static uint32_t wrong_parts(const struct rank *r, uint32_t n_in)
{
    uint32_t wrong = 0;
    uint8_t want[MOST_BYTES];
    for (uint32_t i = 0; i < n_in; i++) {
        fill(want, r->in[i].bytes, r->in_seed[i]);
        wrong += memcmp(want, r->got[i], r->in[i].bytes) != 0;
        wrong += r->got[i][r->in[i].bytes] != 0xee;
    }
    return wrong;
}

static void *traffic(void *p)
{
    struct rank *r = p;
    for (uint32_t round = 0; round < ROUNDS && r->st == ST_OK; round++) {
        uint32_t n_out = make_list(r, round, 1, r->out, r->out_seed);
        uint32_t n_in = make_list(r, round, 0, r->in, r->in_seed);
        for (uint32_t i = 0; i < n_out; i++) {
            r->out[i].p = r->sent[i];
            fill(r->sent[i], r->out[i].bytes, r->out_seed[i]);
        }
        for (uint32_t i = 0; i < n_in; i++) r->in[i].p = r->got[i];
        memset(r->got, 0xee, sizeof(r->got));
        r->st = r->comm->ops->exchange(r->comm, "traffic", r->out, n_out, r->in, n_in, LONG_MS);
        memset(r->sent, 0xdd, sizeof(r->sent)); /* it is ours again */
        r->wrong += wrong_parts(r, n_in);
    }
    return NULL;
}

static void every_byte_arrives_whatever_sizes_and_orders_among_one_to_eight_ranks(void **state)
{
    struct rank *rank = calloc(MOST_RANKS, sizeof(*rank));
    struct comm *comm[MOST_RANKS];
    assert_non_null(rank);
    for (uint32_t n = 1; n <= MOST_RANKS; n++) {
        assert_int_equal(comm_local_open(n, comm), ST_OK);
        for (uint32_t r = 0; r < n; r++) {
            rank[r].comm = comm[r];
            assert_true(comm[r]->rank == r && comm[r]->size == n);
            assert_int_equal(pthread_create(&rank[r].thread, NULL, traffic, &rank[r]), 0);
        }
        for (uint32_t r = 0; r < n; r++) {
            pthread_join(rank[r].thread, NULL);
            assert_int_equal(rank[r].st, ST_OK);
            assert_int_equal(rank[r].wrong, 0);
        }
        close_all(comm, n);
    }
    assert_string_equal(logged, "");
    free(rank);
}

/* --- one exchange of one other rank --------------------------------------------------------- */

struct one {
    struct comm *comm;
    const char *what;
    struct comm_part out[2], in[2];
    uint32_t n_out, n_in, timeout_ms;
    enum st st;         /* set by the thread */
    pthread_t thread;
};

static void *run_one(void *p)
{
    struct one *o = p;
    o->st = o->comm->ops->exchange(o->comm, o->what, o->out, o->n_out, o->in, o->n_in,
                                   o->timeout_ms);
    return NULL;
}

static void start(struct one *o)
{
    assert_int_equal(pthread_create(&o->thread, NULL, run_one, o), 0);
}

static void who_waits_for_a_silent_peer_is_told_which(void **state)
{
    struct comm *comm[3];
    char a[4], b[4];
    assert_int_equal(comm_local_open(3, comm), ST_OK);
    struct one o[2] = { /* rank 2 does nothing */
        {comm[0], "value exchange", {{1, a, 4}}, {{1, b, 4}, {2, b, 4}}, 1, 2, 50, ST_OK, 0},
        {comm[1], "value exchange", {{0, b, 4}}, {{0, a, 4}}, 1, 1, LONG_MS, ST_OK, 0}};
    start(&o[0]);
    start(&o[1]);
    for (int i = 0; i < 2; i++) pthread_join(o[i].thread, NULL);
    assert_int_equal(o[0].st, ST_TIMEOUT);
    assert_int_equal(o[1].st, ST_OK);
    assert_string_equal(logged, "chanter: error[E-TIMEOUT]: value exchange: rank 0 has heard "
                                "nothing from rank 2\n");
    close_all(comm, 3);
}

/* What is not taken in time is taken back: the buffer is the sender's again, and a later exchange
 * of the pair does not meet it. */
static void who_is_not_heard_takes_the_message_back(void **state)
{
    struct comm *comm[2];
    char old[4] = "old", new[4] = "new", got[4] = "";
    assert_int_equal(comm_local_open(2, comm), ST_OK);
    const struct comm_part late = {1, old, 4};
    assert_int_equal(comm[0]->ops->exchange(comm[0], "x", &late, 1, NULL, 0, 50), ST_TIMEOUT);
    assert_string_equal(logged, "chanter: error[E-TIMEOUT]: x: nobody takes what rank 0 sends\n");
    struct one o = {comm[0], "y", {{1, new, 4}}, {{0}}, 1, 0, LONG_MS, ST_OK, 0};
    start(&o);
    const struct comm_part in = {0, got, 4};
    assert_int_equal(comm[1]->ops->exchange(comm[1], "y", NULL, 0, &in, 1, LONG_MS), ST_OK);
    pthread_join(o.thread, NULL);
    assert_int_equal(o.st, ST_OK);
    assert_string_equal(got, "new");
    close_all(comm, 2);
}

static void a_message_of_another_size_is_reported_and_not_copied(void **state)
{
    struct comm *comm[2];
    char sent[9] = "too long", got[5] = "want";
    assert_int_equal(comm_local_open(2, comm), ST_OK);
    struct one o = {comm[0], "x", {{1, sent, 9}}, {{0}}, 1, 0, LONG_MS, ST_OK, 0};
    start(&o);
    const struct comm_part in = {0, got, 5};
    assert_int_equal(comm[1]->ops->exchange(comm[1], "x", NULL, 0, &in, 1, LONG_MS), ST_COMM);
    pthread_join(o.thread, NULL);
    assert_string_equal(got, "want");
    assert_non_null(strstr(logged, "error[E-COMM]: exchange: rank 1 got a message of another size "
                                   "than its plan says from rank 0"));
    close_all(comm, 2);
}

/* All wait for rank 0, which aborts; half of them may not have begun by then. */
static void an_abort_wakes_every_rank_and_all_that_come_after(void **state)
{
    struct comm *comm[MOST_RANKS];
    struct one o[MOST_RANKS];
    char byte[MOST_RANKS];
    assert_int_equal(comm_local_open(MOST_RANKS, comm), ST_OK);
    for (uint32_t r = 1; r < MOST_RANKS; r++) {
        struct comm_part part = {0, &byte[r], 1};
        o[r] = (struct one){comm[r], "x", {part}, {part}, 1, 1, LONG_MS, ST_OK, 0};
        start(&o[r]);
    }
    comm_local_abort(comm[0]);
    for (uint32_t r = 1; r < MOST_RANKS; r++) {
        pthread_join(o[r].thread, NULL);
        assert_int_equal(o[r].st, ST_CANCELLED);
    }
    const struct comm_part in = {1, byte, 1};
    assert_int_equal(comm[0]->ops->exchange(comm[0], "x", NULL, 0, &in, 1, LONG_MS), ST_CANCELLED);
    assert_string_equal(logged, ""); /* whoever aborted knows why */
    close_all(comm, MOST_RANKS);
}

static void opening_survives_every_failed_allocation(void **state)
{
    struct comm *comm[3];
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = comm_local_open(3, comm);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            assert_int_equal(nth, 6);
            break;
        }
        assert_int_equal(st, ST_NOMEM);
        assert_int_equal(mem_live(), 0);
    }
    close_all(comm, 3);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(every_byte_arrives_whatever_sizes_and_orders_among_one_to_eight_ranks),
        TEST(who_waits_for_a_silent_peer_is_told_which),
        TEST(who_is_not_heard_takes_the_message_back),
        TEST(a_message_of_another_size_is_reported_and_not_copied),
        TEST(an_abort_wakes_every_rank_and_all_that_come_after),
        TEST(opening_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
