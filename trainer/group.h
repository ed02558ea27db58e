/* trainer/group.h - brings together what belongs to one slot: a stable counting sort by slot, in
 * time linear in the items, with one u32 per cache slot as the only table (no hash map). */
#ifndef CHANTER_TRAINER_GROUP_H
#define CHANTER_TRAINER_GROUP_H

#include <stdint.h>

#include "base/grow.h"
#include "base/status.h"

struct group {
    uint64_t cap_slots;
    uint32_t *index;          /* [cap_slots] row number of a slot; see group_find */
    uint32_t n_rows;          /* distinct slots of the last group_by_slot, first seen first */
    struct grow row_slot;     /* u32 [n_rows] */
    struct grow begin;        /* u32 [n_rows + 1]: items of row r are item[begin[r]..begin[r+1]) */
    struct grow item;         /* u32 [n], ascending inside a row */
};

MUST_USE enum st group_init(struct group *g, uint64_t cap_slots);
void group_fini(struct group *g); /* {0} ok */

/* Group items 0..n-1 by slot[item] < cap_slots. */
MUST_USE enum st group_by_slot(struct group *g, const uint32_t *slot, uint32_t n);

enum { GROUP_NONE = UINT32_MAX };
/* Row number of a slot in the last grouping, or GROUP_NONE. */
static inline uint32_t group_find(const struct group *g, uint32_t slot)
{
    /* index[] is never cleared: an entry counts only if the row it names has this slot. */
    uint32_t r = g->index[slot];
    return r < g->n_rows && ((const uint32_t *)g->row_slot.p)[r] == slot ? r : (uint32_t)GROUP_NONE;
}
static inline const uint32_t *group_slots(const struct group *g) { return g->row_slot.p; }
static inline const uint32_t *group_begin(const struct group *g) { return g->begin.p; }
static inline const uint32_t *group_items(const struct group *g) { return g->item.p; }

#endif
