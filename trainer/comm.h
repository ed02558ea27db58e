/* trainer/comm.h - the seam between trainers: bare floats from rank to rank. Behind it: comm_mpi.c
 * (the only file with MPI) and comm_local.c (ranks as threads of one process). The sizes are known
 * to both sides from the plan; nothing is negotiated. One thread of a trainer (EXCHANGE, or MAIN
 * before it starts and after it ends) uses it at a time. */
#ifndef CHANTER_TRAINER_COMM_H
#define CHANTER_TRAINER_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct comm;     /* one rank's end */

struct comm_part {      /* one message: to or from `peer`, `bytes` long; 0 bytes are not sent   */
    uint32_t peer;
    void *p;            /* borrowed until comm_exchange returns                                 */
    size_t bytes;
};

struct comm_ops {
    const char *name;
    /* Send all of `out`, receive all of `in`; returns when every one is complete. Between a pair
     * of ranks messages match in order of calls and of place in the list. ST_TIMEOUT after
     * timeout_ms, logged with the peers that are missing (I6); `what` names the exchange. */
    enum st (*exchange)(struct comm *c, const char *what, const struct comm_part *out,
                        uint32_t n_out, const struct comm_part *in, uint32_t n_in,
                        uint32_t timeout_ms);
    void (*close)(struct comm *c);
};

struct comm {
    const struct comm_ops *ops;
    uint32_t rank, size;
    uint32_t local_rank;     /* number among the ranks of this machine                      */
    bool reaches_device;     /* parts may lie in an accelerator's memory                    */
};

/* MPI_COMM_WORLD; initialises MPI (MPI_THREAD_SERIALIZED). comm_close finalises it. */
MUST_USE enum st comm_mpi_open(struct comm **out);
/* All ranks of one process at once: out[0..size). Each is closed by its own user. */
MUST_USE enum st comm_local_open(uint32_t size, struct comm **out);
/* Wakes every rank that waits in a local exchange: they return ST_CANCELLED. Any thread. */
void comm_local_abort(struct comm *c);

#endif
