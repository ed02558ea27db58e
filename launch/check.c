#include "launch/check.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"
#include "data/source.h"
#include "launch/fit.h"
#include "launch/sizes.h"

enum { CHECK_BATCHES = 4 }; /* read to see whether data and cache go together */

static const char SHM_DIR[] = "/dev/shm";

/* "212 GiB", "16 MiB": whole units, rounded up when it is a need. */
static const char *bytes_text(uint64_t bytes, bool up, char out[32])
{
    static const char *const UNIT[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    size_t u = 0;
    uint64_t one = 1;
    while (u < 6 && bytes / one >= 1024) one <<= 10, u++;
    uint64_t n = bytes / one + (up && bytes % one != 0);
    snprintf(out, 32, "%" PRIu64 " %s", n, UNIT[u]);
    return out;
}

static bool uses_processes(const struct config *c)
{
    return c->cluster.transport == TRANSPORT_GRPC;
}

/* --- data ----------------------------------------------------------------------------------- */

struct head { uint64_t samples, batches, working_set; }; /* what the first batches hold */

static enum st read_head(const struct config *c, struct source *s, struct samples *batch,
                         struct head *h)
{
    uint32_t got = c->train.global_batch;
    for (int i = 0; i < CHECK_BATCHES && got == c->train.global_batch; i++) {
        enum st st = source_read(s, batch, 0, c->train.global_batch, &got);
        if (st != ST_OK) return st;
        batch->n = got;
        uint64_t rows = sizes_working_set(c, batch);
        if (rows > h->working_set) h->working_set = rows;
        h->samples += got;
        h->batches += got > 0;
    }
    return ST_OK;
}

static enum st open_and_read(const struct config *c, int eval, struct head *h)
{
    struct source *s = NULL;
    struct samples batch;
    enum st st = source_open(c, eval, &s);
    if (st != ST_OK) return st;
    TRY(samples_open(c->train.global_batch, c->model.dense_features, c->model.n_tables, &batch),
        err_source);
    st = read_head(c, s, &batch, h);
    samples_close(&batch);

err_source:
    source_close(s);
    return st;
}

static enum st check_cache(const struct config *c, const struct head *h)
{
    uint64_t rows = config_cache_rows(c);
    if (rows < h->working_set)
        return log_fail(ST_CONFIG, "cluster.cache_rows",
                        "cache %" PRIu64 " rows < batch working set %" PRIu64
                        "; raise cluster.cache_rows",
                        rows, h->working_set);
    /* A given number is only known to do for the batches that were read. */
    bool given = c->cluster.cache_rows != 0, close = given && rows / 11 * 10 < h->working_set;
    printf("cache     %s: %" PRIu64 " rows for each trainer; a batch needs up to %" PRIu64 "%s\n",
           close ? "close" : given ? "ok so far" : "ok", rows, h->working_set,
           close ? " so far, later ones may need more" : "");
    return ST_OK;
}

enum st check_data(const struct config *c)
{
    struct head train = {0}, held_out = {0};
    enum st st = open_and_read(c, 0, &train);
    if (st != ST_OK) return st;
    const char *what = c->data.path != NULL ? c->data.path : "synthetic";
    printf("data      ok: %s, first %" PRIu64 " samples read\n", what, train.samples);
    if (c->data.train_rows != 0 || c->data.eval_path != NULL) {
        st = open_and_read(c, 1, &held_out);
        if (st != ST_OK) return st;
        printf("held-out  ok: %s, first %" PRIu64 " samples read\n",
               c->data.eval_path != NULL ? c->data.eval_path : "rows behind data.train_rows",
               held_out.samples);
    }
    if (held_out.working_set > train.working_set) train.working_set = held_out.working_set;
    return check_cache(c, &train);
}

/* --- device --------------------------------------------------------------------------------- */

enum st check_device(struct config *c)
{
    char text[32];
    uint64_t free_bytes;
    enum st st = fit_to_device(c, &free_bytes);
    if (st != ST_OK) return st;
    bytes_text(free_bytes, false, text);
    printf("device    ok: %s, %s free\n", config_device_name(c->cluster.device), text);
    return ST_OK;
}

/* --- machine -------------------------------------------------------------------------------- */

enum st check_memory(const struct config *c, uint64_t available_bytes)
{
    struct sizes s = sizes_of(c);
    char total[32], have[32], server[32], trainer[32], oracle[32];
    bytes_text(s.total_bytes, true, total);
    bytes_text(available_bytes, false, have);
    bytes_text(s.server_bytes, true, server);
    bytes_text(s.trainer_bytes, true, trainer);
    bytes_text(s.oracle_bytes, true, oracle);
    if (s.total_bytes > available_bytes)
        return log_fail(ST_CONFIG, "memory",
                        "needs %s, host has %s (each server %s, each trainer %s, oracle %s); lower "
                        "model.tables, model.dim, cluster.cache_rows or oracle.lookahead",
                        total, have, server, trainer, oracle);
    printf("memory    ok: at most %s of %s (each server %s, each trainer %s, oracle %s)\n", total,
           have, server, trainer, oracle);
    return ST_OK;
}

/* Cut the last name off `path`. */
static void to_parent(char *path)
{
    char *slash = strrchr(path, '/');
    while (slash != NULL && slash > path && slash[1] == '\0') { /* slashes at the end */
        *slash = '\0';
        slash = strrchr(path, '/');
    }
    if (slash == NULL) strcpy(path, ".");
    else slash[slash == path] = '\0';
}

/* run.dir or the first folder on the way up that is there. */
static enum st find_folder(const char *dir, char path[PATH_MAX])
{
    struct stat info;
    if (snprintf(path, PATH_MAX, "%s", dir) >= PATH_MAX)
        return log_fail(ST_CANTCREATE, "run.dir", "path too long");
    while (stat(path, &info) != 0) {
        if (errno != ENOENT)
            return log_fail(ST_CANTCREATE, dir, "cannot be created: %s", strerror(errno));
        to_parent(path);
    }
    if (!S_ISDIR(info.st_mode))
        return log_fail(ST_CANTCREATE, dir, "cannot be created: %s is not a directory", path);
    return ST_OK;
}

/* Make a directory in `folder` and remove it: permissions alone do not tell (/proc, a read-only or
 * full file system). */
static enum st try_folder(const char *dir, const char *folder)
{
    char probe[PATH_MAX + 32];
    snprintf(probe, sizeof(probe), "%s/.chanter-check-XXXXXX", folder);
    if (mkdtemp(probe) == NULL)
        return log_fail(ST_CANTCREATE, dir, "cannot make a directory in %s: %s", folder,
                        strerror(errno));
    if (rmdir(probe) != 0)
        return log_fail(ST_CANTCREATE, dir, "cannot remove %s: %s", probe, strerror(errno));
    return ST_OK;
}

enum st check_run_dir(const struct config *c)
{
    char folder[PATH_MAX], run[PATH_MAX + 16];
    const char *dir = c->run.dir;
    enum st st = find_folder(dir, folder);
    if (st == ST_OK) st = try_folder(dir, folder);
    if (st != ST_OK) return st;
    snprintf(run, sizeof(run), "%s/metrics.jsonl", dir);
    const char *what = strcmp(folder, dir) == 0 ? "is there" : "can be made";
    if (access(run, F_OK) == 0) what = "holds a run already; --overwrite will be needed";
    printf("run dir   ok: %s %s\n", dir, what);
    return ST_OK;
}

enum st check_disk(const struct config *c, uint64_t free_bytes)
{
    uint64_t need = sizes_of(c).disk_bytes;
    char need_text[32], free_text[32];
    if (need == 0) return ST_OK;
    bytes_text(need, true, need_text);
    bytes_text(free_bytes, false, free_text);
    if (need > free_bytes)
        return log_fail(ST_CANTCREATE, "run.dir", "the weights need %s, free %s; make room, or "
                        "set run.save_final: false", need_text, free_text);
    printf("disk      ok: %s of %s for the weights\n", need_text, free_text);
    return ST_OK;
}

enum st check_files(const struct config *c, uint64_t limit)
{
    uint64_t need = sizes_of(c).files;
    if (need > limit)
        return log_fail(ST_CONFIG, "open files",
                        "needs %" PRIu64 " files, limit %" PRIu64 "; raise it (ulimit -n)", need,
                        limit);
    printf("files     ok: %" PRIu64 " needed at most, limit %" PRIu64 "\n", need, limit);
    return ST_OK;
}

enum st check_shm(const struct config *c, const char *dir, uint64_t free_bytes)
{
    uint64_t need = sizes_of(c).shm_bytes;
    char need_text[32], free_text[32];
    if (!uses_processes(c)) return ST_OK;
    bytes_text(need, true, need_text);
    bytes_text(free_bytes, false, free_text);
    if (need > free_bytes)
        return log_fail(ST_CONFIG, dir, "need %s, free %s; remove what dead jobs left there "
                        "(vader_segment.*) or enlarge it", need_text, free_text);
    printf("shm       ok: %s of %s in %s\n", need_text, free_text, dir);
    return ST_OK;
}

/* Is there a program `name` in the folder path[0..n)? An empty name is the current folder. */
static bool has_program(const char *folder, size_t n, const char *name, char out[PATH_MAX])
{
    struct stat info;
    int len = snprintf(out, PATH_MAX, "%.*s%s%s", (int)n, folder, n > 0 ? "/" : "", name);
    return len < PATH_MAX && stat(out, &info) == 0 && S_ISREG(info.st_mode) &&
           access(out, X_OK) == 0;
}

enum st check_mpirun(const struct config *c, const char *path)
{
    char found[PATH_MAX];
    if (!uses_processes(c)) return ST_OK;
    for (const char *p = path; p != NULL;) {
        size_t n = strcspn(p, ":");
        if (has_program(p, n, "mpirun", found)) {
            printf("mpirun    ok: %s\n", found);
            return ST_OK;
        }
        p = p[n] == ':' ? p + n + 1 : NULL;
    }
    return log_fail(ST_NOINPUT, "mpirun", "not found in PATH; install openmpi-bin");
}

/* --- what this machine has ------------------------------------------------------------------ */

static uint64_t file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    return limit.rlim_cur;
}

static uint64_t free_in(const char *dir)
{
    struct statvfs info;
    return statvfs(dir, &info) == 0 ? (uint64_t)info.f_bavail * info.f_frsize : 0;
}

static enum st first_of(enum st first, enum st then)
{
    return first != ST_OK ? first : then;
}

static enum st check_run_place(const struct config *c)
{
    char folder[PATH_MAX];
    enum st st = check_run_dir(c);
    if (st != ST_OK) return st;
    st = find_folder(c->run.dir, folder);
    return st != ST_OK ? st : check_disk(c, free_in(folder));
}

static enum st check_all(struct config *c)
{
    enum st st = check_device(c); /* first: it may say how large caches are */
    st = first_of(st, check_data(c));
    st = first_of(st, check_memory(c, mem_available()));
    st = first_of(st, check_run_place(c));
    st = first_of(st, check_files(c, file_limit()));
    st = first_of(st, check_shm(c, SHM_DIR, free_in(SHM_DIR)));
    return first_of(st, check_mpirun(c, getenv("PATH")));
}

enum st check_main(int argc, char **argv)
{
    struct config_args args = {0};
    struct config *c = NULL;
    const char *path = NULL;
    const struct option options[] = {OPTIONS_CONFIG(&args)};
    const struct options o = {
        .program = "chanter check", .operands = "CONFIG",
        .help = "Reads a configuration and the head of its data, sizes memory, looks at\n"
                "directories and limits, and says what would keep the job from running.",
        .option = options, .n_options = sizeof(options) / sizeof(options[0]),
        .min_operands = 1, .max_operands = 1, .operand = &path};
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that what is fine and what fails come in order */
    enum st st = options_parse(&o, argc, argv);
    if (st == ST_OK) st = config_args_open(&args, path, &c);
    if (st != ST_OK) return st;
    printf("config    ok: %s\n", path);
    st = check_all(c);
    config_close(c);
    return st;
}
