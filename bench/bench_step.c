/* bench/bench_step.c - how long does a training step take, and how long would it take if nothing
 * but the multiplications of its layers took time, at the machine's peak?
 *
 *   bench_step [--model A|B|all] [--batch N] [--threads N] [--slices N] [--optimizer sgd|adagrad]
 *              [--precision fp32|bf16] [--device cpu|cuda] [--ranks N] [--clock wall|cpu]
 *              [--parts] [--quick]
 *
 * One JSON line a case. Each repetition lies between two measurements of the peak and is dropped
 * when they differ; the rest give medians. `ratio` is time over floor, repetition by repetition; for
 * bf16, too, the floor is that of f32. --ranks N runs N processes at once that do not talk to each
 * other: an upper bound for N trainers. --clock cpu leaves out what other processes took: for busy
 * machines. The checks: step_case_check before, a loss that has fallen after. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "bench/peak.h"
#include "bench/step_case.h"
#include "bench/step_parts.h"

struct options {
    struct step_options step;      /* 0 or '\0': all of the usual values */
    uint32_t slices, ranks, repeat;
    enum bench_clock clock;
    bool parts;
};

/* --- one case ------------------------------------------------------------------------------- */

enum { MOST_REPEAT = 32 };

struct timing {
    uint32_t n, dropped;
    double us[MOST_REPEAT], ratio[MOST_REPEAT], peak[MOST_REPEAT];
    double first_loss, last_loss;  /* of the same batch */
};

static int ascending(const void *p, const void *q)
{
    double a = *(const double *)p, b = *(const double *)q;
    return a < b ? -1 : a > b;
}

static double median(double *x, uint32_t n)
{
    qsort(x, n, sizeof(*x), ascending);
    return n == 0 ? 0 : x[n / 2];
}

/* Some steps, timed together: seconds of one. Starts with a batch whose number is a multiple of
 * CASE_BATCHES, so that first losses compare. */
static enum st run_steps(struct step_case *c, uint32_t n, enum bench_clock clock, double *seconds,
                         double *loss)
{
    enum st st = ST_OK;
    uint32_t threads = c->config.cluster.threads;
    double start = bench_seconds(clock, threads), any;
    for (uint32_t k = 0; k < n && st == ST_OK; k++)
        st = step_case_train(c, k, k == 0 ? loss : &any);
    *seconds = (bench_seconds(clock, threads) - start) / n;
    return st;
}

static enum st time_steps(struct step_case *c, const struct options *o, struct lanes *lanes,
                          struct timing *t)
{
    enum st st = ST_OK;
    double seconds, before, after, flops = step_case_flops(c), batch = o->step.batch;
    TRY(run_steps(c, CASE_BATCHES, o->clock, &seconds, &t->last_loss), err); /* warm up */
    uint32_t steps = seconds < 0.05 ? CASE_BATCHES * (uint32_t)(1 + 0.05 / seconds / CASE_BATCHES)
                                    : 1;
    while (t->n < o->repeat && t->dropped < 5 * o->repeat) {
        before = lanes == NULL ? 1 : bench_peak(lanes, o->clock);
        TRY(run_steps(c, steps, o->clock, &seconds, &t->last_loss), err);
        after = lanes == NULL ? 1 : bench_peak(lanes, o->clock);
        if (!bench_steady(before, after)) {
            t->dropped++;
            continue;
        }
        t->peak[t->n] = (before + after) / 2;
        t->us[t->n] = seconds / batch * 1e6;
        t->ratio[t->n] = seconds / (flops / t->peak[t->n] * 1e-9);
        t->n++;
    }
err:
    return st;
}

static const char *PRECISION[] = {"fp32", "tf32", "bf16"};
static const char *OPTIMIZER[] = {"sgd", "adagrad", "rowwise_adagrad"};

static void print_case(const struct step_case *c, const struct options *o, uint32_t rank,
                       struct timing *t, bool has_peak)
{
    const struct step_options *s = &o->step;
    double us = median(t->us, t->n), peak = median(t->peak, t->n), ratio = median(t->ratio, t->n);
    printf("{\"bench\":\"step\",\"device\":\"%s\",\"model\":\"%c\",\"batch\":%u,\"threads\":%u,"
           "\"precision\":\"%s\",\"us_per_sample\":%.4f", c->device->ops->name, s->model, s->batch,
           s->threads, PRECISION[s->precision], us);
    if (has_peak && t->n > 0)
        printf(",\"floor_us_per_sample\":%.4f,\"ratio\":%.3f,\"best_ratio\":%.3f,"
               "\"peak_gflops\":%.1f", us / ratio, ratio, t->ratio[0], peak);
    printf(",\"slices\":%u,\"optimizer\":\"%s\",\"rank\":%u,\"ranks\":%u,\"clock\":\"%s\","
           "\"n\":%u,\"dropped\":%u,\"first_loss\":%.6f,\"last_loss\":%.6f}\n", s->slices,
           OPTIMIZER[s->optimizer], rank, o->ranks, o->clock == CLOCK_CPU ? "cpu" : "wall", t->n,
           t->dropped, t->first_loss, t->last_loss);
    fflush(stdout);
}

static enum st run_case(const struct options *o, uint32_t rank)
{
    enum st st = ST_OK;
    struct step_case *c = NULL;
    struct lanes *lanes = NULL;
    struct timing t = {0};
    bool has_peak = o->step.device == DEVICE_CPU;
    if (has_peak) TRY(lanes_open(o->step.threads, &lanes), err);
    TRY(step_case_open(&o->step, &c), err);
    TRY(step_case_check(c, &t.first_loss), err);
    TRY(time_steps(c, o, lanes, &t), err);
    if (!(t.last_loss < t.first_loss))
        st = log_fail(ST_DATA, "bench", "the loss of the first batch has not fallen: from %.6f to "
                      "%.6f", t.first_loss, t.last_loss);
    print_case(c, o, rank, &t, has_peak);
    if (st == ST_OK && o->parts && o->step.threads == 1)
        st = step_parts(c, &o->step, lanes, o->clock, o->repeat);
err:
    step_case_close(c);
    lanes_close(lanes);
    return st;
}

/* --- all cases ------------------------------------------------------------------------------ */

static enum st run_batches(struct options o, uint32_t rank)
{
    static const uint32_t BATCH[] = {512, 2048, 16384}, THREADS[] = {1, 2};
    uint32_t batch = o.step.batch, threads = o.step.threads;
    enum st st = ST_OK;
    for (int b = 0; b < 3 && st == ST_OK; b++)
        for (int t = 0; t < 2 && st == ST_OK; t++) {
            if ((batch != 0 && b > 0) || (threads != 0 && t > 0)) continue;
            o.step.batch = batch != 0 ? batch : BATCH[b];
            o.step.threads = threads != 0 ? threads : THREADS[t];
            o.step.slices = o.slices != 0 ? o.slices : o.step.threads;
            st = run_case(&o, rank);
        }
    return st;
}

static int run_rank(struct options o, uint32_t rank)
{
    char model = o.step.model;
    enum st st = ST_OK;
    for (const char *m = "AB"; *m != '\0' && st == ST_OK; m++) {
        if (model != '\0' && model != *m) continue;
        o.step.model = *m;
        st = run_batches(o, rank);
    }
    return log_exit_code(st);
}

/* Ranks 1.. are processes of their own, rank 0 is this one. */
static int run_ranks(const struct options *o)
{
    int worst = 0;
    for (uint32_t r = 1; r < o->ranks; r++) {
        pid_t pid = fork();
        if (pid < 0) return log_exit_code(log_fail(ST_IO, "bench", "no process for rank %u", r));
        if (pid == 0) exit(run_rank(*o, r));
    }
    worst = run_rank(*o, 0);
    for (int status; wait(&status) > 0;)
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) worst = 1;
    return worst;
}

/* --- options -------------------------------------------------------------------------------- */

static const struct option LONG[] = {
    {"model", 1, NULL, 'm'},     {"batch", 1, NULL, 'b'},     {"threads", 1, NULL, 't'},
    {"slices", 1, NULL, 's'},    {"optimizer", 1, NULL, 'o'}, {"precision", 1, NULL, 'p'},
    {"device", 1, NULL, 'd'},    {"ranks", 1, NULL, 'r'},     {"clock", 1, NULL, 'c'},
    {"parts", 0, NULL, 'P'},     {"quick", 0, NULL, 'q'},     {0}};

static uint32_t number(const char *text, uint32_t most)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end == '\0' && n >= 1 && n <= most) return (uint32_t)n;
    fprintf(stderr, "bench_step: '%s' is not a number from 1 to %u\n", text, most);
    exit(2);
}

/* Which of `names` is it? */
static uint32_t one_of(const char *text, const char *const *names, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++)
        if (strcmp(text, names[k]) == 0) return k;
    fprintf(stderr, "bench_step: '%s' is not one of:", text);
    for (uint32_t k = 0; k < n; k++) fprintf(stderr, " %s", names[k]);
    fputc('\n', stderr);
    exit(2);
}

int main(int argc, char **argv)
{
    static const char *const MODEL[] = {"A", "B", "all"}, *const DEVICE[] = {"cpu", "cuda"},
                      *const CLOCK[] = {"wall", "cpu"};
    struct options o = {.ranks = 1, .repeat = 15, .step.device = DEVICE_CPU};
    for (int c; (c = getopt_long(argc, argv, "", LONG, NULL)) != -1;)
        switch (c) {
        case 'm': o.step.model = "AB"[one_of(optarg, MODEL, 3)]; break;
        case 'b': o.step.batch = number(optarg, 1 << 20); break;
        case 't': o.step.threads = number(optarg, 64); break;
        case 's': o.slices = number(optarg, TREE_MAX_SLICES); break;
        case 'o': o.step.optimizer = (enum optimizer)one_of(optarg, OPTIMIZER, 3); break;
        case 'p': o.step.precision = (enum precision)one_of(optarg, PRECISION, 3); break;
        case 'd': o.step.device = (enum device_kind)one_of(optarg, DEVICE, 2); break;
        case 'r': o.ranks = number(optarg, 64); break;
        case 'c': o.clock = (enum bench_clock)one_of(optarg, CLOCK, 2); break;
        case 'P': o.parts = true; break;
        case 'q': o.repeat = 5; break;
        default: return 2;
        }
    return run_ranks(&o);
}
