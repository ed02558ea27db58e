#include "launch/output.h"

#include <sys/stat.h>

#include "base/log.h"
#include "data/outfile.h"

static bool same_file(const struct stat *to, const char *input)
{
    struct stat from;
    return input != NULL && stat(input, &from) == 0 && to->st_dev == from.st_dev &&
           to->st_ino == from.st_ino;
}

enum st output_check(const char *path, const char *const *input, size_t n, bool replace)
{
    struct stat to;
    if (path == NULL) return log_fail(ST_USAGE, NULL, "--out is missing; name the file to write");
    bool there = stat(path, &to) == 0;
    for (size_t i = 0; there && i < n; i++)
        if (same_file(&to, input[i]))
            return log_fail(ST_USAGE, path, "is the file to read from; name another to write");
    enum st st = outfile_check(path);
    if (st == ST_OK && there && !replace)
        st = log_fail(ST_CANTCREATE, path, "exists; give --force to replace it");
    return st;
}
