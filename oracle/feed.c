#include "oracle/feed.h"

#include <inttypes.h>
#include <stdbool.h>

#include "base/log.h"
#include "base/mem.h"

struct feed {
    const struct config *cfg;
    uint32_t B;               /* samples of a batch                                  */

    struct source *train;
    struct samples batch;     /* [B]                                                 */
    uint64_t n_batches;       /* handed out                                          */
    uint64_t n_passes;        /* over                                                */
    uint64_t pass_rows;       /* of the pass that is being read                      */
    bool over;                /* the last pass is over                               */

    struct source *eval;      /* NULL: no held-out rows are configured               */
    struct samples now, next; /* [B] read one ahead, to know which is the last       */
};

static enum st eval_open(struct feed *f)
{
    const struct config *c = f->cfg;
    enum st st;
    if (c->data.train_rows == 0 && c->data.eval_path == NULL) return ST_OK;
    TRY(source_open(c, 1, &f->eval), err);
    TRY(samples_open(f->B, c->model.dense_features, c->model.n_tables, &f->now), err);
    TRY(samples_open(f->B, c->model.dense_features, c->model.n_tables, &f->next), err);
err: return st;
}

enum st feed_open(const struct config *cfg, struct feed **out)
{
    enum st st = ST_NOMEM;
    struct feed *f = mem_zalloc(1, sizeof(*f));
    if (f == NULL) return log_fail(st, NULL, "no memory for reading ahead");
    f->cfg = cfg;
    f->B = cfg->train.global_batch;
    TRY(source_open(cfg, 0, &f->train), err);
    TRY(samples_open(f->B, cfg->model.dense_features, cfg->model.n_tables, &f->batch), err);
    TRY(eval_open(f), err);
    *out = f;
    return ST_OK;

err: feed_close(f);
     return st;
}

void feed_close(struct feed *f)
{
    if (f == NULL) return;
    samples_close(&f->next);
    samples_close(&f->now);
    source_close(f->eval);
    samples_close(&f->batch);
    source_close(f->train);
    mem_free(f);
}

/* The training rows are at their end: again from the start, unless that was the last pass. */
static enum st pass_end(struct feed *f)
{
    const struct config *c = f->cfg;
    if (f->pass_rows == 0)
        return log_fail(ST_DATA, c->data.path, "0 samples; need >= 1");
    f->pass_rows = 0;
    f->n_passes++;
    f->over = c->train.iterations == 0 && f->n_passes == c->train.epochs;
    return f->over ? ST_OK : source_rewind(f->train);
}

enum st feed_train(struct feed *f, const struct samples **out)
{
    const struct config *c = f->cfg;
    if (c->train.iterations != 0 && f->n_batches == c->train.iterations) return ST_END;
    enum st st = ST_OK;
    uint32_t n = 0;
    while (n < f->B && !f->over) {
        uint32_t got = 0;
        TRY(source_read(f->train, &f->batch, n, f->B - n, &got), err);
        n += got;
        f->pass_rows += got;
        if (n < f->B) TRY(pass_end(f), err);
    }
    if (n == 0) return ST_END;
#ifdef BUG_last_batch_dropped
    if (n < f->B) return ST_END; /* planted: a short batch is not worth it */
#endif
    f->batch.n = n;
    f->n_batches++;
    *out = &f->batch;
err: return st;
}

static enum st eval_read(struct feed *f)
{
    uint32_t got = 0;
    enum st st = source_read(f->eval, &f->next, 0, f->B, &got);
    if (st == ST_OK) f->next.n = got;
    return st;
}

enum st feed_eval_start(struct feed *f)
{
    if (f->eval == NULL) return ST_OK;
    enum st st;
    TRY(source_rewind(f->eval), err);
    TRY(eval_read(f), err);
    if (f->next.n == 0) log_note(NULL, "no held-out rows: nothing to evaluate");
err: return st;
}

enum st feed_eval(struct feed *f, const struct samples **out, int *last)
{
    if (f->eval == NULL || f->next.n == 0) return ST_END;
    struct samples swap = f->now;
    f->now = f->next;
    f->next = swap;
    f->next.n = 0;
    enum st st = f->now.n == f->B ? eval_read(f) : ST_OK;
    if (st != ST_OK) return st;
    *out = &f->now;
    *last = f->next.n == 0;
    return ST_OK;
}
