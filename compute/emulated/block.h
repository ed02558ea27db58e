/* compute/emulated/block.h - a grid of CUDA threads on the CPU, for cuda_kernel.h. Stricter than a
 * GPU, so that tests see what a GPU only might show:
 *   - __syncthreads: every thread of the block has to come to the same one, or all have to return;
 *   - threads and blocks may run in any order (emu_shuffle): a missing barrier changes results;
 *   - shared memory starts as NaN, and its end is guarded;
 *   - an asynchronous copy arrives when it is waited for, not before.
 * Blocks run one after the other on the thread that runs the stream. Not a model of its speed. */
#ifndef CHANTER_COMPUTE_EMULATED_BLOCK_H
#define CHANTER_COMPUTE_EMULATED_BLOCK_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "compute/emulated/cuda.h"

typedef struct dim3 { uint32_t x, y, z; } dim3;
/* may_alias: kernels read four floats as one. */
typedef struct { float x, y, z, w; } __attribute__((aligned(16), may_alias)) float4;
typedef struct { uint32_t x, y; } __attribute__((aligned(8), may_alias)) uint2;

enum { EMU_MAX_THREADS = 1024, EMU_MAX_SHARED = 48 * 1024, EMU_MAX_ARGS = 1024 };

struct emu_kernel {
    const char *name;
    void (*thread)(const void *args);
    uint32_t max_threads;    /* of a block                                              */
    bool waits;              /* its threads share memory and wait for each other        */
};

/* Puts kernel k on the stream. CHECKs what a GPU would refuse, or find too large. */
cudaError_t emu_launch(cudaStream_t s, const struct emu_kernel *k, dim3 grid, dim3 block,
                       size_t shared_bytes, const void *args, size_t bytes);
/* The order of threads and blocks in launches from now on: ascending (0, as at first), or one drawn
 * anew for each stretch between barriers. For tests. */
void emu_shuffle(uint64_t seed);

/* --- what a thread sees --------------------------------------------------------------------- */

struct emu_place { dim3 thread, block, threads, blocks; };
extern _Thread_local struct emu_place emu_place;

void emu_barrier(int line);
void *emu_shared(void);
void emu_copy_async(void *to, const void *from, size_t bytes);
void emu_copy_commit(void);
void emu_copy_wait(uint32_t n_left);

#define threadIdx emu_place.thread
#define blockIdx emu_place.block
#define blockDim emu_place.threads
#define gridDim emu_place.blocks
#define __syncthreads() emu_barrier(__LINE__)

static inline uint32_t __float_as_uint(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static inline int __clz(uint32_t x)
{
    return x == 0 ? 32 : __builtin_clz(x);
}

static inline uint32_t atomicAdd(uint32_t *p, uint32_t by)
{
    return __atomic_fetch_add(p, by, __ATOMIC_RELAXED);
}

static inline uint32_t atomicMax(uint32_t *p, uint32_t other)
{
    uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < other && !__atomic_compare_exchange_n(p, &old, other, false, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {}
    return old;
}

#endif
