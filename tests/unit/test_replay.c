/* Whole runs of the program, checked from outside: the initial weights, the losses and the final
 * weights that a run leaves behind are compared with a replay of the same data in double
 * (tests/support/reference_dlrm.h), which knows of no caches, owners, slices or servers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/reference_dlrm.h"
#include "tests/support/run_files.h"

enum { DENSE = 13, F = 26, D = 4, B = 64 };
static const char SAMPLE[] = "data/sample/day_0.tsv";
static const uint64_t TABLES[F] = {300, 200, 250, 150, 300, 3, 200, 100, 62, 300, 300, 250, 10,
                                   120, 180, 128, 4, 90, 14, 300, 200, 250, 210, 180, 104, 35};
static const uint32_t BOTTOM[] = {DENSE, 12, D}, TOP[] = {D + F * (F + 1) / 2, 16, 1};
static const struct ref_shape SHAPE = {DENSE, F, D, 2, 2, BOTTOM, TOP};

/* One run: what is asked for, and how it is cut up, which must not matter. */
struct run {
    const char *optimizer;
    enum optimizer kind;
    double learning_rate;
    size_t train_rows, iterations, epochs; /* iterations: also with epochs, then their number */
    const char *cluster;                   /* keys of cluster and oracle                      */
};

struct outcome {
    char dir[64];
    struct weights_file *init, *final, *state;
    double *loss;
    float *label, *dense;                  /* [train_rows], [train_rows][DENSE]               */
    uint64_t *row;                         /* [train_rows][F]                                 */
};

static void *allocate(size_t n, size_t size)
{
    void *p = calloc(n, size);
    assert_non_null(p);
    return p;
}

/* --- the run -------------------------------------------------------------------------------- */

static void write_config(const struct run *r, const char *path)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "data: {format: criteo_tsv, path: %s, train_rows: %zu}\n", SAMPLE, r->train_rows);
    fprintf(f, "model: {kind: dlrm, dim: %d, bottom_mlp: [%u, %u], top_mlp: [%u, %u], tables: [",
            D, BOTTOM[1], BOTTOM[2], TOP[1], TOP[2]);
    for (int t = 0; t < F; t++) fprintf(f, "%s%d", t > 0 ? ", " : "", (int)TABLES[t]);
    fprintf(f, "]}\ntrain: {global_batch: %d, slices: 8, optimizer: %s, learning_rate: %g, "
            "epsilon: 1.0e-6, seed: 11, %s: %zu}\n", B, r->optimizer, r->learning_rate,
            r->epochs > 0 ? "epochs" : "iterations", r->epochs > 0 ? r->epochs : r->iterations);
    fprintf(f, "%s\nrun: {dir: unused, save_initial: true, save_final: true}\n", r->cluster);
    assert_int_equal(fclose(f), 0);
}

static void train(const struct run *r, struct outcome *o)
{
    char config[128], run_dir[128];
    *o = (struct outcome){0};
    snprintf(o->dir, sizeof(o->dir), "/tmp/chanter-replay-XXXXXX");
    assert_non_null(mkdtemp(o->dir));
    snprintf(config, sizeof(config), "%s/config.yaml", o->dir);
    snprintf(run_dir, sizeof(run_dir), "%s/run", o->dir);
    write_config(r, config);
    const char *argv[] = {"", "train", config, "--quiet", "--run-dir", run_dir, NULL};
    assert_int_equal(run_program("chanter", argv), 0);
    o->init = weights_open(run_dir, "init");
    o->final = weights_open(run_dir, "final");
    assert_int_equal(weights_count(o->init), F + 8);
    assert_int_equal(weights_count(o->final), F + 8);
    if (r->kind != OPT_SGD) o->state = weights_open(run_dir, "final.state");
    o->loss = allocate(r->iterations + 1, sizeof(double));
    assert_int_equal(read_losses(run_dir, o->loss, r->iterations + 1), r->iterations);
    o->label = allocate(r->train_rows, sizeof(float));
    o->dense = allocate(r->train_rows * DENSE, sizeof(float));
    o->row = allocate(r->train_rows * F, sizeof(uint64_t));
    read_clicks(SAMPLE, r->train_rows, TABLES, o->label, o->dense, o->row);
}

static void outcome_close(struct outcome *o)
{
    static const char *const FILES[] = {
        "config.yaml", "run/config.yaml", "run/model.json", "run/metrics.jsonl",
        "run/init.safetensors", "run/final.safetensors", "run/final.state.safetensors", "run", ""};
    char path[128];
    weights_close(o->init);
    weights_close(o->final);
    if (o->state != NULL) weights_close(o->state);
    free(o->loss);
    free(o->label);
    free(o->dense);
    free(o->row);
    for (size_t i = 0; i < sizeof(FILES) / sizeof(FILES[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", o->dir, FILES[i]);
        remove(path);
    }
}

/* --- the replay ----------------------------------------------------------------------------- */

/* facebookresearch/dlrm counts the activations between layers, too: 0, 2, 4, ... */
static void dense_name(uint32_t k, char name[48])
{
    uint32_t layer = k / 2;
    snprintf(name, 48, "%s_l.%u.%s", layer < SHAPE.n_bottom ? "bot" : "top",
             2 * (layer < SHAPE.n_bottom ? layer : layer - SHAPE.n_bottom),
             k % 2 == 0 ? "weight" : "bias");
}

static struct ref_trainer *replay_open(const struct run *r, const struct outcome *o)
{
    char name[48];
    struct ref_trainer *ref = ref_trainer_open(&SHAPE, TABLES, r->kind, r->learning_rate, 1e-6);
    for (uint32_t k = 0; k < 2 * (SHAPE.n_bottom + SHAPE.n_top); k++) {
        size_t at, n = ref_tensor(&SHAPE, k, &at);
        dense_name(k, name);
        const float *w = weights_find(o->init, name, n);
        for (size_t i = 0; i < n; i++) ref->params[at + i] = (double)w[i];
    }
    for (uint32_t t = 0; t < F; t++) {
        snprintf(name, sizeof(name), "emb_l.%u.weight", t);
        const float *w = weights_find(o->init, name, TABLES[t] * D);
        for (size_t i = 0; i < TABLES[t] * D; i++) ref->table[t][i] = (double)w[i];
    }
    return ref;
}

/* Losses one by one; samples go round and round. With epochs, the last batch has what is left. */
static void replay(const struct run *r, const struct outcome *o, struct ref_trainer *ref)
{
    float *label = allocate(B, sizeof(float)), *dense = allocate(B * DENSE, sizeof(float));
    uint64_t *row = allocate(B * F, sizeof(uint64_t));
    size_t left = r->epochs > 0 ? r->epochs * r->train_rows : r->iterations * B, at = 0;
    for (size_t i = 0; i < r->iterations; i++) {
        uint32_t n = 0;
        for (; n < B && left > 0; n++, left--, at = (at + 1) % r->train_rows) {
            label[n] = o->label[at];
            memcpy(dense + n * DENSE, o->dense + at * DENSE, DENSE * sizeof(float));
            memcpy(row + n * F, o->row + at * F, F * sizeof(uint64_t));
        }
        double want = ref_trainer_step(ref, n, dense, label, row);
        if (!(fabs(o->loss[i] - want) <= 1e-4 * want))
            fail_msg("%s: iteration %zu: loss %.9g, the replay says %.9g", r->optimizer, i,
                     o->loss[i], want);
    }
    assert_int_equal(left, 0);
    free(label);
    free(dense);
    free(row);
}

/* --- comparing ------------------------------------------------------------------------------ */

/* Has the run's vector changed as the replay's? Relative to the change itself, but for the spacing
 * of floats of that size, of which each iteration may lose one or two. */
static void check_change(const float *from, const float *got, const double *want, size_t n,
                         const char *what, size_t which)
{
    double error = 0, change = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        double start = from == NULL ? 0 : (double)from[i];
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        change += (want[i] - start) * (want[i] - start);
        size += want[i] * want[i];
    }
    if (!(sqrt(error) <= 2e-3 * sqrt(change) + 1e-6 * sqrt(size)))
        fail_msg("%s %zu: off by %.3g after a change of %.3g", what, which, sqrt(error),
                 sqrt(change));
}

static void check_dense(const struct outcome *o, const struct ref_trainer *ref)
{
    char name[64];
    for (uint32_t k = 0; k < 2 * (SHAPE.n_bottom + SHAPE.n_top); k++) {
        size_t at, n = ref_tensor(&SHAPE, k, &at);
        dense_name(k, name);
        check_change(weights_find(o->init, name, n), weights_find(o->final, name, n),
                     ref->params + at, n, name, k);
        if (o->state == NULL) continue;
        strcat(name, ".state");
        check_change(NULL, weights_find(o->state, name, n), ref->state + at, n, name, k);
    }
}

/* Row by row: one lost gradient of one rare row must not drown in its table. */
static void check_table(const struct run *r, const struct outcome *o,
                        const struct ref_trainer *ref, uint32_t t, const uint8_t *used)
{
    char name[64];
    size_t n = TABLES[t], K = r->kind == OPT_ROWWISE_ADAGRAD ? 1 : D;
    snprintf(name, sizeof(name), "emb_l.%u.weight", t);
    const float *init = weights_find(o->init, name, n * D);
    const float *final = weights_find(o->final, name, n * D);
    strcat(name, ".state");
    const float *state = o->state == NULL ? NULL : weights_find(o->state, name, n * K);
    for (size_t i = 0; i < n; i++) {
        if (!used[i] && memcmp(init + i * D, final + i * D, D * sizeof(float)) != 0)
            fail_msg("%s: row %zu is in no sample and has changed", name, i);
        check_change(init + i * D, final + i * D, ref->table[t] + i * D, D, name, i);
        if (state != NULL)
            check_change(NULL, state + i * K, ref->table_state[t] + i * K, K, name, i);
    }
}

static void check_tables(const struct run *r, const struct outcome *o,
                         const struct ref_trainer *ref)
{
    size_t n_used = 0, n_rows = 0, n = r->iterations * B;
    if (n > r->train_rows) n = r->train_rows;
    for (uint32_t t = 0; t < F; t++) {
        uint8_t *used = allocate(TABLES[t], 1);
        for (size_t b = 0; b < n; b++) used[o->row[b * F + t]] = 1;
        check_table(r, o, ref, t, used);
        for (size_t i = 0; i < TABLES[t]; i++) n_used += used[i];
        n_rows += TABLES[t];
        free(used);
    }
    assert_in_range(n_used, n_rows / 4, n_rows - 1); /* there are both kinds of rows */
}

static void follow(const struct run *r)
{
    struct outcome o;
    train(r, &o);
    struct ref_trainer *ref = replay_open(r, &o);
    replay(r, &o, ref);
    check_dense(&o, ref);
    check_tables(r, &o, ref);
    ref_trainer_close(ref);
    outcome_close(&o);
}

/* --- runs ----------------------------------------------------------------------------------- */

static void sgd_is_the_replay(void **state)
{
    follow(&(struct run){"sgd", OPT_SGD, 0.2, 5000, 100, 0,
                         "oracle: {lookahead: 5}\ncluster: {trainers: 2, servers: 2}"});
}

static void adagrad_is_the_replay(void **state)
{
    follow(&(struct run){"adagrad", OPT_ADAGRAD, 0.02, 5000, 100, 0,
                         "oracle: {lookahead: 20}\ncluster: {trainers: 2, servers: 1, "
                         "cache_rows: 900}"});
}

static void rowwise_adagrad_is_the_replay(void **state)
{
    follow(&(struct run){"rowwise_adagrad", OPT_ROWWISE_ADAGRAD, 0.02, 5000, 100, 0,
                         "oracle: {lookahead: 2}\ncluster: {trainers: 3, servers: 2}"});
}

/* Two passes over 980 samples in batches of 64: the last has 40, of whose 5 slices the trainers get
 * 2, 3 and none. */
static void the_short_batch_at_the_end_of_the_epochs_counts(void **state)
{
    follow(&(struct run){"adagrad", OPT_ADAGRAD, 0.02, 980, 31, 2,
                         "oracle: {lookahead: 3}\ncluster: {trainers: 3, servers: 1}"});
}

static void the_baseline_without_lookahead_is_the_replay(void **state)
{
    follow(&(struct run){"adagrad", OPT_ADAGRAD, 0.02, 1500, 40, 0,
                         "oracle: {lookahead: 0}\ncluster: {trainers: 2, servers: 2}"});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sgd_is_the_replay),
        cmocka_unit_test(adagrad_is_the_replay),
        cmocka_unit_test(rowwise_adagrad_is_the_replay),
        cmocka_unit_test(the_short_batch_at_the_end_of_the_epochs_counts),
        cmocka_unit_test(the_baseline_without_lookahead_is_the_replay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
