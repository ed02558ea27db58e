#include "trainer/writeback.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"

struct writeback {
    struct writeback_cfg cfg;
    uint64_t bytes;                       /* COMPUTE only, as is the rest up to the lock */
    float *rows;                          /* [cap][D + state] from host_alloc: rows taken */
    size_t cap;
    bool taken;
    uint64_t mark;                        /* they are there once the device has come to it */

    pthread_mutex_t lock;                 /* guards all below */
    pthread_cond_t moved;
    uint32_t open[WRITEBACK_WINDOW];      /* unanswered messages of iteration % WINDOW */
    enum st failed;
};

struct sent {                             /* one message under way */
    struct writeback *w;
    uint32_t shard, bucket;
};

static size_t row_bytes(const struct writeback *w, size_t n)
{
    return n * (w->cfg.dim + w->cfg.state) * sizeof(float);
}

enum st writeback_open(const struct writeback_cfg *cfg, struct writeback **out)
{
    struct writeback *w = mem_zalloc(1, sizeof(*w));
    if (w == NULL) return ST_NOMEM;
    w->cfg = *cfg;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->moved, NULL);
    *out = w;
    return ST_OK;
}

static enum st wait_bucket(struct writeback *w, uint32_t bucket)
{
    pthread_mutex_lock(&w->lock);
    while (w->open[bucket] > 0) pthread_cond_wait(&w->moved, &w->lock); /* calls have deadlines */
    enum st st = w->failed;
    pthread_mutex_unlock(&w->lock);
    return st;
}

enum st writeback_drain(struct writeback *w)
{
    enum st st = ST_OK;
    for (uint32_t b = 0; b < WRITEBACK_WINDOW; b++) st = wait_bucket(w, b);
    return st;
}

void writeback_close(struct writeback *w)
{
    if (w == NULL) return;
    enum st st = writeback_drain(w);
    (void)st; /* whoever cared has asked before */
    w->cfg.device->ops->host_free(w->cfg.device, w->rows, row_bytes(w, w->cap));
    pthread_cond_destroy(&w->moved);
    pthread_mutex_destroy(&w->lock);
    mem_free(w);
}

static void write_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct sent *s = ctx;
    struct writeback *w = s->w;
    struct rpc_header from;
    if (st == ST_OK && plain_decode(reply->data, reply->len, &from) != ST_OK) {
        st = ST_BADMSG;
        text = "the answer cannot be read";
    }
    pthread_mutex_lock(&w->lock);
    bool first = st != ST_OK && w->failed == ST_OK; /* those behind it fail likewise */
    if (first) w->failed = st;
    pthread_mutex_unlock(&w->lock);
    bool over = w->cfg.over != NULL && atomic_load(w->cfg.over);
    if (first && st != ST_CANCELLED && !over) {
        char where[48];
        snprintf(where, sizeof(where), "server %u", s->shard / w->cfg.threads);
        log_fail(st, where, "rows were not written back: %s", text);
    }
    msg_close(reply);
    pthread_mutex_lock(&w->lock);
    w->open[s->bucket]--;
    pthread_cond_broadcast(&w->moved);
    pthread_mutex_unlock(&w->lock);
    mem_free(s);
}

/* Entries [lo, hi) of one shard, as one message. */
static enum st send_rows(struct writeback *w, const struct plan *plan, uint32_t lo, uint32_t hi,
                         uint32_t shard)
{
    const struct plan_evict *e = &plan->evict;
    uint32_t width = w->cfg.dim + w->cfg.state;
    struct rpc_header h = w->cfg.header;
    h.iteration = plan->iteration;
    struct sent *s = mem_alloc(1, sizeof(*s));
    if (s == NULL) return ST_NOMEM;
    *s = (struct sent){w, shard, (uint32_t)((uint64_t)plan->iteration % WRITEBACK_WINDOW)};
    struct msg *m = NULL;
    uint8_t *rows;
    enum st st = write_back_begin(&h, shard, e->row_id + lo, e->version + lo, hi - lo, width, &m,
                                  &rows);
    if (st != ST_OK) {
        mem_free(s);
        return st;
    }
    memcpy(rows, w->rows + (size_t)lo * width, row_bytes(w, hi - lo));
    w->bytes += m->len;
    pthread_mutex_lock(&w->lock);
    w->open[s->bucket]++;
    pthread_mutex_unlock(&w->lock);
    rpc_send(w->cfg.server[shard / w->cfg.threads], RPC_WRITE_BACK, m, w->cfg.timeout_ms,
             write_done, s);
    return ST_OK;
}

enum st writeback_take(struct writeback *w, const struct plan *plan, const float *table,
                       uint32_t stride)
{
    struct device *d = w->cfg.device;
    const struct plan_evict *e = &plan->evict;
    if (e->n > w->cap) {
        size_t cap = (size_t)e->n + e->n / 4;
        float *rows = d->ops->host_alloc(d, row_bytes(w, cap));
        if (rows == NULL) return ST_NOMEM;
        d->ops->host_free(d, w->rows, row_bytes(w, w->cap));
        w->rows = rows;
        w->cap = cap;
    }
    w->taken = true;
    return d->ops->rows_get(d, table, stride, e->slot, e->n, w->rows, w->cfg.dim + w->cfg.state,
                            &w->mark);
}

enum st writeback_send(struct writeback *w, const struct plan *plan)
{
    const struct plan_evict *e = &plan->evict;
    uint32_t n_shards = w->cfg.n_servers * w->cfg.threads;
    uint32_t most = codec_max_rows(w->cfg.dim + w->cfg.state);
    if (!w->taken) return ST_OK;
    w->taken = false;
    enum st st = w->cfg.device->ops->wait(w->cfg.device, w->mark);
    if (st == ST_OK)
        st = wait_bucket(w, (uint32_t)((uint64_t)plan->iteration % WRITEBACK_WINDOW));
    for (uint32_t lo = 0, hi; lo < e->n && st == ST_OK; lo = hi) {
        uint32_t shard = row_shard(e->row_id[lo], n_shards);
        hi = lo;
        while (hi < e->n && hi - lo < most &&
               row_shard(e->row_id[hi], n_shards) == shard)
            hi++;
        st = send_rows(w, plan, lo, hi, shard);
    }
    return st;
}

uint64_t writeback_bytes(const struct writeback *w)
{
    return w->bytes;
}
