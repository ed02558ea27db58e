/* Grouping by slot against the plainest way to do it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "tests/support/floats.h"
#include "trainer/group.h"

enum { CAP = 50, MOST = 400, ROUNDS = 2000 };

/* Rows in order of first item; the items of each in order; and no row that is not there. */
static void check(const struct group *g, const uint32_t *slot, uint32_t n)
{
    uint32_t row_of[CAP], n_rows = 0, at = 0;
    for (uint32_t s = 0; s < CAP; s++) row_of[s] = GROUP_NONE;
    for (uint32_t i = 0; i < n; i++) {
        if (row_of[slot[i]] != GROUP_NONE) continue;
        row_of[slot[i]] = n_rows;
        assert_true(n_rows < g->n_rows);
        assert_int_equal(group_slots(g)[n_rows++], slot[i]);
    }
    assert_int_equal(g->n_rows, n_rows);
    for (uint32_t r = 0; r < n_rows; r++) {
        assert_int_equal(group_begin(g)[r], at);
        for (uint32_t i = 0; i < n; i++)
            if (row_of[slot[i]] == r) assert_int_equal(group_items(g)[at++], i);
    }
    assert_int_equal(group_begin(g)[n_rows], n);
    for (uint32_t s = 0; s < CAP; s++) assert_int_equal(group_find(g, s), row_of[s]);
}

/* One group for all rounds: what the rounds before left in its index must not count. */
static void items_of_a_slot_come_together_in_order_round_after_round(void **state)
{
    struct group g;
    uint32_t slot[MOST];
    assert_int_equal(group_init(&g, CAP), ST_OK);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint32_t n = draw(round, 0) % (MOST + 1), spread = 1 + draw(round, 1) % CAP;
        for (uint32_t i = 0; i < n; i++) slot[i] = draw(round, 2 + i) % spread;
        assert_int_equal(group_by_slot(&g, slot, n), ST_OK);
        check(&g, slot, n);
    }
    group_fini(&g);
}

static void nothing_is_found_in_an_empty_grouping(void **state)
{
    struct group g;
    uint32_t slot[2] = {CAP - 1, 0};
    assert_int_equal(group_init(&g, CAP), ST_OK);
    assert_int_equal(group_find(&g, 0), GROUP_NONE);
    assert_int_equal(group_by_slot(&g, slot, 2), ST_OK);
    assert_int_equal(group_find(&g, CAP - 1), 0);
    assert_int_equal(group_by_slot(&g, slot, 0), ST_OK);
    check(&g, slot, 0);
    group_fini(&g);
}

static void a_failed_grouping_is_empty(void **state)
{
    struct group g;
    uint32_t slot[MOST] = {0};
    assert_int_equal(group_init(&g, CAP), ST_OK);
    assert_int_equal(group_by_slot(&g, slot, 1), ST_OK);
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = group_by_slot(&g, slot, MOST);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            assert_true(nth > 1);
            break;
        }
        assert_int_equal(st, ST_NOMEM);
        assert_int_equal(group_find(&g, 0), GROUP_NONE);
    }
    check(&g, slot, MOST);
    group_fini(&g);
}

static int all_is_given_back(void **state)
{
    return mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_of_a_slot_come_together_in_order_round_after_round),
        cmocka_unit_test(nothing_is_found_in_an_empty_grouping),
        cmocka_unit_test(a_failed_grouping_is_empty),
    };
    return cmocka_run_group_tests(tests, NULL, all_is_given_back);
}
