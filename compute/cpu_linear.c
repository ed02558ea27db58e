/* compute/cpu_linear.c - fully connected layers. Three ways:
 * - f32: products of our own (cpu_gemm.c), weights in panels; prepared is the weight transposed,
 *   for dx.
 * - bf16: oneDNN's products (cpu_bf16.c), weights row-major; prepared is the weight rounded.
 * - one output: a matrix times a vector, bound by reading x. By hand, always in f32; its weight is
 *   a vector either way. */
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "compute/cpu.h"
#include "compute/cpu_bf16.h"
#include "compute/cpu_gemm.h"
#include "compute/cpu_vec.h"

struct cpu_linear {
    struct bf16 *bf16;           /* NULL: f32                                                   */
    float *scratch;              /* [lanes][GEMM_SCRATCH] on huge pages; f32 only               */
    uint32_t lanes;
};

enum { LANE_BYTES = GEMM_SCRATCH * sizeof(float) };
_Static_assert(LANE_BYTES % MEM_HUGE_BYTES == 0, "whole huge pages");

static enum st scratch_open(struct cpu_linear *h, uint32_t lanes)
{
    h->lanes = lanes;
    h->scratch = mem_map((size_t)lanes * LANE_BYTES);
    if (h->scratch == NULL) return log_fail(ST_NOMEM, "cpu device", "out of memory; free some");
    return ST_OK;
}

enum st cpu_linear_open(const struct device_cfg *cfg, struct cpu_linear **out)
{
    if (cfg->precision == PRECISION_TF32)
        return log_fail(ST_CONFIG, "device.precision", "a CPU has no tf32; use fp32 or bf16");
    struct cpu_linear *h = mem_zalloc(1, sizeof(*h));
    if (h == NULL) return log_fail(ST_NOMEM, "cpu device", "out of memory; free some");
    enum st st = cfg->precision == PRECISION_BF16 ? bf16_open(cfg->lanes, &h->bf16)
                                                  : scratch_open(h, cfg->lanes);
    if (st == ST_OK)
        *out = h;
    else
        cpu_linear_close(h);
    return st;
}

void cpu_linear_close(struct cpu_linear *h)
{
    if (h == NULL) return;
    mem_unmap(h->scratch, (size_t)h->lanes * LANE_BYTES);
    bf16_close(h->bf16);
    mem_free(h);
}

/* --- weights ---------------------------------------------------------------------------------- */

static bool in_panels(struct device *d, uint32_t N)
{
    return N != 1 && cpu_of(d)->linear->bf16 == NULL;
}

size_t cpu_weight_floats(struct device *d, uint32_t K, uint32_t N)
{
    return in_panels(d, N) ? gemm_floats(K, N) : (size_t)K * N;
}

size_t cpu_prepared_bytes(struct device *d, uint32_t K, uint32_t N)
{
    if (N == 1) return 0;
    return in_panels(d, N) ? gemm_floats(N, K) * sizeof(float) : (size_t)K * N * sizeof(uint16_t);
}

enum st cpu_weight_put(struct device *d, uint32_t K, uint32_t N, const float *host, float *w)
{
    if (in_panels(d, N))
        gemm_put(K, N, host, w);
    else
        memcpy(w, host, (size_t)K * N * sizeof(*w));
    return ST_OK;
}

enum st cpu_weight_get(struct device *d, uint32_t K, uint32_t N, const float *w, float *host)
{
    if (in_panels(d, N))
        gemm_get(K, N, w, host);
    else
        memcpy(host, w, (size_t)K * N * sizeof(*w));
    return ST_OK;
}

enum st cpu_prepare(struct device *d, uint32_t lane, const struct linear *l)
{
    (void)lane;
    if (l->N == 1) return ST_OK;
    if (in_panels(d, l->N))
        gemm_transpose(l->K, l->N, l->w, l->prepared);
    else
        bf16_round((size_t)l->K * l->N, l->w, l->prepared);
    return ST_OK;
}

/* --- bias, ReLU ------------------------------------------------------------------------------- */

/* 0 only where y is really negative: a NaN stays, so that it reaches the loss (I5). */
static inline float relu_of(float y)
{
    return y < 0.0f ? 0.0f : y;
}

static void add_bias(uint32_t B, uint32_t N, const float *restrict b, bool relu, float *restrict y,
                     uint32_t ldy)
{
    for (uint32_t i = 0; i < B; i++, y += ldy) {
        if (relu)
            for (uint32_t n = 0; n < N; n++) y[n] = relu_of(y[n] + b[n]);
        else
            for (uint32_t n = 0; n < N; n++) y[n] += b[n];
    }
}

/* Masks dy where ReLU cut y off, and adds it to db, sample after sample, on the way. */
static void mask_and_sum(uint32_t B, const struct linear *l, const float *restrict y, uint32_t ldy,
                         float *restrict dy, bool add, float *restrict db)
{
    uint32_t N = l->N;
    for (uint32_t i = 0; i < B; i++, y += ldy, dy += ldy) {
        if (l->relu)
            for (uint32_t n = 0; n < N; n++) dy[n] = y[n] == 0.0f ? 0.0f : dy[n];
        if (i == 0 && !add)
            memcpy(db, dy, N * sizeof(*db));
        else
            for (uint32_t n = 0; n < N; n++) db[n] += dy[n];
    }
}

/* --- one output ------------------------------------------------------------------------------- */

/* Sixteen running sums over k, folded; then what is left over, one by one. */
static float dot(uint32_t K, const float *restrict x, const float *restrict w)
{
    vec acc = {0};
    uint32_t k = 0;
    for (; k + LANES <= K; k += LANES) acc += vec_load(x + k) * vec_load(w + k);
    float sum = vec_sum(&acc);
    for (; k < K; k++) sum += x[k] * w[k];
    return sum;
}

static void forward_one(uint32_t B, const struct linear *l, const float *x, float *y, uint32_t ldy)
{
    for (size_t i = 0; i < B; i++) {
        float z = dot(l->K, x + i * l->K, l->w) + l->b[0];
        y[i * ldy] = l->relu ? relu_of(z) : z;
    }
}

static void backward_one(uint32_t B, uint32_t K, const float *restrict x, const float *restrict w,
                         const float *restrict dy, uint32_t ldy, float *restrict dw,
                         float *restrict dx)
{
    for (uint32_t k = 0; k < K; k++) dw[k] = dy[0] * x[k];
    for (size_t i = 1; i < B; i++)
        for (uint32_t k = 0; k < K; k++) dw[k] += dy[i * ldy] * x[i * K + k];
    if (dx == NULL) return;
    for (size_t i = 0; i < B; i++)
        for (uint32_t k = 0; k < K; k++) dx[i * K + k] = dy[i * ldy] * w[k];
}

/* --- bf16 ------------------------------------------------------------------------------------- */

static enum st forward_bf16(struct bf16 *h, uint32_t lane, uint32_t B, const struct linear *l,
                            const float *x, float *y, uint32_t ldy)
{
    uint16_t *x16, *none;
    size_t n = (size_t)B * l->K;
    enum st st = bf16_scratch(h, lane, n, 0, &x16, &none);
    if (st != ST_OK) return st;
    bf16_round(n, x, x16);
    const struct bf16_shape s = {.M = B, .N = l->N, .K = l->K, .ldc = ldy, .trans_b = true};
    st = bf16_product(h, lane, &s, x16, l->prepared, y);
    if (st == ST_OK) add_bias(B, l->N, l->b, l->relu, y, ldy);
    return st;
}

static enum st backward_bf16(struct bf16 *h, uint32_t lane, uint32_t B, const struct linear *l,
                             const float *x, const float *dy, uint32_t ldy, float *dw, float *dx)
{
    uint16_t *x16, *dy16;
    uint32_t K = l->K, N = l->N;
    enum st st = bf16_scratch(h, lane, (size_t)B * K, (size_t)B * N, &x16, &dy16);
    if (st != ST_OK) return st;
    bf16_round((size_t)B * K, x, x16);
    for (size_t i = 0; i < B; i++) bf16_round(N, dy + i * ldy, dy16 + i * N);
    const struct bf16_shape to_w = {.M = N, .N = K, .K = B, .ldc = K, .trans_a = true};
    const struct bf16_shape to_x = {.M = B, .N = K, .K = N, .ldc = K};
    st = bf16_product(h, lane, &to_w, dy16, x16, dw);
    if (st == ST_OK && dx != NULL) st = bf16_product(h, lane, &to_x, dy16, l->prepared, dx);
    return st;
}

/* --- f32, and which of them ------------------------------------------------------------------- */

/* As many samples at a time as gemm_weights takes: what mask_and_sum has written is still near. */
static void backward_f32(uint32_t B, const struct linear *l, const float *x, const float *y,
                         uint32_t ldy, float *dy, float *dw, float *db, float *dx, float *scratch)
{
    uint32_t K = l->K, N = l->N;
    for (size_t at = 0; at < B; at += GEMM_SAMPLES) {
        uint32_t n = B - at < GEMM_SAMPLES ? (uint32_t)(B - at) : GEMM_SAMPLES;
        bool add = at > 0;
        mask_and_sum(n, l, y + at * ldy, ldy, dy + at * ldy, add, db);
        gemm_weights(&(struct gemm_weights){.B = n, .K = K, .N = N, .x = x + at * K,
                                            .dy = dy + at * ldy, .ldy = ldy, .add = add, .dw = dw},
                     scratch);
        if (dx == NULL) continue;
        gemm_rows(&(struct gemm_rows){.B = n, .K = N, .N = K, .x = dy + at * ldy, .ldx = ldy,
                                      .w = l->prepared, .y = dx + at * K, .ldy = K}, scratch);
    }
}

enum st cpu_linear_forward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                           const float *x, float *y, uint32_t ldy)
{
    struct cpu_linear *h = cpu_of(d)->linear;
    if (l->N == 1)
        forward_one(B, l, x, y, ldy);
    else if (h->bf16 != NULL)
        return forward_bf16(h->bf16, lane, B, l, x, y, ldy);
    else
        gemm_rows(&(struct gemm_rows){.B = B, .K = l->K, .N = l->N, .x = x, .ldx = l->K, .w = l->w,
                                      .b = l->b, .relu = l->relu, .y = y, .ldy = ldy},
                  h->scratch + (size_t)lane * GEMM_SCRATCH);
    return ST_OK;
}

enum st cpu_linear_backward(struct device *d, uint32_t lane, uint32_t B, const struct linear *l,
                            const float *x, const float *y, uint32_t ldy, float *dy, float *dw,
                            float *db, float *dx)
{
    struct cpu_linear *h = cpu_of(d)->linear;
    if (l->N != 1 && h->bf16 == NULL) {
        backward_f32(B, l, x, y, ldy, dy, dw, db, dx, h->scratch + (size_t)lane * GEMM_SCRATCH);
        return ST_OK;
    }
    mask_and_sum(B, l, y, ldy, dy, false, db);
    if (l->N != 1) return backward_bf16(h->bf16, lane, B, l, x, dy, ldy, dw, dx);
    backward_one(B, l->K, x, l->w, dy, ldy, dw, dx);
    return ST_OK;
}
