#include "trainer/group.h"

#include <string.h>

#include "base/mem.h"

enum st group_init(struct group *g, uint64_t cap_slots)
{
    *g = (struct group){.cap_slots = cap_slots};
    g->index = mem_map(cap_slots * sizeof(*g->index));
    return g->index == NULL ? ST_NOMEM : ST_OK;
}

void group_fini(struct group *g)
{
    mem_unmap(g->index, g->cap_slots * sizeof(*g->index));
    grow_fini(&g->row_slot);
    grow_fini(&g->begin);
    grow_fini(&g->item);
    *g = (struct group){0};
}

enum st group_by_slot(struct group *g, const uint32_t *slot, uint32_t n)
{
    enum st st = ST_OK;
    g->n_rows = 0;
    TRY(grow_reserve(&g->row_slot, n, sizeof(uint32_t)), err);
    TRY(grow_reserve(&g->begin, (size_t)n + 2, sizeof(uint32_t)), err);
    TRY(grow_reserve(&g->item, n, sizeof(uint32_t)), err);
    uint32_t *row_slot = g->row_slot.p, *begin = g->begin.p, *item = g->item.p;

    /* Number the rows; begin[r + 2] counts their items for now. */
    begin[0] = begin[1] = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t r = group_find(g, slot[i]);
        if (r == GROUP_NONE) {
            r = g->n_rows++;
            g->index[slot[i]] = r;
            row_slot[r] = slot[i];
            begin[r + 2] = 0;
        }
        begin[r + 2]++;
    }
    for (uint32_t r = 0; r < g->n_rows; r++) begin[r + 2] += begin[r + 1];
    /* begin[r + 1] is where row r's next item goes; in the end it is where row r + 1 starts. */
    for (uint32_t i = 0; i < n; i++) item[begin[g->index[slot[i]] + 1]++] = i;
err:
    return st;
}
