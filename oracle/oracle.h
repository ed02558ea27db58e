/* oracle/oracle.h - the oracle as a running role: a thread that reads batches, plans, and keeps a
 * bounded queue of encoded plans per trainer; a handler that hands them out (RPC_PLAN). A trainer
 * that asks for step q has done with all steps before q: asking again for q gives the same bytes,
 * so a lost reply costs nothing. */
#ifndef CHANTER_ORACLE_ORACLE_H
#define CHANTER_ORACLE_ORACLE_H

#include <stdint.h>

#include "base/status.h"
#include "config/config.h"
#include "proto/transport.h"

struct oracle; /* opaque */

struct oracle_cfg {
    const struct config *config;  /* borrowed until oracle_close */
    struct transport *transport;
    const char *address;          /* to serve at                 */
    uint64_t job;
    uint32_t attempt;
};

MUST_USE enum st oracle_start(const struct oracle_cfg *cfg, struct oracle **out);
const char *oracle_address(const struct oracle *o);
/* What stopped the planner; ST_OK while it runs or when it has planned everything. */
enum st oracle_status(struct oracle *o);
/* 1 when something stopped the planner and every trainer has been told: nothing is left to do. */
int oracle_told(struct oracle *o);
void oracle_close(struct oracle *o); /* NULL ok; trainers that wait get ST_CANCELLED */

#endif
