/* data/synthetic_law.h - which ids and dense values a synthetic sample has: the skew, the missing
 * fields and the nested columns of a real click log. Not the clicks: those are synthetic.c's. */
#ifndef CHANTER_DATA_SYNTHETIC_LAW_H
#define CHANTER_DATA_SYNTHETIC_LAW_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

/* Random streams of the synthetic source (base/rng.h), behind RNG_SYNTHETIC. */
enum { LAW_IDS, LAW_MERGE, LAW_MISSING, LAW_DENSE, LAW_DENSE_MISSING, LAW_LABEL, LAW_EFFECT,
       LAW_WEIGHT };

struct law; /* opaque; immutable after open: any thread */

#define LAW_EMPTY INT64_MIN       /* a dense field that is empty                     */
#define LAW_NO_RANK UINT32_MAX    /* of an id field that is empty                    */

/* `cfg` is borrowed for the call. */
MUST_USE enum st law_open(const struct config *cfg, struct law **out);
void law_close(struct law *l); /* NULL ok */

/* Sample `index`: dense [dense_features] integers or LAW_EMPTY, id [n_tables] rows of the tables,
 * rank [n_tables] popularity of the id in its table, 0 = most popular. Ranks that share a row share
 * the lowest rank of that row: a rank is a function of the id. */
void law_draw(const struct law *l, uint64_t index, int64_t *dense, uint32_t *id, uint32_t *rank);

/* Whether `id` of table t stands for an empty field. */
bool law_is_empty(const struct law *l, uint32_t t, uint32_t id);
/* Deviation of log1p of dense feature i, roughly. */
double law_dense_width(uint32_t i);

#endif
