/* Boundary i, between iterations i-1 and i: who leaves, who comes, who owns it, in which slot.
 *
 *   retire     copies of iteration i-1 go; a row used there stays iff its next use is at most
 *              i-1 + L (window rule; with L = 0 nothing stays)
 *   forget     evictions so old that their version need not be known
 *   count      who uses the rows of batch i
 *   make room  a trainer holds the rows that it uses at i and the rows that it owns. Too many: the
 *              owned rows with the farthest next use go (Belady), then owned rows that only others
 *              use at i: they come back through the server, to an owner that uses them. What is
 *              left is what the trainer itself uses, and window_push has checked that it fits.
 *   place      owners for rows that are not live, slots for all users
 *
 * All choices go by batch order, rank and counts; none by addresses or hashes. */
#include "oracle/planner_internal.h"

#include "base/check.h"

/* --- slots ---------------------------------------------------------------------------------- */

static enum st slot_take(struct planner *p, uint32_t t, uint32_t *slot)
{
    struct cache *c = &p->cache[t];
    if (c->n_free > 0) {
        *slot = c->free[--c->n_free];
        return ST_OK;
    }
    CHECK(c->n_slots < p->cfg.cap_rows, "room was made before slots are given out");
    uint32_t *v = room(c->free, &c->cap_free, c->n_slots + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    c->free = v; /* room to take all slots back */
    *slot = c->n_slots++;
    return ST_OK;
}

static void slot_put(struct planner *p, uint32_t t, uint32_t slot)
{
    struct cache *c = &p->cache[t];
    c->free[c->n_free++] = slot;
}

/* --- leaving -------------------------------------------------------------------------------- */

static void note_move(struct row *r, int64_t i)
{
    if (r->moved_at == i) return; /* evicted and fetched again at one boundary */
    r->moved_at = i;
    r->old_owner = r->owner;
    r->old_slot = r->slot;
}

/* Which trainer's plan has the write-back of a row that leaves after iteration i-1. */
static uint32_t writer_of(const struct planner *p, int64_t i, const struct row *r,
                          const struct placed *was, uint32_t *slot)
{
    *slot = r->slot;
#ifdef BUG_replica_written_back
    uint64_t others = was == NULL ? 0 : was->users & ~bit(r->owner);
    if (others != 0) {
        uint32_t t = (uint32_t)__builtin_ctzll(others);
        *slot = placed_slot(&p->placement[(i - 1) & 1], was, t);
        return t;
    }
#else
    (void)p, (void)i, (void)was;
#endif
    return r->owner;
}

/* `was`: its place in iteration i-1, NULL where it does not matter. */
static enum st evict(struct planner *p, int64_t i, uint32_t row, const struct placed *was)
{
    struct row *r = &p->row[row];
    uint32_t slot, writer = writer_of(p, i, r, was, &slot);
    struct item_list *l = &p->placement[i & 1].evict[writer];
    struct item *v = room(l->v, &l->cap, l->n + 1, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    l->v = v;
    v[l->n++] = (struct item){.row_id = r->id, .version = r->last_use, .slot = slot};

    note_move(r, i);
    slot_put(p, r->owner, r->slot);
    p->cache[r->owner].owned--;
    p->live--;
    r->owner = NO_OWNER;
    r->slot = NONE;
    r->written = r->last_use;
    r->evicted_at = i;
    rows_remember(p, row);
    return ST_OK;
}

static void bucket_append(struct planner *p, uint32_t row)
{
    struct row *r = &p->row[row];
    struct bucket *b = bucket_at(p, r->owner, r->next_use);
    r->next = NONE;
    if (b->first == NONE) b->first = row;
    else p->row[b->last].next = row;
    b->last = row;
}

static enum st retire(struct planner *p, int64_t i)
{
    const struct batch *b = batch_at(p, i - 1);
    const struct placement *m = &p->placement[(i - 1) & 1];
    for (uint32_t k = 0; k < b->n_use; k++) {
        uint32_t row = b->use[k].row, next_in = b->use[k].next_in;
        struct row *r = &p->row[row];
        const struct placed *was = &m->row[k];
        for (uint64_t u = was->users & ~bit(was->owner); u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u);
            slot_put(p, t, placed_slot(m, was, t));
        }
        r->last_use = i - 1;
        r->next_use = next_in == 0 ? NO_USE : i - 1 + next_in;
        if (next_in == 0 || next_in > p->cfg.lookahead) {
            enum st st = evict(p, i, row, was);
            if (st != ST_OK) return st;
        } else if (r->next_use > i) {
            bucket_append(p, row);
        }
    }
    return ST_OK;
}

/* --- capacity ------------------------------------------------------------------------------- */

/* Takes out the row of trainer t that is used last among those used in (i, *horizon]. */
static uint32_t farthest(struct planner *p, uint32_t t, int64_t i, int64_t *horizon)
{
    for (; *horizon > i; --*horizon) {
        struct bucket *b = bucket_at(p, t, *horizon);
        uint32_t row = b->first;
        if (row == NONE) continue;
        b->first = p->row[row].next;
        return row;
    }
    return NONE;
}

/* The next row of batch i that trainer t owns and does not use. */
static uint32_t used_elsewhere(const struct planner *p, uint32_t t, int64_t i, uint32_t *k)
{
    const struct batch *b = batch_at(p, i);
    const struct placed *placed = p->placement[i & 1].row;
    for (; *k < b->n_use; ++*k) {
        uint32_t row = b->use[*k].row;
        if (p->row[row].owner == t && (placed[*k].users & bit(t)) == 0) return row;
    }
    return NONE;
}

static enum st make_room(struct planner *p, int64_t i, uint32_t t, uint64_t rows)
{
    int64_t horizon = i - 1 + (int64_t)p->cfg.lookahead;
    uint32_t k = 0;
    for (; rows > p->cfg.cap_rows; rows--) {
        uint32_t row = farthest(p, t, i, &horizon);
        if (row == NONE) row = used_elsewhere(p, t, i, &k);
        CHECK(row != NONE, "a batch that was accepted fits");
        enum st st = evict(p, i, row, NULL);
        if (st != ST_OK) return st;
    }
    if (rows > p->stats.peak_rows) p->stats.peak_rows = rows;
    return ST_OK;
}

/* Users of the rows of batch i. rows[t]: what trainer t would hold if nothing else left. */
static enum st count(struct planner *p, int64_t i, uint64_t rows[MAX_TRAINERS])
{
    const struct batch *b = batch_at(p, i);
    struct placement *m = &p->placement[i & 1];
    struct placed *v = room(m->row, &m->cap_row, b->n_use, sizeof(*v));
    if (v == NULL) return ST_NOMEM;
    m->row = v;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) {
        rows[t] = p->cache[t].owned;
        *bucket_at(p, t, i) = (struct bucket){NONE, NONE}; /* they are used now */
    }
    for (uint32_t k = 0; k < b->n_use; k++) {
        uint32_t owner = p->row[b->use[k].row].owner;
        v[k] = (struct placed){.users = users_of(p, b->use[k].slices)};
        for (uint64_t u = v[k].users; u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u);
            if (t != owner) rows[t]++;
        }
    }
    return ST_OK;
}

/* --- coming --------------------------------------------------------------------------------- */

/* A user that is also a user at the next use moves least; then the one that owns fewest rows. The
 * next use counts only where every caller must have pushed it by now. */
static uint8_t choose_owner(const struct planner *p, int64_t i, const struct use *use,
                            uint64_t users)
{
    uint32_t known = p->cfg.lookahead == 0 ? 0 : p->cfg.lookahead - 1; /* batches after i */
    if (use->next_in != 0 && use->next_in <= known) {
        const struct batch *b = batch_at(p, i + use->next_in);
        uint64_t again = users & users_of(p, b->use[use->next_index].slices);
        if (again != 0) users = again;
    }
    uint32_t best = (uint32_t)__builtin_ctzll(users);
    for (users &= users - 1; users != 0; users &= users - 1) {
        uint32_t t = (uint32_t)__builtin_ctzll(users);
        if (p->cache[t].owned < p->cache[best].owned) best = t;
    }
    return (uint8_t)best;
}

static void adopt(struct planner *p, int64_t i, const struct use *use, struct placed *at)
{
    struct row *r = &p->row[use->row];
    at->fetched = true;
    at->need = r->written;
    note_move(r, i);
    if (r->remembered) rows_recall(p, use->row);
    r->owner = choose_owner(p, i, use, at->users);
    p->cache[r->owner].owned++;
    p->live++;
}

static enum st place(struct planner *p, int64_t i)
{
    const struct batch *b = batch_at(p, i);
    struct placement *m = &p->placement[i & 1];
    for (uint32_t k = 0; k < b->n_use; k++) {
        struct row *r = &p->row[b->use[k].row];
        struct placed *at = &m->row[k];
        if (r->owner == NO_OWNER) adopt(p, i, &b->use[k], at);
        uint32_t *v = room(m->copy, &m->cap_copy, m->n_copy + MAX_TRAINERS, sizeof(*v));
        if (v == NULL) return ST_NOMEM;
        m->copy = v;
        at->first_copy = m->n_copy;
        for (uint64_t u = at->users; u != 0; u &= u - 1) {
            uint32_t t = (uint32_t)__builtin_ctzll(u), slot = r->slot;
            enum st st = t == r->owner && !at->fetched ? ST_OK : slot_take(p, t, &slot);
            if (st != ST_OK) return st;
            if (t == r->owner) r->slot = slot;
            v[m->n_copy++] = slot;
        }
        at->owner = r->owner;
        at->owner_slot = r->slot;
    }
    return ST_OK;
}

enum st boundary_run(struct planner *p, int64_t i)
{
    enum st st = ST_OK;
    struct placement *m = &p->placement[i & 1];
    m->n_copy = 0;
    for (uint32_t t = 0; t < p->cfg.n_trainers; t++) m->evict[t].n = 0;
    if (i > 0) TRY(retire(p, i), done);
    rows_forget(p, i);
    if (i < p->pushed) {
        uint64_t rows[MAX_TRAINERS];
        TRY(count(p, i, rows), done);
        for (uint32_t t = 0; t < p->cfg.n_trainers; t++) TRY(make_room(p, i, t, rows[t]), done);
        TRY(place(p, i), done);
    }
    CHECK(i < p->pushed || p->live == 0, "a live row has a next use");
    p->boundaries = i + 1;

done:
    return st;
}
