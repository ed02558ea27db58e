/* embserver/parking.h - fetches that wait for a write-back (I2): found by the row they wait for, so
 * that a write-back looks only at the fetches it may end, and by age, for the deadline (I6).
 * Knows nothing of messages. Owned by one shard thread: no locks. */
#ifndef CHANTER_EMBSERVER_PARKING_H
#define CHANTER_EMBSERVER_PARKING_H

#include <stdint.h>

#include "base/status.h"

struct parking; /* opaque */

struct parked {             /* part of whatever waits; zero before parking_add                  */
    uint64_t row_id;        /* waits for this row ...                                           */
    int64_t need;           /* ... to have this version or a later one                          */
    uint64_t deadline_ns;   /* of the whole wait; set before parking_add, never changed after   */
    struct parked *older, *newer;          /* in parking order                                  */
    struct parked *next, **link;           /* in the row's bucket; link NULL: in none           */
};

MUST_USE enum st parking_open(struct parking **out);
void parking_close(struct parking *k); /* NULL ok; CHECKs that nothing is parked */

/* Park `p`, whose deadline is not before that of those already parked. */
void parking_add(struct parking *k, struct parked *p);
/* `row_id` now has `version`: hand out those that waited for that, oldest first, chained by `next`
 * (NULL: none). Each keeps its age and has to go on to parking_again or parking_leave. */
struct parked *parking_take(struct parking *k, uint64_t row_id, int64_t version);
/* One that was handed out waits for another row, named in row_id and need. */
void parking_again(struct parking *k, struct parked *p);
void parking_leave(struct parking *k, struct parked *p);
/* The one with the earliest deadline; NULL when none is parked. */
struct parked *parking_oldest(const struct parking *k);

#endif
