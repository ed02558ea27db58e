/* embserver/store.h - the rows at rest: one shard's part of every table, value and optimizer state
 * in one record, each with the version (iteration) that wrote it. Owned by one shard thread: no
 * locks. Memory is mapped, not filled: a row that was never written has no bytes of its own; it
 * reads as its initial value from the counter-based generator, so reading never writes (I7). */
#ifndef CHANTER_EMBSERVER_STORE_H
#define CHANTER_EMBSERVER_STORE_H

#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"

struct store; /* opaque */

struct store_cfg {
    uint32_t shard, n_shards;
    uint32_t n_tables, dim, state;  /* floats per row: value, state */
    const uint64_t *table_rows;     /* [n_tables]; copied           */
    uint64_t seed;
};

enum { STORE_NEVER = -1 };      /* version of a row that was never written                   */
enum { STORE_MAX_DIM = 4096 };  /* floats of value, and of state, at most                    */

MUST_USE enum st store_open(const struct store_cfg *cfg, struct store **out);
void store_close(struct store *s); /* NULL ok */

/* Is `row_id` in range and of this shard? */
int store_has(const struct store *s, uint64_t row_id);
int64_t store_version(const struct store *s, uint64_t row_id);
/* Copy floats [0, width) of the record (width = dim, or dim + state) to `out` (unaligned). */
void store_read(const struct store *s, uint64_t row_id, uint32_t width, uint8_t *out);
/* A hint that the row is read or put soon; any row id. */
void store_prefetch(const struct store *s, uint64_t row_id);
/* What store_put would say, changing nothing: a message is checked whole before any of it is
 * applied. ST_BADMSG also for an attempt >= 2^24 or a version outside [0, 2^40 - 1). */
MUST_USE enum st store_check(const struct store *s, uint64_t row_id, uint32_t attempt,
                             int64_t version, const uint8_t *record);
/* A guarded PUT (I3): takes the record iff (attempt, version) is newer than what wrote the row;
 * returns ST_OK when applied or an exact copy of what is there; ST_BUSY when older: nothing
 * changed; ST_BADMSG when (attempt, version) is the same and the bytes are not: two writers. */
MUST_USE enum st store_put(struct store *s, uint64_t row_id, uint32_t attempt, int64_t version,
                           const uint8_t *record);
/* Digest of all rows that differ from their initial record. */
struct digest store_digest(const struct store *s);
/* The digest contribution of one record; 0 where it equals the initial one. For files, too. */
void store_digest_row(uint64_t seed, uint64_t row_id, uint64_t table_rows, uint32_t dim,
                      uint32_t state, const float *record, struct digest *d);
/* Initial record of a row: value uniform in +-sqrt(1 / table_rows), state 0. */
void store_initial(uint64_t seed, uint64_t row_id, uint64_t table_rows, uint32_t dim,
                   uint32_t state, float *record);

#endif
