/* embserver/shard.h - one shard as a running thread: it owns the shard's store and does, in order
 * of arrival, what the handler queues for it. A fetch whose rows are not there yet is parked, so
 * that the write-back it waits for gets through (I2). Not a listener: that is service.c. */
#ifndef CHANTER_EMBSERVER_SHARD_H
#define CHANTER_EMBSERVER_SHARD_H

#include <stdint.h>

#include "base/status.h"
#include "embserver/parking.h"
#include "embserver/store.h"
#include "proto/codec.h"
#include "proto/transport.h"

struct shard; /* opaque */

struct shard_cfg {
    struct store_cfg store;
    uint32_t timeout_s;      /* a parked fetch is failed after that */
};

enum task_kind { TASK_FETCH, TASK_WRITE_BACK, TASK_VISIT };

/* Look at the store on its own thread; `s` is NULL when the shard is closing or overfull. Must not
 * block, and has to take care of its own answer. */
typedef void shard_visit(void *ctx, const struct store *s);

struct task {                    /* one request; owns itself: mem_alloc'ed, freed when answered */
    struct parked parked;        /* first: the shard gets from here to the task                 */
    enum task_kind kind;
    struct rpc_call *call;       /* fetch, write-back: answered by the shard                    */
    struct rpc_header head;      /* of the answer; job and attempt are already checked          */
    union {
        struct fetch_request fetch;
        struct write_back put;
        struct { shard_visit *fn; void *ctx; } visit;
    };
    uint32_t n_there;            /* fetch: rows [0, n_there) have the version they need         */
};

MUST_USE enum st shard_open(const struct shard_cfg *cfg, struct shard **out);
/* Takes `t`, whatever becomes of it: a shard that is full or stopped fails it. Does not block. Any
 * thread. */
void shard_push(struct shard *s, struct task *t);
/* Finish what is queued, fail what is parked (ST_CANCELLED), end the thread. Once. */
void shard_stop(struct shard *s);
void shard_close(struct shard *s); /* NULL ok; after shard_stop */

#endif
