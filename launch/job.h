/* launch/job.h - what every way of starting a job does first: a run directory with the
 * configuration that all its processes read, and a number that marks its messages. */
#ifndef CHANTER_LAUNCH_JOB_H
#define CHANTER_LAUNCH_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "trainer/pipeline.h"

struct job {
    struct config *config;    /* owned                                       */
    uint64_t id;              /* random                                      */
    bool quiet;               /* no progress                                 */
    int lock;                 /* of the run directory: one job at a time     */
};

/* Parse the command line of `program` ("chanter train"; `help` says what it does), read the
 * configuration and look at its data; then make the run directory, lock it against other jobs and
 * write config.yaml there, with the transport that the command uses. A directory that holds a run
 * already is refused unless --overwrite is given. ST_END: --help. */
MUST_USE enum st job_open(const char *program, const char *help, enum transport_kind transport,
                          int argc, char **argv, struct job *out);
void job_close(struct job *j);
/* How progress is to be shown: lines that replace each other on a terminal, plain ones elsewhere. */
enum progress_mode job_progress(const struct job *j);

#endif
