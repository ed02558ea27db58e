/* Is the synthetic click log as skewed, as incomplete and as nested as the measured one (Criteo
 * Kaggle: docs/data.md has the numbers)? Set CHANTER_SLOW=1 for the growth check at full scale
 * (20 s). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <cmocka.h>

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
        const uint32_t c22 = 1u << 21, c6 = 1u << 5;
        const uint32_t four = 1u << 18 | 1u << 19 | 1u << 24 | 1u << 25;
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
