#include "tests/support/tiny_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "base/row.h"
#include "data/safetensors.h"
#include "embserver/store.h"
#include "tests/support/floats.h"
#include "trainer/checkpoint.h"

static const char CONFIG[] =
    "data: {format: criteo_tsv, path: %s/data.tsv, train_rows: 20}\n"
    "model: {dense_features: 3, dim: 4, bottom_mlp: [5, 4], top_mlp: [6, 1], tables: [7, 40, 3]}\n"
    "train: {global_batch: 12, slices: 4, iterations: %d, optimizer: %s, learning_rate: 0.1,\n"
    "        seed: 5}\n"
    "run: {dir: %s/run}\n";

const char *tiny_run_path(const struct tiny_run *t, const char *name)
{
    static char path[256];
    snprintf(path, sizeof(path), "%s/%s", t->run, name);
    return path;
}

void tiny_run_text(const struct tiny_run *t, const char *name, const char *text)
{
    FILE *f = fopen(tiny_run_path(t, name), "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0, "a test needs its files");
}

void tiny_run_cut(const struct tiny_run *t, const char *name, long bytes)
{
    CHECK(truncate(tiny_run_path(t, name), bytes) == 0, "a test needs its files");
}

/* --- contents --------------------------------------------------------------------------------- */

static float some_number(uint64_t seed, uint64_t i)
{
    return (float)draw(seed, i) / 4294967296.0f - 0.5f;
}

static void fill_table(struct tiny_run *t, uint32_t table)
{
    const struct config *c = t->config;
    uint64_t rows = c->model.tables[table];
    uint32_t width = c->model.dim + t->state;
    t->table[table] = mem_alloc(rows * width, sizeof(float));
    for (uint64_t r = 0; r < rows; r++) {
        float *record = t->table[table] + r * width;
        store_initial(c->train.seed, row_id(table, r), rows, c->model.dim, t->state, record);
        for (uint32_t j = 0; j < width && r % 3 == 0; j++)
            record[j] = some_number(table, r * width + j);
    }
}

static void fill_dense(struct tiny_run *t)
{
    const struct model *m = t->model;
    t->params = mem_zalloc(m->n_params, sizeof(float));
    t->dense_state = mem_zalloc(m->n_params, sizeof(float));
    for (uint32_t k = 0; k < m->n_tensors; k++)
        for (size_t i = 0; i < (size_t)m->tensor[k].rows * m->tensor[k].cols; i++) {
            t->params[m->tensor[k].offset + i] = some_number(100 + k, i);
            t->dense_state[m->tensor[k].offset + i] = some_number(200 + k, i);
        }
}

/* --- weight files ----------------------------------------------------------------------------- */

enum { MAX_TENSORS = 32, PIECE = 1024 };

struct plan_of_file {             /* shapes first, then the data in the same order */
    struct st_tensor tensor[MAX_TENSORS];
    const float *from[MAX_TENSORS];   /* NULL: zeros */
    uint32_t stride[MAX_TENSORS];     /* floats from row to row */
    size_t n;
};

static void add_tensor(struct plan_of_file *p, struct tiny_fault fault, struct st_tensor t,
                       const float *from, uint32_t stride)
{
    if (fault.leave_out != NULL && strcmp(fault.leave_out, t.name) == 0) return;
    p->tensor[p->n] = t;
    p->from[p->n] = from;
    p->stride[p->n++] = stride;
}

static void write_plan(const struct plan_of_file *p, const char *path)
{
    static const float ZERO[PIECE];
    struct safetensors_writer *w;
    CHECK(safetensors_create(path, p->tensor, p->n, &w) == ST_OK, "a test needs its files");
    for (size_t i = 0; i < p->n; i++) {
        size_t width = p->tensor[i].cols == 0 ? 1 : p->tensor[i].cols;
        for (uint64_t r = 0; r < p->tensor[i].rows; r++) {
            const float *from = p->from[i] == NULL ? ZERO : p->from[i] + r * p->stride[i];
            CHECK(safetensors_append(w, from, width) == ST_OK, "a test needs its files");
        }
    }
    CHECK(safetensors_commit(w) == ST_OK, "a test needs its files");
}

static void plan_tables(const struct tiny_run *t, int state, struct tiny_fault fault,
                        struct plan_of_file *p)
{
    const struct config *c = t->config;
    for (uint32_t k = 0; k < TINY_TABLES; k++) {
        struct st_tensor s = {.rows = c->model.tables[k], .cols = state ? t->state : c->model.dim};
        const float *from = t->table[k] + (state ? c->model.dim : 0);
        snprintf(s.name, sizeof(s.name), "emb_l.%u.weight%s", k, state ? ".state" : "");
        if (fault.dim != 0) s.cols = fault.dim;
        if (fault.rows_of_1 != 0 && k == 1) s.rows = fault.rows_of_1;
        if (fault.dim != 0 || fault.rows_of_1 != 0) from = NULL;
        add_tensor(p, fault, s, from, c->model.dim + t->state);
    }
}

void tiny_run_weights(const struct tiny_run *t, int state, struct tiny_fault fault)
{
    const struct model *m = t->model;
    struct plan_of_file p = {.n = 0};
    plan_tables(t, state, fault, &p);
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        const struct model_tensor *d = &m->tensor[k];
        struct st_tensor s = {.rows = d->rows, .cols = d->is_bias ? 0 : d->cols};
        snprintf(s.name, sizeof(s.name), "%s%s", d->name, state ? ".state" : "");
        add_tensor(&p, fault, s, (state ? t->dense_state : t->params) + d->offset, d->cols);
    }
    if (fault.add != NULL) {
        struct st_tensor s = {.rows = 2};
        snprintf(s.name, sizeof(s.name), "%s", fault.add);
        add_tensor(&p, fault, s, NULL, 1);
    }
    write_plan(&p, tiny_run_path(t, state ? "final.state.safetensors" : "final.safetensors"));
}

/* --- opening ---------------------------------------------------------------------------------- */

void tiny_run_open(struct tiny_run *t, enum optimizer optimizer)
{
    char text[1024];
    *t = (struct tiny_run){.dir = "/tmp/chanter-tiny-XXXXXX"};
    CHECK(mkdtemp(t->dir) != NULL, "a test needs its files");
    snprintf(t->run, sizeof(t->run), "%s/run", t->dir);
    snprintf(t->data, sizeof(t->data), "%s/data.tsv", t->dir);
    CHECK(mkdir(t->run, 0777) == 0, "a test needs its files");
    snprintf(text, sizeof(text), CONFIG, t->dir, TINY_ITERATIONS, config_optimizer_name(optimizer),
             t->dir);
    tiny_run_text(t, "config.yaml", text);
    CHECK(config_open(tiny_run_path(t, "config.yaml"), NULL, 0, &t->config) == ST_OK, "its files");
    CHECK(model_open(t->config, &t->model) == ST_OK, "a test needs its model");
    t->state = config_row_state(optimizer, t->config->model.dim);
    for (uint32_t k = 0; k < TINY_TABLES; k++) fill_table(t, k);
    fill_dense(t);
    CHECK(checkpoint_model_json(t->config, TINY_ITERATIONS, t->run) == ST_OK, "its files");
    tiny_run_weights(t, 0, (struct tiny_fault){0});
    if (t->state > 0) tiny_run_weights(t, 1, (struct tiny_fault){0});
}

void tiny_run_close(struct tiny_run *t)
{
    static const char *const NAMES[] = {"config.yaml", "model.json", "metrics.jsonl",
                                        "final.safetensors", "final.state.safetensors"};
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++)
        unlink(tiny_run_path(t, NAMES[i]));
    CHECK(rmdir(t->run) == 0, "a test removes its files");
    unlink(t->data);
    CHECK(rmdir(t->dir) == 0, "a test removes its files");
    for (uint32_t k = 0; k < TINY_TABLES; k++) mem_free(t->table[k]);
    mem_free(t->dense_state);
    mem_free(t->params);
    model_close(t->model);
    config_close(t->config);
}
