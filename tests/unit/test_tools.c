/* The commands around training, called as main() calls them: what they print, write and refuse. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "data/prepared.h"
#include "data/synthetic.h"
#include "launch/rundir.h"
#include "launch/tools.h"
#include "tests/support/caught.h"
#include "tests/support/output.h"
#include "tests/support/tiny_run.h"

enum { DATA_ROWS = 60 }; /* of them 20 to train on */

static struct tiny_run tiny;
static char said[8192];           /* what the last command printed */
static char out[128];             /* a file for commands to write  */
static size_t live_before;        /* allocations of a failed test do not fail the next */

static int open_run(void **state)
{
    live_before = mem_live();
    tiny_run_open(&tiny, OPT_ADAGRAD);
    snprintf(out, sizeof(out), "%s/out", tiny.dir);
    caught_start();
    return synth_write_tsv(tiny.config, tiny.data, DATA_ROWS) == ST_OK ? 0 : -1;
}

static int close_run(void **state)
{
    caught_stop();
    unlink(out);
    tiny_run_close(&tiny);
    return mem_live() == live_before ? 0 : -1;
}

typedef enum st command_fn(int argc, char **argv);

/* Run a command with up to four arguments, the rest NULL. */
static enum st command(command_fn *run, const char *a, const char *b, const char *c, const char *d)
{
    char name[] = "command", word[4][256], *argv[6] = {name};
    const char *given[] = {a, b, c, d};
    int argc = 1;
    for (int i = 0; i < 4 && given[i] != NULL; i++) {
        snprintf(word[i], sizeof(word[i]), "%s", given[i]);
        argv[argc++] = word[i];
    }
    caught_reset();
    output_start();
    enum st st = run(argc, argv);
    output_stop(said, sizeof(said));
    return st;
}

static void assert_has(const char *text, const char *fragment)
{
    if (strstr(text, fragment) == NULL) fail_msg("'%s' is not in: %s", fragment, text);
}

/* It failed with one line, and printed no result. */
static void assert_failed(enum st got, enum st want, const char *fragment)
{
    assert_int_equal(got, want);
    assert_int_equal(caught_lines, 1);
    assert_has(caught_line, fragment);
    assert_null(strstr(said, "{\""));
}

/* --- eval ------------------------------------------------------------------------------------- */

static void eval_prints_one_line_for_the_held_out_rows(void **state)
{
    assert_int_equal(command(eval_main, tiny.run, NULL, NULL, NULL), ST_OK);
    assert_has(said, "{\"rows\":40,\"loss\":");
    assert_ptr_equal(strchr(said, '\n'), said + strlen(said) - 1);
}

static void eval_scores_all_rows_of_a_given_file_of_either_format(void **state)
{
    char from_text[sizeof(said)];
    assert_int_equal(command(eval_main, tiny.run, "--data", tiny.data, NULL), ST_OK);
    assert_has(said, "{\"rows\":60,\"loss\":");
    strcpy(from_text, said);
    uint64_t rows;
    assert_int_equal(prepare_write(tiny.config, out, NULL, NULL, &rows), ST_OK);
    assert_int_equal(command(eval_main, tiny.run, "--data", out, NULL), ST_OK);
    assert_string_equal(said, from_text);
}

static void eval_says_what_is_not_there(void **state)
{
    assert_failed(command(eval_main, tiny.run, "--data", "/nowhere.tsv", NULL), ST_NOINPUT,
                  "/nowhere.tsv");
    assert_failed(command(eval_main, tiny.dir, NULL, NULL, NULL), ST_NOINPUT, "config.yaml");
    assert_failed(command(eval_main, NULL, NULL, NULL, NULL), ST_USAGE, "RUN_DIR");
}

/* --- digest ----------------------------------------------------------------------------------- */

static void digest_prints_the_digest_alone(void **state)
{
    struct rundir *r;
    struct digest d;
    char hex[DIGEST_HEX_BYTES], want[DIGEST_HEX_BYTES + 1];
    assert_int_equal(rundir_open(tiny.run, NULL, 0, RUNDIR_STATE, &r), ST_OK);
    assert_int_equal(rundir_digest(r, NULL, NULL, &d), ST_OK);
    rundir_close(r);
    digest_hex(d, hex);
    snprintf(want, sizeof(want), "%s\n", hex);
    assert_int_equal(command(digest_main, tiny.run, NULL, NULL, NULL), ST_OK);
    assert_string_equal(said, want);
}

static void digest_without_the_state_is_an_error(void **state)
{
    assert_int_equal(unlink(tiny_run_path(&tiny, "final.state.safetensors")), 0);
    assert_failed(command(digest_main, tiny.run, NULL, NULL, NULL), ST_NOINPUT,
                  "final.state.safetensors");
}

/* --- export ----------------------------------------------------------------------------------- */

static void assert_tensor_like(const struct safetensors *s, const struct st_tensor *want)
{
    const struct st_tensor *t = safetensors_find(s, want->name);
    assert_non_null(t);
    assert_int_equal(t->rows, want->rows);
    assert_int_equal(t->cols, want->cols);
    size_t n = (size_t)(t->rows * (t->cols == 0 ? 1 : t->cols));
    assert_memory_equal(t->data, want->data, n * sizeof(float));
}

/* `out` holds all tensors of the run's weights, and its state if `state`, and no others. */
static void assert_exported(int state)
{
    struct rundir *r;
    struct safetensors *s;
    assert_int_equal(rundir_open(tiny.run, NULL, 0, RUNDIR_STATE, &r), ST_OK);
    assert_int_equal(safetensors_open(out, &s), ST_OK);
    size_t n = safetensors_count(r->weights);
    assert_int_equal(safetensors_count(s), state ? 2 * n : n);
    for (size_t i = 0; i < n; i++) {
        assert_tensor_like(s, safetensors_at(r->weights, i));
        if (state) assert_tensor_like(s, safetensors_at(r->state, i));
    }
    safetensors_close(s);
    rundir_close(r);
}

static void export_copies_every_tensor(void **state)
{
    assert_int_equal(command(export_main, tiny.run, out, NULL, NULL), ST_OK);
    assert_has(said, "{\"tensors\":11,\"values\":");
    assert_exported(0);
    assert_int_equal(command(export_main, tiny.run, out, "--state", "--force"), ST_OK);
    assert_has(said, "{\"tensors\":22,\"values\":");
    assert_exported(1);
}

static void export_replaces_nothing_unless_forced(void **state)
{
    FILE *f = fopen(out, "w");
    assert_non_null(f);
    fclose(f);
    assert_failed(command(export_main, tiny.run, out, NULL, NULL), ST_CANTCREATE, "--force");
    assert_int_equal(command(export_main, tiny.run, out, "--force", NULL), ST_OK);
    assert_exported(0);
}

static void export_never_writes_over_the_run(void **state)
{
    char file[256];
    snprintf(file, sizeof(file), "%s", tiny_run_path(&tiny, "final.state.safetensors"));
    assert_failed(command(export_main, tiny.run, file, "--force", NULL), ST_USAGE,
                  "is the file to read from");
}

static void export_stops_at_a_value_that_is_no_number(void **state)
{
    uint32_t inf = 0x7f800000;
    memcpy(&tiny.table[1][3 * 8 + 2], &inf, sizeof(inf)); /* row 3, column 2 of table 1 */
    tiny_run_weights(&tiny, 0, (struct tiny_fault){0});
    assert_failed(command(export_main, tiny.run, out, NULL, NULL), ST_DATA,
                  "tensor emb_l.1.weight: value 14 is not finite");
    assert_int_equal(access(out, F_OK), -1);
}

static void export_of_state_that_there_is_none_of_is_an_error(void **state)
{
    caught_stop();
    tiny_run_close(&tiny);
    tiny_run_open(&tiny, OPT_SGD);
    caught_start();
    snprintf(out, sizeof(out), "%s/out", tiny.dir);
    assert_failed(command(export_main, tiny.run, out, "--state", NULL), ST_USAGE, "sgd");
}

/* --- inspect ---------------------------------------------------------------------------------- */

static const char METRICS[] =
    "{\"event\":\"train\",\"iteration\":0,\"loss\":0.7,\"samples\":12,\"wait_s\":0}\n"
    "{\"event\":\"eval\",\"iteration\":1,\"rows\":40,\"loss\":0.6,\"auc\":null}\n"
    "{\"event\":\"train\",\"iteration\":1,\"loss\":0.5,\"samples\":12,\"wait_s\":0}\n"
    "{\"event\":\"end\",\"iterations\":2,\"samples_per_s\":100.0,\"loss\":0.5,\"seconds\":1.000,"
    "\"exposed_wait_s\":0.1,\"bytes\":{},\"digest\":\"00112233445566778899aabbccddeeff\"}\n";

static void inspect_tells_what_a_run_is(void **state)
{
    tiny_run_text(&tiny, "metrics.jsonl", METRICS);
    assert_int_equal(command(inspect_main, tiny.run, NULL, NULL, NULL), ST_OK);
    assert_has(said, "dlrm, 3 tables of 50 rows in all, dim 4, bottom 5-4, top 6-1");
    assert_has(said, "iterations 2: loss 0.70000 at first, 0.50000 at last");
    assert_has(said, "the last: 40 rows, loss 0.60000, AUC none");
    assert_has(said, "digest     00112233445566778899aabbccddeeff");
    assert_has(said, "weights    11 tensors after 12 iterations");
    assert_has(said, "state      11 tensors");
}

static void inspect_of_a_run_that_has_not_ended_says_so(void **state)
{
    tiny_run_text(&tiny, "metrics.jsonl", "");
    unlink(tiny_run_path(&tiny, "final.safetensors"));
    assert_int_equal(command(inspect_main, tiny.run, NULL, NULL, NULL), ST_OK);
    assert_has(said, "iterations 0\n");
    assert_has(said, "ended      no");
    assert_has(said, "weights    none");
}

static void inspect_of_a_run_that_lost_its_state_is_an_error(void **state)
{
    tiny_run_text(&tiny, "metrics.jsonl", METRICS);
    assert_int_equal(command(inspect_main, tiny.run, NULL, NULL, NULL), ST_OK);
    assert_has(said, "evaluated  1 time; the last");
    assert_int_equal(unlink(tiny_run_path(&tiny, "final.state.safetensors")), 0);
    assert_failed(command(inspect_main, tiny.run, NULL, NULL, NULL), ST_NOINPUT,
                  "final.state.safetensors");
}

static void inspect_finds_damage_in_each_kind_of_file(void **state)
{
    char path[256];
    uint64_t rows;
    tiny_run_text(&tiny, "metrics.jsonl", METRICS);
    tiny_run_cut(&tiny, "metrics.jsonl", 100);
    snprintf(path, sizeof(path), "%s", tiny_run_path(&tiny, "metrics.jsonl"));
    assert_failed(command(inspect_main, path, NULL, NULL, NULL), ST_DATA, "metrics.jsonl:2: ");
    assert_failed(command(inspect_main, tiny.run, NULL, NULL, NULL), ST_DATA, "metrics.jsonl:2: ");

    tiny_run_cut(&tiny, "final.safetensors", 1500);
    snprintf(path, sizeof(path), "%s", tiny_run_path(&tiny, "final.safetensors"));
    assert_failed(command(inspect_main, path, NULL, NULL, NULL), ST_DATA, "final.safetensors");

    assert_int_equal(prepare_write(tiny.config, out, NULL, NULL, &rows), ST_OK);
    assert_int_equal(command(inspect_main, out, NULL, NULL, NULL), ST_OK);
    assert_has(said, "rows       60 in blocks of");
    assert_has(said, "label, 3 dense values, 3 ids");
    FILE *f = fopen(out, "r+");
    assert_non_null(f);
    assert_int_equal(fseek(f, 200, SEEK_SET), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, 200, SEEK_SET), 0);
    fputc(c ^ 1, f);
    fclose(f);
    assert_failed(command(inspect_main, out, NULL, NULL, NULL), ST_DATA, "out");

    assert_failed(command(inspect_main, tiny.data, NULL, NULL, NULL), ST_DATA,
                  "data.tsv: is no run directory, .safetensors, .chp or metrics.jsonl; `chanter "
                  "check CONFIG` looks at a configuration and its data");
}

static void inspect_lists_tensors_and_counts_what_is_no_number(void **state)
{
    char path[256];
    snprintf(path, sizeof(path), "%s", tiny_run_path(&tiny, "final.safetensors"));
    assert_int_equal(command(inspect_main, path, NULL, NULL, NULL), ST_OK);
    assert_has(said, "emb_l.1.weight               40 x 4");
    assert_has(said, "bot_l.0.bias                 5 ");
    uint32_t nan = 0x7fc00000;
    memcpy(&tiny.table[2][0], &nan, sizeof(nan));
    tiny_run_weights(&tiny, 0, (struct tiny_fault){0});
    assert_failed(command(inspect_main, path, NULL, NULL, NULL), ST_DATA,
                  "1 value is not finite");
    assert_has(said, "1 not finite");
}

/* --- synth and prepare ------------------------------------------------------------------------ */

static void synth_writes_the_rows_it_reports_whatever_config_trains_on(void **state)
{
    char config[256], set[300], line[256];
    int lines = 0;
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    snprintf(set, sizeof(set), "--out=%s", out);
    assert_int_equal(command(synth_main, config, set, "--rows", "15"), ST_OK);
    assert_failed(command(synth_main, config, set, "--rows=500", NULL), ST_CANTCREATE, "--force");
    assert_int_equal(command(synth_main, config, set, "--rows=500", "--force"), ST_OK);
    assert_has(said, "{\"rows\":500,\"best_logloss\":0.");
    assert_has(said, "\"best_auc\":0.");
    FILE *f = fopen(out, "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) != NULL) lines++;
    fclose(f);
    assert_int_equal(lines, 500);
}

static void synth_and_prepare_need_to_know_where_to_write(void **state)
{
    char config[256], data[300];
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    snprintf(data, sizeof(data), "--out=%s", tiny.data);
    assert_failed(command(synth_main, config, "--rows=5", NULL, NULL), ST_USAGE, "--out");
    assert_failed(command(prepare_main, config, NULL, NULL, NULL), ST_USAGE, "--out");
    assert_failed(command(prepare_main, config, data, "--force", NULL), ST_USAGE,
                  "is the file to read from");
}

/* What --out names stays what it was, whatever it is, even with --force. */
static void nothing_but_a_regular_file_is_replaced(void **state)
{
    char config[256], set[300], link_to[300];
    struct stat before, after;
    command_fn *make[] = {synth_main, prepare_main};
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    snprintf(set, sizeof(set), "--out=%s", out);
    snprintf(link_to, sizeof(link_to), "%s/elsewhere", tiny.dir);
    for (int kind = 0; kind < 3; kind++) {
        if (kind == 0) assert_int_equal(mkfifo(out, 0600), 0);
        if (kind == 1) assert_int_equal(symlink(link_to, out), 0);
        if (kind == 2) assert_int_equal(mkdir(out, 0700), 0);
        assert_int_equal(lstat(out, &before), 0);
        for (size_t i = 0; i < 2; i++)
            assert_failed(command(make[i], config, set, i == 0 ? "--set=data.rows=9" : "--force",
                                  "--force"), ST_CANTCREATE, out);
        assert_failed(command(export_main, tiny.run, out, "--force", NULL), ST_CANTCREATE, out);
        assert_int_equal(lstat(out, &after), 0);
        assert_int_equal(after.st_mode, before.st_mode);
        assert_int_equal(after.st_ino, before.st_ino);
        assert_int_equal(remove(out), 0);
    }
}

static void what_is_read_is_never_replaced(void **state)
{
    char config[256], set[300];
    command_fn *make[] = {synth_main, prepare_main};
    const char *input[] = {config, tiny.data};
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    for (size_t i = 0; i < 4; i++) {
        snprintf(set, sizeof(set), "--out=%s", input[i / 2]);
        assert_failed(command(make[i % 2], config, set, i % 2 == 0 ? "--rows=5" : "--force",
                              "--force"), ST_USAGE, "is the file to read from");
    }
    snprintf(set, sizeof(set), "--out=%s/no/where", tiny.dir);
    assert_failed(command(synth_main, config, set, "--rows=5", NULL), ST_CANTCREATE,
                  "/no/where: cannot create: ");
    assert_failed(command(prepare_main, config, set, NULL, NULL), ST_CANTCREATE,
                  "/no/where: cannot create: ");
}

static void synth_and_prepare_need_no_run_directory(void **state)
{
    char config[256], text[1024], set[300];
    command_fn *make[] = {synth_main, prepare_main};
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    FILE *f = fopen(config, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    fclose(f);
    char *run = strstr(text, "run: {");
    assert_non_null(run);
    *run = '\0';
    tiny_run_text(&tiny, "config.yaml", text);
    snprintf(set, sizeof(set), "--out=%s", out);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(command(make[i], config, set, "--force", i == 0 ? "--rows=5" : NULL),
                         ST_OK);
        assert_int_equal(command(make[i], "--help", NULL, NULL, NULL), ST_END);
        assert_has(said, i == 0 ? "[OPTION ...] CONFIG --out FILE.tsv\n"
                                : "[OPTION ...] CONFIG --out FILE.chp\n");
        assert_has(said, "--set SECTION.KEY=VALUE");
    }
}

static void prepare_writes_a_file_that_verifies(void **state)
{
    char config[256], set[300], want[64];
    uint64_t rows = 0;
    snprintf(config, sizeof(config), "%s", tiny_run_path(&tiny, "config.yaml"));
    snprintf(set, sizeof(set), "--out=%s", out);
    assert_int_equal(command(prepare_main, config, set, NULL, NULL), ST_OK);
    assert_int_equal(prepared_verify(out, &rows), ST_OK);
    assert_int_equal(rows, DATA_ROWS);
    FILE *f = fopen(out, "r");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    snprintf(want, sizeof(want), "{\"rows\":60,\"bytes\":%ld,\"seconds\":", ftell(f));
    fclose(f);
    assert_has(said, want);
}

static void every_command_explains_itself(void **state)
{
    command_fn *all[] = {eval_main, digest_main, export_main, inspect_main, synth_main,
                         prepare_main};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        assert_int_equal(command(all[i], "--help", NULL, NULL, NULL), ST_END);
        assert_has(said, "usage: chanter ");
    }
}

#define WITH(name) cmocka_unit_test_setup_teardown(name, open_run, close_run)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH(eval_prints_one_line_for_the_held_out_rows),
        WITH(eval_scores_all_rows_of_a_given_file_of_either_format),
        WITH(eval_says_what_is_not_there),
        WITH(digest_prints_the_digest_alone),
        WITH(digest_without_the_state_is_an_error),
        WITH(export_copies_every_tensor),
        WITH(export_replaces_nothing_unless_forced),
        WITH(export_never_writes_over_the_run),
        WITH(export_stops_at_a_value_that_is_no_number),
        WITH(export_of_state_that_there_is_none_of_is_an_error),
        WITH(inspect_tells_what_a_run_is),
        WITH(inspect_of_a_run_that_has_not_ended_says_so),
        WITH(inspect_of_a_run_that_lost_its_state_is_an_error),
        WITH(inspect_finds_damage_in_each_kind_of_file),
        WITH(inspect_lists_tensors_and_counts_what_is_no_number),
        WITH(synth_writes_the_rows_it_reports_whatever_config_trains_on),
        WITH(synth_and_prepare_need_to_know_where_to_write),
        WITH(nothing_but_a_regular_file_is_replaced),
        WITH(what_is_read_is_never_replaced),
        WITH(synth_and_prepare_need_no_run_directory),
        WITH(prepare_writes_a_file_that_verifies),
        WITH(every_command_explains_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
