#include "config/options.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "config/keys.h"
#include "config/nearest.h"

/* --- help ----------------------------------------------------------------------------------- */

static void print_option(const char *name, const char *arg, const char *help)
{
    char left[64];
    snprintf(left, sizeof(left), "--%s%s%s", name, arg != NULL ? " " : "", arg != NULL ? arg : "");
    printf("  %-24s %s\n", left, help);
}

static void print_help(const struct options *o)
{
    printf("usage: %s [OPTION ...]%s%s\n\n%s\n\n", o->program, o->operands[0] != '\0' ? " " : "",
           o->operands, o->help);
    for (size_t i = 0; i < o->n_options; i++)
        print_option(o->option[i].name, o->option[i].arg, o->option[i].help);
    print_option("help", NULL, "print this and exit");
}

/* --- one option ----------------------------------------------------------------------------- */

struct given {            /* while reading one command line */
    const struct options *o;
    int argc, at;         /* argv[at] is next               */
    char **argv;
    const char *value[OPTIONS_MAX]; /* of option i so far; NULL: not given yet */
    size_t n_operands;
};

static const struct option *find_option(const struct options *o, const char *name, size_t len)
{
    for (size_t i = 0; i < o->n_options; i++)
        if (strlen(o->option[i].name) == len && memcmp(o->option[i].name, name, len) == 0)
            return &o->option[i];
    return NULL;
}

static enum st unknown_option(const struct options *o, const char *name, size_t len)
{
    char word[64], hint[NEAREST_HINT_BYTES], key[KEY_GUESS_BYTES];
    struct nearest near;
    snprintf(word, sizeof(word), "%.*s", (int)len, name);
    if (find_option(o, "set", 3) != NULL && key_guess(word, key)[0] != '\0')
        return log_fail(ST_USAGE, NULL, "unknown option --%s; the key %s is given as --set "
                        "SECTION.KEY=VALUE", word, key);
    nearest_start(&near, word);
    for (size_t i = 0; i < o->n_options; i++) nearest_offer(&near, o->option[i].name);
    nearest_offer(&near, "help");
    return log_fail(ST_USAGE, NULL, "unknown option --%s%s; see %s --help", word,
                    nearest_hint(&near, "--", "", hint), o->program);
}

static enum st set_number(const struct option *op, const char *value)
{
    errno = 0;
    size_t digits = strspn(value, "0123456789");
    uint64_t v = strtoull(value, NULL, 10);
    if (digits == 0 || value[digits] != '\0' || errno != 0 || v < op->lo || v > op->hi)
        return log_fail(ST_USAGE, NULL, "--%s '%s': want an integer %" PRIu64 "..%" PRIu64,
                        op->name, value, op->lo, op->hi);
    *op->number = v;
    return ST_OK;
}

static enum st set_list(const struct option *op, const char *value)
{
    if (op->list->n == OPTION_LIST_MAX)
        return log_fail(ST_USAGE, NULL, "--%s given more than %d times", op->name, OPTION_LIST_MAX);
    op->list->item[op->list->n++] = value;
    return ST_OK;
}

static enum st set_value(struct given *g, const struct option *op, const char *value)
{
    if (op->list != NULL) return set_list(op, value);
    const char **before = &g->value[op - g->o->option];
    if (*before != NULL && strcmp(*before, value) != 0)
        return log_fail(ST_USAGE, NULL, "--%s given twice (%s, %s)", op->name, *before, value);
    *before = value;
    if (op->number != NULL) return set_number(op, value);
    *op->text = value;
    return ST_OK;
}

/* The value behind "--name": the next argument, unless that is an option itself. */
static const char *next_value(struct given *g)
{
    if (g->at == g->argc || strncmp(g->argv[g->at], "--", 2) == 0) return NULL;
    return g->argv[g->at++];
}

/* `arg` is behind the dashes. */
static enum st take_option(struct given *g, const char *arg)
{
    size_t len = strcspn(arg, "=");
    const char *value = arg[len] == '=' ? arg + len + 1 : NULL;
    const struct option *op = find_option(g->o, arg, len);
    if (op == NULL) return unknown_option(g->o, arg, len);
    if (op->flag != NULL) {
        if (value != NULL) return log_fail(ST_USAGE, NULL, "--%s takes no value", op->name);
        *op->flag = true;
        return ST_OK;
    }
    if (value == NULL) value = next_value(g);
    if (value == NULL || value[0] == '\0')
        return log_fail(ST_USAGE, NULL, "--%s needs a %s (--%s %s)", op->name,
                        op->number != NULL ? "number" : "value", op->name, op->arg);
    return set_value(g, op, value);
}

static enum st take_operand(struct given *g, const char *arg)
{
    const struct options *o = g->o;
    if (g->n_operands == o->max_operands)
        return log_fail(ST_USAGE, NULL, "unexpected '%s'; usage: %s [OPTION ...] %s", arg,
                        o->program, o->operands);
    o->operand[g->n_operands++] = arg;
    return ST_OK;
}

static bool asks_for_help(const char *arg)
{
    return strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0;
}

static enum st take_argument(struct given *g, bool *only_operands)
{
    const char *arg = g->argv[g->at++];
    if (*only_operands || arg[0] != '-' || arg[1] == '\0') return take_operand(g, arg);
    if (strcmp(arg, "--") == 0) {
        *only_operands = true;
        return ST_OK;
    }
    if (asks_for_help(arg)) {
        print_help(g->o);
        return ST_END;
    }
    if (arg[1] == '-') return take_option(g, arg + 2);
    return log_fail(ST_USAGE, NULL, "unknown option %s; options begin with --, see %s --help", arg,
                    g->o->program);
}

enum st options_parse(const struct options *o, int argc, char **argv)
{
    CHECK(o->n_options <= OPTIONS_MAX, "OPTIONS_MAX");
    struct given g = {.o = o, .argc = argc, .argv = argv, .at = 1};
    bool only_operands = false;
    enum st st = ST_OK;
    while (g.at < argc && st == ST_OK) st = take_argument(&g, &only_operands);
    if (st == ST_OK && g.n_operands < o->min_operands)
        st = log_fail(ST_USAGE, NULL, "missing operand; usage: %s [OPTION ...] %s", o->program,
                      o->operands);
    return st;
}

/* --- configuration -------------------------------------------------------------------------- */

/* run.dir is asked of whoever runs a job; in front, so that a --set of it is still looked at. */
static enum st open_without_run(const struct config_args *args, const char *path,
                                struct config **out)
{
    const char *set[OPTION_LIST_MAX + 1] = {"run.dir=."};
    for (size_t i = 0; i < args->set.n; i++) set[i + 1] = args->set.item[i];
    return config_open(path, set, args->set.n + 1, out);
}

enum st config_args_open(const struct config_args *args, const char *path, struct config **out)
{
    if (args->no_run) return open_without_run(args, path, out);
    if (args->run_dir == NULL) return config_open(path, args->set.item, args->set.n, out);

    const char *set[OPTION_LIST_MAX + 1];
    size_t n = args->set.n, room = sizeof("run.dir=") + strlen(args->run_dir);
    char *run_dir = mem_alloc(room, 1);
    if (run_dir == NULL) return log_fail(ST_NOMEM, path, "out of memory (%zu bytes)", room);
    snprintf(run_dir, room, "run.dir=%s", args->run_dir);
    if (n > 0) memcpy(set, args->set.item, n * sizeof(set[0]));
    set[n] = run_dir;
    enum st st = config_open(path, set, n + 1, out);
    mem_free(run_dir);
    return st;
}
