#include "tests/support/caught.h"

#include <stdio.h>

#include "base/log.h"

char caught_line[1200];
int caught_lines;

static void catch_line(void *ctx, const char *line)
{
    snprintf(caught_line, sizeof(caught_line), "%s", line);
    caught_lines++;
}

void caught_reset(void)
{
    caught_line[0] = '\0';
    caught_lines = 0;
}

void caught_start(void)
{
    caught_reset();
    log_set_sink(catch_line, NULL);
}

void caught_stop(void)
{
    log_set_sink(NULL, NULL);
}
