#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

_Noreturn void check_failed(const char *file, int line, const char *cond, const char *why)
{
    fprintf(stderr, "chanter: bug: %s:%d: CHECK(%s) failed: %s\n", file, line, cond, why);
    abort();
}
