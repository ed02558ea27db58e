#include "launch/sizes.h"

#include <stdlib.h>

#include "base/tree.h"

enum {
    STAMP_BYTES = 8,          /* beside each record of a server: who wrote it                    */
    IDLE_FILES = 64,          /* what a process has open without peers: libraries, queues, logs  */
    FILES_PER_PEER = 8,       /* connections, pipes and event files for one peer                 */
    SHM_PER_TRAINER = 4 << 20 /* Open MPI's segment of one rank on one machine                   */
};

static uint64_t sum(uint64_t a, uint64_t b)
{
    uint64_t r;
    return __builtin_add_overflow(a, b, &r) ? UINT64_MAX : r;
}

static uint64_t product(uint64_t a, uint64_t b)
{
    uint64_t r;
    return __builtin_mul_overflow(a, b, &r) ? UINT64_MAX : r;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t rows_of_tables(const struct config *c)
{
    uint64_t rows = 0;
    for (uint32_t t = 0; t < c->model.n_tables; t++) rows = sum(rows, c->model.tables[t]);
    return rows;
}

/* Samples that can be trained on; each of them touches a row of every table at most. */
static uint64_t distinct_samples(const struct config *c)
{
    uint64_t n = UINT64_MAX; /* the length of a file is not known here */
    if (c->data.format == DATA_SYNTHETIC) n = c->data.rows;
    if (c->data.train_rows != 0) n = least(n, c->data.train_rows);
    if (c->train.iterations != 0)
        n = least(n, product(c->train.iterations, c->train.global_batch));
    return n;
}

/* Floats of an MLP's weights and biases. */
static uint64_t mlp_floats(uint64_t in, const uint32_t *width, uint32_t n)
{
    uint64_t floats = 0;
    for (uint32_t i = 0; i < n; in = width[i++]) floats = sum(floats, product(in + 1, width[i]));
    return floats;
}

static uint64_t dense_floats(const struct config *c)
{
    uint64_t F = c->model.n_tables;
    uint64_t interaction = c->model.dim + F * (F + 1) / 2; /* F + 1 vectors, each pair once */
    return sum(mlp_floats(c->model.dense_features, c->model.bottom_mlp, c->model.n_bottom_mlp),
               mlp_floats(interaction, c->model.top_mlp, c->model.n_top_mlp));
}

uint64_t sizes_dense_bytes(const struct config *c)
{
    uint64_t slices = (c->train.slices + c->cluster.trainers - 1) / c->cluster.trainers;
    return product(dense_floats(c), (3 + slices) * sizeof(float));
}

static uint64_t window_bytes(const struct config *c)
{
    uint64_t batches = (uint64_t)c->oracle.lookahead + 2;
    uint64_t sample = product(c->model.n_tables, sizeof(uint64_t)) +
                      (c->model.dense_features + UINT64_C(1)) * sizeof(float);
    return product(product(batches, c->train.global_batch), sample);
}

static uint64_t files_of(const struct config *c)
{
    uint64_t peers = (uint64_t)c->cluster.trainers + c->cluster.servers + 1;
    return IDLE_FILES + (c->cluster.transport == TRANSPORT_GRPC ? FILES_PER_PEER * peers : 0);
}

/* Values and state of all rows and dense weights, and the values once more before training. */
static uint64_t disk_bytes(const struct config *c, uint32_t state)
{
    uint64_t rows = rows_of_tables(c), dense = dense_floats(c);
    uint64_t values = sum(product(rows, c->model.dim), dense);
    uint64_t states = state == 0 ? 0 : sum(product(rows, state), dense);
    uint64_t floats = c->run.save_initial ? values : 0;
    if (c->run.save_final) floats = sum(floats, sum(values, states));
    return product(floats, sizeof(float));
}

struct sizes sizes_of(const struct config *c)
{
    uint32_t state = config_row_state(c->train.optimizer, c->model.dim);
    uint64_t record = (c->model.dim + state) * sizeof(float), servers = c->cluster.servers;
    struct sizes s = {.files = files_of(c), .oracle_bytes = window_bytes(c),
                      .disk_bytes = disk_bytes(c, state)};
    s.rows = least(rows_of_tables(c), product(distinct_samples(c), c->model.n_tables));
    s.server_bytes = product(s.rows / servers + (s.rows % servers != 0), record + STAMP_BYTES);
    s.trainer_bytes = sum(product(config_cache_rows(c), record), sizes_dense_bytes(c));
    s.total_bytes = sum(s.oracle_bytes, product(servers, s.server_bytes));
    if (c->cluster.device == DEVICE_CPU) /* others have memory of their own: launch/fit.h */
        s.total_bytes = sum(s.total_bytes, product(c->cluster.trainers, s.trainer_bytes));
    if (c->cluster.transport == TRANSPORT_GRPC)
        s.shm_bytes = (uint64_t)SHM_PER_TRAINER * c->cluster.trainers;
    return s;
}

/* --- working set ---------------------------------------------------------------------------- */

static int compare_ids(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t count_distinct(uint64_t *id, size_t n)
{
    uint64_t distinct = n > 0;
    qsort(id, n, sizeof(*id), compare_ids);
    for (size_t i = 1; i < n; i++) distinct += id[i] != id[i - 1];
    return distinct;
}

uint64_t sizes_working_set(const struct config *c, struct samples *batch)
{
    uint32_t S = c->train.slices, N = c->cluster.trainers, slice = c->train.global_batch / S;
    uint64_t most = 0;
    for (uint32_t t = 0; t < N; t++) {
        /* A short batch ends within somebody's run. */
        uint64_t lo = least((uint64_t)slice * tree_run_start(t, N, S), batch->n);
        uint64_t hi = least((uint64_t)slice * tree_run_start(t + 1, N, S), batch->n);
        uint64_t n = count_distinct(batch->id + lo * c->model.n_tables,
                                    (hi - lo) * c->model.n_tables);
        if (n > most) most = n;
    }
    return most;
}
