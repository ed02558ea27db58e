/* trainer/values.h - row values on their way from an owner to other users of the row. One set is
 * one iteration's urgent or deferred part: packed when it is collected, staged when it has come,
 * put into slots at the boundary before the iteration that uses it (I4). COMPUTE thread. */
#ifndef CHANTER_TRAINER_VALUES_H
#define CHANTER_TRAINER_VALUES_H

#include <stdint.h>

#include "base/grow.h"
#include "compute/device.h"
#include "proto/plan.h"
#include "trainer/exchange.h"

struct values {
    uint32_t n;               /* rows to come                       */
    struct grow send, recv;   /* f32 [..][D] host, peers ascending  */
    struct grow slot;         /* u32 [n] where they go              */
};

void values_fini(struct values *v);

enum values_class { VALUES_URGENT, VALUES_DEFERRED };
/* Pack what the plan sends from `table` and add the messages of one class to `job`; buffers are lent
 * until the job has been waited for. */
MUST_USE enum st values_collect(struct values *v, const struct plan *plan,
                                enum values_class class, struct device *d, const float *table,
                                uint32_t stride, uint32_t D, struct exchange_job *job);
/* Put what has come into its slots of `table`; the set is empty afterwards. */
MUST_USE enum st values_install(struct values *v, struct device *d, float *table,
                                uint32_t stride, uint32_t D);

#endif
