#include "launch/runlog.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

static enum st bad_line(const char *where, const char *what)
{
    return log_fail(ST_DATA, where, "%s; the file is damaged or still being written", what);
}

static enum st take_train(struct runlog *r, json_t *j, const char *where)
{
    json_int_t iteration;
    double loss;
    if (json_unpack(j, "{s:I, s:F}", "iteration", &iteration, "loss", &loss) != 0)
        return bad_line(where, "a train line without iteration and loss");
    if (iteration != (json_int_t)r->n_train)
        return bad_line(where, "an iteration out of order");
    if (r->n_train++ == 0) r->first_loss = loss;
    r->last_loss = loss;
    return ST_OK;
}

static enum st take_eval(struct runlog *r, json_t *j, const char *where)
{
    json_int_t iteration, rows;
    const json_t *auc;
    double loss;
    if (json_unpack(j, "{s:I, s:I, s:F, s:o}", "iteration", &iteration, "rows", &rows, "loss",
                    &loss, "auc", &auc) != 0)
        return bad_line(where, "an eval line without iteration, rows, loss and auc");
    r->n_eval++;
    r->eval = (struct runlog_eval){iteration, (uint64_t)rows, loss,
                                   json_is_number(auc) ? json_number_value(auc) : NAN};
    return ST_OK;
}

static enum st take_end(struct runlog *r, json_t *j, const char *where)
{
    const char *digest;
    if (json_unpack(j, "{s:F, s:F, s:F, s:s}", "seconds", &r->seconds, "samples_per_s",
                    &r->samples_per_s, "exposed_wait_s", &r->exposed_wait_s, "digest",
                    &digest) != 0 ||
        strlen(digest) != DIGEST_HEX_BYTES - 1)
        return bad_line(where, "an end line without seconds, speed, wait and digest");
    memcpy(r->digest, digest, DIGEST_HEX_BYTES);
    r->ended = true;
    return ST_OK;
}

static enum st take_line(struct runlog *r, const char *path, size_t number, const char *line)
{
    char where[512];
    snprintf(where, sizeof(where), "%s:%zu", path, number);
    json_t *j = json_loads(line, 0, NULL);
    const char *event = json_string_value(json_object_get(j, "event"));
    enum st st;
    if (event == NULL) st = bad_line(where, "not a JSON object with an \"event\"");
    else if (strcmp(event, "train") == 0) st = take_train(r, j, where);
    else if (strcmp(event, "eval") == 0) st = take_eval(r, j, where);
    else if (strcmp(event, "end") == 0) st = take_end(r, j, where);
    else if (strcmp(event, "planted") == 0) st = ST_OK; /* known before the run, not by it */
    else st = bad_line(where, "an event that no run writes");
    json_decref(j);
    return st;
}

enum st runlog_read(const char *path, struct runlog *out)
{
    struct runlog r = {0};
    enum st st = ST_OK;
    char *line = NULL;
    size_t room = 0;
    FILE *f = fopen(path, "r");
    if (f == NULL)
        return log_fail(errno == EACCES ? ST_PERM : ST_NOINPUT, path, "%s", strerror(errno));
    for (size_t number = 1; st == ST_OK && getline(&line, &room, f) >= 0; number++)
        st = take_line(&r, path, number, line);
    if (st == ST_OK && ferror(f)) st = log_fail(ST_IO, path, "cannot read");
    free(line);
    fclose(f);
    if (st == ST_OK) *out = r;
    return st;
}
