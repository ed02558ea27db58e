/* trainer/metrics.h - what rank 0 tells about a run while it runs: metrics.jsonl (one JSON object a
 * line) in the run directory, progress on standard error, and the final line. */
#ifndef CHANTER_TRAINER_METRICS_H
#define CHANTER_TRAINER_METRICS_H

#include <stdint.h>

#include "base/status.h"
#include "trainer/evaluate.h"
#include "trainer/pipeline.h"

struct metrics; /* opaque; COMPUTE thread of rank 0 */

/* `iterations` in all, 0 = not known (epochs). */
MUST_USE enum st metrics_open(const char *dir, enum progress_mode mode, uint64_t iterations,
                              struct metrics **out);
void metrics_close(struct metrics *m); /* NULL ok */

/* After iteration `i` of `samples` samples; waited_ns: of this iteration, for rows. */
MUST_USE enum st metrics_train(struct metrics *m, int64_t i, double loss, uint32_t samples,
                               uint64_t waited_ns);
/* Before iteration `i`. */
MUST_USE enum st metrics_eval(struct metrics *m, int64_t i, const struct evaluation *e);
/* What no model can beat but by chance: the planted model of synthetic data on the held-out rows. */
MUST_USE enum st metrics_planted(struct metrics *m, double loss, double auc);
MUST_USE enum st metrics_end(struct metrics *m, const struct trainer_result *r);
/* The job's last line on standard output: one JSON object. */
void metrics_final_line(const struct trainer_result *r);

#endif
