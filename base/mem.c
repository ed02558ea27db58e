#define _GNU_SOURCE
#include "base/mem.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGN = 64 };

/* Relaxed everywhere: counters only, nothing is published through them. */
static atomic_size_t live;
static atomic_size_t fail_in; /* 0 = off; 1 = the next one fails */
static atomic_bool fail_fired;

static bool fault_due(void)
{
    size_t left = atomic_load_explicit(&fail_in, memory_order_relaxed);
    while (left != 0) {
        if (atomic_compare_exchange_weak_explicit(&fail_in, &left, left - 1, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            if (left != 1) return false;
            atomic_store_explicit(&fail_fired, true, memory_order_relaxed);
            return true;
        }
    }
    return false;
}

void *mem_alloc(size_t n, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes) || bytes > SIZE_MAX - ALIGN) return NULL;
    if (fault_due()) return NULL;
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    void *p = aligned_alloc(ALIGN, bytes == 0 ? ALIGN : bytes);
    if (p != NULL) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return p;
}

void *mem_zalloc(size_t n, size_t size)
{
    void *p = mem_alloc(n, size);
    if (p != NULL) memset(p, 0, n * size);
    return p;
}

void *mem_grow(void *p, size_t n_old, size_t n_new, size_t size)
{
    void *q = mem_alloc(n_new, size);
    if (q == NULL) return NULL;
    if (p != NULL) memcpy(q, p, (n_old < n_new ? n_old : n_new) * size);
    mem_free(p);
    return q;
}

char *mem_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *p = mem_alloc(n, 1);
    if (p != NULL) memcpy(p, s, n);
    return p;
}

void mem_free(void *p)
{
    if (p == NULL) return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(p);
}

void *mem_map(size_t bytes)
{
    if (bytes == 0) bytes = 1;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), slack = bytes < MEM_HUGE_BYTES ? 0 : MEM_HUGE_BYTES;
    bytes = (bytes + page - 1) / page * page;
    if (bytes > SIZE_MAX - slack) return NULL;
    char *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (slack != 0) { /* what lies before and behind the aligned part goes back */
        size_t before = (MEM_HUGE_BYTES - (uintptr_t)p % MEM_HUGE_BYTES) % MEM_HUGE_BYTES;
        if (before > 0) munmap(p, before);
        if (before < slack) munmap(p + before + bytes, slack - before);
        p += before;
    }
    madvise(p, bytes, MADV_HUGEPAGE); /* advice: nothing depends on it */
    return p;
}

size_t mem_available(void)
{
    char line[128];
    size_t kib, bytes = SIZE_MAX;
    FILE *f = fopen("/proc/meminfo", "r");
    if (f == NULL) return bytes;
    while (fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) bytes = kib * 1024;
    fclose(f);
    return bytes;
}

void mem_unmap(void *p, size_t bytes)
{
    if (p != NULL) munmap(p, bytes == 0 ? 1 : bytes);
}

void mem_fail_at(size_t nth)
{
    atomic_store_explicit(&fail_fired, false, memory_order_relaxed);
    atomic_store_explicit(&fail_in, nth, memory_order_relaxed);
}

bool mem_fail_stop(void)
{
    atomic_store_explicit(&fail_in, 0, memory_order_relaxed);
    return atomic_load_explicit(&fail_fired, memory_order_relaxed);
}

size_t mem_live(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}
