/* launch/command.h - a program of many commands: "chanter COMMAND ...". Finds the command and runs
 * it; what a command does is its own file's business. */
#ifndef CHANTER_LAUNCH_COMMAND_H
#define CHANTER_LAUNCH_COMMAND_H

#include <stddef.h>

#include "base/status.h"

struct command {
    const char *name;
    const char *help;                         /* one line, for the overview                   */
    /* argv[0] is the command's name. Logs what went wrong; ST_END: --help, nothing was done. */
    enum st (*run)(int argc, char **argv);
};

/* Run what argv[1] names, or --help, --version, help COMMAND. Returns the exit code. */
int command_main(const struct command *table, size_t n, int argc, char **argv);

#endif
