#include "tests/support/pending.h"

#include <stdio.h>

static void on_done(void *ctx, enum st st, struct msg *reply, const char *text)
{
    struct pending *p = ctx;
    pthread_mutex_lock(&p->lock);
    p->done = true;
    p->st = st;
    p->reply = reply;
    snprintf(p->text, sizeof(p->text), "%s", st == ST_OK ? "" : text);
    pthread_cond_signal(&p->cond);
    pthread_mutex_unlock(&p->lock);
}

void pending_send(struct pending *p, struct rpc_peer *peer, enum rpc_method method,
                  struct msg *req, uint32_t timeout_ms)
{
    *p = (struct pending){.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    rpc_send(peer, method, req, timeout_ms, on_done, p);
}

bool pending_done(struct pending *p)
{
    pthread_mutex_lock(&p->lock);
    bool done = p->done;
    pthread_mutex_unlock(&p->lock);
    return done;
}

enum st pending_wait(struct pending *p, struct msg **reply)
{
    pthread_mutex_lock(&p->lock);
    while (!p->done) pthread_cond_wait(&p->cond, &p->lock);
    pthread_mutex_unlock(&p->lock);
    pthread_cond_destroy(&p->cond);
    pthread_mutex_destroy(&p->lock);
    *reply = p->reply;
    return p->st;
}
