/* chanter prepare: the data of a configuration, parsed once, as a prepared file. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "config/options.h"
#include "data/prepared.h"
#include "launch/tools.h"
#include "launch/output.h"
#include "launch/progress.h"

static const char HELP[] =
    "Turn the data that CONFIG names (data.path, any format) into a prepared file: parsed once,\n"
    "checked by checksums, read at the speed of the disk. Train on it with\n"
    "  --set data.format=prepared --set data.path=FILE.chp\n"
    "It holds raw ids: one file serves all table sizes. Prints one JSON line: rows, bytes and\n"
    "seconds.";

enum { SAMPLE_BYTES = 1 << 20 };

/* Lines of a text file, guessed from its first megabyte, for the ETA alone; 0: no idea. */
static uint64_t guess_lines(const char *path)
{
    struct stat s;
    uint64_t lines = 0;
    char *head = mem_alloc(SAMPLE_BYTES, 1);
    FILE *f = fopen(path, "rb");
    if (head == NULL || f == NULL || fstat(fileno(f), &s) != 0) goto done;
    size_t n = fread(head, 1, SAMPLE_BYTES, f);
    if (n >= 2 && memcmp(head, "\x1f\x8b", 2) == 0) goto done; /* gzip: lines are not visible */
    for (size_t i = 0; i < n; i++) lines += head[i] == '\n';
    if (n == SAMPLE_BYTES) lines = (uint64_t)((double)lines / (double)n * (double)s.st_size);
done:
    if (f != NULL) fclose(f);
    mem_free(head);
    return lines;
}

static void start_progress(const struct config *c, struct progress *p)
{
    uint64_t rows = 0;
    if (c->data.format == DATA_SYNTHETIC) rows = c->data.rows;
    if (c->data.format == DATA_CRITEO_TSV) rows = guess_lines(c->data.path);
    progress_start(p, "prepare", "rows", rows, c->data.format != DATA_SYNTHETIC);
}

static enum st prepare(const struct config *c, const char *out)
{
    struct progress p;
    struct stat s;
    uint64_t rows;
    enum st st;
    start_progress(c, &p);
    st = prepare_write(c, out, progress_at, &p, &rows);
    progress_stop(&p);
    if (st != ST_OK) return st;
    if (stat(out, &s) != 0) return log_fail(ST_IO, out, "is gone right after it was written");
    printf("{\"rows\":%" PRIu64 ",\"bytes\":%lld,\"seconds\":%.3f}\n", rows, (long long)s.st_size,
           (double)(clock_now_ns() - p.start_ns) * 1e-9);
    return ST_OK;
}

enum st prepare_main(int argc, char **argv)
{
    struct config_args args = {.no_run = true};
    const char *path = NULL, *out = NULL;
    bool force = false;
    const struct option option[] = {
        {.name = "out", .arg = "FILE.chp", .text = &out, .help = "the file to write"},
        {.name = "force", .flag = &force, .help = "replace FILE.chp if it exists"},
        OPTION_SET(&args.set),
    };
    const struct options options = {"chanter prepare", "CONFIG --out FILE.chp", HELP,
                                    option, 3, 1, 1, &path};
    struct config *c;
    enum st st;
    TRY(options_parse(&options, argc, argv), err);
    TRY(config_args_open(&args, path, &c), err);
    const char *const input[] = {path, c->data.path, c->data.eval_path};
    TRY(output_check(out, input, sizeof(input) / sizeof(input[0]), force), err_config);
    st = prepare(c, out);
err_config:
    config_close(c);
err:
    return st;
}
