/* What all formats share: which rows of the file belong to this source, and raw ids to row ids. */
#include "data/source.h"

#include <stdbool.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "data/reader.h"
#include "data/synthetic.h"

enum { CHUNK = 1024 };            /* samples handed over by the reader at once */

struct source {
    const struct config *cfg;     /* borrowed */
    const char *path;             /* for messages; borrowed from cfg */
    struct reader *reader;        /* owns */
    bool eval;
    uint64_t first, end;          /* rows [first, end) of the file; end may lie behind the file */
    uint64_t row;                 /* the next one */
    uint8_t *label;               /* owns; [CHUNK]            */
    uint32_t *id;                 /* owns; [CHUNK][n_tables]  */
};

enum st reader_open(const struct config *cfg, const char *path, struct reader **out)
{
    switch (cfg->data.format) {
    case DATA_CRITEO_TSV: return criteo_tsv_open(cfg, path, out);
    case DATA_PREPARED:   return prepared_open(cfg, path, out);
    case DATA_SYNTHETIC:  return synthetic_reader_open(cfg, cfg->data.rows, out);
    }
    return log_fail(ST_CONFIG, "data.format", "unknown format %d", (int)cfg->data.format);
}

static uint64_t add_rows(uint64_t a, uint64_t b)
{
    return b > UINT64_MAX - a ? UINT64_MAX : a + b;
}

/* The rows of this source, for files: eval_path is read from its start. */
static enum st choose_file_rows(struct source *s)
{
    const struct config *c = s->cfg;
    bool own_file = s->eval && c->data.eval_path != NULL;
    s->path = own_file ? c->data.eval_path : c->data.path;
    if (s->path == NULL)
        return log_fail(ST_CONFIG, "data.path", "is not set; name the data file");
    if (s->eval && !own_file && c->data.train_rows == 0)
        return log_fail(ST_DATA, s->path, "no rows are held out: all are trained on; set "
                        "data.train_rows or data.eval_path");
    s->first = s->eval && !own_file ? c->data.train_rows : 0;
    uint64_t n = s->eval ? c->data.eval_rows : c->data.train_rows;
    s->end = n == 0 ? UINT64_MAX : add_rows(s->first, n);
    return reader_open(c, s->path, &s->reader);
}

/* The synthetic stream has no end of its own: held-out rows may lie behind data.rows. */
static enum st choose_synthetic_rows(struct source *s)
{
    s->path = "synthetic data";
    enum st st = synthetic_rows(s->cfg, s->eval, &s->first, &s->end);
    if (st != ST_OK) return st;
    return synthetic_reader_open(s->cfg, s->end, &s->reader);
}

/* Fewer rows than data.train_rows asks for. */
static enum st too_few(const struct source *s, uint64_t held)
{
    return log_fail(ST_DATA, s->path, "data.train_rows is %llu, but the file holds %llu samples; "
                    "lower it or leave it out", (unsigned long long)s->cfg->data.train_rows,
                    (unsigned long long)held);
}

/* Go to the first row; there has to be one. */
static enum st go_to_start(struct source *s)
{
    uint64_t held = 0;
    enum st st = s->reader->ops->seek(s->reader, s->first, &held);
    if (st == ST_OK) s->row = s->first;
    if (st != ST_END) return st;
    if (held == 0) return log_fail(ST_DATA, s->path, "0 samples; need >= 1");
    if (held < s->first) return too_few(s, held);
    return log_fail(ST_DATA, s->path, "nothing is held out: data.train_rows takes all %llu "
                    "samples; lower it or set data.eval_path", (unsigned long long)held);
}

enum st source_open(const struct config *cfg, int eval, struct source **out)
{
    enum st st = ST_NOMEM;
    struct source *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) goto err;
    s->cfg = cfg;
    s->eval = eval != 0;
    s->label = mem_alloc(CHUNK, sizeof(*s->label));
    s->id = mem_alloc((size_t)CHUNK * cfg->model.n_tables, sizeof(*s->id));
    if (s->label == NULL || s->id == NULL) goto err_source;
    bool synthetic = cfg->data.format == DATA_SYNTHETIC;
    TRY(synthetic ? choose_synthetic_rows(s) : choose_file_rows(s), err_logged);
    TRY(go_to_start(s), err_logged);
    uint64_t held = s->reader->rows;
    if (!s->eval && held != READER_ROWS_UNKNOWN && held < cfg->data.train_rows) {
        st = too_few(s, held);
        goto err_logged;
    }
    *out = s;
    return ST_OK;

err_source: log_fail(st, "data", "out of memory");
err_logged: source_close(s);
            return st;
err:        return log_fail(st, "data", "out of memory");
}

void source_close(struct source *s)
{
    if (s == NULL) return;
    if (s->reader != NULL) s->reader->ops->close(s->reader);
    mem_free(s->id);
    mem_free(s->label);
    mem_free(s);
}

/* Raw ids [n][F] to row ids: modulo the table's rows, so that no id is out of range (I5). */
static void to_rows(const struct config *cfg, const uint32_t *raw, uint32_t n, uint64_t *id)
{
    const uint32_t F = cfg->model.n_tables;
    for (size_t i = 0; i < n; i++)
        for (uint32_t t = 0; t < F; t++)
            id[i * F + t] = row_id(t, raw[i * F + t] % cfg->model.tables[t]);
}

enum st source_read(struct source *s, struct samples *out, uint32_t at, uint32_t want,
                    uint32_t *got)
{
    const uint32_t nd = s->cfg->model.dense_features, F = s->cfg->model.n_tables;
    uint32_t done = 0;
    while (done < want && s->row < s->end) {
        uint32_t n = want - done < CHUNK ? want - done : CHUNK, read = 0;
        if (n > s->end - s->row) n = (uint32_t)(s->end - s->row);
        size_t to = (size_t)at + done;
        struct raw_samples raw = {out->dense + to * nd, s->label, s->id};
        enum st st = s->reader->ops->read(s->reader, &raw, n, &read);
        if (st != ST_OK) return st;
        for (uint32_t i = 0; i < read; i++) out->label[to + i] = (float)s->label[i];
        to_rows(s->cfg, s->id, read, out->id + to * F);
        s->row += read;
        done += read;
        if (read < n && !s->eval && s->cfg->data.train_rows > 0) return too_few(s, s->row);
        if (read < n) break;
    }
    *got = done;
    return ST_OK;
}

enum st source_rewind(struct source *s)
{
    return go_to_start(s);
}

enum st samples_open(uint32_t cap, uint32_t dense_features, uint32_t n_tables, struct samples *out)
{
    struct samples s = {0};
    s.dense = mem_alloc((size_t)cap * dense_features, sizeof(*s.dense));
    s.label = mem_alloc(cap, sizeof(*s.label));
    s.id = mem_alloc((size_t)cap * n_tables, sizeof(*s.id));
    if (s.dense == NULL || s.label == NULL || s.id == NULL) {
        samples_close(&s);
        return log_fail(ST_NOMEM, "data", "out of memory for %u samples", cap);
    }
    *out = s;
    return ST_OK;
}

void samples_close(struct samples *s)
{
    if (s == NULL) return;
    mem_free(s->dense);
    mem_free(s->label);
    mem_free(s->id);
    *s = (struct samples){0};
}
