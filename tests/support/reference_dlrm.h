/* tests/support/reference_dlrm.h - DLRM once more, in double, one sample and one number at a time:
 * the model that the product's is compared with, and a trainer that replays whole runs with its
 * tables as plain arrays. Shares no code with compute/ or trainer/. Aborts when out of memory. */
#ifndef CHANTER_TESTS_SUPPORT_REFERENCE_DLRM_H
#define CHANTER_TESTS_SUPPORT_REFERENCE_DLRM_H

#include <stddef.h>
#include <stdint.h>

#include "config/config.h"

struct ref_shape {
    uint32_t dense_features, n_tables, dim;
    uint32_t n_bottom, n_top;         /* layers                                                */
    const uint32_t *bottom, *top;     /* widths [n + 1], input first                           */
};

/* Numbers of all dense tensors: for each layer, bottom first, W (out, in) then b (out), without
 * padding. Tensor k (k / 2 is the layer) starts at *offset and has the returned size. */
size_t ref_params(const struct ref_shape *s);
size_t ref_tensor(const struct ref_shape *s, uint32_t k, size_t *offset);

struct ref_batch {
    uint32_t B;
    const float *dense;               /* (B, dense_features)                                   */
    const float *label;               /* (B)                                                   */
    const double *rows;               /* (B, F, D) looked-up rows                              */
};
struct ref_grads {                    /* each overwritten; NULL: not wanted                    */
    double *params;                   /* [ref_params] of scale * (sum of losses)               */
    double *rows;                     /* (B, F, D)                                             */
    double *prob;                     /* (B)                                                   */
};
/* Sum of the samples' losses. */
double ref_dlrm(const struct ref_shape *s, const double *params, const struct ref_batch *batch,
                double scale, const struct ref_grads *out);

/* A whole training: set params and tables after ref_trainer_open, then step. */
struct ref_trainer {
    struct ref_shape shape;           /* its arrays are borrowed                               */
    enum optimizer optimizer;
    double learning_rate, epsilon;
    double *params, *state;           /* [ref_params]                                          */
    double **table;                   /* [F][rows * D]                                         */
    double **table_state;             /* [F][rows * D]; rowwise: [F][rows]                     */
    uint64_t *table_rows;             /* [F]                                                   */
};
struct ref_trainer *ref_trainer_open(const struct ref_shape *s, const uint64_t *table_rows,
                                     enum optimizer optimizer, double learning_rate,
                                     double epsilon);
void ref_trainer_close(struct ref_trainer *t);
/* One iteration over a global batch; row (B,F): row numbers. Returns the mean loss before it. */
double ref_trainer_step(struct ref_trainer *t, uint32_t B, const float *dense, const float *label,
                        const uint64_t *row);

#endif
