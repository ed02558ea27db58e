/* bench/peak.h - how fast this machine multiplies and adds right now: what arithmetic is measured
 * against. Clocks wander and neighbours come and go, so it is measured around whatever it judges. */
#ifndef CHANTER_BENCH_PEAK_H
#define CHANTER_BENCH_PEAK_H

#include <stdbool.h>
#include <stdint.h>

#include "compute/lanes.h"

enum bench_clock { CLOCK_WALL, CLOCK_CPU };
/* Wall-clock time; or CPU time of this process over `threads`, which is the time that work spread
 * evenly over them would take, had nobody else used the machine. */
double bench_seconds(enum bench_clock clock, uint32_t threads);
/* GFLOP/s of all lanes together over about 5 ms: fused multiply-adds in f32 on registers (a product
 * and a sum where the machine does not fuse). */
double bench_peak(struct lanes *lanes, enum bench_clock clock);
/* Are two peaks, before and after, within 4 % of each other? What lay between counts. */
bool bench_steady(double before, double after);

#endif
