#include "tests/support/cpu_device.h"

#include "base/check.h"
#include "base/mem.h"

struct device *dev, *lone;

struct device *cpu_device_with(uint32_t lanes)
{
    struct device *d;
    CHECK(device_open(DEVICE_CPU, &(struct device_cfg){.lanes = lanes}, &d) == ST_OK,
          "a test needs its device");
    return d;
}

int cpu_devices_open(void **state)
{
    dev = cpu_device_with(4);
    lone = cpu_device_with(1);
    return 0;
}

int cpu_devices_close(void **state)
{
    device_close(dev);
    device_close(lone);
    return mem_live() == 0 ? 0 : -1;
}
