#include "data/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

enum { BUFFER_BYTES = 1 << 18 };

struct outfile {
    int fd;
    char *path, *part;   /* owns both: the final name and the name aside */
    char *buffer;        /* owns; [BUFFER_BYTES]                         */
    size_t used;
};

static void outfile_free(struct outfile *o)
{
    mem_free(o->buffer);
    mem_free(o->part);
    mem_free(o->path);
    mem_free(o);
}

enum st outfile_create(const char *path, struct outfile **out)
{
    enum st st = ST_NOMEM;
    struct outfile *o = mem_zalloc(1, sizeof(*o));
    if (o == NULL) goto err;
    size_t room = strlen(path) + sizeof(".part");
    o->path = mem_strdup(path);
    o->part = mem_alloc(room, 1);
    o->buffer = mem_alloc(BUFFER_BYTES, 1);
    if (o->path == NULL || o->part == NULL || o->buffer == NULL) goto err_outfile;
    snprintf(o->part, room, "%s.part", path);
    o->fd = open(o->part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (o->fd < 0) {
        st = log_fail(ST_CANTCREATE, o->part, "cannot create: %s", strerror(errno));
        goto err_outfile;
    }
    *out = o;
    return ST_OK;

err_outfile: outfile_free(o);
err:         if (st == ST_NOMEM) log_fail(st, path, "out of memory");
             return st;
}

static enum st put(struct outfile *o, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t done = write(o->fd, p, n);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return log_fail(ST_IO, o->part, "cannot write: %s", strerror(errno));
        p += done;
        n -= (size_t)done;
    }
    return ST_OK;
}

static enum st flush(struct outfile *o)
{
    enum st st = put(o, o->buffer, o->used);
    if (st == ST_OK) o->used = 0;
    return st;
}

enum st outfile_write(struct outfile *o, const void *p, size_t n)
{
    if (n > BUFFER_BYTES - o->used) {
        enum st st = flush(o);
        if (st != ST_OK) return st;
    }
    if (n >= BUFFER_BYTES) return put(o, p, n);
    if (n > 0) memcpy(o->buffer + o->used, p, n);
    o->used += n;
    return ST_OK;
}

enum st outfile_rewrite(struct outfile *o, uint64_t offset, const void *p, size_t n)
{
    enum st st = flush(o);
    while (st == ST_OK && n > 0) {
        ssize_t done = pwrite(o->fd, p, n, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return log_fail(ST_IO, o->part, "cannot write: %s", strerror(errno));
        p = (const char *)p + done;
        offset += (uint64_t)done;
        n -= (size_t)done;
    }
    return st;
}

/* Make the rename itself last: fsync the directory that holds `path`. */
static enum st sync_directory(const char *path)
{
    char *dir = mem_strdup(path);
    if (dir == NULL) return log_fail(ST_NOMEM, path, "out of memory");
    char *slash = strrchr(dir, '/');
    const char *name = slash == NULL ? "." : slash == dir ? "/" : dir;
    if (slash != NULL && slash != dir) *slash = '\0';
    int fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum st st = ST_OK;
    if (fd < 0 || fsync(fd) != 0)
        st = log_fail(ST_IO, name, "cannot sync the directory: %s", strerror(errno));
    if (fd >= 0) close(fd);
    mem_free(dir);
    return st;
}

enum st outfile_commit(struct outfile *o)
{
    enum st st = flush(o);
    if (st == ST_OK && fsync(o->fd) != 0)
        st = log_fail(ST_IO, o->part, "cannot sync: %s", strerror(errno));
    if (st == ST_OK && rename(o->part, o->path) != 0)
        st = log_fail(ST_CANTCREATE, o->path, "cannot rename %s to it: %s", o->part,
                      strerror(errno));
    if (st != ST_OK) {
        outfile_abandon(o);
        return st;
    }
    close(o->fd); /* already on disk: fsync has reported what close could */
    st = sync_directory(o->path);
    outfile_free(o);
    return st;
}

void outfile_abandon(struct outfile *o)
{
    if (o == NULL) return;
    close(o->fd);
    unlink(o->part);
    outfile_free(o);
}
