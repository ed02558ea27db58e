#include "trainer/metrics.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

struct metrics {
    FILE *file;
    char path[512];
    enum progress_mode mode;
    uint64_t iterations;
    uint64_t start_ns, shown_ns;
    uint64_t done;             /* iterations so far */
    uint64_t samples;
    double auc;                /* of the last evaluation; NaN before the first */
};

static const uint64_t TTY_EVERY_NS = 100000000, PLAIN_EVERY_NS = UINT64_C(5000000000);

enum st metrics_open(const char *dir, enum progress_mode mode, uint64_t iterations,
                     struct metrics **out)
{
    struct metrics *m = mem_zalloc(1, sizeof(*m));
    if (m == NULL) return ST_NOMEM;
    m->mode = mode;
    m->iterations = iterations;
    m->auc = NAN;
    m->start_ns = m->shown_ns = clock_now_ns();
    snprintf(m->path, sizeof(m->path), "%s/metrics.jsonl", dir);
    m->file = fopen(m->path, "w");
    if (m->file == NULL) {
        log_fail(ST_CANTCREATE, m->path, "%s", strerror(errno));
        mem_free(m);
        return ST_CANTCREATE;
    }
    *out = m;
    return ST_OK;
}

void metrics_close(struct metrics *m)
{
    if (m == NULL) return;
    if (m->mode == PROGRESS_TTY) log_progress(NULL);
    fclose(m->file);
    mem_free(m);
}

static enum st written(struct metrics *m, int n)
{
    if (n >= 0 && fflush(m->file) == 0) return ST_OK;
    return log_fail(ST_IO, m->path, "%s", strerror(errno));
}

/* "  4230 samples/s  ETA 1:05"; nothing after the first iteration, whose speed is the start's. */
static void speed_text(const struct metrics *m, double seconds, char *text, size_t cap)
{
    text[0] = '\0';
    if (m->samples == 0) return;
    int n = snprintf(text, cap, "  %.0f samples/s", (double)m->samples / seconds);
    if (m->iterations == 0) return;
    double left = seconds / (double)(m->done - 1) * (double)(m->iterations - m->done);
    snprintf(text + n, cap - (size_t)n, "  ETA %d:%02d", (int)left / 60, (int)left % 60);
}

static void show(struct metrics *m, int64_t i, double loss)
{
    uint64_t now = clock_now_ns();
    int last = m->iterations != 0 && m->done == m->iterations;
    int tty = m->mode == PROGRESS_TTY;
    uint64_t every = tty ? TTY_EVERY_NS : PLAIN_EVERY_NS;
    if (m->mode == PROGRESS_NONE || (now - m->shown_ns < every && !last && m->done != 1)) return;
    m->shown_ns = now;
    char of[32] = "", auc[32] = "", speed[96], line[256];
    if (m->iterations != 0) snprintf(of, sizeof(of), "/%llu", (unsigned long long)m->iterations);
    if (!isnan(m->auc)) snprintf(auc, sizeof(auc), "  auc %.4f", m->auc);
    speed_text(m, (double)(now - m->start_ns) * 1e-9, speed, sizeof(speed));
    snprintf(line, sizeof(line), "iteration %lld%s  loss %.5f%s%s", (long long)i + 1, of, loss,
             auc, speed);
    if (tty) log_progress(line);
    else fprintf(stderr, "%s\n", line);
}

enum st metrics_train(struct metrics *m, int64_t i, double loss, uint32_t samples,
                      uint64_t waited_ns)
{
    if (m->done == 0) m->start_ns = clock_now_ns(); /* speed from the second iteration on */
    else m->samples += samples;
    m->done++;
    int n = fprintf(m->file, "{\"event\":\"train\",\"iteration\":%lld,\"loss\":%.9g,"
                    "\"samples\":%u,\"wait_s\":%.6f}\n", (long long)i, loss, samples,
                    (double)waited_ns * 1e-9);
    show(m, i, loss);
    return written(m, n);
}

static const char *number(double x, char buf[32])
{
    if (isfinite(x)) snprintf(buf, 32, "%.9g", x);
    else snprintf(buf, 32, "null"); /* JSON has no NaN: AUC of one class */
    return buf;
}

enum st metrics_eval(struct metrics *m, int64_t i, const struct evaluation *e)
{
    char auc[32];
    m->auc = e->auc;
    int n = fprintf(m->file, "{\"event\":\"eval\",\"iteration\":%lld,\"rows\":%llu,"
                    "\"loss\":%.9g,\"auc\":%s}\n", (long long)i, (unsigned long long)e->rows,
                    e->loss, number(e->auc, auc));
    return written(m, n);
}

enum st metrics_planted(struct metrics *m, double loss, double auc)
{
    char text[32];
    if (m->mode != PROGRESS_NONE)
        log_note("data", "the planted model has loss %.5f and auc %.4f on the held-out rows", loss,
                 auc);
    int n = fprintf(m->file, "{\"event\":\"planted\",\"loss\":%.9g,\"auc\":%s}\n", loss,
                    number(auc, text));
    return written(m, n);
}

static int final_json(FILE *f, const char *event, const struct trainer_result *r)
{
    char hex[DIGEST_HEX_BYTES], eval[96] = "", auc[32];
    digest_hex(r->digest, hex);
    if (r->has_eval)
        snprintf(eval, sizeof(eval), "\"eval_loss\":%.9g,\"auc\":%s,", r->eval_loss,
                 number(r->auc, auc));
    return fprintf(f, "{%s\"iterations\":%llu,\"samples_per_s\":%.1f,\"loss\":%.9g,%s"
                   "\"seconds\":%.3f,\"exposed_wait_s\":%.4f,\"bytes\":{\"plan\":%llu,"
                   "\"fetch\":%llu,\"exchange\":%llu,\"write_back\":%llu},\"digest\":\"%s\"}\n",
                   event, (unsigned long long)r->iterations, r->samples_per_s, r->loss, eval,
                   r->seconds, r->exposed_wait_s, (unsigned long long)r->plan_bytes,
                   (unsigned long long)r->fetch_bytes, (unsigned long long)r->exchange_bytes,
                   (unsigned long long)r->write_back_bytes, hex);
}

enum st metrics_end(struct metrics *m, const struct trainer_result *r)
{
    return written(m, final_json(m->file, "\"event\":\"end\",", r));
}

void metrics_final_line(const struct trainer_result *r)
{
    final_json(stdout, "", r);
    fflush(stdout);
}
