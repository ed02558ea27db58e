/* bench/step_case.h - a trainer's arithmetic on its own: model, device, weights, a cache with all
 * rows that a few batches use, and plans for these batches. No oracle, no servers, no peers. What
 * runs is the product's code, in the order of trainer/pipeline.c for one trainer. */
#ifndef CHANTER_BENCH_STEP_CASE_H
#define CHANTER_BENCH_STEP_CASE_H

#include "trainer/dense.h"
#include "trainer/grads.h"
#include "trainer/model.h"
#include "trainer/step.h"

struct step_options {
    char model;                    /* 'A' or 'B'                          */
    uint32_t batch, threads, slices;
    enum optimizer optimizer;
    enum precision precision;
    enum device_kind device;
};

enum { CASE_BATCHES = 4 };

struct step_case {
    struct config config;          /* its arrays are static               */
    struct opt_step opt;
    struct model *model;
    struct device *device;
    struct step *step;
    struct dense dense;
    struct grads grads;
    struct exchange_job scatter, gather;   /* stay empty: there are no peers */
    uint32_t n_rows, stride;
    float *table;                  /* device [n_rows][stride]             */
    uint64_t *row;                 /* [n_rows] id of the row in each slot */
    struct plan plan[CASE_BATCHES];
};

/* Logs what is wrong. */
MUST_USE enum st step_case_open(const struct step_options *o, struct step_case **out);
void step_case_close(struct step_case *c); /* NULL ok */
/* One training step over batch `at` (modulo CASE_BATCHES) to its end: the mean loss before it. */
MUST_USE enum st step_case_train(struct step_case *c, uint64_t at, double *loss);
/* Before any training: first samples' probabilities against a DLRM in double, and the first step's
 * loss against the losses that all probabilities give. Takes the first step. ST_DATA: they differ. */
MUST_USE enum st step_case_check(struct step_case *c, double *loss);
/* Multiplications and additions of all layers in one step: forward, gradients of the weights, and
 * of the inputs but for the first layer's. */
double step_case_flops(const struct step_case *c);

#endif
