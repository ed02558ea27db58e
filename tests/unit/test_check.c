/* Preflight: sizes against hand counts, each check on a machine of its own, and all together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/tree.h"
#include "launch/check.h"
#include "launch/sizes.h"
#include "tests/support/caught.h"
#include "tests/support/output.h"

static char dir[64];
static char out[4096]; /* printed by the last call */

static int group_start(void **state)
{
    snprintf(dir, sizeof(dir), "/tmp/test_check.XXXXXX");
    if (mkdtemp(dir) == NULL) return -1;
    caught_start();
    return 0;
}

static int group_stop(void **state)
{
    caught_stop();
    return rmdir(dir);
}

#define PRINTED(call) (caught_reset(), output_start(), printed(call))
static enum st printed(enum st st)
{
    output_stop(out, sizeof(out));
    return st;
}

/* Two tables, small numbers: everything below can be counted by hand. */
static struct config small(void)
{
    static uint32_t bottom[] = {4}, top[] = {3, 1};
    static uint64_t tables[] = {100, 1000};
    struct config c = {.data = {.format = DATA_SYNTHETIC, .rows = 1000000, .seed = 1},
                       .train = {.global_batch = 16, .slices = 4, .epochs = 1},
                       .oracle = {.lookahead = 8},
                       .cluster = {.trainers = 1, .servers = 1, .cache_rows = 50},
                       .run = {.dir = dir}};
    c.model.dense_features = 5, c.model.dim = 4;
    c.model.bottom_mlp = bottom, c.model.n_bottom_mlp = 1;
    c.model.top_mlp = top, c.model.n_top_mlp = 2;
    c.model.tables = tables, c.model.n_tables = 2;
    return c;
}

static void sizes_are_what_a_hand_counts(void **state)
{
    struct config c = small();
    struct sizes s = sizes_of(&c);
    /* bottom (5 + 1) * 4; interaction 4 + 3 pairs; top (7 + 1) * 3 + (3 + 1) * 1 */
    const uint64_t dense = 24 + 24 + 4;
    assert_int_equal(s.rows, 1100);
    assert_int_equal(s.server_bytes, 1100 * (16 + 8));
    assert_int_equal(s.trainer_bytes, 50 * 16 + dense * 4 * (3 + 4));
    assert_int_equal(s.oracle_bytes, 10 * 16 * (2 * 8 + 6 * 4));
    assert_int_equal(s.total_bytes, s.server_bytes + s.trainer_bytes + s.oracle_bytes);
    assert_int_equal(s.shm_bytes, 0);
}

static void sizes_follow_optimizer_processes_and_length(void **state)
{
    struct config c = small();
    c.cluster.servers = 3;
    c.train.optimizer = OPT_ADAGRAD;
    assert_int_equal(sizes_of(&c).server_bytes, 367 * (32 + 8)); /* 1100 / 3, rounded up */
    c.train.optimizer = OPT_ROWWISE_ADAGRAD;
    assert_int_equal(sizes_of(&c).server_bytes, 367 * (20 + 8));
    c.train.iterations = 2; /* 2 * 16 samples touch 64 rows at most */
    assert_int_equal(sizes_of(&c).rows, 64);
    c.data.train_rows = 10;
    assert_int_equal(sizes_of(&c).rows, 20);
    c.data.format = DATA_CRITEO_TSV, c.data.train_rows = 0, c.train.iterations = 0;
    assert_int_equal(sizes_of(&c).rows, 1100); /* the length of a file is not known */
    c.cluster.trainers = 2;
    c.cluster.transport = TRANSPORT_GRPC;
    assert_int_equal(sizes_of(&c).shm_bytes, 8 << 20);
}

static void sizes_that_overflow_stay_at_the_top(void **state)
{
    struct config c = small();
    uint64_t *tables = malloc(65536 * sizeof(*tables));
    assert_non_null(tables);
    for (int i = 0; i < 65536; i++) tables[i] = (UINT64_C(1) << 48) - 1;
    c.model.tables = tables, c.model.n_tables = 65536, c.model.dim = 4096;
    c.data.rows = UINT64_MAX;
    struct sizes s = sizes_of(&c);
    assert_true(s.server_bytes == UINT64_MAX);
    assert_true(s.total_bytes == UINT64_MAX);
    assert_int_equal(PRINTED(check_memory(&c, UINT64_MAX - 1)), ST_CONFIG);
    free(tables);
}

/* Sort nothing, count the slow way. */
static uint64_t slow_working_set(const struct config *c, const struct samples *b)
{
    uint64_t most = 0;
    uint32_t F = c->model.n_tables, slice = c->train.global_batch / c->train.slices;
    for (uint32_t t = 0; t < c->cluster.trainers; t++) {
        uint64_t n = 0;
        uint32_t lo = slice * tree_run_start(t, c->cluster.trainers, c->train.slices) * F;
        uint32_t hi = slice * tree_run_start(t + 1, c->cluster.trainers, c->train.slices) * F;
        for (uint32_t i = lo; i < hi && i < b->n * F; i++) {
            uint32_t j = lo;
            while (b->id[j] != b->id[i]) j++;
            n += j == i;
        }
        if (n > most) most = n;
    }
    return most;
}

static void working_set_is_that_of_the_trainer_with_the_most_rows(void **state)
{
    struct config c = small();
    c.train.global_batch = 96, c.train.slices = 6;
    struct samples b;
    assert_int_equal(samples_open(96, 5, 2, &b), ST_OK);
    for (uint32_t N = 1; N <= 6; N++) {
        for (uint32_t n = 0; n <= 96; n += 13) {
            for (uint32_t i = 0; i < 2 * 96; i++) {
                uint32_t w[4];
                rng_words(N, n, i, 0, w);
                b.id[i] = w[0] % 70;
            }
            b.n = n;
            c.cluster.trainers = N;
            uint64_t want = slow_working_set(&c, &b);
            assert_int_equal(sizes_working_set(&c, &b), want);
        }
    }
    samples_close(&b);
}

static void memory_is_compared_with_what_the_host_has(void **state)
{
    struct config c = small();
    uint64_t need = sizes_of(&c).total_bytes;
    assert_int_equal(PRINTED(check_memory(&c, need)), ST_OK);
    assert_memory_equal(out, "memory    ok: ", 14);
    assert_int_equal(PRINTED(check_memory(&c, need - 1)), ST_CONFIG);
    assert_string_equal(out, "");
    assert_int_equal(caught_lines, 1);

    static uint64_t tables[] = {UINT64_C(1) << 33};
    c.model.tables = tables, c.model.n_tables = 1, c.data.rows = UINT64_C(1) << 40;
    assert_int_equal(PRINTED(check_memory(&c, UINT64_C(128) << 30)), ST_CONFIG);
    assert_non_null(
        strstr(caught_line, "memory: needs 193 GiB, host has 128 GiB (each server 192 GiB"));
}

static void files_and_shared_memory_are_compared_with_their_limits(void **state)
{
    struct config c = small();
    c.cluster.trainers = 4;
    assert_int_equal(PRINTED(check_shm(&c, "/shm", 0)), ST_OK); /* threads need none */
    assert_string_equal(out, "");
    c.cluster.transport = TRANSPORT_GRPC;
    uint64_t need = sizes_of(&c).files;
    assert_true(need > 64);
    assert_int_equal(PRINTED(check_files(&c, need)), ST_OK);
    assert_int_equal(PRINTED(check_files(&c, 64)), ST_CONFIG);
    char want[64];
    snprintf(want, sizeof(want), "needs %d files, limit 64", (int)need);
    assert_non_null(strstr(caught_line, want));
    assert_int_equal(PRINTED(check_shm(&c, "/shm", 16 << 20)), ST_OK);
    assert_int_equal(PRINTED(check_shm(&c, "/shm", 2 << 20)), ST_CONFIG);
    assert_non_null(strstr(caught_line, "/shm: need 16 MiB, free 2 MiB"));
}

static void mpirun_is_looked_for_as_a_shell_would(void **state)
{
    struct config c = small();
    char file[96], path[256];
    snprintf(file, sizeof(file), "%s/mpirun", dir);
    snprintf(path, sizeof(path), "/nowhere::%s:/nowhere", dir);
    assert_int_equal(PRINTED(check_mpirun(&c, NULL)), ST_OK); /* threads need none */
    c.cluster.transport = TRANSPORT_GRPC;
    assert_int_equal(PRINTED(check_mpirun(&c, NULL)), ST_NOINPUT);
    assert_int_equal(PRINTED(check_mpirun(&c, path)), ST_NOINPUT);
    assert_int_equal(mkdir(file, 0700), 0); /* a folder of that name is no program */
    assert_int_equal(PRINTED(check_mpirun(&c, path)), ST_NOINPUT);
    assert_int_equal(rmdir(file), 0);
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(chmod(file, 0600), 0);
    assert_int_equal(PRINTED(check_mpirun(&c, path)), ST_NOINPUT);
    assert_int_equal(chmod(file, 0700), 0);
    assert_int_equal(PRINTED(check_mpirun(&c, path)), ST_OK);
    assert_non_null(strstr(out, file));
    unlink(file);
}

static void a_run_directory_is_there_or_can_be_made(void **state)
{
    struct config c = small();
    char path[128], file[96];
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_OK);
    assert_non_null(strstr(out, "is there"));
    snprintf(path, sizeof(path), "%s/a/b//c/", dir);
    c.run.dir = path;
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_OK);
    assert_non_null(strstr(out, "can be made"));
    snprintf(path, sizeof(path), "%s/a", dir);
    assert_int_equal(access(path, F_OK), -1); /* nothing was made */
    c.run.dir = "no-such-directory";
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_OK);

    snprintf(file, sizeof(file), "%s/file", dir);
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fclose(f);
    c.run.dir = file;
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_CANTCREATE);
    assert_non_null(strstr(caught_line, "is not a directory"));
    snprintf(path, sizeof(path), "%s/below", file);
    c.run.dir = path;
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_CANTCREATE);
    assert_int_equal(st_exit_code(ST_CANTCREATE), 73);
    unlink(file);
    c.run.dir = "/proc/x"; /* where even root makes nothing */
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_CANTCREATE);
    assert_non_null(strstr(caught_line, "/proc/x: cannot make a directory in /proc: "));
    if (geteuid() == 0) return; /* root may write anywhere */
    c.run.dir = "/x";
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_CANTCREATE);
}

static void a_run_that_would_be_in_the_way_is_mentioned(void **state)
{
    struct config c = small();
    char file[96];
    snprintf(file, sizeof(file), "%s/metrics.jsonl", dir);
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_OK);
    assert_non_null(strstr(out, "holds a run already; --overwrite will be needed"));
    assert_int_equal(unlink(file), 0);
    assert_int_equal(PRINTED(check_run_dir(&c)), ST_OK);
    assert_null(strstr(out, "overwrite"));
}

static void the_weights_have_to_fit_on_the_disk(void **state)
{
    struct config c = small();
    const uint64_t dense = 24 + 24 + 4;
    assert_int_equal(sizes_of(&c).disk_bytes, 0);
    assert_int_equal(PRINTED(check_disk(&c, 0)), ST_OK); /* nothing is saved */
    assert_string_equal(out, "");
    c.run.save_final = true;
    assert_int_equal(sizes_of(&c).disk_bytes, 4 * (1100 * 4 + dense));
    c.train.optimizer = OPT_ADAGRAD;
    assert_int_equal(sizes_of(&c).disk_bytes, 4 * (1100 * 8 + 2 * dense));
    c.train.optimizer = OPT_ROWWISE_ADAGRAD;
    assert_int_equal(sizes_of(&c).disk_bytes, 4 * (1100 * 5 + 2 * dense));
    c.run.save_initial = true;
    uint64_t need = sizes_of(&c).disk_bytes;
    assert_int_equal(need, 4 * (1100 * 9 + 3 * dense));
    assert_int_equal(PRINTED(check_disk(&c, need)), ST_OK);
    assert_memory_equal(out, "disk      ok: 40 KiB ", 21);
    assert_int_equal(PRINTED(check_disk(&c, need - 1)), ST_CANTCREATE);
    assert_non_null(strstr(caught_line, "run.dir: the weights need 40 KiB, free "));
}

/* --- the command ---------------------------------------------------------------------------- */

static enum st check(const char *a, const char *b, const char *c)
{
    char buf[4][128], *argv[5] = {"check"};
    const char *args[] = {a, b, c, dir};
    int argc = 1;
    for (int i = 0; i < 3 && args[i] != NULL; i++, argc++) {
        snprintf(buf[i], sizeof(buf[i]), "%s", args[i]);
        argv[argc] = buf[i];
    }
    return PRINTED(check_main(argc, argv));
}

static void the_bundled_examples_pass(void **state)
{
    char run_dir[96];
    snprintf(run_dir, sizeof(run_dir), "--run-dir=%s", dir);
    size_t live = mem_live();
    assert_int_equal(check("examples/train.yaml", run_dir, NULL), ST_OK);
    assert_int_equal(caught_lines, 0);
    static const char *const LINES[] = {"config    ok:", "data      ok:", "held-out  ok:",
                                        "cache     ok:", "memory    ok:", "run dir   ok:",
                                        "files     ok:"};
    for (size_t i = 0; i < sizeof(LINES) / sizeof(LINES[0]); i++)
        assert_non_null(strstr(out, LINES[i]));
    assert_int_equal(mem_live(), live);
}

static void a_cache_below_one_batch_is_found_in_the_data(void **state)
{
    assert_int_equal(check("examples/train.yaml", "--set=cluster.cache_rows=100", NULL), ST_CONFIG);
    assert_non_null(strstr(caught_line, "cluster.cache_rows: cache 100 rows < batch working set "));
    assert_non_null(strstr(out, "run dir   ok:")); /* the other checks ran all the same */
    assert_int_equal(check("examples/train.yaml", "--set=cluster.cache_rows=800", NULL), ST_OK);
    assert_non_null(strstr(out, "cache     close: 800 rows for each trainer; a batch needs up to "
                                "749 so far"));
    assert_int_equal(check("examples/train.yaml", "--set=cluster.cache_rows=900", NULL), ST_OK);
    assert_non_null(strstr(out, "cache     ok so far: 900 rows"));
}

static void the_first_failure_is_the_exit_status_and_all_are_said(void **state)
{
    assert_int_equal(check("examples/train.yaml", "--set=data.path=/no/data",
                           "--run-dir=examples/train.yaml/x"), ST_NOINPUT);
    assert_int_equal(caught_lines, 2);
    assert_non_null(strstr(caught_line, "examples/train.yaml/x: cannot be created"));
    assert_non_null(strstr(out, "memory    ok:"));
}

static void a_wrong_configuration_ends_the_check(void **state)
{
    assert_int_equal(check("examples/train.yaml", "--set=train.slices=7", NULL), ST_CONFIG);
    assert_int_equal(caught_lines, 1);
    assert_string_equal(out, "");
    assert_int_equal(check("/no/such.yaml", NULL, NULL), ST_NOINPUT);
    assert_int_equal(check("a.yaml", "b.yaml", NULL), ST_USAGE);
    assert_int_equal(check(NULL, NULL, NULL), ST_USAGE);
    assert_int_equal(check("--help", NULL, NULL), ST_END);
    assert_non_null(strstr(out, "usage: chanter check [OPTION ...] CONFIG"));
    assert_int_equal(check("x", "--setr", NULL), ST_USAGE);
    assert_non_null(strstr(caught_line, "unknown option --setr (did you mean --set?)"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_what_a_hand_counts),
        cmocka_unit_test(sizes_follow_optimizer_processes_and_length),
        cmocka_unit_test(sizes_that_overflow_stay_at_the_top),
        cmocka_unit_test(working_set_is_that_of_the_trainer_with_the_most_rows),
        cmocka_unit_test(memory_is_compared_with_what_the_host_has),
        cmocka_unit_test(files_and_shared_memory_are_compared_with_their_limits),
        cmocka_unit_test(mpirun_is_looked_for_as_a_shell_would),
        cmocka_unit_test(a_run_directory_is_there_or_can_be_made),
        cmocka_unit_test(a_run_that_would_be_in_the_way_is_mentioned),
        cmocka_unit_test(the_weights_have_to_fit_on_the_disk),
        cmocka_unit_test(the_bundled_examples_pass),
        cmocka_unit_test(a_cache_below_one_batch_is_found_in_the_data),
        cmocka_unit_test(the_first_failure_is_the_exit_status_and_all_are_said),
        cmocka_unit_test(a_wrong_configuration_ends_the_check),
    };
    return cmocka_run_group_tests(tests, group_start, group_stop);
}
