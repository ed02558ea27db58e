/* config/doc.h - a configuration as text: entries SECTION.KEY = value or list of values, each with
 * the place that said it. Knows YAML; knows nothing of which keys there are and what they may be
 * (that is keys.h), so that one check sees a value the same way whether it came from the file,
 * from --set or from a default. */
#ifndef CHANTER_CONFIG_DOC_H
#define CHANTER_CONFIG_DOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    DOC_MAX_BYTES = 1 << 20,  /* of a file                                              */
    DOC_MAX_ENTRIES = 256,
    DOC_NAME_BYTES = 48,      /* longer names are cut: no known name is that long       */
    DOC_WHERE_BYTES = 512,
};

enum doc_origin { DOC_FILE, DOC_SET, DOC_DEFAULT };

struct doc_entry {
    char section[DOC_NAME_BYTES];
    char key[DOC_NAME_BYTES]; /* "": the section is there and has no keys               */
    enum doc_origin origin;
    uint32_t line;            /* DOC_FILE: from 1                                       */
    bool list;                /* written as a list, even of one value                   */
    bool plain;               /* written without quotes                                 */
    size_t n;                 /* values                                                 */
    char *text;               /* owns; n strings one behind the other, NUL after each   */
    size_t used, room;        /* bytes of text                                          */
};

struct doc {
    const char *path;         /* borrowed; for messages                                 */
    size_t n;
    struct doc_entry entry[DOC_MAX_ENTRIES]; /* in the order of the file, then of --set  */
};

/* Read and parse a file. Refuses, with a line: what is not YAML, is not two levels of names with
 * values or flat lists below, names a thing twice, or uses anchors, aliases or tags. */
MUST_USE enum st doc_open(const char *path, struct doc **out);
/* The same from memory; `path` is for messages. */
MUST_USE enum st doc_parse(const char *path, const char *text, size_t len, struct doc **out);
void doc_close(struct doc *d); /* NULL ok */

/* The entry, or NULL. */
struct doc_entry *doc_find(struct doc *d, const char *section, const char *key);
/* Set one value, in place of whatever was there. */
MUST_USE enum st doc_put(struct doc *d, const char *section, const char *key,
                         enum doc_origin origin, const char *value);
/* Set a value written in YAML: "[10, 20]" gives a list. */
MUST_USE enum st doc_put_yaml(struct doc *d, const char *section, const char *key,
                              enum doc_origin origin, const char *yaml);
/* "conf.yml:8", "--set model.dim", or the path alone. `e` may be NULL. Returns `out`. */
const char *doc_where(const struct doc *d, const struct doc_entry *e, char out[DOC_WHERE_BYTES]);

/* Words that mean "no value" in YAML when they stand without quotes. */
bool doc_null_word(const char *text);

/* All entries as YAML. *out is the caller's to mem_free; *len without the NUL behind it. */
MUST_USE enum st doc_emit(const struct doc *d, char **out, size_t *len);

/* For doc_yaml.c: make an entry (entries of one name replace each other unless both are of the
 * file) and append a value to it. */
MUST_USE enum st doc_add(struct doc *d, const char *section, const char *key,
                         enum doc_origin origin, uint32_t line, struct doc_entry **out);
MUST_USE enum st doc_append(struct doc_entry *e, const char *value, size_t len);
MUST_USE enum st doc_read_yaml(struct doc *d, const char *text, size_t len);

#endif
