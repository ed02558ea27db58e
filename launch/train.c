/* The embedded job. Servers and oracle are started first, then a thread for each trainer rank. When
 * one fails the others are woken: their exchange is aborted, and closing the oracle and the
 * servers ends every call they wait for. */
#include "launch/train.h"

#include <pthread.h>
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/role.h"
#include "embserver/service.h"
#include "launch/job.h"
#include "oracle/oracle.h"
#include "trainer/comm.h"
#include "trainer/metrics.h"

/* How late the end of the run is noticed at most: little against a run. */
static const uint64_t SIGNAL_POLL_NS = 10000000;

struct embedded;

struct rank_thread {
    struct embedded *e;
    struct trainer_cfg cfg;
    struct trainer_result result;
    pthread_t thread;
};

struct embedded {
    const struct job *job;
    const struct config *config;
    struct transport *transport;
    struct embserver **server;      /* [servers] */
    const char **address;           /* [servers] */
    struct oracle *oracle;
    struct comm **comm;             /* [trainers] */
    struct rank_thread *rank;       /* [trainers] */
    atomic_bool over;               /* set when one rank has failed */
    uint32_t n_ranks;               /* started */

    pthread_mutex_t lock;           /* guards what follows */
    uint32_t running;
    enum st failed;                 /* first failure */
};

static void *rank_main(void *p)
{
    struct rank_thread *r = p;
    struct embedded *e = r->e;
    enum st st = trainer_run(&r->cfg, &r->result);
    pthread_mutex_lock(&e->lock);
    if (st != ST_OK && e->failed == ST_OK) e->failed = st;
    e->running--;
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static enum st start_servers(struct embedded *e)
{
    enum st st = ST_OK;
    for (uint32_t s = 0; s < e->config->cluster.servers && st == ST_OK; s++) {
        char name[32];
        snprintf(name, sizeof(name), "server-%u", s);
        struct embserver_cfg cfg = {e->config, e->transport, name, s, e->job->id, 0};
        st = embserver_start(&cfg, &e->server[s]);
        if (st == ST_OK) e->address[s] = embserver_address(e->server[s]);
    }
    return st;
}

static enum st start_ranks(struct embedded *e)
{
    uint32_t n = e->config->cluster.trainers;
    for (uint32_t r = 0; r < n; r++) {
        struct rank_thread *t = &e->rank[r];
        t->e = e;
        t->cfg = (struct trainer_cfg){e->config, e->comm[r], e->transport,
                                      oracle_address(e->oracle), e->address, e->job->id, 0,
                                      job_progress(e->job), &e->over};
        pthread_mutex_lock(&e->lock);
        e->running++;
        pthread_mutex_unlock(&e->lock);
        if (pthread_create(&t->thread, NULL, rank_main, t) != 0) {
            pthread_mutex_lock(&e->lock);
            e->running--;
            if (e->failed == ST_OK) e->failed = ST_NOMEM;
            pthread_mutex_unlock(&e->lock);
            return log_fail(ST_NOMEM, NULL, "no thread for trainer %u", r);
        }
        e->n_ranks++;
    }
    return ST_OK;
}

static void close_roles(struct embedded *e)
{
    oracle_close(e->oracle);
    e->oracle = NULL;
    for (uint32_t s = 0; s < e->config->cluster.servers; s++) {
        embserver_close(e->server[s]);
        e->server[s] = NULL;
    }
}

/* Until all have ended, one has failed, or a signal comes. */
static enum st wait_for_ranks(struct embedded *e)
{
    enum st st = ST_OK;
    uint32_t running = 1;
    while (running > 0 && st == ST_OK) {
        if (role_stopped(SIGNAL_POLL_NS))
            return log_fail(ST_CANCELLED, NULL, "stopped by a signal; the run is not complete");
        pthread_mutex_lock(&e->lock);
        running = e->running;
        st = e->failed;
        pthread_mutex_unlock(&e->lock);
    }
    return st;
}

/* Wait for all ranks; when one fails, end what the others wait for. */
static enum st join_ranks(struct embedded *e)
{
    enum st st = wait_for_ranks(e);
    if (st != ST_OK) {
        atomic_store(&e->over, true);
        if (e->n_ranks > 0) comm_local_abort(e->comm[0]);
        close_roles(e);
    }
    for (uint32_t r = 0; r < e->n_ranks; r++) pthread_join(e->rank[r].thread, NULL);
    return st;
}

static enum st allocate(struct embedded *e)
{
    const struct config *c = e->config;
    e->server = mem_zalloc(c->cluster.servers, sizeof(struct embserver *));
    e->address = mem_zalloc(c->cluster.servers, sizeof(const char *));
    e->comm = mem_zalloc(c->cluster.trainers, sizeof(struct comm *));
    e->rank = mem_zalloc(c->cluster.trainers, sizeof(*e->rank));
    if (e->server == NULL || e->address == NULL || e->comm == NULL || e->rank == NULL)
        return ST_NOMEM;
    pthread_mutex_init(&e->lock, NULL);
    return ST_OK;
}

static enum st run_embedded(const struct job *job)
{
    enum st st;
    struct embedded e = {.job = job, .config = job->config};
    uint32_t n = job->config->cluster.trainers;
    TRY(allocate(&e), err_memory);
    TRY(transport_open(TRANSPORT_LOCAL, &e.transport), err_locks);
    TRY(start_servers(&e), err_roles);
    struct oracle_cfg oc = {job->config, e.transport, "oracle", job->id, 0};
    TRY(oracle_start(&oc, &e.oracle), err_roles);
    TRY(comm_local_open(n, e.comm), err_roles);
    st = start_ranks(&e);
    enum st joined = join_ranks(&e);
    if (st == ST_OK) st = joined;
    if (st == ST_OK) metrics_final_line(&e.rank[0].result);
    for (uint32_t r = 0; r < n; r++) e.comm[r]->ops->close(e.comm[r]);

err_roles:
    close_roles(&e);
    transport_close(e.transport);
err_locks:
    pthread_mutex_destroy(&e.lock);
err_memory:
    mem_free(e.rank);
    mem_free(e.comm);
    mem_free(e.address);
    mem_free(e.server);
    return st;
}

enum st train_main(int argc, char **argv)
{
    struct job job;
    enum st st = job_open("chanter train",
                          "Trains in this process: oracle, servers and trainers as threads.",
                          TRANSPORT_LOCAL, argc, argv, &job);
    if (st != ST_OK) return st;
    role_signals();
    st = run_embedded(&job);
    job_close(&job);
    return st;
}
