/* config/config_check.h - what must hold between keys: sums, sizes, one-of. The keys themselves
 * have passed keys_check. */
#ifndef CHANTER_CONFIG_CONFIG_CHECK_H
#define CHANTER_CONFIG_CONFIG_CHECK_H

#include "base/status.h"
#include "config/config.h"
#include "config/doc.h"

/* Logs the first thing that does not hold, at the line of the key that has to change; `d` says
 * where that is. */
MUST_USE enum st config_check(const struct config *c, struct doc *d);

#endif
