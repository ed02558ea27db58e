/* base/clock.h - time that only goes forward. Wall-clock time appears nowhere but in log text. */
#ifndef CHANTER_BASE_CLOCK_H
#define CHANTER_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_now_ns(void);           /* CLOCK_MONOTONIC. Any thread. */
void clock_sleep_ns(uint64_t ns);

#endif
