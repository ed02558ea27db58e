/* The command line: what is taken, what is refused, and the configuration options. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "config/options.h"
#include "tests/support/caught.h"
#include "tests/support/output.h"

static struct taken { /* where the options of these tests go */
    bool quiet;
    const char *hosts;
    uint64_t batch;
    struct option_list set;
    const char *operand[2];
} t;

static const struct option OPTIONS[] = {
    {.name = "quiet", .help = "say less", .flag = &t.quiet},
    {.name = "hosts", .arg = "FILE", .help = "machines", .text = &t.hosts},
    {.name = "batch", .arg = "N", .help = "samples", .number = &t.batch, .lo = 1, .hi = 1048576},
    {.name = "set", .arg = "KEY=VALUE", .help = "a key", .list = &t.set},
};

enum { MAX_ARGS = 12 };

/* Arguments are one string, split at each '|'. */
static enum st parse_n(size_t min, size_t max, const char *args)
{
    static char buf[1024];
    char *argv[MAX_ARGS + 2] = {"program"};
    int argc = 1;
    snprintf(buf, sizeof(buf), "%s", args);
    for (char *p = args[0] != '\0' ? buf : NULL; p != NULL; argc++) {
        assert_true(argc <= MAX_ARGS);
        argv[argc] = p;
        p = strchr(p, '|');
        if (p != NULL) *p++ = '\0';
    }
    t = (struct taken){.hosts = "none", .batch = 7};
    const struct options o = {.program = "chanter test", .operands = "CONFIG [OTHER]",
                              .help = "Tests.", .option = OPTIONS,
                              .n_options = sizeof(OPTIONS) / sizeof(OPTIONS[0]),
                              .min_operands = min, .max_operands = max, .operand = t.operand};
    caught_reset();
    return options_parse(&o, argc, argv);
}

static void must_take(const char *args)
{
    enum st st = parse_n(0, 2, args);
    if (st != ST_OK) print_error("%s\n", caught_line);
    assert_int_equal(st, ST_OK);
    assert_int_equal(caught_lines, 0);
}

static void what_is_not_given_keeps_its_value(void **state)
{
    must_take("");
    assert_false(t.quiet);
    assert_string_equal(t.hosts, "none");
    assert_int_equal(t.batch, 7);
    assert_int_equal(t.set.n, 0);
    assert_null(t.operand[0]);
}

static void values_follow_or_stand_behind_an_equals_sign(void **state)
{
    must_take("--hosts|a.txt|--batch=1|--quiet");
    assert_true(t.quiet);
    assert_string_equal(t.hosts, "a.txt");
    assert_int_equal(t.batch, 1);
    must_take("--hosts=a=b|--batch|1048576");
    assert_string_equal(t.hosts, "a=b");
    assert_int_equal(t.batch, 1048576);
    must_take("--hosts|-"); /* a dash alone is a value like any other */
    assert_string_equal(t.hosts, "-");
}

static void operands_stand_anywhere_and_after_two_dashes_may_begin_with_them(void **state)
{
    must_take("a.yml|--quiet|b.yml");
    assert_string_equal(t.operand[0], "a.yml");
    assert_string_equal(t.operand[1], "b.yml");
    assert_true(t.quiet);
    must_take("--|--quiet|--");
    assert_string_equal(t.operand[0], "--quiet");
    assert_string_equal(t.operand[1], "--");
    assert_false(t.quiet);
}

static void a_list_collects_in_order(void **state)
{
    must_take("--set|a.b=1|x|--set=c.d=--2|--set|a.b=3");
    assert_int_equal(t.set.n, 3);
    assert_string_equal(t.set.item[0], "a.b=1");
    assert_string_equal(t.set.item[1], "c.d=--2");
    assert_string_equal(t.set.item[2], "a.b=3");
    assert_string_equal(t.operand[0], "x");
}

static void the_same_value_twice_is_no_contradiction(void **state)
{
    must_take("--batch|512|--batch=512|--quiet|--quiet");
    assert_int_equal(t.batch, 512);
}

static void bad_lines_are_usage_errors_that_say_what_is_wrong(void **state)
{
    static const struct { const char *args, *what; } CASES[] = {
        {"--bacth|5", "unknown option --bacth (did you mean --batch?)"},
        {"--bacth=5", "unknown option --bacth (did you mean --batch?)"},
        {"--epochs=3", "--epochs; the key train.epochs is given as --set SECTION.KEY=VALUE"},
        {"--hepl", "unknown option --hepl (did you mean --help?)"},
        {"--zzzzz", "unknown option --zzzzz; see chanter test --help"},
        {"--batc|5", "unknown option --batc"}, /* no abbreviations */
        {"-q", "unknown option -q; options begin with --"},
        {"--=5", "unknown option --"},
        {"--batch", "--batch needs a number"},
        {"--batch=", "--batch needs a number"},
        {"--batch|--quiet", "--batch needs a number"},
        {"--hosts", "--hosts needs a value (--hosts FILE)"},
        {"--set", "--set needs a value (--set KEY=VALUE)"},
        {"--quiet=yes", "--quiet takes no value"},
        {"--batch|512|--batch|1024", "--batch given twice (512, 1024)"},
        {"--hosts|a|--hosts=b", "--hosts given twice (a, b)"},
        {"--batch|0", "--batch '0': want an integer 1..1048576"},
        {"--batch|-5", "--batch '-5': want an integer 1..1048576"},
        {"--batch|1e3", "--batch '1e3': want an integer 1..1048576"},
        {"--batch|99999999999", "--batch '99999999999': want an integer"},
        {"--batch|99999999999999999999999", "want an integer 1..1048576"},
        {"--batch| 5", "--batch ' 5': want an integer"},
        {"--batch|+5", "--batch '+5': want an integer"},
        {"--batch|5 ", "--batch '5 ': want an integer"},
        {"a|b|c", "unexpected 'c'; usage: chanter test [OPTION ...] CONFIG [OTHER]"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        enum st st = parse_n(0, 2, CASES[i].args);
        if (strstr(caught_line, CASES[i].what) == NULL)
            print_error("%s: want \"%s\", got \"%s\"\n", CASES[i].args, CASES[i].what, caught_line);
        assert_int_equal(st, ST_USAGE);
        assert_int_equal(st_exit_code(st), 64);
        assert_int_equal(caught_lines, 1);
        assert_memory_equal(caught_line, "chanter: error[E-USAGE]: ", 25);
        assert_non_null(strstr(caught_line, CASES[i].what));
    }
}

static void too_few_operands_are_a_usage_error(void **state)
{
    assert_int_equal(parse_n(1, 2, "--quiet"), ST_USAGE);
    assert_non_null(strstr(caught_line, "missing operand; usage: chanter test"));
    assert_int_equal(parse_n(1, 2, "a"), ST_OK);
    assert_int_equal(parse_n(0, 0, "a"), ST_USAGE);
}

static void a_list_has_a_limit_that_is_said(void **state)
{
    char *argv[2 * OPTION_LIST_MAX + 3] = {"program"};
    for (int i = 0; i <= OPTION_LIST_MAX; i++) {
        argv[1 + 2 * i] = "--set";
        argv[2 + 2 * i] = "a.b=1";
    }
    const struct options o = {.program = "p", .operands = "", .help = "", .option = OPTIONS,
                              .n_options = sizeof(OPTIONS) / sizeof(OPTIONS[0])};
    t = (struct taken){0};
    caught_reset();
    assert_int_equal(options_parse(&o, 2 * OPTION_LIST_MAX + 1, argv), ST_OK);
    assert_int_equal(t.set.n, OPTION_LIST_MAX);
    t = (struct taken){0};
    assert_int_equal(options_parse(&o, 2 * OPTION_LIST_MAX + 3, argv), ST_USAGE);
    assert_non_null(strstr(caught_line, "--set given more than 128 times"));
}

/* The same with what it prints. */
static enum st parse_into(const char *args, char out[2048])
{
    output_start();
    enum st st = parse_n(1, 2, args);
    output_stop(out, 2048);
    return st;
}

static void help_names_every_option_and_asks_for_nothing(void **state)
{
    static const char *const CASES[] = {"--help", "-h", "a|--quiet|--help|--nonsense"};
    char out[2048];
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(parse_into(CASES[i], out), ST_END);
        assert_int_equal(caught_lines, 0);
        assert_memory_equal(out, "usage: chanter test [OPTION ...] CONFIG [OTHER]\n\nTests.\n", 56);
        for (size_t k = 0; k < sizeof(OPTIONS) / sizeof(OPTIONS[0]); k++) {
            char want[64];
            snprintf(want, sizeof(want), "  --%s", OPTIONS[k].name);
            assert_non_null(strstr(out, want));
            assert_non_null(strstr(out, OPTIONS[k].help));
        }
        assert_non_null(strstr(out, "--hosts FILE "));
        assert_non_null(strstr(out, "  --help "));
    }
}

/* --- configuration options ------------------------------------------------------------------ */

static enum st open_with(const char *args, struct config **c)
{
    static struct config_args a;
    static char buf[256];
    char *argv[8] = {"program"};
    int argc = 1;
    const char *operand[1] = {NULL};
    a = (struct config_args){0};
    const struct option options[] = {OPTIONS_CONFIG(&a)};
    const struct options o = {.program = "p", .operands = "CONFIG", .help = "", .option = options,
                              .n_options = 2, .max_operands = 1, .min_operands = 1,
                              .operand = operand};
    snprintf(buf, sizeof(buf), "%s", args);
    for (char *p = strtok(buf, "|"); p != NULL; p = strtok(NULL, "|")) argv[argc++] = p;
    caught_reset();
    enum st st = options_parse(&o, argc, argv);
    return st != ST_OK ? st : config_args_open(&a, operand[0], c);
}

static void run_dir_wins_over_set_and_over_the_file(void **state)
{
    static const struct { const char *args, *dir; } CASES[] = {
        {"examples/train.yaml", "runs/train"},
        {"examples/train.yaml|--set|run.dir=b", "b"},
        {"--run-dir|c: #d|examples/train.yaml|--set|run.dir=b", "c: #d"},
    };
    for (size_t i = 0; i < 3; i++) {
        struct config *c = NULL;
        size_t live = mem_live();
        assert_int_equal(open_with(CASES[i].args, &c), ST_OK);
        assert_string_equal(c->run.dir, CASES[i].dir);
        config_close(c);
        assert_int_equal(mem_live(), live);
    }
}

static void a_run_dir_that_is_given_twice_is_refused(void **state)
{
    struct config *c = NULL;
    assert_int_equal(open_with("examples/train.yaml|--run-dir|a|--run-dir|b", &c), ST_USAGE);
    assert_non_null(strstr(caught_line, "--run-dir given twice (a, b)"));
    assert_null(c);
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
        cmocka_unit_test(what_is_not_given_keeps_its_value),
        cmocka_unit_test(values_follow_or_stand_behind_an_equals_sign),
        cmocka_unit_test(operands_stand_anywhere_and_after_two_dashes_may_begin_with_them),
        cmocka_unit_test(a_list_collects_in_order),
        cmocka_unit_test(the_same_value_twice_is_no_contradiction),
        cmocka_unit_test(bad_lines_are_usage_errors_that_say_what_is_wrong),
        cmocka_unit_test(too_few_operands_are_a_usage_error),
        cmocka_unit_test(a_list_has_a_limit_that_is_said),
        cmocka_unit_test(help_names_every_option_and_asks_for_nothing),
        cmocka_unit_test(run_dir_wins_over_set_and_over_the_file),
        cmocka_unit_test(a_run_dir_that_is_given_twice_is_refused),
    };
    return cmocka_run_group_tests(tests, group_start, group_stop);
}
