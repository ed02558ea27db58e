/* The emulation of a block's threads: does what CUDA promises, and finds what breaks its rules. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "compute/cuda_kernel.h"

static cudaStream_t stream;

static int open_stream(void **state)
{
    return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? 0 : -1;
}

static int close_stream(void **state)
{
    return cudaStreamDestroy(stream) == cudaSuccess ? 0 : -1;
}

static void done(cudaError_t e)
{
    assert_int_equal(e, cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
}

enum { THREADS = 96, FLOATS = THREADS };

enum fault {
    NONE, NO_BARRIER, ONE_RETURNS, OTHER_BARRIER, TOO_MUCH, NO_WAIT, NOT_COMMITTED, LEFT_BEHIND
};

struct turn_args { float *out; enum fault fault; };

/* out[block][i] = the number of thread `threads - 1 - i`, through shared memory. */
KERNEL_THAT_WAITS(turn, turn_args, a, THREADS)
{
    SHARED(float, all);
    uint32_t t = threadIdx.y * blockDim.x + threadIdx.x, n = blockDim.x * blockDim.y;
    all[a.fault == TOO_MUCH ? n : t] = (float)t;
    if (a.fault == ONE_RETURNS && t == 5) return;
    if (a.fault == OTHER_BARRIER && t == 5) {
        __syncthreads();
    } else if (a.fault != NO_BARRIER) {
        __syncthreads();
    }
    a.out[blockIdx.x * n + t] = all[n - 1 - t];
}

static float turned[3 * THREADS];

static void run_turn(enum fault fault, dim3 block)
{
    struct turn_args a = {turned, fault};
    memset(turned, 0xFF, sizeof(turned));
    done(LAUNCH(stream, turn, dim(3, 1), block, FLOATS * sizeof(float), &a));
}

static int is_turned(void)
{
    for (uint32_t i = 0; i < 3 * THREADS; i++)
        if (turned[i] != (float)(THREADS - 1 - i % THREADS)) return 0;
    return 1;
}

static void threads_wait_for_each_other_in_any_order(void **state)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        emu_shuffle(seed);
        run_turn(NONE, dim(THREADS, 1));
        assert_true(is_turned());
        run_turn(NONE, dim(12, 8));
        assert_true(is_turned());
    }
    emu_shuffle(0);
}

static void a_barrier_that_is_missing_shows(void **state)
{
    for (uint64_t seed = 0; seed < 5; seed++) {
        emu_shuffle(seed);
        run_turn(NO_BARRIER, dim(THREADS, 1));
        assert_false(is_turned());
    }
    emu_shuffle(0);
}

struct order_args { uint32_t *order, *n; };

KERNEL(note_order, order_args, a, 8)
{
    a.order[atomicAdd(a.n, 1)] = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
}

static void every_thread_of_every_block_runs_once_in_a_drawn_order(void **state)
{
    enum { ALL = 5 * 3 * 7 };
    uint32_t first[ALL], order[ALL], differ = 0;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint32_t n = 0, seen[ALL] = {0};
        struct order_args a = {order, &n};
        emu_shuffle(seed);
        done(LAUNCH(stream, note_order, dim(5, 3), dim(7, 1), 0, &a));
        assert_int_equal(n, ALL);
        for (uint32_t i = 0; i < ALL; i++) seen[order[i]]++;
        for (uint32_t i = 0; i < ALL; i++) assert_int_equal(seen[i], 1);
        for (uint32_t i = 0; i < ALL && seed == 0; i++) assert_int_equal(order[i], i);
        if (seed == 0) memcpy(first, order, sizeof(first));
        differ += memcmp(first, order, sizeof(first)) != 0;
    }
    assert_int_equal(differ, 19);
    emu_shuffle(0);
}

struct copy_args { const float *from; float *out; enum fault fault; };

/* out[0..2][t]: what is there after 0, 1 and 2 of two copies were waited for. */
KERNEL_THAT_WAITS(copy_twice, copy_args, a, THREADS)
{
    SHARED(float, to);
    uint32_t t = threadIdx.x;
    to[t] = -1.0f;
    COPY_ASYNC(to + t, a.from + t, 4);
    if (a.fault != NOT_COMMITTED) COPY_COMMIT();
    COPY_ASYNC(to + THREADS + t, a.from + THREADS + t, 4);
    to[THREADS + t] = -1.0f;
    if (a.fault != NOT_COMMITTED) COPY_COMMIT();
    a.out[t] = to[t];
    COPY_WAIT(1);
    a.out[THREADS + t] = to[t] + to[THREADS + t];
    if (a.fault != NO_WAIT) COPY_WAIT(0);
    a.out[2 * THREADS + t] = to[t] + to[THREADS + t];
}

static void run_copies(enum fault fault)
{
    float from[2 * THREADS], out[3 * THREADS];
    struct copy_args a = {from, out, fault};
    for (uint32_t i = 0; i < 2 * THREADS; i++) from[i] = (float)(i + 1);
    done(LAUNCH(stream, copy_twice, dim(1, 1), dim(THREADS, 1), 2 * THREADS * sizeof(float), &a));
    for (uint32_t t = 0; t < THREADS; t++) {
        assert_true(out[t] == -1.0f);
        assert_true(out[THREADS + t] == from[t] - 1.0f);
        assert_true(out[2 * THREADS + t] == from[t] + from[THREADS + t]);
    }
}

static void copies_arrive_when_they_are_waited_for(void **state)
{
    run_copies(NONE);
}

/* --- what it refuses ------------------------------------------------------------------------ */

struct alone_args { int what; };

KERNEL(alone, alone_args, a, 8)
{
    if (a.what == 0) __syncthreads();
    if (a.what == 1) ((float *)emu_shared())[0] = 0.0f;
}

static void launch_alone(int what, uint32_t threads, uint32_t blocks, size_t shared)
{
    struct alone_args a = {what};
    done(LAUNCH(stream, alone, dim(blocks, 1), dim(threads, 1), shared, &a));
}

static void do_wrong(int i)
{
    switch (i) {
    case 0: run_turn(ONE_RETURNS, dim(THREADS, 1)); break;
    case 1: run_turn(OTHER_BARRIER, dim(THREADS, 1)); break;
    case 2: run_turn(TOO_MUCH, dim(THREADS, 1)); break;
    case 3: run_copies(NO_WAIT); break;
    case 4: run_copies(NOT_COMMITTED); break;
    case 5: launch_alone(0, 8, 1, 0); break;
    case 6: launch_alone(1, 8, 1, 0); break;
    case 7: launch_alone(2, 9, 1, 0); break;
    case 8: launch_alone(2, 8, 0, 0); break;
    case 9: launch_alone(2, 8, 1, 4); break;
    default: launch_alone(2, 8, 1, 0); break; /* right */
    }
}

static int in_child(int i, char *out, size_t room)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL); /* cmocka's and the sanitizers' handlers stay out */
        dup2(ends[1], STDERR_FILENO);
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        do_wrong(i);
        _exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < room && (got = read(ends[0], out + n, room - 1 - n)) > 0;)
        n += (size_t)got;
    out[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void what_breaks_the_rules_aborts_and_says_what(void **state)
{
    static const char *const SAYS[] = {
        "kernel turn: thread 0 is at ", "kernel turn: thread 0 is at ",
        "a kernel writes behind shared memory", "a kernel returns with copies under way",
        "a kernel returns with copies under way", "only threads of a KERNEL_THAT_WAITS wait",
        "only threads of a KERNEL_THAT_WAITS share memory", "a block has as many threads",
        "a grid of 0 x 1 x 1 blocks", "shared memory is within the limit",
    };
    char out[2000];
    for (int i = 0; i < 10; i++) {
        int status = in_child(i, out, sizeof(out));
        if (strstr(out, SAYS[i]) == NULL) fail_msg("case %d says: %s", i, out);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
    assert_int_equal(in_child(10, out, sizeof(out)), 0);
    assert_string_equal(out, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_wait_for_each_other_in_any_order),
        cmocka_unit_test(a_barrier_that_is_missing_shows),
        cmocka_unit_test(every_thread_of_every_block_runs_once_in_a_drawn_order),
        cmocka_unit_test(copies_arrive_when_they_are_waited_for),
        cmocka_unit_test(what_breaks_the_rules_aborts_and_says_what),
    };
    return cmocka_run_group_tests(tests, open_stream, close_stream);
}
