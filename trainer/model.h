/* trainer/model.h - the network between rows and loss: its dense tensors, and forward and backward
 * over one slice. DLRM (Naumov et al. 2019) as facebookresearch/dlrm builds it: bottom MLP with
 * ReLU after every layer, dot interaction, top MLP with ReLU after all but the last layer. Knows
 * devices; knows nothing of slots' owners, peers or servers. */
#ifndef CHANTER_TRAINER_MODEL_H
#define CHANTER_TRAINER_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "compute/device.h"
#include "config/config.h"

struct model_tensor {
    char name[32];          /* facebookresearch/dlrm's state_dict name: "bot_l.0.weight"       */
    size_t offset;          /* floats from the start of the parameters in host memory, where   */
                            /* weights lie row by row; 16-float aligned                        */
    size_t at;              /* the same on the device (model_place)                            */
    size_t prepared;        /* weight: bytes from the start of what is prepared there          */
    uint32_t rows, cols;    /* weight (out, in); bias (out, 1)                                 */
    int is_bias;
};

struct model {              /* read only after model_place: shared by all threads              */
    uint32_t dense_features, n_tables, dim;
    uint32_t n_tensors;
    struct model_tensor *tensor;   /* bottom then top; weight, bias, weight, bias, ...         */
    size_t n_params;               /* floats in host memory, padding between tensors included  */
    size_t n_floats;               /* floats on the device, likewise                           */
    size_t prepared_bytes;
    uint32_t n_bottom, n_top;      /* layers                                                   */
    uint32_t *bottom, *top;        /* widths, [n + 1], input first                             */
};

MUST_USE enum st model_open(const struct config *cfg, struct model **out);
void model_close(struct model *m); /* NULL ok */
/* Initial dense weights into host memory params[n_params]: W ~ N(0, sqrt(2/(in+out))), b ~ N(0,
 * sqrt(1/out)) (facebookresearch/dlrm, create_mlp), from the counter-based generator: stream
 * RNG_DENSE_0 + tensor number. Padding is 0. */
void model_initial(const struct model *m, uint64_t seed, float *params);

/* The parameters on a device. Gradients and optimizer state lie like `w`. */
struct model_params {
    float *w;               /* [n_floats]                                                      */
    void *prepared;         /* [prepared_bytes], up to date after model_prepare                */
};
/* Fill in where tensors lie on `d`; before anything below. */
void model_place(struct model *m, struct device *d);
/* Host memory params[n_params] -> device w[n_floats], and back. */
MUST_USE enum st model_put(const struct model *m, struct device *d, const float *params, float *w);
MUST_USE enum st model_get(const struct model *m, struct device *d, const float *w, float *params);
/* After every change of p->w. */
MUST_USE enum st model_prepare(const struct model *m, struct device *d,
                               const struct model_params *p);

/* Buffers for one slice of up to `samples` samples on one lane; device memory. */
struct model_work;
MUST_USE enum st model_work_open(const struct model *m, struct device *d, uint32_t samples,
                                 struct model_work **out);
void model_work_close(struct model_work *w); /* NULL ok */

struct model_slice {              /* inputs of one slice; all device memory                    */
    uint32_t B;                   /* samples, 1..samples                                       */
    const float *dense;           /* (B, dense_features)                                       */
    const float *label;           /* (B)                                                       */
    const uint32_t *slot;         /* (B, F)                                                    */
    const float *table;           /* rows, `stride` floats apart                               */
    uint32_t stride;
};
/* Forward and backward. grad[0..n_floats): gradients of the dense tensors, overwritten (padding
 * between tensors is left alone: device memory starts as 0); grad[n_floats] = sum of the samples'
 * losses. dt (B,F+1,D): gradients of the looked-up vectors at [b][1 + f]; [b][0] is scratch.
 * scale = 1 / samples of the global batch (DESIGN.md section 5). A NaN in any input that is used
 * reaches the loss. */
MUST_USE enum st model_train(const struct model *m, struct device *d, uint32_t lane,
                             struct model_work *w, const struct model_params *params,
                             const struct model_slice *s, float scale, float *grad, float *dt);
/* Forward only: prob (B), *loss = sum of losses, both in device memory. Bits equal to model_train's
 * loss. */
MUST_USE enum st model_eval(const struct model *m, struct device *d, uint32_t lane,
                            struct model_work *w, const struct model_params *params,
                            const struct model_slice *s, float *prob, float *loss);

#endif
