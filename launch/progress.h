/* launch/progress.h - how far a long command is, on standard error: one line that rewrites itself
 * on a terminal, a plain line now and then elsewhere, nothing for what is done in a moment. */
#ifndef CHANTER_LAUNCH_PROGRESS_H
#define CHANTER_LAUNCH_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    const char *what, *unit;      /* "prepare", "rows"; lent until progress_stop      */
    uint64_t total;               /* 0: not known                                     */
    bool about;                   /* the total is an estimate                         */
    bool terminal, shown;
    uint64_t start_ns, shown_ns;
};

void progress_start(struct progress *p, const char *what, const char *unit, uint64_t total,
                    bool about);
/* `p` is a struct progress (void, so that it fits the callbacks of long calls). */
void progress_at(void *p, uint64_t done);
void progress_stop(struct progress *p);

#endif
