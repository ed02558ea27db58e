/* Writer: the header is known before the first byte of data, so a file is one pass and no memory.
 * Reader: nothing in the header is believed. Tensors, put in the order of their bytes, have to
 * cover the data exactly: no gap, no overlap, no byte left, and no name twice. */
#include "data/safetensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "data/infile.h"
#include "data/outfile.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little endian");

enum { LENGTH_BYTES = 8, DATA_ALIGN = 64, MAX_HEADER_BYTES = 100 << 20 /* as other readers */ };

/* Floats of a tensor; false on overflow. */
static bool tensor_floats(const struct st_tensor *t, uint64_t *out)
{
    return !__builtin_mul_overflow(t->rows, t->cols == 0 ? 1 : t->cols, out) &&
           *out <= INT64_MAX / sizeof(float);
}

/* --- writer ------------------------------------------------------------------------------ */

struct safetensors_writer {
    struct outfile *file;         /* owns */
    uint64_t left;                /* floats still to come */
};

/* {"name": {"dtype": "F32", "shape": [..], "data_offsets": [a, b]}, ..} padded with blanks so that
 * the data starts at a multiple of 64; malloc'ed by jansson. NULL when out of memory. */
static char *header_text(const struct st_tensor *t, size_t n, uint64_t *total)
{
    json_t *head = json_object();
    uint64_t at = 0;
    for (size_t i = 0; i < n && head != NULL; i++) {
        uint64_t floats;
        CHECK(tensor_floats(&t[i], &floats), "a tensor's size fits");
        json_int_t from = (json_int_t)(at * sizeof(float));
        at += floats;
        json_t *shape = t[i].cols == 0 ? json_pack("[I]", (json_int_t)t[i].rows)
                                       : json_pack("[II]", (json_int_t)t[i].rows,
                                                   (json_int_t)t[i].cols);
        json_t *one = json_pack("{s:s, s:o, s:[II]}", "dtype", "F32", "shape", shape,
                                "data_offsets", from, (json_int_t)(at * sizeof(float)));
        if (one == NULL || json_object_set_new(head, t[i].name, one) != 0) {
            json_decref(head);
            head = NULL;
        }
    }
    char *text = head == NULL ? NULL : json_dumps(head, JSON_COMPACT | JSON_PRESERVE_ORDER);
    CHECK(head == NULL || json_object_size(head) == n, "tensor names differ");
    json_decref(head);
    *total = at;
    return text;
}

static enum st write_header(struct outfile *o, const char *text)
{
    static const char blanks[DATA_ALIGN] =
        "                                                               ";
    uint64_t n = strlen(text), end = LENGTH_BYTES + n;
    uint64_t padding = (DATA_ALIGN - end % DATA_ALIGN) % DATA_ALIGN, length = n + padding;
    enum st st = outfile_write(o, &length, LENGTH_BYTES);
    if (st == ST_OK) st = outfile_write(o, text, n);
    if (st == ST_OK) st = outfile_write(o, blanks, padding);
    return st;
}

enum st safetensors_create(const char *path, const struct st_tensor *t, size_t n,
                           struct safetensors_writer **out)
{
    enum st st = ST_NOMEM;
    struct safetensors_writer *w = mem_zalloc(1, sizeof(*w));
    if (w == NULL) goto err;
    char *text = header_text(t, n, &w->left);
    if (text == NULL) goto err_writer;
    TRY(outfile_create(path, &w->file), err_text);
    TRY(write_header(w->file, text), err_file);
    free(text);
    *out = w;
    return ST_OK;

err_file:   outfile_abandon(w->file);
err_text:   free(text);
            mem_free(w);
            return st;
err_writer: mem_free(w);
err:        return log_fail(st, path, "out of memory");
}

enum st safetensors_append(struct safetensors_writer *w, const float *p, size_t n)
{
    CHECK(n <= w->left, "more data than the shapes declare");
    enum st st = outfile_write(w->file, p, n * sizeof(*p));
    if (st == ST_OK) w->left -= n;
    return st;
}

enum st safetensors_commit(struct safetensors_writer *w)
{
    CHECK(w->left == 0, "less data than the shapes declare");
    enum st st = outfile_commit(w->file);
    mem_free(w);
    return st;
}

void safetensors_abandon(struct safetensors_writer *w)
{
    if (w == NULL) return;
    outfile_abandon(w->file);
    mem_free(w);
}

/* --- reader ------------------------------------------------------------------------------ */

struct entry {
    struct st_tensor tensor;
    uint64_t from, to;            /* bytes of the data section */
};

struct safetensors {
    char *path;                   /* owns; for messages */
    char *map;                    /* owns; the whole file, private and read-only */
    uint64_t size, data;          /* bytes of the file; offset of the data section */
    struct entry *entry;          /* owns; [n] in file order */
    size_t n;
};

static bool read_size(const json_t *j, uint64_t *out)
{
    if (!json_is_integer(j) || json_integer_value(j) < 0) return false;
    *out = (uint64_t)json_integer_value(j);
    return true;
}

/* [rows] or [rows, cols]; a second dimension of 0 cannot be told from none. */
static bool read_shape(const json_t *j, struct st_tensor *t)
{
    size_t dims = json_array_size(j);
    if (!json_is_array(j) || dims < 1 || dims > 2) return false;
    t->cols = 0;
    if (!read_size(json_array_get(j, 0), &t->rows)) return false;
    return dims == 1 || (read_size(json_array_get(j, 1), &t->cols) && t->cols > 0);
}

static enum st read_entry(const struct safetensors *s, const char *name, const json_t *j,
                          struct entry *e)
{
    if (strlen(name) >= sizeof(e->tensor.name))
        return log_fail(ST_DATA, s->path, "tensor name '%.40s...' is longer than 63 bytes", name);
    strcpy(e->tensor.name, name);
    const char *dtype = json_string_value(json_object_get(j, "dtype"));
    if (dtype == NULL || strcmp(dtype, "F32") != 0)
        return log_fail(ST_DATA, s->path, "%s: dtype %.16s, need F32", name,
                        dtype == NULL ? "missing" : dtype);
    if (!read_shape(json_object_get(j, "shape"), &e->tensor))
        return log_fail(ST_DATA, s->path, "%s: shape is not one or two sizes", name);
    const json_t *offsets = json_object_get(j, "data_offsets");
    if (json_array_size(offsets) != 2 || !read_size(json_array_get(offsets, 0), &e->from) ||
        !read_size(json_array_get(offsets, 1), &e->to))
        return log_fail(ST_DATA, s->path, "%s: data_offsets is not two offsets", name);
    uint64_t floats;
    if (!tensor_floats(&e->tensor, &floats))
        return log_fail(ST_DATA, s->path, "%s: shape is impossibly large", name);
    if (e->from > e->to || e->to > s->size - s->data)
        return log_fail(ST_DATA, s->path, "%s: data_offsets [%llu, %llu] lie outside the %llu "
                        "bytes of data", name, (unsigned long long)e->from,
                        (unsigned long long)e->to, (unsigned long long)(s->size - s->data));
    if (e->to - e->from != floats * sizeof(float))
        return log_fail(ST_DATA, s->path, "%s: shape takes %llu bytes, data_offsets give %llu",
                        name, (unsigned long long)(floats * sizeof(float)),
                        (unsigned long long)(e->to - e->from));
    e->tensor.data = (const float *)(const void *)(s->map + s->data + e->from);
    return ST_OK;
}

static int by_place(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->from != y->from) return x->from < y->from ? -1 : 1;
    if (x->to != y->to) return x->to < y->to ? -1 : 1;   /* empty tensors first */
    return strcmp(x->tensor.name, y->tensor.name);
}

static enum st check_cover(const struct safetensors *s)
{
    uint64_t at = 0;
    for (size_t i = 0; i < s->n; i++) {
        const struct entry *e = &s->entry[i];
        if (e->from != at)
            return log_fail(ST_DATA, s->path, "%s: %s before it at byte %llu", e->tensor.name,
                            e->from < at ? "overlaps the tensor" : "gap", (unsigned long long)at);
        at = e->to;
    }
    if (at != s->size - s->data)
        return log_fail(ST_DATA, s->path, "%llu bytes behind the last tensor",
                        (unsigned long long)(s->size - s->data - at));
    return ST_OK;
}

static enum st read_entries(struct safetensors *s, json_t *head)
{
    s->entry = mem_zalloc(json_object_size(head), sizeof(*s->entry));
    if (s->entry == NULL) return log_fail(ST_NOMEM, s->path, "out of memory");
    const char *name;
    json_t *j;
    json_object_foreach(head, name, j) {
        if (strcmp(name, "__metadata__") == 0) continue;
        enum st st = read_entry(s, name, j, &s->entry[s->n]);
        if (st != ST_OK) return st;
        s->n++;
    }
    qsort(s->entry, s->n, sizeof(*s->entry), by_place);
    return check_cover(s);
}

static enum st read_header(struct safetensors *s)
{
    uint64_t length = 0;
    if (s->size < LENGTH_BYTES)
        return log_fail(ST_DATA, s->path, "not a safetensors file: %llu bytes",
                        (unsigned long long)s->size);
    memcpy(&length, s->map, LENGTH_BYTES);
    if (length > s->size - LENGTH_BYTES || length > MAX_HEADER_BYTES)
        return log_fail(ST_DATA, s->path, "header of %llu bytes in a file of %llu; not a "
                        "safetensors file, or truncated", (unsigned long long)length,
                        (unsigned long long)s->size);
    s->data = LENGTH_BYTES + length;
    json_error_t error;
    json_t *head = json_loadb(s->map + LENGTH_BYTES, length, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(head)) {
        json_decref(head);
        return log_fail(ST_DATA, s->path, "bad header: %s",
                        head == NULL ? error.text : "not a JSON object");
    }
    enum st st = read_entries(s, head);
    json_decref(head);
    return st;
}

static enum st map_file(struct safetensors *s)
{
    struct infile f;
    enum st st = infile_open(s->path, &f);
    if (st != ST_OK) return st;
    s->size = f.size;
    if (f.size > 0) {
        void *map = mmap(NULL, f.size, PROT_READ, MAP_PRIVATE, f.fd, 0);
        if (map == MAP_FAILED) st = log_fail(ST_IO, s->path, "cannot map %llu bytes",
                                             (unsigned long long)f.size);
        else s->map = map;
    }
    close(f.fd);
    return st;
}

enum st safetensors_open(const char *path, struct safetensors **out)
{
    enum st st = ST_NOMEM;
    struct safetensors *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) goto err;
    s->path = mem_strdup(path);
    if (s->path == NULL) goto err_reader;
    TRY(map_file(s), err_logged);
    TRY(read_header(s), err_logged);
    *out = s;
    return ST_OK;

err_logged: safetensors_close(s);
            return st;
err_reader: safetensors_close(s);
err:        return log_fail(st, path, "out of memory");
}

void safetensors_close(struct safetensors *s)
{
    if (s == NULL) return;
    if (s->map != NULL) munmap(s->map, s->size);
    mem_free(s->entry);
    mem_free(s->path);
    mem_free(s);
}

size_t safetensors_count(const struct safetensors *s)
{
    return s->n;
}

const struct st_tensor *safetensors_at(const struct safetensors *s, size_t i)
{
    return i < s->n ? &s->entry[i].tensor : NULL;
}

const struct st_tensor *safetensors_find(const struct safetensors *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (strcmp(s->entry[i].tensor.name, name) == 0) return &s->entry[i].tensor;
    return NULL;
}
