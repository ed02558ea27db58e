/* Between YAML text and the entries of a doc, by libyaml's events: they carry the lines that
 * libcyaml does not hand out. The grammar is read top down, one function a level:
 *
 *   stream   = one document, a mapping of sections
 *   section  = NAME: mapping of keys (or nothing)
 *   key      = NAME: scalar | [scalar, ...]
 *
 * Whatever is deeper is refused at its first event, and anchors and aliases are refused wherever
 * they stand: memory and time stay in proportion to the file. */
#include "config/doc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

#include "base/log.h"
#include "base/mem.h"

struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the one under the finger; empty before the first */
    struct doc *doc;
    enum doc_origin origin;
};

static uint32_t event_line(const struct reader *r)
{
    return (uint32_t)r->event.start_mark.line + 1;
}

static const char *reader_where(const struct reader *r, uint32_t line, char out[DOC_WHERE_BYTES])
{
    snprintf(out, DOC_WHERE_BYTES, "%s:%" PRIu32, r->doc->path, line);
    return out;
}

/* What libyaml could not read. */
static enum st syntax_fail(const struct reader *r)
{
    const yaml_parser_t *p = &r->parser;
    char where[DOC_WHERE_BYTES];
    if (p->error == YAML_MEMORY_ERROR)
        return log_fail(ST_NOMEM, r->doc->path, "out of memory while reading YAML");
    if (p->error == YAML_READER_ERROR)
        return log_fail(ST_CONFIG, r->doc->path, "not readable as text: %s at byte %zu", p->problem,
                        p->problem_offset);
    return log_fail(ST_CONFIG, reader_where(r, (uint32_t)p->problem_mark.line + 1, where),
                    "not valid YAML: %s; check indentation, brackets and quotes", p->problem);
}

static enum st shape_fail(const struct reader *r, const char *what, const char *name)
{
    char where[DOC_WHERE_BYTES];
    reader_where(r, event_line(r), where);
    if (name == NULL) return log_fail(ST_CONFIG, where, "%s", what);
    return log_fail(ST_CONFIG, where, "'%s' %s", name, what);
}

static enum st refuse_decorations(const struct reader *r)
{
    const yaml_char_t *anchor = NULL, *tag = NULL;
    switch (r->event.type) {
    case YAML_ALIAS_EVENT: anchor = r->event.data.alias.anchor; break;
    case YAML_SCALAR_EVENT:
        anchor = r->event.data.scalar.anchor;
        tag = r->event.data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = r->event.data.sequence_start.anchor;
        tag = r->event.data.sequence_start.tag;
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = r->event.data.mapping_start.anchor;
        tag = r->event.data.mapping_start.tag;
        break;
    default: break;
    }
    if (anchor != NULL)
        return shape_fail(r, "anchors (&) and aliases (*) are not supported; write the value out",
                          NULL);
    if (tag != NULL) return shape_fail(r, "tags (!) are not supported", NULL);
    return ST_OK;
}

static enum st next(struct reader *r)
{
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) return syntax_fail(r);
    return refuse_decorations(r);
}

/* The scalar under the finger as a C string; NULL when there is none or it holds a NUL. */
static const char *scalar(const struct reader *r)
{
    if (r->event.type != YAML_SCALAR_EVENT) return NULL;
    const char *s = (const char *)r->event.data.scalar.value;
    return strlen(s) == r->event.data.scalar.length ? s : NULL;
}

static enum st append_scalar(struct reader *r, struct doc_entry *e)
{
    if (scalar(r) == NULL) return shape_fail(r, "is neither a value nor a flat list", e->key);
    return doc_append(e, scalar(r), r->event.data.scalar.length);
}

/* Finger on the value's first event; afterwards on its last. */
static enum st read_value(struct reader *r, struct doc_entry *e)
{
    e->list = r->event.type == YAML_SEQUENCE_START_EVENT;
    e->plain = r->event.type == YAML_SCALAR_EVENT &&
               r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    if (!e->list) return append_scalar(r, e);
    for (;;) {
        enum st st = next(r);
        if (st != ST_OK) return st;
        if (r->event.type == YAML_SEQUENCE_END_EVENT) return ST_OK;
        st = append_scalar(r, e);
        if (st != ST_OK) return st;
    }
}

/* Finger on KEY. */
static enum st read_key(struct reader *r, const char *section)
{
    if (scalar(r) == NULL) return shape_fail(r, "holds something that is not a key", section);
    struct doc_entry *e;
    enum st st = doc_add(r->doc, section, scalar(r), DOC_FILE, event_line(r), &e);
    if (st != ST_OK) return st;
    st = next(r);
    return st != ST_OK ? st : read_value(r, e);
}

static bool section_seen(const struct doc *d, const char *section)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->entry[i].section, section) == 0) return true;
    return false;
}

/* Finger on the section's name. */
static enum st read_section(struct reader *r)
{
    char name[DOC_NAME_BYTES];
    struct doc_entry *none;
    if (scalar(r) == NULL) return shape_fail(r, "the name of a section must be a word", NULL);
    snprintf(name, sizeof(name), "%s", scalar(r));
    if (section_seen(r->doc, name)) return shape_fail(r, "is given twice", name);

    /* Known even when it stays empty, so that a misspelt one is noticed. */
    enum st st = doc_add(r->doc, name, "", DOC_FILE, event_line(r), &none);
    if (st == ST_OK) st = next(r);
    if (st != ST_OK) return st;
    if (scalar(r) != NULL && scalar(r)[0] == '\0') return ST_OK;
    if (r->event.type != YAML_MAPPING_START_EVENT)
        return shape_fail(r, "is a section: it must hold keys", name);
    for (;;) {
        st = next(r);
        if (st != ST_OK || r->event.type == YAML_MAPPING_END_EVENT) return st;
        st = read_key(r, name);
        if (st != ST_OK) return st;
    }
}

static enum st read_sections(struct reader *r)
{
    if (r->event.type != YAML_MAPPING_START_EVENT)
        return shape_fail(r, "want sections (data:, model:, train:, ...) with keys below", NULL);
    for (;;) {
        enum st st = next(r);
        if (st != ST_OK || r->event.type == YAML_MAPPING_END_EVENT) return st;
        st = read_section(r);
        if (st != ST_OK) return st;
    }
}

/* From the start of the stream to the first event of its document. */
static enum st read_head(struct reader *r)
{
    enum st st = ST_OK;
    for (int i = 0; i < 3 && st == ST_OK; i++) { /* stream, document, content */
        st = next(r);
        if (st == ST_OK && r->event.type == YAML_STREAM_END_EVENT)
            return log_fail(ST_CONFIG, r->doc->path, "is empty");
    }
    return st;
}

/* From the end of the content to the end of the stream. */
static enum st read_tail(struct reader *r)
{
    enum st st = next(r); /* end of document */
    if (st == ST_OK) st = next(r);
    if (st == ST_OK && r->event.type != YAML_STREAM_END_EVENT)
        return shape_fail(r, "a second document (---) begins here; want one", NULL);
    return st;
}

static enum st reader_init(struct reader *r, struct doc *d, const char *text, size_t len)
{
    *r = (struct reader){.doc = d};
    if (!yaml_parser_initialize(&r->parser))
        return log_fail(ST_NOMEM, d->path, "out of memory while reading YAML");
    yaml_parser_set_input_string(&r->parser, (const unsigned char *)text, len);
    return ST_OK;
}

static void reader_fini(struct reader *r)
{
    yaml_event_delete(&r->event);
    yaml_parser_delete(&r->parser);
}

enum st doc_read_yaml(struct doc *d, const char *text, size_t len)
{
    struct reader r;
    enum st st = reader_init(&r, d, text, len);
    if (st != ST_OK) return st;
    st = read_head(&r);
    if (st == ST_OK) st = read_sections(&r);
    if (st == ST_OK) st = read_tail(&r);
    reader_fini(&r);
    return st;
}

enum st doc_put_yaml(struct doc *d, const char *section, const char *key, enum doc_origin origin,
                     const char *yaml)
{
    /* A doc of its own name, so that messages about the text name the option. */
    char where[DOC_WHERE_BYTES];
    struct doc_entry *e;
    struct reader r;
    enum st st = doc_add(d, section, key, origin, 0, &e);
    if (st != ST_OK) return st;
    struct doc named = {.path = doc_where(d, e, where)};
    st = reader_init(&r, &named, yaml, strlen(yaml));
    if (st != ST_OK) return st;
    st = read_head(&r);
    if (st == ST_OK) st = read_value(&r, e);
    if (st == ST_OK) st = read_tail(&r);
    reader_fini(&r);
    return st;
}

/* --- emitting ------------------------------------------------------------------------------- */

struct text { /* a growing string */
    char *p;
    size_t used, room;
};

/* yaml_write_handler_t */
static int text_write(void *ctx, unsigned char *bytes, size_t n)
{
    struct text *t = ctx;
    if (t->room - t->used < n + 1) {
        size_t room = 2 * t->room + n + 1;
        char *p = mem_grow(t->p, t->used, room, 1);
        if (p == NULL) return 0;
        t->p = p;
        t->room = room;
    }
    memcpy(t->p + t->used, bytes, n);
    t->used += n;
    t->p[t->used] = '\0';
    return 1;
}

static bool emit_scalar(yaml_emitter_t *em, const char *s)
{
    yaml_event_t ev;
    /* A file may well be called "null"; the emitter would leave it without quotes. */
    yaml_scalar_style_t style =
        doc_null_word(s) ? YAML_SINGLE_QUOTED_SCALAR_STYLE : YAML_ANY_SCALAR_STYLE;
    return yaml_scalar_event_initialize(&ev, NULL, NULL, (const yaml_char_t *)s, (int)strlen(s), 1,
                                        1, style) &&
           yaml_emitter_emit(em, &ev);
}

static bool emit_mapping_start(yaml_emitter_t *em)
{
    yaml_event_t ev;
    return yaml_mapping_start_event_initialize(&ev, NULL, NULL, 1, YAML_BLOCK_MAPPING_STYLE) &&
           yaml_emitter_emit(em, &ev);
}

static bool emit_mapping_end(yaml_emitter_t *em)
{
    yaml_event_t ev;
    return yaml_mapping_end_event_initialize(&ev) && yaml_emitter_emit(em, &ev);
}

static bool emit_value(yaml_emitter_t *em, const struct doc_entry *e)
{
    yaml_event_t ev;
    if (e->list && !(yaml_sequence_start_event_initialize(&ev, NULL, NULL, 1,
                                                          YAML_FLOW_SEQUENCE_STYLE) &&
                     yaml_emitter_emit(em, &ev)))
        return false;
    const char *s = e->text;
    for (size_t i = 0; i < e->n; i++, s += strlen(s) + 1)
        if (!emit_scalar(em, s)) return false;
    return !e->list || (yaml_sequence_end_event_initialize(&ev) && yaml_emitter_emit(em, &ev));
}

static bool emit_section(yaml_emitter_t *em, const struct doc *d, const char *section)
{
    if (!emit_scalar(em, section) || !emit_mapping_start(em)) return false;
    for (size_t i = 0; i < d->n; i++) {
        const struct doc_entry *e = &d->entry[i];
        if (e->key[0] == '\0' || strcmp(e->section, section) != 0) continue;
        if (!emit_scalar(em, e->key) || !emit_value(em, e)) return false;
    }
    return emit_mapping_end(em);
}

/* Is entry i the first of its section? Sections come out in the order in which they are met. */
static bool first_of_section(const struct doc *d, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (strcmp(d->entry[j].section, d->entry[i].section) == 0) return false;
    return true;
}

static bool emit_document(yaml_emitter_t *em, const struct doc *d)
{
    yaml_event_t ev;
    if (!(yaml_stream_start_event_initialize(&ev, YAML_UTF8_ENCODING) &&
          yaml_emitter_emit(em, &ev)))
        return false;
    if (!(yaml_document_start_event_initialize(&ev, NULL, NULL, NULL, 1) &&
          yaml_emitter_emit(em, &ev)))
        return false;
    if (!emit_mapping_start(em)) return false;
    for (size_t i = 0; i < d->n; i++)
        if (first_of_section(d, i) && !emit_section(em, d, d->entry[i].section)) return false;
    if (!emit_mapping_end(em)) return false;
    return yaml_document_end_event_initialize(&ev, 1) && yaml_emitter_emit(em, &ev) &&
           yaml_stream_end_event_initialize(&ev) && yaml_emitter_emit(em, &ev);
}

enum st doc_emit(const struct doc *d, char **out, size_t *len)
{
    yaml_emitter_t em;
    struct text t = {0};
    if (!yaml_emitter_initialize(&em)) goto err;
    yaml_emitter_set_output(&em, text_write, &t);
    yaml_emitter_set_width(&em, 100);
    bool done = emit_document(&em, d);
    yaml_emitter_delete(&em);
    if (!done) goto err;
    *out = t.p;
    *len = t.used;
    return ST_OK;

err: /* values were valid text when they came in: only memory can be missing */
    mem_free(t.p);
    return log_fail(ST_NOMEM, d->path, "out of memory while writing YAML");
}
