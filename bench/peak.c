#include "bench/peak.h"

#include <time.h>

#include "base/check.h"
#include "compute/cpu_vec.h"

/* As many independent sums as it takes to hide an addition's latency, and as registers hold. */
#ifdef __AVX512F__
enum { SUMS = 12 };
#else
enum { SUMS = 5 };
#endif
enum { ROUNDS = 1000000 };

double bench_seconds(enum bench_clock clock, uint32_t threads)
{
    struct timespec t;
    clock_gettime(clock == CLOCK_CPU ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return ((double)t.tv_sec + (double)t.tv_nsec * 1e-9) / (clock == CLOCK_CPU ? threads : 1);
}

static enum st multiply_and_add(void *ctx, uint32_t lane, uint32_t task)
{
    volatile float *sink = ctx; /* [lanes] */
    vec sum[SUMS], a = vec_splat(0.999f), b = vec_splat(1e-3f);
    (void)lane;
#pragma GCC unroll 16
    for (int k = 0; k < SUMS; k++) sum[k] = vec_splat((float)k);
    for (int i = 0; i < ROUNDS; i++)
#pragma GCC unroll 16
        for (int k = 0; k < SUMS; k++) sum[k] = vec_fma(sum[k], a, b);
    for (int k = 1; k < SUMS; k++) sum[0] += sum[k];
    sink[task] = vec_sum(&sum[0]);
    return ST_OK;
}

double bench_peak(struct lanes *lanes, enum bench_clock clock)
{
    enum { MOST = 64 };
    float sink[MOST];
    uint32_t n = lanes_count(lanes);
    CHECK(n <= MOST, "cluster.threads is checked");
    double start = bench_seconds(clock, n);
    enum st st = lanes_run(lanes, n, multiply_and_add, sink);
    double seconds = bench_seconds(clock, n) - start;
    CHECK(st == ST_OK, "no task fails");
    return 2.0 * ROUNDS * SUMS * LANES * n / seconds * 1e-9;
}

bool bench_steady(double before, double after)
{
    return before <= 1.04 * after && after <= 1.04 * before;
}
