#include "tests/support/output.h"

#include <stdio.h>
#include <unistd.h>

#include "base/check.h"

static FILE *file;
static int saved;

void output_start(void)
{
    fflush(stdout);
    file = tmpfile();
    saved = dup(STDOUT_FILENO);
    CHECK(file != NULL && saved >= 0, "a test needs a file");
    CHECK(dup2(fileno(file), STDOUT_FILENO) >= 0, "a test needs its output");
}

void output_stop(char *out, size_t room)
{
    fflush(stdout);
    CHECK(dup2(saved, STDOUT_FILENO) >= 0, "a test needs its output");
    close(saved);
    rewind(file);
    out[fread(out, 1, room - 1, file)] = '\0';
    fclose(file);
}
