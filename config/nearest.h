/* config/nearest.h - "did you mean": the known name that a mistyped word most likely stands for.
 * Only for messages; nothing is ever corrected in silence (I5). */
#ifndef CHANTER_CONFIG_NEAREST_H
#define CHANTER_CONFIG_NEAREST_H

#include <stddef.h>

enum { NEAREST_HINT_BYTES = 96 };

struct nearest {
    const char *word;   /* borrowed */
    const char *best;   /* a name that was offered and is close; NULL while none is */
    size_t distance;    /* of best */
};

/* Offer every known name; the first of the closest ones stays. Any thread. */
void nearest_start(struct nearest *n, const char *word);
void nearest_offer(struct nearest *n, const char *name);
/* " (did you mean BEFOREnameAFTER?)", or "" when nothing close was offered. Returns `out`. */
const char *nearest_hint(const struct nearest *n, const char *before, const char *after,
                         char out[NEAREST_HINT_BYTES]);

/* Damerau-Levenshtein distance (insert, delete, replace, swap of neighbours; no part edited
 * twice); NEAREST_FAR when a string has more than NEAREST_MAX_LEN bytes. */
enum { NEAREST_MAX_LEN = 63, NEAREST_FAR = 255 };
size_t nearest_distance(const char *a, const char *b);

#endif
