/* How a role's program reads its command line and hears signals; the number of cache slots. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "config/role.h"
#include "tests/support/caught.h"

enum { MAX_ARGS = 16 };
static char path[] = "/tmp/test_role_XXXXXX";

static int write_config(void **state)
{
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    assert_non_null(f);
    fprintf(f, "data: {format: synthetic, rows: 100}\n"
               "model: {kind: dlrm, dim: 4, bottom_mlp: [4], top_mlp: [1], tables: [10, 20]}\n"
               "train: {global_batch: 8, iterations: 1, learning_rate: 0.1}\n"
               "run: {dir: /tmp/x}\n");
    return fclose(f);
}

static int remove_config(void **state)
{
    return unlink(path);
}

static struct role_serve serve; /* of the last open_role */

static enum st open_role(const char *const *arg, struct role_args *out)
{
    char *argv[MAX_ARGS + 1] = {(char *)"program"};
    int argc = 1;
    for (; argc <= MAX_ARGS && arg[argc - 1] != NULL; argc++) argv[argc] = (char *)arg[argc - 1];
    serve = (struct role_serve)ROLE_SERVE_DEFAULTS;
    const struct option own[] = {OPTIONS_SERVE(&serve)};
    return role_open(argc, argv, "program", "Does nothing.", own, 2, out);
}

static void a_full_command_line_is_read(void **state)
{
    const char *arg[] = {"--config", path, "--set", "cluster.servers=3", "--job",
                         "00c0FFEE00000001", "--attempt", "16777215", "--rank", "2", "--address",
                         "10.0.0.1:99", "--set", "train.seed=5", NULL};
    struct role_args a;
    assert_int_equal(open_role(arg, &a), ST_OK);
    assert_int_equal(a.config->cluster.servers, 3);
    assert_int_equal(a.config->train.seed, 5);
    assert_true(a.job == UINT64_C(0xc0ffee00000001));
    assert_int_equal(a.attempt, 16777215);
    assert_int_equal(serve.rank, 2);
    assert_string_equal(serve.address, "10.0.0.1:99");
    role_close(&a);
}

static void what_is_not_given_has_a_default(void **state)
{
    const char *arg[] = {"--config", path, "--job", "f", NULL};
    struct role_args a;
    assert_int_equal(open_role(arg, &a), ST_OK);
    assert_true(a.job == 15);
    assert_int_equal(a.attempt, 0);
    assert_int_equal(serve.rank, 0);
    assert_string_equal(serve.address, "127.0.0.1:0");
    role_close(&a);
}

static void what_cannot_be_is_refused(void **state)
{
    const struct { const char *arg[8]; enum st st; const char *why; } bad[] = {
        {{"--job", "1"}, ST_USAGE, "--config is missing"},
        {{"--config", path}, ST_USAGE, "--job is missing"},
        {{"--config", path, "--job", "0x12"}, ST_USAGE, "--job '0x12'"},
        {{"--config", path, "--job", "-1"}, ST_USAGE, "--job"},
        {{"--config", path, "--job", ""}, ST_USAGE, "--job needs a value"},
        {{"--config", path, "--job", "10000000000000000"}, ST_USAGE, "--job '1000"},
        {{"--config", path, "--job", "1", "--attempt", "16777216"}, ST_USAGE, "--attempt"},
        {{"--config", path, "--job", "1", "--rank", "4294967296"}, ST_USAGE, "--rank"},
        {{"--config", path, "--job", "1", "--rnak", "1"}, ST_USAGE, "--rnak"},
        {{"--config", path, "--job", "1", "--set", "train.sede=1"}, ST_CONFIG, "sede"},
        {{"--config", "/nonexistent", "--job", "1"}, ST_NOINPUT, "/nonexistent"},
    };
    size_t live = mem_live();
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct role_args untouched = {.attempt = 77}, a = untouched;
        caught_start();
        enum st st = open_role(bad[i].arg, &a);
        caught_stop();
        assert_int_equal(st, bad[i].st);
        assert_int_equal(caught_lines, 1);
        if (strstr(caught_line, bad[i].why) == NULL)
            fail_msg("'%s' is not in '%s'", bad[i].why, caught_line);
        assert_int_equal(a.attempt, 77);
        assert_int_equal(mem_live(), live);
    }
}

static void a_signal_sent_before_the_wait_is_heard(void **state)
{
    static const int SIGNAL[2] = {SIGTERM, SIGINT};
    role_signals();
    assert_false(role_stopped(0));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kill(getpid(), SIGNAL[i]), 0);
        assert_true(role_stopped(UINT64_C(20) * 1000000000));
        assert_false(role_stopped(1000000));
    }
}

static void cache_rows_are_as_many_as_the_window_or_the_tables_can_need(void **state)
{
    uint64_t tables[3] = {100, 200, 300};
    struct config c = {0};
    c.model.tables = tables;
    c.model.n_tables = 3;
    c.train.global_batch = 8;
    c.oracle.lookahead = 10;
    assert_true(config_cache_rows(&c) == (10 + 2) * 8 * 3);
    c.oracle.lookahead = 100;
    assert_true(config_cache_rows(&c) == 600);
    c.cluster.cache_rows = 42;
    assert_true(config_cache_rows(&c) == 42);
    c.cluster.cache_rows = 0;
    tables[1] = UINT64_MAX - 5; /* sums and products that do not fit */
    c.train.global_batch = UINT32_MAX;
    c.oracle.lookahead = UINT32_MAX;
    assert_true(config_cache_rows(&c) == UINT32_MAX - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_command_line_is_read),
        cmocka_unit_test(what_is_not_given_has_a_default),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(a_signal_sent_before_the_wait_is_heard),
        cmocka_unit_test(cache_rows_are_as_many_as_the_window_or_the_tables_can_need),
    };
    return cmocka_run_group_tests(tests, write_config, remove_config);
}
