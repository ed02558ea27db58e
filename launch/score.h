/* launch/score.h - samples scored with a run's final weights, without servers and caches: rows come
 * straight from the mapped file. Batches and slices are cut as in training, so the bits are those
 * of the run's own evaluation (I1). Writes nothing (I7). */
#ifndef CHANTER_LAUNCH_SCORE_H
#define CHANTER_LAUNCH_SCORE_H

#include "data/source.h"
#include "launch/rundir.h"
#include "trainer/evaluate.h"

/* Score all samples that `s` still has. ST_DATA, logged: there are none, or a score is not a
 * number. */
MUST_USE enum st score_source(const struct rundir *r, struct source *s, struct evaluation *out);

#endif
