/* chanter-oracle: the oracle as a process. */
#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "config/role.h"
#include "oracle/oracle.h"

static const uint64_t SECOND_NS = 1000000000u;

/* Until a signal comes, or planning has failed and the trainers know: one that does not ask within
 * its own deadline never will. What stopped the planner; ST_OK if nothing did. */
static enum st serve_plans(struct oracle *o, uint32_t timeout_s)
{
    uint64_t give_up_ns = UINT64_MAX;
    while (!role_stopped(SECOND_NS / 5)) {
        if (oracle_status(o) == ST_OK) continue;
        if (give_up_ns == UINT64_MAX) give_up_ns = clock_now_ns() + timeout_s * SECOND_NS;
        if (oracle_told(o) || clock_now_ns() >= give_up_ns) break;
    }
    return oracle_status(o);
}

static enum st run(const struct role_args *args, const struct role_serve *serve)
{
    enum st st;
    struct transport *transport;
    struct oracle *oracle;
    if (serve->rank != 0)
        return log_fail(ST_USAGE, NULL, "--rank %" PRIu64 ": there is one oracle", serve->rank);
    TRY(transport_open(TRANSPORT_GRPC, &transport), err);
    struct oracle_cfg cfg = {.config = args->config, .transport = transport,
                             .address = serve->address, .job = args->job,
                             .attempt = args->attempt};
    TRY(oracle_start(&cfg, &oracle), err_transport);
    role_ready(oracle_address(oracle));
    st = serve_plans(oracle, args->config->cluster.timeout_s);
    oracle_close(oracle);

err_transport: transport_close(transport);
err:           return st;
}

int main(int argc, char **argv)
{
    struct role_args args;
    struct role_serve serve = ROLE_SERVE_DEFAULTS;
    const struct option own[] = {OPTIONS_SERVE(&serve)};
    enum st st = role_open(argc, argv, "chanter-oracle",
                           "Reads ahead in the data and plans for all trainers.", own,
                           sizeof(own) / sizeof(own[0]), &args);
    if (st != ST_OK) return st == ST_END ? 0 : st_exit_code(st);
    log_set_role("oracle");
    role_signals();
    role_die_with_parent();
    st = run(&args, &serve);
    role_close(&args);
    return log_exit_code(st);
}
