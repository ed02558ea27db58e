#include "base/status.h"

#include <sysexits.h>

static const struct {
    const char *name;
    int exit_code;
} TABLE[ST_N] = {
    [ST_OK] = {"OK", EX_OK},
    [ST_BUSY] = {"BUSY", EX_TEMPFAIL},
    [ST_END] = {"END", EX_SOFTWARE},
    [ST_USAGE] = {"USAGE", EX_USAGE},
    [ST_DATA] = {"DATA", EX_DATAERR},
    [ST_NOINPUT] = {"NOINPUT", EX_NOINPUT},
    [ST_CONFIG] = {"CONFIG", EX_CONFIG},
    [ST_PERM] = {"PERM", EX_NOPERM},
    [ST_CANTCREATE] = {"CANTCREATE", EX_CANTCREAT},
    [ST_TIMEOUT] = {"TIMEOUT", EX_TEMPFAIL},
    [ST_UNAVAILABLE] = {"UNAVAILABLE", EX_TEMPFAIL},
    [ST_BADMSG] = {"BADMSG", EX_PROTOCOL},
    [ST_NOMEM] = {"NOMEM", EX_OSERR},
    [ST_IO] = {"IO", EX_IOERR},
    [ST_DEVICE] = {"DEVICE", EX_SOFTWARE},
    [ST_COMM] = {"COMM", EX_TEMPFAIL},
    [ST_INTERNAL] = {"INTERNAL", EX_SOFTWARE},
    [ST_CANCELLED] = {"CANCELLED", EX_TEMPFAIL},
};

const char *st_name(enum st st)
{
    return (unsigned)st < ST_N ? TABLE[st].name : "UNKNOWN";
}

int st_exit_code(enum st st)
{
    return (unsigned)st < ST_N ? TABLE[st].exit_code : EX_SOFTWARE;
}
