/* Everything the planner keeps as a running number or a list, counted again the slow way. */
#include "oracle/planner_internal.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

/* Calls `see` for every known row. The order is the hash map's: nothing here depends on it. */
static void each_row(const struct planner *p, void (*see)(const struct planner *, uint32_t, void *),
                     void *ctx)
{
    for (uint32_t c = 0; c < p->index.cap; c++)
        if (p->index.cell[c].value != NONE) see(p, p->index.cell[c].value, ctx);
}

struct tally { uint32_t n, live, remembered, owned[MAX_TRAINERS]; };

static void tally_row(const struct planner *p, uint32_t row, void *ctx)
{
    struct tally *y = ctx;
    const struct row *r = &p->row[row];
    CHECK(idmap_get(&p->index, r->id) == row, "a row is found under its id");
    CHECK(r->owner != NO_OWNER || r->remembered || r->next_use != NO_USE,
          "a row is known for a reason");
    CHECK(r->owner == NO_OWNER || !r->remembered, "a live row is not remembered as evicted");
    CHECK((r->owner == NO_OWNER) == (r->slot == NONE), "live: owner and slot");
    y->n++;
    y->remembered += r->remembered;
    if (r->owner == NO_OWNER) return;
    y->live++;
    y->owned[r->owner]++;
}

static void check_remembered(const struct planner *p, uint32_t n)
{
    int64_t before = -1;
    uint32_t prev = NONE;
    for (uint32_t row = p->forget_first; row != NONE; row = p->row[row].next, n--) {
        const struct row *r = &p->row[row];
        CHECK(n > 0 && r->remembered && r->prev == prev, "the list holds the remembered rows");
        CHECK(r->evicted_at >= before, "in order of eviction");
        CHECK(r->written >= 0 && r->written < r->evicted_at, "written before it left");
        before = r->evicted_at;
        prev = row;
    }
    CHECK(n == 0 && p->forget_last == prev, "the list holds all remembered rows");
}

/* The chain of a row's uses runs through the window, ascending, from next_use to tail_use. A row
 * of an iteration that was placed but not yet retired starts at that iteration. */
static void check_uses(const struct planner *p)
{
    for (int64_t i = p->pulled; i < p->pushed; i++) {
        const struct batch *b = batch_at(p, i);
        for (uint32_t k = 0; k < b->n_use; k++) {
            const struct use *u = &b->use[k];
            const struct row *r = &p->row[u->row];
            CHECK(r->next_use <= i && r->tail_use >= i, "a use lies between first and last");
            CHECK((u->next_in == 0) == (r->tail_use == i), "the chain ends at the last use");
            CHECK(u->next_in != 0 || r->tail_index == k, "the last use is where the row says");
            if (u->next_in == 0) continue;
            const struct batch *next = batch_at(p, i + u->next_in);
            CHECK(next->use[u->next_index].row == u->row, "the chain stays with its row");
        }
    }
}

/* A live row that is not used at the newest boundary's iteration is in the bucket of its owner and
 * next use; n: how many there are. */
static void check_buckets(const struct planner *p, uint32_t n)
{
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++)
        for (uint32_t at = 0; at <= p->cfg.lookahead; at++) {
            const struct bucket *b = bucket_at(p, t, at);
            for (uint32_t row = b->first; row != NONE; row = p->row[row].next, n--) {
                const struct row *r = &p->row[row];
                CHECK(n > 0 && r->owner == t && bucket_at(p, t, r->next_use) == b,
                      "a bucket has one owner and one next use");
                CHECK(r->next_use >= p->boundaries, "rows used now are in no bucket");
                CHECK(r->next != NONE || b->last == row, "a bucket knows its last row");
            }
        }
    CHECK(n == 0, "every waiting row is in a bucket");
}

static void take_slot(const struct planner *p, char *taken, uint32_t t, uint32_t slot)
{
    CHECK(slot < p->cache[t].n_slots && !taken[slot], "a slot holds one row");
    taken[slot] = 1;
}

struct slots_of { uint32_t t; char *taken; };

static void take_owned(const struct planner *p, uint32_t row, void *ctx)
{
    const struct slots_of *s = ctx;
    if (p->row[row].owner == s->t) take_slot(p, s->taken, s->t, p->row[row].slot);
}

/* Trainer t's slots are free, or hold a row it owns, or a copy for the newest iteration. */
static void check_slots(const struct planner *p, uint32_t t)
{
    const struct cache *c = &p->cache[t];
    char *taken = mem_zalloc(c->n_slots, 1);
    CHECK(taken != NULL, "memory for a recount");
    CHECK(c->n_slots <= p->cfg.cap_rows, "a cache has cap_rows slots");
    for (uint32_t k = 0; k < c->n_free; k++) take_slot(p, taken, t, c->free[k]);
    each_row(p, take_owned, &(struct slots_of){t, taken});
    int64_t i = p->boundaries - 1;
    const struct placement *m = &p->placement[i & 1];
    for (uint32_t k = 0; i >= 0 && i < p->pushed && k < batch_at(p, i)->n_use; k++)
        if ((m->row[k].users & bit(t)) != 0 && m->row[k].owner != t)
            take_slot(p, taken, t, placed_slot(m, &m->row[k], t));
    CHECK(memchr(taken, 0, c->n_slots) == NULL, "no slot is lost");
    mem_free(taken);
}

void planner_validate(const struct planner *p)
{
    if (p->broken) return;
    struct tally y = {0};
    each_row(p, tally_row, &y);
    CHECK(y.n == p->index.n && y.live == p->live, "known and live rows");
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        CHECK(y.owned[t] == p->cache[t].owned, "owned rows");
        check_slots(p, t);
    }
    uint32_t free_rows = 0;
    for (uint32_t row = p->free_row; row != NONE; row = p->row[row].next) free_rows++;
    CHECK(free_rows + y.n == p->n_row, "a record is known or free");
    check_remembered(p, y.remembered);
    check_uses(p);
    int64_t i = p->boundaries - 1;
    uint32_t used_now = i >= 0 && i < p->pushed ? batch_at(p, i)->n_use : 0;
    check_buckets(p, p->live - used_now);
}
