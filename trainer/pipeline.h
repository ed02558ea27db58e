/* trainer/pipeline.h - one trainer rank from its first plan to its last write-back. Read this
 * first: the stages, in the order in which a row passes through them.
 *
 *   PREFETCH  prefetch.c   asks the oracle for plans ahead, sends the plan's fetches, queues both
 *   COMPUTE   pipeline.c   boundary, step.c: forward, backward, row sums, update   (the caller)
 *   EXCHANGE  exchange.c   runs the exchanges that COMPUTE hands over, in order
 *   (replies) writeback.c  COMPUTE copies evicted rows into messages; they are resent until the
 *                          server says so; bounded by iterations in flight
 */
#ifndef CHANTER_TRAINER_PIPELINE_H
#define CHANTER_TRAINER_PIPELINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"
#include "config/config.h"
#include "proto/transport.h"
#include "trainer/comm.h"

enum progress_mode { PROGRESS_NONE, PROGRESS_PLAIN, PROGRESS_TTY };

struct trainer_cfg {
    const struct config *config;      /* borrowed                                               */
    struct comm *comm;                /* borrowed; comm->rank is this trainer's number          */
    struct transport *transport;      /* borrowed                                               */
    const char *oracle;               /* address                                                */
    const char *const *server;        /* [config->cluster.servers] addresses                    */
    uint64_t job;
    uint32_t attempt;
    enum progress_mode progress;      /* rank 0 writes it to standard error                     */
    const atomic_bool *over;          /* NULL, or: once set, the job has failed elsewhere, and
                                         that oracle and servers are gone is no news            */
};

struct trainer_result {               /* rank 0's is the job's                                  */
    uint64_t iterations, samples;
    double seconds, samples_per_s;
    double exposed_wait_s;            /* COMPUTE waited for rows                                */
    double loss;                      /* of the last iteration                                  */
    int has_eval;
    double eval_loss, auc;            /* held-out rows, final weights                           */
    uint64_t fetch_bytes, write_back_bytes, exchange_bytes, plan_bytes; /* this rank's          */
    struct digest digest;             /* tables, optimizer state, dense: the whole job          */
};

/* Run to the end. Files go to config->run.dir (must exist): rank 0 writes model.json,
 * metrics.jsonl, init.safetensors and final.safetensors there. Logs what stopped it. */
MUST_USE enum st trainer_run(const struct trainer_cfg *cfg, struct trainer_result *out);

#endif
