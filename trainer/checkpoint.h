/* trainer/checkpoint.h - a run's weights as files: model.json, and safetensors with
 * facebookresearch/dlrm's names. Rank 0 gathers tables from the servers in pages, so no process
 * ever holds a whole table. */
#ifndef CHANTER_TRAINER_CHECKPOINT_H
#define CHANTER_TRAINER_CHECKPOINT_H

#include <stdint.h>

#include "base/digest.h"
#include "base/status.h"
#include "config/config.h"
#include "proto/codec.h"
#include "proto/transport.h"
#include "trainer/model.h"

struct checkpoint {           /* what a state is made of; everything borrowed               */
    const struct config *config;
    const struct model *model;
    struct rpc_peer *const *server;
    struct rpc_header header;
    const float *params;      /* host [n_params] dense weights                              */
    const float *state;       /* host [n_params] their optimizer state; NULL: none (sgd)    */
};

/* DIR/model.json: architecture and hyper-parameters, iterations as trained. */
MUST_USE enum st checkpoint_model_json(const struct config *cfg, uint64_t iterations,
                                       const char *dir);
/* DIR/NAME.safetensors: tables and dense weights; and with `state` where the optimizer has any,
 * DIR/NAME.state.safetensors: the same names with ".state" behind. */
MUST_USE enum st checkpoint_write(const struct checkpoint *c, const char *dir, const char *name,
                                  int state);
/* Digest of the whole state: the servers' rows and the dense weights. */
MUST_USE enum st checkpoint_digest(const struct checkpoint *c, struct digest *out);
/* Add the dense part of the digest. */
void checkpoint_digest_dense(const struct model *m, const float *params, const float *state,
                             struct digest *d);

#endif
