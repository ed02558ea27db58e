/* base/row.h - how a row of a table is named: u64 = table << 48 | row. */
#ifndef CHANTER_BASE_ROW_H
#define CHANTER_BASE_ROW_H

#include <stdint.h>

enum { ROW_BITS = 48, ROW_MAX_TABLES = 1 << 16 };

static inline uint64_t row_id(uint32_t table, uint64_t row)
{
    return (uint64_t)table << ROW_BITS | row;
}
static inline uint32_t row_table(uint64_t id)
{
    return (uint32_t)(id >> ROW_BITS);
}
static inline uint64_t row_number(uint64_t id)
{
    return id & ((UINT64_C(1) << ROW_BITS) - 1);
}

/* Which shard holds a row: tables are dealt out row by row, shifted by the table's number so that
 * small tables do not all start on shard 0. Shard g of n_shards lives on server g / threads as its
 * thread g % threads (threads: shard threads of one server). */
static inline uint32_t row_shard(uint64_t id, uint32_t n_shards)
{
    return (uint32_t)((row_number(id) + row_table(id)) % n_shards);
}

#endif
