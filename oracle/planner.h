/* oracle/planner.h - the oracle's mind: batches in order -> plans. Pure: no I/O, no clock, no
 * threads, no dependence on addresses or hash order; the same batches and configuration give the
 * same plans byte for byte. Memory grows with the rows live in the window and `remember`
 * iterations of evictions, never with the size of the tables. After ST_NOMEM only planner_close
 * may follow. */
#ifndef CHANTER_ORACLE_PLANNER_H
#define CHANTER_ORACLE_PLANNER_H

#include <stdint.h>

#include "base/status.h"
#include "data/source.h"
#include "proto/plan.h"

struct planner; /* opaque; one thread */

struct planner_cfg {
    uint32_t n_trainers, n_tables, dense_features;
    uint32_t global_batch, slices, lookahead;
    uint32_t n_shards;      /* for the order of fetch and evict lists                          */
    uint64_t cap_rows;      /* slots of one trainer's cache                                    */
    uint32_t remember;      /* iterations for which an evicted row's version is kept, >= 1     */
};

MUST_USE enum st planner_open(const struct planner_cfg *cfg, struct planner **out);
void planner_close(struct planner *p); /* NULL ok */

/* The next global batch (copied; n <= global_batch, smaller only for the last one). ST_CONFIG,
 * logged with the number of rows it takes, when this batch alone does not fit in a cache. */
MUST_USE enum st planner_push(struct planner *p, const struct samples *batch);
/* No more batches. */
void planner_end(struct planner *p);
/* The plans of the next iteration (or the final flush), one for each trainer: out[0..n_trainers),
 * the caller's to plan_close. ST_BUSY: push more batches (or planner_end) first. ST_END: all
 * plans are out. */
MUST_USE enum st planner_pull(struct planner *p, struct plan **out);
/* Plans for evaluating `batch` with the weights as they are between the last iteration that was
 * pulled and the next one; changes nothing in the planner but the step counter (I7). */
MUST_USE enum st planner_eval(struct planner *p, const struct samples *batch, int last,
                              struct plan **out);

/* Most rows that any trainer's cache has held at once; in the plans pulled so far: rows fetched (a
 * copy each), those of them with an exact need, rows written back; rows live now. */
struct planner_stats { uint64_t peak_rows, fetches, refetches, write_backs, live_rows; };
struct planner_stats planner_stats(const struct planner *p);
/* Recount everything that is kept as a running number; CHECKs on a difference. Slow; for tests. */
void planner_validate(const struct planner *p);

#endif
