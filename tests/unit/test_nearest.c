/* Which known name a mistyped word is taken for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/rng.h"
#include "config/nearest.h"

static void distance_counts_insert_delete_replace_and_swap(void **state)
{
    assert_int_equal(nearest_distance("", ""), 0);
    assert_int_equal(nearest_distance("", "abc"), 3);
    assert_int_equal(nearest_distance("batch", "batch"), 0);
    assert_int_equal(nearest_distance("batch", "bach"), 1);
    assert_int_equal(nearest_distance("batch", "baatch"), 1);
    assert_int_equal(nearest_distance("batch", "badch"), 1);
    assert_int_equal(nearest_distance("batch", "bacth"), 1);
    assert_int_equal(nearest_distance("kitten", "sitting"), 3);
    assert_int_equal(nearest_distance("ca", "abc"), 3); /* no part is edited twice */
}

/* The definition, by recursion. */
static size_t slow(const char *a, size_t i, const char *b, size_t j)
{
    if (i == 0 || j == 0) return i + j;
    size_t best = slow(a, i - 1, b, j - 1) + (a[i - 1] != b[j - 1]);
    size_t del = slow(a, i - 1, b, j) + 1, ins = slow(a, i, b, j - 1) + 1;
    if (del < best) best = del;
    if (ins < best) best = ins;
    if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        size_t swap = slow(a, i - 2, b, j - 2) + 1;
        if (swap < best) best = swap;
    }
    return best;
}

static void distance_equals_its_definition_on_random_words(void **state)
{
    for (uint64_t i = 0; i < 300; i++) {
        uint32_t w[2][4];
        char word[2][8] = {{0}};
        for (uint32_t k = 0; k < 2; k++) {
            rng_words(7, 0, i, k, w[k]);
            for (uint32_t c = 0; c < w[k][3] % 7; c++)
                word[k][c] = (char)('a' + (w[k][c / 3] >> (c % 3 * 8)) % 3);
        }
        assert_int_equal(nearest_distance(word[0], word[1]),
                         slow(word[0], strlen(word[0]), word[1], strlen(word[1])));
    }
}

static void long_words_are_far_from_everything(void **state)
{
    char at_limit[NEAREST_MAX_LEN + 1], over[NEAREST_MAX_LEN + 2];
    memset(at_limit, 'a', sizeof(at_limit));
    memset(over, 'a', sizeof(over));
    at_limit[NEAREST_MAX_LEN] = '\0';
    over[NEAREST_MAX_LEN + 1] = '\0';
    assert_int_equal(nearest_distance(at_limit, at_limit), 0);
    assert_int_equal(nearest_distance(over, at_limit), NEAREST_FAR);
    assert_int_equal(nearest_distance(at_limit, over), NEAREST_FAR);
}

static const char *guess(const char *word)
{
    static const char *const NAMES[] = {"dim", "tables", "bottom_mlp", "top_mlp", "kind",
                                        "dense_features", "id"};
    struct nearest n;
    nearest_start(&n, word);
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++) nearest_offer(&n, NAMES[i]);
    return n.best;
}

static void close_words_are_guessed(void **state)
{
    assert_string_equal(guess("tabels"), "tables");
    assert_string_equal(guess("table"), "tables");
    assert_string_equal(guess("botom_mlp"), "bottom_mlp");
    assert_string_equal(guess("top_mpl"), "top_mlp");
    assert_string_equal(guess("dims"), "dim");
    assert_string_equal(guess("dense_featrues"), "dense_features");
    assert_string_equal(guess("embeding_dim"), "dim");
    assert_string_equal(guess("dim-of-row"), "dim");
}

static void far_words_are_not_guessed(void **state)
{
    assert_null(guess("learning_rate"));
    assert_null(guess("dimension")); /* holds "dim", but not as a part of its own */
    assert_null(guess("xy"));
    assert_null(guess(""));
}

static void of_equally_close_names_the_first_stays(void **state)
{
    struct nearest n;
    nearest_start(&n, "cat");
    nearest_offer(&n, "car");
    nearest_offer(&n, "bat");
    assert_string_equal(n.best, "car");
    nearest_offer(&n, "cat");
    assert_string_equal(n.best, "cat");
}

static void hint_is_a_phrase_or_nothing(void **state)
{
    char hint[NEAREST_HINT_BYTES];
    struct nearest n;
    nearest_start(&n, "bacth");
    assert_string_equal(nearest_hint(&n, "--", "", hint), "");
    nearest_offer(&n, "batch");
    assert_string_equal(nearest_hint(&n, "--", "", hint), " (did you mean --batch?)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distance_counts_insert_delete_replace_and_swap),
        cmocka_unit_test(distance_equals_its_definition_on_random_words),
        cmocka_unit_test(long_words_are_far_from_everything),
        cmocka_unit_test(close_words_are_guessed),
        cmocka_unit_test(far_words_are_not_guessed),
        cmocka_unit_test(of_equally_close_names_the_first_stays),
        cmocka_unit_test(hint_is_a_phrase_or_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
