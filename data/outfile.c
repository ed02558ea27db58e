#include "data/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
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

/* The directory that `path` is in; the caller's to mem_free. NULL: out of memory. */
static char *directory_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return mem_strdup(".");
    char *dir = mem_strdup(path);
    if (dir != NULL) dir[slash == path ? 1 : slash - path] = '\0';
    return dir;
}

static enum st check_directory(const char *path)
{
    struct stat s;
    char *dir = directory_of(path);
    enum st st = ST_OK;
    if (dir == NULL)
        st = log_fail(ST_NOMEM, path, "out of memory");
    else if (stat(dir, &s) != 0)
        st = log_fail(ST_CANTCREATE, path, "cannot create: %s: %s", dir, strerror(errno));
    else if (!S_ISDIR(s.st_mode))
        st = log_fail(ST_CANTCREATE, path, "cannot create: %s is not a directory", dir);
    mem_free(dir);
    return st;
}

/* lstat: a symbolic link would itself be replaced, not what it leads to. */
enum st outfile_check(const char *path)
{
    struct stat s;
    if (lstat(path, &s) != 0) return check_directory(path);
    if (S_ISREG(s.st_mode)) return ST_OK;
    if (S_ISDIR(s.st_mode))
        return log_fail(ST_CANTCREATE, path, "is a directory; name a file");
    if (S_ISLNK(s.st_mode))
        return log_fail(ST_CANTCREATE, path, "is a symbolic link; name the file itself");
    return log_fail(ST_CANTCREATE, path, "is there and not a regular file; name another");
}

/* Open the file aside. One that a killed process left is taken over, nothing else is. */
static enum st open_part(struct outfile *o)
{
    struct stat s;
    enum st st = ST_OK;
    /* O_NONBLOCK: a pipe of that name must not hang the open. */
    o->fd = open(o->part, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (o->fd < 0)
        return log_fail(ST_CANTCREATE, o->path, "cannot create (as %s): %s", o->part,
                        strerror(errno));
    if (fstat(o->fd, &s) != 0 || !S_ISREG(s.st_mode))
        st = log_fail(ST_CANTCREATE, o->part, "is there and not a regular file; remove it");
    else if (ftruncate(o->fd, 0) != 0)
        st = log_fail(ST_CANTCREATE, o->part, "cannot truncate: %s", strerror(errno));
    if (st != ST_OK) close(o->fd);
    return st;
}

enum st outfile_create(const char *path, struct outfile **out)
{
    enum st checked = outfile_check(path);
    if (checked != ST_OK) return checked;
    enum st st = ST_NOMEM;
    struct outfile *o = mem_zalloc(1, sizeof(*o));
    if (o == NULL) goto err;
    size_t room = strlen(path) + sizeof(".part");
    o->path = mem_strdup(path);
    o->part = mem_alloc(room, 1);
    o->buffer = mem_alloc(BUFFER_BYTES, 1);
    if (o->path == NULL || o->part == NULL || o->buffer == NULL) goto err_outfile;
    snprintf(o->part, room, "%s.part", path);
    TRY(open_part(o), err_logged);
    *out = o;
    return ST_OK;

err_logged:  outfile_free(o);
             return st;
err_outfile: outfile_free(o);
err:         return log_fail(st, path, "out of memory");
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
    char *dir = directory_of(path);
    if (dir == NULL) return log_fail(ST_NOMEM, path, "out of memory");
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum st st = ST_OK;
    if (fd < 0 || fsync(fd) != 0)
        st = log_fail(ST_IO, dir, "cannot sync the directory: %s", strerror(errno));
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
