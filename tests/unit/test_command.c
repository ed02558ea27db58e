/* The `chanter` command's first word: which command runs, and the exit code. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "launch/command.h"
#include "tests/support/caught.h"
#include "tests/support/output.h"

static int n_runs;
static int last_argc;
static char last_args[128];

static enum st note(int argc, char **argv)
{
    n_runs++;
    last_argc = argc;
    last_args[0] = '\0';
    for (int i = 0; i < argc; i++) {
        strcat(last_args, argv[i]);
        strcat(last_args, "|");
    }
    return argc > 1 && strcmp(argv[1], "--help") == 0 ? ST_END : ST_OK;
}

static enum st fail_config(int argc, char **argv)
{
    return ST_CONFIG;
}

static const struct command TABLE[] = {
    {"check", "look first", note},
    {"train", "then do it", fail_config},
};

static char out[1024];

static int run(int argc, char **argv)
{
    n_runs = 0;
    caught_reset();
    output_start();
    int code = command_main(TABLE, 2, argc, argv);
    output_stop(out, sizeof(out));
    return code;
}

static void a_command_gets_its_own_arguments(void **state)
{
    char *argv[] = {"chanter", "check", "a.yml", "--set=x", NULL};
    assert_int_equal(run(4, argv), 0);
    assert_int_equal(n_runs, 1);
    assert_string_equal(last_args, "check|a.yml|--set=x|");
    assert_string_equal(out, "");
}

static void the_exit_code_is_that_of_the_status(void **state)
{
    char *argv[] = {"chanter", "train", NULL};
    assert_int_equal(run(2, argv), 78);
    assert_int_equal(n_runs, 0);
    assert_int_equal(caught_lines, 0); /* whoever failed has said why */
}

static void an_unknown_command_is_a_usage_error_with_a_guess(void **state)
{
    char *near[] = {"chanter", "chekc", NULL}, *far[] = {"chanter", "xyzzy", NULL};
    assert_int_equal(run(2, near), 64);
    assert_string_equal(caught_line, "chanter: error[E-USAGE]: unknown command 'chekc' "
                                     "(did you mean 'check'?); see chanter --help");
    assert_int_equal(run(2, far), 64);
    assert_string_equal(caught_line,
                        "chanter: error[E-USAGE]: unknown command 'xyzzy'; see chanter --help");
    assert_int_equal(run(1, near), 64);
    assert_int_equal(n_runs, 0);
}

static void help_lists_all_commands_or_asks_one(void **state)
{
    char *all[] = {"chanter", "--help", NULL}, *word[] = {"chanter", "help", NULL};
    char *one[] = {"chanter", "help", "check", NULL}, *none[] = {"chanter", "help", "chek", NULL};
    assert_int_equal(run(2, all), 0);
    assert_non_null(strstr(out, "  check      look first\n"));
    assert_non_null(strstr(out, "  train      then do it\n"));
    assert_int_equal(run(2, word), 0);
    assert_non_null(strstr(out, "usage: chanter COMMAND"));
    assert_int_equal(run(3, one), 0);
    assert_string_equal(last_args, "check|--help|");
    assert_int_equal(n_runs, 1);
    assert_int_equal(run(3, none), 64);
    assert_non_null(strstr(caught_line, "(did you mean 'check'?)"));
}

static void the_version_is_a_number(void **state)
{
    char *argv[] = {"chanter", "--version", NULL};
    int major, minor, patch;
    assert_int_equal(run(2, argv), 0);
    assert_int_equal(sscanf(out, "chanter %d.%d.%d", &major, &minor, &patch), 3);
}

static void output_that_cannot_be_written_is_an_error(void **state)
{
    char *argv[] = {"chanter", "--version", NULL};
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    FILE *full = fopen("/dev/full", "w");
    assert_true(saved >= 0 && full != NULL);
    caught_reset();
    dup2(fileno(full), STDOUT_FILENO);
    int code = command_main(TABLE, 2, 2, argv);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    fclose(full);
    clearerr(stdout);
    assert_int_equal(code, 74);
    assert_non_null(strstr(caught_line, "cannot write to standard output"));
}

static int group_start(void **state)
{
    caught_start();
    return 0;
}

static int group_stop(void **state)
{
    caught_stop();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_command_gets_its_own_arguments),
        cmocka_unit_test(the_exit_code_is_that_of_the_status),
        cmocka_unit_test(an_unknown_command_is_a_usage_error_with_a_guess),
        cmocka_unit_test(help_lists_all_commands_or_asks_one),
        cmocka_unit_test(the_version_is_a_number),
        cmocka_unit_test(output_that_cannot_be_written_is_an_error),
    };
    return cmocka_run_group_tests(tests, group_start, group_stop);
}
