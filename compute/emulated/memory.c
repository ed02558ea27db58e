/* compute/emulated/memory.c - devices, their memory and copies. "Device" and pinned memory are
 * pages of this process, in a table of allocations, so that a copy can tell which is which. New
 * memory is full of NaN: what is read before it is written shows. An allocation ends at a page that cannot be
 * touched, and becomes one when it is freed: addresses are not used again. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "compute/emulated/emu.h"

/* Bytes, but for the number of allocations. Larger ones are full of NaN as far as FILL goes. */
enum { ALIGN = 256, PAGE = 4096, FILL = 1 << 20, ALLOCS = 65536 };

static struct alloc { char *p; size_t bytes; bool device; char *pages; size_t mapped; }
    allocs[ALLOCS];
static uint32_t n_allocs;
static int n_devices = 1;
static size_t total_bytes = (size_t)16 << 30, used_bytes;

void emu_devices(int n)
{
    n_devices = n;
}

void emu_memory(size_t bytes)
{
    total_bytes = bytes;
}

/* The allocation that [p, p + bytes) lies in; NULL: none. */
static struct alloc *find(const void *p, size_t bytes)
{
    const char *at = p;
    for (uint32_t i = 0; i < n_allocs; i++)
        if (at >= allocs[i].p && at + bytes <= allocs[i].p + allocs[i].bytes) return &allocs[i];
    return NULL;
}

static void check_range(const char *what, const void *p, size_t bytes, bool device)
{
    const struct alloc *a = find(p, bytes);
    if (a == NULL && device) emu_misuse("%s of %zu bytes outside of device memory", what, bytes);
    if (a == NULL) emu_misuse("%s of %zu bytes outside of pinned host memory", what, bytes);
    if (a->device != device)
        emu_misuse("%s: %s memory where %s memory belongs", what, a->device ? "device" : "host",
                   device ? "device" : "host");
}

/* --- devices -------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    *n = n_devices;
    return emu_end(n_devices == 0 ? cudaErrorNoDevice : cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    return emu_end(device >= 0 && device < n_devices ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    (void)device;
    *value = attr == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
    return emu_end(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    *free_bytes = total_bytes - used_bytes;
    *total = total_bytes;
    return emu_end(cudaSuccess);
}

/* --- allocations ---------------------------------------------------------------------------- */

static cudaError_t add(void **out, size_t bytes, bool device)
{
    if (emu_breaks_capture()) return cudaErrorStreamCaptureUnsupported;
    if (device && bytes > total_bytes - used_bytes) return cudaErrorMemoryAllocation;
    if (n_allocs == ALLOCS) emu_misuse("more than %d allocations", ALLOCS);
    size_t room = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    size_t mapped = (room + PAGE - 1) / PAGE * PAGE + PAGE;
    char *pages = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
    char *p = pages + mapped - PAGE - room;
    mprotect(pages + mapped - PAGE, PAGE, PROT_NONE);
    memset(p, 0xFF, bytes < FILL ? bytes : FILL);
    allocs[n_allocs++] = (struct alloc){p, bytes, device, pages, mapped};
    if (device) used_bytes += bytes;
    emu_count_live(1);
    *out = p;
    return cudaSuccess;
}

/* CUDA waits for the whole device here; who relies on that is not told apart from who has waited,
 * except by copies of this very memory, which nobody should have forgotten. */
static void take_out(void *p, bool device)
{
    struct alloc *a = find(p, 0);
    if (a == NULL || a->p != p || a->device != device)
        emu_misuse("freeing %s memory that is none", device ? "device" : "pinned host");
    if (emu_copy_pending(a->p, a->bytes)) emu_misuse("freeing memory that a copy still uses");
    emu_run_all();
    if (device) used_bytes -= a->bytes;
    madvise(a->pages, a->mapped, MADV_DONTNEED);
    mprotect(a->pages, a->mapped, PROT_NONE);
    *a = allocs[--n_allocs];
    emu_count_live(-1);
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    cudaError_t e = emu_begin(__func__);
    return e != cudaSuccess ? e : emu_end(add(p, bytes, true));
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    cudaError_t e = emu_begin(__func__);
    (void)flags;
    return e != cudaSuccess ? e : emu_end(add(p, bytes, false));
}

static cudaError_t give_back(const char *name, void *p, bool device)
{
    cudaError_t e = emu_begin(name);
    if (e != cudaSuccess) emu_lock();
    if (p != NULL) take_out(p, device);
    return emu_end(e);
}

cudaError_t cudaFree(void *p)
{
    return give_back(__func__, p, true);
}

cudaError_t cudaFreeHost(void *p)
{
    return give_back(__func__, p, false);
}

/* --- copies --------------------------------------------------------------------------------- */

struct copy { char *to; const char *from; size_t bytes; int value; };

static void run_copy(void *args)
{
    struct copy *c = args;
    if (c->from == NULL)
        memset(c->to, c->value, c->bytes);
    else
        memmove(c->to, c->from, c->bytes);
}

static cudaError_t add_copy(cudaStream_t s, const char *kind, struct copy copy)
{
    struct copy *args = malloc(sizeof(*args));
    if (args == NULL) emu_misuse("out of memory for a copy");
    *args = copy;
    return emu_add(emu_check_stream(s), (struct emu_work){
        .kind = kind, .body = run_copy, .args = args, .read = copy.from, .written = copy.to,
        .bytes = copy.bytes,
    });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    const char *name = kind == cudaMemcpyHostToDevice   ? "h2d"
                       : kind == cudaMemcpyDeviceToHost ? "d2h" : "d2d";
    check_range(name, to, bytes, kind != cudaMemcpyDeviceToHost);
    check_range(name, from, bytes, kind != cudaMemcpyHostToDevice);
    return emu_end(add_copy(s, name, (struct copy){to, from, bytes, 0}));
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    check_range("set", p, bytes, true);
    return emu_end(add_copy(s, "set", (struct copy){p, NULL, bytes, value}));
}

/* --- kernels -------------------------------------------------------------------------------- */

cudaError_t emu_enqueue(cudaStream_t s, void (*body)(void *args), const void *args, size_t bytes)
{
    cudaError_t e = emu_begin("a kernel's launch");
    if (e != cudaSuccess) return e;
    void *copy = malloc(bytes + 1);
    if (copy == NULL) emu_misuse("out of memory for a kernel's arguments");
    memcpy(copy, args, bytes);
    return emu_end(emu_add(emu_check_stream(s),
                           (struct emu_work){.kind = "kernel", .body = body, .args = copy}));
}

void emu_check_launch(uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                      uint32_t block_y, uint32_t block_z, size_t shared_bytes)
{
    uint64_t block = (uint64_t)block_x * block_y * block_z;
    if (block == 0 || block > 1024 || block_z > 64)
        emu_misuse("a block of %u x %u x %u threads", block_x, block_y, block_z);
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_x > INT32_MAX || grid_y > 65535 ||
        grid_z > 65535)
        emu_misuse("a grid of %u x %u x %u blocks", grid_x, grid_y, grid_z);
    if (shared_bytes > 99 * 1024) /* sm_86, the smallest; above 48 KiB only when asked for */
        emu_misuse("%zu bytes of shared memory", shared_bytes);
}
