#include "tests/support/run_files.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATH_BYTES = 512, RUN_SECONDS = 300, DENSE = 13, TABLES = 26 };

int run_program(const char *name, const char **argv)
{
    char path[PATH_BYTES];
    const char *bin = getenv("BIN");
    snprintf(path, sizeof(path), "%s/%s", bin != NULL ? bin : "build/bin", name);
    argv[0] = path;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        if (null >= 0) dup2(null, STDOUT_FILENO);
        alarm(RUN_SECONDS); /* outlives the exec: a run that hangs is killed */
        execv(path, (char *const *)argv);
        fprintf(stderr, "%s cannot be started; make all first\n", path);
        _exit(127);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* --- whole files ---------------------------------------------------------------------------- */

static char *slurp(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) fail_msg("%s is not there", path);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*n + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, *n, f), *n);
    fclose(f);
    p[*n] = '\0';
    return p;
}

struct weights_file {
    char path[PATH_BYTES];
    char *file;
    const char *data;   /* behind the header */
    size_t data_bytes;
    json_t *header;
};

struct weights_file *weights_open(const char *dir, const char *name)
{
    struct weights_file *w = calloc(1, sizeof(*w));
    size_t n;
    uint64_t header_bytes;
    json_error_t e;
    assert_non_null(w);
    snprintf(w->path, sizeof(w->path), "%s/%s.safetensors", dir, name);
    w->file = slurp(w->path, &n);
    assert_true(n > sizeof(header_bytes));
    memcpy(&header_bytes, w->file, sizeof(header_bytes));
    assert_true(header_bytes <= n - sizeof(header_bytes));
    w->header = json_loadb(w->file + sizeof(header_bytes), header_bytes, 0, &e);
    if (w->header == NULL) fail_msg("%s: header: %s", w->path, e.text);
    json_object_del(w->header, "__metadata__");
    w->data = w->file + sizeof(header_bytes) + header_bytes;
    w->data_bytes = n - sizeof(header_bytes) - header_bytes;
    return w;
}

void weights_close(struct weights_file *w)
{
    json_decref(w->header);
    free(w->file);
    free(w);
}

size_t weights_count(const struct weights_file *w)
{
    return json_object_size(w->header);
}

const float *weights_find(const struct weights_file *w, const char *tensor, size_t n)
{
    const char *dtype;
    json_int_t from, to;
    json_t *t = json_object_get(w->header, tensor), *shape;
    if (t == NULL) fail_msg("%s has no tensor %s", w->path, tensor);
    assert_int_equal(json_unpack(t, "{s:s, s:[I, I!], s:o}", "dtype", &dtype, "data_offsets",
                                 &from, &to, "shape", &shape), 0);
    assert_string_equal(dtype, "F32");
    size_t product = 1;
    for (size_t i = 0; i < json_array_size(shape); i++)
        product *= (size_t)json_integer_value(json_array_get(shape, i));
    if (product != n || (size_t)(to - from) != n * sizeof(float) || (size_t)to > w->data_bytes)
        fail_msg("%s: %s has %zu values in %lld bytes, not %zu", w->path, tensor, product,
                 (long long)(to - from), n);
    /* A header that is no multiple of 4 bytes long would leave floats unaligned. */
    assert_int_equal((uintptr_t)(w->data + from) % sizeof(float), 0);
    return (const float *)(const void *)(w->data + from);
}

size_t read_losses(const char *dir, double *loss, size_t cap)
{
    char path[PATH_BYTES];
    size_t bytes, n = 0;
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    char *text = slurp(path, &bytes), *save = NULL;
    for (char *l = strtok_r(text, "\n", &save); l != NULL; l = strtok_r(NULL, "\n", &save)) {
        json_error_t e;
        json_t *j = json_loads(l, 0, &e);
        if (j == NULL) fail_msg("%s: '%s': %s", path, l, e.text);
        const char *event = json_string_value(json_object_get(j, "event"));
        assert_non_null(event);
        if (strcmp(event, "train") == 0) {
            assert_true(n < cap);
            assert_int_equal(json_integer_value(json_object_get(j, "iteration")), n);
            assert_true(json_is_real(json_object_get(j, "loss")));
            loss[n++] = json_real_value(json_object_get(j, "loss"));
        }
        json_decref(j);
    }
    free(text);
    return n;
}

/* --- data ----------------------------------------------------------------------------------- */

/* Cut off and return the field at *rest: "" where there is no more. */
static const char *next_field(char **rest)
{
    char *field = *rest;
    size_t n = strcspn(field, "\t\r\n");
    *rest = field + n + (field[n] == '\t');
    field[n] = '\0';
    return field;
}

void read_clicks(const char *path, size_t n, const uint64_t *tables, float *label, float *dense,
                 uint64_t *row)
{
    char line[1024];
    FILE *f = fopen(path, "r");
    if (f == NULL) fail_msg("%s is not there", path);
    for (size_t b = 0; b < n; b++) {
        assert_non_null(fgets(line, sizeof(line), f));
        char *rest = line;
        label[b] = strtof(next_field(&rest), NULL);
        for (size_t k = 0; k < DENSE; k++)
            dense[b * DENSE + k] = (float)log(fmax(strtod(next_field(&rest), NULL), 0) + 1);
        for (size_t t = 0; t < TABLES; t++)
            row[b * TABLES + t] = strtoul(next_field(&rest), NULL, 16) % tables[t];
    }
    fclose(f);
}
