/* The rows at rest. Per table one lazily mapped array of fixed-size records:
 *
 *     record: | stamp u64 | value f32[dim] | state f32[state] | pad to 8 bytes |
 *
 * stamp = attempt << 40 | (version + 1), so that "newer" is one integer comparison, attempt first.
 * A write-back has version >= 0, so stamp 0, which is what untouched zero pages hold, means "never
 * written". Row r of table t is here when (r + t) % n_shards == shard (base/row.h): the rows of a
 * table that are here start at `first` and are n_shards apart, so a place is a division.
 *
 * One bit per BLOCK records says whether any of them was ever written: untouched parts of a table
 * are then neither scanned for the digest nor mapped in by reads. */
#include "embserver/store.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/row.h"

enum { VERSION_BITS = 40, STAMP_BYTES = 8, BLOCK = 4096 };

struct table {
    uint64_t rows;        /* of the whole table                          */
    uint64_t first, n;    /* rows here: first, first + n_shards, ...     */
    uint8_t *record;      /* [n] mapped                                  */
    uint64_t *touched;    /* bit b: records [b * BLOCK, +BLOCK); mapped  */
    size_t record_bytes, touched_bytes; /* of the whole arrays           */
};

struct store {
    uint32_t shard, n_shards, n_tables, dim, state;
    uint64_t seed;
    size_t stride;        /* bytes from record to record                 */
    struct table *table;  /* [n_tables]                                  */
};

/* --- opening ---------------------------------------------------------------------------------- */

static enum st table_open(const struct store *s, uint32_t number, uint64_t rows, struct table *t)
{
    char where[32];
    snprintf(where, sizeof(where), "table %" PRIu32, number);
    if (rows == 0 || rows > UINT64_C(1) << ROW_BITS)
        return log_fail(ST_CONFIG, where, "%" PRIu64 " rows; want 1 to 2^%d", rows, ROW_BITS);
    t->rows = rows;
    t->first = (s->shard + s->n_shards - number % s->n_shards) % s->n_shards;
    t->n = rows > t->first ? (rows - t->first - 1) / s->n_shards + 1 : 0;
    t->record_bytes = t->n * s->stride; /* < 2^48 * 2^16 */
    t->touched_bytes = (t->n / BLOCK / 64 + 1) * sizeof(*t->touched);
    t->record = mem_map(t->record_bytes);
    t->touched = mem_map(t->touched_bytes);
    if (t->record == NULL || t->touched == NULL)
        return log_fail(ST_NOMEM, where,
                        "the kernel does not map %zu bytes for %" PRIu64 " rows; use more servers "
                        "or allow overcommit", t->record_bytes, t->n);
    return ST_OK;
}

static enum st cfg_check(const struct store_cfg *cfg)
{
    if (cfg->n_tables == 0 || cfg->n_tables > ROW_MAX_TABLES)
        return log_fail(ST_CONFIG, "model.tables", "%" PRIu32 " tables; want 1 to %d",
                        cfg->n_tables, ROW_MAX_TABLES);
    if (cfg->dim == 0 || cfg->dim > STORE_MAX_DIM || cfg->state > STORE_MAX_DIM)
        return log_fail(ST_CONFIG, "model.dim", "%" PRIu32 " floats a row; want 1 to %d",
                        cfg->dim, STORE_MAX_DIM);
    return ST_OK;
}

enum st store_open(const struct store_cfg *cfg, struct store **out)
{
    CHECK(cfg->shard < cfg->n_shards, "a shard is one of n_shards");
    enum st st;
    struct store *s = NULL;
    TRY(cfg_check(cfg), err);
    s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) goto no_memory;
    *s = (struct store){.shard = cfg->shard, .n_shards = cfg->n_shards, .dim = cfg->dim,
                        .state = cfg->state, .seed = cfg->seed};
    size_t bytes = STAMP_BYTES + (size_t)(cfg->dim + cfg->state) * sizeof(float);
    s->stride = (bytes + 7) / 8 * 8;
    s->table = mem_zalloc(cfg->n_tables, sizeof(*s->table));
    if (s->table == NULL) goto no_memory;
    for (uint32_t t = 0; t < cfg->n_tables; t++) {
        s->n_tables = t + 1; /* store_close unmaps this one too */
        TRY(table_open(s, t, cfg->table_rows[t], &s->table[t]), err);
    }
    *out = s;
    return ST_OK;

no_memory: st = log_fail(ST_NOMEM, NULL, "no memory for the rows of shard %" PRIu32, cfg->shard);
err:       store_close(s);
           return st;
}

void store_close(struct store *s)
{
    if (s == NULL) return;
    for (uint32_t t = 0; t < s->n_tables; t++) {
        mem_unmap(s->table[t].record, s->table[t].record_bytes);
        mem_unmap(s->table[t].touched, s->table[t].touched_bytes);
    }
    mem_free(s->table);
    mem_free(s);
}

/* --- where a record is ------------------------------------------------------------------------ */

int store_has(const struct store *s, uint64_t row_id)
{
    uint32_t t = row_table(row_id);
    return t < s->n_tables && row_number(row_id) < s->table[t].rows &&
           row_shard(row_id, s->n_shards) == s->shard;
}

static uint64_t place_of(const struct store *s, const struct table *t, uint64_t row_id)
{
    return (row_number(row_id) - t->first) / s->n_shards;
}

static bool block_touched(const struct table *t, uint64_t place)
{
    uint64_t block = place / BLOCK;
    return t->touched[block / 64] >> (block % 64) & 1;
}

static uint64_t stamp_of(const uint8_t *record)
{
    uint64_t stamp;
    memcpy(&stamp, record, sizeof(stamp));
    return stamp;
}

/* The row's record, or NULL when it was never written. */
static const uint8_t *written_record(const struct store *s, uint64_t row_id)
{
    CHECK(store_has(s, row_id), "rows are checked where the message arrives");
    const struct table *t = &s->table[row_table(row_id)];
    uint64_t place = place_of(s, t, row_id);
    if (!block_touched(t, place)) return NULL;
    const uint8_t *record = t->record + place * s->stride;
    return stamp_of(record) == 0 ? NULL : record;
}

void store_prefetch(const struct store *s, uint64_t row_id)
{
    if (!store_has(s, row_id)) return;
    const struct table *t = &s->table[row_table(row_id)];
    uint64_t place = place_of(s, t, row_id);
    if (block_touched(t, place)) __builtin_prefetch(t->record + place * s->stride);
}

/* --- reading ---------------------------------------------------------------------------------- */

int64_t store_version(const struct store *s, uint64_t row_id)
{
    const uint8_t *record = written_record(s, row_id);
    if (record == NULL) return STORE_NEVER;
    return (int64_t)(stamp_of(record) & ((UINT64_C(1) << VERSION_BITS) - 1)) - 1;
}

/* Value of a row that was never written. */
static void initial_value(uint64_t seed, uint64_t row_id, uint64_t table_rows, uint32_t dim,
                          float *value)
{
    float bound = (float)sqrt(1.0 / (double)table_rows);
    rng_uniform(seed, RNG_TABLE_0 + row_table(row_id), row_number(row_id), bound, value, dim);
}

void store_initial(uint64_t seed, uint64_t row_id, uint64_t table_rows, uint32_t dim,
                   uint32_t state, float *record)
{
    initial_value(seed, row_id, table_rows, dim, record);
    memset(record + dim, 0, state * sizeof(float));
}

void store_read(const struct store *s, uint64_t row_id, uint32_t width, uint8_t *out)
{
    CHECK(width == s->dim || width == s->dim + s->state, "a value or a whole record");
    const uint8_t *record = written_record(s, row_id);
    if (record != NULL) {
        memcpy(out, record + STAMP_BYTES, width * sizeof(float));
        return;
    }
    float value[STORE_MAX_DIM]; /* `out` may be unaligned */
    initial_value(s->seed, row_id, s->table[row_table(row_id)].rows, s->dim, value);
    memcpy(out, value, s->dim * sizeof(float));
    memset(out + s->dim * sizeof(float), 0, (width - s->dim) * sizeof(float));
}

/* --- writing ---------------------------------------------------------------------------------- */

static bool stamp_make(uint32_t attempt, int64_t version, uint64_t *out)
{
    if (version < 0 || version >= (INT64_C(1) << VERSION_BITS) - 1) return false;
    if (attempt >> (64 - VERSION_BITS) != 0) return false;
    *out = (uint64_t)attempt << VERSION_BITS | (uint64_t)(version + 1);
    return true;
}

enum st store_check(const struct store *s, uint64_t row_id, uint32_t attempt, int64_t version,
                    const uint8_t *record)
{
    uint64_t stamp;
    if (!stamp_make(attempt, version, &stamp)) return ST_BADMSG;
    const uint8_t *old = written_record(s, row_id);
    if (old == NULL || stamp > stamp_of(old)) return ST_OK;
    if (stamp < stamp_of(old)) return ST_BUSY;
    size_t bytes = (s->dim + s->state) * sizeof(float);
    return memcmp(old + STAMP_BYTES, record, bytes) == 0 ? ST_OK : ST_BADMSG;
}

#ifdef BUG_delta_not_put
/* Planted bug: takes the record for a change of the row instead of the row. */
static void put_values(const struct store *s, uint64_t row_id, uint8_t *to, const uint8_t *record)
{
    uint32_t width = s->dim + s->state;
    float old[2 * STORE_MAX_DIM], delta[2 * STORE_MAX_DIM];
    store_read(s, row_id, width, (uint8_t *)old);
    memcpy(delta, record, width * sizeof(float));
    for (uint32_t i = 0; i < width; i++) old[i] += delta[i];
    memcpy(to, old, width * sizeof(float));
}
#else
static void put_values(const struct store *s, uint64_t row_id, uint8_t *to, const uint8_t *record)
{
    memcpy(to, record, (s->dim + s->state) * sizeof(float));
}
#endif

enum st store_put(struct store *s, uint64_t row_id, uint32_t attempt, int64_t version,
                  const uint8_t *record)
{
    enum st st = store_check(s, row_id, attempt, version, record);
    if (st != ST_OK) return st;
    uint64_t stamp = 0;
    stamp_make(attempt, version, &stamp);
    struct table *t = &s->table[row_table(row_id)];
    uint64_t place = place_of(s, t, row_id), block = place / BLOCK;
    uint8_t *to = t->record + place * s->stride;
    put_values(s, row_id, to + STAMP_BYTES, record);
    memcpy(to, &stamp, sizeof(stamp));
    t->touched[block / 64] |= UINT64_C(1) << (block % 64);
    return ST_OK;
}

/* --- digest ----------------------------------------------------------------------------------- */

void store_digest_row(uint64_t seed, uint64_t row_id, uint64_t table_rows, uint32_t dim,
                      uint32_t state, const float *record, struct digest *d)
{
    CHECK(dim <= STORE_MAX_DIM && state <= STORE_MAX_DIM, "store_open refuses wider rows");
    static const float ZERO[STORE_MAX_DIM];
    float value[STORE_MAX_DIM];
    initial_value(seed, row_id, table_rows, dim, value);
    if (memcmp(record, value, dim * sizeof(float)) == 0 &&
        memcmp(record + dim, ZERO, state * sizeof(float)) == 0)
        return;
    digest_add(d, row_id, record, (dim + state) * sizeof(float));
}

static void digest_block(const struct store *s, uint32_t table, uint64_t block, struct digest *d)
{
    const struct table *t = &s->table[table];
    uint64_t end = (block + 1) * BLOCK < t->n ? (block + 1) * BLOCK : t->n;
    for (uint64_t place = block * BLOCK; place < end; place++) {
        const uint8_t *record = t->record + place * s->stride;
        if (stamp_of(record) == 0) continue;
        uint64_t id = row_id(table, t->first + place * s->n_shards);
        store_digest_row(s->seed, id, t->rows, s->dim, s->state,
                         (const float *)(const void *)(record + STAMP_BYTES), d);
    }
}

struct digest store_digest(const struct store *s)
{
    struct digest d = {0};
    for (uint32_t t = 0; t < s->n_tables; t++) {
        size_t words = s->table[t].touched_bytes / sizeof(uint64_t);
        for (size_t w = 0; w < words; w++)
            for (uint64_t bits = s->table[t].touched[w]; bits != 0; bits &= bits - 1)
                digest_block(s, t, w * 64 + (uint64_t)__builtin_ctzll(bits), &d);
    }
    return d;
}
