/* base/status.h - what a call can come back with. Not an errno: codes are grouped by what the
 * caller has to do about them, and each has one exit code (sysexits.h). */
#ifndef CHANTER_BASE_STATUS_H
#define CHANTER_BASE_STATUS_H

#define MUST_USE __attribute__((warn_unused_result))

enum st {
    ST_OK = 0,
    /* Not a failure: the caller looks at the code and carries on. */
    ST_BUSY,        /* nothing now; ask again                                         */
    ST_END,         /* nothing any more                                               */
    /* Fix the input. */
    ST_USAGE,       /* command line                                            (64)   */
    ST_DATA,        /* the contents of a data file                             (65)   */
    ST_NOINPUT,     /* a file that should be there is not                      (66)   */
    ST_CONFIG,      /* configuration                                           (78)   */
    ST_PERM,        /* not allowed                                             (77)   */
    ST_CANTCREATE,  /* an output, a port or a directory cannot be made         (73)   */
    /* Try again, or give the peer up. */
    ST_TIMEOUT,     /* a deadline passed                                       (75)   */
    ST_UNAVAILABLE, /* the peer is not there                                   (75)   */
    ST_BADMSG,      /* a message that breaks the contract; nothing was changed (76)   */
    /* Stop this process. */
    ST_NOMEM,       /*                                                         (71)   */
    ST_IO,          /* read, write, fsync                                      (74)   */
    ST_DEVICE,      /* the device failed                                       (70)   */
    ST_COMM,        /* the trainers' exchange failed                           (75)   */
    ST_INTERNAL,    /* a broken invariant                                      (70)   */
    ST_CANCELLED,   /* asked to stop                                           (75)   */
    ST_N
};

/* "DATA" for ST_DATA and so on: the stable code that users see as E-DATA. Any thread. */
const char *st_name(enum st st);
/* sysexits.h code of `st`; 0 for ST_OK. Any thread. */
int st_exit_code(enum st st);

/* Set st and jump to `label` unless the call gives ST_OK. */
#define TRY(call, label)              \
    do {                              \
        st = (call);                  \
        if (st != ST_OK) goto label;  \
    } while (0)

#endif
