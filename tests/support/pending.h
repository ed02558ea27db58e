/* tests/support/pending.h - a call that a test has sent and not yet waited for. */
#ifndef CHANTER_TESTS_SUPPORT_PENDING_H
#define CHANTER_TESTS_SUPPORT_PENDING_H

#include <pthread.h>
#include <stdbool.h>

#include "proto/transport.h"

enum { PENDING_MS = 20000 }; /* a test that needs it all has failed */

struct pending {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;               /* this and below: under the lock until done */
    enum st st;
    struct msg *reply;
    char text[256];
};

/* rpc_send; takes req. `p` must stay where it is until pending_wait. */
void pending_send(struct pending *p, struct rpc_peer *peer, enum rpc_method method,
                  struct msg *req, uint32_t timeout_ms);
bool pending_done(struct pending *p);
/* Wait for the end. ST_OK: *reply is the caller's. */
enum st pending_wait(struct pending *p, struct msg **reply);

#endif
