/* config/config.h - what a user asked for, checked. One struct for all roles: every process of a
 * job reads the same file (the run directory's config.yaml) and so agrees with the others.
 * Key names are those of the YAML file: config.train.global_batch is `train: {global_batch: }`. */
#ifndef CHANTER_CONFIG_CONFIG_H
#define CHANTER_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum data_format { DATA_CRITEO_TSV, DATA_PREPARED, DATA_SYNTHETIC };
enum model_kind { MODEL_DLRM };
enum optimizer { OPT_SGD, OPT_ADAGRAD, OPT_ROWWISE_ADAGRAD };
enum transport_kind { TRANSPORT_LOCAL, TRANSPORT_GRPC };
enum device_kind { DEVICE_CPU, DEVICE_CUDA };
enum precision { PRECISION_FP32, PRECISION_TF32, PRECISION_BF16 };

struct config {
    struct {
        enum data_format format;
        char *path;             /* file; for synthetic: not used                              */
        uint64_t train_rows;    /* rows from the start that are trained on; 0 = all           */
        char *eval_path;        /* held-out file; NULL = the rows after train_rows            */
        uint64_t eval_rows;     /* held-out rows used at most; 0 = all there are              */
        uint64_t rows;          /* synthetic: samples in one pass                             */
        uint64_t seed;          /* synthetic: seed of data and planted model                  */
    } data;
    struct {
        enum model_kind kind;
        uint32_t dense_features;             /* 13                                            */
        uint32_t dim;                        /* D: floats per row                             */
        uint32_t *bottom_mlp, n_bottom_mlp;  /* widths after the input; last = dim            */
        uint32_t *top_mlp, n_top_mlp;        /* widths after the interaction; last = 1        */
        uint64_t *tables;                    /* rows per table                                */
        uint32_t n_tables;                   /* F                                             */
    } model;
    struct {
        uint32_t global_batch;  /* B: samples of one iteration over all trainers              */
        uint32_t slices;        /* S: global_batch % slices == 0, 1..64                       */
        uint64_t iterations;    /* 0 = use epochs                                             */
        uint32_t epochs;        /* passes over the training rows; the last batch may be short */
        enum optimizer optimizer;
        float learning_rate, epsilon;
        uint64_t seed;          /* of initial weights                                         */
    } train;
    struct {
        uint32_t lookahead;     /* L; 0 = the baseline: no cache, no overlap                  */
        uint32_t queue;         /* plans kept ready per trainer                               */
    } oracle;
    struct {
        uint32_t trainers, servers;
        uint64_t cache_rows;    /* per trainer; 0 = as many as the window can ever need       */
        enum transport_kind transport;
        enum device_kind device;
        uint32_t threads;         /* slices one trainer computes at once                      */
        uint32_t server_threads;  /* shards of one server, a thread each                      */
        uint32_t prefetch;        /* iterations that a trainer's fetches run ahead            */
        uint32_t timeout_s;       /* deadline of every wait (I6)                              */
    } cluster;
    struct {
        enum precision precision; /* of the factors of matrix products; sums and weights are f32  */
    } device;
    struct {
        char *dir;
        bool save_initial, save_final;
        uint64_t eval_every;    /* iterations between evaluations; 0 = only at the end        */
        uint64_t snapshot_every;/* accepted: 0                                                */
    } run;
};

/* Read `path`, apply `set[0..n_set)` ("cluster.trainers=4") over it, fill in defaults, check.
 * Logs the first thing wrong, with file, line, key and the nearest known name. `*out` owns its
 * strings and arrays until config_close. Main thread. */
MUST_USE enum st config_open(const char *path, const char *const *set, size_t n_set,
                             struct config **out);
void config_close(struct config *c); /* NULL ok */
/* Write `c` as a file that config_open reads back to the same values. */
MUST_USE enum st config_write(const struct config *c, const char *path);

/* Floats of optimizer state behind a row of D floats: 0, D or 1. */
uint32_t config_row_state(enum optimizer opt, uint32_t dim);
/* Shards in all: servers * server_threads. */
uint32_t config_shards(const struct config *c);
/* Slots of one trainer's cache: cluster.cache_rows, or as many as the window can ever need. */
uint64_t config_cache_rows(const struct config *c);
/* Iterations of the run; 0 where only the data can tell (epochs of a file of unknown length). */
uint64_t config_iterations(const struct config *c);
const char *config_device_name(enum device_kind kind);
const char *config_optimizer_name(enum optimizer opt); /* as in the file: "rowwise_adagrad" */

#endif
