/* The planted click model over the ids of synthetic_law.c, and the reader that serves both.
 *
 * The effects are drawn first, then bias and scale are set so that a fixed set of samples far
 * behind any that is trained on has the wanted click rate and the wanted deviation of the logit.
 * So every seed and every set of tables gives a problem of the same difficulty. */
#include "data/synthetic.h"

#include <math.h>
#include <stdbool.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "data/auc.h"
#include "data/reader.h"
#include "data/synthetic_law.h"

enum { EFFECTS = 256, NO_RANK_EFFECT = EFFECTS, EFFECTS_PER_TABLE = EFFECTS + 2 }; /* even */
enum { CALIBRATION_SAMPLES = 4096 };
static const uint64_t CALIBRATION_FIRST = (uint64_t)1 << 62;
static const double CLICK_RATE = 0.25, LOGIT_DEVIATION = 1.4;
static const double HALF_RANK = 24.0; /* at this rank an effect's variance has halved */

struct synthetic {
    struct law *law;              /* owns */
    uint64_t seed;
    uint32_t n_dense, n_tables;
    double bias, scale;
    float *weight;                /* owns; [n_dense] per unit of the transformed value        */
    float *effect;                /* owns; [n_tables][EFFECTS_PER_TABLE] by rank              */
    int64_t *dense;               /* owns; scratch [n_dense]                                  */
    uint32_t *id, *rank;          /* owns; scratch [n_tables]                                 */
};

/* Before bias and scale, from the scratch. */
static double raw_logit(const struct synthetic *s)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < s->n_dense; i++) /* LAW_EMPTY is negative: 0 */
        sum += (double)s->weight[i] * (double)dense_transform(s->dense[i]);
    for (uint32_t t = 0; t < s->n_tables; t++) {
        const float *effect = s->effect + (size_t)t * EFFECTS_PER_TABLE;
        if (s->rank[t] == LAW_NO_RANK) sum += (double)effect[NO_RANK_EFFECT];
        else if (s->rank[t] < EFFECTS) sum += (double)effect[s->rank[t]];
    }
    return sum;
}

static void draw_effects(struct synthetic *s)
{
    rng_normal(s->seed, RNG_SYNTHETIC + LAW_WEIGHT, 0, 0.5f, s->weight, s->n_dense);
    for (uint32_t i = 0; i < s->n_dense; i++) s->weight[i] /= (float)law_dense_width(i);
    for (uint32_t t = 0; t < s->n_tables; t++) {
        float *effect = s->effect + (size_t)t * EFFECTS_PER_TABLE;
        rng_normal(s->seed, RNG_SYNTHETIC + LAW_EFFECT, (uint64_t)t * EFFECTS_PER_TABLE, 1.0f,
                   effect, EFFECTS_PER_TABLE);
        for (uint32_t r = 0; r < EFFECTS; r++)
            effect[r] *= (float)sqrt(1.0 / (1.0 + (double)r / HALF_RANK));
    }
}

static double sigmoid(double z)
{
    return 1.0 / (1.0 + exp(-z));
}

/* Bias at which the mean click probability of z[0..n) + bias is CLICK_RATE, by bisection. */
static double solve_bias(const double *z, uint32_t n, double mean)
{
    double low = -mean - 64.0, high = -mean + 64.0;
    for (int step = 0; step < 60; step++) {
        double middle = 0.5 * (low + high), rate = 0.0;
        for (uint32_t i = 0; i < n; i++) rate += sigmoid(z[i] + middle) / n;
        if (rate < CLICK_RATE) low = middle;
        else high = middle;
    }
    return 0.5 * (low + high);
}

/* Set bias and scale; `z` is scratch [CALIBRATION_SAMPLES]. */
static void calibrate(struct synthetic *s, double *z)
{
    const uint32_t n = CALIBRATION_SAMPLES;
    double mean = 0.0, variance = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        law_draw(s->law, CALIBRATION_FIRST + i, s->dense, s->id, s->rank);
        z[i] = raw_logit(s);
        mean += z[i] / n;
    }
    for (uint32_t i = 0; i < n; i++) variance += (z[i] - mean) * (z[i] - mean) / n;
    s->scale = variance > 0.0 ? LOGIT_DEVIATION / sqrt(variance) : 0.0;
    for (uint32_t i = 0; i < n; i++) z[i] *= s->scale;
    s->bias = solve_bias(z, n, mean * s->scale);
}

enum st synthetic_open(const struct config *cfg, struct synthetic **out)
{
    enum st st = ST_NOMEM;
    struct synthetic *s = mem_zalloc(1, sizeof(*s));
    double *z = mem_alloc(CALIBRATION_SAMPLES, sizeof(*z));
    if (s == NULL || z == NULL) goto err;
    s->seed = cfg->data.seed;
    s->n_dense = cfg->model.dense_features;
    s->n_tables = cfg->model.n_tables;
    s->weight = mem_alloc(s->n_dense, sizeof(*s->weight));
    s->effect = mem_alloc((size_t)s->n_tables * EFFECTS_PER_TABLE, sizeof(*s->effect));
    s->dense = mem_alloc(s->n_dense, sizeof(*s->dense));
    s->id = mem_alloc(s->n_tables, sizeof(*s->id));
    s->rank = mem_alloc(s->n_tables, sizeof(*s->rank));
    if (s->weight == NULL || s->effect == NULL || s->dense == NULL || s->id == NULL ||
        s->rank == NULL)
        goto err;
    TRY(law_open(cfg, &s->law), err_logged);
    draw_effects(s);
    calibrate(s, z);
    mem_free(z);
    *out = s;
    return ST_OK;

err:        log_fail(st, "synthetic data", "out of memory");
err_logged: mem_free(z);
            synthetic_close(s);
            return st;
}

void synthetic_close(struct synthetic *s)
{
    if (s == NULL) return;
    law_close(s->law);
    mem_free(s->rank);
    mem_free(s->id);
    mem_free(s->dense);
    mem_free(s->effect);
    mem_free(s->weight);
    mem_free(s);
}

double synthetic_logit(struct synthetic *s, uint64_t index)
{
    law_draw(s->law, index, s->dense, s->id, s->rank);
    return s->bias + s->scale * raw_logit(s);
}

void synthetic_sample(struct synthetic *s, uint64_t index, struct synthetic_sample *out)
{
    uint32_t w[4];
    double logit = synthetic_logit(s, index);
    rng_words(s->seed, RNG_SYNTHETIC + LAW_LABEL, index, 0, w);
    bool clicked = (double)w[0] * 0x1p-32 < sigmoid(logit);
    *out = (struct synthetic_sample){s->dense, s->id, logit, clicked};
}

/* --- which rows, and how well they can be predicted -------------------------------------- */

enum st synthetic_rows(const struct config *cfg, int eval, uint64_t *first, uint64_t *end)
{
    const uint64_t rows = cfg->data.rows, train = cfg->data.train_rows, held = cfg->data.eval_rows;
    if (cfg->data.eval_path != NULL)
        return log_fail(ST_CONFIG, "data.eval_path", "means nothing with format synthetic; set "
                        "data.train_rows and data.eval_rows");
    if (train > rows)
        return log_fail(ST_DATA, "synthetic data", "data.train_rows is %llu, but data.rows only "
                        "%llu", (unsigned long long)train, (unsigned long long)rows);
    uint64_t trained = train == 0 ? rows : train;
    uint64_t behind = held > UINT64_MAX - trained ? UINT64_MAX : trained + held;
    *first = eval ? trained : 0;
    *end = !eval ? trained : held > 0 ? behind : rows; /* the stream does not end at `rows` */
    return ST_OK;
}

static enum st score_rows(struct synthetic *s, uint64_t first, size_t n, double *logloss,
                          double *auc)
{
    enum st st = ST_NOMEM;
    float *logit = mem_alloc(n, sizeof(*logit)), *label = mem_alloc(n, sizeof(*label));
    if (logit == NULL || label == NULL) {
        log_fail(st, "synthetic data", "out of memory for %zu logits", n);
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        struct synthetic_sample sample;
        synthetic_sample(s, first + i, &sample);
        logit[i] = (float)sample.logit;
        label[i] = (float)sample.label;
    }
    st = auc_exact(logit, label, n, auc);
    if (st == ST_OK) *logloss = auc_logloss(logit, label, n);

done:
    mem_free(label);
    mem_free(logit);
    return st;
}

enum st synthetic_best(const struct config *cfg, int eval, double *logloss, double *auc)
{
    struct synthetic *s;
    uint64_t first, end;
    enum st st = synthetic_rows(cfg, eval, &first, &end);
    if (st != ST_OK) return st;
    if (first == end) return log_fail(ST_DATA, "synthetic data", "0 samples; need >= 1");
    st = synthetic_open(cfg, &s);
    if (st != ST_OK) return st;
    st = score_rows(s, first, (size_t)(end - first), logloss, auc);
    synthetic_close(s);
    return st;
}

/* --- the reader -------------------------------------------------------------------------- */

struct synthetic_reader {
    struct reader base;
    struct synthetic *synthetic;  /* owns */
    uint64_t row;
};

static enum st synthetic_read(struct reader *r, struct raw_samples *out, uint32_t want,
                              uint32_t *got)
{
    struct synthetic_reader *y = (struct synthetic_reader *)r;
    const size_t nd = y->synthetic->n_dense, F = y->synthetic->n_tables;
    uint32_t n = 0;
    for (; n < want && y->row < y->base.rows; n++, y->row++) {
        struct synthetic_sample sample;
        synthetic_sample(y->synthetic, y->row, &sample);
        out->label[n] = sample.label;
        for (size_t i = 0; i < nd; i++) /* LAW_EMPTY is negative: 0 */
            out->dense[n * nd + i] = dense_transform(sample.dense[i]);
        for (size_t t = 0; t < F; t++) out->id[n * F + t] = sample.id[t];
    }
    *got = n;
    return ST_OK;
}

static enum st synthetic_seek(struct reader *r, uint64_t row, uint64_t *held)
{
    struct synthetic_reader *y = (struct synthetic_reader *)r;
    if (row >= y->base.rows) {
        *held = y->base.rows;
        return ST_END;
    }
    y->row = row;
    return ST_OK;
}

static void synthetic_reader_close(struct reader *r)
{
    struct synthetic_reader *y = (struct synthetic_reader *)r;
    if (y == NULL) return;
    synthetic_close(y->synthetic);
    mem_free(y);
}

enum st synthetic_reader_open(const struct config *cfg, uint64_t rows, struct reader **out)
{
    static const struct reader_ops ops = {synthetic_read, synthetic_seek, synthetic_reader_close};
    struct synthetic_reader *y = mem_zalloc(1, sizeof(*y));
    if (y == NULL) return log_fail(ST_NOMEM, "synthetic data", "out of memory");
    y->base = (struct reader){&ops, rows};
    enum st st = synthetic_open(cfg, &y->synthetic);
    if (st != ST_OK) {
        mem_free(y);
        return st;
    }
    *out = &y->base;
    return ST_OK;
}
