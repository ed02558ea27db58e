/* Safetensors: a file known byte for byte, what is written is read, and hostile files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "data/safetensors.h"
#include "tests/support/data_fixture.h"

/* As other programs write it: the header, a blank, 16 bytes of data. */
#define KNOWN_HEADER "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}} "
static const float KNOWN_DATA[] = {1.0f, -2.5f, 0.0f, 3e38f};

/* Length, header, data, as a file; n_data bytes of data. */
static const char *write_file(struct fixture *f, const char *header, const void *data,
                              size_t n_data)
{
    size_t n = strlen(header);
    char *all = malloc(8 + n + n_data);
    uint64_t length = n;
    memcpy(all, &length, 8);
    memcpy(all + 8, header, n);
    memcpy(all + 8 + n, data, n_data);
    fixture_write(f, "t.safetensors", all, 8 + n + n_data);
    free(all);
    return f->path;
}

static void a_file_of_another_program_is_read(void **state)
{
    struct fixture *f = *state;
    struct safetensors *s;
    write_file(f, "{\"__metadata__\":{\"format\":\"pt\"},"
                  "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]},"
                  "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[12,12]},"
                  "\"a\":{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[0,12]}}",
               KNOWN_DATA, 16);
    assert_int_equal(safetensors_open(f->path, &s), ST_OK);
    assert_int_equal(safetensors_count(s), 3);
    const struct st_tensor *t = safetensors_at(s, 0);
    assert_string_equal(t->name, "a"); /* the order is that of the data */
    assert_true(t->rows == 3 && t->cols == 1);
    assert_memory_equal(t->data, KNOWN_DATA, 12);
    t = safetensors_find(s, "b");
    assert_ptr_equal(t, safetensors_at(s, 2));
    assert_true(t->rows == 1 && t->cols == 0);
    assert_memory_equal(t->data, KNOWN_DATA + 3, 4);
    assert_true(safetensors_find(s, "e")->rows == 0);
    assert_null(safetensors_find(s, "c"));
    assert_null(safetensors_find(s, "__metadata__"));
    assert_null(safetensors_at(s, 3));
    safetensors_close(s);
}

static void the_bytes_written_are_known(void **state)
{
    struct fixture *f = *state;
    struct safetensors_writer *w;
    const struct st_tensor t[] = {{.name = "bot_l.0.weight", .rows = 2, .cols = 1},
                                  {.name = "bot_l.0.bias", .rows = 2}};
    char path[128], part[160];
    size_t n;
    snprintf(path, sizeof(path), "%s/t.safetensors", f->dir);
    snprintf(part, sizeof(part), "%s.part", path);
    assert_int_equal(safetensors_create(path, t, 2, &w), ST_OK);
    assert_int_equal(safetensors_append(w, KNOWN_DATA, 1), ST_OK);
    assert_int_equal(safetensors_append(w, KNOWN_DATA + 1, 3), ST_OK);
    assert_int_not_equal(access(path, F_OK), 0); /* not before the commit */
    assert_int_equal(safetensors_commit(w), ST_OK);
    assert_int_not_equal(access(part, F_OK), 0);

    static const char header[] =
        "{\"bot_l.0.weight\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
        "\"bot_l.0.bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}";
    char want[8 + 184 + 16];
    memset(want, ' ', sizeof(want));
    const uint64_t length = 184; /* 132 and blanks up to a data start of 192 = 3 * 64 */
    memcpy(want, &length, 8);
    memcpy(want + 8, header, sizeof(header) - 1);
    memcpy(want + 192, KNOWN_DATA, 16);
    char *got = fixture_read(path, &n);
    assert_int_equal(n, sizeof(want));
    assert_memory_equal(got, want, n);
    free(got);
}

static void what_is_written_is_read_back(void **state)
{
    enum { TENSORS = 300 };
    struct fixture *f = *state;
    static struct st_tensor t[TENSORS];
    static float data[TENSORS * 8];
    struct safetensors_writer *w;
    struct safetensors *s;
    char path[128];
    snprintf(path, sizeof(path), "%s/t.safetensors", f->dir);
    for (unsigned i = 0; i < TENSORS; i++) {
        snprintf(t[i].name, sizeof(t[i].name), "emb_l.%u.weight", i);
        t[i].rows = i % 5;
        t[i].cols = i % 3;
    }
    for (unsigned i = 0; i < TENSORS * 8; i++) data[i] = (float)i * 0.37f;
    assert_int_equal(safetensors_create(path, t, TENSORS, &w), ST_OK);
    for (unsigned i = 0; i < TENSORS; i++)
        assert_int_equal(safetensors_append(w, data + i * 8,
                                            t[i].rows * (t[i].cols == 0 ? 1 : t[i].cols)), ST_OK);
    assert_int_equal(safetensors_commit(w), ST_OK);
    assert_int_equal(safetensors_open(path, &s), ST_OK);
    assert_int_equal(safetensors_count(s), TENSORS);
    for (unsigned i = 0; i < TENSORS; i++) {
        const struct st_tensor *got = safetensors_find(s, t[i].name);
        assert_true(got->rows == t[i].rows && got->cols == t[i].cols);
        assert_memory_equal(got->data, data + i * 8,
                            t[i].rows * (t[i].cols == 0 ? 1 : t[i].cols) * sizeof(float));
    }
    safetensors_close(s);
}

static void an_abandoned_file_leaves_nothing(void **state)
{
    struct fixture *f = *state;
    struct safetensors_writer *w;
    const struct st_tensor t = {.name = "a", .rows = 4};
    char path[128];
    snprintf(path, sizeof(path), "%s/t.safetensors", f->dir);
    assert_int_equal(safetensors_create(path, &t, 1, &w), ST_OK);
    assert_int_equal(safetensors_append(w, KNOWN_DATA, 2), ST_OK);
    safetensors_abandon(w);
    safetensors_abandon(NULL);
    assert_int_not_equal(access(path, F_OK), 0); /* teardown sees that no other file is left */
    enum st st = safetensors_create("/no/such/directory/x", &t, 1, &w);
    fixture_assert_failed(f, st, ST_CANTCREATE, "/no/such/directory/x: cannot create");
}

#define ONE(body) "{\"a\":{" body "}}"
#define A(shape, offsets) ONE("\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets)
#define TWO(a, b)                                                                                 \
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" a "},"                            \
    "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" b "}}"

static void a_hostile_header_is_refused(void **state)
{
    static const struct { const char *header, *fragment; } CASES[] = {
        {"", "bad header: "},
        {"{", "bad header: "},
        {"[]", "bad header: not a JSON object"},
        {"{} x", "bad header: end of file expected"},
        {"{\"a\":1}", "a: dtype missing, need F32"},
        {ONE("\"dtype\":\"F16\",\"shape\":[8],\"data_offsets\":[0,16]"), "a: dtype F16, need F32"},
        {ONE("\"dtype\":\"F32\",\"data_offsets\":[0,16]"), "a: shape is not one or two sizes"},
        {ONE("\"dtype\":\"F32\",\"shape\":[4]"), "a: data_offsets is not two offsets"},
        {A("[]", "[0,4]"), "a: shape is not one or two sizes"},
        {A("[1,2,2]", "[0,16]"), "a: shape is not one or two sizes"},
        {A("[4,0]", "[0,0]"), "a: shape is not one or two sizes"},
        {A("[-4]", "[0,16]"), "a: shape is not one or two sizes"},
        {A("[4.0]", "[0,16]"), "a: shape is not one or two sizes"},
        {A("\"4\"", "[0,16]"), "a: shape is not one or two sizes"},
        {A("[4294967296,4294967297]", "[0,16]"), "a: shape is impossibly large"},
        {A("[4611686018427387908]", "[0,16]"), "a: shape is impossibly large"},
        {A("[9223372036854775808]", "[0,16]"), "bad header: too big integer"},
        {A("[4]", "[0,20]"), "a: data_offsets [0, 20] lie outside the 16 bytes of data"},
        {A("[4]", "[16,0]"), "a: data_offsets [16, 0] lie outside"},
        {A("[4]", "[9223372036854775807,9223372036854775807]"), "lie outside the 16 bytes"},
        {A("[4]", "[-16,0]"), "a: data_offsets is not two offsets"},
        {A("[4]", "[0]"), "a: data_offsets is not two offsets"},
        {A("[4]", "[0,16,32]"), "a: data_offsets is not two offsets"},
        {A("[3]", "[0,16]"), "a: shape takes 12 bytes, data_offsets give 16"},
        {A("[3]", "[0,12]"), "4 bytes behind the last tensor"},
        {A("[3]", "[4,16]"), "a: gap before it at byte 0"},
        {TWO("[0,8]", "[4,12]"), "b: overlaps the tensor before it at byte 8"},
        {TWO("[0,8]", "[0,8]"), "b: overlaps the tensor before it at byte 8"},
        {TWO("[8,16]", "[0,8]") "{}", "bad header: end of file expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}",
         "bad header: duplicate object key"},
        {"{}", "16 bytes behind the last tensor"},
        {"{\"a123456789b123456789c123456789d123456789e123456789f123456789g123\":{}}",
         "tensor name 'a123456789b123456789c123456789d123456789...' is longer than 63 bytes"},
    };
    struct fixture *f = *state;
    struct safetensors *untouched = (struct safetensors *)f, *s = untouched;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        write_file(f, CASES[i].header, KNOWN_DATA, 16);
        enum st st = safetensors_open(f->path, &s);
        fixture_assert_failed(f, st, ST_DATA, CASES[i].fragment);
        assert_ptr_equal(s, untouched);
    }
    assert_int_equal(mem_live(), 0);
}

static void a_file_cut_anywhere_is_refused(void **state)
{
    struct fixture *f = *state;
    struct safetensors *s;
    size_t n;
    char *all = fixture_read(write_file(f, KNOWN_HEADER, KNOWN_DATA, 16), &n);
    assert_int_equal(safetensors_open(f->path, &s), ST_OK);
    safetensors_close(s);
    for (size_t cut = 0; cut < n; cut++) {
        fixture_write(f, "t.safetensors", all, cut);
        const char *fragment = cut < 8 ? "not a safetensors file: "
                             : cut < n - 16 ? "not a safetensors file, or truncated"
                                            : "lie outside the";
        fixture_assert_failed(f, safetensors_open(f->path, &s), ST_DATA, fragment);
    }
    memset(all, 0xff, 8); /* a header of 2^64 - 1 bytes */
    fixture_write(f, "t.safetensors", all, n);
    fixture_assert_failed(f, safetensors_open(f->path, &s), ST_DATA,
                          "header of 18446744073709551615 bytes in a file of ");
    fixture_assert_failed(f, safetensors_open("no/such/file", &s), ST_NOINPUT, "no such file");
    free(all);
}

static void every_allocation_may_fail(void **state)
{
    struct fixture *f = *state;
    struct safetensors_writer *w;
    struct safetensors *s;
    const struct st_tensor t = {.name = "a", .rows = 2, .cols = 2};
    unsigned reads = 0, writes = 0;
    write_file(f, KNOWN_HEADER, KNOWN_DATA, 16);
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = safetensors_open(f->path, &s);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            safetensors_close(s);
            break;
        }
        reads++;
        fixture_assert_failed(f, st, ST_NOMEM, "out of memory");
        assert_int_equal(mem_live(), 0);
    }
    for (size_t nth = 1;; nth++) {
        mem_fail_at(nth);
        enum st st = safetensors_create(f->path, &t, 1, &w);
        if (!mem_fail_stop()) {
            assert_int_equal(st, ST_OK);
            safetensors_abandon(w);
            break;
        }
        writes++;
        fixture_assert_failed(f, st, ST_NOMEM, "out of memory");
        assert_int_equal(mem_live(), 0);
    }
    assert_int_equal(reads, 3);  /* reader, path, entries */
    assert_int_equal(writes, 5); /* writer, outfile 4 */
}

#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_file_of_another_program_is_read),
        WITH_FIXTURE(the_bytes_written_are_known),
        WITH_FIXTURE(what_is_written_is_read_back),
        WITH_FIXTURE(an_abandoned_file_leaves_nothing),
        WITH_FIXTURE(a_hostile_header_is_refused),
        WITH_FIXTURE(a_file_cut_anywhere_is_refused),
        WITH_FIXTURE(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
