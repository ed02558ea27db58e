/* A chained hash table of fixed size, and a list in order of arrival. All waits are equally long,
 * so order of arrival is order of deadline. Parked fetches are bounded by what clients have in
 * flight (hundreds): the table never grows. */
#include "embserver/parking.h"

#include <stddef.h>

#include "base/check.h"
#include "base/mem.h"

enum { BUCKET_BITS = 12 };

struct parking {
    struct parked *oldest, *newest;
    struct parked *bucket[1 << BUCKET_BITS]; /* newest first */
};

enum st parking_open(struct parking **out)
{
    struct parking *k = mem_zalloc(1, sizeof(*k));
    if (k == NULL) return ST_NOMEM;
    *out = k;
    return ST_OK;
}

void parking_close(struct parking *k)
{
    if (k == NULL) return;
    CHECK(k->oldest == NULL, "whoever is parked has left");
    mem_free(k);
}

static struct parked **bucket_of(struct parking *k, uint64_t row_id)
{
    return &k->bucket[row_id * UINT64_C(0x9E3779B97F4A7C15) >> (64 - BUCKET_BITS)];
}

void parking_again(struct parking *k, struct parked *p)
{
    struct parked **head = bucket_of(k, p->row_id);
    p->next = *head;
    p->link = head;
    if (p->next != NULL) p->next->link = &p->next;
    *head = p;
}

static void leave_bucket(struct parked *p)
{
    if (p->link == NULL) return;
    *p->link = p->next;
    if (p->next != NULL) p->next->link = p->link;
    p->link = NULL;
}

void parking_add(struct parking *k, struct parked *p)
{
    CHECK(k->newest == NULL || k->newest->deadline_ns <= p->deadline_ns, "all wait equally long");
    p->newer = NULL;
    p->older = k->newest;
    if (p->older != NULL) p->older->newer = p;
    else k->oldest = p;
    k->newest = p;
    parking_again(k, p);
}

struct parked *parking_take(struct parking *k, uint64_t row_id, int64_t version)
{
    struct parked *taken = NULL;
    for (struct parked *p = *bucket_of(k, row_id), *next; p != NULL; p = next) {
        next = p->next;
        if (p->row_id != row_id || p->need > version) continue;
        leave_bucket(p);
        p->next = taken; /* turns newest first into oldest first */
        taken = p;
    }
    return taken;
}

void parking_leave(struct parking *k, struct parked *p)
{
    leave_bucket(p);
    if (p->older != NULL) p->older->newer = p->newer;
    else k->oldest = p->newer;
    if (p->newer != NULL) p->newer->older = p->older;
    else k->newest = p->older;
}

struct parked *parking_oldest(const struct parking *k)
{
    return k->oldest;
}
