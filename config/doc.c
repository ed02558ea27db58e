#include "config/doc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

/* --- entries -------------------------------------------------------------------------------- */

struct doc_entry *doc_find(struct doc *d, const char *section, const char *key)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->entry[i].section, section) == 0 && strcmp(d->entry[i].key, key) == 0)
            return &d->entry[i];
    return NULL;
}

bool doc_null_word(const char *text)
{
    return strcmp(text, "~") == 0 || strcmp(text, "null") == 0;
}

const char *doc_where(const struct doc *d, const struct doc_entry *e, char out[DOC_WHERE_BYTES])
{
    if (e == NULL || e->origin == DOC_DEFAULT)
        snprintf(out, DOC_WHERE_BYTES, "%s", d->path);
    else if (e->origin == DOC_SET)
        snprintf(out, DOC_WHERE_BYTES, "--set %s.%s", e->section, e->key);
    else
        snprintf(out, DOC_WHERE_BYTES, "%s:%" PRIu32, d->path, e->line);
    return out;
}

static enum st twice(const struct doc *d, const struct doc_entry *first, uint32_t line)
{
    char where[DOC_WHERE_BYTES];
    snprintf(where, sizeof(where), "%s:%" PRIu32, d->path, line);
    return log_fail(ST_CONFIG, where, "'%s' in %s is given twice (first in line %" PRIu32 ")",
                    first->key, first->section, first->line);
}

enum st doc_add(struct doc *d, const char *section, const char *key, enum doc_origin origin,
                uint32_t line, struct doc_entry **out)
{
    struct doc_entry *e = doc_find(d, section, key);
    if (e != NULL && e->origin == DOC_FILE && origin == DOC_FILE) return twice(d, e, line);
    if (e == NULL) {
        if (d->n == DOC_MAX_ENTRIES)
            return log_fail(ST_CONFIG, d->path, "more than %d keys", DOC_MAX_ENTRIES);
        e = &d->entry[d->n++];
    }
    mem_free(e->text);
    *e = (struct doc_entry){.origin = origin, .line = line};
    snprintf(e->section, sizeof(e->section), "%s", section);
    snprintf(e->key, sizeof(e->key), "%s", key);
    *out = e;
    return ST_OK;
}

enum st doc_append(struct doc_entry *e, const char *value, size_t len)
{
    if (e->room - e->used < len + 1) {
        size_t room = 2 * e->room + len + 1;
        char *text = mem_grow(e->text, e->used, room, 1);
        if (text == NULL) return log_fail(ST_NOMEM, e->key, "out of memory (%zu bytes)", room);
        e->text = text;
        e->room = room;
    }
    memcpy(e->text + e->used, value, len);
    e->text[e->used + len] = '\0';
    e->used += len + 1;
    e->n++;
    return ST_OK;
}

enum st doc_put(struct doc *d, const char *section, const char *key, enum doc_origin origin,
                const char *value)
{
    struct doc_entry *e;
    enum st st = doc_add(d, section, key, origin, 0, &e);
    return st != ST_OK ? st : doc_append(e, value, strlen(value));
}

/* --- file ----------------------------------------------------------------------------------- */

/* Often the directory of a run, which holds its configuration. */
static enum st is_directory(const char *path)
{
    static const char NAME[] = "config.yaml";
    char file[DOC_WHERE_BYTES];
    size_t n = strlen(path);
    const char *slash = n > 0 && path[n - 1] == '/' ? "" : "/";
    int len = snprintf(file, sizeof(file), "%s%s%s", path, slash, NAME);
    if (len < (int)sizeof(file) && access(file, F_OK) == 0)
        return log_fail(ST_NOINPUT, path, "is a directory; did you mean %s?", file);
    return log_fail(ST_NOINPUT, path, "is a directory; name a configuration file");
}

/* Read to the end, but at most `cap` bytes. */
static enum st read_all(int fd, const char *path, char *buf, size_t cap, size_t *len)
{
    size_t n = 0;
    while (n < cap) {
        ssize_t got = read(fd, buf + n, cap - n);
        if (got == 0) break;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EISDIR) return is_directory(path);
        if (got < 0) return log_fail(ST_IO, path, "cannot read: %s", strerror(errno));
        n += (size_t)got;
    }
    *len = n;
    return ST_OK;
}

enum st doc_open(const char *path, struct doc **out)
{
    enum st st = ST_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return log_open_failed(path);

    size_t len = 0, cap = DOC_MAX_BYTES + 1;
    char *text = mem_alloc(cap, 1);
    if (text == NULL) {
        st = log_fail(ST_NOMEM, path, "out of memory (%zu bytes)", cap);
        goto err_fd;
    }
    TRY(read_all(fd, path, text, cap, &len), err_text);
    if (len > DOC_MAX_BYTES)
        st = log_fail(ST_CONFIG, path, "too large for a configuration: more than %d bytes; is "
                      "it one (YAML)?", DOC_MAX_BYTES);
    else
        st = doc_parse(path, text, len, out);

err_text:
    mem_free(text);
err_fd:
    close(fd);
    return st;
}

enum st doc_parse(const char *path, const char *text, size_t len, struct doc **out)
{
    struct doc *d = mem_zalloc(1, sizeof(*d));
    if (d == NULL) return log_fail(ST_NOMEM, path, "out of memory (%zu bytes)", sizeof(*d));
    d->path = path;
    enum st st = doc_read_yaml(d, text, len);
    if (st != ST_OK) {
        doc_close(d);
        return st;
    }
    *out = d;
    return ST_OK;
}

void doc_close(struct doc *d)
{
    if (d == NULL) return;
    for (size_t i = 0; i < d->n; i++) mem_free(d->entry[i].text);
    mem_free(d);
}
