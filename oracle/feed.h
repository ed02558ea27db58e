/* oracle/feed.h - which samples make which batch: the training stream cut into global batches, and
 * the held-out rows cut into evaluation batches. Not a reader (data/source.h), not a planner.
 *
 * The training stream is all training rows in order, over and over. iterations: K takes its first
 * K * B samples; epochs: E its first E passes, so that only the very last batch can be short. */
#ifndef CHANTER_ORACLE_FEED_H
#define CHANTER_ORACLE_FEED_H

#include "base/status.h"
#include "config/config.h"
#include "data/source.h"

struct feed; /* opaque; one thread */

MUST_USE enum st feed_open(const struct config *cfg, struct feed **out); /* borrows cfg */
void feed_close(struct feed *f); /* NULL ok */

/* The next training batch, lent until the next call. ST_END: there is none. ST_DATA: a pass
 * without a single sample. */
MUST_USE enum st feed_train(struct feed *f, const struct samples **out);
/* Start reading the held-out rows from their first. */
MUST_USE enum st feed_eval_start(struct feed *f);
/* The next evaluation batch, lent until the next call; *last is 1 on the last. ST_END: no more, or
 * the configuration names no held-out rows. */
MUST_USE enum st feed_eval(struct feed *f, const struct samples **out, int *last);

#endif
