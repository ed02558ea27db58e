/* tests/support/rpc_env.h - for tests of transports: a server that echoes, fails or parks, a
 * client, and what was logged meanwhile. */
#ifndef CHANTER_TESTS_RPC_ENV_H
#define CHANTER_TESTS_RPC_ENV_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/transport.h"

enum { LONG_MS = 20000, MAX_PARKED = 64 };

/* Fails unless exactly one line was logged since the last look, and it has `part` in it. */
void assert_logged(const char *part);
void log_forget(void);

/* One server, one peer. Fetch is answered with the request; Digest fails with status req[0] and
 * text req[1..); WriteBack is parked, to be answered by the test. */
struct rpc_env {
    enum transport_kind kind;
    size_t live_before; /* mem_live() at the start */
    struct transport *t;
    struct rpc_server *server;
    struct rpc_peer *peer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct rpc_call *parked[MAX_PARKED]; /* under lock */
    struct msg *parked_reply[MAX_PARKED];
    size_t n_parked;
};
rpc_handler rpc_env_handler; /* ctx: struct rpc_env */
void rpc_env_wait_parked(struct rpc_env *e, size_t n);

/* cmocka fixtures. Initial state: enum transport_kind *; in the test: struct rpc_env *. The
 * teardown closes what the test has left open (NULL: closed), and fails when memory was not given
 * back or something was logged. */
int rpc_env_setup(void **state);
int rpc_env_teardown(void **state);
bool live_is(size_t n); /* waits for gRPC to give memory back */

/* The outcome of one rpc_send. */
struct result {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int calls; /* under lock, as the rest */
    enum st st;
    struct msg *reply;
    char text[2048];
};
#define RESULT_INIT {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER}
rpc_done result_done; /* ctx: struct result */
void result_wait(struct result *r);
int result_calls(struct result *r);

struct msg *msg_copy(const void *p, size_t n);
struct msg *random_msg(uint64_t seed, size_t n);
void assert_msg(const struct msg *m, const uint8_t *p, size_t n);
/* Send n random bytes; do they come back? Any thread. */
bool echo_ok(struct rpc_peer *p, uint64_t seed, size_t n);

#endif
