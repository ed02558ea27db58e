/* bench/bench_step.c - how long does a training step take, and how long would it take if nothing
 * but the multiplications of its layers took time, at the machine's peak?
 *
 * One JSON line a case. Each repetition lies between two measurements of the peak and is dropped
 * when they differ; the rest give medians. `ratio` is time over floor, repetition by repetition;
 * for bf16, too, the floor is that of f32. --ranks N runs N processes at once that do not talk to
 * each other: an upper bound for N trainers. --clock cpu leaves out what other processes took: for
 * busy machines. The checks: step_case_check before, a loss that has fallen after. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "bench/peak.h"
#include "bench/step_case.h"
#include "bench/step_parts.h"
#include "config/options.h"

struct bench {
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

static enum st time_steps(struct step_case *c, const struct bench *o, struct lanes *lanes,
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

static void print_case(const struct step_case *c, const struct bench *o, uint32_t rank,
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

static enum st run_case(const struct bench *o, uint32_t rank)
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

static enum st run_batches(struct bench o, uint32_t rank)
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

static int run_rank(struct bench o, uint32_t rank)
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
static int run_ranks(const struct bench *o)
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

/* Which of `names` is `text`? n: none, which is said. */
static uint32_t one_of(const char *option, const char *text, const char *const *names, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++)
        if (strcmp(text, names[k]) == 0) return k;
    log_fail(ST_USAGE, NULL, "--%s '%s': want one of %s, %s%s%s", option, text, names[0], names[1],
             n > 2 ? ", " : "", n > 2 ? names[2] : "");
    return n;
}

static enum st read_options(int argc, char **argv, struct bench *o)
{
    static const char *const MODEL[] = {"A", "B", "all"}, *const DEVICE[] = {"cpu", "cuda"},
                      *const CLOCK[] = {"wall", "cpu"};
    const char *model = "all", *optimizer = "sgd", *precision = "fp32", *device = "cpu";
    const char *clock = "wall";
    uint64_t batch = 0, threads = 0, slices = 0, ranks = 1;
    bool quick = false;
    const struct option table[] = {
        {.name = "model", .arg = "A|B|all", .text = &model, .help = "default all"},
        {.name = "batch", .arg = "N", .number = &batch, .lo = 1, .hi = 1 << 20,
         .help = "samples of a step; default 512, 2048 and 16384"},
        {.name = "threads", .arg = "N", .number = &threads, .lo = 1, .hi = 64,
         .help = "default 1 and 2"},
        {.name = "slices", .arg = "N", .number = &slices, .lo = 1, .hi = TREE_MAX_SLICES,
         .help = "default: as many as threads"},
        {.name = "optimizer", .arg = "NAME", .text = &optimizer,
         .help = "sgd (default), adagrad or rowwise_adagrad"},
        {.name = "precision", .arg = "NAME", .text = &precision,
         .help = "fp32 (default), tf32 or bf16"},
        {.name = "device", .arg = "NAME", .text = &device,
         .help = "cpu (default), or cuda: without peak and floor"},
        {.name = "ranks", .arg = "N", .number = &ranks, .lo = 1, .hi = 64,
         .help = "processes at once that do not talk to each other"},
        {.name = "clock", .arg = "wall|cpu", .text = &clock,
         .help = "cpu: without what other processes took"},
        {.name = "parts", .flag = &o->parts, .help = "a line for each call of the device, too"},
        {.name = "quick", .flag = &quick, .help = "few repetitions"},
    };
    const struct options options = {
        .program = "bench_step", .operands = "",
        .help = "Times whole training steps of one trainer beside the machine's peak.",
        .option = table, .n_options = sizeof(table) / sizeof(table[0])};
    enum st st = options_parse(&options, argc, argv);
    if (st != ST_OK) return st;
    uint32_t m = one_of("model", model, MODEL, 3);
    uint32_t opt = one_of("optimizer", optimizer, OPTIMIZER, 3);
    uint32_t p = one_of("precision", precision, PRECISION, 3);
    uint32_t d = one_of("device", device, DEVICE, 2), c = one_of("clock", clock, CLOCK, 2);
    if (m == 3 || opt == 3 || p == 3 || d == 2 || c == 2) return ST_USAGE;
    o->step = (struct step_options){.model = "AB"[m], .batch = (uint32_t)batch,
                                    .threads = (uint32_t)threads, .optimizer = (enum optimizer)opt,
                                    .precision = (enum precision)p, .device = (enum device_kind)d};
    o->slices = (uint32_t)slices;
    o->ranks = (uint32_t)ranks;
    o->clock = (enum bench_clock)c;
    o->repeat = quick ? 5 : 15;
    return ST_OK;
}

int main(int argc, char **argv)
{
    struct bench o = {0};
    enum st st = read_options(argc, argv, &o);
    if (st != ST_OK) return st == ST_END ? 0 : log_exit_code(st);
    return run_ranks(&o);
}
