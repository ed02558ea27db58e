#include "launch/output.h"

#include <stddef.h>
#include <sys/stat.h>

#include "base/log.h"

enum st output_check(const char *path, const char *input, bool replace)
{
    struct stat to, from;
    if (path == NULL) return log_fail(ST_USAGE, NULL, "--out is missing; name the file to write");
    if (stat(path, &to) != 0) return ST_OK;
    if (input != NULL && stat(input, &from) == 0 && to.st_dev == from.st_dev &&
        to.st_ino == from.st_ino)
        return log_fail(ST_USAGE, path, "is the file to read from; name another to write");
    if (S_ISDIR(to.st_mode))
        return log_fail(ST_CANTCREATE, path, "is a directory; name a file");
    if (!replace)
        return log_fail(ST_CANTCREATE, path, "exists; give --force to replace it");
    return ST_OK;
}
