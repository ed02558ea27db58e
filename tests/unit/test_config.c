/* Configuration files: what is read, and that what is written reads back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "config/config.h"
#include "config/keys.h"
#include "tests/support/caught.h"
#include "tests/support/conf_file.h"

/* As little as a file can say. */
static const char LEAST[] = "data: {format: criteo_tsv, path: d.tsv}\n"
                            "model:\n"
                            "  dim: 4\n"
                            "  bottom_mlp: [8, 4]\n"
                            "  top_mlp: [8, 1]\n"
                            "  tables: [10, 20, 30]\n"
                            "train: {global_batch: 64, iterations: 5, learning_rate: 0.1}\n"
                            "run: {dir: runs/x}\n";

/* --- what is read --------------------------------------------------------------------------- */

static void defaults_are_those_of_the_documentation(void **state)
{
    struct config *c = conf_must_open(LEAST, NULL, 0);
    assert_int_equal(c->data.format, DATA_CRITEO_TSV);
    assert_string_equal(c->data.path, "d.tsv");
    assert_null(c->data.eval_path);
    assert_int_equal(c->data.train_rows + c->data.eval_rows + c->data.rows, 0);
    assert_int_equal(c->data.seed, 1);
    assert_int_equal(c->model.kind, MODEL_DLRM);
    assert_int_equal(c->model.dense_features, 13);
    assert_int_equal(c->train.slices, 8);
    assert_int_equal(c->train.epochs, 0);
    assert_int_equal(c->train.optimizer, OPT_SGD);
    assert_true(c->train.epsilon == 1e-8f);
    assert_int_equal(c->train.seed, 1);
    assert_int_equal(c->oracle.lookahead, 200);
    assert_int_equal(c->oracle.queue, 4);
    assert_int_equal(c->cluster.trainers, 1);
    assert_int_equal(c->cluster.servers, 1);
    assert_int_equal(c->cluster.cache_rows, 0);
    assert_int_equal(c->cluster.transport, TRANSPORT_LOCAL);
    assert_int_equal(c->cluster.device, DEVICE_CPU);
    assert_int_equal(c->cluster.threads, 1);
    assert_int_equal(c->cluster.server_threads, 1);
    assert_int_equal(c->cluster.prefetch, 4);
    assert_int_equal(c->cluster.timeout_s, 60);
    assert_int_equal(c->device.precision, PRECISION_FP32);
    assert_false(c->run.save_initial);
    assert_true(c->run.save_final);
    assert_int_equal(c->run.eval_every + c->run.snapshot_every, 0);
    config_close(c);
}

static void values_land_in_their_members(void **state)
{
    struct config *c = conf_must_open(LEAST, NULL, 0);
    assert_int_equal(c->model.dim, 4);
    assert_int_equal(c->model.n_bottom_mlp, 2);
    assert_int_equal(c->model.bottom_mlp[0], 8);
    assert_int_equal(c->model.bottom_mlp[1], 4);
    assert_int_equal(c->model.n_top_mlp, 2);
    assert_int_equal(c->model.top_mlp[1], 1);
    assert_int_equal(c->model.n_tables, 3);
    assert_int_equal(c->model.tables[2], 30);
    assert_int_equal(c->train.global_batch, 64);
    assert_int_equal(c->train.iterations, 5);
    assert_true(c->train.learning_rate == 0.1f);
    assert_string_equal(c->run.dir, "runs/x");
    config_close(c);
}

static void set_overrides_the_file_and_the_last_one_wins(void **state)
{
    const char *set[] = {"train.seed=18446744073709551615", "model.tables=[281474976710655, 2]",
                         "cluster.trainers=3",              "cluster.trainers=4",
                         "train.optimizer=rowwise_adagrad", "run.save_initial=true",
                         "run.dir=a: b #c 'd' \"e\" \\ =",  "train.learning_rate=2.5e-3",
                         "data.eval_path=\xc3\xa4\xe2\x82\xac\x01\n"};
    struct config *c = conf_must_open(LEAST, set, sizeof(set) / sizeof(set[0]));
    assert_true(c->train.seed == UINT64_MAX);
    assert_int_equal(c->model.n_tables, 2);
    assert_true(c->model.tables[0] == (UINT64_C(1) << 48) - 1);
    assert_int_equal(c->cluster.trainers, 4);
    assert_int_equal(c->train.optimizer, OPT_ROWWISE_ADAGRAD);
    assert_true(c->run.save_initial);
    assert_string_equal(c->run.dir, "a: b #c 'd' \"e\" \\ =");
    assert_string_equal(c->data.eval_path, "\xc3\xa4\xe2\x82\xac\x01\n");
    assert_true(c->train.learning_rate == 2.5e-3f);
    config_close(c);
}

static void set_mends_a_file_that_is_wrong_or_lacks_something(void **state)
{
    const char *set[] = {"train.learning_rate=0.5", "train.global_batch=64", "train.epochs=2",
                         "run.dir=r"};
    struct config *c = conf_must_open("data: {format: criteo_tsv, path: d.tsv}\n"
                                 "model: {dim: 1, bottom_mlp: [1], top_mlp: [1], tables: [1]}\n"
                                 "train: {learning_rate: nan}\n",
                                 set, 4);
    assert_true(c->train.learning_rate == 0.5f);
    assert_int_equal(c->train.epochs, 2);
    config_close(c);
}

static void empty_sections_comments_crlf_and_bom_are_fine(void **state)
{
    struct config *c = conf_must_open("\xef\xbb\xbf# hello\r\n"
                                 "data: {format: synthetic, rows: 100}\r\n"
                                 "oracle:\r\n"
                                 "cluster: {}\r\n"
                                 "model: {dim: \"1\", bottom_mlp: [1], top_mlp: [1],\r\n"
                                 "        tables: [1]}\r\n"
                                 "train: {global_batch: 8, epochs: 1, learning_rate: 10}\r\n"
                                 "run: {dir: 'null'}\r\n",
                                 NULL, 0);
    assert_int_equal(c->data.rows, 100);
    assert_int_equal(c->oracle.lookahead, 200);
    assert_string_equal(c->run.dir, "null");
    config_close(c);
}

static void every_name_of_a_list_of_names_is_its_enum_value(void **state)
{
    for (size_t k = 0; k < config_n_keys; k++) {
        const struct config_key *key = &config_keys[k];
        if (key->kind != KEY_NAME) continue;
        for (int v = 0; key->names[v] != NULL; v++) {
            char text[64];
            snprintf(text, sizeof(text), "%s.%s=%s", key->section, key->name, key->names[v]);
            bool synthetic = strcmp(key->names[v], "synthetic") == 0;
            bool tf32 = strcmp(key->names[v], "tf32") == 0;
            const char *set[] = {text, tf32 ? "cluster.device=cuda" : "data.rows=100"};
            size_t n_set = synthetic || tf32 ? 2 : 1;
            struct config *c = conf_must_open(LEAST, set, n_set);
            int got = strcmp(key->name, "format") == 0      ? (int)c->data.format
                      : strcmp(key->name, "kind") == 0      ? (int)c->model.kind
                      : strcmp(key->name, "optimizer") == 0 ? (int)c->train.optimizer
                      : strcmp(key->name, "transport") == 0 ? (int)c->cluster.transport
                      : strcmp(key->name, "precision") == 0 ? (int)c->device.precision
                                                            : (int)c->cluster.device;
            assert_int_equal(got, v);
            config_close(c);
        }
    }
    assert_string_equal(config_optimizer_name(OPT_ROWWISE_ADAGRAD), "rowwise_adagrad");
}

static void row_state_and_shards_follow_from_the_configuration(void **state)
{
    struct config c = {.cluster = {.servers = 3, .server_threads = 5}};
    assert_int_equal(config_shards(&c), 15);
    assert_int_equal(config_row_state(OPT_SGD, 16), 0);
    assert_int_equal(config_row_state(OPT_ADAGRAD, 16), 16);
    assert_int_equal(config_row_state(OPT_ROWWISE_ADAGRAD, 16), 1);
}

/* --- writing -------------------------------------------------------------------------------- */

static void assert_same(const struct config *a, const struct config *b)
{
    assert_int_equal(a->data.format, b->data.format);
    assert_int_equal(a->data.path == NULL, b->data.path == NULL);
    if (a->data.path != NULL) assert_string_equal(a->data.path, b->data.path);
    assert_int_equal(a->data.eval_path == NULL, b->data.eval_path == NULL);
    if (a->data.eval_path != NULL) assert_string_equal(a->data.eval_path, b->data.eval_path);
    assert_true(a->data.train_rows == b->data.train_rows && a->data.eval_rows == b->data.eval_rows);
    assert_true(a->data.rows == b->data.rows && a->data.seed == b->data.seed);
    assert_int_equal(a->model.kind, b->model.kind);
    assert_int_equal(a->model.dense_features, b->model.dense_features);
    assert_int_equal(a->model.dim, b->model.dim);
    assert_int_equal(a->model.n_bottom_mlp, b->model.n_bottom_mlp);
    assert_memory_equal(a->model.bottom_mlp, b->model.bottom_mlp, 4 * a->model.n_bottom_mlp);
    assert_int_equal(a->model.n_top_mlp, b->model.n_top_mlp);
    assert_memory_equal(a->model.top_mlp, b->model.top_mlp, 4 * a->model.n_top_mlp);
    assert_int_equal(a->model.n_tables, b->model.n_tables);
    assert_memory_equal(a->model.tables, b->model.tables, 8 * a->model.n_tables);
    assert_memory_equal(&a->train.learning_rate, &b->train.learning_rate, sizeof(float));
    assert_memory_equal(&a->train.epsilon, &b->train.epsilon, sizeof(float));
    assert_true(a->train.iterations == b->train.iterations && a->train.seed == b->train.seed);
    assert_int_equal(a->train.global_batch, b->train.global_batch);
    assert_int_equal(a->train.slices, b->train.slices);
    assert_int_equal(a->train.epochs, b->train.epochs);
    assert_int_equal(a->train.optimizer, b->train.optimizer);
    assert_int_equal(a->oracle.lookahead, b->oracle.lookahead);
    assert_int_equal(a->oracle.queue, b->oracle.queue);
    assert_memory_equal(&a->cluster, &b->cluster, sizeof(a->cluster));
    assert_int_equal(a->device.precision, b->device.precision);
    assert_string_equal(a->run.dir, b->run.dir);
    assert_int_equal(a->run.save_initial, b->run.save_initial);
    assert_int_equal(a->run.save_final, b->run.save_final);
    assert_true(a->run.eval_every == b->run.eval_every);
    assert_true(a->run.snapshot_every == b->run.snapshot_every);
}

static uint64_t draw(uint64_t seed, uint64_t *n)
{
    uint32_t w[4];
    rng_words(seed, 0, (*n)++, 0, w);
    return (uint64_t)w[0] << 32 | w[1];
}

/* A float of any magnitude in (0, 1), all bits used. */
static float draw_float(uint64_t seed, uint64_t *n)
{
    uint32_t bits = (uint32_t)(draw(seed, n) % 0x3f800000u);
    float f;
    if (bits == 0) bits = 1;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void draw_text(uint64_t seed, uint64_t *n, char out[40])
{
    static const char *const PIECES[] = {"a", "/", " ", ":", ": ", "#", " #", "'", "\"", "\\", "-",
                                         "\n", "\t", "~", "1", "\xc3\xa4", "\xc2\x85",
                                         "\xe2\x80\xa8", "\xf0\x9f\x98\x80", "{", "]",
                                         ",", "&", "!"};
    out[0] = '\0';
    for (uint64_t k = 1 + draw(seed, n) % 9; k > 0; k--)
        strcat(out, PIECES[draw(seed, n) % (sizeof(PIECES) / sizeof(PIECES[0]))]);
}

struct drawn { /* a random configuration and what it points to */
    struct config c;
    char path[40], eval_path[40], run_dir[40];
    uint32_t bottom[3], top[2];
    uint64_t tables[40];
};

static void draw_model(uint64_t seed, uint64_t *n, struct drawn *r)
{
    r->c.model.dense_features = 1 + draw(seed, n) % 65536;
    r->c.model.dim = 1 + draw(seed, n) % 4096;
    for (int i = 0; i < 2; i++) r->bottom[i] = 1 + draw(seed, n) % 65536;
    r->bottom[2] = r->c.model.dim;
    r->top[0] = 1 + draw(seed, n) % 65536;
    r->top[1] = 1;
    r->c.model.bottom_mlp = r->bottom, r->c.model.n_bottom_mlp = 3;
    r->c.model.top_mlp = r->top, r->c.model.n_top_mlp = 2;
    r->c.model.tables = r->tables;
    r->c.model.n_tables = 1 + draw(seed, n) % 40;
    for (uint32_t i = 0; i < r->c.model.n_tables; i++)
        r->tables[i] = (draw(seed, n) >> 16) | 1;
}

static void draw_run(uint64_t seed, uint64_t *n, struct config *c)
{
    c->train.slices = 1 + draw(seed, n) % 64;
    c->train.global_batch = c->train.slices * (1 + draw(seed, n) % 16384);
    c->train.epochs = seed % 2;
    c->train.iterations = seed % 2 ? 0 : 1 + draw(seed, n) % 1000;
    c->train.optimizer = draw(seed, n) % 3;
    c->train.learning_rate = draw_float(seed, n);
    c->train.epsilon = draw_float(seed, n);
    c->train.seed = draw(seed, n);
    c->oracle.lookahead = draw(seed, n) % 4097;
    c->oracle.queue = 1 + draw(seed, n) % 64;
    c->cluster.trainers = 1 + draw(seed, n) % c->train.slices;
    c->cluster.servers = 1 + draw(seed, n) % 256;
    c->cluster.cache_rows = draw(seed, n) % 4000000001;
    c->cluster.transport = draw(seed, n) % 2;
    c->cluster.device = draw(seed, n) % 2;
    c->device.precision = draw(seed, n) % 3;
    if (c->cluster.device == DEVICE_CPU && c->device.precision == PRECISION_TF32)
        c->device.precision = PRECISION_FP32;
    c->cluster.threads = 1 + draw(seed, n) % 64;
    c->cluster.server_threads = 1 + draw(seed, n) % 64;
    c->cluster.prefetch = 1 + draw(seed, n) % 16;
    c->cluster.timeout_s = 1 + draw(seed, n) % 86400;
    c->run.save_initial = draw(seed, n) % 2;
    c->run.save_final = draw(seed, n) % 2;
    c->run.eval_every = draw(seed, n) % 1000;
}

static void draw_config(uint64_t seed, struct drawn *r)
{
    uint64_t n = 0;
    memset(r, 0, sizeof(*r));
    draw_text(seed, &n, r->path);
    draw_text(seed, &n, r->eval_path);
    draw_text(seed, &n, r->run_dir);
    r->c.data.format = draw(seed, &n) % 3;
    r->c.data.rows = 1000 + draw(seed, &n) % 1000000;
    r->c.data.train_rows = draw(seed, &n) % 1000;
    r->c.data.eval_rows = draw(seed, &n) % 1000;
    r->c.data.seed = draw(seed, &n);
    if (r->c.data.format != DATA_SYNTHETIC) r->c.data.rows = 0, r->c.data.seed = 1;
    r->c.data.path = r->path;
    r->c.data.eval_path = draw(seed, &n) % 2 ? r->eval_path : NULL;
    r->c.run.dir = r->run_dir;
    draw_model(seed, &n, r);
    draw_run(seed, &n, &r->c);
}

static void random_configurations_read_back_as_they_were_written(void **state)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        struct drawn r;
        struct config *back = NULL;
        draw_config(seed, &r);
        assert_int_equal(config_write(&r.c, conf_path), ST_OK);
        enum st st = conf_try_open(conf_path, NULL, 0, &back);
        if (st != ST_OK) print_error("seed %d: %s\n", (int)seed, caught_line);
        assert_int_equal(st, ST_OK);
        assert_same(&r.c, back);
        config_close(back);
    }
}

static void writing_where_nothing_can_be_created_says_so_and_leaves_nothing(void **state)
{
    struct config *c = conf_must_open(LEAST, NULL, 0);
    char path[128];
    snprintf(path, sizeof(path), "%s/no/where.yml", conf_dir);
    caught_lines = 0;
    assert_int_equal(config_write(c, path), ST_CANTCREATE);
    assert_int_equal(caught_lines, 1);
    assert_int_equal(config_write(c, conf_dir), ST_CANTCREATE); /* rename over a directory */
    snprintf(path, sizeof(path), "%s.part", conf_dir);
    assert_int_equal(access(path, F_OK), -1);
    config_close(c);
}

/* --- surroundings --------------------------------------------------------------------------- */

/* Compile German into our directory and enter it; false where its source is not installed. */
static bool enter_german(void)
{
    char command[256];
    snprintf(command, sizeof(command), "localedef -c -i de_DE -f UTF-8 %s/de_DE.UTF-8 2>/dev/null",
             conf_dir);
    if (system(command) != 0 || setenv("LOCPATH", conf_dir, 1) != 0) return false;
    return setlocale(LC_ALL, "de_DE.UTF-8") != NULL;
}

static void leave_german(void)
{
    char command[256];
    setlocale(LC_ALL, "C");
    unsetenv("LOCPATH");
    snprintf(command, sizeof(command), "rm -r %s/de_DE.UTF-8", conf_dir);
    assert_int_equal(system(command), 0);
}

static void a_locale_with_a_decimal_comma_changes_nothing(void **state)
{
    if (!enter_german()) skip();
    assert_string_equal(localeconv()->decimal_point, ",");
    const char *set[] = {"train.epsilon=0.25"};
    struct config *c = conf_must_open(LEAST, set, 1), *back = NULL;
    assert_true(c->train.learning_rate == 0.1f);
    assert_true(c->train.epsilon == 0.25f);
    assert_int_equal(config_write(c, conf_path), ST_OK);
    assert_int_equal(conf_try_open(conf_path, NULL, 0, &back), ST_OK);
    assert_true(back->train.learning_rate == 0.1f);
    assert_string_equal(localeconv()->decimal_point, ","); /* the caller's is as it was */
    config_close(back);
    config_close(c);
    leave_german();
}

static void every_failed_allocation_is_reported_and_leaks_nothing(void **state)
{
    const char *set[] = {"model.tables=[1, 2]", "cluster.trainers=2"};
    struct config *c = conf_must_open(LEAST, set, 2), *const untouched = (struct config *)conf_dir;
    size_t live = mem_live(), injected = 0;
    for (size_t nth = 1;; nth++) {
        struct config *back = untouched;
        mem_fail_at(nth);
        enum st st = config_write(c, conf_path);
        if (st == ST_OK) st = conf_try_open(conf_path, set, 2, &back);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            config_close(back);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(back, untouched);
        assert_int_equal(mem_live(), live);
    }
    assert_true(injected > 50);
    assert_int_equal(mem_live(), live);
    config_close(c);
}

/* --- documentation -------------------------------------------------------------------------- */

/* Every "| `section.key` |" row of the page names a key, and every key has its row. */
static void every_key_is_documented_and_every_documented_key_exists(void **state)
{
    FILE *f = fopen("docs/configuration.md", "r");
    char line[1024], section[64], name[64];
    bool seen[64] = {false};
    size_t rows = 0;
    assert_non_null(f);
    assert_true(config_n_keys <= 64);
    while (fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "| `%63[a-z_].%63[a-z_]` |", section, name) != 2) continue;
        const struct config_key *k = key_find(section, name);
        if (k == NULL) print_error("no such key: %s.%s\n", section, name);
        assert_non_null(k);
        assert_false(seen[k - config_keys]);
        seen[k - config_keys] = true;
        rows++;
        char want[64];
        snprintf(want, sizeof(want), k->fallback == NULL      ? "| required |"
                                     : k->fallback[0] == '\0' ? "| none |"
                                                              : "| %s |", k->fallback);
        if (strstr(line, want) == NULL) print_error("default of %s.%s: %s\n", section, name, want);
        assert_non_null(strstr(line, want));
        snprintf(want, sizeof(want), "%llu..%llu", (unsigned long long)k->lo,
                 (unsigned long long)k->hi);
        if ((k->kind == KEY_UINT || k->kind == KEY_UINTS) && strstr(line, want) == NULL)
            fail_msg("range of %s.%s: want %s", section, name, want);
    }
    fclose(f);
    for (size_t i = 0; i < config_n_keys; i++)
        if (!seen[i])
            print_error("not documented: %s.%s\n", config_keys[i].section, config_keys[i].name);
    assert_int_equal(rows, config_n_keys);
}

static void the_examples_are_right(void **state)
{
    struct config *c = NULL;
    assert_int_equal(conf_try_open("examples/sample.yaml", NULL, 0, &c), ST_OK);
    assert_int_equal(c->model.n_tables, 26);
    assert_int_equal(c->cluster.transport, TRANSPORT_GRPC);
    config_close(c);
    assert_int_equal(conf_try_open("examples/train.yaml", NULL, 0, &c), ST_OK);
    assert_int_equal(c->cluster.transport, TRANSPORT_LOCAL);
    config_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_those_of_the_documentation),
        cmocka_unit_test(values_land_in_their_members),
        cmocka_unit_test(set_overrides_the_file_and_the_last_one_wins),
        cmocka_unit_test(set_mends_a_file_that_is_wrong_or_lacks_something),
        cmocka_unit_test(empty_sections_comments_crlf_and_bom_are_fine),
        cmocka_unit_test(every_name_of_a_list_of_names_is_its_enum_value),
        cmocka_unit_test(row_state_and_shards_follow_from_the_configuration),
        cmocka_unit_test(random_configurations_read_back_as_they_were_written),
        cmocka_unit_test(writing_where_nothing_can_be_created_says_so_and_leaves_nothing),
        cmocka_unit_test(a_locale_with_a_decimal_comma_changes_nothing),
        cmocka_unit_test(every_failed_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(every_key_is_documented_and_every_documented_key_exists),
        cmocka_unit_test(the_examples_are_right),
    };
    return cmocka_run_group_tests(tests, conf_group_start, conf_group_stop);
}
