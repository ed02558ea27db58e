/* A message is one allocation: struct msg in the first 64 bytes, its data behind. */
#include "proto/msg.h"

#include "base/log.h"
#include "base/mem.h"

enum { HEAD_BYTES = 64 };
_Static_assert(sizeof(struct msg) <= HEAD_BYTES, "data starts behind struct msg");

enum st msg_open(size_t cap, struct msg **out)
{
    struct msg *m = cap > SIZE_MAX - HEAD_BYTES ? NULL : mem_alloc(1, HEAD_BYTES + cap);
    if (m == NULL) return log_fail(ST_NOMEM, NULL, "no memory for a message of %zu bytes", cap);
    m->data = (uint8_t *)m + HEAD_BYTES;
    m->len = 0;
    m->cap = cap;
    *out = m;
    return ST_OK;
}

void msg_close(struct msg *m)
{
    mem_free(m);
}
