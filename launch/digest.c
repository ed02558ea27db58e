/* chanter digest: one number for everything a run has learned, from its files. */
#include <stdio.h>

#include "config/options.h"
#include "launch/tools.h"
#include "launch/progress.h"
#include "launch/rundir.h"

static const char HELP[] =
    "Print one digest (32 hex digits) over all tables, optimizer state and dense weights of a\n"
    "finished run, computed from its files. Equal to \"digest\" in the run's final line; equal\n"
    "digests of two runs mean equal bits.";

enum st digest_main(int argc, char **argv)
{
    const char *dir = NULL;
    const struct options options = {"chanter digest", "RUN_DIR", HELP, NULL, 0, 1, 1, &dir};
    struct rundir *r;
    struct progress p;
    struct digest d;
    char hex[DIGEST_HEX_BYTES];
    enum st st;
    TRY(options_parse(&options, argc, argv), err);
    TRY(rundir_open(dir, NULL, 0, RUNDIR_STATE, &r), err);
    progress_start(&p, "digest", "rows", rundir_rows(r), false);
    st = rundir_digest(r, progress_at, &p, &d);
    progress_stop(&p);
    if (st == ST_OK) {
        digest_hex(d, hex);
        printf("%s\n", hex);
    }
    rundir_close(r);
err:
    return st;
}
