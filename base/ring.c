#include "base/ring.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "base/mem.h"

struct ring {
    void **item;
    size_t cap;

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t not_full, not_empty;
    size_t head, len;
    bool stopped;
};

enum st ring_open(size_t cap, struct ring **out)
{
    struct ring *r = mem_zalloc(1, sizeof(*r));
    if (r == NULL) return ST_NOMEM;
    r->item = mem_zalloc(cap, sizeof(*r->item));
    if (r->item == NULL) {
        mem_free(r);
        return ST_NOMEM;
    }
    r->cap = cap;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->not_full, &attr);
    pthread_cond_init(&r->not_empty, &attr);
    pthread_condattr_destroy(&attr);
    *out = r;
    return ST_OK;
}

void ring_close(struct ring *r)
{
    if (r == NULL) return;
    pthread_cond_destroy(&r->not_full);
    pthread_cond_destroy(&r->not_empty);
    pthread_mutex_destroy(&r->lock);
    mem_free(r->item);
    mem_free(r);
}

/* Seconds and the rest apart: `ns` may be as large as it gets. */
static struct timespec deadline_in(uint64_t ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t below = (uint64_t)t.tv_nsec + ns % 1000000000u;
    t.tv_sec += (time_t)(ns / 1000000000u + below / 1000000000u);
    t.tv_nsec = (long)(below % 1000000000u);
    return t;
}

enum st ring_push(struct ring *r, void *item, uint64_t timeout_ns)
{
    struct timespec until = deadline_in(timeout_ns);
    enum st st = ST_OK;
    pthread_mutex_lock(&r->lock);
    while (r->len == r->cap && !r->stopped && st == ST_OK)
        if (pthread_cond_timedwait(&r->not_full, &r->lock, &until) == ETIMEDOUT) st = ST_TIMEOUT;
    if (r->stopped) {
        st = ST_CANCELLED;
    } else if (r->len < r->cap) {
        st = ST_OK; /* room came together with the deadline */
        r->item[(r->head + r->len++) % r->cap] = item;
        pthread_cond_signal(&r->not_empty);
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

enum st ring_pop(struct ring *r, uint64_t timeout_ns, void **item)
{
    struct timespec until = deadline_in(timeout_ns);
    enum st st = ST_OK;
    pthread_mutex_lock(&r->lock);
    while (r->len == 0 && !r->stopped && st == ST_OK)
        if (pthread_cond_timedwait(&r->not_empty, &r->lock, &until) == ETIMEDOUT) st = ST_TIMEOUT;
    if (r->len > 0) {
        st = ST_OK;
        *item = r->item[r->head];
        r->head = (r->head + 1) % r->cap;
        r->len--;
        pthread_cond_signal(&r->not_full);
    } else if (r->stopped) {
        st = ST_CANCELLED;
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

void ring_stop(struct ring *r)
{
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_cond_broadcast(&r->not_full);
    pthread_cond_broadcast(&r->not_empty);
    pthread_mutex_unlock(&r->lock);
}

size_t ring_len(struct ring *r)
{
    pthread_mutex_lock(&r->lock);
    size_t n = r->len;
    pthread_mutex_unlock(&r->lock);
    return n;
}
