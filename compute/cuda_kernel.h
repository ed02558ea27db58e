/* compute/cuda_kernel.h - what the .cu files are written in: C that is CUDA to nvcc, and C11 to gcc
 * for the emulation (emulated/block.h), so that kernels can be tested without a GPU.
 *
 *   KERNEL(name, args, a, most) { body }     a kernel whose threads work alone; `a` is its one
 *                                            argument, a struct args; blocks of up to `most`
 *   KERNEL_THAT_WAITS(name, args, a, most)   one that uses __syncthreads, shared memory, COPY_*
 *   LAUNCH(stream, name, grid, block, shared_bytes, &args)       gives a cudaError_t
 *   SHARED(type, p)                          type *p: the block's shared memory
 *   COPY_ASYNC(to, from, 4 or 16)            global -> shared, complete after ...
 *   COPY_COMMIT() COPY_WAIT(n)               ... it was committed and all but n commits waited for
 *   DEVICE, HOST                             functions of this file for kernels, for launches
 *   UNROLL, UNROLL_NOT                       before a loop
 *
 * Float sums have a fixed order: no atomics on floats, no shuffles, nothing that depends on how
 * many blocks there are (I1). */
#ifndef CHANTER_COMPUTE_CUDA_KERNEL_H
#define CHANTER_COMPUTE_CUDA_KERNEL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "compute/cuda_api.h"

#ifdef CHANTER_CUDA_EMULATED
#include "compute/emulated/block.h"

#define DEVICE static inline
#define EMU_KERNEL(name, args, a, most, waits)                                           \
    static void name(const struct args a);                                               \
    static void name##_thread(const void *p) { name(*(const struct args *)p); }          \
    static const struct emu_kernel name##_kernel = {#name, name##_thread, most, waits};  \
    static void name(const struct args a)
#define KERNEL(name, args, a, most) EMU_KERNEL(name, args, a, most, false)
#define KERNEL_THAT_WAITS(name, args, a, most) EMU_KERNEL(name, args, a, most, true)
#define LAUNCH(stream, name, grid, block, shared_bytes, args) \
    emu_launch(stream, &name##_kernel, grid, block, shared_bytes, args, sizeof(*(args)))
#define SHARED(type, p) type *p = (type *)emu_shared()
#define COPY_ASYNC(to, from, bytes) emu_copy_async(to, from, bytes)
#define COPY_COMMIT() emu_copy_commit()
#define COPY_WAIT(n) emu_copy_wait(n)
/* Not for speed: gcc 12 makes `if (c) sum += x` in a vectorized loop `sum += c ? x : 0`, and -0
 * becomes 0. */
#define UNROLL _Pragma("GCC unroll 64")
#define UNROLL_NOT

#else
#include <cuda_pipeline_primitives.h>

#define DEVICE static __device__ __forceinline__
#define KERNEL(name, args, a, most) \
    static __global__ void __launch_bounds__(most) name(const __grid_constant__ struct args a)
#define KERNEL_THAT_WAITS(name, args, a, most) KERNEL(name, args, a, most)
#define LAUNCH(stream, name, grid, block, shared_bytes, args) \
    (name<<<grid, block, shared_bytes, stream>>>(*(args)), cudaGetLastError())
#define SHARED(type, p)                                     \
    extern __shared__ __align__(16) unsigned char shared_memory[]; \
    type *p = (type *)shared_memory
#define COPY_ASYNC(to, from, bytes) __pipeline_memcpy_async(to, from, bytes)
#define COPY_COMMIT() __pipeline_commit()
#define COPY_WAIT(n) __pipeline_wait_prior(n)
#define UNROLL _Pragma("unroll")
#define UNROLL_NOT _Pragma("unroll 1")
#endif

#define HOST static inline

enum { BLOCK = 256, SHARED_FLOATS = 48 * 1024 / 4 }; /* threads; what needs no asking for */

HOST dim3 dim(uint32_t x, uint32_t y)
{
    dim3 d;
    d.x = x;
    d.y = y;
    d.z = 1;
    return d;
}

HOST uint32_t ceil_div(size_t n, uint32_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* --- four floats at a time ------------------------------------------------------------------ */
/* Every thread works on quads: floats 4q .. 4q+3 of a row, the last of which may be short. In
 * memory a quad is one access where all rows are whole quads at 16-byte addresses (by4), or else
 * up to four. */

HOST uint32_t quads_of(uint32_t width)
{
    return ceil_div(width, 4);
}

/* Are rows of `width` floats from p on, `stride` apart, whole quads at 16-byte addresses? NULL is
 * such an address. */
HOST int is_by4(const void *p, size_t stride, uint32_t width)
{
    return (uintptr_t)p % 16 == 0 && stride % 4 == 0 && width % 4 == 0;
}

DEVICE float4 fill4(float x)
{
    float4 v;
    v.x = v.y = v.z = v.w = x;
    return v;
}

/* The first n >= 1 floats at p, all four where n > 3; the others are 0. */
DEVICE float4 load4(const float *p, uint32_t n, int by4)
{
    if (by4) return *(const float4 *)p;
    float4 v = fill4(0.0f);
    v.x = p[0];
    if (n > 1) v.y = p[1];
    if (n > 2) v.z = p[2];
    if (n > 3) v.w = p[3];
    return v;
}

DEVICE void store4(float *p, uint32_t n, int by4, float4 v)
{
    if (by4) {
        *(float4 *)p = v;
        return;
    }
    p[0] = v.x;
    if (n > 1) p[1] = v.y;
    if (n > 2) p[2] = v.z;
    if (n > 3) p[3] = v.w;
}

DEVICE float4 add4(float4 a, float4 b)
{
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
    return a;
}

/* by * v + sum, rounded once, whatever the compiler would do with a product and a sum. */
DEVICE float4 multiply_add4(float by, float4 v, float4 sum)
{
    sum.x = fmaf(by, v.x, sum.x);
    sum.y = fmaf(by, v.y, sum.y);
    sum.z = fmaf(by, v.z, sum.z);
    sum.w = fmaf(by, v.w, sum.w);
    return sum;
}

/* The products of a quad on top of sum, one after the other. */
DEVICE float add_dot4(float4 x, float4 w, float sum)
{
    sum = fmaf(x.x, w.x, sum);
    sum = fmaf(x.y, w.y, sum);
    sum = fmaf(x.z, w.z, sum);
    return fmaf(x.w, w.w, sum);
}

/* --- kernels over rows ---------------------------------------------------------------------- */
/* blockDim.x threads on the quads of a row, blockDim.y rows beside each other, and ROWS_EACH of
 * them a thread: all loads are on their way before the first store, so that latency is hidden. */

enum { ROWS_EACH = 4 };

HOST dim3 row_block(uint32_t quads)
{
    uint32_t x = quads < BLOCK ? quads : BLOCK;
    return dim(x, BLOCK / x);
}

HOST dim3 row_grid(uint32_t n, dim3 block)
{
    return dim(ceil_div(n, block.y * ROWS_EACH), 1);
}

/* The thread's k-th row. */
DEVICE uint32_t my_row(uint32_t k)
{
    return (blockIdx.x * ROWS_EACH + k) * blockDim.y + threadIdx.y;
}

/* Vectors without rows: ROWS_EACH quads a thread. */
HOST dim3 flat_grid(size_t n_quads)
{
    return dim(ceil_div(n_quads, BLOCK * ROWS_EACH), 1);
}

DEVICE size_t my_quad(uint32_t k)
{
    return ((size_t)blockIdx.x * ROWS_EACH + k) * blockDim.x + threadIdx.x;
}

#endif
