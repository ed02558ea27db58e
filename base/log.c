#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LINE_BYTES = 1024 };

/* Set before threads start, never changed after. */
static char role_name[32];
static void (*line_sink)(void *ctx, const char *line);
static void *sink_ctx;

/* An error was logged. Relaxed: read at the end, when threads have been joined. */
static atomic_bool error_said;

/* A progress line stands on the terminal. Relaxed: at worst a line begins one too low. */
static atomic_bool progress_shown;

void log_set_role(const char *role)
{
    snprintf(role_name, sizeof(role_name), "%s", role == NULL ? "" : role);
}

void log_set_sink(void (*sink)(void *ctx, const char *line), void *ctx)
{
    line_sink = sink;
    sink_ctx = ctx;
}

static void emit(const char *kind, const char *where, const char *fmt, va_list ap)
{
    char line[LINE_BYTES + 1];
    size_t n = 0;
    n += (size_t)snprintf(line, LINE_BYTES, "chanter: %s%s%s", role_name,
                          role_name[0] != '\0' ? ": " : "", kind);
    if (where != NULL && n < LINE_BYTES)
        n += (size_t)snprintf(line + n, LINE_BYTES - n, "%s: ", where);
    if (n < LINE_BYTES) n += (size_t)vsnprintf(line + n, LINE_BYTES - n, fmt, ap);
    if (n >= LINE_BYTES) n = LINE_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        if (line[i] == '\n') line[i] = ' ';
    if (line_sink != NULL) {
        line_sink(sink_ctx, line);
        return;
    }
    if (atomic_exchange_explicit(&progress_shown, false, memory_order_relaxed))
        fputc('\n', stderr); /* unbuffered */
    line[n++] = '\n';
    ssize_t put = write(STDERR_FILENO, line, n);
    (void)put; /* standard error is the last resort: nobody is left to tell */
}

void log_progress(const char *line)
{
    if (line != NULL) {
        fprintf(stderr, "\r%s\033[K", line);
        atomic_store_explicit(&progress_shown, true, memory_order_relaxed);
    } else if (atomic_exchange_explicit(&progress_shown, false, memory_order_relaxed)) {
        fputc('\n', stderr);
    }
    fflush(stderr);
}

enum st log_fail(enum st st, const char *where, const char *fmt, ...)
{
    char kind[48];
    snprintf(kind, sizeof(kind), "error[E-%s]: ", st_name(st));
    va_list ap;
    va_start(ap, fmt);
    emit(kind, where, fmt, ap);
    va_end(ap);
    atomic_store_explicit(&error_said, true, memory_order_relaxed);
    return st;
}

int log_exit_code(enum st st)
{
    if (st == ST_NOMEM && !atomic_load_explicit(&error_said, memory_order_relaxed))
        log_fail(st, NULL, "out of memory; free some, or lower cluster.cache_rows or "
                 "train.global_batch");
    return st_exit_code(st);
}

enum st log_open_failed(const char *path)
{
    switch (errno) {
    case ENOENT:
    case ENOTDIR: return log_fail(ST_NOINPUT, path, "no such file");
    case EACCES:
    case EPERM: return log_fail(ST_PERM, path, "permission denied");
    default: return log_fail(ST_IO, path, "cannot open: %s", strerror(errno));
    }
}

void log_note(const char *where, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    emit("", where, fmt, ap);
    va_end(ap);
}
