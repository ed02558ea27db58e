/* proto/codec.c - headers and small messages, and the door to the generated code. */
#include "proto/codec.h"

#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "proto/codec_impl.h"
#include "proto/embserver.pb-c.h"
#include "proto/oracle.pb-c.h"

_Static_assert((int)ROLE_ORACLE == CHANTER__ROLE__ROLE_ORACLE &&
               (int)ROLE_TOOL == CHANTER__ROLE__ROLE_TOOL, "roles have their numbers on the wire");

uint64_t codec_u64(const uint8_t *p, uint32_t i)
{
    uint64_t v;
    memcpy(&v, p + (size_t)i * sizeof(v), sizeof(v));
    return v;
}

/* --- generated code ------------------------------------------------------------------------ */

static void *alloc_noting(void *failed, size_t bytes)
{
    void *p = mem_alloc(1, bytes);
    if (p == NULL) *(bool *)failed = true;
    return p;
}

static void free_plain(void *unused, void *p)
{
    mem_free(p);
}

enum st codec_pack(const ProtobufCMessage *m, size_t extra, struct msg **out)
{
    size_t n = protobuf_c_message_get_packed_size(m), cap;
    if (__builtin_add_overflow(n, extra, &cap)) cap = SIZE_MAX; /* msg_open says no */
    struct msg *msg;
    enum st st = msg_open(cap, &msg);
    if (st != ST_OK) return st;
    msg->len = protobuf_c_message_pack(m, msg->data);
    *out = msg;
    return ST_OK;
}

/* Field of `m` that holds pointer number i of a message field. */
static const ProtobufCMessage *child(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                                     size_t i)
{
    const void *at = (const char *)m + f->offset;
    const ProtobufCMessage *const *p = at;
    return f->label == PROTOBUF_C_LABEL_REPEATED ? ((const ProtobufCMessage *const *)*p)[i] : *p;
}

/* Nothing in `m` that this version does not know? Recursion: as deep as the .proto files nest. */
static bool all_known(const ProtobufCMessage *m)
{
    if (m->n_unknown_fields != 0) return false;
    for (unsigned k = 0; k < m->descriptor->n_fields; k++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[k];
        if (f->type != PROTOBUF_C_TYPE_MESSAGE) continue;
        size_t n = 1;
        if (f->label == PROTOBUF_C_LABEL_REPEATED)
            memcpy(&n, (const char *)m + f->quantifier_offset, sizeof(n));
        for (size_t i = 0; i < n; i++) {
            const ProtobufCMessage *c = child(m, f, i);
            if (c != NULL && !all_known(c)) return false;
        }
    }
    return true;
}

Chanter__Header codec_header(const struct rpc_header *h)
{
    Chanter__Header m = CHANTER__HEADER__INIT;
    m.job = h->job;
    m.attempt = h->attempt;
    m.role = (Chanter__Role)h->role;
    m.rank = h->rank;
    m.iteration = h->iteration;
    return m;
}

static enum st header_get(const ProtobufCMessage *m, struct rpc_header *out)
{
    const Chanter__Header *h = (const void *)child(m, &m->descriptor->fields[0], 0);
    if (h == NULL) return ST_BADMSG;
    int role = (int)h->role;
    if (role < (int)ROLE_ORACLE || role > (int)ROLE_TOOL) return ST_BADMSG;
    *out = (struct rpc_header){.job = h->job, .attempt = h->attempt, .role = (enum rpc_role)role,
                               .rank = h->rank, .iteration = h->iteration};
    return ST_OK;
}

enum st codec_unpack(const ProtobufCMessageDescriptor *type, const uint8_t *p, size_t n,
                     struct rpc_header *h, ProtobufCMessage **out)
{
    bool no_memory = false;
    ProtobufCAllocator heap = {alloc_noting, free_plain, &no_memory};
    ProtobufCMessage *m = protobuf_c_message_unpack(type, &heap, n, p);
    if (no_memory) {
        codec_free(m);
        return log_fail(ST_NOMEM, NULL, "no memory to read a message of %zu bytes", n);
    }
    if (m == NULL) return ST_BADMSG;
    enum st st = all_known(m) ? header_get(m, h) : ST_BADMSG;
    if (st == ST_OK) *out = m;
    else codec_free(m);
    return st;
}

void codec_free(ProtobufCMessage *m)
{
    ProtobufCAllocator heap = {alloc_noting, free_plain, NULL};
    if (m != NULL) protobuf_c_message_free_unpacked(m, &heap);
}

/* --- small messages ------------------------------------------------------------------------ */

enum st plain_encode(const struct rpc_header *h, struct msg **out)
{
    Chanter__Header head = codec_header(h);
    Chanter__Plain m = CHANTER__PLAIN__INIT;
    m.header = &head;
    return codec_pack(&m.base, 0, out);
}

enum st plain_decode(const uint8_t *p, size_t n, struct rpc_header *h)
{
    ProtobufCMessage *m;
    enum st st = codec_unpack(&chanter__plain__descriptor, p, n, h, &m);
    if (st == ST_OK) codec_free(m);
    return st;
}

enum st plan_request_encode(const struct rpc_header *h, uint64_t seq, struct msg **out)
{
    Chanter__Header head = codec_header(h);
    Chanter__PlanRequest m = CHANTER__PLAN_REQUEST__INIT;
    m.header = &head;
    m.seq = seq;
    return codec_pack(&m.base, 0, out);
}

enum st plan_request_decode(const uint8_t *p, size_t n, struct rpc_header *h, uint64_t *seq)
{
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__plan_request__descriptor, p, n, h, &base);
    if (st != ST_OK) return st;
    *seq = ((const Chanter__PlanRequest *)base)->seq;
    codec_free(base);
    return ST_OK;
}

enum st digest_reply_encode(const struct rpc_header *h, struct digest d, struct msg **out)
{
    Chanter__Header head = codec_header(h);
    Chanter__DigestReply m = CHANTER__DIGEST_REPLY__INIT;
    m.header = &head;
    m.lo = d.lo;
    m.hi = d.hi;
    return codec_pack(&m.base, 0, out);
}

enum st digest_reply_decode(const uint8_t *p, size_t n, struct rpc_header *h, struct digest *d)
{
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__digest_reply__descriptor, p, n, h, &base);
    if (st != ST_OK) return st;
    const Chanter__DigestReply *m = (const Chanter__DigestReply *)base;
    *d = (struct digest){.lo = m->lo, .hi = m->hi};
    codec_free(base);
    return ST_OK;
}

enum st export_request_encode(const struct rpc_header *h, const struct export_request *e,
                              struct msg **out)
{
    Chanter__Header head = codec_header(h);
    Chanter__ExportRequest m = CHANTER__EXPORT_REQUEST__INIT;
    m.header = &head;
    m.table = e->table;
    m.first = e->first;
    m.count = e->count;
    return codec_pack(&m.base, 0, out);
}

enum st export_request_decode(const uint8_t *p, size_t n, struct rpc_header *h,
                              struct export_request *out)
{
    ProtobufCMessage *base;
    enum st st = codec_unpack(&chanter__export_request__descriptor, p, n, h, &base);
    if (st != ST_OK) return st;
    const Chanter__ExportRequest *m = (const Chanter__ExportRequest *)base;
    *out = (struct export_request){.table = m->table, .first = m->first, .count = m->count};
    codec_free(base);
    return ST_OK;
}
