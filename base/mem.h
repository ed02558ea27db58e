/* base/mem.h - the one door to the heap, so that tests can make the nth allocation fail and count
 * what was not given back. Not for the batch path after warm-up: sizes there come from the plan. */
#ifndef CHANTER_BASE_MEM_H
#define CHANTER_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>

/* 64-byte aligned; contents undefined (mem_alloc) or zero (mem_zalloc). NULL when out of memory
 * or when n * size overflows. n * size == 0 gives a pointer that may be freed. Any thread. */
void *mem_alloc(size_t n, size_t size);
void *mem_zalloc(size_t n, size_t size);
/* Like realloc of `n_old` to `n_new` items (alignment kept); NULL leaves `p` as it was. */
void *mem_grow(void *p, size_t n_old, size_t n_new, size_t size);
/* Copy of a C string. */
char *mem_strdup(const char *s);
void mem_free(void *p); /* NULL ok */

enum { MEM_HUGE_BYTES = 2 << 20 }; /* of a huge page, which begins at a multiple of this */
/* Zero pages straight from the kernel, for tables that are mostly never touched; huge pages are
 * asked for, and from MEM_HUGE_BYTES on begin at once. NULL when the kernel says no. mem_unmap takes
 * the same size. */
void *mem_map(size_t bytes);
/* Bytes that could be had without swapping, by the kernel's estimate; SIZE_MAX: it makes none. */
size_t mem_available(void);
void mem_unmap(void *p, size_t bytes);

/* Tests: let the nth mem_alloc/mem_zalloc/mem_grow/mem_strdup from now fail, once (nth from 1).
 * mem_fail_stop ends it and says whether it has fired. mem_live: allocations not yet freed. */
void mem_fail_at(size_t nth);
bool mem_fail_stop(void);
size_t mem_live(void);

#endif
