/* tests/support/held.h - a server that keeps every call until the test answers it, in whatever
 * order. For tests of clients over the local transport. */
#ifndef CHANTER_TESTS_SUPPORT_HELD_H
#define CHANTER_TESTS_SUPPORT_HELD_H

#include <pthread.h>
#include <stdint.h>

#include "proto/transport.h"

enum { HELD_MOST = 256 };

struct held_call {
    struct rpc_call *call;     /* NULL: answered */
    enum rpc_method method;
    uint8_t *req;              /* [len] a copy   */
    size_t len;
};

struct held {
    struct rpc_server *server;
    pthread_mutex_t lock;
    pthread_cond_t came;
    struct held_call call[HELD_MOST]; /* in the order in which they came */
    uint32_t n;                /* under the lock */
};

void held_open(struct held *h, struct transport *t, const char *address);
void held_close(struct held *h); /* fails what is not answered: ST_CANCELLED */
/* Until n calls have come in all; call[0..n) may be read then. Fails the test after a while. */
void held_wait(struct held *h, uint32_t n);
uint32_t held_count(struct held *h);
/* Answer call i; takes reply. */
void held_reply(struct held *h, uint32_t i, struct msg *reply);
void held_fail(struct held *h, uint32_t i, enum st st, const char *text);

#endif
