/* chanter synth: the synthetic data set of a configuration as a Criteo TSV file. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/log.h"
#include "config/options.h"
#include "data/synthetic.h"
#include "launch/tools.h"
#include "launch/output.h"

static const char HELP[] =
    "Write a synthetic click log as a Criteo TSV file: ids skewed like a real log's, clicks drawn\n"
    "from a planted model. CONFIG gives its shape (model.tables, model.dense_features), data.seed\n"
    "and data.rows. Prints one JSON line: rows, and the logloss and auc of the planted model on\n"
    "them, which no training can beat except by chance.";

/* One more --set, which wins over those before. */
static enum st add_set(struct option_list *set, const char *text)
{
    if (set->n == OPTION_LIST_MAX)
        return log_fail(ST_USAGE, NULL, "--set given more than %d times", OPTION_LIST_MAX - 4);
    set->item[set->n++] = text;
    return ST_OK;
}

static void print_result(uint64_t rows, double logloss, double auc)
{
    printf("{\"rows\":%" PRIu64 ",\"best_logloss\":%.9g,\"best_auc\":", rows, logloss);
    if (isfinite(auc)) printf("%.9g}\n", auc);
    else printf("null}\n"); /* one class only; JSON has no NaN */
}

enum st synth_main(int argc, char **argv)
{
    struct config_args args = {.no_run = true};
    const char *path = NULL, *out = NULL;
    bool force = false;
    uint64_t rows = 0;
    const struct option option[] = {
        {.name = "out", .arg = "FILE.tsv", .text = &out, .help = "the file to write"},
        {.name = "force", .flag = &force, .help = "replace FILE.tsv if it exists"},
        {.name = "rows", .arg = "N", .number = &rows, .lo = 1, .hi = UINT64_C(1000000000000),
         .help = "samples to write; the same as --set data.rows=N"},
        OPTION_SET(&args.set),
    };
    const struct options options = {"chanter synth", "CONFIG --out FILE.tsv", HELP,
                                    option, 4, 1, 1, &path};
    struct config *c;
    char rows_set[40];
    double logloss, auc;
    enum st st;
    TRY(options_parse(&options, argc, argv), err);
    /* Whatever the configuration trains on: here it is synthetic, and all of it. */
    TRY(add_set(&args.set, "data.format=synthetic"), err);
    TRY(add_set(&args.set, "data.train_rows=0"), err);
    TRY(add_set(&args.set, "run.eval_every=0"), err);
    snprintf(rows_set, sizeof(rows_set), "data.rows=%" PRIu64, rows);
    if (rows != 0) TRY(add_set(&args.set, rows_set), err);
    TRY(config_args_open(&args, path, &c), err);
    const char *const input[] = {path, c->data.path, c->data.eval_path};
    TRY(output_check(out, input, sizeof(input) / sizeof(input[0]), force), err_config);
    TRY(synthetic_best(c, 0, &logloss, &auc), err_config);
    TRY(synth_write_tsv(c, out, c->data.rows), err_config);
    print_result(c->data.rows, logloss, auc);
err_config:
    config_close(c);
err:
    return st;
}
