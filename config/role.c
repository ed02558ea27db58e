#define _GNU_SOURCE
#include "config/role.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/check.h"
#include "base/log.h"

enum { JOB_DIGITS = 16, MAX_ATTEMPT = (1 << 24) - 1 /* a row's stamp has 24 bits for it */ };

static enum st job_parse(const char *text, uint64_t *out)
{
    size_t digits = strspn(text, "0123456789abcdefABCDEF");
    if (digits == 0 || digits > JOB_DIGITS || text[digits] != '\0')
        return log_fail(ST_USAGE, NULL, "--job '%s': want 1 to %d hexadecimal digits", text,
                        JOB_DIGITS);
    *out = strtoull(text, NULL, 16);
    return ST_OK;
}

/* The role's own options behind those that all roles take. */
static enum st parse(int argc, char **argv, struct options *options, const struct option *shared,
                     size_t n_shared, const struct option *own, size_t n_own)
{
    struct option all[OPTIONS_MAX];
    CHECK(n_shared + n_own <= OPTIONS_MAX, "a role has few options");
    memcpy(all, shared, n_shared * sizeof(*all));
    memcpy(all + n_shared, own, n_own * sizeof(*all));
    options->option = all;
    options->n_options = n_shared + n_own;
    return options_parse(options, argc, argv);
}

enum st role_open(int argc, char **argv, const char *program, const char *help,
                  const struct option *own, size_t n_own, struct role_args *out)
{
    const char *file = NULL, *job = NULL;
    uint64_t attempt = 0;
    struct config_args config = {0};
    const struct option shared[] = {
        {.name = "config", .arg = "FILE", .text = &file, .help = "the job's configuration"},
        OPTIONS_CONFIG(&config),
        {.name = "job", .arg = "HEX", .text = &job,
         .help = "number of the job, the same for all its processes"},
        {.name = "attempt", .arg = "N", .number = &attempt, .hi = MAX_ATTEMPT,
         .help = "how often the job was restarted (0)"},
    };
    struct options options = {.program = program, .operands = "", .help = help};
    enum st st;
    struct role_args a = {0};
    TRY(parse(argc, argv, &options, shared, sizeof(shared) / sizeof(*shared), own, n_own), err);
    if (file == NULL || job == NULL) {
        st = log_fail(ST_USAGE, NULL, "--%s is missing; see %s --help",
                      file == NULL ? "config" : "job", program);
        goto err;
    }
    TRY(job_parse(job, &a.job), err);
    a.attempt = (uint32_t)attempt;
    TRY(config_args_open(&config, file, &a.config), err);
    *out = a;
err: return st;
}

void role_close(struct role_args *a)
{
    config_close(a->config);
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
}

void role_die_with_parent(void)
{
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
