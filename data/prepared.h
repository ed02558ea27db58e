/* data/prepared.h - the prepared file (.chp): samples already parsed, checked by checksums, read
 * at the speed of the disk. One file serves all table sizes: it holds raw ids.
 *
 * Little endian; every section starts at a multiple of 64 bytes, padded with zeros:
 *
 *   header, 64 bytes
 *      0 magic "CHANTERP"      8 u32 version (1)       12 u32 dense_features    16 u32 n_tables
 *     20 u32 rows per block   24 u64 rows              32 char[16] dense transform ("log1p")
 *     48 u64 zero             56 u64 XXH3-64 of bytes 0..56
 *   block 0, 1, ..: all hold `rows per block` samples, the last one the rest
 *     64 bytes: u64 XXH3-64 of the sections, seeded with the block's number; u32 samples; zeros
 *     f32 dense [samples][dense_features]     transformed
 *     u32 id    [samples][n_tables]           raw, 0 where the field was empty
 *     u8  label [samples]
 */
#ifndef CHANTER_DATA_PREPARED_H
#define CHANTER_DATA_PREPARED_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

/* Write all rows of the data that `cfg` names (data.path, or data.rows synthetic ones) to
 * `out_path`; train_rows and eval_rows play no part. Memory does not grow with the data. The file
 * appears when it is whole. `progress` (NULL ok) is called after each block with the rows so far.
 * Main thread. */
MUST_USE enum st prepare_write(const struct config *cfg, const char *out_path,
                               void (*progress)(void *ctx, uint64_t rows), void *ctx,
                               uint64_t *rows);
/* Read all of a prepared file and check every checksum. */
MUST_USE enum st prepared_verify(const char *path, uint64_t *rows);

#endif
