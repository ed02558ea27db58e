/* Configuration files: what is refused, where, and how it is said. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "config/config.h"
#include "tests/support/caught.h"
#include "tests/support/conf_file.h"

/* Opening must fail with `st`, one line with both fragments, no output and nothing leaked. */
static void must_fail(const char *path, const char *const *set, size_t n, enum st st,
                      const char *where, const char *what)
{
    struct config *untouched = (struct config *)conf_path, *c = untouched;
    size_t live = mem_live();
    enum st got = conf_try_open(path, set, n, &c);
    char kind[64];
    snprintf(kind, sizeof(kind), "chanter: error[E-%s]: ", st_name(st));
    if (got != st || strstr(caught_line, what) == NULL || strstr(caught_line, where) == NULL)
        print_error("want %s \"%s\" \"%s\"\ngot  %s\n", kind, where, what, caught_line);
    assert_int_equal(got, st);
    assert_int_equal(caught_lines, 1);
    assert_memory_equal(caught_line, kind, strlen(kind));
    assert_non_null(strstr(caught_line, where));
    assert_non_null(strstr(caught_line, what));
    assert_ptr_equal(c, untouched);
    assert_int_equal(mem_live(), live);
}

/* As little as a file can say. */
static const char LEAST[] = "data: {format: criteo_tsv, path: d.tsv}\n"
                            "model:\n"
                            "  dim: 4\n"
                            "  bottom_mlp: [8, 4]\n"
                            "  top_mlp: [8, 1]\n"
                            "  tables: [10, 20, 30]\n"
                            "train: {global_batch: 64, iterations: 5, learning_rate: 0.1}\n"
                            "run: {dir: runs/x}\n";

/* --- what is refused: one key --------------------------------------------------------------- */

static const struct { const char *set, *what; } BAD_VALUES[] = {
    {"train.global_batch=0", "global_batch '0': want an integer 1..1048576"},
    {"train.global_batch=-5", "global_batch '-5': want an integer 1..1048576"},
    {"train.global_batch=1e3", "global_batch '1e3': want an integer 1..1048576"},
    {"train.global_batch=99999999999", "'99999999999': want an integer 1..1048576"},
    {"train.global_batch=99999999999999999999999", "want an integer 1..1048576"},
    {"train.global_batch=64.0", "'64.0': want an integer"},
    {"train.global_batch=0x40", "'0x40': want an integer"},
    {"train.global_batch=064", "'064': want an integer"},
    {"train.global_batch=+64", "'+64': want an integer"},
    {"train.global_batch= 64", "' 64' is not a number"},
    {"train.global_batch=[64]", "'[64]' is not a number"},
    {"train.global_batch=", "global_batch has no value"},
    {"train.global_batch=big", "global_batch 'big' is not a number"},
    {"train.seed=18446744073709551616", "want an integer 0..18446744073709551615"},
    {"train.seed=-1", "want an integer 0..18446744073709551615"},
    {"oracle.lookahead=4097", "lookahead '4097': want an integer 0..4096"},
    {"oracle.queue=0", "queue '0': want an integer 1..64"},
    {"cluster.prefetch=17", "prefetch '17': want an integer 1..16"},
    {"cluster.threads=0", "threads '0': want an integer 1..64"},
    {"cluster.server_threads=65", "server_threads '65': want an integer 1..64"},
    {"cluster.servers=257", "servers '257': want an integer 1..256"},
    {"cluster.servers=0", "servers '0': want an integer 1..256"},
    {"cluster.timeout_s=0", "timeout_s '0': want an integer 1..86400"},
    {"cluster.timeout_s=86401", "timeout_s '86401': want an integer 1..86400"},
    {"cluster.cache_rows=5000000000", "want an integer 0..4000000000"},
    {"train.slices=65", "slices '65': want an integer 1..64"},
    {"train.slices=0", "slices '0': want an integer 1..64"},
    {"model.tables=[]", "tables has 0 values: want 1..65536"},
    {"model.tables=[5, 0]", "tables[1] '0': want an integer 1..281474976710655"},
    {"model.tables=[281474976710656]", "tables[0] '281474976710656': want an integer"},
    {"model.tables=[5, x]", "tables[1] 'x' is not a number"},
    {"model.tables=5", "tables '5' is not a list; write [5]"},
    {"model.tables=500 20", "tables '500 20' is not a list; write [500, 20]"},
    {"model.tables= 7,8 ; 9", "is not a list; write [7, 8, 9]"},
    {"model.tables=[5, [6]]", "'tables' is neither a value nor a flat list"},
    {"model.tables={a: 5}", "'tables' is neither a value nor a flat list"},
    {"model.tables=[5", "not valid YAML"},
    {"model.tables=&a [5]", "anchors (&) and aliases (*) are not supported"},
    {"model.tables=", "is empty"},
    {"model.bottom_mlp=[0, 4]", "bottom_mlp[0] '0': want an integer 1..65536"},
    {"train.learning_rate=nan", "learning_rate nan: want 0 < lr <= 10"},
    {"train.learning_rate=.nan", "learning_rate .nan: want 0 < lr <= 10"},
    {"train.learning_rate=inf", "learning_rate inf: want 0 < lr <= 10"},
    {"train.learning_rate=-.inf", "want 0 < lr <= 10"},
    {"train.learning_rate=0", "learning_rate 0: want 0 < lr <= 10"},
    {"train.learning_rate=-0.1", "want 0 < lr <= 10"},
    {"train.learning_rate=10.00001", "want 0 < lr <= 10"},
    {"train.learning_rate=1e30", "want 0 < lr <= 10"},
    {"train.learning_rate=1e999", "want 0 < lr <= 10"},
    {"train.learning_rate=1e-60", "want 0 < lr <= 10"},
    {"train.learning_rate=0x1p-3", "want 0 < lr <= 10"},
    {"train.learning_rate=0,1", "learning_rate '0,1' is not a number"},
    {"train.learning_rate=fast", "learning_rate 'fast' is not a number"},
    {"train.epsilon=0", "epsilon 0: want 0 < epsilon <= 1"},
    {"train.epsilon=-1e-8", "want 0 < epsilon <= 1"},
    {"train.optimizer=adam", "want one of sgd, adagrad, rowwise_adagrad"},
    {"train.optimizer=adagrda", "(did you mean 'adagrad'?)"},
    {"data.format=Criteo_tsv", "(did you mean 'criteo_tsv'?)"},
    {"cluster.transport=tcp", "transport 'tcp': want one of local, grpc"},
    {"cluster.device=gpu", "device 'gpu': want one of cpu, cuda"},
    {"device.precision=fp16", "precision 'fp16': want one of fp32, tf32, bf16"},
    {"model.kind=dlr", "kind 'dlr': want dlrm"},
    {"run.save_final=yes", "save_final 'yes': want true or false"},
    {"run.dir=", "dir has no value"},
    {"run.dir=\xff/x", "the value is not UTF-8"},
    {"run.dir=\xc0\xaf", "the value is not UTF-8"},
    {"run.dir=\xed\xa0\x80", "the value is not UTF-8"},
    {"run.dri=x", "unknown key 'dri' in run (did you mean 'dir'?)"},
    {"rnu.dir=x", "unknown section 'rnu' (did you mean 'run'?)"},
    {"model.embeding_dim=8", "unknown key 'embeding_dim' in model (did you mean 'dim'?)"},
    {"train.dim=8", "unknown key 'dim' in train (it belongs in model)"},
    {"train.zzz=8", "unknown key 'zzz' in train"},
};

static void bad_values_are_refused_with_what_would_be_right(void **state)
{
    conf_put_file(conf_path, LEAST, strlen(LEAST));
    for (size_t i = 0; i < sizeof(BAD_VALUES) / sizeof(BAD_VALUES[0]); i++) {
        char where[64];
        const char *set = BAD_VALUES[i].set;
        snprintf(where, sizeof(where), "--set %.*s", (int)strcspn(set, "="), set);
        must_fail(conf_path, &set, 1, ST_CONFIG, where, BAD_VALUES[i].what);
    }
}

static void set_without_section_key_or_value_is_a_usage_error(void **state)
{
    static const char *const CASES[] = {"", "=", ".", ".=", "a.b", "a=b", "a.=b", ".a=b", "a=b.c",
                                        "train.seed", "=train.seed=1",
                                        "a.bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb=1"};
    conf_put_file(conf_path, LEAST, strlen(LEAST));
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        must_fail(conf_path, &CASES[i], 1, ST_USAGE, "--set '", "want SECTION.KEY=VALUE");
}

static void set_of_a_key_without_its_section_names_it(void **state)
{
    static const struct { const char *set, *hint; } CASES[] = {
        {"epochs=3", "--set 'epochs=3': want SECTION.KEY=VALUE (did you mean train.epochs?)"},
        {"seed=3", "(did you mean data.seed or train.seed?)"},
    };
    conf_put_file(conf_path, LEAST, strlen(LEAST));
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        must_fail(conf_path, &CASES[i].set, 1, ST_USAGE, "--set '", CASES[i].hint);
}

static void what_is_right_at_the_edge_of_a_range_is_taken(void **state)
{
    static const char *const CASES[] = {
        "train.global_batch=1048576", "train.learning_rate=10", "train.learning_rate=1e-30",
        "train.epsilon=1", "oracle.lookahead=0", "oracle.lookahead=4096", "cluster.timeout_s=86400",
        "cluster.trainers=8", "train.slices=64", "cluster.servers=256", "cluster.prefetch=16",
        "model.tables=[1]"};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        config_close(conf_must_open(LEAST, &CASES[i], 1));
}

/* --- what is refused: between keys ---------------------------------------------------------- */

static void contradictions_are_refused_at_the_line_of_one_of_them(void **state)
{
    static const struct { const char *set[2], *where, *what; } CASES[] = {
        {{"model.dim=16"}, "conf.yml:4", "model.dim 16 != last of model.bottom_mlp 4"},
        {{"model.bottom_mlp=[48]"}, "--set model.bottom_mlp",
         "dim 4 != last of model.bottom_mlp 48"},
        {{"model.top_mlp=[8]"}, "--set model.top_mlp", "last of model.top_mlp is 8; want 1"},
        {{"train.global_batch=1000", "train.slices=3"}, "--set train.global_batch",
         "global_batch 1000 is not divisible by train.slices 3; the next that is: 1002"},
        {{"train.slices=3"}, "conf.yml:7", "train.global_batch 64 is not divisible"},
        {{"train.global_batch=1048574", "train.slices=64"}, "--set train.global_batch", "1048576"},
        {{"cluster.trainers=9"}, "--set cluster.trainers",
         "9 trainers share 8 slices; lower cluster.trainers or raise train.slices"},
        {{"device.precision=tf32"}, "--set device.precision",
         "tf32 is for cluster.device cuda; the cpu has fp32 and bf16"},
        {{"train.iterations=0"}, "--set train.iterations", "neither train.iterations nor"},
        {{"train.epochs=2"}, "--set train.epochs",
         "iterations 5 and train.epochs 2 are both given"},
        {{"data.format=synthetic"}, "conf.yml", "data.rows is missing; format synthetic needs it"},
        {{"data.format=synthetic", "data.rows=0"}, "--set data.rows", "data.rows is missing"},
        {{"data.rows=9"}, "--set data.rows",
         "data.rows is for data.format synthetic alone; leave it out"},
        {{"data.seed=2"}, "--set data.seed",
         "data.seed is for data.format synthetic alone; leave it out"},
        {{"run.eval_every=5"}, "--set run.eval_every",
         "run.eval_every is 5, but nothing is held out; set data.train_rows or data.eval_path"},
        {{"run.snapshot_every=10"}, "--set run.snapshot_every",
         "snapshots are not supported yet; leave run.snapshot_every at 0"},
    };
    conf_put_file(conf_path, LEAST, strlen(LEAST));
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        must_fail(conf_path, CASES[i].set, CASES[i].set[1] != NULL ? 2 : 1, ST_CONFIG,
                  CASES[i].where, CASES[i].what);
    const char *too_many[] = {"data.format=synthetic", "data.rows=9", "data.train_rows=10"};
    must_fail(conf_path, too_many, 3, ST_CONFIG, "--set data.train_rows",
              "data.train_rows 10 is more than data.rows 9");
    too_many[2] = "data.train_rows=9";
    must_fail(conf_path, too_many, 3, ST_CONFIG, "--set data.train_rows",
              "data.train_rows takes all 9 data.rows: nothing is held out; lower it or set "
              "data.eval_rows");
}

/* --- what is refused: files ----------------------------------------------------------------- */

static void bad_files_are_refused_with_their_line(void **state)
{
    static const struct { const char *text, *where, *what; } CASES[] = {
        {"", "conf.yml: ", "is empty"},
        {"# nothing\n", "conf.yml: ", "is empty"},
        {"---\n...\n", "conf.yml:2", "want sections"},
        {"hello\n", "conf.yml:1", "want sections"},
        {"- a\n- b\n", "conf.yml:1", "want sections"},
        {"model:\n  dim: 4\n  embeding_dim: 8\n", "conf.yml:3: ",
         "unknown key 'embeding_dim' in model (did you mean 'dim'?)"},
        {"model:\n\n\n  dim: big\n", "conf.yml:4: ", "dim 'big' is not a number"},
        {"model:\n  dim: 4\n   top_mlp: [1]\n", "conf.yml:3: ", "not valid YAML"},
        {"model:\n  dim: 4\n top_mlp: [1]\n", "conf.yml:3: ", "not valid YAML"},
        {"model:\n\tdim: 4\n", "conf.yml:2: ", "not valid YAML"},
        {"model:\n  tables: [1, 2\nrun: {}\n", "conf.yml:3: ", "not valid YAML"},
        {"model:\n  dim: 'x\n", "conf.yml:3: ", "not valid YAML"},
        {"model:\n  dim: 4\n  kind: dlrm\n  dim: 8\n", "conf.yml:4: ",
         "'dim' in model is given twice (first in line 2)"},
        {"run:\nmodel:\n  dim: 4\nrun:\n  dir: x\n", "conf.yml:4: ", "'run' is given twice"},
        {"modle:\n  dim: 4\n", "conf.yml:1: ", "unknown section 'modle' (did you mean 'model'?)"},
        {"data: {}\nmodle:\n", "conf.yml:2: ", "unknown section 'modle'"},
        {"model: 5\n", "conf.yml:1: ", "'model' is a section: it must hold keys"},
        {"model: [a]\n", "conf.yml:1: ", "'model' is a section: it must hold keys"},
        {"model:\n  dim:\n    x: 1\n", "conf.yml:3: ", "'dim' is neither a value nor a flat list"},
        {"model:\n  dim: [4]\n", "conf.yml:2: ", "dim is a list; want one value"},
        {"model:\n  dim:\n", "conf.yml:2: ", "dim has no value"},
        {"model:\n  dim: ~\n", "conf.yml:2: ", "dim has no value"},
        {"run: {dir: null}\n", "conf.yml:1: ", "dir has no value"},
        {"model:\n  ? [a]\n  : 4\n", "conf.yml:2: ", "holds something that is not a key"},
        {"? [a]\n: 4\n", "conf.yml:1: ", "must be a word"},
        {"model: &m {dim: 4}\n", "conf.yml:1: ", "anchors (&) and aliases (*) are not supported"},
        {"model:\n  dim: &m 4\n", "conf.yml:2: ", "anchors"},
        {"model:\n  tables: [&m 4, *m]\n", "conf.yml:2: ", "anchors"},
        {"model:\n  dim: *m\n", "conf.yml:2: ", "anchors"},
        {"model:\n  dim: !!int 4\n", "conf.yml:2: ", "tags (!) are not supported"},
        {"model: {dim: 4}\n---\nrun: {}\n", "conf.yml:2: ", "a second document"},
        {"model:\n  dim: \"4\\0\"\n", "conf.yml:2: ", "neither a value"},
        {"model:\n  dim: \xff\n", "conf.yml: ", "not readable as text"},
        {"model:\n  dim: \x01\n", "conf.yml: ", "not readable as text"},
        {"model:\n  <<: {dim: 4}\n", "conf.yml:2: ", "neither a value"},
        {"model:\n  dim: 4\n", "conf.yml: ", "data.format is missing"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        conf_put_file(conf_path, CASES[i].text, strlen(CASES[i].text));
        must_fail(conf_path, NULL, 0, ST_CONFIG, CASES[i].where, CASES[i].what);
    }
}

static void a_key_that_has_no_default_must_be_given(void **state)
{
    static const struct { const char *line, *name; } CASES[] = {
        {"  dim: 4\n", "model.dim"}, {"  bottom_mlp: [8, 4]\n", "model.bottom_mlp"},
        {"  top_mlp: [8, 1]\n", "model.top_mlp"}, {"  tables: [10, 20, 30]\n", "model.tables"},
        {"global_batch: 64, ", "train.global_batch"},
        {", learning_rate: 0.1", "train.learning_rate"},
        {"format: criteo_tsv, ", "data.format"}, {", path: d.tsv", "data.path"},
        {"dir: runs/x", "run.dir is missing; set it or give --run-dir DIR"},
        {"iterations: 5, ", "neither train.iterations nor train.epochs is given"}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        char text[sizeof(LEAST)];
        const char *cut = strstr(LEAST, CASES[i].line);
        assert_non_null(cut);
        size_t n = (size_t)snprintf(text, sizeof(text), "%.*s%s", (int)(cut - LEAST), LEAST,
                                    cut + strlen(CASES[i].line));
        conf_put_file(conf_path, text, n);
        must_fail(conf_path, NULL, 0, ST_CONFIG, "conf.yml", CASES[i].name);
    }
}

static void a_file_that_is_missing_or_not_ours_to_read_says_so(void **state)
{
    char gone[128], below[128];
    snprintf(gone, sizeof(gone), "%s/gone.yml", conf_dir);
    snprintf(below, sizeof(below), "%s/below.yml", conf_path);
    conf_put_file(conf_path, LEAST, strlen(LEAST));
    must_fail(gone, NULL, 0, ST_NOINPUT, "gone.yml", "no such file");
    must_fail(below, NULL, 0, ST_NOINPUT, "below.yml", "no such file");
    must_fail(conf_dir, NULL, 0, ST_NOINPUT, conf_dir, "is a directory; name a configuration file");
    snprintf(below, sizeof(below), "%s/config.yaml", conf_dir);
    conf_put_file(below, LEAST, strlen(LEAST));
    must_fail(conf_dir, NULL, 0, ST_NOINPUT, conf_dir, "is a directory; did you mean ");
    must_fail(conf_dir, NULL, 0, ST_NOINPUT, "/config.yaml?", "did you mean ");
    assert_int_equal(unlink(below), 0);
    if (geteuid() == 0) return; /* to root everything is readable */
    assert_int_equal(chmod(conf_path, 0), 0);
    must_fail(conf_path, NULL, 0, ST_PERM, "conf.yml", "permission denied");
    assert_int_equal(chmod(conf_path, 0600), 0);
}

static void files_up_to_one_mebibyte_are_read(void **state)
{
    size_t cap = (1 << 20) + 1, n = strlen(LEAST);
    char *text = malloc(cap);
    assert_non_null(text);
    memset(text, '#', cap);
    memcpy(text, LEAST, n);
    struct config *c = NULL;
    conf_put_file(conf_path, text, cap - 1);
    assert_int_equal(conf_try_open(conf_path, NULL, 0, &c), ST_OK);
    config_close(c);
    conf_put_file(conf_path, text, cap);
    must_fail(conf_path, NULL, 0, ST_CONFIG, "conf.yml",
              "too large for a configuration: more than 1048576 bytes; is it one (YAML)?");
    free(text);
}

static void hostile_nesting_and_floods_of_keys_end_soon(void **state)
{
    size_t cap = 1 << 20;
    char *text = malloc(cap);
    assert_non_null(text);
    memset(text, '[', cap);
    memcpy(text, "run:\n  dir: ", 12);
    conf_put_file(conf_path, text, cap);
    must_fail(conf_path, NULL, 0, ST_CONFIG, "conf.yml:2", "neither a value nor a flat list");
    size_t n = (size_t)sprintf(text, "run:\n");
    for (int i = 0; i < 300; i++) n += (size_t)sprintf(text + n, "  k%d: 1\n", i);
    conf_put_file(conf_path, text, n);
    must_fail(conf_path, NULL, 0, ST_CONFIG, "conf.yml", "more than 256 keys");
    free(text);
}

static void the_largest_number_of_tables_is_read_and_one_more_is_refused(void **state)
{
    char *text = malloc(1 << 20);
    assert_non_null(text);
    size_t n = (size_t)sprintf(text, "model.tables=[1");
    for (int i = 1; i < 65536; i++) n += (size_t)sprintf(text + n, ",%d", i);
    strcpy(text + n, "]");
    const char *set[] = {text};
    struct config *c = conf_must_open(LEAST, set, 1);
    assert_int_equal(c->model.n_tables, 65536);
    assert_int_equal(c->model.tables[65535], 65535);
    config_close(c);
    strcpy(text + n, ",1]");
    must_fail(conf_path, set, 1, ST_CONFIG, "--set model.tables",
              "tables has 65537 values: want 1..65536");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_values_are_refused_with_what_would_be_right),
        cmocka_unit_test(set_without_section_key_or_value_is_a_usage_error),
        cmocka_unit_test(set_of_a_key_without_its_section_names_it),
        cmocka_unit_test(what_is_right_at_the_edge_of_a_range_is_taken),
        cmocka_unit_test(contradictions_are_refused_at_the_line_of_one_of_them),
        cmocka_unit_test(bad_files_are_refused_with_their_line),
        cmocka_unit_test(a_key_that_has_no_default_must_be_given),
        cmocka_unit_test(a_file_that_is_missing_or_not_ours_to_read_says_so),
        cmocka_unit_test(files_up_to_one_mebibyte_are_read),
        cmocka_unit_test(hostile_nesting_and_floods_of_keys_end_soon),
        cmocka_unit_test(the_largest_number_of_tables_is_read_and_one_more_is_refused),
    };
    return cmocka_run_group_tests(tests, conf_group_start, conf_group_stop);
}
