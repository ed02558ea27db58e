#include "trainer/exchange.h"

#include <pthread.h>

#include "base/mem.h"
#include "base/ring.h"

enum { JOBS = 4 };
static const uint64_t FOREVER_NS = UINT64_C(1000000000) * 3600 * 24 * 365;

struct exchange {
    struct comm *comm;        /* used by the thread only, while it runs */
    uint32_t timeout_ms;
    struct ring *jobs;
    pthread_t thread;
    uint64_t bytes;           /* COMPUTE only */

    pthread_mutex_t lock;     /* guards every job's done and st */
    pthread_cond_t finished;
};

static void *exchange_main(void *p)
{
    struct exchange *x = p;
    void *item;
    while (ring_pop(x->jobs, FOREVER_NS, &item) == ST_OK) {
        struct exchange_job *j = item;
        enum st st = x->comm->ops->exchange(x->comm, j->what, j->out.p, j->n_out, j->in.p,
                                            j->n_in, x->timeout_ms);
        pthread_mutex_lock(&x->lock);
        j->st = st;
        j->done = true;
        pthread_cond_signal(&x->finished);
        pthread_mutex_unlock(&x->lock);
    }
    return NULL;
}

enum st exchange_open(struct comm *comm, uint32_t timeout_ms, struct exchange **out)
{
    enum st st = ST_NOMEM;
    struct exchange *x = mem_zalloc(1, sizeof(*x));
    if (x == NULL) return ST_NOMEM;
    x->comm = comm;
    x->timeout_ms = timeout_ms;
    pthread_mutex_init(&x->lock, NULL);
    pthread_cond_init(&x->finished, NULL);
    TRY(ring_open(JOBS, &x->jobs), err);
    if (pthread_create(&x->thread, NULL, exchange_main, x) != 0) goto err_thread;
    *out = x;
    return ST_OK;

err_thread:
    st = ST_NOMEM;
    ring_close(x->jobs);
err:
    pthread_cond_destroy(&x->finished);
    pthread_mutex_destroy(&x->lock);
    mem_free(x);
    return st;
}

void exchange_close(struct exchange *x)
{
    if (x == NULL) return;
    ring_stop(x->jobs);
    pthread_join(x->thread, NULL);
    ring_close(x->jobs);
    pthread_cond_destroy(&x->finished);
    pthread_mutex_destroy(&x->lock);
    mem_free(x);
}

void exchange_job_reset(struct exchange_job *j, const char *what)
{
    j->what = what;
    j->n_out = j->n_in = 0;
    j->done = false;
    j->st = ST_OK;
}

void exchange_job_fini(struct exchange_job *j)
{
    grow_fini(&j->out);
    grow_fini(&j->in);
}

static enum st add(struct grow *g, uint32_t *n, uint32_t peer, void *p, size_t bytes)
{
    if (bytes == 0) return ST_OK;
    if ((*n + 1) * sizeof(struct comm_part) > g->bytes) {
        size_t cap = *n < 16 ? 32 : 2 * (size_t)*n;
        struct comm_part *q = mem_grow(g->p, *n, cap, sizeof(*q));
        if (q == NULL) return ST_NOMEM;
        *g = (struct grow){q, cap * sizeof(*q)};
    }
    ((struct comm_part *)g->p)[(*n)++] = (struct comm_part){peer, p, bytes};
    return ST_OK;
}

enum st exchange_add_out(struct exchange_job *j, uint32_t peer, void *p, size_t bytes)
{
    return add(&j->out, &j->n_out, peer, p, bytes);
}

enum st exchange_add_in(struct exchange_job *j, uint32_t peer, void *p, size_t bytes)
{
    return add(&j->in, &j->n_in, peer, p, bytes);
}

enum st exchange_start(struct exchange *x, struct exchange_job *j)
{
    if (j->n_out == 0 && j->n_in == 0) return ST_OK;
    const struct comm_part *out = j->out.p;
    for (uint32_t i = 0; i < j->n_out; i++) x->bytes += out[i].bytes;
    enum st st = ring_push(x->jobs, j, (uint64_t)x->timeout_ms * 1000000u);
    j->running = st == ST_OK;
    return st;
}

enum st exchange_wait(struct exchange *x, struct exchange_job *j)
{
    if (!j->running) return ST_OK;
    pthread_mutex_lock(&x->lock);
    /* Bounded: the exchange itself has a deadline (I6). */
    while (!j->done) pthread_cond_wait(&x->finished, &x->lock);
    pthread_mutex_unlock(&x->lock);
    j->running = false;
    return j->st;
}

uint64_t exchange_bytes(const struct exchange *x)
{
    return x->bytes;
}
