/* config/role.h - how the program of a role (oracle, embedding server, trainer) starts and stops as a
 * process of a job: its command line, its signals, the line that says it is ready. Not the roles
 * themselves. Main thread only. */
#ifndef CHANTER_CONFIG_ROLE_H
#define CHANTER_CONFIG_ROLE_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "config/options.h"

struct role_args {
    struct config *config;  /* --config FILE, --set K=V; owned                     */
    uint64_t job;           /* --job, hexadecimal                                  */
    uint32_t attempt;       /* --attempt, default 0                                */
};

/* What a role that listens takes besides, and rows for its table of options. */
struct role_serve {
    uint64_t rank;          /* --rank; fits in 32 bits                             */
    const char *address;    /* --address; lent by argv                             */
};
#define ROLE_SERVE_DEFAULTS {0, "127.0.0.1:0"}
#define OPTIONS_SERVE(serve)                                                              \
    {.name = "rank", .arg = "N", .number = &(serve)->rank, .hi = UINT32_MAX,              \
     .help = "which one of its role this process is (0)"},                                \
    {.name = "address", .arg = "HOST:PORT", .text = &(serve)->address,                    \
     .help = "where to listen (127.0.0.1:0: the kernel chooses the port)"}

/* Read the command line, the role's own options among it, and the configuration it names. ST_END:
 * --help was asked for and given. Otherwise what is wrong is logged. `help`: what the program does,
 * for --help. */
MUST_USE enum st role_open(int argc, char **argv, const char *program, const char *help,
                           const struct option *own, size_t n_own, struct role_args *out);
void role_close(struct role_args *a);

/* Before any thread starts: SIGTERM and SIGINT wait for role_stopped from here on. */
void role_signals(void);
/* SIGTERM comes when the parent dies, so that no orphan of a job stays. */
void role_die_with_parent(void);
/* Has a signal asked to stop? Waits for one up to `timeout_ns`. */
int role_stopped(uint64_t timeout_ns);
/* "ready ADDRESS" on standard output: whoever started this process reads it. */
void role_ready(const char *address);

#endif
