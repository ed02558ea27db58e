/* The ground floor: tree order, generator, ring, digest, memory faults. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/tree.h"

static void runs_split_into_maximal_nodes(void **state)
{
    struct tree_node n[TREE_MAX_NODES];
    assert_int_equal(tree_nodes(0, 8, 8, n), 1);
    assert_int_equal(n[0].end, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(runs_split_into_maximal_nodes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
