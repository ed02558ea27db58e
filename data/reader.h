/* data/reader.h - the seam inside data/: one file format is one reader of raw samples. Windows of
 * rows, table sizes and row ids are source.c's business; a reader knows its file and no more. */
#ifndef CHANTER_DATA_READER_H
#define CHANTER_DATA_READER_H

#include <math.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

struct raw_samples {      /* room for the samples of one read; arrays borrowed for the call      */
    float *dense;         /* [n][dense_features] transformed: (float)log1p(max(x, 0))            */
    uint8_t *label;       /* [n] 0 or 1                                                          */
    uint32_t *id;         /* [n][n_tables] raw ids, before the modulo; 0 where the field is empty */
};

/* The one dense transform, log(max(x, 0) + 1): every reader gives the same bits for the same x. */
static inline float dense_transform(int64_t x)
{
    return x > 0 ? (float)log1p((double)x) : 0.0f;
}

struct reader;            /* first member of every implementation's struct                       */

struct reader_ops {
    /* Read up to `want` samples; *got < want only at the end of the file. */
    enum st (*read)(struct reader *r, struct raw_samples *out, uint32_t want, uint32_t *got);
    /* Continue at sample `row`. ST_END, unlogged, when the file holds only *held <= row samples. */
    enum st (*seek)(struct reader *r, uint64_t row, uint64_t *held);
    void (*close)(struct reader *r);
};

struct reader {
    const struct reader_ops *ops;
    uint64_t rows;        /* samples in all; READER_ROWS_UNKNOWN until the end is met            */
};

#define READER_ROWS_UNKNOWN UINT64_MAX

/* `cfg` gives the shape (dense_features, n_tables) and is borrowed until close; `path` likewise.
 * All log what is wrong with the file. */
MUST_USE enum st criteo_tsv_open(const struct config *cfg, const char *path, struct reader **out);
MUST_USE enum st prepared_open(const struct config *cfg, const char *path, struct reader **out);
/* The synthetic stream cut off after `rows` samples. */
MUST_USE enum st synthetic_reader_open(const struct config *cfg, uint64_t rows,
                                       struct reader **out);
/* The reader of cfg->data.format over all rows of cfg->data.path (synthetic: cfg->data.rows). */
MUST_USE enum st reader_open(const struct config *cfg, const char *path, struct reader **out);

#endif
