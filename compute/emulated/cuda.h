/* compute/emulated/cuda.h - the part of the stand-in for CUDA that kernels need. */
#ifndef CHANTER_COMPUTE_EMULATED_CUDA_H
#define CHANTER_COMPUTE_EMULATED_CUDA_H

#include <stddef.h>

typedef enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 } cudaError_t;
typedef struct emu_stream *cudaStream_t;

/* Copies args; body(args) runs when its turn on the stream comes. */
cudaError_t emu_enqueue(cudaStream_t s, void (*body)(void *args), const void *args, size_t bytes);

#endif
