/* launch/fit.h - fits a job to the device it computes on: is it there, and how many rows can a
 * trainer keep in its memory? Asked once, before the run's configuration is written, so that the
 * oracle and all trainers plan with the same number. */
#ifndef CHANTER_LAUNCH_FIT_H
#define CHANTER_LAUNCH_FIT_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

/* Rows of cache that fit into `free_bytes` of one device beside the model, its activations and what
 * is under way, when `sharing` trainers share the device. */
uint64_t fit_rows(const struct config *c, uint64_t free_bytes, uint32_t sharing);
/* Where cluster.cache_rows is not given and the device cannot hold all that the window may need,
 * set it to what fits. The CPU's memory is what it is: swap, not the cache, gives way there.
 * Logs when the device cannot be had. *free_bytes: what the device has free; NULL ok. */
MUST_USE enum st fit_to_device(struct config *c, uint64_t *free_bytes);

#endif
