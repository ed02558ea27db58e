/* data/safetensors.h - the safetensors file format: u64 little-endian header length, JSON header
 * {"name": {"dtype": "F32", "shape": [..], "data_offsets": [a, b]}, "__metadata__": {..}}, data.
 * F32 only. */
#ifndef CHANTER_DATA_SAFETENSORS_H
#define CHANTER_DATA_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct st_tensor {
    char name[64];
    uint64_t rows, cols;   /* shape [rows, cols]; cols == 0: shape [rows] */
    const float *data;     /* reader: mapped, may be unaligned            */
};

/* Writer: all shapes first, then the data in the same order, in pieces of any size. The file
 * appears under `path` at safetensors_commit (written aside, fsynced, renamed). */
struct safetensors_writer;
MUST_USE enum st safetensors_create(const char *path, const struct st_tensor *t, size_t n,
                                    struct safetensors_writer **out);
MUST_USE enum st safetensors_append(struct safetensors_writer *w, const float *p, size_t n);
MUST_USE enum st safetensors_commit(struct safetensors_writer *w); /* frees w, also on failure */
void safetensors_abandon(struct safetensors_writer *w);            /* NULL ok; removes the file */

/* Reader: maps the file. Every offset and shape is checked against the file's size. */
struct safetensors;
MUST_USE enum st safetensors_open(const char *path, struct safetensors **out);
void safetensors_close(struct safetensors *s); /* NULL ok */
size_t safetensors_count(const struct safetensors *s);
const struct st_tensor *safetensors_at(const struct safetensors *s, size_t i); /* file order */
const struct st_tensor *safetensors_find(const struct safetensors *s, const char *name);

#endif
