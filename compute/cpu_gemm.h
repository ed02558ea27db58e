/* compute/cpu_gemm.h - matrix products of fully connected layers, f32, on the calling thread.
 * Not a general library: one factor is always a weight, and a weight (N,K) always lies in panels.
 *
 * Panels: some outputs side by side, input after input, [ceil(N / width)][K][width], so that a
 * product reads a weight from front to back. The last panel is filled up with 0. The width is the
 * machine's, and nobody's business outside: gemm_put and gemm_get convert. */
#ifndef CHANTER_COMPUTE_CPU_GEMM_H
#define CHANTER_COMPUTE_CPU_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    GEMM_SAMPLES = 256,          /* gemm_weights takes at most so many at a time                */
    GEMM_SCRATCH = 512 << 10     /* floats of scratch, 64-byte aligned, for one call            */
};

size_t gemm_floats(uint32_t K, uint32_t N); /* of the panels of a weight (N,K)                  */
void gemm_put(uint32_t K, uint32_t N, const float *host, float *w); /* host (N,K) row-major     */
void gemm_get(uint32_t K, uint32_t N, const float *w, float *host);
/* out = panels of the transposed weight (K,N). out [gemm_floats(N, K)] */
void gemm_transpose(uint32_t K, uint32_t N, const float *w, float *out);

/* y = x W^T + b, each element summed over k in ascending order, on top of b. Used for dx = dy W
 * too, with the transposed weight and no b. */
struct gemm_rows {
    uint32_t B, K, N;
    const float *x;              /* (B,K), rows ldx floats apart                                */
    uint32_t ldx;
    const float *w;              /* panels of (N,K)                                             */
    const float *b;              /* (N); NULL: 0                                                */
    bool relu;                   /* max(y, 0); NaN stays                                        */
    float *y;                    /* (B,N), rows ldy floats apart                                */
    uint32_t ldy;
};
void gemm_rows(const struct gemm_rows *g, float *scratch);

/* dw = dy^T x, or dw += where `add`; each element summed in sample order. B <= GEMM_SAMPLES. */
struct gemm_weights {
    uint32_t B, K, N;
    const float *x;              /* (B,K), rows K floats apart                                  */
    const float *dy;             /* (B,N), rows ldy floats apart                                */
    uint32_t ldy;
    bool add;
    float *dw;                   /* panels of (N,K)                                             */
};
void gemm_weights(const struct gemm_weights *g, float *scratch);

#endif
