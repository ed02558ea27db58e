#include "proto/plan.h"

#include "base/mem.h"

void plan_close(struct plan *p)
{
    if (p == NULL) return;
    mem_free(p->arena);
    mem_free(p);
}
