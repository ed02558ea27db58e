/* config/derived.c - numbers that follow from the configuration, so that every role comes to the
 * same ones. */
#include "config/config.h"

/* Oracle and trainers have to come to the same number: it bounds the slots in every plan. */
uint64_t config_cache_rows(const struct config *c)
{
    if (c->cluster.cache_rows != 0) return c->cluster.cache_rows;
    const uint64_t most = UINT32_MAX - 1; /* a slot is 32 bits */
    uint64_t all = 0, window;
    for (uint32_t t = 0; t < c->model.n_tables; t++)
        if (__builtin_add_overflow(all, c->model.tables[t], &all)) all = most;
    /* The window, the batch that is in use and the one whose rows are leaving. */
    uint64_t batches = (uint64_t)c->oracle.lookahead + 2;
    uint64_t ids = (uint64_t)c->train.global_batch * c->model.n_tables;
    if (__builtin_mul_overflow(batches, ids, &window)) window = most;
    uint64_t rows = all < window ? all : window;
    return rows < most ? rows : most;
}

uint64_t config_iterations(const struct config *c)
{
    if (c->train.iterations != 0) return c->train.iterations;
    uint64_t rows = c->data.train_rows, samples;
    if (rows == 0 && c->data.format == DATA_SYNTHETIC) rows = c->data.rows;
    if (__builtin_mul_overflow(rows, c->train.epochs, &samples)) return 0;
    return samples / c->train.global_batch + (samples % c->train.global_batch != 0);
}
