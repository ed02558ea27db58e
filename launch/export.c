/* chanter export: a finished run's weights as one safetensors file. The run's own final file is one
 * already; what this adds is that every value has been looked at, and optionally the optimizer's
 * state in the same file. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"
#include "launch/tools.h"
#include "launch/output.h"
#include "launch/progress.h"
#include "launch/rundir.h"

static const char HELP[] =
    "Write the final weights of a run as one safetensors file, with the tensor names of\n"
    "facebookresearch/dlrm's state_dict. Checks on the way that every value is finite. Prints one\n"
    "JSON line: tensors, values and bytes.";

enum { PIECE_FLOATS = 1 << 16 };

struct export_args {
    const char *operand[2];   /* run directory, output */
    bool state, force;
};

struct copy {
    const char *from;                     /* the run directory, for messages         */
    const struct st_tensor *tensor;       /* [n] in the order of the output          */
    size_t n;
    struct safetensors_writer *writer;
    float *piece;                         /* [PIECE_FLOATS] aligned, unlike the file */
    struct progress progress;
    uint64_t values;                      /* copied so far                           */
};

static uint64_t values_of(const struct st_tensor *t)
{
    return t->cols == 0 ? t->rows : t->rows * t->cols;
}

static enum st copy_tensor(struct copy *c, const struct st_tensor *t)
{
    uint64_t n = values_of(t);
    for (uint64_t at = 0; at < n;) {
        size_t piece = n - at < PIECE_FLOATS ? (size_t)(n - at) : PIECE_FLOATS;
        memcpy(c->piece, (const char *)t->data + at * sizeof(float), piece * sizeof(float));
        for (size_t i = 0; i < piece; i++)
            if (!isfinite(c->piece[i]))
                return log_fail(ST_DATA, c->from, "tensor %s: value %" PRIu64 " is not finite",
                                t->name, at + i);
        enum st st = safetensors_append(c->writer, c->piece, piece);
        if (st != ST_OK) return st;
        at += piece;
        c->values += piece;
        progress_at(&c->progress, c->values);
    }
    return ST_OK;
}

static enum st copy_all(struct copy *c, const char *out)
{
    uint64_t total = 0;
    for (size_t i = 0; i < c->n; i++) total += values_of(&c->tensor[i]);
    enum st st = safetensors_create(out, c->tensor, c->n, &c->writer);
    if (st != ST_OK) return st;
    progress_start(&c->progress, "export", "values", total, false);
    for (size_t i = 0; i < c->n && st == ST_OK; i++) st = copy_tensor(c, &c->tensor[i]);
    progress_stop(&c->progress);
    if (st == ST_OK) return safetensors_commit(c->writer);
    safetensors_abandon(c->writer);
    return st;
}

static void list_tensors(const struct safetensors *s, struct st_tensor *to)
{
    for (size_t i = 0; i < safetensors_count(s); i++) to[i] = *safetensors_at(s, i);
}

static enum st print_result(const struct copy *c, const char *out)
{
    struct stat s;
    if (stat(out, &s) != 0) return log_fail(ST_IO, out, "is gone right after it was written");
    printf("{\"tensors\":%zu,\"values\":%" PRIu64 ",\"bytes\":%lld}\n", c->n, c->values,
           (long long)s.st_size);
    return ST_OK;
}

static enum st export_run(const struct rundir *r, const struct export_args *a)
{
    size_t n = safetensors_count(r->weights);
    size_t n_state = r->state != NULL ? safetensors_count(r->state) : 0;
    enum st st = ST_NOMEM;
    struct st_tensor *tensor = mem_alloc(n + n_state, sizeof(*tensor));
    float *piece = mem_alloc(PIECE_FLOATS, sizeof(*piece));
    if (tensor == NULL || piece == NULL) {
        log_fail(st, a->operand[0], "out of memory");
        goto done;
    }
    list_tensors(r->weights, tensor);
    if (r->state != NULL) list_tensors(r->state, tensor + n);
    struct copy c = {.from = a->operand[0], .tensor = tensor, .n = n + n_state, .piece = piece};
    st = copy_all(&c, a->operand[1]);
    if (st == ST_OK) st = print_result(&c, a->operand[1]);
done:
    mem_free(piece);
    mem_free(tensor);
    return st;
}

/* Not over any file of the run. */
static enum st check_output(const struct export_args *a)
{
    static const char *const NAMES[] = {"final.safetensors", "final.state.safetensors",
                                        "init.safetensors", "config.yaml", "model.json",
                                        "metrics.jsonl"};
    enum { N = sizeof(NAMES) / sizeof(NAMES[0]) };
    char path[N][RUNDIR_PATH_BYTES];
    const char *input[N];
    for (size_t i = 0; i < N; i++) {
        enum st st = rundir_path(a->operand[0], NAMES[i], path[i]);
        if (st != ST_OK) return st;
        input[i] = path[i];
    }
    return output_check(a->operand[1], input, N, a->force);
}

enum st export_main(int argc, char **argv)
{
    struct export_args a = {{NULL, NULL}, false, false};
    const struct option option[] = {
        {.name = "state", .flag = &a.state,
         .help = "the optimizer's state as well: NAME.state beside each NAME"},
        {.name = "force", .flag = &a.force, .help = "replace OUT.safetensors if it exists"},
    };
    const struct options options = {"chanter export", "RUN_DIR OUT.safetensors", HELP, option, 2,
                                    2, 2, a.operand};
    struct rundir *r;
    enum st st;
    TRY(options_parse(&options, argc, argv), err);
    TRY(check_output(&a), err);
    TRY(rundir_open(a.operand[0], NULL, 0, a.state ? RUNDIR_STATE : RUNDIR_WEIGHTS, &r), err);
    if (a.state && r->state == NULL)
        st = log_fail(ST_USAGE, a.operand[0], "--state: optimizer %s keeps none; leave it out",
                      config_optimizer_name(r->config->train.optimizer));
    else st = export_run(r, &a);
    rundir_close(r);
err:
    return st;
}
