#include "config/config_check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/log.h"

/* Log at the place that said section.key. */
static enum st fail_at(struct doc *d, const char *section, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static enum st fail_at(struct doc *d, const char *section, const char *key, const char *fmt, ...)
{
    char where[DOC_WHERE_BYTES], text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    return log_fail(ST_CONFIG, doc_where(d, doc_find(d, section, key), where), "%s", text);
}

static enum st synthetic_only(struct doc *d, const char *key)
{
    return fail_at(d, "data", key, "data.%s is for data.format synthetic alone; leave it out", key);
}

static enum st check_data(const struct config *c, struct doc *d)
{
    if (c->data.format == DATA_SYNTHETIC) {
        if (c->data.rows == 0)
            return fail_at(d, "data", "rows", "data.rows is missing; format synthetic needs it");
        if (c->data.train_rows > c->data.rows)
            return fail_at(d, "data", "train_rows",
                           "data.train_rows %" PRIu64 " is more than data.rows %" PRIu64,
                           c->data.train_rows, c->data.rows);
        if (c->data.train_rows == c->data.rows && c->data.eval_rows == 0)
            return fail_at(d, "data", "train_rows",
                           "data.train_rows takes all %" PRIu64 " data.rows: nothing is held out; "
                           "lower it or set data.eval_rows", c->data.rows);
        return ST_OK;
    }
    if (c->data.path == NULL)
        return fail_at(d, "data", "format", "data.path is missing; name the file to train on");
    if (c->data.rows != 0) return synthetic_only(d, "rows");
    if (c->data.seed != 1) return synthetic_only(d, "seed"); /* 1: what is written when not given */
    return ST_OK;
}

static enum st check_model(const struct config *c, struct doc *d)
{
    uint32_t bottom = c->model.bottom_mlp[c->model.n_bottom_mlp - 1];
    uint32_t top = c->model.top_mlp[c->model.n_top_mlp - 1];
    if (bottom != c->model.dim)
        return fail_at(d, "model", "bottom_mlp",
                       "model.dim %" PRIu32 " != last of model.bottom_mlp %" PRIu32
                       "; the bottom MLP must end in vectors as wide as a row",
                       c->model.dim, bottom);
    if (top != 1)
        return fail_at(d, "model", "top_mlp",
                       "last of model.top_mlp is %" PRIu32 "; want 1 (the click)", top);
    return ST_OK;
}

/* The multiple of `slices` at or above `batch`, or below where that would be out of range. */
static uint32_t next_multiple(uint32_t batch, uint32_t slices)
{
    uint32_t up = (batch + slices - 1) / slices * slices;
    return up <= 1048576 ? up : batch / slices * slices;
}

static enum st check_train(const struct config *c, struct doc *d)
{
    uint32_t batch = c->train.global_batch, slices = c->train.slices;
    if (batch % slices != 0)
        return fail_at(d, "train", "global_batch",
                       "train.global_batch %" PRIu32 " is not divisible by train.slices %" PRIu32
                       "; the next that is: %" PRIu32,
                       batch, slices, next_multiple(batch, slices));
    if (c->train.iterations == 0 && c->train.epochs == 0)
        return fail_at(d, "train", "iterations",
                       "neither train.iterations nor train.epochs is given; give one");
    if (c->train.iterations != 0 && c->train.epochs != 0)
        return fail_at(d, "train", "epochs",
                       "train.iterations %" PRIu64 " and train.epochs %" PRIu32
                       " are both given; leave one out",
                       c->train.iterations, c->train.epochs);
    return ST_OK;
}

static enum st check_cluster(const struct config *c, struct doc *d)
{
    if (c->cluster.trainers > c->train.slices)
        return fail_at(d, "cluster", "trainers",
                       "%" PRIu32 " trainers share %" PRIu32
                       " slices; lower cluster.trainers or raise train.slices",
                       c->cluster.trainers, c->train.slices);
    return ST_OK;
}

static enum st check_device(const struct config *c, struct doc *d)
{
    if (c->cluster.device == DEVICE_CPU && c->device.precision == PRECISION_TF32)
        return fail_at(d, "device", "precision",
                       "tf32 is for cluster.device cuda; the cpu has fp32 and bf16");
    return ST_OK;
}

static enum st check_run(const struct config *c, struct doc *d)
{
    if (c->run.dir == NULL)
        return fail_at(d, "run", "dir", "run.dir is missing; set it or give --run-dir DIR");
    if (c->run.eval_every != 0 && c->data.train_rows == 0 && c->data.eval_path == NULL)
        return fail_at(d, "run", "eval_every",
                       "run.eval_every is %" PRIu64 ", but nothing is held out; set "
                       "data.train_rows or data.eval_path", c->run.eval_every);
    if (c->run.snapshot_every != 0)
        return fail_at(d, "run", "snapshot_every",
                       "snapshots are not supported yet; leave run.snapshot_every at 0");
    return ST_OK;
}

enum st config_check(const struct config *c, struct doc *d)
{
    enum st st = check_data(c, d);
    if (st == ST_OK) st = check_model(c, d);
    if (st == ST_OK) st = check_train(c, d);
    if (st == ST_OK) st = check_cluster(c, d);
    if (st == ST_OK) st = check_device(c, d);
    if (st == ST_OK) st = check_run(c, d);
    return st;
}
