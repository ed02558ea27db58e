/* The ground floor: tree order, generator, digest, memory faults, log, status, clock. The ring has
 * its own: test_ring.c. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/row.h"
#include "base/status.h"
#include "base/tree.h"

/* --- tree ----------------------------------------------------------------------------------- */

/* Is [lo, end) a node of the tree over S slices? From the definition. */
static int is_node(uint32_t lo, uint32_t end, uint32_t S)
{
    for (uint32_t size = 1; size < 2 * S; size *= 2)
        if (lo % size == 0 && (lo + size < S ? lo + size : S) == end) return 1;
    return 0;
}

static void runs_are_dealt_out_evenly(void **state)
{
    for (uint32_t S = 1; S <= TREE_MAX_SLICES; S++)
        for (uint32_t n = 1; n <= S; n++) {
            assert_int_equal(tree_run_start(0, n, S), 0);
            assert_int_equal(tree_run_start(n, n, S), S);
            for (uint32_t t = 0; t < n; t++) {
                uint32_t size = tree_run_start(t + 1, n, S) - tree_run_start(t, n, S);
                assert_true(size == S / n || size == (S + n - 1) / n);
            }
        }
}

/* Any run, not only those that trainers get. */
static void runs_split_into_maximal_nodes(void **state)
{
    for (uint32_t S = 1; S <= TREE_MAX_SLICES; S++)
        for (uint32_t lo = 0; lo < S; lo++)
            for (uint32_t hi = lo + 1; hi <= S; hi++) {
                struct tree_node node[TREE_MAX_NODES];
                uint32_t n = tree_nodes(lo, hi, S, node), at = lo;
                assert_in_range(n, 1, TREE_MAX_NODES);
                for (uint32_t k = 0; k < n; k++) {
                    assert_int_equal(node[k].pos, at); /* disjoint, and no slice left out */
                    assert_true(is_node(at, node[k].end, S));
                    for (uint32_t end = node[k].end + 1; end <= hi; end++)
                        assert_false(is_node(at, end, S)); /* none larger from here */
                    at = node[k].end;
                }
                assert_int_equal(at, hi);
            }
}

static void a_nodes_mask_has_its_slices(void **state)
{
    for (uint32_t pos = 0; pos < 64; pos++)
        for (uint32_t end = pos + 1; end <= 64; end++) {
            uint64_t want = 0;
            for (uint32_t s = pos; s < end; s++) want |= UINT64_C(1) << s;
            assert_true(tree_node_mask((struct tree_node){(uint8_t)pos, (uint8_t)end}) == want);
        }
}

/* A sum as a symbol: different for every other order or bracketing of the same leaves. */
static uint64_t plus(uint64_t left, uint64_t right)
{
    uint64_t h = left * UINT64_C(0x9E3779B97F4A7C15) + (right ^ right >> 29) + 1;
    return (h ^ h >> 32) * UINT64_C(0xD6E8FEB86659FD93);
}

/* The whole tree as tree.h draws it; 0: no slice of `mask` in [lo, lo + size). */
static uint64_t whole(uint64_t mask, uint32_t lo, uint32_t size)
{
    if (size == 1) return mask >> lo & 1 ? lo + 1 : 0;
    uint64_t left = whole(mask, lo, size / 2), right = whole(mask, lo + size / 2, size / 2);
    return left == 0 ? right : right == 0 ? left : plus(left, right);
}

static uint64_t by_split(const uint8_t *pos, const uint64_t *symbol, uint32_t n)
{
    if (n == 1) return symbol[0];
    uint32_t k = tree_split(pos, n);
    assert_in_range(k, 1, n - 1);
    return plus(by_split(pos, symbol, k), by_split(pos + k, symbol + k, n - k));
}

/* Every trainer sums its nodes from the slices of `mask`; then the nodes are summed. */
static uint64_t by_trainers(uint64_t mask, uint32_t n_trainers, uint32_t S)
{
    uint8_t node_pos[TREE_MAX_SLICES];
    uint64_t node_sum[TREE_MAX_SLICES];
    uint32_t n_sums = 0;
    for (uint32_t t = 0; t < n_trainers; t++) {
        struct tree_node node[TREE_MAX_NODES];
        uint32_t n = tree_nodes(tree_run_start(t, n_trainers, S),
                                tree_run_start(t + 1, n_trainers, S), S, node);
        for (uint32_t k = 0; k < n; k++) {
            uint8_t pos[TREE_MAX_SLICES];
            uint64_t leaf[TREE_MAX_SLICES];
            uint32_t leaves = 0;
            for (uint32_t s = node[k].pos; s < node[k].end; s++)
                if (mask >> s & 1) pos[leaves] = (uint8_t)s, leaf[leaves++] = s + 1;
            if (leaves == 0) continue;
            node_pos[n_sums] = node[k].pos;
            node_sum[n_sums++] = by_split(pos, leaf, leaves);
        }
    }
    return by_split(node_pos, node_sum, n_sums);
}

static void sums_of_runs_are_bracketed_like_the_whole_tree(void **state)
{
    for (uint32_t S = 1; S <= TREE_MAX_SLICES; S++)
        for (uint32_t n = 1; n <= S; n++)
            for (uint32_t round = 0; round < 6; round++) {
                uint32_t w[4];
                rng_words(S, n, round, 0, w);
                uint64_t mask = (uint64_t)w[0] << 32 | w[1];
                if (round == 0) mask = ~UINT64_C(0);           /* all there */
                if (round > 3) mask &= (uint64_t)w[2] << 32 | w[3]; /* few   */
                mask |= UINT64_C(1) << w[3] % S;               /* never none */
                if (S < 64) mask &= (UINT64_C(1) << S) - 1;
                assert_true(by_trainers(mask, n, S) == whole(mask, 0, TREE_MAX_SLICES));
            }
}

/* --- rng ------------------------------------------------------------------------------------ */

/* philox4x32-10 of Random123's kat_vectors: counter c0..c3, key k0 k1. */
static void generator_is_philox_4x32_10(void **state)
{
    static const struct { uint32_t c[4], k[2], out[4]; } KAT[] = {
        {{0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        rng_words((uint64_t)KAT[i].k[1] << 32 | KAT[i].k[0], KAT[i].c[2],
                  (uint64_t)KAT[i].c[1] << 32 | KAT[i].c[0], KAT[i].c[3], out);
        assert_memory_equal(out, KAT[i].out, sizeof(out));
    }
}

static void uniform_values_are_on_their_grid_and_do_not_depend_on_n(void **state)
{
    float all[101], some[101];
    double sum = 0, squares = 0;
    for (uint64_t row = 0; row < 200; row++) {
        rng_uniform(3, RNG_TABLE_0 + 7, row, 0.5f, all, 101);
        for (size_t n = 0; n <= 101; n += 1 + row % 7) {
            rng_uniform(3, RNG_TABLE_0 + 7, row, 0.5f, some, n);
            assert_memory_equal(some, all, n * sizeof(float));
        }
        for (uint32_t k = 0; k < 101; k++) {
            uint32_t w[4];
            rng_words(3, 7, row, k / 4, w);
            assert_true((double)all[k] == (double)(w[k % 4] >> 8) / (1 << 24) - 0.5);
            sum += (double)all[k], squares += (double)all[k] * (double)all[k];
        }
    }
    assert_true(fabs(sum / 20200) <= 5 * sqrt(1 / 12.0 / 20200)); /* five deviations */
    assert_true(fabs(squares / 20200 - 1 / 12.0) <= 5 * sqrt(1 / 180.0 / 20200));
}

static void normal_values_may_be_drawn_in_pieces(void **state)
{
    enum { N = 20000 };
    float *all = mem_alloc(N, sizeof(*all)), piece[7];
    double sum = 0, squares = 0, inside = 0;
    rng_normal(9, RNG_DENSE_0, 0, 2.0f, all, N);
    for (uint64_t first = 0; first + 7 <= N; first += 1234) {
        rng_normal(9, RNG_DENSE_0, first, 2.0f, piece, 7);
        assert_memory_equal(piece, all + first, sizeof(piece));
    }
    for (int i = 0; i < N; i++) {
        sum += (double)all[i];
        squares += (double)all[i] * (double)all[i];
        inside += fabsf(all[i]) < 2.0f; /* one deviation: 68.27 % */
    }
    assert_true(fabs(sum / N) <= 5 * 2 / sqrt(N));
    assert_true(fabs(squares / N - 4) <= 5 * 4 * sqrt(2.0 / N));
    assert_true(fabs(inside / N - 0.6827) <= 5 * sqrt(0.6827 * 0.3173 / N));
    mem_free(all);
}

static void seeds_streams_and_indices_are_apart(void **state)
{
    static const struct { uint64_t seed; uint32_t stream; uint64_t index; uint32_t lane; } AT[] = {
        {1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {1, 1, 2, 1}, {1, 1, 1, 2},
        {UINT64_C(1) << 32 | 1, 1, 1, 1}, {1, 1, UINT64_C(1) << 32 | 1, 1}};
    uint32_t w[7][4];
    for (int i = 0; i < 7; i++) rng_words(AT[i].seed, AT[i].stream, AT[i].index, AT[i].lane, w[i]);
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < i; j++) assert_memory_not_equal(w[i], w[j], sizeof(w[i]));
}

/* --- digest, rows --------------------------------------------------------------------------- */

static void digest_does_not_care_for_order_or_place(void **state)
{
    struct digest up = {0}, down = {0}, part[3] = {{0}}, merged = {0}, other = {0}, key = {0};
    for (uint32_t i = 0; i < 100; i++) {
        uint32_t back = 99 - i, changed = i == 50 ? 1000 : i;
        digest_add(&up, row_id(3, i), &i, sizeof(i));
        digest_add(&down, row_id(3, back), &back, sizeof(back));
        digest_add(&part[i % 3], row_id(3, i), &i, sizeof(i));
        digest_add(&other, row_id(3, i), &changed, sizeof(changed));
        digest_add(&key, row_id(i == 50 ? 4 : 3, i), &i, sizeof(i));
    }
    for (int k = 2; k >= 0; k--) digest_merge(&merged, part[k]);
    assert_memory_equal(&down, &up, sizeof(up));
    assert_memory_equal(&merged, &up, sizeof(up));
    assert_memory_not_equal(&other, &up, sizeof(up)); /* one row's bytes   */
    assert_memory_not_equal(&key, &up, sizeof(up));   /* one row's table   */
}

static void digest_is_a_sum_of_128_bits_in_hex(void **state)
{
    char hex[DIGEST_HEX_BYTES];
    struct digest d = {0};
    digest_add(&d, 0, "", 0); /* XXH3-128 of nothing, by xxhash's own test */
    digest_hex(d, hex);
    assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
    d = (struct digest){.lo = UINT64_MAX, .hi = 4};
    digest_merge(&d, (struct digest){.lo = 2, .hi = 6});
    digest_hex(d, hex);
    assert_string_equal(hex, "000000000000000b0000000000000001"); /* with the carry */
}

static void row_ids_come_apart_again(void **state)
{
    uint64_t last = (UINT64_C(1) << ROW_BITS) - 1, id = row_id(ROW_MAX_TABLES - 1, last);
    assert_int_equal(row_table(id), ROW_MAX_TABLES - 1);
    assert_true(row_number(id) == last);
    assert_int_equal(row_shard(row_id(0, 0), 4), 0);
    assert_int_equal(row_shard(row_id(5, 0), 4), 1); /* shifted by the table */
    assert_int_equal(row_shard(row_id(5, 10), 4), 3);
}

/* --- memory --------------------------------------------------------------------------------- */

static void memory_fails_where_told_and_is_counted(void **state)
{
    size_t live = mem_live();
    mem_fail_at(3);
    void *a = mem_alloc(1, 1), *b = mem_zalloc(3, 5), *c = mem_alloc(1, 1), *d = mem_strdup("x");
    assert_true(a != NULL && b != NULL && c == NULL && d != NULL); /* the third, and only once */
    assert_true(mem_fail_stop());
    assert_int_equal(mem_live(), live + 3);
    mem_fail_at(1);
    assert_null(mem_grow(a, 1, 2, 1));
    assert_true(mem_fail_stop());
    mem_fail_at(2);
    mem_free(mem_alloc(1, 1));
    assert_false(mem_fail_stop()); /* not reached */
    mem_free(a);
    mem_free(b);
    mem_free(d);
    mem_free(NULL);
    assert_int_equal(mem_live(), live);
}

static void memory_is_aligned_zeroed_and_grows(void **state)
{
    assert_null(mem_alloc(SIZE_MAX / 2, 3));
    assert_null(mem_alloc(SIZE_MAX, 1));
    void *nothing = mem_alloc(0, 8);
    assert_non_null(nothing);
    mem_free(nothing);
    for (size_t n = 1; n < 300; n += 7) {
        uint8_t *p = mem_zalloc(n, 1);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < n; i++) assert_int_equal(p[i], 0);
        for (size_t i = 0; i < n; i++) p[i] = (uint8_t)i;
        p = mem_grow(p, n, 2 * n, 1);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < n; i++) assert_int_equal(p[i], (uint8_t)i);
        p = mem_grow(p, 2 * n, 1, 1); /* and shrinks */
        assert_int_equal(p[0], 0);
        mem_free(p);
    }
    char *copy = mem_strdup("a row");
    assert_string_equal(copy, "a row");
    mem_free(copy);
}

static void mapped_memory_is_zero(void **state)
{
    size_t bytes = (3 << 20) + 1;
    uint8_t *p = mem_map(bytes);
    assert_non_null(p);
    for (size_t i = 0; i < bytes; i += 511) assert_int_equal(p[i], 0);
    p[bytes - 1] = 1;
    mem_unmap(p, bytes);
    mem_unmap(NULL, 0);
}

/* --- log, status, check, clock -------------------------------------------------------------- */

struct lines { int n; char last[2048]; };

static void keep_line(void *ctx, const char *line)
{
    struct lines *l = ctx;
    l->n++;
    snprintf(l->last, sizeof(l->last), "%s", line);
}

static void log_lines_have_one_form(void **state)
{
    struct lines l = {0};
    char text[3000];
    log_set_sink(keep_line, &l);
    assert_int_equal(log_fail(ST_DATA, "day_0.tsv:7", "%d columns; expected %d", 39, 40), ST_DATA);
    assert_string_equal(l.last, "chanter: error[E-DATA]: day_0.tsv:7: 39 columns; expected 40");
    assert_int_equal(log_fail(ST_TIMEOUT, NULL, "late"), ST_TIMEOUT);
    assert_string_equal(l.last, "chanter: error[E-TIMEOUT]: late");
    log_set_role("trainer 1");
    log_note("cache", "a\nb");
    assert_string_equal(l.last, "chanter: trainer 1: cache: a b"); /* one line, always */
    log_note(NULL, "c");
    assert_string_equal(l.last, "chanter: trainer 1: c");
    log_set_role(NULL);
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_note(text, "%s", text); /* cut off, not overrun */
    assert_int_equal(strncmp(l.last, "chanter: xxxx", 13), 0);
    assert_in_range(strlen(l.last), 1000, 1024);
    assert_int_equal(l.n, 5);
    log_set_sink(NULL, NULL);
}

/* Run `fn` in a child with standard error in `out`; returns the wait status. */
static int in_child(void (*fn)(void), char *out, size_t room)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL); /* cmocka's and the sanitizers' handlers stay out */
        dup2(ends[1], STDERR_FILENO);
        fn();
        _exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < room && (got = read(ends[0], out + n, room - 1 - n)) > 0;)
        n += (size_t)got;
    out[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void say_something(void)
{
    log_note("here", "something");
}

static void break_an_invariant(void)
{
    CHECK(1 + 1 == 2, "never shown");
    CHECK(1 + 1 == 3, "I9: sums are right");
}

static void log_goes_to_standard_error_line_by_line(void **state)
{
    char text[512];
    assert_int_equal(in_child(say_something, text, sizeof(text)), 0);
    assert_string_equal(text, "chanter: here: something\n");
}

static void a_broken_invariant_says_which_and_aborts(void **state)
{
    char text[512];
    int status = in_child(break_an_invariant, text, sizeof(text));
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "test_base.c:"));
    assert_non_null(strstr(text, "CHECK(1 + 1 == 3) failed: I9: sums are right\n"));
    assert_null(strstr(text, "never shown"));
}

static void every_status_has_a_name_and_an_exit_code(void **state)
{
    static const struct { enum st st; const char *name; int code; } WANT[] = {
        {ST_OK, "OK", 0}, {ST_USAGE, "USAGE", 64}, {ST_DATA, "DATA", 65},
        {ST_NOINPUT, "NOINPUT", 66}, {ST_CONFIG, "CONFIG", 78}, {ST_PERM, "PERM", 77},
        {ST_CANTCREATE, "CANTCREATE", 73}, {ST_TIMEOUT, "TIMEOUT", 75},
        {ST_UNAVAILABLE, "UNAVAILABLE", 75}, {ST_BADMSG, "BADMSG", 76}, {ST_NOMEM, "NOMEM", 71},
        {ST_IO, "IO", 74}, {ST_DEVICE, "DEVICE", 70}, {ST_COMM, "COMM", 75},
        {ST_INTERNAL, "INTERNAL", 70}, {ST_CANCELLED, "CANCELLED", 75}};
    for (size_t i = 0; i < sizeof(WANT) / sizeof(WANT[0]); i++) {
        assert_string_equal(st_name(WANT[i].st), WANT[i].name);
        assert_int_equal(st_exit_code(WANT[i].st), WANT[i].code);
    }
    for (int st = ST_OK + 1; st < ST_N; st++) {
        assert_non_null(st_name((enum st)st));
        assert_int_not_equal(st_exit_code((enum st)st), 0);
    }
    assert_string_equal(st_name(ST_N), "UNKNOWN");
    assert_int_equal(st_exit_code((enum st)-1), 70);
}

static void clock_goes_forward_by_what_was_slept(void **state)
{
    uint64_t before = clock_now_ns();
    clock_sleep_ns(2000000);
    assert_true(clock_now_ns() - before >= 2000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_are_dealt_out_evenly),
        cmocka_unit_test(runs_split_into_maximal_nodes),
        cmocka_unit_test(a_nodes_mask_has_its_slices),
        cmocka_unit_test(sums_of_runs_are_bracketed_like_the_whole_tree),
        cmocka_unit_test(generator_is_philox_4x32_10),
        cmocka_unit_test(uniform_values_are_on_their_grid_and_do_not_depend_on_n),
        cmocka_unit_test(normal_values_may_be_drawn_in_pieces),
        cmocka_unit_test(seeds_streams_and_indices_are_apart),
        cmocka_unit_test(digest_does_not_care_for_order_or_place),
        cmocka_unit_test(digest_is_a_sum_of_128_bits_in_hex),
        cmocka_unit_test(row_ids_come_apart_again),
        cmocka_unit_test(memory_fails_where_told_and_is_counted),
        cmocka_unit_test(memory_is_aligned_zeroed_and_grows),
        cmocka_unit_test(mapped_memory_is_zero),
        cmocka_unit_test(log_lines_have_one_form),
        cmocka_unit_test(log_goes_to_standard_error_line_by_line),
        cmocka_unit_test(a_broken_invariant_says_which_and_aborts),
        cmocka_unit_test(every_status_has_a_name_and_an_exit_code),
        cmocka_unit_test(clock_goes_forward_by_what_was_slept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
