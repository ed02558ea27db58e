/* tests/support/tiny_run.h - a finished run with a model of a few hundred numbers, written file by
 * file through the product's writers, with any one thing wrong with it that a test asks for. */
#ifndef CHANTER_TESTS_SUPPORT_TINY_RUN_H
#define CHANTER_TESTS_SUPPORT_TINY_RUN_H

#include <stdint.h>

#include "base/digest.h"
#include "config/config.h"
#include "trainer/model.h"

enum { TINY_TABLES = 3, TINY_ITERATIONS = 12 };

struct tiny_run {
    char dir[64];                 /* made by mkdtemp                                          */
    char run[96], data[96];       /* the run directory in it; a data file beside it           */
    struct config *config;
    struct model *model;
    uint32_t state;               /* K: floats of state a row                                 */
    float *table[TINY_TABLES];    /* [rows][D + K] records; every third row was trained       */
    float *params, *dense_state;  /* [n_params]                                               */
};

/* Make the directory with config.yaml, model.json, the weights and, but for sgd, their state. */
void tiny_run_open(struct tiny_run *t, enum optimizer optimizer);
void tiny_run_close(struct tiny_run *t); /* removes all files */

/* DIR/NAME in the run directory; valid until the next call. */
const char *tiny_run_path(const struct tiny_run *t, const char *name);
/* Overwrite a file of the run. */
void tiny_run_text(const struct tiny_run *t, const char *name, const char *text);
/* Cut a file to `bytes`. */
void tiny_run_cut(const struct tiny_run *t, const char *name, long bytes);

/* How a weight file differs from what it should be. */
struct tiny_fault {
    const char *leave_out;        /* name of a tensor that is not written        */
    const char *add;              /* name of one too many                        */
    uint32_t dim;                 /* width of all table rows; 0: as it should be */
    uint64_t rows_of_1;           /* rows of table 1; 0: as it should be         */
};
void tiny_run_weights(const struct tiny_run *t, int state, struct tiny_fault fault);

#endif
