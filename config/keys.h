/* config/keys.h - which keys a configuration has, and what each may be: names, types, ranges,
 * defaults. Looks at one key at a time; what must hold between keys is config_check.h.
 * docs/configuration.md describes every key of this table (a test compares the two). */
#ifndef CHANTER_CONFIG_KEYS_H
#define CHANTER_CONFIG_KEYS_H

#include <stdint.h>

#include "base/status.h"
#include "config/doc.h"

enum key_kind {
    KEY_UINT,   /* integer in [lo, hi]                          */
    KEY_UINTS,  /* 1..max_items integers, each in [lo, hi]      */
    KEY_REAL,   /* float in (0, most]                           */
    KEY_BOOL,   /* true, false                                  */
    KEY_NAME,   /* one of `names`                               */
    KEY_TEXT,   /* UTF-8, not empty                             */
};

enum { KEY_TEXT_MAX = 4095 }; /* bytes of a path */

struct config_key {
    const char *section, *name;
    enum key_kind kind;
    const char *fallback;       /* as it would be written; NULL: must be given; "": may be absent */
    uint64_t lo, hi;
    uint32_t max_items;
    float most;
    const char *const *names;   /* [value of the enum], NULL at the end */
};

extern const struct config_key config_keys[];
extern const size_t config_n_keys;

const struct config_key *key_find(const char *section, const char *name); /* NULL: no such key */
/* For messages: the keys that a name without its section may mean, "data.seed or train.seed"; also
 * "train.seed" for itself. "" when there is none. Returns `out`. */
enum { KEY_GUESS_BYTES = 96 };
const char *key_guess(const char *name, char out[KEY_GUESS_BYTES]);

/* Check every entry of `d`, and add the defaults of keys that are
 * not there. Logs the first entry that is wrong. Call with the C locale (config.c does). */
MUST_USE enum st keys_check(struct doc *d);

#endif
