/* launch/sizes.h - what a job will take, before it starts: bytes, files, cache rows. Upper bounds
 * from the configuration alone; asks nothing of the machine. Sums that overflow stay at the top. */
#ifndef CHANTER_LAUNCH_SIZES_H
#define CHANTER_LAUNCH_SIZES_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "data/source.h"

struct sizes {
    uint64_t rows;           /* that can ever be touched, over all tables                    */
    uint64_t server_bytes;   /* one server's records when all of them are                    */
    uint64_t trainer_bytes;  /* one trainer: cache, dense weights with state and gradients   */
    uint64_t oracle_bytes;   /* the batches in the window                                    */
    uint64_t total_bytes;    /* all roles on one machine                                     */
    uint64_t files;          /* open at once in the process with the most                    */
    uint64_t disk_bytes;     /* of the weight files that the run leaves                      */
    uint64_t shm_bytes;      /* of /dev/shm, for the trainers' exchange; 0: none             */
};

struct sizes sizes_of(const struct config *c);

/* Of one trainer: dense weights, optimizer state, a gradient for each slice and for the sum. */
uint64_t sizes_dense_bytes(const struct config *c);

/* Distinct rows that one trainer needs for `batch`, the most of all trainers: its cache must hold
 * them. Sorts parts of batch->id in place. */
uint64_t sizes_working_set(const struct config *c, struct samples *batch);

#endif
