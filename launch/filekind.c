#include "launch/filekind.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"

enum { HEAD_BYTES = 9 };

static bool ends_in(const char *path, const char *tail)
{
    size_t n = strlen(path), k = strlen(tail);
    return n >= k && strcmp(path + n - k, tail) == 0;
}

/* head[0..n): the file's first bytes. */
static enum filekind kind_of_file(const char *path, const char *head, size_t n)
{
    if (n >= 8 && memcmp(head, "CHANTERP", 8) == 0) return FILEKIND_PREPARED;
    if (ends_in(path, ".chp")) return FILEKIND_PREPARED;
    if (ends_in(path, ".safetensors")) return FILEKIND_SAFETENSORS;
    if (ends_in(path, ".jsonl")) return FILEKIND_METRICS;
    if (n >= 2 && memcmp(head, "{\"", 2) == 0) return FILEKIND_METRICS;
    /* A header's length, little endian and below 2^24, then the header. */
    if (n == HEAD_BYTES && memcmp(head + 3, "\0\0\0\0\0{", 6) == 0) return FILEKIND_SAFETENSORS;
    return FILEKIND_OTHER;
}

enum st filekind_of(const char *path, enum filekind *out)
{
    struct stat s;
    char head[HEAD_BYTES];
    if (stat(path, &s) != 0)
        return log_fail(errno == EACCES ? ST_PERM : ST_NOINPUT, path, "%s", strerror(errno));
    if (S_ISDIR(s.st_mode)) {
        *out = FILEKIND_DIRECTORY;
        return ST_OK;
    }
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return log_fail(errno == EACCES ? ST_PERM : ST_NOINPUT, path, "%s", strerror(errno));
    size_t n = fread(head, 1, sizeof(head), f);
    int failed = ferror(f);
    fclose(f);
    if (failed) return log_fail(ST_IO, path, "cannot read");
    *out = kind_of_file(path, head, n);
    return ST_OK;
}
