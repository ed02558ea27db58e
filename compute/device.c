#include "compute/device.h"

#include "base/log.h"
#include "compute/cpu.h"

#ifdef CHANTER_CUDA
#include "compute/cuda.h"
#else
static enum st cuda_open(const struct device_cfg *cfg, struct device **out)
{
    (void)cfg;
    (void)out;
    return log_fail(ST_CONFIG, "cluster.device", "this build has no CUDA; install the CUDA toolkit "
                    "and build again, or set it to cpu");
}
#endif

enum st device_open(enum device_kind kind, const struct device_cfg *cfg, struct device **out)
{
    switch (kind) {
    case DEVICE_CPU: return cpu_open(cfg, out);
    case DEVICE_CUDA: return cuda_open(cfg, out);
    }
    return log_fail(ST_CONFIG, "cluster.device", "this build has no device number %d", (int)kind);
}

void device_close(struct device *d)
{
    if (d != NULL) d->ops->close(d);
}
