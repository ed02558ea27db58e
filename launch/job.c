#define _DEFAULT_SOURCE /* flock */
#include "launch/job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"
#include "data/source.h"
#include "launch/fit.h"

enum { PATH_BYTES = 4096 };

/* mkdir -p */
static enum st make_dirs(const char *dir)
{
    char path[PATH_BYTES];
    size_t n = strlen(dir);
    if (n == 0 || n >= sizeof(path)) return log_fail(ST_CANTCREATE, dir, "no such path is possible");
    memcpy(path, dir, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        char keep = path[i];
        path[i] = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return log_fail(ST_CANTCREATE, path, "%s", strerror(errno));
        path[i] = keep;
    }
    return ST_OK;
}

/* Locked as long as the job lives, whatever way it ends; its processes do not inherit it. */
static enum st lock_dir(const char *dir, int *out)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return log_fail(ST_CANTCREATE, dir, "%s", strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        return log_fail(ST_UNAVAILABLE, dir, "a job is running there; give --run-dir another name");
    }
    *out = fd;
    return ST_OK;
}

/* Would the data open? Asked before anything is made or started. */
static enum st look_at_data(const struct config *c)
{
    struct source *s;
    enum st st = source_open(c, 0, &s);
    if (st != ST_OK) return st;
    source_close(s);
    if (c->data.train_rows == 0 && c->data.eval_path == NULL) return ST_OK;
    st = source_open(c, 1, &s);
    if (st == ST_OK) source_close(s);
    return st;
}

/* What a run leaves behind: its mark first, so that a half-removed one still shows. */
static const char *const RUN_FILES[] = {
    "final.safetensors", "final.safetensors.part", "final.state.safetensors",
    "final.state.safetensors.part", "init.safetensors", "init.safetensors.part", "model.json",
    "metrics.jsonl"};

static enum st clear_old_run(const char *dir, bool overwrite)
{
    char path[PATH_BYTES];
    struct stat mark; /* of a run that got so far as its first iteration */
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    if (stat(path, &mark) == 0 && mark.st_size > 0 && !overwrite)
        return log_fail(ST_CANTCREATE, dir, "holds a run already; give --run-dir another name, or "
                        "--overwrite to lose it");
    for (size_t i = 0; i < sizeof(RUN_FILES) / sizeof(RUN_FILES[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, RUN_FILES[i]);
        if (unlink(path) != 0 && errno != ENOENT)
            return log_fail(ST_CANTCREATE, path, "%s", strerror(errno));
    }
    return ST_OK;
}

static enum st prepare_dir(const struct config *c, bool overwrite, int *lock)
{
    enum st st;
    char path[PATH_BYTES];
    TRY(make_dirs(c->run.dir), err);
    TRY(lock_dir(c->run.dir, lock), err);
    TRY(clear_old_run(c->run.dir, overwrite), err_lock);
    snprintf(path, sizeof(path), "%s/config.yaml", c->run.dir);
    TRY(config_write(c, path), err_lock);
    return ST_OK;

err_lock: close(*lock);
err:      return st;
}

enum st job_open(const char *program, const char *help, enum transport_kind transport, int argc,
                 char **argv, struct job *out)
{
    struct config_args args = {0};
    bool overwrite = false, quiet = false;
    const char *path = NULL;
    const struct option table[] = {
        OPTIONS_CONFIG(&args),
        {.name = "overwrite", .flag = &overwrite, .help = "replace a run that is there already"},
        {.name = "quiet", .flag = &quiet, .help = "show no progress"},
    };
    const struct options o = {program, "CONFIG", help, table, sizeof(table) / sizeof(table[0]),
                              1, 1, &path};
    struct job j = {0};
    enum st st;
    TRY(options_parse(&o, argc, argv), err);
    TRY(config_args_open(&args, path, &j.config), err);
    j.config->cluster.transport = transport;
    TRY(look_at_data(j.config), err_config);
    TRY(fit_to_device(j.config, NULL), err_config);
    TRY(prepare_dir(j.config, overwrite, &j.lock), err_config);
    if (getrandom(&j.id, sizeof(j.id), 0) != (ssize_t)sizeof(j.id)) {
        st = log_fail(ST_INTERNAL, NULL, "no random number to be had: %s", strerror(errno));
        goto err_lock;
    }
    j.quiet = quiet;
    *out = j;
    return ST_OK;

err_lock:   close(j.lock);
err_config: config_close(j.config);
err:        return st;
}

void job_close(struct job *j)
{
    close(j->lock);
    config_close(j->config);
}

enum progress_mode job_progress(const struct job *j)
{
    if (j->quiet) return PROGRESS_NONE;
    return isatty(STDERR_FILENO) ? PROGRESS_TTY : PROGRESS_PLAIN;
}
