#include "trainer/prefetch.h"

#include <pthread.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/ring.h"
#include "base/row.h"

struct fetch_part {
    struct ticket *ticket;
    uint32_t shard, n, owned;
    uint64_t *row_id;         /* [n]; into the ticket's one block */
    int64_t *need;
    uint32_t *slot;
    struct msg *reply;        /* set by the callback, before missing goes down */
};

struct prefetch {
    struct prefetch_cfg cfg;
    struct ring *ready;       /* tickets in plan order                         */
    pthread_t thread;
    atomic_bool stopping;     /* relaxed: it only makes the thread leave early */
    _Atomic uint64_t row_bytes, plan_bytes; /* relaxed: counters               */

    pthread_mutex_t lock;     /* guards what follows, and missing and failed of all tickets */
    pthread_cond_t moved;
    enum st end;              /* why no more tickets come; ST_OK while they do */
    bool plan_here;           /* the plan request that is out has been answered */
    enum st plan_st;
    struct msg *plan_msg;
    bool fetch_failed;        /* it was said why; the requests behind it fail likewise */
};

/* --- plans ---------------------------------------------------------------------------------- */

/* Failures that the oracle cannot have logged itself; of all others its own log says more. */
static bool oracle_is_silent(enum st st)
{
    return st == ST_TIMEOUT || st == ST_UNAVAILABLE || st == ST_BADMSG;
}

static bool is_over(const struct prefetch *p)
{
    return p->cfg.over != NULL && atomic_load(p->cfg.over);
}

static void plan_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct prefetch *p = ctx;
    if (oracle_is_silent(st) && !is_over(p))
        log_fail(st, "oracle", "no plan: %s", text);
    pthread_mutex_lock(&p->lock);
    p->plan_here = true;
    p->plan_st = st;
    p->plan_msg = reply;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

static enum st get_plan(struct prefetch *p, uint64_t seq, struct plan **out)
{
    struct msg *req;
    enum st st = plan_request_encode(&p->cfg.header, seq, &req);
    if (st != ST_OK) return st;
    p->plan_here = false;
    rpc_send(p->cfg.oracle, RPC_PLAN, req, p->cfg.timeout_ms, plan_done, p);
    pthread_mutex_lock(&p->lock);
    while (!p->plan_here) pthread_cond_wait(&p->moved, &p->lock); /* rpc_send has the deadline */
    st = p->plan_st;
    struct msg *m = p->plan_msg;
    pthread_mutex_unlock(&p->lock);
    if (st != ST_OK) return st;

    struct rpc_header from;
    atomic_fetch_add_explicit(&p->plan_bytes, m->len, memory_order_relaxed);
    st = plan_decode(m->data, m->len, &p->cfg.limits, &from, out);
    msg_close(m);
    if (st != ST_OK)
        return log_fail(st, "oracle", "plan %llu cannot be read", (unsigned long long)seq);
    if ((*out)->seq != seq || from.job != p->cfg.header.job ||
        from.attempt != p->cfg.header.attempt) {
        st = log_fail(ST_BADMSG, "oracle", "plan %llu came in place of %llu, or from another job",
                      (unsigned long long)(*out)->seq, (unsigned long long)seq);
        plan_close(*out);
    }
    return st;
}

/* --- rows ----------------------------------------------------------------------------------- */

static void fetch_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct fetch_part *part = ctx;
    struct ticket *t = part->ticket;
    struct prefetch *p = t->owner;
    bool failed = st != ST_OK && st != ST_CANCELLED && !is_over(p), first = false;
    part->reply = reply;
    pthread_mutex_lock(&p->lock);
    if (failed) {
        first = !p->fetch_failed;
        p->fetch_failed = true;
    }
    pthread_mutex_unlock(&p->lock);
    if (first) {
        char where[48];
        snprintf(where, sizeof(where), "server %u", part->shard / p->cfg.threads);
        log_fail(st, where, "rows for iteration %lld did not come: %s",
                 (long long)t->plan->iteration, text);
    }
    pthread_mutex_lock(&p->lock);
    if (st != ST_OK && t->failed == ST_OK) t->failed = st;
    t->missing--;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

/* Where a fetch request ends that begins at entry i: one shard, one kind, a bounded size. Entries
 * of the other kind in between are passed over: *n counts those that are taken. */
static uint32_t count_kind(const struct plan_fetch *f, uint32_t lo, uint32_t hi, uint8_t owned)
{
    uint32_t n = 0;
    for (uint32_t i = lo; i < hi; i++) n += f->owned[i] == owned;
    return n;
}

static uint32_t shard_end(const struct plan_fetch *f, uint32_t lo, uint32_t n_shards)
{
    uint32_t shard = row_shard(f->row_id[lo], n_shards), hi = lo;
    while (hi < f->n && row_shard(f->row_id[hi], n_shards) == shard) hi++;
    return hi;
}

/* One block for all parts' arrays, parts first: freed as a whole by ticket_close. */
static enum st alloc_parts(struct ticket *t, uint32_t n_parts)
{
    size_t n = t->plan->fetch.n;
    size_t head = (n_parts * sizeof(struct fetch_part) + 63) / 64 * 64;
    uint8_t *block = mem_zalloc(head + n * (8 + 8 + 4), 1);
    if (block == NULL) return ST_NOMEM;
    t->part = (struct fetch_part *)block;
    t->part[0].row_id = (uint64_t *)(block + head);
    t->part[0].need = (int64_t *)(block + head + 8 * n);
    t->part[0].slot = (uint32_t *)(block + head + 16 * n);
    return ST_OK;
}

/* Rows of one request; values only are shorter than records. */
static uint32_t rows_per_part(const struct prefetch_cfg *cfg, uint8_t owned)
{
    return codec_max_rows(owned ? cfg->dim + cfg->state : cfg->dim);
}

static uint32_t parts_needed(const struct prefetch_cfg *cfg, const struct plan_fetch *f,
                             uint32_t n_shards)
{
    uint32_t n = 0;
    for (uint32_t lo = 0, hi; lo < f->n; lo = hi) {
        hi = shard_end(f, lo, n_shards);
        for (uint8_t owned = 0; owned < 2; owned++)
            n += (count_kind(f, lo, hi, owned) + rows_per_part(cfg, owned) - 1) /
                 rows_per_part(cfg, owned);
    }
    return n;
}

/* Deal entries [lo, hi) of one shard and kind out to parts from *k on. */
static void fill_parts(struct ticket *t, uint32_t lo, uint32_t hi, uint8_t owned, uint32_t shard,
                       uint32_t most, uint32_t *at, uint32_t *k)
{
    const struct plan_fetch *f = &t->plan->fetch;
    uint64_t *row_id = t->part[0].row_id;
    int64_t *need = t->part[0].need;
    uint32_t *slot = t->part[0].slot;
    struct fetch_part *part = NULL;
    for (uint32_t i = lo; i < hi; i++) {
        if (f->owned[i] != owned) continue;
        if (part == NULL || part->n == most) {
            part = &t->part[(*k)++];
            *part = (struct fetch_part){t, shard, 0, owned, row_id + *at, need + *at, slot + *at,
                                        NULL};
        }
        row_id[*at] = f->row_id[i];
        need[*at] = f->need[i];
        slot[*at] = f->slot[i];
        part->n++;
        (*at)++;
    }
}

static enum st make_parts(const struct prefetch_cfg *cfg, struct ticket *t)
{
    const struct plan_fetch *f = &t->plan->fetch;
    uint32_t n_shards = cfg->n_servers * cfg->threads, at = 0, k = 0;
    t->n_parts = parts_needed(cfg, f, n_shards);
    if (t->n_parts == 0) return ST_OK;
    enum st st = alloc_parts(t, t->n_parts);
    if (st != ST_OK) return st;
    for (uint32_t lo = 0, hi; lo < f->n; lo = hi) {
        hi = shard_end(f, lo, n_shards);
        for (uint8_t owned = 0; owned < 2; owned++)
            fill_parts(t, lo, hi, owned, row_shard(f->row_id[lo], n_shards),
                       rows_per_part(cfg, owned), &at, &k);
    }
    return ST_OK;
}

enum st prefetch_send(struct prefetch *p, struct ticket *t)
{
    struct rpc_header h = p->cfg.header;
    h.iteration = t->plan->iteration;
    for (uint32_t i = 0; i < t->n_parts; i++) {
        struct fetch_part *part = &t->part[i];
        struct msg *req;
        enum st st = fetch_request_encode(&h, part->shard, (uint8_t)part->owned, part->row_id,
                                          part->need, part->n, &req);
        if (st != ST_OK) return st;
        pthread_mutex_lock(&p->lock);
        t->missing++;
        pthread_mutex_unlock(&p->lock);
        rpc_send(p->cfg.server[part->shard / p->cfg.threads], RPC_FETCH, req, p->cfg.timeout_ms,
                 fetch_done, part);
    }
    return ST_OK;
}

void ticket_close(struct ticket *t)
{
    if (t == NULL) return;
    struct prefetch *p = t->owner;
    pthread_mutex_lock(&p->lock);
    while (t->missing > 0) pthread_cond_wait(&p->moved, &p->lock); /* each has a deadline */
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < t->n_parts; i++) msg_close(t->part[i].reply);
    mem_free(t->part);
    plan_close(t->plan);
    mem_free(t);
}

/* --- the thread ----------------------------------------------------------------------------- */

static enum st make_ticket(struct prefetch *p, uint64_t seq, struct ticket **out)
{
    enum st st = ST_NOMEM;
    struct ticket *t = mem_zalloc(1, sizeof(*t));
    if (t == NULL) return ST_NOMEM;
    t->owner = p;
    TRY(get_plan(p, seq, &t->plan), err);
    TRY(make_parts(&p->cfg, t), err_ticket);
    if (p->cfg.ahead) TRY(prefetch_send(p, t), err_ticket);
    *out = t;
    return ST_OK;

err_ticket:
    ticket_close(t);
    return st;
err:
    mem_free(t);
    return st;
}

static enum st push_ready(struct prefetch *p, struct ticket *t)
{
    enum st st = ST_TIMEOUT; /* COMPUTE is slow, not gone: prefetch_close ends the wait */
    while (st == ST_TIMEOUT && !atomic_load_explicit(&p->stopping, memory_order_relaxed))
        st = ring_push(p->ready, t, UINT64_C(1000000000));
    return st;
}

static void *prefetch_main(void *ctx)
{
    struct prefetch *p = ctx;
    enum st st = ST_OK;
    for (uint64_t seq = 0; st == ST_OK; seq++) {
        struct ticket *t = NULL;
        if (atomic_load_explicit(&p->stopping, memory_order_relaxed)) break;
        st = make_ticket(p, seq, &t);
        if (st != ST_OK) break;
        st = push_ready(p, t);
        if (st != ST_OK) ticket_close(t);
    }
    pthread_mutex_lock(&p->lock);
    p->end = st == ST_OK ? ST_CANCELLED : st;
    pthread_mutex_unlock(&p->lock);
    ring_stop(p->ready);
    return NULL;
}

enum st prefetch_open(const struct prefetch_cfg *cfg, struct prefetch **out)
{
    enum st st = ST_NOMEM;
    struct prefetch *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) return ST_NOMEM;
    p->cfg = *cfg;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->moved, NULL);
    TRY(ring_open(cfg->depth, &p->ready), err);
    if (pthread_create(&p->thread, NULL, prefetch_main, p) != 0) goto err_ring;
    *out = p;
    return ST_OK;

err_ring:
    st = ST_NOMEM;
    ring_close(p->ready);
err:
    pthread_cond_destroy(&p->moved);
    pthread_mutex_destroy(&p->lock);
    mem_free(p);
    return st;
}

void prefetch_close(struct prefetch *p)
{
    if (p == NULL) return;
    atomic_store_explicit(&p->stopping, true, memory_order_relaxed);
    ring_stop(p->ready);
    pthread_join(p->thread, NULL);
    void *item;
    while (ring_pop(p->ready, 0, &item) == ST_OK) ticket_close(item);
    ring_close(p->ready);
    pthread_cond_destroy(&p->moved);
    pthread_mutex_destroy(&p->lock);
    mem_free(p);
}

/* --- COMPUTE's side ------------------------------------------------------------------------- */

enum st prefetch_next(struct prefetch *p, struct ticket **out, uint64_t *waited_ns)
{
    void *item;
    uint64_t start = clock_now_ns();
    enum st st = ring_pop(p->ready, (uint64_t)p->cfg.timeout_ms * 1000000u, &item);
    *waited_ns += clock_now_ns() - start;
    if (st == ST_TIMEOUT)
        return log_fail(st, "oracle", "no plan for %u s", p->cfg.timeout_ms / 1000);
    if (st == ST_CANCELLED) {
        pthread_mutex_lock(&p->lock);
        st = p->end == ST_OK ? ST_CANCELLED : p->end;
        pthread_mutex_unlock(&p->lock);
    }
    if (st == ST_OK) *out = item;
    return st;
}

bool prefetch_ready(struct prefetch *p, const struct ticket *t)
{
    pthread_mutex_lock(&p->lock);
    bool ready = t->missing == 0;
    pthread_mutex_unlock(&p->lock);
    return ready;
}

enum st prefetch_wait(struct prefetch *p, struct ticket *t, uint64_t *waited_ns)
{
    uint64_t start = clock_now_ns();
    pthread_mutex_lock(&p->lock);
    while (t->missing > 0) pthread_cond_wait(&p->moved, &p->lock); /* each has a deadline */
    enum st st = t->failed;
    pthread_mutex_unlock(&p->lock);
    *waited_ns += clock_now_ns() - start;
    return st;
}

static enum st check_versions(const struct fetch_part *part, const struct fetch_reply *r,
                              const struct plan *plan)
{
    for (uint32_t i = 0; i < part->n; i++) {
        int64_t version = (int64_t)codec_u64(r->version, i), need = part->need[i];
#ifdef BUG_version_unchecked
        need = version; /* planted: whatever comes is right */
#endif
        int right = need == PLAN_NEED_SETTLED ? version < plan->settled || version < 0
                                              : version == need;
        if (!right)
            return log_fail(ST_INTERNAL, "I2", "iteration %lld: row %llu of table %u came as "
                            "version %lld, the plan needs %lld", (long long)plan->iteration,
                            (unsigned long long)row_number(part->row_id[i]),
                            row_table(part->row_id[i]), (long long)version, (long long)need);
    }
    return ST_OK;
}

static enum st install_part(struct prefetch *p, struct fetch_part *part, const struct plan *plan,
                            struct device *d, float *table, uint32_t stride)
{
    struct rpc_header from;
    struct fetch_reply r;
    uint32_t width = part->owned ? p->cfg.dim + p->cfg.state : p->cfg.dim;
    enum st st = fetch_reply_decode(part->reply->data, part->reply->len, &from, &r);
    if (st != ST_OK || r.n != part->n || r.row_floats != width ||
        from.job != p->cfg.header.job || from.attempt != p->cfg.header.attempt)
        return log_fail(ST_BADMSG, "server", "shard %u answered a fetch with something else",
                        part->shard);
    st = check_versions(part, &r, plan);
    if (st != ST_OK) return st;
    atomic_fetch_add_explicit(&p->row_bytes, part->reply->len, memory_order_relaxed);
    return d->ops->rows_put(d, table, stride, part->slot, part->n, r.rows, width);
}

enum st prefetch_install(struct prefetch *p, struct ticket *t, struct device *d, float *table,
                         uint32_t stride)
{
    for (uint32_t i = 0; i < t->n_parts; i++) {
        enum st st = install_part(p, &t->part[i], t->plan, d, table, stride);
        if (st != ST_OK) return st;
        msg_close(t->part[i].reply);
        t->part[i].reply = NULL;
    }
    return ST_OK;
}

uint64_t prefetch_row_bytes(const struct prefetch *p)
{
    return atomic_load_explicit(&p->row_bytes, memory_order_relaxed);
}

uint64_t prefetch_plan_bytes(const struct prefetch *p)
{
    return atomic_load_explicit(&p->plan_bytes, memory_order_relaxed);
}
