/* config/options.h - the command line, read the same way by every program: "--name value" or
 * "--name=value", flags without a value, operands in any place, "--" before operands that begin
 * with dashes. No short options and no abbreviations: what a script says stays unambiguous. */
#ifndef CHANTER_CONFIG_OPTIONS_H
#define CHANTER_CONFIG_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "config/config.h"

enum { OPTIONS_MAX = 32, OPTION_LIST_MAX = 128 };

struct option_list {
    size_t n;
    const char *item[OPTION_LIST_MAX]; /* lent by argv */
};

/* One option. Exactly one target is set and says what kind it is; a target keeps its value when
 * the option is not given. Texts are lent by argv. */
struct option {
    const char *name;          /* without the dashes                                    */
    const char *arg;           /* what --help calls the value; NULL for a flag          */
    const char *help;          /* one line                                              */
    bool *flag;
    const char **text;
    uint64_t *number;          /* an integer lo..hi                                     */
    uint64_t lo, hi;
    struct option_list *list;  /* may be given many times                               */
};

struct options {
    const char *program;       /* "chanter check"                                       */
    const char *operands;      /* as in --help: "CONFIG"; "" for none                   */
    const char *help;          /* what the program does; may have many lines            */
    const struct option *option;
    size_t n_options;          /* <= OPTIONS_MAX                                        */
    size_t min_operands, max_operands;
    const char **operand;      /* [max_operands]; unused ones keep their value          */
};

/* Read argv[1..argc). ST_END: --help was asked for and is printed on standard output, the caller
 * exits with 0. ST_USAGE, logged: an unknown option (with the nearest known one), a missing or
 * impossible value, one option given twice with different values, too many or few operands. */
MUST_USE enum st options_parse(const struct options *o, int argc, char **argv);

/* What every program that reads a configuration takes: rows for its table, and the opening. */
struct config_args {
    struct option_list set;
    const char *run_dir;       /* the same as a last --set run.dir=DIR; NULL: not given  */
    bool no_run;               /* nothing is run: run.dir may be missing                 */
};
#define OPTION_SET(list_)                                                                 \
    {.name = "set", .arg = "SECTION.KEY=VALUE", .list = (list_),                          \
     .help = "change one key of the configuration (cluster.trainers=4)"}
#define OPTIONS_CONFIG(args)                                                              \
    OPTION_SET(&(args)->set),                                                             \
    {.name = "run-dir", .arg = "DIR", .text = &(args)->run_dir,                           \
     .help = "the run directory; the same as --set run.dir=DIR"}
MUST_USE enum st config_args_open(const struct config_args *args, const char *path,
                                  struct config **out);

#endif
