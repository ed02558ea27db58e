/* compute/lanes.h - the threads of the CPU device: run n independent tasks, any lane any task.
 * Results may not depend on which (I1): a task writes only what is its own. */
#ifndef CHANTER_COMPUTE_LANES_H
#define CHANTER_COMPUTE_LANES_H

#include <stdint.h>

#include "compute/device.h"

struct lanes; /* opaque; lane 0 is the caller's thread, 1.. are threads of their own */

MUST_USE enum st lanes_open(uint32_t n_lanes, struct lanes **out);
void lanes_close(struct lanes *l); /* NULL ok */
/* Run tasks 0..n_tasks-1 and wait. The first failure in task order is returned; the others still
 * run. One caller at a time. */
MUST_USE enum st lanes_run(struct lanes *l, uint32_t n_tasks, device_task *fn, void *ctx);
uint32_t lanes_count(const struct lanes *l);

#endif
