#include "trainer/writeback.h"

#include <pthread.h>
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"

struct writeback {
    struct writeback_cfg cfg;
    uint64_t bytes;                       /* COMPUTE only */

    pthread_mutex_t lock;                 /* guards all below */
    pthread_cond_t moved;
    uint32_t open[WRITEBACK_WINDOW];      /* unanswered messages of iteration % WINDOW */
    enum st failed;
};

struct sent {                             /* one message under way */
    struct writeback *w;
    uint32_t shard, bucket;
};

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
                         uint32_t shard, struct device *d, const float *table, uint32_t stride)
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
    if (st == ST_OK)
        st = d->ops->rows_get(d, table, stride, e->slot + lo, hi - lo, rows, width);
    if (st != ST_OK) {
        msg_close(m);
        mem_free(s);
        return st;
    }
    w->bytes += m->len;
    pthread_mutex_lock(&w->lock);
    w->open[s->bucket]++;
    pthread_mutex_unlock(&w->lock);
    rpc_send(w->cfg.server[shard / w->cfg.threads], RPC_WRITE_BACK, m, w->cfg.timeout_ms,
             write_done, s);
    return ST_OK;
}

enum st writeback_send(struct writeback *w, const struct plan *plan, struct device *d,
                       const float *table, uint32_t stride)
{
    const struct plan_evict *e = &plan->evict;
    uint32_t n_shards = w->cfg.n_servers * w->cfg.threads;
    uint32_t most = codec_max_rows(w->cfg.dim + w->cfg.state);
    enum st st = wait_bucket(w, (uint32_t)((uint64_t)plan->iteration % WRITEBACK_WINDOW));
    for (uint32_t lo = 0, hi; lo < e->n && st == ST_OK; lo = hi) {
        uint32_t shard = row_shard(e->row_id[lo], n_shards);
        hi = lo;
        while (hi < e->n && hi - lo < most &&
               row_shard(e->row_id[hi], n_shards) == shard)
            hi++;
        st = send_rows(w, plan, lo, hi, shard, d, table, stride);
    }
    return st;
}

uint64_t writeback_bytes(const struct writeback *w)
{
    return w->bytes;
}
