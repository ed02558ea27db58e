/* compute/cuda_product.c - matrix products by cuBLASLt: one algorithm for each shape, kept.
 *
 * I1: an algorithm may be chosen by shape and leading dimensions alone. Alignment is promised by
 * the leading dimension: a slice's rows start at a multiple of it, wherever the slice is. (What a
 * caller aligns less is honoured, and is slower; the model aligns all it allocates to 64 bytes.)
 * A sum that an algorithm splits is put together in a fixed order, through the workspace. */
#include <stdint.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "compute/cuda.h"

enum { CANDIDATES = 8 };

struct cuda_product {
    struct cuda_shape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
    bool keeps_nan;
};

#define BLAS(d, name, args) blas_said(d, name args, #name)

static enum st blas_said(struct cuda_device *d, cublasStatus_t s, const char *name)
{
    return s == CUBLAS_STATUS_SUCCESS ? ST_OK : cuda_fails(d, name, cublasLtGetStatusString(s));
}

/* --- choosing ------------------------------------------------------------------------------- */

static void forget(struct cuda_product *p)
{
    if (p->d != NULL) (void)cublasLtMatrixLayoutDestroy(p->d);
    if (p->b != NULL) (void)cublasLtMatrixLayoutDestroy(p->b);
    if (p->a != NULL) (void)cublasLtMatrixLayoutDestroy(p->a);
    if (p->desc != NULL) (void)cublasLtMatmulDescDestroy(p->desc);
}

static enum st describe_layouts(struct cuda_device *d, struct cuda_product *p)
{
    const struct cuda_shape *s = &p->shape;
    cudaDataType_t type = s->bf16 ? CUDA_R_16BF : CUDA_R_32F;
    bool ta = s->ta == CUBLAS_OP_T, tb = s->tb == CUBLAS_OP_T;
    enum st st;
    TRY(BLAS(d, cublasLtMatrixLayoutCreate,
             (&p->a, type, ta ? s->k : s->m, ta ? s->m : s->k, s->lda)), err);
    TRY(BLAS(d, cublasLtMatrixLayoutCreate,
             (&p->b, type, tb ? s->n : s->k, tb ? s->k : s->n, s->ldb)), err);
    st = BLAS(d, cublasLtMatrixLayoutCreate, (&p->d, CUDA_R_32F, s->m, s->n, s->ldd));
err: return st;
}

static enum st set_bias(struct cuda_device *d, struct cuda_product *p, const void *b)
{
    return BLAS(d, cublasLtMatmulDescSetAttribute,
                (p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &b, sizeof(b)));
}

static enum st describe(struct cuda_device *d, struct cuda_product *p)
{
    const struct cuda_shape *s = &p->shape;
    cublasOperation_t ta = (cublasOperation_t)s->ta, tb = (cublasOperation_t)s->tb;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)s->epilogue;
    bool tf32 = !s->bf16 && d->precision == PRECISION_TF32;
    enum st st;
    TRY(BLAS(d, cublasLtMatmulDescCreate,
             (&p->desc, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F)),
        err);
    TRY(BLAS(d, cublasLtMatmulDescSetAttribute,
             (p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof(ta))), err);
    TRY(BLAS(d, cublasLtMatmulDescSetAttribute,
             (p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof(tb))), err);
    TRY(BLAS(d, cublasLtMatmulDescSetAttribute,
             (p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue))), err);
    /* The heuristics read off this address, without following it, how biases are aligned. */
    if (epilogue != CUBLASLT_EPILOGUE_DEFAULT)
        TRY(set_bias(d, p, (const void *)(uintptr_t)CUDA_BEST_ALIGN), err);
    st = describe_layouts(d, p);
err: return st;
}

static enum st prefer(struct cuda_device *d, const struct cuda_shape *s,
                      cublasLtMatmulPreference_t to)
{
    const struct { cublasLtMatmulPreferenceAttributes_t attr; uint32_t value; } set[] = {
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s->align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s->align_d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s->align_d},
    };
    uint64_t workspace = d->tuning.workspace_bytes;
    enum st st;
    TRY(BLAS(d, cublasLtMatmulPreferenceSetAttribute,
             (to, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace))), err);
    for (size_t i = 0; i < sizeof(set) / sizeof(set[0]); i++)
        TRY(BLAS(d, cublasLtMatmulPreferenceSetAttribute,
                 (to, set[i].attr, &set[i].value, sizeof(set[i].value))), err);
err: return st;
}

static enum st choose(struct cuda_device *d, struct cuda_product *p)
{
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    cublasLtMatmulPreference_t wish = NULL;
    int n = 0;
    enum st st;
    TRY(BLAS(d, cublasLtMatmulPreferenceCreate, (&wish)), err);
    TRY(prefer(d, &p->shape, wish), err_wish);
    TRY(BLAS(d, cublasLtMatmulAlgoGetHeuristic, (d->blas, p->desc, p->a, p->b, p->d, p->d, wish,
                                                 CANDIDATES, found, &n)), err_wish);
    int i = 0;
    while (i < n && found[i].state != CUBLAS_STATUS_SUCCESS) i++;
    if (i == n) {
        st = cuda_fails(d, "cublasLtMatmulAlgoGetHeuristic", "no algorithm for a layer's product");
        goto err_wish;
    }
    p->algo = found[i].algo;
    p->workspace = found[i].workspaceSize;

err_wish: (void)cublasLtMatmulPreferenceDestroy(wish);
err:      return st;
}

/* --- running -------------------------------------------------------------------------------- */

static enum st multiply(struct cuda_device *d, struct cuda_product *p, struct cuda_factors f,
                        void *workspace, cudaStream_t s)
{
    static const float one = 1.0f, zero = 0.0f;
    enum st st;
    if (p->shape.epilogue != CUBLASLT_EPILOGUE_DEFAULT) TRY(set_bias(d, p, f.bias), err);
    st = BLAS(d, cublasLtMatmul, (d->blas, p->desc, &one, f.a, p->a, f.b, p->b, &zero, f.d, p->d,
                                  f.d, p->d, &p->algo, workspace, p->workspace, s));
err: return st;
}

/* --- does a fused ReLU keep NaN? ------------------------------------------------------------ */

/* cuBLASLt does not say, and algorithms may differ. So each one that is chosen is tried: factors
 * that are all NaN have to give a result that is. Otherwise a broken number would become 0 and stop
 * being noticed. Memory of the real shape: it fits where activations of that shape fit. */
struct trial { void *a, *b, *d, *bias, *workspace, *host; };

static enum st trial_open(struct cuda_device *d, const struct cuda_product *p, struct trial *t,
                          size_t result_bytes)
{
    const struct cuda_shape *s = &p->shape;
    size_t item = s->bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t a = (size_t)s->lda * (s->ta == CUBLAS_OP_T ? s->m : s->k) * item;
    size_t b = (size_t)s->ldb * (s->tb == CUBLAS_OP_T ? s->k : s->n) * item;
    enum st st;
    TRY(cuda_memory(d, a, &t->a), err);
    TRY(cuda_memory(d, b, &t->b), err);
    TRY(cuda_memory(d, result_bytes, &t->d), err);
    TRY(cuda_memory(d, s->m * sizeof(float), &t->bias), err);
    TRY(cuda_memory(d, p->workspace, &t->workspace), err);
    TRY(cuda_pinned(d, result_bytes, &t->host), err);
    TRY(CUDA(d, cudaMemsetAsync, (t->a, 0xFF, a, d->in)), err);
    TRY(CUDA(d, cudaMemsetAsync, (t->b, 0xFF, b, d->in)), err);
    TRY(CUDA(d, cudaMemsetAsync, (t->d, 0, result_bytes, d->in)), err);
    st = CUDA(d, cudaMemsetAsync, (t->bias, 0, s->m * sizeof(float), d->in));
err: return st;
}

static void trial_close(struct trial *t)
{
    void *dev[] = {t->a, t->b, t->d, t->bias, t->workspace};
    for (size_t i = 0; i < sizeof(dev) / sizeof(dev[0]); i++)
        if (dev[i] != NULL) (void)cudaFree(dev[i]);
    if (t->host != NULL) (void)cudaFreeHost(t->host);
}

static bool all_nan(const struct cuda_shape *s, const float *y)
{
    for (size_t j = 0; j < s->n; j++)
        for (size_t i = 0; i < s->m; i++)
            if (y[j * s->ldd + i] == y[j * s->ldd + i]) return false;
    return true;
}

static enum st try_nan(struct cuda_device *d, struct cuda_product *p)
{
    const struct cuda_shape *s = &p->shape;
    size_t bytes = (size_t)s->ldd * s->n * sizeof(float);
    struct trial t = {0};
    enum st st;
    TRY(trial_open(d, p, &t, bytes), err);
    TRY(multiply(d, p, (struct cuda_factors){t.a, t.b, t.d, t.bias}, t.workspace, d->in), err);
    TRY(CUDA(d, cudaMemcpyAsync, (t.host, t.d, bytes, cudaMemcpyDeviceToHost, d->in)), err);
    TRY(CUDA(d, cudaStreamSynchronize, (d->in)), err);
    p->keeps_nan = all_nan(s, t.host);
err:
    if (st != ST_OK) (void)cudaStreamSynchronize(d->in);
    trial_close(&t);
    return st;
}

/* --- one product for each shape ------------------------------------------------------------- */

static enum st product_add(struct cuda_device *d, const struct cuda_shape *shape,
                           struct cuda_product **out)
{
    enum st st;
    if (d->recording) return cuda_fails(d, "choosing a product", "");
    if (d->n_products == d->cap_products) {
        uint32_t cap = 2 * d->cap_products + 32;
        void *p = mem_grow(d->product, d->cap_products, cap, sizeof(*d->product));
        if (p == NULL) return log_fail(ST_NOMEM, "cuda device", "out of memory; free some");
        d->product = p;
        d->cap_products = cap;
    }
    struct cuda_product *p = &d->product[d->n_products];
    *p = (struct cuda_product){.shape = *shape};
    TRY(describe(d, p), err);
    TRY(choose(d, p), err);
    if (shape->epilogue == CUBLASLT_EPILOGUE_RELU_BIAS) TRY(try_nan(d, p), err);
    d->n_products++;
    *out = p;
    return ST_OK;

err:
    forget(p);
    return st;
}

static enum st product_for(struct cuda_device *d, const struct cuda_shape *shape,
                           struct cuda_product **out)
{
    for (uint32_t i = 0; i < d->n_products; i++)
        if (memcmp(&d->product[i].shape, shape, sizeof(*shape)) == 0) {
            *out = &d->product[i];
            return ST_OK;
        }
    return product_add(d, shape, out);
}

enum st product_run(struct cuda_device *d, uint32_t lane, const struct cuda_shape *shape,
                    struct cuda_factors f)
{
    struct cuda_product *p;
    enum st st;
    TRY(product_for(d, shape, &p), err);
    st = multiply(d, p, f, d->lane[lane].workspace, cuda_stream_of(d, lane));
err: return st;
}

enum st product_keeps_nan(struct cuda_device *d, const struct cuda_shape *shape, bool *out)
{
    struct cuda_product *p;
    enum st st;
    TRY(product_for(d, shape, &p), err);
    *out = p->keeps_nan;
err: return st;
}

enum st product_open(struct cuda_device *d)
{
    return BLAS(d, cublasLtCreate, (&d->blas));
}

void product_close(struct cuda_device *d)
{
    for (uint32_t i = 0; i < d->n_products; i++) forget(&d->product[i]);
    mem_free(d->product);
    if (d->blas != NULL) (void)cublasLtDestroy(d->blas);
}
