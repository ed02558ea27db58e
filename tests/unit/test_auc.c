/* AUC and logloss: against counting all pairs, and numbers worked out by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "data/auc.h"
#include "tests/support/data_fixture.h"

/* Every pair, one by one. */
static double auc_by_pairs(const float *score, const float *label, size_t n)
{
    double won = 0.0, pairs = 0.0;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            if (label[i] == 1.0f && label[j] == 0.0f) {
                won += score[i] > score[j] ? 1.0 : score[i] == score[j] ? 0.5 : 0.0;
                pairs += 1.0;
            }
    return won / pairs;
}

static double auc_of(const float *score, const float *label, size_t n)
{
    double auc;
    assert_int_equal(auc_exact(score, label, n, &auc), ST_OK);
    return auc;
}

static void auc_equals_the_share_of_pairs_won(void **state)
{
    enum { N = 300 };
    float score[N], label[N];
    for (uint64_t round = 0; round < 40; round++) {
        float step = round % 2 == 0 ? 1e-6f : 0.25f; /* few ties, and many */
        rng_uniform(7, 0, round, 2.0f, score, N);
        rng_uniform(8, 0, round, 1.0f, label, N);
        size_t n = 3 + (size_t)round * 7;
        for (size_t i = 0; i < n; i++) {
            label[i] = label[i] + 0.5f * score[i] > 0.2f ? 1.0f : 0.0f;
            score[i] = roundf(score[i] / step) * step;
        }
        label[0] = 1.0f;
        label[1] = 0.0f;
        double got = auc_of(score, label, n), want = auc_by_pairs(score, label, n);
        assert_true(got == want); /* both are a ratio of the same whole numbers of halves */
    }
}

static void auc_of_order_is_one_of_reverse_zero_of_ties_half(void **state)
{
    const float up[] = {-INFINITY, -2.0f, -1e-30f, 1e-30f, 3.0f, INFINITY};
    const float clicks_last[] = {0, 0, 0, 1, 1, 1}, clicks_first[] = {1, 1, 1, 0, 0, 0};
    const float same[] = {5, 5, 5, 5, 5, 5}, zeros[] = {0.0f, -0.0f, 0.0f, -0.0f, -0.0f, 0.0f};
    assert_true(auc_of(up, clicks_last, 6) == 1.0);
    assert_true(auc_of(up, clicks_first, 6) == 0.0);
    assert_true(auc_of(same, clicks_last, 6) == 0.5);
    assert_true(auc_of(zeros, clicks_last, 6) == 0.5);
}

static void auc_does_not_depend_on_the_order_of_samples(void **state)
{
    enum { N = 5000 };
    static float score[N], label[N], score2[N], label2[N];
    rng_uniform(1, 0, 0, 3.0f, score, N);
    rng_uniform(2, 0, 0, 1.0f, label, N);
    for (size_t i = 0; i < N; i++) {
        label[i] = label[i] > 0.3f;
        score2[i * 1013 % N] = score[i];
        label2[i * 1013 % N] = label[i];
    }
    assert_true(auc_of(score, label, N) == auc_of(score2, label2, N));
}

static void auc_of_one_class_is_not_a_number(void **state)
{
    const float score[] = {1, 2}, clicked[] = {1, 1}, ignored[] = {0, 0};
    assert_true(isnan(auc_of(score, clicked, 2)));
    assert_true(isnan(auc_of(score, ignored, 2)));
    assert_true(isnan(auc_of(score, ignored, 0)));
}

static void scores_and_labels_that_mean_nothing_are_refused(void **state)
{
    const float score[] = {1, NAN, 2}, fine[] = {1, 2, 3};
    const float label[] = {0, 1, 0}, odd[] = {0, 1, 0.5f};
    double auc = 42.0;
    fixture_assert_failed(*state, auc_exact(score, label, 3, &auc), ST_DATA,
                          "score of sample 1 is not a number");
    fixture_assert_failed(*state, auc_exact(fine, odd, 3, &auc), ST_DATA,
                          "label 0.5 of sample 2 not 0/1");
    mem_fail_at(1);
    enum st st = auc_exact(fine, label, 3, &auc);
    assert_true(mem_fail_stop());
    fixture_assert_failed(*state, st, ST_NOMEM, "out of memory");
    assert_true(auc == 42.0);
}

static void logloss_is_the_mean_cross_entropy(void **state)
{
    const float logit[] = {0.0f, 2.0f, -2.0f, 2.0f}, label[] = {1, 1, 0, 0};
    /* -log(1/2), -log(sigmoid(2)) twice, -log(1 - sigmoid(2)) */
    double want = (log(2.0) + 2.0 * log(1.0 + exp(-2.0)) + log(1.0 + exp(2.0))) / 4.0;
    assert_true(fabs(auc_logloss(logit, label, 4) - want) < 1e-15);
    const float far[] = {1000.0f, -1000.0f}, right[] = {1, 0}, wrong[] = {0, 1};
    assert_true(auc_logloss(far, right, 2) == 0.0);
    assert_true(auc_logloss(far, wrong, 2) == 1000.0);
    assert_true(isnan(auc_logloss(far, wrong, 0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(auc_equals_the_share_of_pairs_won),
        cmocka_unit_test(auc_of_order_is_one_of_reverse_zero_of_ties_half),
        cmocka_unit_test(auc_does_not_depend_on_the_order_of_samples),
        cmocka_unit_test(auc_of_one_class_is_not_a_number),
        cmocka_unit_test_setup_teardown(scores_and_labels_that_mean_nothing_are_refused,
                                        fixture_setup, fixture_teardown),
        cmocka_unit_test(logloss_is_the_mean_cross_entropy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
