#include "launch/job.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"

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

/* What a run leaves behind: its mark first, so that a half-removed one still shows. */
static const char *const RUN_FILES[] = {"final.safetensors", "final.state.safetensors",
                                        "init.safetensors", "model.json", "metrics.jsonl"};

static enum st clear_old_run(const char *dir, bool overwrite)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    if (access(path, F_OK) == 0 && !overwrite)
        return log_fail(ST_CANTCREATE, dir, "holds a run already; give --run-dir another name, or "
                        "--overwrite to lose it");
    for (size_t i = 0; i < sizeof(RUN_FILES) / sizeof(RUN_FILES[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, RUN_FILES[i]);
        if (unlink(path) != 0 && errno != ENOENT)
            return log_fail(ST_CANTCREATE, path, "%s", strerror(errno));
    }
    return ST_OK;
}

static enum st prepare_dir(const struct config *c, bool overwrite)
{
    char path[PATH_BYTES];
    enum st st = make_dirs(c->run.dir);
    if (st == ST_OK) st = clear_old_run(c->run.dir, overwrite);
    if (st != ST_OK) return st;
    snprintf(path, sizeof(path), "%s/config.yaml", c->run.dir);
    return config_write(c, path);
}

enum st job_open(const char *program, const char *help, int argc, char **argv, struct job *out)
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
    TRY(prepare_dir(j.config, overwrite), err_config);
    if (getrandom(&j.id, sizeof(j.id), 0) != (ssize_t)sizeof(j.id)) {
        st = log_fail(ST_INTERNAL, NULL, "no random number to be had: %s", strerror(errno));
        goto err_config;
    }
    j.quiet = quiet;
    *out = j;
    return ST_OK;

err_config: config_close(j.config);
err:        return st;
}

void job_close(struct job *j)
{
    config_close(j->config);
}

enum progress_mode job_progress(const struct job *j)
{
    if (j->quiet) return PROGRESS_NONE;
    return isatty(STDERR_FILENO) ? PROGRESS_TTY : PROGRESS_PLAIN;
}
