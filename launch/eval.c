/* chanter eval: a finished run's final weights on held-out rows, or on another file. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"
#include "launch/tools.h"
#include "launch/filekind.h"
#include "launch/score.h"

static const char HELP[] =
    "Score the held-out rows of a run with its final weights. Prints one JSON line: rows, loss\n"
    "(mean logloss) and auc; the same bits as the run's own evaluation at its end. Changes\n"
    "nothing.";

enum { FILE_SETS = 6 };

struct eval_args {
    const char *dir;
    const char *data;                 /* NULL: the run's held-out rows */
    struct option_list set;
};

/* The settings that make a file the held-out data; the user's own come behind and win. */
struct file_sets {
    char *path, *eval_path;           /* a synthetic run has no data.path, but a file's needs one */
    const char *format;
};

static char *set_text(const char *key, const char *value)
{
    size_t room = strlen(key) + strlen(value) + sizeof("=");
    char *text = mem_alloc(room, 1);
    if (text != NULL) snprintf(text, room, "%s=%s", key, value);
    return text;
}

static enum st name_data(const struct eval_args *a, struct file_sets *out)
{
    enum filekind kind;
    enum st st = filekind_of(a->data, &kind);
    if (st != ST_OK) return st;
    out->path = set_text("data.path", a->data);
    out->eval_path = set_text("data.eval_path", a->data);
    if (out->path == NULL || out->eval_path == NULL)
        return log_fail(ST_NOMEM, a->data, "out of memory");
    out->format = kind == FILEKIND_PREPARED ? "data.format=prepared" : "data.format=criteo_tsv";
    return ST_OK;
}

static enum st open_run(const struct eval_args *a, struct rundir **out)
{
    const char *set[OPTION_LIST_MAX + FILE_SETS];
    struct file_sets file = {NULL, NULL, NULL};
    size_t n = 0;
    enum st st = ST_OK;
    if (a->data != NULL) {
        TRY(name_data(a, &file), done);
        set[n++] = file.format;
        set[n++] = file.path;
        set[n++] = file.eval_path;
        set[n++] = "data.eval_rows=0";
        set[n++] = "data.rows=0"; /* of a synthetic run; a file has none */
        set[n++] = "data.seed=1";
    }
    for (size_t i = 0; i < a->set.n; i++) set[n++] = a->set.item[i];
    st = rundir_open(a->dir, set, n, RUNDIR_WEIGHTS, out);
done:
    mem_free(file.eval_path);
    mem_free(file.path);
    return st;
}

static void print_result(const struct evaluation *e)
{
    printf("{\"rows\":%" PRIu64 ",\"loss\":%.9g,\"auc\":", e->rows, e->loss);
    if (isfinite(e->auc)) printf("%.9g}\n", e->auc);
    else printf("null}\n"); /* one class only; JSON has no NaN */
}

enum st eval_main(int argc, char **argv)
{
    struct eval_args a = {NULL, NULL, {0, {NULL}}};
    const struct option option[] = {
        {.name = "data", .arg = "FILE", .text = &a.data,
         .help = "score all rows of FILE: Criteo TSV or a prepared file"},
        OPTION_SET(&a.set),
    };
    const struct options options = {"chanter eval", "RUN_DIR", HELP, option, 2, 1, 1, &a.dir};
    struct rundir *r;
    struct source *s;
    struct evaluation e;
    enum st st;
    TRY(options_parse(&options, argc, argv), err);
    TRY(open_run(&a, &r), err);
    TRY(source_open(r->config, 1, &s), err_run);
    st = score_source(r, s, &e);
    if (st == ST_OK) print_result(&e);
    source_close(s);
err_run:
    rundir_close(r);
err:
    return st;
}
