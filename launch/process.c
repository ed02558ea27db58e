#define _GNU_SOURCE
#include "launch/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

/* In the child, between fork and exec. */
static _Noreturn void become(char *const *argv, int out, pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(EXIT_FAILURE); /* it died before the line above */
    if (out >= 0) dup2(out, STDOUT_FILENO);
    execvp(argv[0], argv);
    fprintf(stderr, "chanter: error[E-NOINPUT]: %s: %s\n", argv[0], strerror(errno));
    _exit(66);
}

enum st process_start(struct process *p, const char *name, char *const *argv, int piped)
{
    int fd[2] = {-1, -1};
    if (piped && pipe2(fd, O_CLOEXEC) != 0)
        return log_fail(ST_IO, name, "no pipe: %s", strerror(errno));
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        if (piped) close(fd[0]), close(fd[1]);
        return log_fail(ST_NOMEM, name, "cannot be started: %s", strerror(errno));
    }
    if (pid == 0) become(argv, fd[1], parent);
    if (piped) close(fd[1]);
    *p = (struct process){.pid = pid, .out = fd[0]};
    snprintf(p->name, sizeof(p->name), "%s", name);
    return ST_OK;
}

/* Read up to a newline. */
static enum st read_line(struct process *p, uint64_t until_ns, char *line, size_t cap)
{
    size_t n = 0;
    while (n + 1 < cap) {
        uint64_t now = clock_now_ns();
        struct pollfd pfd = {p->out, POLLIN, 0};
        if (now >= until_ns || poll(&pfd, 1, (int)((until_ns - now) / 1000000) + 1) == 0)
            return log_fail(ST_TIMEOUT, p->name, "is not ready in time");
        ssize_t got = read(p->out, line + n, 1);
        if (got == 0) return ST_END;
        if (got < 0) {
            if (errno == EINTR) continue;
            return log_fail(ST_IO, p->name, "%s", strerror(errno));
        }
        if (line[n] == '\n') break;
        n++;
    }
    line[n] = '\0';
    return ST_OK;
}

enum st process_ready(struct process *p, uint32_t timeout_ms, char *address, size_t cap)
{
    static const char READY[] = "ready ";
    char line[256];
    enum st st = read_line(p, clock_now_ns() + (uint64_t)timeout_ms * 1000000u, line, sizeof(line));
    if (st != ST_OK) return st;
    if (strncmp(line, READY, strlen(READY)) != 0 || strlen(line) - strlen(READY) >= cap)
        return log_fail(ST_BADMSG, p->name, "says '%s' where its address should be", line);
    memcpy(address, line + strlen(READY), strlen(line) - strlen(READY) + 1);
    return ST_OK;
}

int process_wait(struct process *p, uint32_t timeout_ms)
{
    uint64_t until_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000u;
    while (p->pid > 0 && waitpid(p->pid, &p->status, WNOHANG) == 0) {
        if (clock_now_ns() > until_ns) return 0;
        clock_sleep_ns(5000000);
    }
    p->pid = 0;
    return 1;
}

void process_stop(struct process *p, uint32_t grace_ms)
{
    if (p->pid > 0) {
        kill(p->pid, SIGTERM);
        if (!process_wait(p, grace_ms)) {
            kill(p->pid, SIGKILL);
            waitpid(p->pid, &p->status, 0);
            p->pid = 0;
        }
    }
    if (p->out >= 0) close(p->out);
    p->out = -1;
}

int process_code(const struct process *p)
{
    return WIFSIGNALED(p->status) ? 128 + WTERMSIG(p->status) : WEXITSTATUS(p->status);
}
