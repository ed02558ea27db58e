/* tests/support/caught.h - what was logged: a sink that keeps the last line and counts. */
#ifndef CHANTER_TESTS_SUPPORT_CAUGHT_H
#define CHANTER_TESTS_SUPPORT_CAUGHT_H

extern char caught_line[1200]; /* the last one; "" since caught_reset */
extern int caught_lines;       /* since caught_reset                  */

void caught_start(void);       /* lines go here from now on           */
void caught_stop(void);        /* and to standard error again         */
void caught_reset(void);

#endif
