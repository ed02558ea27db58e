/* tests/support/run_files.h - runs of the programs as a user starts them, and what they leave in
 * the run directory, read without the product's readers. All of it fails the test by itself. */
#ifndef CHANTER_TESTS_SUPPORT_RUN_FILES_H
#define CHANTER_TESTS_SUPPORT_RUN_FILES_H

#include <stddef.h>
#include <stdint.h>

/* Run the program `name` of $BIN (build/bin) with argv (argv[0] is set; NULL ends it) and wait. Its
 * standard output is thrown away. Returns the exit code, 128 + signal when it was killed. */
int run_program(const char *name, const char **argv);

struct weights_file;                 /* a safetensors file in memory */
struct weights_file *weights_open(const char *dir, const char *name);
void weights_close(struct weights_file *w);
/* The tensor's values; it has to be there with n of them. */
const float *weights_find(const struct weights_file *w, const char *tensor, size_t n);
size_t weights_count(const struct weights_file *w);

/* "loss" of the lines "event":"train" of DIR/metrics.jsonl, whose "iteration" has to count from 0.
 * Returns how many there are; at most `cap`. */
size_t read_losses(const char *dir, double *loss, size_t cap);

/* A click log of the Criteo shape: label, 13 counts, 26 hexadecimal ids a line, empty means 0. The
 * first n samples. row: taken modulo `tables`; dense: log(max(x, 0) + 1). */
void read_clicks(const char *path, size_t n, const uint64_t *tables, float *label, float *dense,
                 uint64_t *row);

#endif
