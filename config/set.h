/* config/set.h - "--set SECTION.KEY=VALUE": one key from the command line, over the file's. */
#ifndef CHANTER_CONFIG_SET_H
#define CHANTER_CONFIG_SET_H

#include "base/status.h"
#include "config/doc.h"

/* Put it into `d`, in place of what the file or an earlier --set said. A list is written as in
 * YAML ("model.tables=[10, 20]"); any other value is taken letter by letter, so that a path needs
 * no quoting. What the value may be is keys_check's business. */
MUST_USE enum st set_apply(struct doc *d, const char *set);

#endif
