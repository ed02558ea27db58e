/* From bytes to shard threads. The handler runs on a transport thread: it reads the header, says no
 * to other jobs and attempts, and queues the request for the shard it names. A digest or an export
 * concerns every shard of this server: each adds its part on its own thread, and the last one
 * sends the answer. */
#include "embserver/service.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "embserver/shard.h"
#include "proto/accept.h"

enum { EXPORT_MAX_BYTES = 8 << 20 };

struct embserver {
    struct embserver_cfg cfg;
    struct store_cfg store;       /* of the first shard        */
    uint32_t n_shards;            /* of this server            */
    struct shard **shard;         /* [n_shards]                */
    struct rpc_server *server;
};

static void fail_decode(struct rpc_call *call, enum st st, size_t len)
{
    if (st == ST_BADMSG) rpc_failf(call, st, "malformed request of %zu bytes", len);
    else rpc_failf(call, st, "no memory to read a request of %zu bytes", len);
}

/* What goes out in answer to `asked`. */
static struct rpc_header answer_header(const struct embserver *s, const struct rpc_header *asked)
{
    return (struct rpc_header){.job = s->cfg.job, .attempt = s->cfg.attempt, .role = ROLE_SERVER,
                               .rank = s->cfg.rank, .iteration = asked->iteration};
}

/* --- one shard -------------------------------------------------------------------------------- */

/* Queue `t` for the shard that its message names. */
static void dispatch(struct embserver *s, struct task *t, uint32_t shard)
{
    uint32_t first = s->store.shard;
    if (shard - first >= s->n_shards) { /* a smaller number wraps round to a large one */
        rpc_failf(t->call, ST_BADMSG, "shard %" PRIu32 " is not on server %" PRIu32 ", which has %"
             PRIu32 " to %" PRIu32, shard, s->cfg.rank, first, first + s->n_shards - 1);
        mem_free(t);
        return;
    }
    shard_push(s->shard[shard - first], t);
}

/* Rows move between servers and the job's trainers only, a bounded number at a time. False: refused. */
static bool rows_accept(const struct embserver *s, struct rpc_call *call,
                        const struct rpc_header *h, uint32_t n, uint32_t row_floats)
{
    uint32_t trainers = s->cfg.config->cluster.trainers, most = codec_max_rows(row_floats);
    if (h->role != ROLE_TRAINER || h->rank >= trainers)
        rpc_failf(call, ST_BADMSG, "rows are for trainers 0 to %" PRIu32, trainers - 1);
    else if (n == 0)
        rpc_failf(call, ST_BADMSG, "no rows in the request");
    else if (n > most)
        rpc_failf(call, ST_BADMSG, "%" PRIu32 " rows in the request; want 1 to %" PRIu32, n, most);
    else
        return true;
    return false;
}

static void on_rows(struct embserver *s, struct rpc_call *call, enum rpc_method method,
                    const uint8_t *req, size_t len)
{
    struct task *t = mem_zalloc(1, sizeof(*t));
    if (t == NULL) {
        rpc_failf(call, ST_NOMEM, "no memory for a request");
        return;
    }
    t->call = call;
    bool fetch = method == RPC_FETCH;
    t->kind = fetch ? TASK_FETCH : TASK_WRITE_BACK;
    struct rpc_header h;
    enum st st = fetch ? fetch_request_decode(req, len, &h, &t->fetch)
                       : write_back_decode(req, len, &h, &t->put);
    if (st != ST_OK) {
        fail_decode(call, st, len);
        mem_free(t);
        return;
    }
    if (!accept_header(call, &h, s->cfg.job, s->cfg.attempt) ||
        !rows_accept(s, call, &h, fetch ? t->fetch.n : t->put.n,
                     fetch && !t->fetch.owned ? s->store.dim : s->store.dim + s->store.state)) {
        mem_free(t);
        return;
    }
    t->head = answer_header(s, &h);
    dispatch(s, t, fetch ? t->fetch.shard : t->put.shard);
}

/* --- all shards ------------------------------------------------------------------------------- */

struct part {                      /* one shard's; written by its thread          */
    struct gather *gather;
    uint32_t shard;                /* global number                               */
    struct digest digest;
};

struct gather {                    /* owned by its parts together                 */
    const struct embserver *server;
    struct rpc_call *call;
    struct rpc_header head;        /* of the answer                               */
    enum rpc_method method;
    struct export_request range;   /* export: clipped to the table                */
    struct msg *reply;             /* export: rows go straight to their places    */
    uint8_t *version, *rows;
    atomic_uint left;              /* parts not done                              */
    atomic_bool failed;            /* a shard was closing or overfull             */
    struct part part[];            /* [n_shards]                                  */
};

static void digest_answer(struct gather *g)
{
    struct digest sum = {0};
    for (uint32_t i = 0; i < g->server->n_shards; i++) digest_merge(&sum, g->part[i].digest);
    struct msg *reply;
    enum st st = digest_reply_encode(&g->head, sum, &reply);
    if (st == ST_OK) rpc_reply(g->call, reply);
    else rpc_failf(g->call, st, "no memory for an answer");
}

static void part_done(struct gather *g)
{
    /* release: what this part wrote; acquire: the last one sees what all others wrote. */
    if (atomic_fetch_sub_explicit(&g->left, 1, memory_order_acq_rel) != 1) return;
    if (atomic_load_explicit(&g->failed, memory_order_relaxed)) {
        msg_close(g->reply);
        rpc_failf(g->call, ST_UNAVAILABLE, "server %" PRIu32 " is closing or has too many requests "
             "waiting", g->server->cfg.rank);
    } else if (g->method == RPC_EXPORT) {
        rpc_reply(g->call, g->reply);
    } else {
        digest_answer(g);
    }
    mem_free(g);
}

static void digest_part(void *ctx, const struct store *store)
{
    struct part *p = ctx;
    if (store != NULL) p->digest = store_digest(store);
    else atomic_store_explicit(&p->gather->failed, true, memory_order_relaxed);
    part_done(p->gather);
}

/* Of the numbers below `at`, those that are n mod all-shards for a shard n of this server: of every
 * `all` numbers in sequence, `here` ones that follow one another. */
static uint64_t here_below(const struct embserver *s, uint64_t at)
{
    uint64_t all = s->store.n_shards, first = s->store.shard, here = s->n_shards;
    uint64_t rest = at % all <= first ? 0 : at % all - first;
    return at / all * here + (rest < here ? rest : here);
}

/* Rows of `table` below `row` that are on this server (row_shard: (row + table) % all). */
static uint64_t rows_below(const struct embserver *s, uint32_t table, uint64_t row)
{
    return here_below(s, row + table) - here_below(s, table);
}

static void export_part(void *ctx, const struct store *store)
{
    struct part *p = ctx;
    struct gather *g = p->gather;
    const struct export_request *e = &g->range;
    const struct embserver *s = g->server;
    uint32_t width = s->store.dim + s->store.state, all = s->store.n_shards;
    uint64_t before = rows_below(s, e->table, e->first);
    if (store == NULL) {
        atomic_store_explicit(&g->failed, true, memory_order_relaxed);
        part_done(g);
        return;
    }
    uint32_t skip = (p->shard + all - row_shard(row_id(e->table, e->first), all)) % all;
    for (uint64_t row = e->first + skip; row < e->first + e->count; row += all) {
        size_t at = rows_below(s, e->table, row) - before;
        int64_t version = store_version(store, row_id(e->table, row));
        memcpy(g->version + at * sizeof(version), &version, sizeof(version));
        store_read(store, row_id(e->table, row), width, g->rows + at * width * sizeof(float));
    }
    part_done(g);
}

/* Takes g. Send it round all shards of this server. */
static void gather_start(struct embserver *s, struct gather *g)
{
    shard_visit *fn = g->method == RPC_EXPORT ? export_part : digest_part;
    uint32_t n = s->n_shards;
    atomic_init(&g->left, n);
    for (uint32_t i = 0; i < n; i++) /* all, before the first can be the last */
        g->part[i] = (struct part){.gather = g, .shard = s->store.shard + i};
    for (uint32_t i = 0; i < n; i++) {
        struct part *p = &g->part[i];
        struct task *t = mem_zalloc(1, sizeof(*t));
        if (t == NULL) {
            fn(p, NULL);
            continue;
        }
        t->kind = TASK_VISIT;
        t->visit.fn = fn;
        t->visit.ctx = p;
        shard_push(s->shard[i], t);
    }
}

/* Room for the reply. False: refused. */
static bool export_prepare(const struct embserver *s, struct gather *g)
{
    struct export_request *e = &g->range;
    if (e->table >= s->store.n_tables) {
        rpc_failf(g->call, ST_BADMSG, "table %" PRIu32 " of %" PRIu32, e->table, s->store.n_tables);
        return false;
    }
    uint64_t rows = s->store.table_rows[e->table];
    if (e->first > rows) {
        rpc_failf(g->call, ST_BADMSG, "table %" PRIu32 " has %" PRIu64 " rows, no row %" PRIu64,
             e->table, rows, e->first);
        return false;
    }
    if (e->count > rows - e->first) e->count = (uint32_t)(rows - e->first);
    uint64_t n = rows_below(s, e->table, e->first + e->count) - rows_below(s, e->table, e->first);
    uint32_t width = s->store.dim + s->store.state;
    if (n * (sizeof(int64_t) + width * sizeof(float)) > EXPORT_MAX_BYTES) {
        rpc_failf(g->call, ST_BADMSG, "%" PRIu64 " rows of %" PRIu32 " floats are more than %d bytes; "
             "ask for fewer", n, width, EXPORT_MAX_BYTES);
        return false;
    }
    enum st st = fetch_reply_begin(&g->head, (uint32_t)n, width, &g->reply, &g->version, &g->rows);
    if (st != ST_OK) rpc_failf(g->call, st, "no memory for an answer");
    return st == ST_OK;
}

static void on_all(struct embserver *s, struct rpc_call *call, enum rpc_method method,
                   const uint8_t *req, size_t len)
{
    struct gather *g = mem_zalloc(1, sizeof(*g) + s->n_shards * sizeof(g->part[0]));
    if (g == NULL) {
        rpc_failf(call, ST_NOMEM, "no memory for a request");
        return;
    }
    g->server = s;
    g->call = call;
    g->method = method;
    struct rpc_header h;
    enum st st = method == RPC_EXPORT ? export_request_decode(req, len, &h, &g->range)
                                      : plain_decode(req, len, &h);
    if (st != ST_OK) {
        fail_decode(call, st, len);
        goto refused;
    }
    if (!accept_header(call, &h, s->cfg.job, s->cfg.attempt)) goto refused;
    g->head = answer_header(s, &h);
    if (method == RPC_EXPORT && !export_prepare(s, g)) goto refused;
    gather_start(s, g);
    return;

refused:
    mem_free(g);
}

/* --- the role --------------------------------------------------------------------------------- */

static void handle(void *ctx, struct rpc_call *call, enum rpc_method method, const uint8_t *req,
                   size_t len)
{
    switch (method) {
    case RPC_FETCH:
    case RPC_WRITE_BACK:
        on_rows(ctx, call, method, req, len);
        break;
    case RPC_DIGEST:
    case RPC_EXPORT:
        on_all(ctx, call, method, req, len);
        break;
    default:
        rpc_failf(call, ST_BADMSG, "this is an embedding server; it has no plans");
    }
}

/* What is there of it, with the first n shards. */
static void server_free(struct embserver *s, uint32_t n)
{
    if (s == NULL) return;
    for (uint32_t i = 0; i < n; i++) shard_close(s->shard[i]);
    mem_free(s->shard);
    mem_free(s);
}

static void stop_shards(struct embserver *s, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) shard_stop(s->shard[i]);
}

enum st embserver_start(const struct embserver_cfg *cfg, struct embserver **out)
{
    const struct config *c = cfg->config;
    enum st st;
    uint32_t opened = 0;
    struct embserver *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) goto no_memory;
    s->cfg = *cfg;
    s->n_shards = c->cluster.server_threads;
    s->store = (struct store_cfg){
        .shard = cfg->rank * s->n_shards, .n_shards = config_shards(c),
        .n_tables = c->model.n_tables, .dim = c->model.dim,
        .state = config_row_state(c->train.optimizer, c->model.dim),
        .table_rows = c->model.tables, .seed = c->train.seed};
    s->shard = mem_zalloc(s->n_shards, sizeof(*s->shard));
    if (s->shard == NULL) goto no_memory;
    for (; opened < s->n_shards; opened++) {
        struct shard_cfg one = {.store = s->store, .timeout_s = c->cluster.timeout_s};
        one.store.shard += opened;
        TRY(shard_open(&one, &s->shard[opened]), err);
    }
    TRY(rpc_serve(cfg->transport, cfg->address, handle, s, &s->server), err);
    *out = s;
    return ST_OK;

no_memory: st = log_fail(ST_NOMEM, NULL, "no memory for a server");
err:       stop_shards(s, opened);
           server_free(s, opened);
           return st;
}

const char *embserver_address(const struct embserver *s)
{
    return rpc_address(s->server);
}

void embserver_close(struct embserver *s)
{
    if (s == NULL) return;
    stop_shards(s, s->n_shards);  /* answers or fails every call there is ...   */
    rpc_server_close(s->server);  /* ... and those that arrive before this ends */
    server_free(s, s->n_shards);
}
