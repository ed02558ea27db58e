/* Parked fetches: who is handed out for which write-back, and in which order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "embserver/parking.h"

static struct parking *open_parking(void)
{
    struct parking *k = NULL;
    assert_int_equal(parking_open(&k), ST_OK);
    return k;
}

static void park(struct parking *k, struct parked *p, uint64_t row_id, int64_t need,
                 uint64_t deadline_ns)
{
    *p = (struct parked){.row_id = row_id, .need = need, .deadline_ns = deadline_ns};
    parking_add(k, p);
}

static void only_those_whose_need_is_met_are_handed_out_oldest_first(void **state)
{
    struct parking *k = open_parking();
    struct parked p[5];
    park(k, &p[0], 7, 3, 1);
    park(k, &p[1], 7, 5, 2);
    park(k, &p[2], 8, 3, 3);
    park(k, &p[3], 7, 4, 4);
    park(k, &p[4], 7, 1, 5);
    assert_null(parking_take(k, 9, 100));
    struct parked *got = parking_take(k, 7, 4);
    assert_ptr_equal(got, &p[0]);
    assert_ptr_equal(got->next, &p[3]);
    assert_ptr_equal(got->next->next, &p[4]);
    assert_null(got->next->next->next);
    assert_null(parking_take(k, 7, 4)); /* handed out once */
    assert_ptr_equal(parking_take(k, 7, 5), &p[1]);
    assert_ptr_equal(parking_take(k, 8, 3), &p[2]);
    for (int i = 0; i < 5; i++) parking_leave(k, &p[i]);
    parking_close(k);
}

static void one_that_waits_again_keeps_its_age(void **state)
{
    struct parking *k = open_parking();
    struct parked p[2];
    park(k, &p[0], 7, 3, 1);
    park(k, &p[1], 8, 3, 2);
    assert_ptr_equal(parking_take(k, 7, 3), &p[0]);
    p[0].row_id = 8;
    parking_again(k, &p[0]);
    assert_ptr_equal(parking_oldest(k), &p[0]);
    parking_leave(k, &p[0]);
    assert_ptr_equal(parking_oldest(k), &p[1]);
    assert_ptr_equal(parking_take(k, 8, 3), &p[1]); /* p[0] left its bucket, too */
    assert_null(p[1].next);
    parking_leave(k, &p[1]);
    assert_null(parking_oldest(k));
    parking_close(k);
}

static void rows_that_share_a_bucket_are_told_apart(void **state)
{
    enum { MANY = 20000 }; /* more than there are buckets */
    struct parking *k = open_parking();
    struct parked *p = mem_zalloc(MANY, sizeof(*p));
    assert_non_null(p);
    for (uint64_t i = 0; i < MANY; i++) park(k, &p[i], i, 0, i);
    for (uint64_t i = 0; i < MANY; i++) {
        uint64_t row = i * 7919 % MANY; /* in another order */
        assert_ptr_equal(parking_take(k, row, 0), &p[row]);
        assert_null(p[row].next);
        parking_leave(k, &p[row]);
    }
    assert_null(parking_oldest(k));
    mem_free(p);
    parking_close(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_those_whose_need_is_met_are_handed_out_oldest_first),
        cmocka_unit_test(one_that_waits_again_keeps_its_age),
        cmocka_unit_test(rows_that_share_a_bucket_are_told_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
