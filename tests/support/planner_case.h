/* tests/support/planner_case.h - random training jobs for the planner, and plans as bytes. */
#ifndef CHANTER_TESTS_PLANNER_CASE_H
#define CHANTER_TESTS_PLANNER_CASE_H

#include <stddef.h>
#include <stdint.h>

#include "oracle/planner.h"

/* Everything the planner is told: configuration and batches. A pure function of the seed. */
struct planner_case {
    uint64_t seed;
    struct planner_cfg cfg;
    uint32_t table_rows;     /* rows of every table                        */
    uint32_t n_batches;
    struct samples *batch;   /* [n_batches]; owns                          */
    uint64_t working_set;    /* most distinct rows of a trainer in a batch */
};

struct planner_case case_random(uint64_t seed);
/* Batches of one table and one-sample slices, given by row numbers: row[i][b]. For cases made by
 * hand; the label of sample b of batch i is i * 100 + b. */
struct planner_case case_by_hand(const struct planner_cfg *cfg, uint32_t n_batches,
                                 const uint64_t *row);
/* The usual small configuration: one table, no dense features, one-sample slices, ample room. */
struct planner_cfg case_cfg(uint32_t trainers, uint32_t slices, uint32_t lookahead);
void case_close(struct planner_case *c);
/* A planner; one with all batches of `c` pushed, and ended. They abort if they cannot. */
struct planner *case_open(const struct planner_cfg *cfg);
struct planner *case_planner(const struct planner_case *c);
void case_close_plans(struct plan **plan, uint32_t n);

/* Next number of a small generator; *state is the seed. Reproducible everywhere. */
uint64_t case_draw(uint64_t *state, uint64_t below);

/* A growing string of bytes. */
struct plan_bytes { uint8_t *p; size_t n, cap; };
/* Appends every field of a plan but its addresses, and but seq (which evaluations may shift). */
void plan_bytes_add(struct plan_bytes *b, const struct planner_cfg *cfg, const struct plan *pl);

#endif
