/* compute/cpu_bf16.h - matrix products with factors rounded to bf16 and sums in f32, by oneDNN. Not
 * the default, and not every CPU has them. Matrices are row-major; everything is per lane, so that
 * lanes share nothing. */
#ifndef CHANTER_COMPUTE_CPU_BF16_H
#define CHANTER_COMPUTE_CPU_BF16_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct bf16;

/* ST_CONFIG, logged: this CPU has no such products. */
MUST_USE enum st bf16_open(uint32_t lanes, struct bf16 **out);
void bf16_close(struct bf16 *h); /* NULL ok */

/* To the nearest bf16, ties to even; NaN stays NaN. */
void bf16_round(size_t n, const float *from, uint16_t *to);
/* Two arrays of a lane's own, for rounded factors; they live until the lane's next call. They grow
 * when first asked for more. ST_NOMEM, logged. */
MUST_USE enum st bf16_scratch(struct bf16 *h, uint32_t lane, size_t n0, size_t n1, uint16_t **out0,
                              uint16_t **out1);

/* c (M,N) = op(a) op(b), op(a) (M,K), op(b) (K,N): a is (K,M) where trans_a, b is (N,K) where
 * trans_b; a and b without gaps, rows of c ldc floats apart. */
struct bf16_shape { uint32_t M, N, K, ldc; bool trans_a, trans_b; };
MUST_USE enum st bf16_product(struct bf16 *h, uint32_t lane, const struct bf16_shape *shape,
                              const uint16_t *a, const uint16_t *b, float *c);

#endif
