/* The EXCHANGE thread over a comm that only writes down what it is asked to do. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "trainer/exchange.h"

enum { TIMEOUT_MS = 4321, MOST = 4096 };

struct recorder {
    struct comm base;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    bool held;                     /* exchanges wait                               */
    const char *what[MOST];        /* in order of calls                            */
    uint32_t n;
    uint32_t n_out, n_in;          /* of the last one                              */
    struct comm_part out[MOST], in[MOST];
    uint32_t timeout_ms;
    enum st answer;
};

static enum st record(struct comm *c, const char *what, const struct comm_part *out,
                      uint32_t n_out, const struct comm_part *in, uint32_t n_in,
                      uint32_t timeout_ms)
{
    struct recorder *r = (struct recorder *)c;
    pthread_mutex_lock(&r->lock);
    while (r->held) pthread_cond_wait(&r->moved, &r->lock);
    r->what[r->n++] = what;
    if (n_out > 0) memcpy(r->out, out, n_out * sizeof(*out));
    if (n_in > 0) memcpy(r->in, in, n_in * sizeof(*in));
    r->n_out = n_out;
    r->n_in = n_in;
    r->timeout_ms = timeout_ms;
    enum st st = r->answer;
    pthread_mutex_unlock(&r->lock);
    return st;
}

static void hold(struct recorder *r, bool held)
{
    pthread_mutex_lock(&r->lock);
    r->held = held;
    pthread_cond_broadcast(&r->moved);
    pthread_mutex_unlock(&r->lock);
}

static const struct comm_ops OPS = {"recorder", record, NULL};
static struct recorder recorder;

static struct exchange *open_recorded(void)
{
    struct exchange *x;
    recorder = (struct recorder){.base = {&OPS, 0, 2}, .lock = PTHREAD_MUTEX_INITIALIZER,
                                 .moved = PTHREAD_COND_INITIALIZER};
    assert_int_equal(exchange_open(&recorder.base, TIMEOUT_MS, &x), ST_OK);
    return x;
}

static void make_job(struct exchange_job *j, const char *what, size_t bytes)
{
    static char byte[1];
    exchange_job_reset(j, what);
    assert_int_equal(exchange_add_out(j, 1, byte, bytes), ST_OK);
    assert_int_equal(exchange_add_in(j, 1, byte, bytes), ST_OK);
}

/* As COMPUTE does it: two jobs under way, waited for in another order than they were started. */
static void jobs_run_one_after_the_other_in_the_order_of_their_starts(void **state)
{
    static const char *const NAME[] = {"a", "b", "c"};
    struct exchange *x = open_recorded();
    struct exchange_job job[3] = {0};
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < MOST / 3; i++) {
        if (i % 4 == 0) hold(&recorder, true);
        for (uint32_t k = 0; k < 3; k++) {
            make_job(&job[k], NAME[k], i + k + 1);
            bytes += i + k + 1;
            assert_int_equal(exchange_start(x, &job[k]), ST_OK);
        }
        hold(&recorder, false);
        for (uint32_t k = 3; k-- > 0;) assert_int_equal(exchange_wait(x, &job[k]), ST_OK);
        assert_int_equal(recorder.n, 3 * i + 3);
        assert_int_equal(recorder.out[0].bytes, i + 3); /* "c" was the last */
    }
    for (uint32_t i = 0; i < recorder.n; i++) assert_string_equal(recorder.what[i], NAME[i % 3]);
    assert_int_equal(recorder.timeout_ms, TIMEOUT_MS);
    assert_int_equal(exchange_bytes(x), bytes);
    for (uint32_t k = 0; k < 3; k++) exchange_job_fini(&job[k]);
    exchange_close(x);
}

static void parts_arrive_as_they_were_added_however_many(void **state)
{
    static char bytes[MOST];
    struct exchange *x = open_recorded();
    struct exchange_job j = {0};
    for (uint32_t n = 1; n <= MOST; n = n * 3 + 1) { /* the lists grow, and are used again */
        exchange_job_reset(&j, "parts");
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(exchange_add_out(&j, i % 7, &bytes[i], i + 1), ST_OK);
            assert_int_equal(exchange_add_in(&j, i % 5, &bytes[n - 1 - i], i + 2), ST_OK);
            assert_int_equal(exchange_add_in(&j, i % 5, NULL, 0), ST_OK); /* left out */
        }
        assert_int_equal(exchange_start(x, &j), ST_OK);
        assert_int_equal(exchange_wait(x, &j), ST_OK);
        assert_int_equal(recorder.n_out, n);
        assert_int_equal(recorder.n_in, n);
        for (uint32_t i = 0; i < n; i++) {
            const struct comm_part *out = &recorder.out[i], *in = &recorder.in[i];
            assert_true(out->peer == i % 7 && out->p == &bytes[i] && out->bytes == i + 1);
            assert_true(in->peer == i % 5 && in->p == &bytes[n - 1 - i] && in->bytes == i + 2);
        }
    }
    exchange_job_fini(&j);
    exchange_close(x);
}

static void an_empty_job_is_no_exchange_and_one_not_started_is_not_waited_for(void **state)
{
    struct exchange *x = open_recorded();
    struct exchange_job j = {0};
    exchange_job_reset(&j, "empty");
    assert_int_equal(exchange_wait(x, &j), ST_OK);
    assert_int_equal(exchange_start(x, &j), ST_OK);
    assert_int_equal(exchange_wait(x, &j), ST_OK);
    exchange_close(x);
    assert_int_equal(recorder.n, 0);
    exchange_job_fini(&j);
}

static void a_failure_is_told_to_who_waits_for_that_job(void **state)
{
    struct exchange *x = open_recorded();
    struct exchange_job bad = {0}, good = {0};
    recorder.answer = ST_COMM;
    make_job(&bad, "bad", 1);
    assert_int_equal(exchange_start(x, &bad), ST_OK);
    assert_int_equal(exchange_wait(x, &bad), ST_COMM);
    recorder.answer = ST_OK;
    make_job(&good, "good", 1);
    assert_int_equal(exchange_start(x, &good), ST_OK);
    assert_int_equal(exchange_wait(x, &good), ST_OK);
    exchange_job_fini(&bad);
    exchange_job_fini(&good);
    exchange_close(x);
}

static void closing_waits_for_what_runs(void **state)
{
    struct exchange *x = open_recorded();
    struct exchange_job j = {0};
    make_job(&j, "last", 1);
    assert_int_equal(exchange_start(x, &j), ST_OK);
    exchange_close(x);
    exchange_close(NULL);
    assert_int_equal(recorder.n, 1);
    exchange_job_fini(&j);
}

static void a_list_that_cannot_grow_is_as_it_was(void **state)
{
    static char bytes[64];
    struct exchange *x = open_recorded();
    struct exchange_job j = {0};
    exchange_job_reset(&j, "full");
    uint32_t n = 0;
    mem_fail_at(2); /* the first allocation makes room for some, the second for more */
    while (exchange_add_out(&j, 0, &bytes[n % 64], 1) == ST_OK) n++;
    assert_true(mem_fail_stop());
    assert_int_equal(exchange_start(x, &j), ST_OK);
    assert_int_equal(exchange_wait(x, &j), ST_OK);
    assert_int_equal(recorder.n_out, n);
    assert_ptr_equal(recorder.out[n - 1].p, &bytes[(n - 1) % 64]);
    exchange_job_fini(&j);
    exchange_close(x);
}

static int all_is_given_back(void **state)
{
    return mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_one_after_the_other_in_the_order_of_their_starts),
        cmocka_unit_test(parts_arrive_as_they_were_added_however_many),
        cmocka_unit_test(an_empty_job_is_no_exchange_and_one_not_started_is_not_waited_for),
        cmocka_unit_test(a_failure_is_told_to_who_waits_for_that_job),
        cmocka_unit_test(closing_waits_for_what_runs),
        cmocka_unit_test(a_list_that_cannot_grow_is_as_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, all_is_given_back);
}
