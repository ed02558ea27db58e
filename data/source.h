/* data/source.h - the seam behind which data formats live: one stream of samples in file order.
 * Not a shuffler and not a batcher. Behind it: criteo_tsv.c, prepared.c, synthetic.c.
 *
 * What comes out is ready for the model: dense = log(max(x, 0) + 1), 0 where the field is empty;
 * ids taken modulo the table's rows, id 0 where the field is empty. */
#ifndef CHANTER_DATA_SOURCE_H
#define CHANTER_DATA_SOURCE_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

struct source; /* opaque; used by one thread at a time */

struct samples {         /* n samples; arrays owned by whoever made them                   */
    uint32_t n;
    float *dense;        /* [n][dense_features]                                            */
    float *label;        /* [n] 0 or 1                                                     */
    uint64_t *id;        /* [n][F] row ids (base/row.h)                                    */
};

/* Open the training data of `cfg` (borrowed until source_close), or with `eval` the held-out rows:
 * cfg->data.eval_path from its start, else data.path (or the synthetic stream) after train_rows;
 * eval_rows at most. Logs what is wrong with the file. */
MUST_USE enum st source_open(const struct config *cfg, int eval, struct source **out);
void source_close(struct source *s); /* NULL ok */

/* Read up to `want` samples into `out` (room for `want`, starting at sample index `at`); sets
 * *got. *got < want only at the end of the pass: *got == 0 means there are no more; a later call
 * after source_rewind starts again. Bad lines stop with ST_DATA and a line of FILE:LINE: ... */
MUST_USE enum st source_read(struct source *s, struct samples *out, uint32_t at, uint32_t want,
                             uint32_t *got);
MUST_USE enum st source_rewind(struct source *s);

/* Room for `cap` samples; samples_close frees it. */
MUST_USE enum st samples_open(uint32_t cap, uint32_t dense_features, uint32_t n_tables,
                              struct samples *out);
void samples_close(struct samples *s);

#endif
