/* Three descriptions of one model have to agree: config.yaml (what was asked for), model.json (what
 * was trained) and the tensors' shapes (what was written). Each is checked against the first, so
 * that a file copied in from another run is named before any number is computed from it (I5). */
#include "launch/rundir.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "embserver/store.h"
#include "trainer/checkpoint.h"

enum st rundir_path(const char *dir, const char *name, char out[RUNDIR_PATH_BYTES])
{
    if (snprintf(out, RUNDIR_PATH_BYTES, "%s/%s", dir, name) < RUNDIR_PATH_BYTES) return ST_OK;
    return log_fail(ST_USAGE, NULL, "the path of %s in the run directory is too long", name);
}

/* DIR/NAME, which has to be there; `without` says why it may not be. */
static enum st need_file(const char *dir, const char *name, const char *without,
                         char out[RUNDIR_PATH_BYTES])
{
    struct stat s;
    enum st st = rundir_path(dir, name, out);
    if (st != ST_OK || stat(out, &s) == 0) return st;
    if (errno != ENOENT && errno != ENOTDIR)
        return log_fail(errno == EACCES ? ST_PERM : ST_IO, out, "%s", strerror(errno));
    return log_fail(ST_NOINPUT, out, "no such file; %s", without);
}

/* --- model.json ------------------------------------------------------------------------------- */

enum { VALUE_TEXT_BYTES = 48 };

static const char *value_text(const json_t *v, char out[VALUE_TEXT_BYTES])
{
    size_t n = json_dumpb(v, out, VALUE_TEXT_BYTES, JSON_ENCODE_ANY | JSON_COMPACT);
    if (n < VALUE_TEXT_BYTES) out[n] = '\0';
    else memcpy(out + VALUE_TEXT_BYTES - 4, "...", 4);
    return out;
}

/* Field `key` of model.json has to equal `want` (taken; NULL: out of memory). */
static enum st check_field(const json_t *j, const char *path, const char *key, json_t *want)
{
    enum st st = ST_OK;
    char is[VALUE_TEXT_BYTES], should[VALUE_TEXT_BYTES];
    const json_t *got = json_object_get(j, key);
    if (want == NULL)
        st = log_fail(ST_NOMEM, path, "out of memory");
    else if (got == NULL)
        st = log_fail(ST_DATA, path, "has no \"%s\"; is it the file the run wrote?", key);
    else if (!json_equal(got, want))
        st = log_fail(ST_DATA, path, "%s is %s, but the configuration has %s; these are files of "
                      "different runs", key, value_text(got, is), value_text(want, should));
    json_decref(want);
    return st;
}

static json_t *widths(const uint32_t *v, uint32_t n)
{
    json_t *a = json_array();
    for (uint32_t i = 0; i < n; i++) json_array_append_new(a, json_integer(v[i]));
    return a;
}

static json_t *table_rows(const struct config *c)
{
    json_t *a = json_array();
    for (uint32_t t = 0; t < c->model.n_tables; t++)
        json_array_append_new(a, json_integer((json_int_t)c->model.tables[t]));
    return a;
}

static enum st check_described(const json_t *j, const char *path, const struct config *c,
                               uint64_t *iterations)
{
    enum st st;
    TRY(check_field(j, path, "model", json_string("dlrm")), err);
    TRY(check_field(j, path, "dim", json_integer(c->model.dim)), err);
    TRY(check_field(j, path, "tables", table_rows(c)), err);
    TRY(check_field(j, path, "dense_features", json_integer(c->model.dense_features)), err);
    TRY(check_field(j, path, "bottom_mlp",
                    widths(c->model.bottom_mlp, c->model.n_bottom_mlp)), err);
    TRY(check_field(j, path, "top_mlp", widths(c->model.top_mlp, c->model.n_top_mlp)), err);
    TRY(check_field(j, path, "optimizer",
                    json_string(config_optimizer_name(c->train.optimizer))), err);
    TRY(check_field(j, path, "seed", json_integer((json_int_t)c->train.seed)), err);
    const json_t *n = json_object_get(j, "iterations");
    if (!json_is_integer(n) || json_integer_value(n) < 0)
        return log_fail(ST_DATA, path, "has no \"iterations\"; is it the file the run wrote?");
    *iterations = (uint64_t)json_integer_value(n);
err:
    return st;
}

static enum st check_model_json(struct rundir *r, const char *dir)
{
    char path[RUNDIR_PATH_BYTES];
    json_error_t e;
    enum st st = need_file(dir, "model.json", "it is written when a run ends: has this one?", path);
    if (st != ST_OK) return st;
    json_t *j = json_load_file(path, 0, &e);
    if (j == NULL)
        return log_fail(ST_DATA, path, "damaged: line %d: %s", e.line, e.text);
    st = check_described(j, path, r->config, &r->iterations);
    json_decref(j);
    return st;
}

/* --- tensors ---------------------------------------------------------------------------------- */

struct file {                     /* one of the two weight files while it is checked           */
    char path[RUNDIR_PATH_BYTES];
    struct safetensors *tensors;
    const char *tail;             /* behind each name: "" or ".state"                          */
};

enum { SHAPE_BYTES = 48 };

static const char *shape_text(uint64_t rows, uint64_t cols, char out[SHAPE_BYTES])
{
    if (cols == 0) snprintf(out, SHAPE_BYTES, "[%" PRIu64 "]", rows);
    else snprintf(out, SHAPE_BYTES, "[%" PRIu64 ", %" PRIu64 "]", rows, cols);
    return out;
}

static enum st find_tensor(const struct file *f, const char *name, uint64_t rows, uint64_t cols,
                           const struct st_tensor **out)
{
    char full[sizeof((*out)->name)], is[SHAPE_BYTES], should[SHAPE_BYTES];
    snprintf(full, sizeof(full), "%s%s", name, f->tail);
    const struct st_tensor *t = safetensors_find(f->tensors, full);
    if (t == NULL) return log_fail(ST_DATA, f->path, "tensor %s is missing", full);
    if (t->rows != rows || t->cols != cols)
        return log_fail(ST_DATA, f->path, "tensor %s has shape %s, but the configuration asks for "
                        "%s; these are files of different runs", full,
                        shape_text(t->rows, t->cols, is), shape_text(rows, cols, should));
    *out = t;
    return ST_OK;
}

static enum st find_tables(const struct rundir *r, const struct file *f, uint32_t width,
                           const struct st_tensor **table)
{
    enum st st = ST_OK;
    for (uint32_t t = 0; t < r->config->model.n_tables && st == ST_OK; t++) {
        char name[32];
        snprintf(name, sizeof(name), "emb_l.%" PRIu32 ".weight", t);
        st = find_tensor(f, name, r->config->model.tables[t], width, &table[t]);
    }
    return st;
}

static enum st copy_dense(const struct file *f, const struct model_tensor *m, float *to)
{
    const struct st_tensor *t;
    enum st st = find_tensor(f, m->name, m->rows, m->is_bias ? 0 : m->cols, &t);
    if (st != ST_OK) return st;
    size_t n = (size_t)m->rows * m->cols;
    memcpy(to, t->data, n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        if (!isfinite(to[i]))
            return log_fail(ST_DATA, f->path, "tensor %s: value %zu is not finite; the file is "
                            "damaged", t->name, i);
    return ST_OK;
}

/* No name but the model's: with all of those found, the number decides. */
static enum st check_count(const struct rundir *r, const struct file *f)
{
    size_t want = (size_t)r->model->n_tables + r->model->n_tensors;
    if (safetensors_count(f->tensors) == want) return ST_OK;
    return log_fail(ST_DATA, f->path, "holds %zu tensors, but the model has %zu; these are files "
                    "of different runs", safetensors_count(f->tensors), want);
}

/* Find everything in `f`: tables of `width` floats a row into table[F], dense into dense. */
static enum st read_tensors(const struct rundir *r, const struct file *f, uint32_t width,
                            const struct st_tensor ***table, float **dense)
{
    enum st st = ST_OK;
    const struct model *m = r->model;
    *table = mem_zalloc(m->n_tables, sizeof(**table));
    *dense = mem_zalloc(m->n_params, sizeof(**dense));
    if (*table == NULL || *dense == NULL)
        return log_fail(ST_NOMEM, f->path, "out of memory for %zu dense weights", m->n_params);
    TRY(find_tables(r, f, width, *table), err);
    for (uint32_t i = 0; i < m->n_tensors; i++)
        TRY(copy_dense(f, &m->tensor[i], *dense + m->tensor[i].offset), err);
    st = check_count(r, f);
err:
    return st;
}

static enum st open_weights(struct rundir *r, const char *dir)
{
    struct file f = {.tail = ""};
    enum st st = need_file(dir, "final.safetensors", "it is written when a run ends, unless "
                           "run.save_final is false", f.path);
    if (st == ST_OK) st = safetensors_open(f.path, &r->weights);
    if (st != ST_OK) return st;
    f.tensors = r->weights;
    return read_tensors(r, &f, r->model->dim, &r->table, &r->params);
}

static enum st open_state(struct rundir *r, const char *dir)
{
    struct file f = {.tail = ".state"};
    uint32_t width = config_row_state(r->config->train.optimizer, r->model->dim);
    if (width == 0) return ST_OK;
    enum st st = need_file(dir, "final.state.safetensors", "the optimizer keeps state, which is "
                           "part of what was asked for", f.path);
    if (st == ST_OK) st = safetensors_open(f.path, &r->state);
    if (st != ST_OK) return st;
    f.tensors = r->state;
    return read_tensors(r, &f, width, &r->table_state, &r->dense_state);
}

/* --- opening ---------------------------------------------------------------------------------- */

static enum st check_directory(const char *dir)
{
    struct stat s;
    if (stat(dir, &s) != 0)
        return log_fail(errno == EACCES ? ST_PERM : ST_NOINPUT, dir, "%s; name a run directory",
                        strerror(errno));
    if (!S_ISDIR(s.st_mode))
        return log_fail(ST_NOINPUT, dir, "is not a directory; name a run directory");
    return ST_OK;
}

enum st rundir_open(const char *dir, const char *const *set, size_t n_set, enum rundir_need need,
                    struct rundir **out)
{
    char path[RUNDIR_PATH_BYTES];
    enum st st = check_directory(dir);
    if (st != ST_OK) return st;
    struct rundir *r = mem_zalloc(1, sizeof(*r));
    if (r == NULL) return log_fail(ST_NOMEM, dir, "out of memory");
    TRY(need_file(dir, "config.yaml", "is this a run directory?", path), err);
    TRY(config_open(path, set, n_set, &r->config), err);
    TRY(check_model_json(r, dir), err);
    TRY(model_open(r->config, &r->model), err);
    TRY(open_weights(r, dir), err);
    if (need == RUNDIR_STATE) TRY(open_state(r, dir), err);
    *out = r;
    return ST_OK;

err:
    rundir_close(r);
    return st;
}

void rundir_close(struct rundir *r)
{
    if (r == NULL) return;
    mem_free(r->dense_state);
    mem_free(r->params);
    mem_free(r->table_state);
    mem_free(r->table);
    safetensors_close(r->state);
    safetensors_close(r->weights);
    model_close(r->model);
    config_close(r->config);
    mem_free(r);
}

uint64_t rundir_rows(const struct rundir *r)
{
    uint64_t rows = 0;
    for (uint32_t t = 0; t < r->model->n_tables; t++) rows += r->table[t]->rows;
    return rows;
}

/* --- digest ----------------------------------------------------------------------------------- */

enum { ROWS_PER_REPORT = 1 << 14 };

struct row_walk {
    rundir_progress *progress;
    void *ctx;
    uint64_t done;        /* rows of all tables            */
    float *record;        /* [D + K] one row: value, state */
};

static void digest_table(const struct rundir *r, uint32_t table, struct row_walk *w,
                         struct digest *d)
{
    const struct st_tensor *value = r->table[table];
    uint32_t D = r->model->dim;
    uint32_t K = config_row_state(r->config->train.optimizer, D);
    for (uint64_t row = 0; row < value->rows; row++) {
        memcpy(w->record, rundir_row(value, row), D * sizeof(float));
        if (K > 0)
            memcpy(w->record + D, rundir_row(r->table_state[table], row), K * sizeof(float));
        store_digest_row(r->config->train.seed, row_id(table, row), value->rows, D, K, w->record,
                         d);
        if (++w->done % ROWS_PER_REPORT == 0 && w->progress != NULL) w->progress(w->ctx, w->done);
    }
}

enum st rundir_digest(const struct rundir *r, rundir_progress *progress, void *ctx,
                      struct digest *out)
{
    struct digest d = {0, 0};
    uint32_t D = r->model->dim;
    uint32_t K = config_row_state(r->config->train.optimizer, D);
    CHECK(K == 0 || r->state != NULL, "opened with RUNDIR_STATE");
    struct row_walk w = {progress, ctx, 0, mem_alloc(D + K, sizeof(float))};
    if (w.record == NULL) return log_fail(ST_NOMEM, "digest", "out of memory for one row");
    for (uint32_t t = 0; t < r->model->n_tables; t++) digest_table(r, t, &w, &d);
    checkpoint_digest_dense(r->model, r->params, r->dense_state, &d);
    mem_free(w.record);
    *out = d;
    return ST_OK;
}
