/* launch/runlog.h - what a metrics.jsonl says about a run, in short. */
#ifndef CHANTER_LAUNCH_RUNLOG_H
#define CHANTER_LAUNCH_RUNLOG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"

struct runlog_eval { int64_t iteration; uint64_t rows; double loss, auc; /* auc NaN: null */ };

struct runlog {
    uint64_t n_train;                   /* training iterations                                */
    double first_loss, last_loss;       /* of the first and the last of them                  */
    uint64_t n_eval;
    struct runlog_eval eval;            /* the last one                                       */
    bool ended;                         /* the "end" line is there; what follows is from it   */
    double seconds, samples_per_s, exposed_wait_s;
    char digest[DIGEST_HEX_BYTES];
};

/* ST_DATA, logged with the line's number: a line is not one of those that a run writes. A file
 * without lines is an empty log. */
MUST_USE enum st runlog_read(const char *path, struct runlog *out);

#endif
