/* The rows the planner knows of. Records sit in one array and are named by their place in it; a
 * record that is given back is reused first. */
#include "oracle/planner_internal.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void *room(void *p, uint32_t *cap, uint32_t need, size_t size)
{
    if (p != NULL && need <= *cap) return p;
    if (need > UINT32_MAX / 2) return NULL;
    uint32_t bigger = *cap < 16 ? 16 : *cap;
    while (bigger < need) bigger *= 2;
    void *q = mem_grow(p, *cap, bigger, size);
    if (q != NULL) *cap = bigger;
    return q;
}

/* --- idmap ---------------------------------------------------------------------------------- */

/* Finalizer of splitmix64 (Stafford's mix 13): neighbouring row numbers land far apart. */
static uint64_t mixed(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* The cell of `key`, or the empty one where it would go. cap > n. */
static uint32_t cell_of(const struct idmap *m, uint64_t key)
{
    uint32_t mask = m->cap - 1, at = (uint32_t)mixed(key) & mask;
    while (m->cell[at].value != NONE && m->cell[at].key != key) at = (at + 1) & mask;
    return at;
}

uint32_t idmap_get(const struct idmap *m, uint64_t key)
{
    return m->cap == 0 ? NONE : m->cell[cell_of(m, key)].value;
}

void idmap_clear(struct idmap *m)
{
    if (m->n > 0) memset(m->cell, 0xff, m->cap * sizeof(*m->cell));
    m->n = 0;
}

static enum st idmap_double(struct idmap *m)
{
    if (m->cap > UINT32_MAX / 2) return ST_NOMEM;
    struct idmap bigger = {NULL, m->cap == 0 ? 64 : m->cap * 2, m->n};
    bigger.cell = mem_alloc(bigger.cap, sizeof(*bigger.cell));
    if (bigger.cell == NULL) return ST_NOMEM;
    memset(bigger.cell, 0xff, bigger.cap * sizeof(*bigger.cell));
    for (uint32_t i = 0; i < m->cap; i++)
        if (m->cell[i].value != NONE) bigger.cell[cell_of(&bigger, m->cell[i].key)] = m->cell[i];
    mem_free(m->cell);
    *m = bigger;
    return ST_OK;
}

enum st idmap_put(struct idmap *m, uint64_t key, uint32_t value)
{
    if (m->n >= m->cap / 2) { /* at most half full: probes stay short */
        enum st st = idmap_double(m);
        if (st != ST_OK) return st;
    }
    m->cell[cell_of(m, key)] = (struct idmap_cell){key, value};
    m->n++;
    return ST_OK;
}

/* Close the gap: a later cell of the same run moves into it unless that would put it before its
 * home. */
void idmap_remove(struct idmap *m, uint64_t key)
{
    uint32_t mask = m->cap - 1, gap = cell_of(m, key);
    CHECK(m->cell[gap].value != NONE, "only known rows are removed");
    for (uint32_t at = (gap + 1) & mask; m->cell[at].value != NONE; at = (at + 1) & mask) {
        uint32_t home = (uint32_t)mixed(m->cell[at].key) & mask;
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        m->cell[gap] = m->cell[at];
        gap = at;
    }
    m->cell[gap].value = NONE;
    m->n--;
}

void idmap_fini(struct idmap *m)
{
    mem_free(m->cell);
}

/* --- records -------------------------------------------------------------------------------- */

static enum st record_take(struct planner *p, uint32_t *row)
{
    if (p->free_row != NONE) {
        *row = p->free_row;
        p->free_row = p->row[*row].next;
        return ST_OK;
    }
    struct row *v = room(p->row, &p->cap_row, p->n_row + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    p->row = v;
    *row = p->n_row++;
    return ST_OK;
}

static void record_put(struct planner *p, uint32_t row)
{
    p->row[row].next = p->free_row;
    p->free_row = row;
}

enum st rows_get(struct planner *p, uint64_t id, uint32_t *row)
{
    uint32_t at = idmap_get(&p->index, id);
    if (at == NONE) {
        enum st st = record_take(p, &at);
        if (st != ST_OK) return st;
        st = idmap_put(&p->index, id, at);
        if (st != ST_OK) {
            record_put(p, at);
            return st;
        }
        p->row[at] = (struct row){.id = id, .next_use = NO_USE, .last_use = -1,
                                  .written = PLAN_NEED_SETTLED, .evicted_at = -1, .moved_at = -1,
                                  .old_owner = NO_OWNER, .owner = NO_OWNER, .slot = NONE,
                                  .old_slot = NONE, .prev = NONE, .next = NONE};
    }
    *row = at;
    return ST_OK;
}

/* --- evictions remembered ------------------------------------------------------------------- */

void rows_remember(struct planner *p, uint32_t row)
{
    struct row *r = &p->row[row];
    r->remembered = true;
    r->prev = p->forget_last;
    r->next = NONE;
    if (r->prev == NONE) p->forget_first = row;
    else p->row[r->prev].next = row;
    p->forget_last = row;
}

void rows_recall(struct planner *p, uint32_t row)
{
    struct row *r = &p->row[row];
    r->remembered = false;
    if (r->prev == NONE) p->forget_first = r->next;
    else p->row[r->prev].next = r->next;
    if (r->next == NONE) p->forget_last = r->prev;
    else p->row[r->next].prev = r->prev;
    r->prev = r->next = NONE;
}

void rows_forget(struct planner *p, int64_t i)
{
    while (p->forget_first != NONE) {
        uint32_t row = p->forget_first;
        struct row *r = &p->row[row];
        if (r->evicted_at > i - (int64_t)p->cfg.remember) return;
        rows_recall(p, row);
        r->written = PLAN_NEED_SETTLED;
        if (r->next_use != NO_USE) continue; /* the window still waits for it */
        idmap_remove(&p->index, r->id);
        record_put(p, row);
    }
}
