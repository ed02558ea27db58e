/* proto/accept.h - is a request of this job, and of this incarnation of it? What every role asks before
 * it looks at anything else. */
#ifndef CHANTER_PROTO_ACCEPT_H
#define CHANTER_PROTO_ACCEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/codec.h"
#include "proto/transport.h"

/* False: it is not, and the call has been refused, saying why. */
bool accept_header(struct rpc_call *call, const struct rpc_header *h, uint64_t job,
                   uint32_t attempt);

#endif
