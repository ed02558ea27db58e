/* chanter inspect: what is in a file or a run directory, for a person to read. Each kind of file is
 * read whole and checked as far as its format allows, so that exit code 0 means: not damaged. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "config/options.h"
#include "data/infile.h"
#include "data/prepared.h"
#include "launch/tools.h"
#include "launch/filekind.h"
#include "launch/rundir.h"
#include "launch/runlog.h"

static const char HELP[] =
    "Say in short what PATH holds: a run directory, a .safetensors file, a prepared .chp file or\n"
    "a metrics.jsonl. Reads and checks all of it: exit code 65 if it is damaged.";

static void print_bytes(double bytes)
{
    static const char *const UNIT[] = {"bytes", "KB", "MB", "GB", "TB"};
    size_t k = 0;
    for (; bytes >= 1000 && k < 4; k++) bytes /= 1000;
    printf(k == 0 ? "%.0f %s" : "%.1f %s", bytes, UNIT[k]);
}

static const char *plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

static void print_file_bytes(const char *path)
{
    struct stat s;
    if (stat(path, &s) == 0) print_bytes((double)s.st_size);
}

/* --- safetensors ------------------------------------------------------------------------------ */

struct range { float lo, hi; uint64_t odd; }; /* of the finite values; how many are not finite */

static struct range range_of(const struct st_tensor *t, uint64_t n)
{
    struct range r = {INFINITY, -INFINITY, 0};
    for (uint64_t i = 0; i < n; i++) {
        float v; /* the data may be unaligned */
        memcpy(&v, (const char *)t->data + i * sizeof(v), sizeof(v));
        if (!isfinite(v)) r.odd++;
        else {
            if (v < r.lo) r.lo = v;
            if (v > r.hi) r.hi = v;
        }
    }
    return r;
}

/* Adds the values to *values, those that are not finite to *odd. */
static void print_tensor(const struct st_tensor *t, uint64_t *values, uint64_t *odd)
{
    char shape[48];
    uint64_t n = t->cols == 0 ? t->rows : t->rows * t->cols;
    struct range r = range_of(t, n);
    if (t->cols == 0) snprintf(shape, sizeof(shape), "%" PRIu64, t->rows);
    else snprintf(shape, sizeof(shape), "%" PRIu64 " x %" PRIu64, t->rows, t->cols);
    printf("  %-28s %-16s", t->name, shape);
    if (n > r.odd) printf(" %11.4g .. %.4g", r.lo, r.hi);
    if (r.odd > 0) printf(" %" PRIu64 " not finite", r.odd);
    printf("\n");
    *values += n;
    *odd += r.odd;
}

static enum st inspect_safetensors(const char *path)
{
    struct safetensors *s;
    uint64_t values = 0, odd = 0;
    enum st st = safetensors_open(path, &s);
    if (st != ST_OK) return st;
    printf("%s: safetensors, %zu tensors, ", path, safetensors_count(s));
    print_file_bytes(path);
    printf("\n  %-28s %-16s %s\n", "tensor", "shape", "     lowest .. highest value");
    for (size_t i = 0; i < safetensors_count(s); i++)
        print_tensor(safetensors_at(s, i), &values, &odd);
    printf("  %" PRIu64 " values in all\n", values);
    safetensors_close(s);
    if (odd == 0) return ST_OK;
    return log_fail(ST_DATA, path, "%" PRIu64 " value%s not finite", odd,
                    odd == 1 ? " is" : "s are");
}

/* --- prepared --------------------------------------------------------------------------------- */

enum { HEADER_SHAPE_AT = 12 }; /* u32 dense_features, n_tables, rows per block: data/prepared.h */

static enum st inspect_prepared(const char *path)
{
    struct infile f;
    uint64_t rows;
    uint32_t shape[3];
    enum st st = prepared_verify(path, &rows);
    if (st == ST_OK) st = infile_open(path, &f);
    if (st != ST_OK) return st;
    st = infile_read(&f, path, HEADER_SHAPE_AT, shape, sizeof(shape));
    close(f.fd);
    if (st != ST_OK) return st;
    printf("%s: prepared data, ", path);
    print_file_bytes(path);
    printf("\n  rows       %" PRIu64 " in blocks of %" PRIu32 "\n", rows, shape[2]);
    printf("  a row      label, %" PRIu32 " dense values, %" PRIu32 " ids\n", shape[0], shape[1]);
    printf("  checksums  all correct\n");
    return ST_OK;
}

/* --- metrics ---------------------------------------------------------------------------------- */

static void print_auc(double auc)
{
    if (isnan(auc)) printf("none (one class only)");
    else printf("%.5f", auc);
}

static void print_runlog(const struct runlog *r)
{
    printf("  iterations %" PRIu64, r->n_train);
    if (r->n_train > 0) printf(": loss %.5f at first, %.5f at last", r->first_loss, r->last_loss);
    printf("\n");
    if (r->n_eval > 0) {
        printf("  evaluated  %" PRIu64 " time%s; the last: %" PRIu64 " row%s, loss %.5f, "
               "AUC ", r->n_eval, plural(r->n_eval), r->eval.rows, plural(r->eval.rows),
               r->eval.loss);
        print_auc(r->eval.auc);
        printf("\n");
    }
    if (r->ended) {
        printf("  ended      after %.1f s, %.0f samples/s, %.2f s of them waiting for rows\n",
               r->seconds, r->samples_per_s, r->exposed_wait_s);
        printf("  digest     %s\n", r->digest);
    } else {
        printf("  ended      no: the run is going on or was stopped\n");
    }
}

static enum st inspect_metrics(const char *path)
{
    struct runlog r;
    enum st st = runlog_read(path, &r);
    if (st != ST_OK) return st;
    printf("%s: metrics of a run\n", path);
    print_runlog(&r);
    return ST_OK;
}

/* --- run directory ---------------------------------------------------------------------------- */

static void print_widths(const char *name, const uint32_t *v, uint32_t n)
{
    printf(", %s ", name);
    for (uint32_t i = 0; i < n; i++) printf("%s%" PRIu32, i > 0 ? "-" : "", v[i]);
}

static void print_config(const struct config *c)
{
    uint64_t rows = 0;
    for (uint32_t t = 0; t < c->model.n_tables; t++) rows += c->model.tables[t];
    printf("  model      dlrm, %" PRIu32 " table%s of %" PRIu64 " rows in all, dim %" PRIu32,
           c->model.n_tables, plural(c->model.n_tables), rows, c->model.dim);
    print_widths("bottom", c->model.bottom_mlp, c->model.n_bottom_mlp);
    print_widths("top", c->model.top_mlp, c->model.n_top_mlp);
    printf("\n  training   %s, learning rate %g, %" PRIu32 " samples a batch in %" PRIu32
           " slice%s, seed %" PRIu64 "\n", config_optimizer_name(c->train.optimizer),
           (double)c->train.learning_rate, c->train.global_batch, c->train.slices,
           plural(c->train.slices), c->train.seed);
    printf("  data       %s\n", c->data.format == DATA_SYNTHETIC ? "synthetic" : c->data.path);
}

static bool there(const char *dir, const char *name)
{
    struct stat s;
    char path[RUNDIR_PATH_BYTES];
    return snprintf(path, sizeof(path), "%s/%s", dir, name) < (int)sizeof(path) &&
           stat(path, &s) == 0;
}

static enum st print_log_of(const char *dir)
{
    char path[RUNDIR_PATH_BYTES];
    struct runlog log;
    enum st st = rundir_path(dir, "metrics.jsonl", path);
    if (st == ST_OK && there(dir, "metrics.jsonl")) {
        st = runlog_read(path, &log);
        if (st == ST_OK) print_runlog(&log);
    }
    return st;
}

static enum st print_weights_of(const char *dir)
{
    struct rundir *r;
    if (!there(dir, "final.safetensors")) {
        printf("  weights    none: the run has not ended, or run.save_final is false\n");
        return ST_OK;
    }
    enum st st = rundir_open(dir, NULL, 0, RUNDIR_STATE, &r);
    if (st != ST_OK) return st;
    printf("  weights    %zu tensors after %" PRIu64 " iteration%s; names and shapes are the "
           "model's\n", safetensors_count(r->weights), r->iterations, plural(r->iterations));
    if (r->state != NULL)
        printf("  state      %zu tensors\n", safetensors_count(r->state));
    rundir_close(r);
    return ST_OK;
}

static enum st inspect_run(const char *dir)
{
    char path[RUNDIR_PATH_BYTES];
    struct config *c;
    enum st st;
    TRY(rundir_path(dir, "config.yaml", path), err);
    if (!there(dir, "config.yaml"))
        return log_fail(ST_NOINPUT, path, "no such file; is this a run directory?");
    TRY(config_open(path, NULL, 0, &c), err);
    printf("%s: run directory\n", dir);
    print_config(c);
    config_close(c);
    TRY(print_log_of(dir), err);
    TRY(print_weights_of(dir), err);
err:
    return st;
}

enum st inspect_main(int argc, char **argv)
{
    const char *path = NULL;
    const struct options options = {"chanter inspect", "PATH", HELP, NULL, 0, 1, 1, &path};
    enum filekind kind;
    enum st st = options_parse(&options, argc, argv);
    if (st == ST_OK) st = filekind_of(path, &kind);
    if (st != ST_OK) return st;
    switch (kind) {
    case FILEKIND_DIRECTORY:   return inspect_run(path);
    case FILEKIND_PREPARED:    return inspect_prepared(path);
    case FILEKIND_SAFETENSORS: return inspect_safetensors(path);
    case FILEKIND_METRICS:     return inspect_metrics(path);
    case FILEKIND_OTHER:       break;
    }
    return log_fail(ST_DATA, path, "is no run directory, .safetensors, .chp or metrics.jsonl; "
                    "`chanter check CONFIG` looks at a configuration and its data");
}
