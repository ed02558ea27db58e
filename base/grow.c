#include "base/grow.h"

#include "base/mem.h"

enum st grow_reserve(struct grow *g, size_t n, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) return ST_NOMEM;
    if (g->p != NULL && bytes <= g->bytes) return ST_OK;
    bytes += bytes / 4; /* a little more than asked for, so that it settles soon */
    void *p = mem_alloc(bytes, 1);
    if (p == NULL) return ST_NOMEM;
    mem_free(g->p);
    g->p = p;
    g->bytes = bytes;
    return ST_OK;
}

void grow_fini(struct grow *g)
{
    mem_free(g->p);
    *g = (struct grow){0};
}
