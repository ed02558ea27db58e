/* base/check.h - CHECK is for our own bugs, in release builds too. Never for input, a file, the
 * network or memory: those come back as enum st. */
#ifndef CHANTER_BASE_CHECK_H
#define CHANTER_BASE_CHECK_H

/* Print file:line, the condition and `why` (an invariant's number where there is one), abort. */
_Noreturn void check_failed(const char *file, int line, const char *cond, const char *why);

#define CHECK(cond, why) ((cond) ? (void)0 : check_failed(__FILE__, __LINE__, #cond, (why)))

#endif
