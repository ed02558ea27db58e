/* trainer/writeback.h - the last stage: evicted rows go home. The rows are copied out of their slots
 * first, so a slot is free once writeback_take returns, and then into the messages that carry them;
 * a message lives until the server has answered (I4). How far the answers may lag is bounded. */
#ifndef CHANTER_TRAINER_WRITEBACK_H
#define CHANTER_TRAINER_WRITEBACK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "compute/device.h"
#include "proto/codec.h"
#include "proto/plan.h"
#include "proto/transport.h"

struct writeback; /* opaque; COMPUTE thread, replies on transport threads */

/* Iterations whose write-backs may be unanswered. Together with the plans prefetched this stays
 * below the iterations for which the oracle remembers evictions: see PLAN_NEED_SETTLED. */
enum { WRITEBACK_WINDOW = 16 };

struct writeback_cfg {
    struct rpc_peer *const *server;
    uint32_t n_servers, threads;
    struct rpc_header header;
    uint32_t dim, state;
    struct device *device;            /* borrowed                                        */
    uint32_t timeout_ms;
    const atomic_bool *over;          /* see trainer_cfg                                 */
};

MUST_USE enum st writeback_open(const struct writeback_cfg *cfg, struct writeback **out);
void writeback_close(struct writeback *w); /* NULL ok; waits for answers under way */

/* Copy the rows of the plan's evict list out of `table`. */
MUST_USE enum st writeback_take(struct writeback *w, const struct plan *plan, const float *table,
                                uint32_t stride);
/* Send what has been taken for this plan, unless that has been done. Before that, wait until everything older than
 * WRITEBACK_WINDOW iterations is answered. */
MUST_USE enum st writeback_send(struct writeback *w, const struct plan *plan);
/* Wait until every row sent has been taken. */
MUST_USE enum st writeback_drain(struct writeback *w);
uint64_t writeback_bytes(const struct writeback *w);

#endif
