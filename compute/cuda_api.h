/* compute/cuda_api.h - CUDA itself, or its stand-in on the CPU (make CUDA=emulated), which runs
 * the same kernels and keeps the same queues without a GPU. The one place that tells them apart. */
#ifndef CHANTER_COMPUTE_CUDA_API_H
#define CHANTER_COMPUTE_CUDA_API_H

#ifdef CHANTER_CUDA_EMULATED
#include "compute/emulated/cuda.h"
#else
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#endif

#endif
