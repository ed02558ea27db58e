/* launch/process.h - child processes of a job: started with an argument vector (never a shell),
 * watched, and ended with the job whatever happens to this process. */
#ifndef CHANTER_LAUNCH_PROCESS_H
#define CHANTER_LAUNCH_PROCESS_H

#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

struct process {
    char name[32];         /* "server 1", for messages                              */
    pid_t pid;             /* 0: not running                                        */
    int out;               /* its standard output, or -1: it is this process's own  */
    int status;            /* of waitpid, once it has ended                         */
};

/* argv[0] is the path; searched for in PATH when it has no slash. `piped`: read its standard output
 * through `out`. The child dies with this process (PR_SET_PDEATHSIG). */
MUST_USE enum st process_start(struct process *p, const char *name, char *const *argv, int piped);
/* The address in the line "ready ADDRESS" that the process prints. ST_TIMEOUT, ST_BADMSG: logged.
 * ST_END: it has ended, which is for the caller to explain. */
MUST_USE enum st process_ready(struct process *p, uint32_t timeout_ms, char *address, size_t cap);
/* Has it ended, `timeout_ms` from now at the latest? */
int process_wait(struct process *p, uint32_t timeout_ms);
/* Ask it to end, wait up to `grace_ms`, then force it. Does nothing for one that has ended. */
void process_stop(struct process *p, uint32_t grace_ms);
/* Exit code, or 128 + signal; only after it has ended. */
int process_code(const struct process *p);

#endif
