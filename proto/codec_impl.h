/* proto/codec_impl.h - what codec.c, codec_rows.c and codec_plan.c share; the only files that see
 * generated code. Every message has its Header as first field. */
#ifndef CHANTER_PROTO_CODEC_IMPL_H
#define CHANTER_PROTO_CODEC_IMPL_H

#include <protobuf-c/protobuf-c.h>

#include "proto/codec.h"
#include "proto/header.pb-c.h"

/* Lists of numbers are copied, not converted. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed lists are little endian");

Chanter__Header codec_header(const struct rpc_header *h);
/* `m` as bytes, with room for `extra` bytes behind them. */
MUST_USE enum st codec_pack(const ProtobufCMessage *m, size_t extra, struct msg **out);
/* Strict: ST_BADMSG, nothing logged, also for a field that we do not know, at any depth, and for a
 * header that is missing or has no role. *out: the caller's to codec_free. */
MUST_USE enum st codec_unpack(const ProtobufCMessageDescriptor *type, const uint8_t *p, size_t n,
                              struct rpc_header *h, ProtobufCMessage **out);
void codec_free(ProtobufCMessage *m);

#endif
