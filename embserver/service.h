/* embserver/service.h - an embedding server as a running role: one thread per shard that owns its
 * store, and a handler that checks requests and passes each to the thread of the shard it names.
 * Fetches whose rows are not there yet are parked in the shard, write-backs never wait (I2). */
#ifndef CHANTER_EMBSERVER_SERVICE_H
#define CHANTER_EMBSERVER_SERVICE_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "proto/transport.h"

struct embserver; /* opaque */

struct embserver_cfg {
    const struct config *config;  /* borrowed until embserver_close                             */
    struct transport *transport;
    const char *address;
    uint32_t rank;                /* 0..servers-1: shards [rank * threads, (rank+1) * threads)  */
    uint64_t job;
    uint32_t attempt;
};

MUST_USE enum st embserver_start(const struct embserver_cfg *cfg, struct embserver **out);
const char *embserver_address(const struct embserver *s);
void embserver_close(struct embserver *s); /* NULL ok; parked fetches are failed: ST_CANCELLED */

#endif
