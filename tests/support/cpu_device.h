/* tests/support/cpu_device.h - the CPU as a device, opened once for all tests of a file. */
#ifndef CHANTER_TESTS_SUPPORT_CPU_DEVICE_H
#define CHANTER_TESTS_SUPPORT_CPU_DEVICE_H

#include "compute/device.h"

extern struct device *dev, *lone; /* four lanes, and one; f32 */

struct device *cpu_device_with(uint32_t lanes); /* one more, the caller's */
/* For cmocka_run_group_tests. The second fails when memory was left behind. */
int cpu_devices_open(void **state);
int cpu_devices_close(void **state);

#endif
