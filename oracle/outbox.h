/* oracle/outbox.h - plans that are ready, per trainer, between the thread that makes them and the
 * trainers that ask for them. Holds bytes, knows nothing of what is in them. Bounded: whoever makes
 * plans waits while any trainer has as many as fit. */
#ifndef CHANTER_ORACLE_OUTBOX_H
#define CHANTER_ORACLE_OUTBOX_H

#include <stdint.h>

#include "base/status.h"
#include "proto/transport.h"

struct outbox; /* opaque */

/* Room for `ready` plans a trainer, besides the one that it is working on. */
MUST_USE enum st outbox_open(uint32_t n_trainers, uint32_t ready, struct outbox **out);
void outbox_close(struct outbox *o); /* NULL ok; after outbox_end, when nobody asks any more */

/* The planner's thread. Takes plan[0..n_trainers), those of the next step, whatever it returns.
 * Waits for room; ST_CANCELLED after outbox_end. */
MUST_USE enum st outbox_push(struct outbox *o, struct msg *const *plan);
/* No more plans. ST_END: what is ready is still handed out, then "no more plans". A failure: every
 * call that waits, and every later one, is failed with `st` and `text` (copied). The first end
 * counts. Any thread. */
void outbox_end(struct outbox *o, enum st st, const char *text);

/* Answer `call` with plan `seq` of `trainer`, now or when it is there. It must be the one this
 * trainer asked for last, or the next; plans before it are dropped. Any thread. */
void outbox_ask(struct outbox *o, uint32_t trainer, uint64_t seq, struct rpc_call *call);
/* ST_OK before outbox_end, then its `st`. Any thread. */
enum st outbox_status(struct outbox *o);
/* Has every trainer been told of the failure? Any thread. */
int outbox_told(struct outbox *o);

#endif
