/* base/log.h - what users read on standard error: one line an event, said once, by the place that
 * first knows. Not for data: results go to standard output and the run directory. */
#ifndef CHANTER_BASE_LOG_H
#define CHANTER_BASE_LOG_H

#include "base/status.h"

/* "chanter: error[E-DATA]: WHERE: what; what to do". `where` names a file and line, a key or a
 * peer; NULL leaves it out. Returns `st`, so that `return log_fail(ST_DATA, ...)` reads well.
 * Any thread; one write a line. */
enum st log_fail(enum st st, const char *where, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* For the end of main: the exit code of `st`. Out of memory deep inside is passed up without a word;
 * here it gets its line if nobody has said one. */
int log_exit_code(enum st st);
/* A file could not be opened, errno says why: "no such file" and ST_NOINPUT, "permission denied" and
 * ST_PERM, otherwise ST_IO. Any thread. */
enum st log_open_failed(const char *path);
/* "chanter: WHERE: ..." for things a user should know that stop nothing. Any thread. */
void log_note(const char *where, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Progress on a terminal: a line on standard error that the next one replaces; NULL: no more. Lines
 * of log_fail and log_note begin below it. One thread. */
void log_progress(const char *line);

/* Name put behind "chanter" in each line ("chanter: trainer 1: ..."); NULL for none. Kept by
 * copy (31 bytes). Call before threads start. */
void log_set_role(const char *role);
/* Send whole lines (no newline) to `sink` in place of standard error; NULL restores it. For
 * tests. Call before threads start. */
void log_set_sink(void (*sink)(void *ctx, const char *line), void *ctx);

#endif
