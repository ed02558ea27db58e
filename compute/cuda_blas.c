/* compute/cuda_blas.c - the functions of cuBLASLt, under their own names, each passing its call on
 * to the library once that is loaded. */
#include "compute/cuda_blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "base/check.h"
#include "base/log.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define LIBRARY "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

/* Every function that is used: result, name, parameters, arguments. */
#define FUNCTIONS(F)                                                                              \
    F(const char *, cublasLtGetStatusString, (cublasStatus_t s), (s))                             \
    F(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * h), (h))                                \
    F(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t h), (h))                                 \
    F(cublasStatus_t, cublasLtMatmulDescCreate,                                                   \
      (cublasLtMatmulDesc_t * d, cublasComputeType_t c, cudaDataType_t t), (d, c, t))             \
    F(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t d), (d))                   \
    F(cublasStatus_t, cublasLtMatmulDescSetAttribute,                                             \
      (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *v, size_t n),        \
      (d, a, v, n))                                                                               \
    F(cublasStatus_t, cublasLtMatrixLayoutCreate,                                                 \
      (cublasLtMatrixLayout_t * l, cudaDataType_t t, uint64_t r, uint64_t c, int64_t ld),         \
      (l, t, r, c, ld))                                                                           \
    F(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t l), (l))               \
    F(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * p), (p))      \
    F(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t p), (p))       \
    F(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,                                       \
      (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *v,       \
       size_t n),                                                                                 \
      (p, a, v, n))                                                                               \
    F(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,                                             \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t la,                     \
       cublasLtMatrixLayout_t lb, cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t ld,           \
       cublasLtMatmulPreference_t p, int n, cublasLtMatmulHeuristicResult_t r[], int *found),     \
      (h, d, la, lb, lc, ld, p, n, r, found))                                                     \
    F(cublasStatus_t, cublasLtMatmul,                                                             \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,              \
       cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,     \
       const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lout,          \
       const cublasLtMatmulAlgo_t *algo, void *workspace, size_t n, cudaStream_t s),              \
      (h, d, alpha, a, la, b, lb, beta, c, lc, out, lout, algo, workspace, n, s))

/* Set once, under pthread_once. */
#define POINTER(result, name, parameters, arguments) static result(*name##_) parameters;
FUNCTIONS(POINTER)
static int loaded;
static char missing[256];      /* what the loader said */

static void load(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(missing, sizeof(missing), "%s", dlerror());
        return;
    }
    loaded = 1;
#define FIND(result, name, parameters, arguments)                                                 \
    *(void **)&name##_ = dlsym(library, #name);                                                   \
    if (name##_ == NULL) {                                                                        \
        snprintf(missing, sizeof(missing), "%s has no %s", LIBRARY, #name);                       \
        loaded = 0;                                                                               \
    }
    FUNCTIONS(FIND)
}

enum st cuda_blas_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    if (loaded) return ST_OK;
    return log_fail(ST_CONFIG, "cuda device", "%s; install cuBLAS for CUDA %s, or set "
                    "cluster.device: cpu", missing, TEXT(CUBLAS_VER_MAJOR));
}

#define FORWARD(result, name, parameters, arguments)                                              \
    result name parameters                                                                        \
    {                                                                                             \
        CHECK(name##_ != NULL, "cuda_blas_load comes first");                                     \
        return name##_ arguments;                                                                 \
    }
FUNCTIONS(FORWARD)
