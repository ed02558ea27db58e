#define _GNU_SOURCE
#include "config/role.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"

enum flag { CONFIG, SET, RANK, JOB, ATTEMPT, ADDRESS, HELP, N_FLAGS };

static const struct option FLAGS[] = {
    [CONFIG] = {"config", required_argument, NULL, CONFIG},
    [SET] = {"set", required_argument, NULL, SET},
    [RANK] = {"rank", required_argument, NULL, RANK},
    [JOB] = {"job", required_argument, NULL, JOB},
    [ATTEMPT] = {"attempt", required_argument, NULL, ATTEMPT},
    [ADDRESS] = {"address", required_argument, NULL, ADDRESS},
    [HELP] = {"help", no_argument, NULL, HELP},
    {0},
};

static void help(const char *program, const char *about)
{
    printf("usage: %s --config FILE --job HEX [options]\n%s\n"
           "  --config FILE   the job's configuration\n"
           "  --set KEY=VALUE override one key of it, e.g. cluster.trainers=4; may be repeated\n"
           "  --job HEX       number of the job: all its processes are given the same\n"
           "  --attempt N     how often the job was restarted; default 0\n"
           "  --rank N        which one of its role this process is; default 0\n"
           "  --address A     where to listen; default 127.0.0.1:0, the kernel chooses a port\n"
           "  --help          this text\n"
           "Prints \"ready ADDRESS\" when it listens; SIGTERM or SIGINT ends it.\n",
           program, about);
}

static enum st number(const char *flag, const char *text, int base, uint64_t max, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, base);
    /* strtoull takes signs, space and "0x", too */
    size_t digits = strspn(text, base == 16 ? "0123456789abcdefABCDEF" : "0123456789");
    if (digits == 0 || text[digits] != '\0' || errno != 0 || v > max)
        return log_fail(ST_USAGE, NULL, "--%s '%s': want a %s number up to %" PRIu64, flag, text,
                        base == 16 ? "hexadecimal" : "decimal", max);
    *out = v;
    return ST_OK;
}

static enum st take(struct role_args *a, enum flag flag, const char *text)
{
    uint64_t v = 0;
    enum st st = ST_OK;
    switch (flag) {
    case CONFIG: a->config = text; break;
    case ADDRESS: a->address = text; break;
    case SET: a->set[a->n_set++] = text; break;
    case JOB: st = number("job", text, 16, UINT64_MAX, &a->job); break;
    case RANK:
        st = number("rank", text, 10, UINT32_MAX, &v);
        a->rank = (uint32_t)v;
        break;
    case ATTEMPT:
        st = number("attempt", text, 10, UINT32_MAX, &v);
        a->attempt = (uint32_t)v;
        break;
    default: break;
    }
    return st;
}

/* All flags of argv into `a`. */
static enum st parse(int argc, char **argv, const char *about, struct role_args *a)
{
    const char *given[N_FLAGS] = {0};
    opterr = 0;
    optind = 1;
    for (int f; (f = getopt_long(argc, argv, ":", FLAGS, NULL)) != -1;) {
        if (f == ':') return log_fail(ST_USAGE, NULL, "%s needs a value", argv[optind - 1]);
        if (f < 0 || f >= N_FLAGS)
            return log_fail(ST_USAGE, NULL, "unknown option %s; see --help", argv[optind - 1]);
        if (f == HELP) {
            help(argv[0], about);
            return ST_END;
        }
        if (f != SET && given[f] != NULL && strcmp(given[f], optarg) != 0)
            return log_fail(ST_USAGE, NULL, "--%s given twice (%s, %s)", FLAGS[f].name, given[f],
                            optarg);
        given[f] = optarg;
        enum st st = take(a, (enum flag)f, optarg);
        if (st != ST_OK) return st;
    }
    if (optind < argc)
        return log_fail(ST_USAGE, NULL, "'%s' belongs to no option; see --help", argv[optind]);
    if (given[CONFIG] == NULL || given[JOB] == NULL)
        return log_fail(ST_USAGE, NULL, "--%s is missing; see --help",
                        given[CONFIG] == NULL ? "config" : "job");
    return ST_OK;
}

enum st role_args_open(int argc, char **argv, const char *about, struct role_args *out)
{
    struct role_args a = {.address = "127.0.0.1:0"};
    a.set = mem_alloc((size_t)argc, sizeof(*a.set));
    if (a.set == NULL) return log_fail(ST_NOMEM, NULL, "no memory for %d arguments", argc);
    enum st st = parse(argc, argv, about, &a);
    if (st == ST_OK) *out = a;
    else role_args_close(&a);
    return st;
}

void role_args_close(struct role_args *a)
{
    mem_free(a->set);
}

static sigset_t stop_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    return set;
}

void role_signals(void)
{
    sigset_t set = stop_signals();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
}

int role_stopped(uint64_t timeout_ns)
{
    sigset_t set = stop_signals();
    struct timespec wait = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                            .tv_nsec = (long)(timeout_ns % 1000000000u)};
    return sigtimedwait(&set, NULL, &wait) > 0;
}

void role_ready(const char *address)
{
    printf("ready %s\n", address);
    fflush(stdout);
}
