/* trainer/exchange.h - the EXCHANGE thread: runs the exchanges that COMPUTE hands over, one after
 * the other, in the same order on every rank, so that they match without a handshake and go on
 * while COMPUTE computes. */
#ifndef CHANTER_TRAINER_EXCHANGE_H
#define CHANTER_TRAINER_EXCHANGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/grow.h"
#include "base/status.h"
#include "trainer/comm.h"

struct exchange; /* opaque */

/* One exchange: made by COMPUTE, lent to EXCHANGE between start and wait. {0} is empty. */
struct exchange_job {
    const char *what;          /* static string, for errors                     */
    struct grow out, in;       /* struct comm_part [n_out], [n_in]              */
    uint32_t n_out, n_in;
    bool running;              /* between start and wait                        */
    bool done;                 /* guarded by the exchange's lock                */
    enum st st;                /* set when done                                 */
};

MUST_USE enum st exchange_open(struct comm *comm, uint32_t timeout_ms, struct exchange **out);
void exchange_close(struct exchange *x); /* NULL ok; waits for what runs */

/* COMPUTE thread. */
void exchange_job_reset(struct exchange_job *j, const char *what);
void exchange_job_fini(struct exchange_job *j);
MUST_USE enum st exchange_add_out(struct exchange_job *j, uint32_t peer, void *p, size_t bytes);
MUST_USE enum st exchange_add_in(struct exchange_job *j, uint32_t peer, void *p, size_t bytes);
/* Hand over; the buffers are lent until exchange_wait. */
MUST_USE enum st exchange_start(struct exchange *x, struct exchange_job *j);
/* Wait for it (at once if it was not started). */
MUST_USE enum st exchange_wait(struct exchange *x, struct exchange_job *j);
/* Bytes sent so far. */
uint64_t exchange_bytes(const struct exchange *x);

#endif
