#include "launch/command.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "config/nearest.h"

static const char VERSION[] = "0.1.0";

static void print_overview(const struct command *table, size_t n)
{
    printf("usage: chanter COMMAND [ARGUMENT ...]\n\n"
           "Lookahead-planned training of recommendation models.\n\n");
    for (size_t i = 0; i < n; i++) printf("  %-10s %s\n", table[i].name, table[i].help);
    printf("\nchanter help COMMAND says more; chanter --version prints the version.\n");
}

static const struct command *find_command(const struct command *table, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].name, name) == 0) return &table[i];
    return NULL;
}

static enum st unknown_command(const struct command *table, size_t n, const char *name)
{
    char hint[NEAREST_HINT_BYTES];
    struct nearest near;
    nearest_start(&near, name);
    for (size_t i = 0; i < n; i++) nearest_offer(&near, table[i].name);
    return log_fail(ST_USAGE, NULL, "unknown command '%s'%s; see chanter --help", name,
                    nearest_hint(&near, "'", "'", hint));
}

static enum st run_command(const struct command *table, size_t n, int argc, char **argv)
{
    const struct command *c = find_command(table, n, argv[0]);
    if (c == NULL) return unknown_command(table, n, argv[0]);
    return c->run(argc, argv);
}

static enum st run_help(const struct command *table, size_t n, const char *name)
{
    if (name == NULL) {
        print_overview(table, n);
        return ST_OK;
    }
    char word[64], help[] = "--help";
    snprintf(word, sizeof(word), "%s", name);
    char *argv[] = {word, help, NULL};
    return run_command(table, n, 2, argv);
}

static enum st dispatch(const struct command *table, size_t n, int argc, char **argv)
{
    if (argc < 2) return log_fail(ST_USAGE, NULL, "no command; see chanter --help");
    const char *word = argv[1];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) return run_help(table, n, NULL);
    if (strcmp(word, "help") == 0) return run_help(table, n, argc > 2 ? argv[2] : NULL);
    if (strcmp(word, "--version") == 0) {
        printf("chanter %s\n", VERSION);
        return ST_OK;
    }
    return run_command(table, n, argc - 1, argv + 1);
}

int command_main(const struct command *table, size_t n, int argc, char **argv)
{
    enum st st = dispatch(table, n, argc, argv);
    if (st == ST_END) st = ST_OK; /* --help */
    /* Results that never reached the file or pipe they were sent to are not results (I5). */
    if ((fflush(stdout) != 0 || ferror(stdout)) && st == ST_OK)
        st = log_fail(ST_IO, NULL, "cannot write to standard output");
    return log_exit_code(st);
}
