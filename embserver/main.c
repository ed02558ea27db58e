/* chanter-embserver: one embedding server as a process. */
#include <inttypes.h>
#include <stdio.h>

#include "base/log.h"
#include "config/role.h"
#include "embserver/service.h"

static const uint64_t HOUR_NS = UINT64_C(3600) * 1000000000;

static enum st run(const struct role_args *args, const struct role_serve *serve)
{
    enum st st;
    struct transport *transport;
    struct embserver *server;
    if (serve->rank >= args->config->cluster.servers)
        return log_fail(ST_USAGE, NULL, "--rank %" PRIu64 ": cluster.servers is %" PRIu32,
                        serve->rank, args->config->cluster.servers);
    TRY(transport_open(TRANSPORT_GRPC, &transport), err);
    struct embserver_cfg cfg = {.config = args->config, .transport = transport,
                                .address = serve->address, .rank = (uint32_t)serve->rank, .job = args->job,
                                .attempt = args->attempt};
    TRY(embserver_start(&cfg, &server), err_transport);
    role_ready(embserver_address(server));
    while (!role_stopped(HOUR_NS)) {}
    embserver_close(server);

err_transport: transport_close(transport);
err:           return st;
}

int main(int argc, char **argv)
{
    struct role_args args;
    struct role_serve serve = ROLE_SERVE_DEFAULTS;
    const struct option own[] = {OPTIONS_SERVE(&serve)};
    enum st st = role_open(argc, argv, "chanter-embserver",
                           "Holds one server's part of the embedding tables.", own,
                           sizeof(own) / sizeof(own[0]), &args);
    if (st != ST_OK) return st == ST_END ? 0 : st_exit_code(st);
    char role[32];
    snprintf(role, sizeof(role), "server %" PRIu64, serve.rank);
    log_set_role(role);
    role_signals();
    role_die_with_parent();
    st = run(&args, &serve);
    role_close(&args);
    return log_exit_code(st);
}
