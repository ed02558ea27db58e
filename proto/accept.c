#include "proto/accept.h"

#include <inttypes.h>

bool accept_header(struct rpc_call *call, const struct rpc_header *h, uint64_t job,
                   uint32_t attempt)
{
    if (h->job != job)
        rpc_failf(call, ST_BADMSG, "job %016" PRIx64 "; this is job %016" PRIx64, h->job, job);
    else if (h->attempt < attempt)
        rpc_failf(call, ST_BADMSG, "attempt %" PRIu32 " < %" PRIu32 ": stale process", h->attempt,
                  attempt);
    else if (h->attempt > attempt)
        rpc_failf(call, ST_BADMSG, "attempt %" PRIu32 " > %" PRIu32 ": this process is stale",
                  h->attempt, attempt);
    else
        return true;
    return false;
}
