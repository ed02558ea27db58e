/* tests/support/planner_world.h - a dumb cluster that follows plans: servers, trainers and their
 * slots as plain arrays, rows as 64-bit symbols in place of floats, one thread, the step order of
 * proto/plan.h. It knows the batches, so it knows what every look-up must read, and stops at the
 * first thing that is wrong. It shares no code with the planner but base/tree.h and base/row.h. */
#ifndef CHANTER_TESTS_PLANNER_WORLD_H
#define CHANTER_TESTS_PLANNER_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/support/planner_case.h"

/* What went wrong first; each is one property of plans. */
enum world_fault {
    FAULT_NONE,
    FAULT_SAMPLES,     /* a trainer has not its samples, or a header field is wrong         */
    FAULT_READ,        /* a look-up finds another row, or an old value                      */
    FAULT_NEED,        /* a fetch asks for another version than the last one written        */
    FAULT_WRITE_BACK,  /* not from the owner's slot, stale, wrong version, twice            */
    FAULT_GRADIENT,    /* a contribution lost, doubled, or for another row                  */
    FAULT_LISTS,       /* two sides do not match, or no shard order                         */
    FAULT_SLOT,        /* a slot beyond the cache, or used twice                            */
    FAULT_WINDOW,      /* a row kept longer than the window says, or two owners             */
    FAULT_FINAL,       /* servers do not hold the end state                                 */
    FAULT_EVAL,        /* evaluation reads something else than the weights of now           */
    FAULT_PLANS_DIFFER,/* not set here: same input, other plans                             */
    FAULT_N
};

/* How often the run met what: tests assert that the sweep was not empty. */
struct world_seen {
    uint64_t reads, fetches_exact, fetches_settled_again, write_backs, shared_evictions;
    uint64_t grads_urgent, grads_deferred, values_urgent, values_deferred;
    uint64_t capacity_evictions, refetched_at_once;
    uint64_t eval_copied, eval_received, eval_fetched;
};

struct world; /* opaque */

struct world *world_open(const struct planner_case *c, struct world_seen *seen);
void world_close(struct world *w);
/* Follow the plans of the next training iteration or the flush. Takes the plans. */
void world_step(struct world *w, struct plan **plans);
/* Follow the plans of an evaluation of `batch`; changes no row. Takes the plans. */
void world_eval(struct world *w, const struct samples *batch, int last, struct plan **plans);
/* FAULT_NONE, or what went wrong first; *why is a line about it. */
enum world_fault world_fault(const struct world *w, const char **why);

#endif
