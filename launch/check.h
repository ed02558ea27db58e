/* launch/check.h - preflight: what would keep a job from running, found in seconds and all at
 * once. Leaves nothing changed. Each check prints a line "NAME ok: ..." on standard output or logs what
 * would fail; a check of the machine is told what the machine has, so that tests can say it. */
#ifndef CHANTER_LAUNCH_CHECK_H
#define CHANTER_LAUNCH_CHECK_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

/* Opens the data and the held-out data, reads the first batches, counts their rows. */
MUST_USE enum st check_data(const struct config *c);
/* Is the device there? Fits cluster.cache_rows to it (launch/fit.h). */
MUST_USE enum st check_device(struct config *c);
MUST_USE enum st check_memory(const struct config *c, uint64_t available_bytes);
/* Can run.dir be made, or written if it is there? */
MUST_USE enum st check_run_dir(const struct config *c);
/* `free_bytes`: where run.dir is or will be. */
MUST_USE enum st check_disk(const struct config *c, uint64_t free_bytes);
MUST_USE enum st check_files(const struct config *c, uint64_t limit);
/* `dir`: where shared memory lives. */
MUST_USE enum st check_shm(const struct config *c, const char *dir, uint64_t free_bytes);
/* `path`: folders with programs, as in $PATH; NULL: none. */
MUST_USE enum st check_mpirun(const struct config *c, const char *path);

/* `chanter check CONFIG`. All checks; the status of the first that fails. */
MUST_USE enum st check_main(int argc, char **argv);

#endif
