/* proto/msg.h - one message in memory: bytes that somebody owns. */
#ifndef CHANTER_PROTO_MSG_H
#define CHANTER_PROTO_MSG_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct msg {
    uint8_t *data; /* 64-byte aligned */
    size_t len, cap;
};

MUST_USE enum st msg_open(size_t cap, struct msg **out); /* len = 0 */
void msg_close(struct msg *m);                           /* NULL ok */

#endif
