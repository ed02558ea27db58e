#include "tests/support/oracle_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t TABLES[F] = {50, 7, 1000};

void oracle_data(const char *path, int first, int rows, int bad)
{
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    for (int r = first; r < first + rows; r++) {
        if (r == bad) fprintf(out, "1\tthis is no sample\n");
        else fprintf(out, "%d\t%d\t1\t%x\t%x\t%x\n", r % 2, r, r, r * 3, r * 7);
    }
    assert_int_equal(fclose(out), 0);
}

void oracle_setup(struct oracle_case *f, int rows)
{
    *f = (struct oracle_case){.dir = "/tmp/test_oracle_XXXXXX"};
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof(f->path), "%s/train.tsv", f->dir);
    snprintf(f->eval_path, sizeof(f->eval_path), "%s/eval.tsv", f->dir);
    oracle_data(f->path, 0, rows, -1);
    struct config *c = &f->config;
    c->data.format = DATA_CRITEO_TSV;
    c->data.path = f->path;
    c->model.dense_features = DENSE;
    c->model.dim = 4;
    c->model.tables = TABLES;
    c->model.n_tables = F;
    c->train.global_batch = B;
    c->train.slices = S;
    c->oracle.lookahead = 3;
    c->oracle.queue = QUEUE;
    c->cluster.trainers = N;
    c->cluster.servers = c->cluster.server_threads = 1;
    c->cluster.timeout_s = 20;
    assert_int_equal(transport_open(TRANSPORT_LOCAL, &f->transport), ST_OK);
}

void oracle_begin(struct oracle_case *f)
{
    struct oracle_cfg cfg = {.config = &f->config, .transport = f->transport, .address = "oracle",
                             .job = JOB, .attempt = ATTEMPT};
    assert_int_equal(oracle_start(&cfg, &f->oracle), ST_OK);
    assert_string_equal(oracle_address(f->oracle), "oracle");
    assert_int_equal(rpc_connect(f->transport, "oracle", &f->peer), ST_OK);
}

void oracle_end(struct oracle_case *f)
{
    oracle_close(f->oracle);
    rpc_peer_close(f->peer);
    f->oracle = NULL;
}

void oracle_teardown(struct oracle_case *f)
{
    if (f->oracle != NULL) oracle_end(f);
    transport_close(f->transport);
    unlink(f->path);
    unlink(f->eval_path);
    rmdir(f->dir);
}

struct rpc_header oracle_header(uint32_t rank)
{
    return (struct rpc_header){.job = JOB, .attempt = ATTEMPT, .role = ROLE_TRAINER, .rank = rank};
}

void oracle_ask_start(struct oracle_case *f, struct pending *p, uint32_t rank, uint64_t seq,
                      uint32_t timeout_ms)
{
    struct rpc_header h = oracle_header(rank);
    struct msg *req;
    assert_int_equal(plan_request_encode(&h, seq, &req), ST_OK);
    pending_send(p, f->peer, RPC_PLAN, req, timeout_ms);
}

enum st oracle_ask(struct oracle_case *f, uint32_t rank, uint64_t seq, struct msg **reply,
                   char text[256])
{
    struct pending p;
    oracle_ask_start(f, &p, rank, seq, PENDING_MS);
    enum st st = pending_wait(&p, reply);
    if (text != NULL) memcpy(text, p.text, sizeof(p.text));
    return st;
}

void assert_oracle_refuses(struct oracle_case *f, uint32_t rank, uint64_t seq, enum st want,
                           const char *why)
{
    struct msg *reply;
    char text[256];
    assert_int_equal(oracle_ask(f, rank, seq, &reply, text), want);
    if (strstr(text, why) == NULL) fail_msg("'%s' is not in '%s'", why, text);
}
