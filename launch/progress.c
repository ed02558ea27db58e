#include "launch/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"

static const uint64_t TERMINAL_EVERY_NS = 100000000, PLAIN_EVERY_NS = UINT64_C(5000000000);

void progress_start(struct progress *p, const char *what, const char *unit, uint64_t total,
                    bool about)
{
    *p = (struct progress){.what = what, .unit = unit, .total = total, .about = about,
                           .terminal = isatty(STDERR_FILENO), .start_ns = clock_now_ns()};
    p->shown_ns = p->start_ns;
}

void progress_at(void *ctx, uint64_t done)
{
    struct progress *p = ctx;
    uint64_t now = clock_now_ns();
    if (now - p->shown_ns < (p->terminal ? TERMINAL_EVERY_NS : PLAIN_EVERY_NS)) return;
    p->shown_ns = now;
    p->shown = true;
    double rate = (double)done / ((double)(now - p->start_ns) * 1e-9);
    char of[64] = "", left[32] = "";
    if (p->total != 0)
        snprintf(of, sizeof(of), " of %s%" PRIu64, p->about ? "about " : "", p->total);
    if (p->total > done && rate > 0) {
        uint64_t s = (uint64_t)((double)(p->total - done) / rate);
        snprintf(left, sizeof(left), "  ETA %" PRIu64 ":%02d", s / 60, (int)(s % 60));
    }
    fprintf(stderr, "%s%s: %" PRIu64 "%s %s  %.0f %s/s%s%s", p->terminal ? "\r" : "", p->what, done,
            of, p->unit, rate, p->unit, left, p->terminal ? "\033[K" : "\n");
    fflush(stderr);
}

void progress_stop(struct progress *p)
{
    if (p->terminal && p->shown) fputs("\r\033[K", stderr);
}
