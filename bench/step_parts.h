/* bench/step_parts.h - where the time of a training step goes: the device's calls one by one, on one
 * thread, over the slices of one batch. */
#ifndef CHANTER_BENCH_STEP_PARTS_H
#define CHANTER_BENCH_STEP_PARTS_H

#include "bench/peak.h"
#include "bench/step_case.h"

/* After a step of `c`, a case with one thread. One JSON line for each call: microseconds a sample,
 * beside the same at the peak of `lanes` for what multiplies matrices; NULL: no peak is known. */
MUST_USE enum st step_parts(struct step_case *c, const struct step_options *o,
                            struct lanes *lanes, enum bench_clock clock, uint32_t repeat);

#endif
