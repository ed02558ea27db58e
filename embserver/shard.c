/* One shard's thread.
 *
 *     queue -> fetch: check -> all rows there? -> answer
 *                                  | no
 *                                  v
 *                                parked <----------+
 *                                  | row written   | another row is missing
 *                                  +---------------+-> answer;  deadline, close -> fail
 *           -> write-back: check all of it -> put all rows -> answer -> wake fetches
 *           -> visit: digest, export
 *
 * A message is checked whole before any of it is applied, so a refused one has changed nothing. */
#define _GNU_SOURCE
#include "embserver/shard.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/ring.h"
#include "base/row.h"

enum {
    QUEUE_CAP = 1 << 14,  /* clients keep fewer requests in flight             */
    TEXT_BYTES = 200,     /* one line to the other side                        */
    AHEAD = 8,            /* rows: enough to hide a miss to memory behind work */
};
static const uint64_t SECOND_NS = 1000000000u;
/* How long to sleep when nothing is parked: only a request matters then. */
static const uint64_t IDLE_NS = 3600 * UINT64_C(1000000000);

struct seen { uint64_t row_id, round; };

struct shard {
    struct shard_cfg cfg;       /* set at open                                              */
    struct ring *queue;         /* any thread pushes, the shard's pops                      */
    pthread_t thread;

    struct store *store;        /* all below: the shard's thread, once it runs              */
    struct parking *parking;
    struct seen *seen;          /* [n_seen] rows of the message being checked, hashed       */
    size_t n_seen;              /* power of two; grows to the largest message               */
    uint64_t round;             /* of `seen`: +1 a message instead of clearing              */
};

/* --- ending a task ---------------------------------------------------------------------------- */

static void task_fail(struct task *t, enum st st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void task_fail(struct task *t, enum st st, const char *fmt, ...)
{
    char text[TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (t->kind == TASK_VISIT) t->visit.fn(t->visit.ctx, NULL);
    else rpc_fail(t->call, st, text);
    mem_free(t);
}

/* Why `id` is no row of this shard. */
static void task_fail_row(const struct shard *s, struct task *t, uint64_t id)
{
    const struct store_cfg *c = &s->cfg.store;
    uint32_t table = row_table(id);
    if (table >= c->n_tables)
        task_fail(t, ST_BADMSG, "table %" PRIu32 " of %" PRIu32, table, c->n_tables);
    else if (row_number(id) >= c->table_rows[table])
        task_fail(t, ST_BADMSG, "table %" PRIu32 " has %" PRIu64 " rows, no row %" PRIu64, table,
                  c->table_rows[table], row_number(id));
    else
        task_fail(t, ST_BADMSG, "row (%" PRIu32 ", %" PRIu64 ") belongs to shard %" PRIu32
                  ", not %" PRIu32, table, row_number(id), row_shard(id, c->n_shards), c->shard);
}

/* --- fetch ------------------------------------------------------------------------------------ */

/* False: refused, the task is gone. */
static bool fetch_check(const struct shard *s, struct task *t)
{
    for (uint32_t i = 0; i < t->fetch.n; i++) {
        uint64_t id = codec_u64(t->fetch.row_id, i);
        int64_t need = (int64_t)codec_u64(t->fetch.need, i);
        if (!store_has(s->store, id)) {
            task_fail_row(s, t, id);
            return false;
        }
        if (need < PLAN_NEED_SETTLED) {
            task_fail(t, ST_BADMSG, "row (%" PRIu32 ", %" PRIu64 ") needs iteration %" PRId64,
                      row_table(id), row_number(id), need);
            return false;
        }
    }
    return true;
}

static bool row_is_there(const struct shard *s, uint64_t id, int64_t need)
{
#ifdef BUG_no_need_gate
    return true; /* planted bug: every fetch is answered at once */
#else
    return need == PLAN_NEED_SETTLED || store_version(s->store, id) >= need;
#endif
}

static void fetch_answer(const struct shard *s, struct task *t)
{
    const struct fetch_request *f = &t->fetch;
    uint32_t width = s->cfg.store.dim + (f->owned ? s->cfg.store.state : 0);
    struct msg *reply;
    uint8_t *version, *rows;
    enum st st = fetch_reply_begin(&t->head, f->n, width, &reply, &version, &rows);
    if (st != ST_OK) {
        task_fail(t, st, "no reply of %" PRIu32 " rows", f->n);
        return;
    }
    for (uint32_t i = 0; i < f->n; i++) {
        if (i + AHEAD < f->n) store_prefetch(s->store, codec_u64(f->row_id, i + AHEAD));
        uint64_t id = codec_u64(f->row_id, i);
        int64_t v = store_version(s->store, id);
        memcpy(version + (size_t)i * sizeof(v), &v, sizeof(v));
        store_read(s->store, id, width, rows + (size_t)i * width * sizeof(float));
    }
    rpc_reply(t->call, reply);
    mem_free(t);
}

/* Answer the fetch or (again) park it with the first row that is missing. */
static void fetch_try(struct shard *s, struct task *t)
{
    const struct fetch_request *f = &t->fetch;
    bool was_parked = t->parked.deadline_ns != 0;
    for (; t->n_there < f->n; t->n_there++) {
        uint64_t id = codec_u64(f->row_id, t->n_there);
        int64_t need = (int64_t)codec_u64(f->need, t->n_there);
        if (t->n_there + AHEAD < f->n)
            store_prefetch(s->store, codec_u64(f->row_id, t->n_there + AHEAD));
        if (row_is_there(s, id, need)) continue;
        t->parked.row_id = id;
        t->parked.need = need;
        if (was_parked) {
            parking_again(s->parking, &t->parked);
        } else {
            t->parked.deadline_ns = clock_now_ns() + s->cfg.timeout_s * SECOND_NS;
            parking_add(s->parking, &t->parked);
        }
        return;
    }
    if (was_parked) parking_leave(s->parking, &t->parked);
    fetch_answer(s, t);
}

/* --- write-back ------------------------------------------------------------------------------- */

static enum st seen_reserve(struct shard *s, size_t n_rows)
{
    size_t n = s->n_seen;
    while (n < 2 * n_rows) n *= 2;
    if (n == s->n_seen) return ST_OK;
    struct seen *bigger = mem_zalloc(n, sizeof(*bigger));
    if (bigger == NULL) return ST_NOMEM;
    mem_free(s->seen);
    s->seen = bigger;
    s->n_seen = n;
    return ST_OK;
}

/* Is this the second time in this round? */
static bool seen_before(struct shard *s, uint64_t id)
{
    size_t at = (id * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (s->n_seen - 1);
    for (; s->seen[at].round == s->round; at = (at + 1) & (s->n_seen - 1))
        if (s->seen[at].row_id == id) return true;
    s->seen[at] = (struct seen){id, s->round};
    return false;
}

static bool all_finite(const uint8_t *floats, uint32_t n)
{
    const uint32_t exponent = 0x7f800000u;
    bool finite = true;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, floats + (size_t)i * sizeof(bits), sizeof(bits));
        finite &= (bits & exponent) != exponent;
    }
    return finite;
}

/* Row `i` of the message. False: refused, the task is gone. */
static bool write_back_check_row(struct shard *s, struct task *t, uint32_t i)
{
    const struct write_back *w = &t->put;
    uint64_t id = codec_u64(w->row_id, i);
    int64_t version = (int64_t)codec_u64(w->version, i);
    const uint8_t *record = w->rows + (size_t)i * w->row_floats * sizeof(float);
    uint32_t table = row_table(id);
    uint64_t row = row_number(id);
    if (!store_has(s->store, id)) {
        task_fail_row(s, t, id);
        return false;
    }
    if (version < 0 || version > t->head.iteration)
        task_fail(t, ST_BADMSG, "row (%" PRIu32 ", %" PRIu64 ") of iteration %" PRId64
                  ", sent at iteration %" PRId64, table, row, version, t->head.iteration);
    else if (seen_before(s, id))
        task_fail(t, ST_BADMSG, "row (%" PRIu32 ", %" PRIu64 ") twice in one write-back", table,
                  row);
    else if (!all_finite(record, w->row_floats))
        task_fail(t, ST_BADMSG, "NaN or infinity in row (%" PRIu32 ", %" PRIu64 ")@%" PRId64,
                  table, row, version);
    else if (store_check(s->store, id, t->head.attempt, version, record) == ST_BADMSG)
        task_fail(t, ST_BADMSG, "two writers for row (%" PRIu32 ", %" PRIu64 ")@%" PRId64, table,
                  row, version);
    else
        return true;
    return false;
}

/* False: refused, the task is gone and nothing has changed. */
static bool write_back_check(struct shard *s, struct task *t)
{
    const struct write_back *w = &t->put;
    uint32_t width = s->cfg.store.dim + s->cfg.store.state;
    if (w->row_floats != width) {
        task_fail(t, ST_BADMSG, "rows of %" PRIu32 " floats; a record has %" PRIu32,
                  w->row_floats, width);
        return false;
    }
    if (seen_reserve(s, w->n) != ST_OK) {
        task_fail(t, ST_NOMEM, "no memory to check %" PRIu32 " rows", w->n);
        return false;
    }
    s->round++;
    for (uint32_t i = 0; i < w->n; i++) {
        if (i + AHEAD < w->n) store_prefetch(s->store, codec_u64(w->row_id, i + AHEAD));
        if (!write_back_check_row(s, t, i)) return false;
    }
    return true;
}

/* Put all rows; chain up the fetches that this may end. */
static struct parked *write_back_apply(struct shard *s, const struct task *t)
{
    const struct write_back *w = &t->put;
    struct parked *first = NULL, **last = &first;
    for (uint32_t i = 0; i < w->n; i++) {
        uint64_t id = codec_u64(w->row_id, i);
        int64_t version = (int64_t)codec_u64(w->version, i);
        enum st st = store_put(s->store, id, t->head.attempt, version,
                               w->rows + (size_t)i * w->row_floats * sizeof(float));
        CHECK(st == ST_OK || st == ST_BUSY, "I3: write_back_check has asked store_check");
        if (parking_oldest(s->parking) == NULL) continue;
        *last = parking_take(s->parking, id, store_version(s->store, id));
        while (*last != NULL) last = &(*last)->next;
    }
    return first;
}

static void write_back_arrives(struct shard *s, struct task *t)
{
    if (!write_back_check(s, t)) return;
    struct parked *woken = write_back_apply(s, t);
    struct msg *reply;
    enum st st = plain_encode(&t->head, &reply);
    if (st == ST_OK) {
        rpc_reply(t->call, reply);
        mem_free(t);
    } else {
        task_fail(t, st, "no memory for an answer; the rows were taken, send them again");
    }
    while (woken != NULL) {
        struct parked *next = woken->next;
        fetch_try(s, (struct task *)woken);
        woken = next;
    }
}

/* --- the thread ------------------------------------------------------------------------------- */

static void task_run(struct shard *s, struct task *t)
{
    switch (t->kind) {
    case TASK_FETCH:
        if (fetch_check(s, t)) fetch_try(s, t);
        break;
    case TASK_WRITE_BACK:
        write_back_arrives(s, t);
        break;
    case TASK_VISIT:
        t->visit.fn(t->visit.ctx, s->store);
        mem_free(t);
        break;
    }
}

/* Fail the fetches whose deadline is not after `now_ns`. */
static void expire(struct shard *s, uint64_t now_ns)
{
    struct parked *p;
    while ((p = parking_oldest(s->parking)) != NULL && p->deadline_ns <= now_ns) {
        uint64_t id = p->row_id;
        parking_leave(s->parking, p);
        task_fail((struct task *)p, ST_TIMEOUT,
                  "shard %" PRIu32 ": row (%" PRIu32 ", %" PRIu64 ") needs the write-back of "
                  "iteration %" PRId64 ", has %" PRId64 " after %" PRIu32 " s",
                  s->cfg.store.shard, row_table(id), row_number(id), p->need,
                  store_version(s->store, id), s->cfg.timeout_s);
    }
}

static uint64_t wait_ns(const struct shard *s)
{
    const struct parked *p = parking_oldest(s->parking);
    if (p == NULL) return IDLE_NS;
    uint64_t now = clock_now_ns();
    return p->deadline_ns > now ? p->deadline_ns - now : 0;
}

static void fail_parked(struct shard *s)
{
    struct parked *p;
    while ((p = parking_oldest(s->parking)) != NULL) {
        parking_leave(s->parking, p);
        task_fail((struct task *)p, ST_CANCELLED, "the server is closing");
    }
}

static void *shard_main(void *arg)
{
    struct shard *s = arg;
    char name[16];
    snprintf(name, sizeof(name), "shard-%" PRIu32, s->cfg.store.shard);
    pthread_setname_np(pthread_self(), name);
    for (;;) {
        void *t;
        enum st st = ring_pop(s->queue, wait_ns(s), &t);
        if (st == ST_CANCELLED) break;
        if (st == ST_OK) task_run(s, t);
        if (parking_oldest(s->parking) != NULL) expire(s, clock_now_ns());
    }
    fail_parked(s);
    return NULL;
}

/* --- from outside ----------------------------------------------------------------------------- */

enum st shard_open(const struct shard_cfg *cfg, struct shard **out)
{
    enum st st;
    struct shard *s = mem_zalloc(1, sizeof(*s));
    if (s == NULL) goto no_memory;
    s->cfg = *cfg;
    s->n_seen = 1 << 10;
    s->seen = mem_zalloc(s->n_seen, sizeof(*s->seen));
    if (s->seen == NULL) goto no_memory;
    if (parking_open(&s->parking) != ST_OK) goto no_memory;
    if (ring_open(QUEUE_CAP, &s->queue) != ST_OK) goto no_memory;
    TRY(store_open(&cfg->store, &s->store), err);
    if (pthread_create(&s->thread, NULL, shard_main, s) != 0) {
        st = log_fail(ST_NOMEM, NULL, "cannot start the thread of shard %" PRIu32,
                      cfg->store.shard);
        goto err;
    }
    *out = s;
    return ST_OK;

no_memory: st = log_fail(ST_NOMEM, NULL, "no memory for shard %" PRIu32, cfg->store.shard);
err:       shard_close(s);
           return st;
}

void shard_push(struct shard *s, struct task *t)
{
    enum st st = ring_push(s->queue, t, 0);
    if (st == ST_CANCELLED)
        task_fail(t, st, "the server is closing");
    else if (st != ST_OK)
        task_fail(t, ST_UNAVAILABLE, "shard %" PRIu32 " has %d requests waiting",
                  s->cfg.store.shard, QUEUE_CAP);
}

void shard_stop(struct shard *s)
{
    ring_stop(s->queue);
    pthread_join(s->thread, NULL);
}

void shard_close(struct shard *s)
{
    if (s == NULL) return;
    ring_close(s->queue);
    mem_free(s->seen);
    parking_close(s->parking);
    store_close(s->store);
    mem_free(s);
}
