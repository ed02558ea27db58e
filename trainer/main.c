/* chanter-trainer: one trainer rank as a process of an MPI job. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/role.h"
#include "trainer/metrics.h"
#include "trainer/pipeline.h"

struct args {
    struct role_args role;
    const char *oracle, *servers, *progress;
};

static enum st parse(int argc, char **argv, struct args *a)
{
    const struct option own[] = {
        {.name = "oracle", .arg = "ADDRESS", .text = &a->oracle, .help = "where the oracle listens"},
        {.name = "servers", .arg = "A,B,...", .text = &a->servers,
         .help = "where the embedding servers listen, server 0 first"},
        {.name = "progress", .arg = "MODE", .text = &a->progress,
         .help = "none, plain or tty; rank 0 writes it to standard error"},
    };
    enum st st = role_open(argc, argv, "chanter-trainer",
                           "Trains one share of every batch; run under mpirun.", own,
                           sizeof(own) / sizeof(own[0]), &a->role);
    if (st == ST_OK && (a->oracle == NULL || a->servers == NULL)) {
        role_close(&a->role);
        st = log_fail(ST_USAGE, NULL, "--oracle and --servers are needed; see --help");
    }
    return st;
}

static enum st progress_of(const char *text, enum progress_mode *out)
{
    static const char *const NAME[] = {"none", "plain", "tty"};
    *out = PROGRESS_NONE;
    for (int m = PROGRESS_NONE; text != NULL && m <= PROGRESS_TTY; m++) {
        if (strcmp(text, NAME[m]) != 0) continue;
        *out = (enum progress_mode)m;
        return ST_OK;
    }
    return text == NULL ? ST_OK
                        : log_fail(ST_USAGE, NULL, "--progress '%s': want none, plain or tty", text);
}

/* Cut "a,b,c" in place: list[n]. */
static enum st split_servers(char *text, uint32_t n, const char **list)
{
    uint32_t found = 0;
    for (char *rest = text; rest != NULL;) {
        char *comma = strchr(rest, ',');
        if (comma != NULL) *comma = '\0';
        if (found < n) list[found] = rest;
        found++;
        rest = comma == NULL ? NULL : comma + 1;
    }
    if (found == n) return ST_OK;
    return log_fail(ST_USAGE, NULL, "--servers names %u, cluster.servers is %u", found, n);
}

static enum st run(const struct args *a, struct comm *comm)
{
    enum st st = ST_NOMEM;
    const struct config *config = a->role.config;
    uint32_t n = config->cluster.servers;
    struct trainer_cfg cfg = {.config = config, .comm = comm, .oracle = a->oracle,
                              .job = a->role.job, .attempt = a->role.attempt};
    struct trainer_result result;
    if (comm->size != config->cluster.trainers)
        return log_fail(ST_CONFIG, NULL, "mpirun started %u trainers, cluster.trainers is %u",
                        comm->size, config->cluster.trainers);
    char *text = mem_strdup(a->servers);
    const char **server = mem_zalloc(n, sizeof(*server));
    if (text == NULL || server == NULL) goto err;
    cfg.server = server;
    TRY(split_servers(text, n, server), err);
    TRY(progress_of(a->progress, &cfg.progress), err);
    TRY(transport_open(TRANSPORT_GRPC, &cfg.transport), err);
    st = trainer_run(&cfg, &result);
    if (st == ST_OK && comm->rank == 0) metrics_final_line(&result);
    if (st == ST_OK) transport_close(cfg.transport);
err:
    mem_free(server);
    mem_free(text);
    return st;
}

int main(int argc, char **argv)
{
    struct args a = {0};
    enum st st = parse(argc, argv, &a);
    if (st != ST_OK) return st == ST_END ? 0 : st_exit_code(st);
    struct comm *comm;
    st = comm_mpi_open(&comm);
    if (st != ST_OK) return st_exit_code(st);
    char role[32];
    snprintf(role, sizeof(role), "trainer %u", comm->rank);
    log_set_role(role);
    st = run(&a, comm);
    /* MPI_Finalize would wait for the others; leaving without it ends the whole MPI job. */
    if (st != ST_OK) _exit(log_exit_code(st));
    comm->ops->close(comm);
    role_close(&a.role);
    return 0;
}
