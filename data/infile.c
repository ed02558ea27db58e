#include "data/infile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

enum st infile_open(const char *path, struct infile *out)
{
    /* O_NONBLOCK: a named pipe is refused below; it must not hang the open before that. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT && path[0] != '/')
        return log_fail(ST_NOINPUT, path, "no such file (relative to the current directory)");
    if (fd < 0) return log_open_failed(path);
    struct stat s;
    enum st st = ST_OK;
    if (fstat(fd, &s) != 0)
        st = log_fail(ST_IO, path, "cannot stat: %s", strerror(errno));
    else if (S_ISDIR(s.st_mode))
        st = log_fail(ST_NOINPUT, path, "is a directory; name a file");
    else if (!S_ISREG(s.st_mode))
        st = log_fail(ST_DATA, path, "is not a regular file; it has to be read more than once");
    if (st != ST_OK) {
        close(fd);
        return st;
    }
    *out = (struct infile){fd, (uint64_t)s.st_size, s.st_mtim};
    return ST_OK;
}

enum st infile_unchanged(const struct infile *f, const char *path)
{
    struct stat s;
    if (fstat(f->fd, &s) != 0) return log_fail(ST_IO, path, "cannot stat: %s", strerror(errno));
    if ((uint64_t)s.st_size == f->size && s.st_mtim.tv_sec == f->changed.tv_sec &&
        s.st_mtim.tv_nsec == f->changed.tv_nsec)
        return ST_OK;
    return log_fail(ST_DATA, path,
                    "changed since start (size %llu -> %llu); stopping, keep data files as they "
                    "are while a job runs",
                    (unsigned long long)f->size, (unsigned long long)s.st_size);
}

enum st infile_read(const struct infile *f, const char *path, uint64_t offset, void *p, uint64_t n)
{
    uint64_t done = 0;
    while (done < n) {
        ssize_t got = pread(f->fd, (char *)p + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return log_fail(ST_IO, path, "cannot read: %s", strerror(errno));
        if (got == 0)
            return log_fail(ST_DATA, path, "ends at byte %llu, %llu more expected",
                            (unsigned long long)(offset + done), (unsigned long long)(n - done));
        done += (uint64_t)got;
    }
    return ST_OK;
}
