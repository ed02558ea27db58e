#include "config/nearest.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static size_t min2(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t nearest_distance(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    if (na > NEAREST_MAX_LEN || nb > NEAREST_MAX_LEN) return NEAREST_FAR;

    /* row[i % 3][j]: distance of the first i bytes of a and the first j of b. */
    size_t row[3][NEAREST_MAX_LEN + 1];
    for (size_t j = 0; j <= nb; j++) row[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t *now = row[i % 3], *up = row[(i - 1) % 3], *up2 = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            now[j] = min2(min2(up[j], now[j - 1]) + 1, up[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                now[j] = min2(now[j], up2[j - 2] + 1);
        }
    }
    return row[na % 3][nb];
}

/* Is `name` one or more whole parts of `word`, as "dim" is of "embedding_dim"? */
static bool whole_part(const char *word, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = word; n > 0 && (p = strstr(p, name)) != NULL; p++) {
        bool starts = p == word || p[-1] == '_' || p[-1] == '-';
        bool ends = p[n] == '\0' || p[n] == '_' || p[n] == '-';
        if (starts && ends) return true;
    }
    return false;
}

void nearest_start(struct nearest *n, const char *word)
{
    *n = (struct nearest){.word = word, .distance = NEAREST_FAR};
}

void nearest_offer(struct nearest *n, const char *name)
{
    /* A third of the letters may be wrong, one in a short name; two short names that share
     * no letter stay apart. */
    size_t limit = strlen(name) / 3;
    if (limit == 0) limit = 1;
    size_t d = nearest_distance(n->word, name);
    if (d >= strlen(name)) d = NEAREST_FAR;
    if (d > limit) d = whole_part(n->word, name) ? limit + 1 : NEAREST_FAR;
    if (d >= n->distance) return;
    n->best = name;
    n->distance = d;
}

const char *nearest_hint(const struct nearest *n, const char *before, const char *after,
                         char out[NEAREST_HINT_BYTES])
{
    out[0] = '\0';
    if (n->best != NULL)
        snprintf(out, NEAREST_HINT_BYTES, " (did you mean %s%s%s?)", before, n->best, after);
    return out;
}
