/* The synthetic stream as text, so that it can be read by this and every other program. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "data/outfile.h"
#include "data/synthetic.h"
#include "data/synthetic_law.h"

enum { FIELD_BYTES = 22 };        /* TAB, sign, 19 digits of an int64, the end */

struct text {
    char *p;                      /* owns; room for one line */
    size_t n;
};

static void put_hex(struct text *line, uint32_t v)
{
    for (int shift = 28; shift >= 0; shift -= 4)
        line->p[line->n++] = "0123456789abcdef"[v >> shift & 15];
}

static void format_line(const struct config *cfg, const struct law *law,
                        const struct synthetic_sample *sample, struct text *line)
{
    line->n = 0;
    line->p[line->n++] = (char)('0' + sample->label);
    for (uint32_t i = 0; i < cfg->model.dense_features; i++) {
        line->p[line->n++] = '\t';
        if (sample->dense[i] == LAW_EMPTY) continue;
        line->n += (size_t)snprintf(line->p + line->n, FIELD_BYTES, "%lld",
                                    (long long)sample->dense[i]);
    }
    for (uint32_t t = 0; t < cfg->model.n_tables; t++) {
        line->p[line->n++] = '\t';
        if (!law_is_empty(law, t, sample->id[t])) put_hex(line, sample->id[t]);
    }
    line->p[line->n++] = '\n';
}

static enum st write_lines(const struct config *cfg, const struct law *law, struct synthetic *s,
                           struct text *line, struct outfile *o, uint64_t rows)
{
    for (uint64_t i = 0; i < rows; i++) {
        struct synthetic_sample sample;
        synthetic_sample(s, i, &sample);
        format_line(cfg, law, &sample, line);
        enum st st = outfile_write(o, line->p, line->n);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

enum st synth_write_tsv(const struct config *cfg, const char *path, uint64_t rows)
{
    struct synthetic *s;
    struct law *law;
    struct outfile *o;
    struct text line = {NULL, 0};
    enum st st;
    TRY(synthetic_open(cfg, &s), err);
    TRY(law_open(cfg, &law), err_synthetic);
    line.p = mem_alloc(3 + (size_t)cfg->model.dense_features + cfg->model.n_tables, FIELD_BYTES);
    if (line.p == NULL) {
        st = log_fail(ST_NOMEM, path, "out of memory");
        goto err_law;
    }
    TRY(outfile_create(path, &o), err_line);
    TRY(write_lines(cfg, law, s, &line, o, rows), err_outfile);
    st = outfile_commit(o);
    goto err_line;

err_outfile:   outfile_abandon(o);
err_line:      mem_free(line.p);
err_law:       law_close(law);
err_synthetic: synthetic_close(s);
err:           return st;
}
