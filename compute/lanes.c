#include "compute/lanes.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/mem.h"

struct lanes {
    uint32_t n_lanes;
    pthread_t *thread;       /* [n_lanes - 1] */
    uint32_t n_threads;      /* started so far */

    pthread_mutex_t lock;    /* guards all below but next_task */
    pthread_cond_t work, idle;
    uint64_t round;          /* one more for each lanes_run */
    uint32_t busy;           /* lanes still in this round */
    bool stopping;
    device_task *fn;
    void *ctx;
    uint32_t n_tasks;
    uint32_t failed_task;    /* lowest task that failed; n_tasks = none */
    enum st failed;

    _Atomic uint32_t next_task; /* relaxed: the lock orders everything tasks read and write */
};

struct lane_arg {
    struct lanes *l;
    uint32_t lane;
};

static void run_tasks(struct lanes *l, uint32_t lane, device_task *fn, void *ctx, uint32_t n_tasks)
{
    for (;;) {
        uint32_t task = atomic_fetch_add_explicit(&l->next_task, 1, memory_order_relaxed);
        if (task >= n_tasks) return;
        enum st st = fn(ctx, lane, task);
        if (st == ST_OK) continue;
        pthread_mutex_lock(&l->lock);
        if (task < l->failed_task) {
            l->failed_task = task;
            l->failed = st;
        }
        pthread_mutex_unlock(&l->lock);
    }
}

static void *lane_main(void *p)
{
    struct lane_arg arg = *(struct lane_arg *)p;
    struct lanes *l = arg.l;
    mem_free(p);
    uint64_t seen = 0;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (l->round == seen && !l->stopping) pthread_cond_wait(&l->work, &l->lock);
        if (l->stopping) break;
        seen = l->round;
        device_task *fn = l->fn;
        void *ctx = l->ctx;
        uint32_t n_tasks = l->n_tasks;
        pthread_mutex_unlock(&l->lock);
        run_tasks(l, arg.lane, fn, ctx, n_tasks);
        pthread_mutex_lock(&l->lock);
        if (--l->busy == 0) pthread_cond_signal(&l->idle);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static enum st start_lane(struct lanes *l, uint32_t lane)
{
    struct lane_arg *arg = mem_alloc(1, sizeof(*arg));
    if (arg == NULL) return ST_NOMEM;
    *arg = (struct lane_arg){l, lane};
    if (pthread_create(&l->thread[lane - 1], NULL, lane_main, arg) != 0) {
        mem_free(arg);
        return ST_NOMEM;
    }
    l->n_threads++;
    return ST_OK;
}

enum st lanes_open(uint32_t n_lanes, struct lanes **out)
{
    enum st st = ST_NOMEM;
    struct lanes *l = mem_zalloc(1, sizeof(*l));
    if (l == NULL) return ST_NOMEM;
    l->n_lanes = n_lanes;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->idle, NULL);
    l->thread = mem_zalloc(n_lanes, sizeof(*l->thread));
    if (l->thread == NULL) goto err;
    for (uint32_t i = 1; i < n_lanes; i++) TRY(start_lane(l, i), err);
    *out = l;
    return ST_OK;

err:
    lanes_close(l);
    return st;
}

void lanes_close(struct lanes *l)
{
    if (l == NULL) return;
    pthread_mutex_lock(&l->lock);
    l->stopping = true;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    for (uint32_t i = 0; i < l->n_threads; i++) pthread_join(l->thread[i], NULL);
    pthread_cond_destroy(&l->work);
    pthread_cond_destroy(&l->idle);
    pthread_mutex_destroy(&l->lock);
    mem_free(l->thread);
    mem_free(l);
}

enum st lanes_run(struct lanes *l, uint32_t n_tasks, device_task *fn, void *ctx)
{
    pthread_mutex_lock(&l->lock);
    l->fn = fn;
    l->ctx = ctx;
    l->n_tasks = n_tasks;
    l->failed_task = n_tasks;
    l->failed = ST_OK;
    l->busy = l->n_threads;
    l->round++;
    atomic_store_explicit(&l->next_task, 0, memory_order_relaxed);
    if (l->n_threads > 0) pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);

    run_tasks(l, 0, fn, ctx, n_tasks);

    pthread_mutex_lock(&l->lock);
    while (l->busy > 0) pthread_cond_wait(&l->idle, &l->lock);
    enum st st = l->failed;
    pthread_mutex_unlock(&l->lock);
    return st;
}

uint32_t lanes_count(const struct lanes *l)
{
    return l->n_lanes;
}
