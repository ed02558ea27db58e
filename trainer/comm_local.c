/* Ranks as threads of one process. A sender leaves a note of where its bytes are in the queue of
 * the pair; the receiver copies them and ticks the note off; the sender's exchange ends when all
 * its notes are ticked off, so that no buffer is touched after it has returned. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "trainer/comm.h"

struct note {
    const void *p;
    size_t bytes;
    enum { QUEUED, TAKEN, DONE } state;
    struct note *next;
};

struct pair { struct note *head, *tail; };

struct group {               /* shared by all ranks */
    uint32_t size;
    pthread_mutex_t lock;    /* guards all below; never held while bytes are copied */
    pthread_cond_t moved;
    uint32_t open;           /* ranks not yet closed; the last one frees the group  */
    bool aborted;
    uint64_t events;         /* times that `moved` was signalled                    */
    struct pair *pair;       /* [from * size + to]                                  */
};

struct comm_local {
    struct comm base;
    struct group *g;
    struct note *note;       /* [cap]: this rank's notes of the exchange that runs  */
    bool *got;               /* [cap]: in-parts already received                    */
    uint32_t cap;
};

/* Lock held. */
static void signal_moved(struct group *g)
{
    g->events++;
    pthread_cond_broadcast(&g->moved);
}

static struct pair *pair_of(struct group *g, uint32_t from, uint32_t to)
{
    return &g->pair[from * g->size + to];
}

static void queue_note(struct pair *q, struct note *n)
{
    n->next = NULL;
    if (q->head == NULL) q->head = n;
    else q->tail->next = n;
    q->tail = n;
}

static void unqueue_note(struct pair *q, struct note *n)
{
    struct note **at = &q->head;
    q->tail = NULL;
    while (*at != NULL) {
        if (*at == n) *at = n->next;
        else q->tail = *at, at = &(*at)->next;
    }
}

/* Receive what is there for one in-part. Called and returns with the lock held. */
static enum st take(struct comm_local *c, const struct comm_part *in, bool *got)
{
    struct group *g = c->g;
    struct pair *q = pair_of(g, in->peer, c->base.rank);
    struct note *n = q->head;
    if (n == NULL) return ST_OK;
    unqueue_note(q, n);
    n->state = TAKEN;
    bool fits = n->bytes == in->bytes;
    pthread_mutex_unlock(&g->lock);
    if (fits) memcpy(in->p, n->p, n->bytes);
    pthread_mutex_lock(&g->lock);
    n->state = DONE;
    *got = true;
    signal_moved(g);
    return fits ? ST_OK : log_fail(ST_COMM, "exchange", "rank %u got a message of another size "
                                   "than its plan says from rank %u", c->base.rank, in->peer);
}

static enum st reserve(struct comm_local *c, uint32_t n)
{
    if (n <= c->cap) return ST_OK;
    struct note *note = mem_alloc(2 * (size_t)n, sizeof(*note));
    bool *got = mem_alloc(2 * (size_t)n, sizeof(*got));
    if (note == NULL || got == NULL) {
        mem_free(note);
        mem_free(got);
        return ST_NOMEM;
    }
    mem_free(c->note);
    mem_free(c->got);
    c->note = note;
    c->got = got;
    c->cap = 2 * n;
    return ST_OK;
}

/* One round over everything still open; *left = how many parts are. Lock held. */
static enum st progress(struct comm_local *c, const struct comm_part *in, uint32_t n_in,
                        uint32_t n_out, uint32_t *left)
{
    enum st st = ST_OK;
    *left = 0;
    for (uint32_t i = 0; i < n_in && st == ST_OK; i++) {
        /* A later part of the same pair must not overtake: take in list order, and a part that
         * found nothing keeps its pair closed because the queue stays empty only until then. */
        bool blocked = false;
        for (uint32_t j = 0; j < i && !blocked; j++)
            blocked = !c->got[j] && in[j].peer == in[i].peer;
        if (!c->got[i] && !blocked) st = take(c, &in[i], &c->got[i]);
        *left += !c->got[i];
    }
    for (uint32_t i = 0; i < n_out; i++) *left += c->note[i].state != DONE;
    return st;
}

/* Take back what nobody has received, wait for what somebody is copying. Lock held. */
static void withdraw(struct comm_local *c, const struct comm_part *out, uint32_t n_out)
{
    for (uint32_t i = 0; i < n_out; i++) {
        if (c->note[i].state == QUEUED)
            unqueue_note(pair_of(c->g, c->base.rank, out[i].peer), &c->note[i]);
        while (c->note[i].state == TAKEN) pthread_cond_wait(&c->g->moved, &c->g->lock);
    }
}

static enum st timed_out(const struct comm_local *c, const char *what, const struct comm_part *in,
                         uint32_t n_in)
{
    for (uint32_t i = 0; i < n_in; i++)
        if (!c->got[i])
            return log_fail(ST_TIMEOUT, what, "rank %u has heard nothing from rank %u",
                            c->base.rank, in[i].peer);
    return log_fail(ST_TIMEOUT, what, "nobody takes what rank %u sends", c->base.rank);
}

static enum st local_exchange(struct comm *base, const char *what, const struct comm_part *out,
                              uint32_t n_out, const struct comm_part *in, uint32_t n_in,
                              uint32_t timeout_ms)
{
    struct comm_local *c = (struct comm_local *)base;
    struct group *g = c->g;
    enum st st = reserve(c, n_out > n_in ? n_out : n_in);
    if (st != ST_OK) return st;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;

    pthread_mutex_lock(&g->lock);
    for (uint32_t i = 0; i < n_out; i++) {
        c->note[i] = (struct note){out[i].p, out[i].bytes, DONE, NULL};
        if (out[i].bytes == 0) continue;
        c->note[i].state = QUEUED;
        queue_note(pair_of(g, base->rank, out[i].peer), &c->note[i]);
    }
    for (uint32_t i = 0; i < n_in; i++) c->got[i] = in[i].bytes == 0;
    signal_moved(g);
    bool late = false;
    for (uint32_t left = 1; st == ST_OK && left > 0;) {
        uint64_t seen = g->events; /* the lock is let go while bytes are copied: look again then */
        st = g->aborted ? ST_CANCELLED : progress(c, in, n_in, n_out, &left);
        if (st != ST_OK || left == 0 || g->events != seen) continue;
        if (late) st = timed_out(c, what, in, n_in);
        else late = pthread_cond_timedwait(&g->moved, &g->lock, &until) == ETIMEDOUT;
    }
    if (st != ST_OK) withdraw(c, out, n_out);
    pthread_mutex_unlock(&g->lock);
    return st;
}

static void group_free(struct group *g)
{
    pthread_cond_destroy(&g->moved);
    pthread_mutex_destroy(&g->lock);
    mem_free(g->pair);
    mem_free(g);
}

static void local_close(struct comm *base)
{
    struct comm_local *c = (struct comm_local *)base;
    struct group *g = c->g;
    pthread_mutex_lock(&g->lock);
    bool last = --g->open == 0;
    pthread_mutex_unlock(&g->lock);
    if (last) group_free(g);
    mem_free(c->note);
    mem_free(c->got);
    mem_free(c);
}

static const struct comm_ops OPS = {"local", local_exchange, local_close};

static enum st group_open(uint32_t size, struct group **out)
{
    struct group *g = mem_zalloc(1, sizeof(*g));
    if (g == NULL) return ST_NOMEM;
    g->pair = mem_zalloc((size_t)size * size, sizeof(*g->pair));
    if (g->pair == NULL) {
        mem_free(g);
        return ST_NOMEM;
    }
    g->size = size;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->moved, &attr);
    pthread_condattr_destroy(&attr);
    *out = g;
    return ST_OK;
}

enum st comm_local_open(uint32_t size, struct comm **out)
{
    struct group *g = NULL;
    enum st st = group_open(size, &g);
    if (st != ST_OK) return st;
    for (uint32_t r = 0; r < size; r++) {
        struct comm_local *c = mem_zalloc(1, sizeof(*c));
        if (c == NULL) goto err;
        c->base = (struct comm){&OPS, r, size, r, false};
        c->g = g;
        g->open++;
        out[r] = &c->base;
    }
    return ST_OK;

err:
    if (g->open == 0) group_free(g);
    else for (uint32_t r = g->open; r > 0; r--) local_close(out[r - 1]);
    return ST_NOMEM;
}

void comm_local_abort(struct comm *base)
{
    struct group *g = ((struct comm_local *)base)->g;
    pthread_mutex_lock(&g->lock);
    g->aborted = true;
    signal_moved(g);
    pthread_mutex_unlock(&g->lock);
}
