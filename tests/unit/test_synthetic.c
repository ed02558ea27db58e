/* The synthetic click log: is the same sample always the same, and can the planted model be found
 * again? Its ids are tested in test_synthetic_law.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <cmocka.h>

#include "base/mem.h"
#include "base/row.h"
#include "data/auc.h"
#include "data/source.h"
#include "data/synthetic.h"
#include "tests/support/data_fixture.h"

enum { F = FIXTURE_TABLES, ND = FIXTURE_DENSE, ROWS = 10000 };

/* Published numbers of ids per column of Criteo Kaggle. */
static const uint64_t KAGGLE[F] = {1460,   583,  10131227, 2202608, 305,  24,      12517,
                                   633,    3,    93145,    5683,    8351593, 3194, 27,
                                   14992,  5461306, 10,    5652,    2173, 4,       7046547,
                                   18,     15,   286181,   105,     142572};

static void use_kaggle_tables(struct fixture *f)
{
    f->cfg.data.format = DATA_SYNTHETIC;
    f->cfg.data.rows = ROWS;
    for (int t = 0; t < F; t++) f->tables[t] = KAGGLE[t];
}

static void cap_tables(struct fixture *f, uint64_t rows)
{
    for (int t = 0; t < F; t++)
        if (f->tables[t] > rows) f->tables[t] = rows;
}

static struct synthetic *open_synthetic(const struct fixture *f)
{
    struct synthetic *s;
    assert_int_equal(synthetic_open(&f->cfg, &s), ST_OK);
    return s;
}

/* --- the same sample is always the same ------------------------------------------------------ */

static void a_sample_depends_on_seed_and_index_only(void **state)
{
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct synthetic *a = open_synthetic(f), *b = open_synthetic(f);
    f->cfg.data.seed = 2;
    struct synthetic *other = open_synthetic(f);
    unsigned same_id = 0;
    for (uint64_t k = 0; k < 500; k++) {
        uint64_t i = k * 7919 % 500 + (k % 2) * ((uint64_t)1 << 40);
        struct synthetic_sample x, y, z;
        synthetic_sample(b, k, &y);           /* b has seen other samples before */
        synthetic_sample(a, i, &x);
        synthetic_sample(b, i, &y);
        synthetic_sample(other, i, &z);
        assert_memory_equal(x.dense, y.dense, ND * sizeof(*x.dense));
        assert_memory_equal(x.id, y.id, F * sizeof(*x.id));
        assert_true(x.logit == y.logit && x.label == y.label);
        assert_true(synthetic_logit(a, i) == y.logit);
        same_id += y.id[2] == z.id[2];
    }
    assert_true(same_id < 100); /* only the empty ones, and chance */
    synthetic_close(a);
    synthetic_close(b);
    synthetic_close(other);
}

static void the_text_it_writes_reads_as_the_stream(void **state)
{
    enum { N = 3000 };
    struct fixture *f = *state;
    struct samples stream, text;
    char path[128];
    uint32_t rows;
    use_kaggle_tables(f);
    f->cfg.data.rows = N;
    assert_int_equal(samples_open(N + 500, ND, F, &stream), ST_OK);
    assert_int_equal(samples_open(N + 500, ND, F, &text), ST_OK);
    assert_int_equal(fixture_read_all(f, 0, &stream, &rows), ST_OK);
    assert_int_equal(rows, N);
    snprintf(path, sizeof(path), "%s/s.tsv", f->dir);
    assert_int_equal(synth_write_tsv(&f->cfg, path, N), ST_OK);
    f->cfg.data.format = DATA_CRITEO_TSV;
    f->cfg.data.path = path;
    assert_int_equal(fixture_read_all(f, 0, &text, &rows), ST_OK);
    assert_int_equal(rows, N);
    assert_memory_equal(stream.dense, text.dense, N * ND * sizeof(float));
    assert_memory_equal(stream.label, text.label, N * sizeof(float));
    assert_memory_equal(stream.id, text.id, N * F * sizeof(uint64_t));
    samples_close(&stream);
    samples_close(&text);
}

static void empty_fields_are_written_empty(void **state)
{
    struct fixture *f = *state;
    char path[128];
    size_t n, tabs = 0, empty_pairs = 0;
    use_kaggle_tables(f);
    snprintf(path, sizeof(path), "%s/s.tsv", f->dir);
    assert_int_equal(synth_write_tsv(&f->cfg, path, 1000), ST_OK);
    char *text = fixture_read(path, &n);
    for (size_t i = 0; i < n; i++) {
        tabs += text[i] == '\t';
        empty_pairs += text[i] == '\t' && (text[i + 1] == '\t' || text[i + 1] == '\n');
    }
    assert_int_equal(tabs, 39 * 1000);
    assert_true(fabs((double)empty_pairs / 1000 - 5.9) < 0.4); /* shares above: 2.97 + 2.92 */
    free(text);
    enum st st = synth_write_tsv(&f->cfg, "/no/such/directory/x", 1);
    fixture_assert_failed(f, st, ST_CANTCREATE, "/no/such/directory/x: cannot create");
}

static void held_out_rows_lie_behind_the_training_rows(void **state)
{
    struct fixture *f = *state;
    struct samples all, part;
    struct source *s;
    uint32_t rows;
    use_kaggle_tables(f);
    f->cfg.data.rows = 2000;
    assert_int_equal(samples_open(2500, ND, F, &all), ST_OK);
    assert_int_equal(samples_open(2500, ND, F, &part), ST_OK);
    assert_int_equal(fixture_read_all(f, 0, &all, &rows), ST_OK);
    f->cfg.data.train_rows = 1500;
    assert_int_equal(fixture_read_all(f, 0, &part, &rows), ST_OK);
    assert_int_equal(rows, 1500);
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 500);
    assert_memory_equal(part.id, all.id + 1500 * F, 500 * F * sizeof(uint64_t));
    f->cfg.data.train_rows = 0;        /* all are trained on: held-out ones lie behind them */
    f->cfg.data.eval_rows = 700;
    assert_int_equal(fixture_read_all(f, 1, &part, &rows), ST_OK);
    assert_int_equal(rows, 700);
    assert_memory_not_equal(part.id, all.id, 700 * F * sizeof(uint64_t));

    f->cfg.data.eval_rows = 0;
    fixture_assert_failed(f, source_open(&f->cfg, 1, &s), ST_DATA, "nothing is held out");
    f->cfg.data.train_rows = 2001;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_DATA,
                          "data.train_rows is 2001, but data.rows only 2000");
    f->cfg.data.train_rows = 0;
    f->cfg.data.rows = 0;
    fixture_assert_failed(f, source_open(&f->cfg, 0, &s), ST_DATA, "0 samples; need >= 1");
    f->cfg.data.eval_path = f->dir;
    fixture_assert_failed(f, source_open(&f->cfg, 1, &s), ST_CONFIG, "data.eval_path");
    samples_close(&all);
    samples_close(&part);
}

static void any_number_of_columns_and_any_table_size_will_do(void **state)
{
    static const struct { uint32_t dense, tables; uint64_t rows; } CASES[] = {
        {1, 1, 1}, {2, 3, 2}, {13, 26, 10}, {30, 60, 77}, {5, 27, (uint64_t)1 << 33},
    };
    struct fixture *f = *state;
    static uint64_t tables[60];
    f->cfg.data.format = DATA_SYNTHETIC;
    f->cfg.data.rows = 3000;
    f->cfg.model.tables = tables;
    for (size_t c = 0; c < sizeof(CASES) / sizeof(CASES[0]); c++) {
        f->cfg.model.dense_features = CASES[c].dense;
        f->cfg.model.n_tables = CASES[c].tables;
        for (int t = 0; t < 60; t++) tables[t] = CASES[c].rows;
        struct synthetic *s = open_synthetic(f);
        unsigned clicks = 0;
        for (uint64_t i = 0; i < 3000; i++) {
            struct synthetic_sample y;
            synthetic_sample(s, i, &y);
            for (uint32_t t = 0; t < CASES[c].tables; t++) assert_true(y.id[t] < CASES[c].rows);
            clicks += y.label;
        }
        assert_true(clicks > 600 && clicks < 900);
        synthetic_close(s);
    }
}

/* --- the planted model ----------------------------------------------------------------------- */

static void clicks_follow_the_planted_logit(void **state)
{
    enum { N = 60000, BINS = 12 };
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct synthetic *s = open_synthetic(f);
    double p_sum[BINS] = {0}, variance[BINS] = {0}, clicks[BINS] = {0}, all = 0;
    for (uint64_t i = 0; i < N; i++) {
        struct synthetic_sample y;
        synthetic_sample(s, i, &y);
        double p = 1.0 / (1.0 + exp(-y.logit));
        int bin = (int)(p * BINS);
        p_sum[bin] += p;
        variance[bin] += p * (1.0 - p);
        clicks[bin] += y.label;
        all += y.label;
    }
    assert_true(fabs(all / N - 0.25) < 0.02);
    for (int b = 0; b < BINS; b++) /* 4 deviations of a sum of independent draws */
        assert_true(fabs(clicks[b] - p_sum[b]) <= 4.0 * sqrt(variance[b]) + 1e-9);
    synthetic_close(s);
}

static void the_best_auc_is_of_the_same_size_for_all_seeds_and_tables(void **state)
{
    struct fixture *f = *state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        double logloss, auc;
        use_kaggle_tables(f);
        if (seed % 2 == 0) cap_tables(f, 1000);
        f->cfg.data.seed = seed;
        f->cfg.data.eval_rows = 40000;
        assert_int_equal(synthetic_best(&f->cfg, 1, &logloss, &auc), ST_OK);
        assert_true(auc > 0.78 && auc < 0.83);
        assert_true(logloss > 0.40 && logloss < 0.48); /* always 25 %: 0.562 */
    }
}

static void the_best_is_what_the_planted_logits_give_on_the_held_out_rows(void **state)
{
    enum { N = 20000 };
    static float logit[N], other[N], label[N];
    struct fixture *f = *state;
    double logloss, auc, own_auc;
    use_kaggle_tables(f);
    f->cfg.data.eval_rows = N;
    assert_int_equal(synthetic_best(&f->cfg, 1, &logloss, &auc), ST_OK);
    struct synthetic *s = open_synthetic(f);
    struct source *src;
    struct samples held;
    uint32_t got;
    assert_int_equal(samples_open(N, ND, F, &held), ST_OK);
    assert_int_equal(source_open(&f->cfg, 1, &src), ST_OK);
    assert_int_equal(source_read(src, &held, 0, N, &got), ST_OK);
    assert_int_equal(got, N);
    for (size_t i = 0; i < N; i++) logit[i] = (float)synthetic_logit(s, ROWS + i);
    memcpy(label, held.label, sizeof(label));
    assert_int_equal(auc_exact(logit, label, N, &own_auc), ST_OK);
    assert_true(own_auc == auc && auc_logloss(logit, label, N) == logloss);
    for (size_t i = 0; i < N; i++) other[i] = logit[i] + 0.2f;
    assert_true(auc_logloss(other, label, N) > logloss);
    for (size_t i = 0; i < N; i++) other[i] = logit[i] * 1.2f;
    assert_true(auc_logloss(other, label, N) > logloss);
    for (size_t i = 0; i < N; i++) other[i] = logit[i] * 0.8f;
    assert_true(auc_logloss(other, label, N) > logloss);
    source_close(src);
    samples_close(&held);
    synthetic_close(s);
}

/* Logistic regression with Adagrad, one pass over what source_read gives; scores of the held-out
 * rows. weight and g2: [ND + 1 + sum of tables], table t at offset[t]. */
static void learn(struct source *s, struct samples *batch, const size_t *offset, float *weight,
                  float *g2, int update, float *score, float *label)
{
    uint32_t got = 1, n = 0;
    for (; got > 0; n += got) {
        assert_int_equal(source_read(s, batch, 0, 1000, &got), ST_OK);
        for (uint32_t i = 0; i < got; i++) {
            size_t at[ND + 1 + F];
            float x[ND + 1 + F];
            double z = 0.0;
            const uint64_t *id = batch->id + (size_t)i * F;
            for (size_t k = 0; k < ND + 1 + F; k++) {
                at[k] = k <= ND ? k : offset[k - ND - 1] + row_number(id[k - ND - 1]);
                x[k] = k < ND ? batch->dense[i * ND + k] : 1.0f;
                z += (double)(weight[at[k]] * x[k]);
            }
            if (!update) {
                score[n + i] = (float)z;
                label[n + i] = batch->label[i];
                continue;
            }
            float residual = (float)(1.0 / (1.0 + exp(-z))) - batch->label[i];
            for (size_t k = 0; k < ND + 1 + F; k++) {
                float g = residual * x[k];
                g2[at[k]] += g * g;
                weight[at[k]] -= 0.03f * g / (sqrtf(g2[at[k]]) + 1e-3f);
            }
        }
    }
}

static void the_planted_model_can_be_learnt_from_the_samples(void **state)
{
    enum { TRAIN = 200000, HELD = 40000 };
    static float score[HELD], label[HELD];
    struct fixture *f = *state;
    use_kaggle_tables(f);
    cap_tables(f, 100000);
    f->cfg.data.rows = TRAIN;
    f->cfg.data.eval_rows = HELD;
    size_t offset[F], n = ND + 1;
    for (int t = 0; t < F; t++) {
        offset[t] = n;
        n += f->tables[t];
    }
    float *weight = calloc(n, sizeof(*weight)), *g2 = calloc(n, sizeof(*g2));
    struct samples batch;
    struct source *s;
    double logloss, best, auc;
    assert_int_equal(samples_open(1000, ND, F, &batch), ST_OK);
    assert_int_equal(source_open(&f->cfg, 0, &s), ST_OK);
    learn(s, &batch, offset, weight, g2, 1, NULL, NULL);
    source_close(s);
    assert_int_equal(source_open(&f->cfg, 1, &s), ST_OK);
    learn(s, &batch, offset, weight, g2, 0, score, label);
    source_close(s);
    assert_int_equal(auc_exact(score, label, HELD, &auc), ST_OK);
    assert_int_equal(synthetic_best(&f->cfg, 1, &logloss, &best), ST_OK);
    print_message("learnt AUC %.4f of %.4f\n", auc, best);
    assert_true(auc > 0.98 * best && auc < 1.005 * best);
    samples_close(&batch);
    free(weight);
    free(g2);
}

static void every_allocation_may_fail(void **state)
{
    struct fixture *f = *state;
    struct source *untouched = (struct source *)f, *s = untouched;
    unsigned injected = 0;
    size_t before = mem_live();
    use_kaggle_tables(f);
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = source_open(&f->cfg, 0, &s);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            source_close(s);
            break;
        }
        injected++;
        fixture_assert_failed(f, st, ST_NOMEM, "out of memory");
        assert_ptr_equal(s, untouched);
        assert_int_equal(mem_live(), before);
    }
    assert_int_equal(injected, 13); /* source 3, reader 1, synthetic 7, law 2 */
}

#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_sample_depends_on_seed_and_index_only),
        WITH_FIXTURE(the_text_it_writes_reads_as_the_stream),
        WITH_FIXTURE(empty_fields_are_written_empty),
        WITH_FIXTURE(held_out_rows_lie_behind_the_training_rows),
        WITH_FIXTURE(any_number_of_columns_and_any_table_size_will_do),
        WITH_FIXTURE(clicks_follow_the_planted_logit),
        WITH_FIXTURE(the_best_auc_is_of_the_same_size_for_all_seeds_and_tables),
        WITH_FIXTURE(the_best_is_what_the_planted_logits_give_on_the_held_out_rows),
        WITH_FIXTURE(the_planted_model_can_be_learnt_from_the_samples),
        WITH_FIXTURE(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
