#include "tests/support/held.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { WAIT_SECONDS = 20 };

static void on_call(void *ctx, struct rpc_call *call, enum rpc_method method, const uint8_t *req,
                    size_t len)
{
    struct held *h = ctx;
    uint8_t *copy = malloc(len + 1);
    if (copy == NULL) abort();
    memcpy(copy, req, len);
    pthread_mutex_lock(&h->lock);
    if (h->n == HELD_MOST) abort();
    h->call[h->n++] = (struct held_call){call, method, copy, len};
    pthread_cond_broadcast(&h->came);
    pthread_mutex_unlock(&h->lock);
}

void held_open(struct held *h, struct transport *t, const char *address)
{
    *h = (struct held){.lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER};
    assert_int_equal(rpc_serve(t, address, on_call, h, &h->server), ST_OK);
}

void held_close(struct held *h)
{
    for (uint32_t i = 0; i < held_count(h); i++) {
        if (h->call[i].call != NULL) held_fail(h, i, ST_CANCELLED, "the test is over");
        free(h->call[i].req);
    }
    rpc_server_close(h->server);
}

void held_wait(struct held *h, uint32_t n)
{
    struct timespec until;
    int late = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WAIT_SECONDS;
    pthread_mutex_lock(&h->lock);
    while (h->n < n && late == 0) late = pthread_cond_timedwait(&h->came, &h->lock, &until);
    uint32_t got = h->n;
    pthread_mutex_unlock(&h->lock);
    if (got < n) fail_msg("%u calls came, not %u", got, n);
}

uint32_t held_count(struct held *h)
{
    pthread_mutex_lock(&h->lock);
    uint32_t n = h->n;
    pthread_mutex_unlock(&h->lock);
    return n;
}

static struct rpc_call *take(struct held *h, uint32_t i)
{
    pthread_mutex_lock(&h->lock);
    struct rpc_call *call = i < h->n ? h->call[i].call : NULL;
    if (call != NULL) h->call[i].call = NULL;
    pthread_mutex_unlock(&h->lock);
    assert_non_null(call);
    return call;
}

void held_reply(struct held *h, uint32_t i, struct msg *reply)
{
    rpc_reply(take(h, i), reply);
}

void held_fail(struct held *h, uint32_t i, enum st st, const char *text)
{
    rpc_fail(take(h, i), st, text);
}
