/* The synthetic click log: is it as skewed, as incomplete and as nested as the measured one (Criteo
 * Kaggle: docs/data.md has the numbers), is the same sample always the same, and can the planted
 * model be found again? Set CHANTER_SLOW=1 for the growth check at full scale (20 s). */
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
#include "data/synthetic_law.h"
#include "tests/support/data_fixture.h"

enum { F = FIXTURE_TABLES, ND = FIXTURE_DENSE, ROWS = 10000 };

/* Published numbers of ids per column, and what the first 10,000 rows of the real file hold. */
static const struct {
    uint64_t rows;
    double missing, distinct, top; /* % of rows, ids (empty is one), % of rows of the top id */
} KAGGLE[F] = {
    {1460, 0, 175, 50.0},       {583, 0, 386, 12.3},        {10131227, 3.6, 5520, 4.7},
    {2202608, 3.6, 4032, 7.3},  {305, 0, 56, 66.6},         {24, 13.3, 7, 45.9},
    {12517, 0, 3184, 1.1},      {633, 0, 93, 58.9},         {3, 0, 3, 88.7},
    {93145, 0, 2986, 27.6},     {5683, 0, 2084, 2.0},       {8351593, 3.6, 5283, 4.7},
    {3194, 0, 1725, 2.2},       {27, 0, 24, 36.3},          {14992, 0, 2035, 1.9},
    {5461306, 3.6, 4723, 4.7},  {10, 0, 9, 43.0},           {5652, 0, 1149, 5.1},
    {2173, 45.0, 546, 33.1},    {4, 45.0, 3, 19.9},         {7046547, 3.6, 5036, 4.7},
    {18, 81.8, 7, 9.6},         {15, 0, 12, 45.1},          {286181, 3.6, 2524, 7.5},
    {105, 45.0, 39, 18.1},      {142572, 45.0, 1938, 4.5},
};

struct seen {                      /* counts per id of each table */
    uint32_t *count[F];
};

static struct seen seen_open(void)
{
    struct seen s;
    for (int t = 0; t < F; t++) {
        s.count[t] = calloc(KAGGLE[t].rows, sizeof(uint32_t));
        assert_non_null(s.count[t]);
    }
    return s;
}

static void seen_close(struct seen *s)
{
    for (int t = 0; t < F; t++) free(s->count[t]);
}

static void use_kaggle_tables(struct fixture *f)
{
    f->cfg.data.format = DATA_SYNTHETIC;
    f->cfg.data.rows = ROWS;
    for (int t = 0; t < F; t++) f->tables[t] = KAGGLE[t].rows;
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

/* Count the ids of samples [first, first + n); returns how many ids are met for the first time. */
static uint64_t count_ids(struct synthetic *s, struct seen *seen, uint64_t first, uint64_t n)
{
    uint64_t distinct = 0;
    for (uint64_t i = first; i < first + n; i++) {
        struct synthetic_sample y;
        synthetic_sample(s, i, &y);
        for (int t = 0; t < F; t++) distinct += seen->count[t][y.id[t]]++ == 0;
    }
    return distinct;
}

/* --- skew -------------------------------------------------------------------------------- */

static void a_batch_repeats_as_much_as_a_real_one(void **state)
{
    enum { BATCH = 4096, LOOKUPS = BATCH * F };
    struct fixture *f = *state;
    use_kaggle_tables(f);
    for (f->cfg.data.seed = 1; f->cfg.data.seed <= 3; f->cfg.data.seed++) {
        struct seen seen = seen_open();
        struct synthetic *s = open_synthetic(f);
        double distinct = 100.0 * (double)count_ids(s, &seen, 0, BATCH) / LOOKUPS;
        uint64_t repeated = 0;
        for (uint64_t i = BATCH; i < 2 * BATCH; i++) {
            struct synthetic_sample y;
            synthetic_sample(s, i, &y);
            for (int t = 0; t < F; t++) repeated += seen.count[t][y.id[t]] > 0;
        }
        double repeats = 100.0 * (double)repeated / LOOKUPS;
        if (distinct < 20.0 || distinct > 23.0 || repeats < 82.0 || repeats > 85.0)
            fail_msg("distinct %.2f %% (want 20..23), repeats %.2f %% (want 82..85)", distinct,
                     repeats);
        synthetic_close(s);
        seen_close(&seen);
    }
}

static void each_column_has_its_top_id_and_its_number_of_ids(void **state)
{
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct seen seen = seen_open();
    struct synthetic *s = open_synthetic(f);
    count_ids(s, &seen, 0, ROWS);
    for (int t = 0; t < F; t++) {
        int has_empty = KAGGLE[t].missing > 0.0;
        uint32_t top = 0, distinct = 0;
        for (uint64_t id = 0; id < KAGGLE[t].rows; id++) {
            uint32_t n = seen.count[t][id];
            distinct += n > 0;
            if (n > top && !(has_empty && id == 0)) top = n;
        }
        double share = 100.0 * top / ROWS, empty = has_empty ? 100.0 * seen.count[t][0] / ROWS : 0;
        if (fabs(share - KAGGLE[t].top) > 2.0)
            fail_msg("C%d: top id %.1f %%, want %.1f", t + 1, share, KAGGLE[t].top);
        if (fabs(empty - KAGGLE[t].missing) > 1.5)
            fail_msg("C%d: empty %.1f %%, want %.1f", t + 1, empty, KAGGLE[t].missing);
        if (fabs(distinct - KAGGLE[t].distinct) > 4 + 0.1 * KAGGLE[t].distinct &&
            fabs(distinct - KAGGLE[t].distinct) > 3.0 * sqrt(KAGGLE[t].distinct))
            fail_msg("C%d: %u ids, want %.0f", t + 1, distinct, KAGGLE[t].distinct);
    }
    synthetic_close(s);
    seen_close(&seen);
}

/* Ids met in n rows follow rows^0.789 through 43,591 ids at 10,000 rows and all ids at 45.8 M. */
static void assert_growth(struct fixture *f, uint64_t rows)
{
    use_kaggle_tables(f);
    struct seen seen = seen_open();
    struct synthetic *s = open_synthetic(f);
    uint64_t distinct = count_ids(s, &seen, 0, rows);
    double want = 43591.0 * pow((double)rows / ROWS, 0.789);
    print_message("%llu rows touch %llu ids, %.0f expected\n", (unsigned long long)rows,
                  (unsigned long long)distinct, want);
    assert_true((double)distinct > 0.75 * want && (double)distinct < 1.25 * want);
    synthetic_close(s);
    seen_close(&seen);
}

static void new_ids_keep_coming(void **state)
{
    assert_growth(*state, 10 * ROWS);
}

static void new_ids_keep_coming_for_millions_of_rows(void **state)
{
    if (getenv("CHANTER_SLOW") == NULL) skip();
    assert_growth(*state, 3280000); /* 200 batches of 16,384 */
}

static void fields_go_missing_by_groups(void **state)
{
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct synthetic *s = open_synthetic(f);
    uint32_t only_22 = 0, five = 0, six_22 = 0, none = 0, big = 0;
    uint32_t dense_empty[ND] = {0};
    for (uint64_t i = 0; i < ROWS; i++) {
        struct synthetic_sample y;
        synthetic_sample(s, i, &y);
        uint32_t empty = 0, dense = 0;
        for (int t = 0; t < F; t++)
            empty |= (uint32_t)(KAGGLE[t].missing > 0.0 && y.id[t] == 0) << t;
        for (int k = 0; k < ND; k++) dense |= (uint32_t)(y.dense[k] == LAW_EMPTY) << k;
        for (int k = 0; k < ND; k++) dense_empty[k] += dense >> k & 1;
        const uint32_t big_six = 1u << 2 | 1u << 3 | 1u << 11 | 1u << 15 | 1u << 20 | 1u << 23;
        const uint32_t c22 = 1u << 21, c6 = 1u << 5, four = 1u << 18 | 1u << 19 | 1u << 24 | 1u << 25;
        assert_true((empty & big_six) == 0 || (empty & big_six) == big_six);
        assert_true((empty & four) == 0 || (empty & four) == four);
        big += (empty & big_six) != 0;
        only_22 += empty == c22;
        five += empty == (four | c22);
        six_22 += empty == (c6 | c22);
        none += empty == 0;
        assert_int_equal(dense & 1, dense >> 9 & 1);      /* I1 and I10 */
        assert_int_equal(dense >> 3 & 1, dense >> 12 & 1); /* I4 and I13 */
    }
    assert_true(fabs(100.0 * only_22 / ROWS - 34) < 1.5);
    assert_true(fabs(100.0 * five / ROWS - 32) < 1.5);
    assert_true(fabs(100.0 * six_22 / ROWS - 10) < 1.5);
    assert_true(fabs(100.0 * none / ROWS - 9) < 1.5);
    assert_true(fabs(100.0 * big / ROWS - 3.6) < 0.6);
    static const double missing[ND] = {44.8, 0, 20.4, 19.8, 4.9, 25.1, 4.9, 0.1, 4.9, 44.8, 4.9,
                                       77.3, 19.8};
    for (int k = 0; k < ND; k++)
        assert_true(fabs(100.0 * dense_empty[k] / ROWS - missing[k]) < 1.5);
    synthetic_close(s);
}

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void dense_values_have_the_measured_medians(void **state)
{
    static const int64_t median[ND] = {1, 3, 7, 4, 2469, 40, 3, 7, 41, 0, 1, 0, 5};
    static const int64_t high[ND] = {214, 18522, 65535, 280, 1618112, 12167, 1658, 682, 7335, 6, 79,
                                     98, 770};
    static int64_t value[ROWS];
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct synthetic *s = open_synthetic(f);
    for (int k = 0; k < ND; k++) {
        size_t n = 0;
        for (uint64_t i = 0; i < ROWS; i++) {
            struct synthetic_sample y;
            synthetic_sample(s, i, &y);
            if (y.dense[k] != LAW_EMPTY) value[n++] = y.dense[k];
        }
        qsort(value, n, sizeof(value[0]), ascending);
        double slack = 0.6 + 0.1 * (double)median[k];
        assert_true(fabs((double)(value[n / 2] - median[k])) <= slack);
        assert_true(value[n - 1] <= high[k] && value[n - 1] > high[k] / 20);
        assert_int_equal(value[0] < 0, k == 1); /* negative values: I2 alone */
    }
    synthetic_close(s);
}

static void big_columns_are_functions_of_each_other_one_way(void **state)
{
    static const struct { int from, to; } FIXES[] = {{2, 11}, {2, 20}, {11, 15}};
    struct fixture *f = *state;
    use_kaggle_tables(f);
    struct synthetic *s = open_synthetic(f);
    for (size_t k = 0; k < sizeof(FIXES) / sizeof(FIXES[0]); k++) {
        int from = FIXES[k].from, to = FIXES[k].to;
        uint32_t *image = calloc(KAGGLE[from].rows, sizeof(*image));
        uint32_t *origin = calloc(KAGGLE[to].rows, sizeof(*origin));
        uint32_t repeats = 0, several = 0;
        for (uint64_t i = 0; i < 2 * ROWS; i++) {
            struct synthetic_sample y;
            synthetic_sample(s, i, &y);
            uint32_t a = y.id[from], b = y.id[to];
            if (image[a] != 0) assert_int_equal(image[a] - 1, b);
            repeats += image[a] != 0;
            several += origin[b] != 0 && origin[b] - 1 != a;
            image[a] = b + 1;
            origin[b] = a + 1;
        }
        assert_true(repeats > ROWS / 2);
        assert_true(several > 100);
        free(image);
        free(origin);
    }
    synthetic_close(s);
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
    fixture_assert_failed(f, st, ST_CANTCREATE, "/no/such/directory/x.part: cannot create");
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
            for (size_t k = 0; k < ND + 1 + F; k++) {
                at[k] = k <= ND ? k : offset[k - ND - 1] + row_number(batch->id[i * F + k - ND - 1]);
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
        WITH_FIXTURE(a_batch_repeats_as_much_as_a_real_one),
        WITH_FIXTURE(each_column_has_its_top_id_and_its_number_of_ids),
        WITH_FIXTURE(new_ids_keep_coming),
        WITH_FIXTURE(new_ids_keep_coming_for_millions_of_rows),
        WITH_FIXTURE(fields_go_missing_by_groups),
        WITH_FIXTURE(dense_values_have_the_measured_medians),
        WITH_FIXTURE(big_columns_are_functions_of_each_other_one_way),
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
