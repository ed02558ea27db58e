/* tests/support/output.h - what was printed: standard output into a string for a while. */
#ifndef CHANTER_TESTS_SUPPORT_OUTPUT_H
#define CHANTER_TESTS_SUPPORT_OUTPUT_H

#include <stddef.h>

void output_start(void);                      /* standard output goes to a file without a name */
void output_stop(char *out, size_t room);     /* and back; what came, cut to room - 1 bytes    */

#endif
