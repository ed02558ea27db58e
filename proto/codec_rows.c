/* proto/codec_rows.c - the bulk messages. Generated code writes and reads their small fields, the
 * head; the lists behind it are framed here, so that a row is copied once on each side:
 *
 *   [head: header, shard, ...] [tag len | row ids] [tag len | versions] [tag len | rows]
 *
 * The bytes are those of the generated packer: an empty list is not there at all. */
#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "proto/codec.h"
#include "proto/codec_impl.h"
#include "proto/embserver.pb-c.h"

enum { MAX_LISTS = 3 };
enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

/* Field number of each message's first list; the others follow it. */
enum { FETCH_REQUEST_LISTS = 4, FETCH_REPLY_LISTS = 3, WRITE_BACK_LISTS = 4 };

/* --- writing ------------------------------------------------------------------------------- */

static size_t varint_put(uint8_t *p, uint64_t v)
{
    size_t n = 0;
    for (; v >= 0x80; v >>= 7) p[n++] = (uint8_t)(v | 0x80);
    p[n++] = (uint8_t)v;
    return n;
}

/* Tag and length in front of a list of `bytes`, as many bytes as returned; an empty list has none.
 * Field numbers are below 16: a tag is one byte. */
static size_t frame_put(uint8_t *p, uint32_t field, size_t bytes)
{
    if (bytes == 0) return 0;
    p[0] = (uint8_t)(field << 3 | WIRE_BYTES);
    return 1 + varint_put(p + 1, bytes);
}

/* A message of `head` and n lists of bytes[i], the first with number `first`; list[i] = where the
 * caller writes it. */
static enum st lists_begin(const ProtobufCMessage *head, uint32_t first, const size_t *bytes,
                           uint32_t n, struct msg **out, uint8_t **list)
{
    size_t extra = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t frame[16];
        extra += frame_put(frame, first + i, bytes[i]);
        if (__builtin_add_overflow(extra, bytes[i], &extra)) extra = SIZE_MAX / 2;
    }
    struct msg *m;
    enum st st = codec_pack(head, extra, &m);
    if (st != ST_OK) return st;
    for (uint32_t i = 0; i < n; i++) {
        m->len += frame_put(m->data + m->len, first + i, bytes[i]);
        list[i] = m->data + m->len;
        m->len += bytes[i];
    }
    *out = m;
    return ST_OK;
}

static void list_copy(uint8_t *to, const void *from, size_t bytes)
{
    if (bytes > 0) memcpy(to, from, bytes); /* from may be NULL when there is nothing */
}

static bool rows_bytes(uint32_t n, uint32_t row_floats, size_t *out)
{
    size_t floats;
    return !__builtin_mul_overflow((size_t)n, (size_t)row_floats, &floats) &&
           !__builtin_mul_overflow(floats, sizeof(float), out);
}

static enum st rows_too_large(uint32_t n, uint32_t row_floats)
{
    return log_fail(ST_NOMEM, NULL, "%u rows of %u floats do not fit in a message", n, row_floats);
}

enum st fetch_request_encode(const struct rpc_header *h, uint32_t shard, uint8_t owned,
                             const uint64_t *row_id, const int64_t *need, uint32_t n,
                             struct msg **out)
{
    Chanter__Header head = codec_header(h);
    Chanter__FetchRequest m = CHANTER__FETCH_REQUEST__INIT;
    m.header = &head;
    m.shard = shard;
    m.owned = owned != 0;
    const size_t bytes[] = {n * sizeof(*row_id), n * sizeof(*need)};
    uint8_t *list[MAX_LISTS];
    enum st st = lists_begin(&m.base, FETCH_REQUEST_LISTS, bytes, 2, out, list);
    if (st != ST_OK) return st;
    list_copy(list[0], row_id, bytes[0]);
    list_copy(list[1], need, bytes[1]);
    return ST_OK;
}

enum st fetch_reply_begin(const struct rpc_header *h, uint32_t n, uint32_t row_floats,
                          struct msg **out, uint8_t **version, uint8_t **rows)
{
    Chanter__Header head = codec_header(h);
    Chanter__FetchReply m = CHANTER__FETCH_REPLY__INIT;
    m.header = &head;
    m.row_floats = row_floats;
    size_t bytes[] = {n * sizeof(int64_t), 0};
    if (!rows_bytes(n, row_floats, &bytes[1])) return rows_too_large(n, row_floats);
    uint8_t *list[MAX_LISTS];
    enum st st = lists_begin(&m.base, FETCH_REPLY_LISTS, bytes, 2, out, list);
    if (st != ST_OK) return st;
    *version = list[0];
    *rows = list[1];
    return ST_OK;
}

enum st write_back_begin(const struct rpc_header *h, uint32_t shard, const uint64_t *row_id,
                         const int64_t *version, uint32_t n, uint32_t row_floats,
                         struct msg **out, uint8_t **rows)
{
    Chanter__Header head = codec_header(h);
    Chanter__WriteBackRequest m = CHANTER__WRITE_BACK_REQUEST__INIT;
    m.header = &head;
    m.shard = shard;
    m.row_floats = row_floats;
    size_t bytes[] = {n * sizeof(*row_id), n * sizeof(*version), 0};
    if (!rows_bytes(n, row_floats, &bytes[2])) return rows_too_large(n, row_floats);
    uint8_t *list[MAX_LISTS];
    enum st st = lists_begin(&m.base, WRITE_BACK_LISTS, bytes, 3, out, list);
    if (st != ST_OK) return st;
    list_copy(list[0], row_id, bytes[0]);
    list_copy(list[1], version, bytes[1]);
    *rows = list[2];
    return ST_OK;
}

/* --- reading ------------------------------------------------------------------------------- */

struct span { const uint8_t *p; size_t bytes; };

/* Moves past a varint; false: cut off, or longer than 64 bits. */
static bool varint_get(struct span *s, uint64_t *out)
{
    uint64_t v = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (s->bytes == 0) return false;
        uint8_t b = *s->p++;
        s->bytes--;
        v |= (uint64_t)(b & 0x7f) << shift;
        if (b < 0x80) {
            *out = v;
            return true;
        }
    }
    return false;
}

/* Moves past the value of a field; *value: its bytes, without the length in front. */
static bool value_get(struct span *s, unsigned wire, struct span *value)
{
    uint64_t n, unused;
    *value = *s;
    switch (wire) {
    case WIRE_VARINT: return varint_get(s, &unused);
    case WIRE_64: n = 8; break;
    case WIRE_32: n = 4; break;
    case WIRE_BYTES:
        if (!varint_get(s, &n)) return false;
        break;
    default: return false;
    }
    if (n > s->bytes) return false;
    *value = (struct span){s->p, (size_t)n};
    s->p += n;
    s->bytes -= (size_t)n;
    return true;
}

/* Cuts a message into its head, fields below `first`, and n lists: each at most once, in order, and
 * nothing behind them. A list that is not there is empty. */
static bool lists_find(const uint8_t *p, size_t bytes, uint32_t first, uint32_t n, size_t *head,
                       struct span *list)
{
    struct span rest = {p, bytes}, value;
    uint64_t next = first; /* smallest number that a list may still have */
    *head = 0;
    for (uint32_t i = 0; i < n; i++) list[i] = (struct span){p, 0};
    while (rest.bytes > 0) {
        uint64_t tag;
        if (!varint_get(&rest, &tag)) return false;
        unsigned wire = tag & 7;
        uint64_t field = tag >> 3;
        if (!value_get(&rest, wire, &value)) return false;
        if (field < first && next == first) {
            *head = bytes - rest.bytes;
            continue;
        }
        if (field < next || field >= first + n || wire != WIRE_BYTES) return false;
        list[field - first] = value;
        next = field + 1;
    }
    return true;
}

/* Count of 8-byte items; false unless all of lists [0, n) hold the same whole number of them. */
static bool lists_count(const struct span *list, uint32_t n, uint32_t *out)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i].bytes != list[0].bytes) return false;
    if (list[0].bytes % 8 != 0 || list[0].bytes / 8 > UINT32_MAX) return false;
    *out = (uint32_t)(list[0].bytes / 8);
    return true;
}

static bool rows_fit(struct span rows, uint32_t n, uint32_t row_floats)
{
    size_t bytes;
    return rows_bytes(n, row_floats, &bytes) && bytes == rows.bytes;
}

enum st fetch_request_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                             struct fetch_request *out)
{
    size_t head;
    struct span list[2];
    uint32_t count;
    if (!lists_find(p, n, FETCH_REQUEST_LISTS, 2, &head, list)) return ST_BADMSG;
    if (!lists_count(list, 2, &count)) return ST_BADMSG;
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__fetch_request__descriptor, p, head, h, &base);
    if (st != ST_OK) return st;
    const Chanter__FetchRequest *m = (const Chanter__FetchRequest *)base;
    *out = (struct fetch_request){.shard = m->shard, .n = count, .owned = m->owned != 0,
                                  .row_id = list[0].p, .need = list[1].p};
    codec_free(base);
    return ST_OK;
}

enum st fetch_reply_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                           struct fetch_reply *out)
{
    size_t head;
    struct span list[2];
    uint32_t count;
    if (!lists_find(p, n, FETCH_REPLY_LISTS, 2, &head, list)) return ST_BADMSG;
    if (!lists_count(list, 1, &count)) return ST_BADMSG;
    struct rpc_header header;
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__fetch_reply__descriptor, p, head, &header, &base);
    if (st != ST_OK) return st;
    uint32_t row_floats = ((const Chanter__FetchReply *)base)->row_floats;
    codec_free(base);
    if (!rows_fit(list[1], count, row_floats)) return ST_BADMSG;
    *h = header;
    *out = (struct fetch_reply){.n = count, .row_floats = row_floats, .version = list[0].p,
                                .rows = list[1].p};
    return ST_OK;
}

enum st write_back_decode(const uint8_t *p, size_t n, struct rpc_header *h, struct write_back *out)
{
    size_t head;
    struct span list[3];
    uint32_t count;
    if (!lists_find(p, n, WRITE_BACK_LISTS, 3, &head, list)) return ST_BADMSG;
    if (!lists_count(list, 2, &count)) return ST_BADMSG;
    struct rpc_header header;
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__write_back_request__descriptor, p, head, &header, &base);
    if (st != ST_OK) return st;
    const Chanter__WriteBackRequest *m = (const Chanter__WriteBackRequest *)base;
    struct write_back w = {.shard = m->shard, .n = count, .row_floats = m->row_floats,
                           .row_id = list[0].p, .version = list[1].p, .rows = list[2].p};
    codec_free(base);
    if (!rows_fit(list[2], w.n, w.row_floats)) return ST_BADMSG;
    *h = header;
    *out = w;
    return ST_OK;
}
