/* What only the grpc transport has: addresses, limits, foreign clients. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "tests/support/rpc_env.h"

static void other_machines_are_refused_without_tls(void **state)
{
    struct rpc_env *e = *state;
    static const char *const AWAY[] = {"0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.org:80",
                                       "localhost.example.org:80", "dns:///127.0.0.1:80",
                                       "127.0.0.1.example.org:80", "*:80", "", "127.0.0.10:80"};
    for (size_t i = 0; i < sizeof(AWAY) / sizeof(AWAY[0]); i++) {
        struct rpc_server *s = NULL;
        struct rpc_peer *p = NULL;
        assert_int_equal(rpc_serve(e->t, AWAY[i], rpc_env_handler, e, &s), ST_PERM);
        assert_logged("refusing a non-loopback address without TLS");
        assert_int_equal(rpc_connect(e->t, AWAY[i], &p), ST_PERM);
        assert_logged("refusing a non-loopback address without TLS");
        assert_null(s);
        assert_null(p);
    }
    static const char *const BAD[] = {"127.0.0.1:", "127.0.0.1:x", "localhost:65536",
                                      "127.0.0.1:80,10.0.0.1:80", "[::1]:-1", "127.0.0.1: 80"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct rpc_peer *p = NULL;
        assert_int_equal(rpc_connect(e->t, BAD[i], &p), ST_CONFIG);
        assert_logged("not a port");
        assert_null(p);
    }
}

static void the_kernel_chooses_a_port_that_localhost_reaches(void **state)
{
    struct rpc_env *e = *state;
    unsigned port = 0;
    assert_int_equal(sscanf(rpc_address(e->server), "127.0.0.1:%u", &port), 1);
    assert_in_range(port, 1, 65535);
    char name[32];
    snprintf(name, sizeof(name), "localhost:%u", port);
    struct rpc_peer *p;
    assert_int_equal(rpc_connect(e->t, name, &p), ST_OK);
    assert_true(echo_ok(p, 1, 1000));
    rpc_peer_close(p);
}

static void a_call_waits_for_a_server_that_starts_later(void **state)
{
    struct rpc_env *e = *state;
    char dir[] = "/tmp/chanter-test-XXXXXX", address[64];
    assert_non_null(mkdtemp(dir));
    snprintf(address, sizeof(address), "unix:%s/socket", dir);
    struct rpc_peer *p;
    struct rpc_server *s, *second = NULL;
    struct result r = RESULT_INIT;
    assert_int_equal(rpc_connect(e->t, address, &p), ST_OK);
    rpc_send(p, RPC_FETCH, msg_copy("early", 5), LONG_MS, result_done, &r);
    assert_int_equal(rpc_serve(e->t, address, rpc_env_handler, e, &s), ST_OK);
    assert_string_equal(rpc_address(s), address);
    result_wait(&r);
    assert_int_equal(r.st, ST_OK);
    assert_msg(r.reply, (const uint8_t *)"early", 5);
    msg_close(r.reply);
    assert_int_equal(rpc_serve(e->t, address, rpc_env_handler, e, &second), ST_CANTCREATE);
    assert_logged("already in use or not ours");
    assert_true(echo_ok(p, 1, 1000));
    rpc_peer_close(p);
    rpc_server_close(s);
    unlink(address + strlen("unix:"));
    assert_int_equal(rmdir(dir), 0);
}

static void a_message_above_the_limit_is_refused(void **state)
{
    struct rpc_env *e = *state;
    struct result r = RESULT_INIT;
    struct msg *m;
    assert_int_equal(msg_open((64 << 20) + 1, &m), ST_OK);
    m->len = m->cap;
    memset(m->data, 0, m->len);
    rpc_send(e->peer, RPC_FETCH, m, LONG_MS, result_done, &r);
    result_wait(&r);
    assert_int_equal(r.st, ST_BADMSG);
    assert_true(echo_ok(e->peer, 1, 1000));
}

static void a_server_without_memory_for_a_while_loses_no_room_for_calls(void **state)
{
    struct rpc_env *e = *state;
    size_t injected = 0;
    for (int i = 0; i < 40; i++) { /* more often than requests are posted */
        struct result r = RESULT_INIT;
        struct msg *req = msg_copy("x", 1);
        mem_fail_at(2); /* 1: the client's call; 2: the request that the server posts next */
        rpc_send(e->peer, RPC_FETCH, req, LONG_MS, result_done, &r);
        result_wait(&r);
        injected += mem_fail_stop();
        assert_int_equal(r.st, ST_OK);
        msg_close(r.reply);
    }
    assert_int_equal(injected, 40);
}

/* By hand, as a foreign client: returns the status of an empty call of `path`. */
static grpc_status_code foreign_call(const char *address, const char *path)
{
    grpc_channel_credentials *plain = grpc_insecure_credentials_create();
    grpc_arg direct = {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ENABLE_HTTP_PROXY};
    grpc_channel_args args = {1, &direct};
    grpc_channel *channel = grpc_channel_create(address, plain, &args);
    grpc_completion_queue *cq = grpc_completion_queue_create_for_next(NULL);
    gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                      gpr_time_from_millis(LONG_MS, GPR_TIMESPAN));
    grpc_call *call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
                                               grpc_slice_from_static_string(path), NULL, until,
                                               NULL);
    grpc_metadata_array initial, trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    grpc_status_code code = GRPC_STATUS_OK;
    grpc_slice details;
    grpc_op op[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                     {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                     {.op = GRPC_OP_RECV_INITIAL_METADATA},
                     {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    op[2].data.recv_initial_metadata.recv_initial_metadata = &initial;
    op[3].data.recv_status_on_client.trailing_metadata = &trailing;
    op[3].data.recv_status_on_client.status = &code;
    op[3].data.recv_status_on_client.status_details = &details;
    assert_int_equal(grpc_call_start_batch(call, op, 4, NULL, NULL), GRPC_CALL_OK);
    assert_int_equal(grpc_completion_queue_next(cq, until, NULL).type, GRPC_OP_COMPLETE);
    grpc_slice_unref(details);
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_call_unref(call);
    grpc_channel_destroy(channel);
    grpc_channel_credentials_release(plain);
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, until, NULL).type != GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(cq);
    return code;
}

static void foreign_calls_that_make_no_sense_are_refused_at_once(void **state)
{
    struct rpc_env *e = *state;
    const char *at = rpc_address(e->server);
    for (int i = 0; i < 3; i++)
        assert_int_equal(foreign_call(at, "/chanter.EmbServer/Nope"), GRPC_STATUS_UNIMPLEMENTED);
    assert_int_equal(foreign_call(at, "/chanter.EmbServer/Fetch"), GRPC_STATUS_INVALID_ARGUMENT);
    assert_true(echo_ok(e->peer, 1, 1000));
}

static enum transport_kind kind = TRANSPORT_GRPC;

#define CASE(test) {#test, test, rpc_env_setup, rpc_env_teardown, &kind}

int main(void)
{
#ifdef __SANITIZE_THREAD__
    return 77; /* gRPC is not instrumented: its locking would look like races */
#endif
    const struct CMUnitTest tests[] = {
        CASE(other_machines_are_refused_without_tls),
        CASE(the_kernel_chooses_a_port_that_localhost_reaches),
        CASE(a_call_waits_for_a_server_that_starts_later),
        CASE(a_message_above_the_limit_is_refused),
        CASE(a_server_without_memory_for_a_while_loses_no_room_for_calls),
        CASE(foreign_calls_that_make_no_sense_are_refused_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
