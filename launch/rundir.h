/* launch/rundir.h - a run directory as a training run leaves it: config.yaml, model.json and the
 * final weights, opened for reading and checked against each other. Tables stay in the mapped
 * files; only the dense weights are copied. Nothing here writes. */
#ifndef CHANTER_LAUNCH_RUNDIR_H
#define CHANTER_LAUNCH_RUNDIR_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"
#include "config/config.h"
#include "data/safetensors.h"
#include "trainer/model.h"

enum { RUNDIR_PATH_BYTES = 4096 };

struct rundir {                   /* read only after rundir_open                               */
    struct config *config;        /* owns                                                      */
    struct model *model;          /* owns                                                      */
    uint64_t iterations;          /* trained                                                   */
    struct safetensors *weights;  /* owns                                                      */
    struct safetensors *state;    /* owns; NULL: not asked for, or the optimizer keeps none    */
    const struct st_tensor **table;        /* [F] (rows, D)                                    */
    const struct st_tensor **table_state;  /* [F] (rows, K); NULL like state                   */
    float *params;                /* [model->n_params] dense weights, padding 0                */
    float *dense_state;           /* [model->n_params]; NULL like state                        */
};

enum rundir_need { RUNDIR_WEIGHTS, RUNDIR_STATE };

/* Open DIR with set[0..n_set) over its configuration. RUNDIR_STATE: the optimizer's state as well,
 * where the optimizer keeps any. Logs what is missing, damaged or of another run: ST_NOINPUT for a
 * missing file, ST_DATA for files that do not fit together. */
MUST_USE enum st rundir_open(const char *dir, const char *const *set, size_t n_set,
                             enum rundir_need need, struct rundir **out);
void rundir_close(struct rundir *r); /* NULL ok */

/* Rows of all tables together. */
uint64_t rundir_rows(const struct rundir *r);
/* One row of a table in a mapped file: t->cols floats, at any address: to be copied out. */
static inline const void *rundir_row(const struct st_tensor *t, uint64_t row)
{
    return (const char *)t->data + row * t->cols * sizeof(float);
}

/* Called now and then with the rows done so far. */
typedef void rundir_progress(void *ctx, uint64_t rows);
/* Digest over tables, optimizer state and dense weights: what the run's final line says. `r` was
 * opened with RUNDIR_STATE. progress: NULL ok. */
MUST_USE enum st rundir_digest(const struct rundir *r, rundir_progress *progress, void *ctx,
                               struct digest *out);

/* DIR/NAME; ST_USAGE, logged, when that is too long. */
MUST_USE enum st rundir_path(const char *dir, const char *name, char out[RUNDIR_PATH_BYTES]);

#endif
