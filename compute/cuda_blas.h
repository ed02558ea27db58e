/* compute/cuda_blas.h - cuBLASLt, loaded when a GPU is used: half a gigabyte that no other program
 * or machine should need in order to start. */
#ifndef CHANTER_COMPUTE_CUDA_BLAS_H
#define CHANTER_COMPUTE_CUDA_BLAS_H

#include "base/status.h"
#include "compute/cuda_api.h"

/* Before any cublasLt function is called. ST_CONFIG, logged: it is not installed. Any thread. */
MUST_USE enum st cuda_blas_load(void);

#endif
