/* base/ring.h - a bounded queue of pointers between threads. It carries batches and requests, a
 * few thousand a second, so a lock and two conditions do; rows never pass through one by one. */
#ifndef CHANTER_BASE_RING_H
#define CHANTER_BASE_RING_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct ring; /* opaque */

MUST_USE enum st ring_open(size_t cap, struct ring **out);
void ring_close(struct ring *r); /* NULL ok; the items still inside stay the caller's: pop first */

/* Any thread. Wait up to `timeout_ns` for room / for an item. ST_TIMEOUT after that; ST_CANCELLED
 * after ring_stop (pop hands out what is still inside first). */
MUST_USE enum st ring_push(struct ring *r, void *item, uint64_t timeout_ns);
MUST_USE enum st ring_pop(struct ring *r, uint64_t timeout_ns, void **item);
/* No more pushes; wakes every waiter. Any thread; again is fine. */
void ring_stop(struct ring *r);
size_t ring_len(struct ring *r);

#endif
