/* launch/filekind.h - which of the files that chanter reads or writes a path names: by its first
 * bytes, and where those are damaged by its name. */
#ifndef CHANTER_LAUNCH_FILEKIND_H
#define CHANTER_LAUNCH_FILEKIND_H

#include "base/status.h"

enum filekind {
    FILEKIND_DIRECTORY,
    FILEKIND_PREPARED,      /* data/prepared.h                   */
    FILEKIND_SAFETENSORS,   /* data/safetensors.h                */
    FILEKIND_METRICS,       /* lines of JSON, trainer/metrics.h  */
    FILEKIND_OTHER,
};

/* Logs a path that is not there or cannot be read. */
MUST_USE enum st filekind_of(const char *path, enum filekind *out);

#endif
