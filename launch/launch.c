/* The job as processes: servers and the oracle first, each of which says where it listens, then the
 * trainers as one MPI job. The first process that ends before its time ends the job; so does a
 * signal. Whatever way it goes, no process is left behind. */
#define _GNU_SOURCE
#include "launch/launch.h"

#include <dirent.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "launch/job.h"
#include "launch/process.h"

enum { READY_MS = 30000, START_MS = 60000, GRACE_MS = 5000, ADDRESS_BYTES = 64, ARG_BYTES = 32 };
/* Trainers end by themselves when a role they need is gone, and say what they saw. mpirun must not
 * be signalled while it sees to that. */
enum { LEAVE_MS = 2000 };

struct cluster {
    const struct job *job;
    const struct config *config;
    char bin[PATH_MAX];            /* where the role programs are  */
    char config_path[PATH_MAX];
    char trainer_path[PATH_MAX + ARG_BYTES];
    char job_hex[ARG_BYTES];
    char shm_dir[ARG_BYTES + 32];  /* MPI's segments: removed whatever ends the trainers */
    char started_path[PATH_MAX];   /* rank 0 makes it: the trainers have started         */
    uint32_t n_servers;
    struct process *server;        /* [n_servers] */
    char (*address)[ADDRESS_BYTES];/* [n_servers] */
    char *servers;                 /* all addresses, comma between */
    struct process oracle, trainers;
    uint64_t start_by_ns;          /* the trainers have to have started by then          */
    char oracle_address[ADDRESS_BYTES];
};

/* The role programs lie beside the one that runs now. */
static enum st find_programs(struct cluster *c)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0) return log_fail(ST_IO, "/proc/self/exe", "%s", strerror(errno));
    self[n] = '\0';
    snprintf(c->bin, sizeof(c->bin), "%s", dirname(self));
    int len = snprintf(c->config_path, sizeof(c->config_path), "%s/config.yaml",
                       c->config->run.dir);
    int more = snprintf(c->started_path, sizeof(c->started_path), "%s/metrics.jsonl",
                        c->config->run.dir);
    if (len >= (int)sizeof(c->config_path) || more >= (int)sizeof(c->started_path))
        return log_fail(ST_CONFIG, "run.dir", "is too long");
    snprintf(c->trainer_path, sizeof(c->trainer_path), "%s/chanter-trainer", c->bin);
    if (access(c->trainer_path, X_OK) != 0) /* mpirun would not say so: it is quiet */
        return log_fail(ST_NOINPUT, c->trainer_path, "%s", strerror(errno));
    return ST_OK;
}

static enum st start_role(struct cluster *c, struct process *p, const char *program,
                          const char *name, uint32_t rank)
{
    char path[PATH_MAX + ARG_BYTES], rank_text[ARG_BYTES];
    snprintf(path, sizeof(path), "%s/%s", c->bin, program);
    snprintf(rank_text, sizeof(rank_text), "%u", rank);
    char *argv[] = {path, "--config", c->config_path, "--job", c->job_hex, "--rank", rank_text,
                    NULL};
    return process_start(p, name, argv, 1);
}

/* Which status an exit code of a child stands for: the first that has the code. */
static enum st status_of(int code)
{
    for (int st = ST_USAGE; st < ST_N; st++)
        if (st_exit_code((enum st)st) == code) return (enum st)st;
    return code == 0 ? ST_OK : ST_INTERNAL;
}

/* A process has ended before its time. */
static enum st ended_early(const struct process *p)
{
    int code = process_code(p);
    if (WIFSIGNALED(p->status))
        return log_fail(ST_UNAVAILABLE, p->name, "killed by signal %d (%s); the run is not "
                        "complete", WTERMSIG(p->status), strsignal(WTERMSIG(p->status)));
    if (code > 128) /* mpirun's way to tell of a rank */
        return log_fail(ST_UNAVAILABLE, p->name, "one was killed by signal %d (%s); the run is not "
                        "complete", code - 128, strsignal(code - 128));
    return log_fail(status_of(code), p->name, "ended with code %d before the job was done; the "
                    "line above says why", code);
}

static enum st wait_ready(struct process *p, char *address)
{
    enum st st = process_ready(p, READY_MS, address, ADDRESS_BYTES);
    if (st != ST_END) return st;
    if (!process_wait(p, GRACE_MS)) return log_fail(ST_UNAVAILABLE, p->name, "gave up");
    return ended_early(p);
}

static enum st start_roles(struct cluster *c)
{
    enum st st = ST_OK;
    for (uint32_t s = 0; s < c->n_servers && st == ST_OK; s++) {
        char name[ARG_BYTES];
        snprintf(name, sizeof(name), "server %u", s);
        st = start_role(c, &c->server[s], "chanter-embserver", name, s);
    }
    if (st == ST_OK) st = start_role(c, &c->oracle, "chanter-oracle", "oracle", 0);
    for (uint32_t s = 0; s < c->n_servers && st == ST_OK; s++) {
        st = wait_ready(&c->server[s], c->address[s]);
        if (s > 0) strcat(c->servers, ",");
        strcat(c->servers, c->address[s]);
    }
    return st == ST_OK ? wait_ready(&c->oracle, c->oracle_address) : st;
}

static enum st start_trainers(struct cluster *c)
{
    static const char *const MODE[] = {[PROGRESS_NONE] = "none", [PROGRESS_PLAIN] = "plain",
                                       [PROGRESS_TTY] = "tty"};
    char ranks[ARG_BYTES];
    snprintf(ranks, sizeof(ranks), "%u", c->config->cluster.trainers);
    /* Ranks share the cores with servers and each other: nothing is bound, waiting yields. Shared
     * memory without the kernel's single-copy call, which containers often forbid. mpirun is
     * quiet because the trainers and this process say what there is to say. */
    char *argv[] = {"mpirun", "--quiet", "-np", ranks, "--oversubscribe", "--bind-to", "none",
                    "--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "self,vader",
                    "--mca", "btl_vader_single_copy_mechanism", "none",
                    "--mca", "btl_vader_backing_directory", c->shm_dir,
                    c->trainer_path, "--config", c->config_path, "--job", c->job_hex,
                    "--oracle", c->oracle_address, "--servers", c->servers,
                    "--progress", (char *)MODE[job_progress(c->job)], NULL};
    if (geteuid() == 0) {
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    }
    if (mkdir(c->shm_dir, 0700) != 0)
        return log_fail(ST_CANTCREATE, c->shm_dir, "%s", strerror(errno));
    c->start_by_ns = clock_now_ns() + (uint64_t)START_MS * 1000000u;
    return process_start(&c->trainers, "trainers", argv, 0);
}

static struct process *process_of(struct cluster *c, pid_t pid)
{
    if (pid == c->trainers.pid) return &c->trainers;
    if (pid == c->oracle.pid) return &c->oracle;
    for (uint32_t s = 0; s < c->n_servers; s++)
        if (pid == c->server[s].pid) return &c->server[s];
    return NULL;
}

/* Has rank 0 begun? mpirun may stay and never start a rank. */
static enum st check_started(struct cluster *c, bool *started)
{
    *started = *started || access(c->started_path, F_OK) == 0;
    if (*started || clock_now_ns() < c->start_by_ns) return ST_OK;
    return log_fail(ST_TIMEOUT, c->trainers.name, "have not started in %d s; `chanter check` may "
                    "say why", START_MS / 1000);
}

/* Until the trainers have ended, or anything else does. */
static enum st watch(struct cluster *c)
{
    const struct timespec look = {1, 0};
    bool started = false;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        struct process *p = pid > 0 ? process_of(c, pid) : NULL;
        if (p != NULL) {
            p->status = status;
            p->pid = 0;
            if (p == &c->trainers && process_code(p) == 0) return ST_OK;
            return ended_early(p);
        }
        int sig = pid > 0 ? 0 : sigtimedwait(&set, NULL, &look);
        if (sig == SIGTERM || sig == SIGINT)
            return log_fail(ST_CANCELLED, NULL, "stopped by a signal; the run is not complete");
        enum st st = check_started(c, &started);
        if (st != ST_OK) return st;
    }
}

/* What MPI has left there: nothing, unless it was killed. */
static void remove_shm(const struct cluster *c)
{
    char path[sizeof(c->shm_dir) + NAME_MAX + 2];
    DIR *d = opendir(c->shm_dir);
    if (d == NULL) return;
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        snprintf(path, sizeof(path), "%s/%s", c->shm_dir, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    closedir(d);
    rmdir(c->shm_dir);
}

static void stop_all(struct cluster *c, enum st st)
{
    if (st != ST_OK && st != ST_CANCELLED) process_wait(&c->trainers, LEAVE_MS);
    process_stop(&c->trainers, GRACE_MS);
    process_stop(&c->oracle, GRACE_MS);
    for (uint32_t s = 0; s < c->n_servers; s++) process_stop(&c->server[s], GRACE_MS);
    remove_shm(c);
}

/* SIGCHLD and the stop signals come through sigwaitinfo only. */
static void block_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static enum st run_cluster(const struct job *job)
{
    enum st st = ST_NOMEM;
    struct cluster c = {.job = job, .config = job->config,
                        .n_servers = job->config->cluster.servers};
    c.oracle.out = c.trainers.out = -1;
    c.server = mem_zalloc(c.n_servers, sizeof(*c.server));
    c.address = mem_zalloc(c.n_servers, sizeof(*c.address));
    c.servers = mem_zalloc(c.n_servers, ADDRESS_BYTES);
    if (c.server == NULL || c.address == NULL || c.servers == NULL) goto err;
    for (uint32_t s = 0; s < c.n_servers; s++) c.server[s].out = -1;
    snprintf(c.job_hex, sizeof(c.job_hex), "%llx", (unsigned long long)job->id);
    snprintf(c.shm_dir, sizeof(c.shm_dir), "/dev/shm/chanter-%s", c.job_hex);
    block_signals();
    TRY(find_programs(&c), err);
    TRY(start_roles(&c), err_stop);
    TRY(start_trainers(&c), err_stop);
    st = watch(&c);

err_stop:
    stop_all(&c, st);
err:
    mem_free(c.servers);
    mem_free(c.address);
    mem_free(c.server);
    return st;
}

enum st launch_main(int argc, char **argv)
{
    struct job job;
    enum st st = job_open("chanter launch",
                          "Trains as processes on this machine: an oracle, embedding servers, and "
                          "trainers under mpirun.", TRANSPORT_GRPC, argc, argv, &job);
    if (st != ST_OK) return st;
    st = run_cluster(&job);
    job_close(&job);
    return st;
}
