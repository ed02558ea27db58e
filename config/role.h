/* config/role.h - how the program of a role starts and stops as a process of a job: its flags, its
 * signals, the line that says it is ready. Not the roles themselves. Main thread only. */
#ifndef CHANTER_CONFIG_ROLE_H
#define CHANTER_CONFIG_ROLE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct role_args {          /* strings borrowed from argv                          */
    const char *config;     /* --config FILE                                       */
    const char **set;       /* --set K=V, repeated; freed by role_args_close       */
    size_t n_set;
    const char *address;    /* --address, default 127.0.0.1:0                      */
    uint32_t rank;          /* --rank, default 0                                   */
    uint64_t job;           /* --job, hexadecimal                                  */
    uint32_t attempt;       /* --attempt, default 0                                */
};

/* ST_END: --help was asked for and given. ST_USAGE, logged: a flag is wrong or --config or --job
 * is missing. `about`: one sentence for --help. */
MUST_USE enum st role_args_open(int argc, char **argv, const char *about, struct role_args *out);
void role_args_close(struct role_args *a);

/* Before any thread starts: SIGTERM and SIGINT wait for role_stopped from here on, and SIGTERM
 * comes when the parent dies, so that no orphan stays. */
void role_signals(void);
/* Has a signal asked to stop? Waits for one up to `timeout_ns`. */
int role_stopped(uint64_t timeout_ns);
/* "ready ADDRESS" on standard output: whoever started this process reads it. */
void role_ready(const char *address);

#endif
