/* Scores become integers that sort like them, with the label in the low bit; a radix sort brings
 * ties together, and one pass counts pairs in whole numbers (twice the area, so that a tie is 1).
 * No rounding happens before the last division. */
#include "data/auc.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

/* A u32 that orders like the float; -0 and +0 are one score. */
static uint64_t sort_key(float score)
{
    float plain = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &plain, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Sort `a` by its low 40 bits, `b` is scratch of the same size; the result ends up in `*sorted`. */
static void radix_sort(uint64_t *a, uint64_t *b, size_t n, uint64_t **sorted)
{
    for (unsigned shift = 0; shift < 40; shift += 8) {
        size_t start[257] = {0};
        for (size_t i = 0; i < n; i++) start[(a[i] >> shift & 255) + 1]++;
        for (size_t d = 0; d < 256; d++) start[d + 1] += start[d];
        for (size_t i = 0; i < n; i++) b[start[a[i] >> shift & 255]++] = a[i];
        uint64_t *swap = a;
        a = b;
        b = swap;
    }
    *sorted = a;
}

static double area(const uint64_t *key, size_t n)
{
    uint64_t below = 0, pairs_twice = 0, clicked = 0; /* below: not clicked, lower score */
    for (size_t i = 0; i < n;) {
        uint64_t in_tie[2] = {0, 0};
        size_t j = i;
        for (; j < n && key[j] >> 1 == key[i] >> 1; j++) in_tie[key[j] & 1]++;
        pairs_twice += in_tie[1] * (2 * below + in_tie[0]);
        below += in_tie[0];
        clicked += in_tie[1];
        i = j;
    }
    if (clicked == 0 || below == 0) return NAN;
    return (double)pairs_twice / (2.0 * (double)clicked * (double)below);
}

enum st auc_exact(const float *score, const float *label, size_t n, double *out)
{
    for (size_t i = 0; i < n; i++) {
        if (isnan(score[i]))
            return log_fail(ST_DATA, NULL, "AUC: score of sample %zu is not a number", i);
        if (label[i] != 0.0f && label[i] != 1.0f)
            return log_fail(ST_DATA, NULL, "AUC: label %g of sample %zu not 0/1", (double)label[i],
                            i);
    }
    uint64_t *key = mem_alloc(n, 2 * sizeof(*key)), *sorted;
    if (key == NULL) return log_fail(ST_NOMEM, NULL, "AUC of %zu samples: out of memory", n);
    for (size_t i = 0; i < n; i++) key[i] = sort_key(score[i]) << 1 | (label[i] != 0.0f);
    radix_sort(key, key + n, n, &sorted);
    *out = area(sorted, n);
    mem_free(key);
    return ST_OK;
}

double auc_logloss(const float *logit, const float *label, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        double z = (double)logit[i], y = (double)label[i];
        sum += fmax(z, 0.0) - z * y + log1p(exp(-fabs(z))); /* no overflow for any finite z */
    }
    return sum / (double)n;
}
