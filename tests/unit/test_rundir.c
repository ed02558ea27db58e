/* A run directory read back, what is wrong with one named, and its digest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "embserver/store.h"
#include "launch/rundir.h"
#include "tests/support/caught.h"
#include "tests/support/tiny_run.h"

static struct tiny_run tiny;

static size_t live_before;        /* allocations of a failed test do not fail the next */

static int open_with(enum optimizer optimizer)
{
    live_before = mem_live();
    tiny_run_open(&tiny, optimizer);
    caught_start();
    return 0;
}

static int open_adagrad(void **state) { return open_with(OPT_ADAGRAD); }
static int open_sgd(void **state) { return open_with(OPT_SGD); }
static int open_rowwise(void **state) { return open_with(OPT_ROWWISE_ADAGRAD); }

static int close_run(void **state)
{
    caught_stop();
    tiny_run_close(&tiny);
    return mem_live() == live_before ? 0 : -1;
}

static struct rundir *open_run(enum rundir_need need)
{
    struct rundir *r = NULL;
    assert_int_equal(rundir_open(tiny.run, NULL, 0, need, &r), ST_OK);
    assert_int_equal(caught_lines, 0);
    return r;
}

/* --- reading ---------------------------------------------------------------------------------- */

static void every_row_and_weight_is_the_one_that_was_written(void **state)
{
    struct rundir *r = open_run(RUNDIR_STATE);
    uint32_t D = r->model->dim, K = tiny.state;
    for (uint32_t t = 0; t < TINY_TABLES; t++)
        for (uint64_t row = 0; row < r->config->model.tables[t]; row++) {
            const float *want = tiny.table[t] + row * (D + K);
            assert_memory_equal(rundir_row(r->table[t], row), want, D * sizeof(float));
            assert_memory_equal(rundir_row(r->table_state[t], row), want + D, K * sizeof(float));
        }
    size_t bytes = r->model->n_params * sizeof(float);
    assert_memory_equal(r->params, tiny.params, bytes);
    assert_memory_equal(r->dense_state, tiny.dense_state, bytes);
    assert_int_equal(r->iterations, TINY_ITERATIONS);
    assert_int_equal(rundir_rows(r), 7 + 40 + 3);
    rundir_close(r);
}

static void settings_go_over_the_configuration_of_the_run(void **state)
{
    const char *set[] = {"cluster.threads=3"};
    struct rundir *r = NULL;
    assert_int_equal(rundir_open(tiny.run, set, 1, RUNDIR_WEIGHTS, &r), ST_OK);
    assert_int_equal(r->config->cluster.threads, 3);
    rundir_close(r);
}

static void state_is_not_asked_for_where_weights_are_enough(void **state)
{
    assert_int_equal(unlink(tiny_run_path(&tiny, "final.state.safetensors")), 0);
    struct rundir *r = open_run(RUNDIR_WEIGHTS);
    assert_null(r->state);
    assert_null(r->dense_state);
    rundir_close(r);
}

static void sgd_has_no_state_to_ask_for(void **state)
{
    struct rundir *r = open_run(RUNDIR_STATE);
    assert_null(r->state);
    rundir_close(r);
}

/* --- what is wrong is named ------------------------------------------------------------------- */

static void assert_refused(enum st want, const char *fragment)
{
    struct rundir *untouched = (struct rundir *)&tiny, *r = untouched;
    size_t live = mem_live();
    caught_reset();
    assert_int_equal(rundir_open(tiny.run, NULL, 0, RUNDIR_STATE, &r), want);
    if (strstr(caught_line, fragment) == NULL)
        fail_msg("'%s' is not in: %s", fragment, caught_line);
    assert_int_equal(caught_lines, 1);
    assert_ptr_equal(r, untouched);
    assert_int_equal(mem_live(), live);
}

static void a_missing_file_is_named(void **state)
{
    static const char *const NAMES[] = {"final.state.safetensors", "final.safetensors",
                                        "model.json", "config.yaml"};
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++) {
        assert_int_equal(unlink(tiny_run_path(&tiny, NAMES[i])), 0);
        assert_refused(ST_NOINPUT, NAMES[i]);
    }
}

static void a_directory_that_is_none_is_named(void **state)
{
    struct rundir *r;
    assert_int_equal(rundir_open("/nowhere/at/all", NULL, 0, RUNDIR_STATE, &r), ST_NOINPUT);
    assert_non_null(strstr(caught_line, "/nowhere/at/all: No such file or directory"));
    assert_int_equal(rundir_open(tiny_run_path(&tiny, "config.yaml"), NULL, 0, RUNDIR_STATE, &r),
                     ST_NOINPUT);
    assert_non_null(strstr(caught_line, "is not a directory"));
}

static void a_tensor_of_another_dim_is_named(void **state)
{
    tiny_run_weights(&tiny, 0, (struct tiny_fault){.dim = 8});
    assert_refused(ST_DATA, "final.safetensors: tensor emb_l.0.weight has shape [7, 8], but the "
                            "configuration asks for [7, 4]");
}

static void a_table_of_other_rows_is_named(void **state)
{
    tiny_run_weights(&tiny, 0, (struct tiny_fault){.rows_of_1 = 41});
    assert_refused(ST_DATA, "tensor emb_l.1.weight has shape [41, 4], but the configuration asks "
                            "for [40, 4]");
}

static void state_of_other_rows_is_named(void **state)
{
    tiny_run_weights(&tiny, 1, (struct tiny_fault){.rows_of_1 = 39});
    assert_refused(ST_DATA, "final.state.safetensors: tensor emb_l.1.weight.state has shape "
                            "[39, 4]");
}

static void a_tensor_that_is_missing_is_named(void **state)
{
    tiny_run_weights(&tiny, 0, (struct tiny_fault){.leave_out = "emb_l.2.weight"});
    assert_refused(ST_DATA, "tensor emb_l.2.weight is missing");
    tiny_run_weights(&tiny, 0, (struct tiny_fault){.leave_out = "top_l.2.bias"});
    assert_refused(ST_DATA, "tensor top_l.2.bias is missing");
}

static void a_tensor_too_many_is_refused(void **state)
{
    tiny_run_weights(&tiny, 0, (struct tiny_fault){.add = "emb_l.3.weight"});
    assert_refused(ST_DATA, "holds 12 tensors, but the model has 11");
}

static void a_dense_weight_that_is_no_number_is_named(void **state)
{
    float *w = &tiny.params[tiny.model->tensor[1].offset + 2];
    uint32_t nan = 0x7fc00000;
    memcpy(w, &nan, sizeof(nan));
    tiny_run_weights(&tiny, 0, (struct tiny_fault){0});
    assert_refused(ST_DATA, "tensor bot_l.0.bias: value 2 is not finite");
}

static void a_weight_file_cut_short_is_refused(void **state)
{
    tiny_run_cut(&tiny, "final.safetensors", 1200);
    assert_refused(ST_DATA, "final.safetensors");
}

static void a_model_json_of_another_run_is_named(void **state)
{
    static const struct { const char *from, *to, *fragment; } CASES[] = {
        {"dim: 4, bottom_mlp: [5, 4]", "dim: 6, bottom_mlp: [5, 6]",
         "model.json: dim is 4, but the configuration has 6"},
        {"[7, 40, 3]", "[7, 41, 3]",
         "tables is [7,40,3], but the configuration has [7,41,3]"},
        {"top_mlp: [6, 1]", "top_mlp: [7, 1]", "top_mlp is [6,1]"},
        {"[5, 4]", "[4]", "bottom_mlp is [5,4]"},
        {"dense_features: 3", "dense_features: 2", "dense_features is 3"},
        {"adagrad", "sgd", "optimizer is \"adagrad\""},
        {"seed: 5", "seed: 6", "seed is 5"},
    };
    char whole[1024] = "", changed[1100];
    FILE *f = fopen(tiny_run_path(&tiny, "config.yaml"), "r");
    assert_non_null(f);
    whole[fread(whole, 1, sizeof(whole) - 1, f)] = '\0';
    fclose(f);
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const char *at = strstr(whole, CASES[i].from);
        assert_non_null(at);
        snprintf(changed, sizeof(changed), "%.*s%s%s", (int)(at - whole), whole, CASES[i].to,
                 at + strlen(CASES[i].from));
        tiny_run_text(&tiny, "config.yaml", changed);
        assert_refused(ST_DATA, CASES[i].fragment);
    }
}

static void a_damaged_model_json_is_refused(void **state)
{
    tiny_run_cut(&tiny, "model.json", 60);
    assert_refused(ST_DATA, "model.json: damaged: line");
    tiny_run_text(&tiny, "model.json", "{\"model\": \"dlrm\"}");
    assert_refused(ST_DATA, "model.json: has no \"dim\"");
    tiny_run_text(&tiny, "model.json", "[1, 2]");
    assert_refused(ST_DATA, "model.json: has no \"model\"");
}

static void an_allocation_that_fails_leaves_nothing_behind(void **state)
{
    size_t live = mem_live(), injected = 0;
    for (size_t nth = 1;; nth++) {
        struct rundir *untouched = (struct rundir *)&tiny, *r = untouched;
        mem_fail_at(nth);
        enum st st = rundir_open(tiny.run, NULL, 0, RUNDIR_STATE, &r);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            rundir_close(r);
            break;
        }
        injected++;
        assert_int_equal(st, ST_NOMEM);
        assert_ptr_equal(r, untouched);
        assert_int_equal(mem_live(), live);
    }
    /* At least: rundir, model, 2 x (reader, tables, dense); the rest is the readers' own. */
    assert_true(injected >= 8);
}

/* --- digest ----------------------------------------------------------------------------------- */

/* What the servers of a job with `n_shards` shards would say, and the dense part by hand. */
static struct digest digest_of_job(uint32_t n_shards)
{
    struct digest sum = {0};
    const struct config *c = tiny.config;
    uint32_t width = c->model.dim + tiny.state;
    for (uint32_t shard = 0; shard < n_shards; shard++) {
        struct store *s;
        struct store_cfg cfg = {shard, n_shards, TINY_TABLES, c->model.dim, tiny.state,
                                c->model.tables, c->train.seed};
        assert_int_equal(store_open(&cfg, &s), ST_OK);
        for (uint32_t t = 0; t < TINY_TABLES; t++)
            for (uint64_t row = 0; row < c->model.tables[t]; row += 3) /* the trained ones */
                if (store_has(s, row_id(t, row)))
                    assert_int_equal(store_put(s, row_id(t, row), 0, 1,
                                               (uint8_t *)(tiny.table[t] + row * width)), ST_OK);
        digest_merge(&sum, store_digest(s));
        store_close(s);
    }
    for (uint32_t i = 0; i < tiny.model->n_tensors; i++) {
        const struct model_tensor *m = &tiny.model->tensor[i];
        size_t bytes = (size_t)m->rows * m->cols * sizeof(float);
        digest_add(&sum, UINT64_C(1) << 63 | i, tiny.params + m->offset, bytes);
        if (tiny.state > 0)
            digest_add(&sum, UINT64_C(3) << 62 | i, tiny.dense_state + m->offset, bytes);
    }
    return sum;
}

static struct digest digest_of_files(void)
{
    struct digest d = {0};
    struct rundir *r = open_run(RUNDIR_STATE);
    assert_int_equal(rundir_digest(r, NULL, NULL, &d), ST_OK);
    rundir_close(r);
    return d;
}

static void the_digest_of_the_files_is_the_digest_of_the_job(void **state)
{
    struct digest files = digest_of_files(), job = digest_of_job(3);
    assert_memory_equal(&files, &job, sizeof(job));
    assert_true(files.lo != 0 && files.hi != 0);
}

static void the_digest_sees_one_changed_bit_anywhere(void **state)
{
    uint32_t width = tiny.config->model.dim + tiny.state;
    float *place[] = {
        &tiny.table[1][39 * width],                              /* value of the last row    */
        &tiny.table[2][width - 1],                               /* last state of a row      */
        &tiny.params[tiny.model->tensor[2].offset],
        &tiny.dense_state[tiny.model->tensor[7].offset],
    };
    struct digest before = digest_of_files();
    for (size_t i = 0; i < sizeof(place) / sizeof(place[0]); i++) {
        uint32_t bits;
        memcpy(&bits, place[i], sizeof(bits));
        bits ^= 1;
        memcpy(place[i], &bits, sizeof(bits));
        tiny_run_weights(&tiny, 0, (struct tiny_fault){0});
        tiny_run_weights(&tiny, 1, (struct tiny_fault){0});
        struct digest after = digest_of_files();
        assert_memory_not_equal(&after, &before, sizeof(after));
        before = after;
    }
}

#define WITH(setup, name) cmocka_unit_test_setup_teardown(name, setup, close_run)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH(open_adagrad, every_row_and_weight_is_the_one_that_was_written),
        WITH(open_adagrad, settings_go_over_the_configuration_of_the_run),
        WITH(open_adagrad, state_is_not_asked_for_where_weights_are_enough),
        WITH(open_sgd, sgd_has_no_state_to_ask_for),
        WITH(open_adagrad, a_missing_file_is_named),
        WITH(open_adagrad, a_directory_that_is_none_is_named),
        WITH(open_adagrad, a_tensor_of_another_dim_is_named),
        WITH(open_adagrad, a_table_of_other_rows_is_named),
        WITH(open_adagrad, state_of_other_rows_is_named),
        WITH(open_adagrad, a_tensor_that_is_missing_is_named),
        WITH(open_adagrad, a_tensor_too_many_is_refused),
        WITH(open_adagrad, a_dense_weight_that_is_no_number_is_named),
        WITH(open_adagrad, a_weight_file_cut_short_is_refused),
        WITH(open_adagrad, a_model_json_of_another_run_is_named),
        WITH(open_adagrad, a_damaged_model_json_is_refused),
        WITH(open_adagrad, an_allocation_that_fails_leaves_nothing_behind),
        WITH(open_adagrad, the_digest_of_the_files_is_the_digest_of_the_job),
        WITH(open_rowwise, the_digest_of_the_files_is_the_digest_of_the_job),
        WITH(open_sgd, the_digest_of_the_files_is_the_digest_of_the_job),
        WITH(open_adagrad, the_digest_sees_one_changed_bit_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
