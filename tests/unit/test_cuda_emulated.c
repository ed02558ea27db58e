/* CUDA on the CPU itself: it has to be able to show the faults that it is there for. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "compute/cuda_api.h"

#define OK(call) assert_int_equal((call), cudaSuccess)

enum { SEEDS = 40 };

static cudaStream_t a, b;
static cudaEvent_t event;
static int *dev, *pinned;

static int start(void **state)
{
    void *p, *q;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaMalloc(&p, 16 * sizeof(int)));
    OK(cudaHostAlloc(&q, 16 * sizeof(int), cudaHostAllocPortable));
    dev = p;
    pinned = q;
    return 0;
}

static int stop(void **state)
{
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(dev));
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(b));
    OK(cudaStreamDestroy(a));
    return emu_live() == 0 ? 0 : -1;
}

struct add { int *to, times, plus; };

static void add_kernel(void *args)
{
    struct add *x = args;
    *x->to = *x->to * x->times + x->plus;
}

/* *to = *to * times + plus */
static void add(cudaStream_t s, int *to, int times, int plus)
{
    struct add x = {to, times, plus};
    OK(emu_enqueue(s, add_kernel, &x, sizeof(x)));
}

/* (0 * 3 + 1) * 2 in that order is 2, in the other one 1. `wait`: b waits for a. */
static int outcomes(int wait)
{
    int seen = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        *dev = 0;
        emu_seed(seed);
        add(a, dev, 3, 1);
        OK(cudaEventRecord(event, a));
        if (wait) OK(cudaStreamWaitEvent(b, event, 0));
        add(b, dev, 2, 0);
        OK(cudaStreamSynchronize(b));
        OK(cudaStreamSynchronize(a));
        seen |= 1 << *dev;
    }
    return seen;
}

static void streams_without_an_event_have_no_order(void **state)
{
    assert_int_equal(outcomes(0), 1 << 2 | 1 << 1);
    assert_int_equal(outcomes(1), 1 << 2);
}

static void an_event_stands_for_what_was_given_before_it(void **state)
{
    int seen = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        *dev = 0;
        emu_seed(seed);
        OK(cudaEventRecord(event, a));
        add(a, dev, 3, 1);            /* behind the event */
        OK(cudaStreamWaitEvent(b, event, 0));
        OK(cudaEventRecord(event, b)); /* recorded again: b's wait is for the first */
        add(b, dev, 2, 0);
        OK(cudaStreamSynchronize(a));
        OK(cudaStreamSynchronize(b));
        seen |= 1 << *dev;
    }
    assert_int_equal(seen, 1 << 2 | 1 << 1);
}

static void a_copy_reads_pinned_memory_when_its_turn_comes(void **state)
{
    int seen = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_seed(seed);
        *pinned = 1;
        OK(cudaMemcpyAsync(dev, pinned, sizeof(int), cudaMemcpyHostToDevice, a));
        *pinned = 2; /* too early */
        OK(cudaStreamSynchronize(a));
        seen |= 1 << *dev;
    }
    assert_int_equal(seen, 1 << 1 | 1 << 2);
}

/* a, and b forked from it, recorded; joined or not. */
static cudaError_t record(int join, cudaGraph_t *graph)
{
    cudaEvent_t back;
    OK(cudaEventCreateWithFlags(&back, cudaEventDisableTiming));
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    add(a, dev, 3, 1);
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event, 0));
    add(b, dev + 1, 3, 1);
    OK(cudaEventRecord(back, b));
    add(a, dev, 2, 0);
    if (join) OK(cudaStreamWaitEvent(a, back, 0));
    add(a, dev + 1, 2, 0);
    cudaError_t e = cudaStreamEndCapture(a, graph);
    OK(cudaEventDestroy(back));
    return e;
}

static void a_graph_does_again_what_was_recorded(void **state)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    dev[0] = dev[1] = 0;
    OK(record(1, &graph));
    assert_int_equal(dev[0] + dev[1], 0); /* nothing is done while it is recorded */
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        dev[0] = dev[1] = 0;
        emu_seed(seed);
        OK(cudaGraphLaunch(exec, a));
        OK(cudaGraphLaunch(exec, a));
        OK(cudaStreamSynchronize(a));
        assert_int_equal(dev[0], 14);
        assert_int_equal(dev[1], 14);
    }
    OK(cudaGraphExecDestroy(exec));
}

static void a_stream_that_does_not_join_back_spoils_the_recording(void **state)
{
    cudaGraph_t graph;
    assert_int_equal(record(0, &graph), cudaErrorStreamCaptureUnjoined);
    assert_null(graph);
}

static void what_waits_or_allocates_spoils_a_recording(void **state)
{
    cudaGraph_t graph;
    void *p;
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(cudaMalloc(&p, 16), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
    OK(cudaEventRecord(event, b));
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
    assert_int_equal(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
}

/* --- misuse --------------------------------------------------------------------------------- */

static void copy_from_the_stack(void)
{
    int x = 1;
    (void)cudaMemcpyAsync(dev, &x, sizeof(x), cudaMemcpyHostToDevice, a);
}

static void copy_the_wrong_way(void)
{
    (void)cudaMemcpyAsync(pinned, dev, sizeof(*dev), cudaMemcpyHostToDevice, a);
}

static void copy_past_the_end(void)
{
    (void)cudaMemcpyAsync(dev + 8, pinned, 9 * sizeof(*dev), cudaMemcpyHostToDevice, a);
}

static void free_what_is_copied(void)
{
    emu_seed(3);
    (void)cudaMemcpyAsync(dev, pinned, sizeof(*dev), cudaMemcpyHostToDevice, a);
    (void)cudaFreeHost(pinned);
}

static void free_twice(void)
{
    void *p;
    (void)cudaMalloc(&p, 16);
    (void)cudaFree(p);
    (void)cudaFree(p);
}

static void use_the_default_stream(void)
{
    (void)cudaMemsetAsync(dev, 0, sizeof(*dev), NULL);
}

static void misuse_aborts(void **state)
{
    static void (*const MISUSE[])(void) = {
        copy_from_the_stack, copy_the_wrong_way, copy_past_the_end, free_what_is_copied,
        free_twice, use_the_default_stream,
    };
    for (size_t i = 0; i < sizeof(MISUSE) / sizeof(MISUSE[0]); i++) {
        int status;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            signal(SIGABRT, SIG_DFL); /* cmocka's handler would go on with the test */
            if (freopen("/dev/null", "w", stderr) == NULL) _exit(1);
            MISUSE[i]();
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(streams_without_an_event_have_no_order, start, stop),
        cmocka_unit_test_setup_teardown(an_event_stands_for_what_was_given_before_it, start, stop),
        cmocka_unit_test_setup_teardown(a_copy_reads_pinned_memory_when_its_turn_comes, start,
                                        stop),
        cmocka_unit_test_setup_teardown(a_graph_does_again_what_was_recorded, start, stop),
        cmocka_unit_test_setup_teardown(a_stream_that_does_not_join_back_spoils_the_recording,
                                        start, stop),
        cmocka_unit_test_setup_teardown(what_waits_or_allocates_spoils_a_recording, start, stop),
        cmocka_unit_test_setup_teardown(misuse_aborts, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
