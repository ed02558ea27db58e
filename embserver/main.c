/* chanter-embserver: one embedding server as a process. */
#include <inttypes.h>
#include <stdio.h>

#include "base/log.h"
#include "config/role.h"
#include "embserver/service.h"

static enum st run(const struct role_args *args)
{
    enum st st;
    struct config *config = NULL;
    struct transport *transport = NULL;
    struct embserver *server;
    TRY(config_open(args->config, args->set, args->n_set, &config), err);
    if (args->rank >= config->cluster.servers) {
        st = log_fail(ST_USAGE, NULL, "--rank %" PRIu32 ": cluster.servers is %" PRIu32,
                      args->rank, config->cluster.servers);
        goto err_config;
    }
    TRY(transport_open(TRANSPORT_GRPC, &transport), err_config);
    struct embserver_cfg cfg = {.config = config, .transport = transport,
                                .address = args->address, .rank = args->rank, .job = args->job,
                                .attempt = args->attempt};
    TRY(embserver_start(&cfg, &server), err_transport);
    role_ready(embserver_address(server));
    while (!role_stopped(UINT64_C(3600) * 1000000000)) {}
    embserver_close(server);

err_transport: transport_close(transport);
err_config:    config_close(config);
err:           return st;
}

int main(int argc, char **argv)
{
    struct role_args args;
    enum st st = role_args_open(argc, argv, "Holds one server's part of the embedding tables.",
                                &args);
    if (st != ST_OK) return st == ST_END ? 0 : st_exit_code(st);
    char role[32];
    snprintf(role, sizeof(role), "server %" PRIu32, args.rank);
    log_set_role(role);
    role_signals();
    st = run(&args);
    role_args_close(&args);
    return st_exit_code(st);
}
