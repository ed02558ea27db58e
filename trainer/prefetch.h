/* trainer/prefetch.h - the PREFETCH stage: plans are asked for ahead of COMPUTE, each plan's rows
 * are asked for as soon as the plan is here, and both wait in a bounded queue. Fetched rows stay in
 * the messages they came in until COMPUTE puts them into their slots (I4). */
#ifndef CHANTER_TRAINER_PREFETCH_H
#define CHANTER_TRAINER_PREFETCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "compute/device.h"
#include "proto/codec.h"
#include "proto/plan.h"
#include "proto/transport.h"

struct prefetch; /* opaque */

struct prefetch_cfg {
    struct rpc_peer *oracle;
    struct rpc_peer *const *server;   /* [n_servers]; borrowed, as all peers             */
    uint32_t n_servers, threads;      /* shard threads per server                        */
    struct rpc_header header;         /* job, attempt, role, rank                        */
    struct plan_limits limits;
    uint32_t dim, state;
    uint32_t depth;                   /* plans ready ahead of COMPUTE                    */
    int ahead;                        /* 0: rows are asked for by COMPUTE (the baseline) */
    uint32_t timeout_ms;
    const atomic_bool *over;          /* see trainer_cfg                                 */
};

/* A plan and its rows under way. Made by PREFETCH, COMPUTE's from prefetch_next on. */
struct ticket {
    struct plan *plan;
    struct fetch_part *part;          /* one request each                                */
    uint32_t n_parts;
    uint32_t missing;                 /* replies not here yet; guarded by prefetch       */
    enum st failed;                   /* first failure; likewise                         */
    struct prefetch *owner;
};

MUST_USE enum st prefetch_open(const struct prefetch_cfg *cfg, struct prefetch **out);
void prefetch_close(struct prefetch *p); /* NULL ok; COMPUTE gives its ticket back first */

/* COMPUTE thread. Next plan in order; ST_END after the last. *waited_ns is added to. */
MUST_USE enum st prefetch_next(struct prefetch *p, struct ticket **out, uint64_t *waited_ns);
/* Ask for the ticket's rows; only where !ahead, after the evictions of the boundary. */
MUST_USE enum st prefetch_send(struct prefetch *p, struct ticket *t);
/* Whether prefetch_wait would return at once. */
bool prefetch_ready(struct prefetch *p, const struct ticket *t);
MUST_USE enum st prefetch_wait(struct prefetch *p, struct ticket *t, uint64_t *waited_ns);
/* Check every row's version against the plan (I2) and put the rows into their slots. */
MUST_USE enum st prefetch_install(struct prefetch *p, struct ticket *t, struct device *d,
                                  float *table, uint32_t stride);
void ticket_close(struct ticket *t); /* NULL ok; waits for replies under way */

/* Bytes of rows and of plans received so far. Any thread. */
uint64_t prefetch_row_bytes(const struct prefetch *p);
uint64_t prefetch_plan_bytes(const struct prefetch *p);

#endif
