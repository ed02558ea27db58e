/* The PLANNER thread runs feed -> planner -> encode -> outbox; the handler hands out what is in the
 * outbox. All that is bounded is bounded there: PLANNER waits while a trainer's queue is full. */
#define _GNU_SOURCE
#include "oracle/oracle.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/tree.h"
#include "oracle/feed.h"
#include "oracle/outbox.h"
#include "oracle/planner.h"
#include "proto/accept.h"

enum {
    TEXT_BYTES = 200,
    /* An evicted row's version is remembered for more iterations than a trainer's prefetch
     * (16 at most: config_check) and write-backs in flight can span. */
    REMEMBER_MORE = 64,
};

struct oracle {
    struct oracle_cfg cfg;
    struct rpc_server *server;
    struct outbox *outbox;
    pthread_t thread;            /* PLANNER */

    struct feed *feed;           /* all below: PLANNER's */
    struct planner *planner;
    struct plan_limits limits;
    struct plan *plan[TREE_MAX_SLICES];  /* of one step, a trainer each */
    struct msg *bytes[TREE_MAX_SLICES];
    uint64_t n_pushed, n_pulled; /* batches in, iterations out          */
    bool fed;                    /* no more training batches            */
};

/* --- PLANNER ---------------------------------------------------------------------------------- */

/* The planner is silent when it is out of memory: it does not know for whom it plans. */
static enum st heard(enum st st)
{
    return st == ST_NOMEM ? log_fail(st, NULL, "no memory for the plans of the window; lower "
                                     "oracle.lookahead or train.global_batch") : st;
}

static enum st planner_start(struct oracle *o)
{
    const struct config *c = o->cfg.config;
    struct planner_cfg cfg = {
        .n_trainers = c->cluster.trainers, .n_tables = c->model.n_tables,
        .dense_features = c->model.dense_features, .global_batch = c->train.global_batch,
        .slices = c->train.slices, .lookahead = c->oracle.lookahead,
        .n_shards = config_shards(c), .cap_rows = config_cache_rows(c),
        .remember = c->oracle.lookahead + REMEMBER_MORE};
    o->limits = (struct plan_limits){.n_trainers = cfg.n_trainers, .n_tables = cfg.n_tables,
                                     .dense_features = cfg.dense_features,
                                     .cap_rows = cfg.cap_rows};
    enum st st;
    TRY(feed_open(c, &o->feed), err);
    TRY(heard(planner_open(&cfg, &o->planner)), err);
err: return st;
}

/* Encode o->plan[] and queue it. The plans are gone afterwards. */
static enum st publish(struct oracle *o)
{
    uint32_t n = o->limits.n_trainers, done = 0;
    struct rpc_header h = {.job = o->cfg.job, .attempt = o->cfg.attempt, .role = ROLE_ORACLE,
                           .iteration = o->plan[0]->iteration};
    enum st st = ST_OK;
    for (; done < n; done++) TRY(plan_encode(&h, &o->limits, o->plan[done], &o->bytes[done]), err);
    st = outbox_push(o->outbox, o->bytes);
    done = 0; /* outbox_push has taken them */
err:
    for (uint32_t t = 0; t < done; t++) msg_close(o->bytes[t]);
    for (uint32_t t = 0; t < n; t++) plan_close(o->plan[t]);
    return st;
}

/* One more training batch into the planner, or the end of them. */
static enum st feed_planner(struct oracle *o)
{
    const struct samples *batch;
    enum st st = feed_train(o->feed, &batch);
    if (st == ST_OK) {
        st = heard(planner_push(o->planner, batch));
        if (st == ST_OK) o->n_pushed++;
    } else if (st == ST_END) {
        planner_end(o->planner);
        o->fed = true;
        st = ST_OK;
    }
    return st;
}

/* All held-out rows, as the weights are now. */
static enum st evaluate(struct oracle *o)
{
    enum st st;
    TRY(feed_eval_start(o->feed), err);
    for (;;) {
        const struct samples *batch;
        int last;
        st = feed_eval(o->feed, &batch, &last);
        if (st == ST_END) return ST_OK;
        if (st != ST_OK) return st;
        TRY(heard(planner_eval(o->planner, batch, last, o->plan)), err);
        TRY(publish(o), err);
    }
err: return st;
}

/* Between two iterations, if an evaluation is due there; the one after the last iteration comes
 * with the flush. The planner hands out no iteration before it has the next batch or the end. */
static enum st evaluate_between(struct oracle *o)
{
    uint64_t every = o->cfg.config->run.eval_every;
    if (every == 0 || o->n_pulled % every != 0 || o->n_pulled == o->n_pushed) return ST_OK;
    return evaluate(o);
}

/* One iteration's plans or the flush's out, or one batch in. ST_END: all is planned. */
static enum st plan_step(struct oracle *o)
{
    enum st st = heard(planner_pull(o->planner, o->plan));
    if (st == ST_BUSY) {
        CHECK(!o->fed, "a planner that has all batches is not waiting for one");
        return feed_planner(o);
    }
    if (st != ST_OK) return st;
    bool flush = o->plan[0]->kind == PLAN_FLUSH;
    TRY(publish(o), err);
    o->n_pulled += !flush;
    st = flush ? evaluate(o) : evaluate_between(o);
err: return st;
}

static enum st plan_all(struct oracle *o)
{
    enum st st;
    TRY(planner_start(o), err);
    do st = plan_step(o);
    while (st == ST_OK);
err: return st;
}

static void *planner_main(void *arg)
{
    struct oracle *o = arg;
    pthread_setname_np(pthread_self(), "planner");
    enum st st = plan_all(o);
    if (st == ST_END) {
        outbox_end(o->outbox, st, "no more plans");
    } else {
        char text[TEXT_BYTES];
        snprintf(text, sizeof(text), "planning stopped with E-%s; the oracle's log says why",
                 st_name(st));
        outbox_end(o->outbox, st, text);
    }
    planner_close(o->planner);
    feed_close(o->feed);
    return NULL;
}

/* --- answering -------------------------------------------------------------------------------- */

/* False: refused. */
static bool header_check(const struct oracle *o, struct rpc_call *call, const struct rpc_header *h)
{
    uint32_t n_trainers = o->cfg.config->cluster.trainers;
    if (!accept_header(call, h, o->cfg.job, o->cfg.attempt)) return false;
    if (h->role == ROLE_TRAINER && h->rank < n_trainers) return true;
    rpc_failf(call, ST_BADMSG, "plans are for trainers 0 to %" PRIu32, n_trainers - 1);
    return false;
}

static void handle(void *ctx, struct rpc_call *call, enum rpc_method method, const uint8_t *req,
                   size_t len)
{
    struct oracle *o = ctx;
    struct rpc_header h;
    uint64_t seq;
    if (method != RPC_PLAN) {
        rpc_failf(call, ST_BADMSG, "this is the oracle; it has no rows");
        return;
    }
    enum st st = plan_request_decode(req, len, &h, &seq);
    if (st == ST_BADMSG) rpc_failf(call, st, "malformed request of %zu bytes", len);
    else if (st != ST_OK) rpc_failf(call, st, "no memory to read a request of %zu bytes", len);
    else if (header_check(o, call, &h)) outbox_ask(o->outbox, h.rank, seq, call);
}

/* --- the role --------------------------------------------------------------------------------- */

enum st oracle_start(const struct oracle_cfg *cfg, struct oracle **out)
{
    const struct config *c = cfg->config;
    enum st st = ST_NOMEM;
    struct oracle *o = mem_zalloc(1, sizeof(*o));
    if (o == NULL) {
        log_fail(st, NULL, "no memory for the oracle");
        goto err;
    }
    o->cfg = *cfg;
    TRY(outbox_open(c->cluster.trainers, c->oracle.queue, &o->outbox), err_oracle);
    TRY(rpc_serve(cfg->transport, cfg->address, handle, o, &o->server), err_outbox);
    if (pthread_create(&o->thread, NULL, planner_main, o) != 0) {
        st = log_fail(ST_NOMEM, NULL, "cannot start the planner's thread");
        goto err_server;
    }
    *out = o;
    return ST_OK;

err_server: outbox_end(o->outbox, ST_CANCELLED, "the oracle did not start");
            rpc_server_close(o->server);
err_outbox: outbox_close(o->outbox);
err_oracle: mem_free(o);
err:        return st;
}

const char *oracle_address(const struct oracle *o)
{
    return rpc_address(o->server);
}

enum st oracle_status(struct oracle *o)
{
    enum st st = outbox_status(o->outbox);
    return st == ST_END ? ST_OK : st;
}

int oracle_told(struct oracle *o)
{
    return outbox_told(o->outbox);
}

void oracle_close(struct oracle *o)
{
    if (o == NULL) return;
    outbox_end(o->outbox, ST_CANCELLED, "the oracle is closing");
    pthread_join(o->thread, NULL);
    rpc_server_close(o->server);
    outbox_close(o->outbox);
    mem_free(o);
}
