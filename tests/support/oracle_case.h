/* tests/support/oracle_case.h - an oracle over the local transport on a small data file. */
#ifndef CHANTER_TESTS_SUPPORT_ORACLE_CASE_H
#define CHANTER_TESTS_SUPPORT_ORACLE_CASE_H

#include <stdint.h>

#include "oracle/oracle.h"
#include "proto/codec.h"
#include "tests/support/pending.h"

/* A global batch of B samples in S slices for N trainers; F tables; a sample's dense values. */
enum { B = 8, S = 4, N = 2, F = 3, DENSE = 2 };
enum { QUEUE = 2 /* plans kept ready */, JOB = 0x1234, ATTEMPT = 3 };

struct oracle_case {
    char dir[32], path[64], eval_path[64];
    struct config config;
    struct transport *transport;
    struct oracle *oracle;
    struct rpc_peer *peer;
};

/* A job on a file of `rows` samples; trains on all of them unless told otherwise. The oracle runs
 * from oracle_begin to oracle_end, as often as one likes. */
void oracle_setup(struct oracle_case *f, int rows);
void oracle_teardown(struct oracle_case *f);
void oracle_begin(struct oracle_case *f);
void oracle_end(struct oracle_case *f);
/* Write samples first, first + 1, ...: sample r's first dense value is r, its label r % 2. `bad`: a
 * line that is no sample. */
void oracle_data(const char *path, int first, int rows, int bad);

struct rpc_header oracle_header(uint32_t rank); /* a good request's */
void oracle_ask_start(struct oracle_case *f, struct pending *p, uint32_t rank, uint64_t seq,
                      uint32_t timeout_ms);
enum st oracle_ask(struct oracle_case *f, uint32_t rank, uint64_t seq, struct msg **reply,
                   char text[256]);
void assert_oracle_refuses(struct oracle_case *f, uint32_t rank, uint64_t seq, enum st want,
                           const char *why);

#endif
