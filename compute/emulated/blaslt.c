/* compute/emulated/blaslt.c - matrix products with the meaning that cuBLASLt gives them:
 * column-major matrices, op(A) (m,k) times op(B) (k,n) into D (m,n), an epilogue on top. Each sum
 * runs in ascending k. What real algorithms rely on is checked: shapes that fit, pointers aligned as was
 * promised when the algorithm was chosen, and that it was chosen for this very product. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compute/cuda_blas.h"
#include "compute/emulated/emu.h"

enum { MAX_ALIGN = 256 };

struct emu_blas { int unused; };
struct emu_product {
    cublasComputeType_t compute;
    cublasOperation_t ta, tb;
    cublasLtEpilogue_t epilogue;
    const void *bias;
};
struct emu_layout { cudaDataType_t type; uint64_t rows, cols; int64_t ld; };
struct emu_preference { uint64_t workspace; uint32_t reduction, align[4]; /* A B C D */ };

/* What an algorithm was chosen for; travels in cublasLtMatmulAlgo_t. */
struct choice { uint64_t m, n, k, lda, ldb, ldd; uint32_t kinds; uint8_t align[4]; };
_Static_assert(sizeof(struct choice) <= sizeof(cublasLtMatmulAlgo_t), "fits");

static int relu_drops_nan;

void emu_relu_drops_nan(int yes)
{
    relu_drops_nan = yes;
}

enum st cuda_blas_load(void)
{
    return ST_OK;
}

/* Like emu_begin; failures injected there are reported in this library's own words. */
static cublasStatus_t begin(const char *name)
{
    return emu_begin(name) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

static cublasStatus_t end(cublasStatus_t s)
{
    emu_unlock();
    return s;
}

const char *cublasLtGetStatusString(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "another status";
}

/* --- objects -------------------------------------------------------------------------------- */

static cublasStatus_t create(const char *name, void **out, const void *value, size_t bytes)
{
    cublasStatus_t s = begin(name);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    *out = malloc(bytes);
    if (*out == NULL) return end(CUBLAS_STATUS_ALLOC_FAILED);
    memcpy(*out, value, bytes);
    emu_count_live(1);
    return end(CUBLAS_STATUS_SUCCESS);
}

static cublasStatus_t destroy(const char *name, void *p)
{
    cublasStatus_t s = begin(name);
    if (s != CUBLAS_STATUS_SUCCESS) emu_lock();
    if (p == NULL) emu_misuse("%s of nothing", name);
    free(p);
    emu_count_live(-1);
    return end(s);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    struct emu_blas blas = {0};
    return create(__func__, (void **)h, &blas, sizeof(blas));
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    return destroy(__func__, h);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    struct emu_product product = {.compute = compute, .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    return create(__func__, (void **)d, &product, sizeof(product));
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    return destroy(__func__, d);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    if (ld < (int64_t)rows || rows == 0 || cols == 0) return CUBLAS_STATUS_INVALID_VALUE;
    struct emu_layout layout = {type, rows, cols, ld};
    return create(__func__, (void **)l, &layout, sizeof(layout));
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    return destroy(__func__, l);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    struct emu_preference none = {0, UINT32_MAX, {MAX_ALIGN, MAX_ALIGN, MAX_ALIGN, MAX_ALIGN}};
    return create(__func__, (void **)p, &none, sizeof(none));
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    return destroy(__func__, p);
}

/* *to = the attribute's value; its size has to be right. */
static cublasStatus_t take(void *to, size_t to_bytes, const void *value, size_t bytes)
{
    if (bytes != to_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attr,
                                              const void *value, size_t bytes)
{
    cublasStatus_t s = begin(__func__);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return end(take(&d->ta, sizeof(d->ta), value, bytes));
    case CUBLASLT_MATMUL_DESC_TRANSB: return end(take(&d->tb, sizeof(d->tb), value, bytes));
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return end(take(&d->epilogue, sizeof(d->epilogue), value, bytes));
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return end(take(&d->bias, sizeof(d->bias), value, bytes));
    }
    return end(CUBLAS_STATUS_INVALID_VALUE);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *value, size_t bytes)
{
    cublasStatus_t s = begin(__func__);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    switch (attr) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return end(take(&p->workspace, sizeof(p->workspace), value, bytes));
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return end(take(&p->reduction, sizeof(p->reduction), value, bytes));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return end(take(&p->align[attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
                        sizeof(p->align[0]), value, bytes));
    }
    return end(CUBLAS_STATUS_INVALID_VALUE);
}

/* --- products ------------------------------------------------------------------------------- */

static bool choose(const struct emu_product *d, const struct emu_layout *a,
                   const struct emu_layout *b, const struct emu_layout *out, struct choice *c)
{
    memset(c, 0, sizeof(*c));
    bool ta = d->ta == CUBLAS_OP_T, tb = d->tb == CUBLAS_OP_T;
    c->m = ta ? a->cols : a->rows;
    c->k = ta ? a->rows : a->cols;
    c->n = tb ? b->rows : b->cols;
    c->lda = (uint64_t)a->ld;
    c->ldb = (uint64_t)b->ld;
    c->ldd = (uint64_t)out->ld;
    c->kinds = (uint32_t)(ta | tb << 1 | (a->type != CUDA_R_32F) << 2) | (uint32_t)d->epilogue << 3;
    return (tb ? b->cols : b->rows) == c->k && out->rows == c->m && out->cols == c->n &&
           a->type == b->type && out->type == CUDA_R_32F;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t p,
    int n_wanted, cublasLtMatmulHeuristicResult_t *result, int *n_found)
{
    cublasStatus_t s = begin(__func__);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    struct choice choice;
    if (h == NULL || n_wanted < 1 || c != out || !choose(d, a, b, out, &choice))
        return end(CUBLAS_STATUS_INVALID_VALUE);
    *n_found = 0;
    if (d->epilogue != CUBLASLT_EPILOGUE_DEFAULT && d->bias == NULL)
        return end(CUBLAS_STATUS_NOT_SUPPORTED);
    for (int i = 0; i < 4; i++) choice.align[i] = (uint8_t)(p->align[i] - 1);
    memset(result, 0, sizeof(*result));
    memcpy(&result->algo, &choice, sizeof(choice));
    result->workspaceSize = p->workspace;
    *n_found = 1;
    return end(CUBLAS_STATUS_SUCCESS);
}

struct product_args {
    struct emu_product d;
    struct emu_layout la, lb, ld;
    const void *a, *b;
    float *out;
    uint64_t k;
};

static float element(const void *p, cudaDataType_t type, uint64_t i)
{
    if (type == CUDA_R_32F) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float finish(const struct emu_product *d, float sum, uint64_t row)
{
    if (d->epilogue == CUBLASLT_EPILOGUE_DEFAULT) return sum;
    sum += ((const float *)d->bias)[row];
    if (d->epilogue == CUBLASLT_EPILOGUE_BIAS) return sum;
    if (isnan(sum)) return relu_drops_nan ? 0.0f : sum;
    return sum > 0.0f ? sum : 0.0f;
}

static void run_product(void *args)
{
    const struct product_args *p = args;
    bool ta = p->d.ta == CUBLAS_OP_T, tb = p->d.tb == CUBLAS_OP_T;
    uint64_t lda = (uint64_t)p->la.ld, ldb = (uint64_t)p->lb.ld;
    for (uint64_t j = 0; j < p->ld.cols; j++)
        for (uint64_t i = 0; i < p->ld.rows; i++) {
            float sum = 0.0f;
            for (uint64_t k = 0; k < p->k; k++)
                sum += element(p->a, p->la.type, ta ? k + i * lda : i + k * lda) *
                       element(p->b, p->lb.type, tb ? j + k * ldb : k + j * ldb);
            p->out[i + j * (uint64_t)p->ld.ld] = finish(&p->d, sum, i);
        }
}

static void check_choice(const struct choice *now, const cublasLtMatmulAlgo_t *algo,
                         const void *const p[4])
{
    struct choice then;
    memcpy(&then, algo, sizeof(then));
    for (int i = 0; i < 4; i++)
        if (((uintptr_t)p[i] & then.align[i]) != 0)
            emu_misuse("a matrix at %p, promised to be aligned to %u", p[i], then.align[i] + 1);
    memset(then.align, 0, sizeof(then.align));
    if (memcmp(&then, now, sizeof(then)) != 0)
        emu_misuse("an algorithm chosen for another product");
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t s)
{
    cublasStatus_t st = begin(__func__);
    if (st != CUBLAS_STATUS_SUCCESS) return st;
    struct choice now;
    if (h == NULL || lc != lout || c != out || !choose(d, la, lb, lout, &now) ||
        (workspace == NULL && workspace_bytes > 0) || *(const float *)alpha != 1.0f ||
        *(const float *)beta != 0.0f)
        return end(CUBLAS_STATUS_INVALID_VALUE);
    check_choice(&now, algo, (const void *const[4]){a, b, c, out});
    struct product_args *args = malloc(sizeof(*args));
    if (args == NULL) return end(CUBLAS_STATUS_ALLOC_FAILED);
    *args = (struct product_args){*d, *la, *lb, *lout, a, b, out, now.k};
    cudaError_t e = emu_add(emu_check_stream(s), (struct emu_work){
        .kind = "product", .body = run_product, .args = args});
    return end(e == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED);
}
