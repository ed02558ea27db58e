/* trainer/model.c - DLRM as a sequence of device calls. For one slice of B samples:
 *
 *   dense (B,13) -> bottom layers -> t[b][0] (D)
 *   table, slot  -> gather        -> t[b][1..F] (D each)      t (B,F+1,D)
 *   t -> interaction -> r (B, D + F(F+1)/2) -> top layers -> logit (B,1) -> loss
 *
 * and back. The bottom MLP's last layer writes into t, and reads its gradient from dt, at a row
 * distance of (F+1)D, so nothing is copied in between. */
#include "trainer/model.h"

#include <math.h>
#include <stdio.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"

enum { ALIGN_FLOATS = 16 }; /* a cache line: where tensors, buffers, what is prepared start */

static size_t align_up(size_t n)
{
    return (n + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

/* --- shapes --------------------------------------------------------------------------------- */

static uint32_t interaction_width(const struct model *m)
{
    return m->dim + m->n_tables * (m->n_tables + 1) / 2;
}

static void add_tensor(struct model *m, const char *mlp, uint32_t layer, int is_bias,
                       uint32_t rows, uint32_t cols)
{
    struct model_tensor *t = &m->tensor[m->n_tensors++];
    /* The reference's modules alternate Linear and activation: layer k is number 2k. */
    snprintf(t->name, sizeof(t->name), "%s.%u.%s", mlp, 2 * layer, is_bias ? "bias" : "weight");
    t->offset = m->n_params;
    t->rows = rows;
    t->cols = cols;
    t->is_bias = is_bias;
    m->n_params += align_up((size_t)rows * cols);
}

static void add_mlp(struct model *m, const char *mlp, const uint32_t *width, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++) {
        add_tensor(m, mlp, k, 0, width[k + 1], width[k]);
        add_tensor(m, mlp, k, 1, width[k + 1], 1);
    }
}

static void fill_widths(uint32_t input, const uint32_t *layer, uint32_t n, uint32_t *width)
{
    width[0] = input;
    for (uint32_t k = 0; k < n; k++) width[k + 1] = layer[k];
}

enum st model_open(const struct config *cfg, struct model **out)
{
    uint32_t n_bottom = cfg->model.n_bottom_mlp, n_top = cfg->model.n_top_mlp;
    CHECK(n_bottom > 0 && cfg->model.bottom_mlp[n_bottom - 1] == cfg->model.dim,
          "config_open has checked it");
    CHECK(n_top > 0 && cfg->model.top_mlp[n_top - 1] == 1, "config_open has checked it");

    struct model *m = mem_zalloc(1, sizeof(*m));
    if (m == NULL) goto err;
    m->tensor = mem_zalloc(2 * ((size_t)n_bottom + n_top), sizeof(*m->tensor));
    if (m->tensor == NULL) goto err_model;
    m->bottom = mem_zalloc((size_t)n_bottom + 1, sizeof(*m->bottom));
    if (m->bottom == NULL) goto err_tensor;
    m->top = mem_zalloc((size_t)n_top + 1, sizeof(*m->top));
    if (m->top == NULL) goto err_bottom;

    m->dense_features = cfg->model.dense_features;
    m->n_tables = cfg->model.n_tables;
    m->dim = cfg->model.dim;
    m->n_bottom = n_bottom;
    m->n_top = n_top;
    fill_widths(m->dense_features, cfg->model.bottom_mlp, n_bottom, m->bottom);
    fill_widths(interaction_width(m), cfg->model.top_mlp, n_top, m->top);
    add_mlp(m, "bot_l", m->bottom, n_bottom);
    add_mlp(m, "top_l", m->top, n_top);
    *out = m;
    return ST_OK;

err_bottom: mem_free(m->bottom);
err_tensor: mem_free(m->tensor);
err_model:  mem_free(m);
err:        return log_fail(ST_NOMEM, "model", "out of memory for its shape; free some");
}

void model_close(struct model *m)
{
    if (m == NULL) return;
    mem_free(m->top);
    mem_free(m->bottom);
    mem_free(m->tensor);
    mem_free(m);
}

void model_initial(const struct model *m, uint64_t seed, float *params)
{
    for (size_t i = 0; i < m->n_params; i++) params[i] = 0.0f;
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        const struct model_tensor *t = &m->tensor[k];
        double variance = t->is_bias ? 1.0 / t->rows : 2.0 / ((double)t->rows + t->cols);
        rng_normal(seed, RNG_DENSE_0 + k, 0, (float)sqrt(variance), params + t->offset,
                   (size_t)t->rows * t->cols);
    }
}

/* --- on a device ---------------------------------------------------------------------------- */

void model_place(struct model *m, struct device *d)
{
    m->n_floats = m->prepared_bytes = 0;
    for (uint32_t k = 0; k < m->n_tensors; k++) {
        struct model_tensor *t = &m->tensor[k];
        size_t floats = t->is_bias ? t->rows : d->ops->weight_floats(d, t->cols, t->rows);
        t->at = m->n_floats;
        t->prepared = m->prepared_bytes;
        m->n_floats += align_up(floats);
        if (t->is_bias) continue;
        size_t bytes = d->ops->prepared_bytes(d, t->cols, t->rows);
        m->prepared_bytes += align_up((bytes + 3) / sizeof(float)) * sizeof(float);
    }
}

enum st model_put(const struct model *m, struct device *d, const float *params, float *w)
{
    enum st st = ST_OK;
    for (uint32_t k = 0; k < m->n_tensors && st == ST_OK; k++) {
        const struct model_tensor *t = &m->tensor[k];
        const float *host = params + t->offset;
        st = t->is_bias ? d->ops->copy_in(d, w + t->at, host, t->rows * sizeof(float))
                        : d->ops->weight_put(d, t->cols, t->rows, host, w + t->at);
    }
    return st;
}

enum st model_get(const struct model *m, struct device *d, const float *w, float *params)
{
    enum st st = ST_OK;
    for (uint32_t k = 0; k < m->n_tensors && st == ST_OK; k++) {
        const struct model_tensor *t = &m->tensor[k];
        float *host = params + t->offset;
        st = t->is_bias ? d->ops->copy_out(d, w + t->at, host, t->rows * sizeof(float), NULL)
                        : d->ops->weight_get(d, t->cols, t->rows, w + t->at, host);
    }
    return st;
}

/* The layer of weight tensor k. */
static struct linear linear_of(const struct model *m, const struct model_params *p, uint32_t k,
                               bool relu)
{
    const struct model_tensor *t = &m->tensor[k];
    return (struct linear){t->cols, t->rows, relu, p->w + t->at, p->w + t[1].at,
                           (char *)p->prepared + t->prepared};
}

struct preparation { const struct model *m; struct device *d; const struct model_params *p; };

static enum st prepare_layer(void *ctx, uint32_t lane, uint32_t layer)
{
    const struct preparation *x = ctx;
    struct linear l = linear_of(x->m, x->p, 2 * layer, false);
    return x->d->ops->prepare(x->d, lane, &l);
}

enum st model_prepare(const struct model *m, struct device *d, const struct model_params *p)
{
    struct preparation x = {m, d, p};
    if (m->prepared_bytes == 0) return ST_OK;
    return d->ops->parallel(d, m->n_bottom + m->n_top, prepare_layer, &x);
}

/* --- buffers -------------------------------------------------------------------------------- */

/* All activations, kept from forward for backward, and two buffers that gradients pass through:
 * each layer reads its dy from one and writes its dx to the other. One allocation. */
struct model_work {
    struct device *dev;   /* borrowed until model_work_close                                   */
    uint32_t samples;     /* room                                                              */
    size_t bytes;
    float *arena;         /* device memory; owns all below                                     */
    float **bottom;       /* [n_bottom - 1] layer outputs (B, width); the last one's is in t   */
    float **top;          /* [n_top] layer outputs; the last is the logits (B,1)               */
    float *t;             /* (B, F+1, D)                                                       */
    float *r;             /* (B, D + F(F+1)/2)                                                 */
    float *grad[2];       /* (B, widest)                                                       */
};

static uint32_t widest(const struct model *m)
{
    uint32_t n = m->top[0];
    for (uint32_t k = 1; k <= m->n_top; k++) n = m->top[k] > n ? m->top[k] : n;
    for (uint32_t k = 1; k <= m->n_bottom; k++) n = m->bottom[k] > n ? m->bottom[k] : n;
    return n;
}

/* Point *p at `width` floats a sample, or (base NULL) only count them. */
static size_t take(float *base, size_t used, uint32_t samples, size_t width, float **p)
{
    if (base != NULL) *p = base + used;
    return used + align_up(samples * width);
}

/* Lay the buffers out from `base`; returns the floats they take. base NULL: only counts. */
static size_t lay_out(const struct model *m, struct model_work *w, float *base)
{
    size_t used = 0, vectors = (size_t)m->n_tables + 1;
    for (uint32_t k = 0; k + 1 < m->n_bottom; k++)
        used = take(base, used, w->samples, m->bottom[k + 1], &w->bottom[k]);
    for (uint32_t k = 0; k < m->n_top; k++)
        used = take(base, used, w->samples, m->top[k + 1], &w->top[k]);
    used = take(base, used, w->samples, vectors * m->dim, &w->t);
    used = take(base, used, w->samples, m->top[0], &w->r);
    for (int i = 0; i < 2; i++) used = take(base, used, w->samples, widest(m), &w->grad[i]);
    return used;
}

enum st model_work_open(const struct model *m, struct device *d, uint32_t samples,
                        struct model_work **out)
{
    struct model_work *w = mem_zalloc(1, sizeof(*w));
    if (w == NULL) goto err;
    w->dev = d;
    w->samples = samples;
    w->bottom = mem_zalloc(m->n_bottom, sizeof(*w->bottom));
    if (w->bottom == NULL) goto err_work;
    w->top = mem_zalloc(m->n_top, sizeof(*w->top));
    if (w->top == NULL) goto err_bottom;
    w->bytes = lay_out(m, w, NULL) * sizeof(float);
    w->arena = d->ops->alloc(d, w->bytes);
    if (w->arena == NULL) goto err_top;
    lay_out(m, w, w->arena);
    *out = w;
    return ST_OK;

err_top:    mem_free(w->top);
err_bottom: mem_free(w->bottom);
err_work:   mem_free(w);
err:        return log_fail(ST_NOMEM, "model", "out of memory for the activations of %u samples; "
                            "raise train.slices or lower train.global_batch", samples);
}

void model_work_close(struct model_work *w)
{
    if (w == NULL) return;
    w->dev->ops->free(w->dev, w->arena, w->bytes);
    mem_free(w->top);
    mem_free(w->bottom);
    mem_free(w);
}

/* --- one slice ------------------------------------------------------------------------------ */

/* What every step below needs; lives on the caller's stack. */
struct pass {
    const struct model *m;
    struct device *d;
    uint32_t lane;
    struct model_work *w;
    const struct model_params *params;
    const struct model_slice *s;
};

/* One fully connected layer in its place: parameters, input and output. */
struct layer {
    struct linear l;
    size_t weight, bias;       /* where gradients go                 */
    uint32_t ldy;              /* floats between rows of the output  */
    const float *x;
    float *y;
};

static struct layer bottom_layer(const struct pass *p, uint32_t k)
{
    const struct model *m = p->m;
    int last = k + 1 == m->n_bottom;
    return (struct layer){
        .l = linear_of(m, p->params, 2 * k, true),
        .weight = m->tensor[2 * k].at,
        .bias = m->tensor[2 * k + 1].at,
        .ldy = last ? (m->n_tables + 1) * m->dim : m->bottom[k + 1],
        .x = k == 0 ? p->s->dense : p->w->bottom[k - 1],
        .y = last ? p->w->t : p->w->bottom[k],
    };
}

static struct layer top_layer(const struct pass *p, uint32_t k)
{
    const struct model *m = p->m;
    uint32_t weight = 2 * (m->n_bottom + k);
    return (struct layer){
        .l = linear_of(m, p->params, weight, k + 1 < m->n_top),
        .weight = m->tensor[weight].at,
        .bias = m->tensor[weight + 1].at,
        .ldy = m->top[k + 1],
        .x = k == 0 ? p->w->r : p->w->top[k - 1],
        .y = p->w->top[k],
    };
}

static enum st layer_forward(const struct pass *p, struct layer l)
{
    return p->d->ops->linear_forward(p->d, p->lane, p->s->B, &l.l, l.x, l.y, l.ldy);
}

static enum st layer_backward(const struct pass *p, struct layer l, float *dy, float *grad,
                              float *dx)
{
    return p->d->ops->linear_backward(p->d, p->lane, p->s->B, &l.l, l.x, l.y, l.ldy, dy,
                                      grad + l.weight, grad + l.bias, dx);
}

/* Leaves the logits in w->top[n_top - 1]. */
static enum st forward(const struct pass *p)
{
    const struct model *m = p->m;
    const struct model_slice *s = p->s;
    const struct device_ops *ops = p->d->ops;
    enum st st = ST_OK;
    CHECK(s->B >= 1 && s->B <= p->w->samples, "a slice fits the buffers opened for it");
    for (uint32_t k = 0; k < m->n_bottom; k++) TRY(layer_forward(p, bottom_layer(p, k)), done);
    TRY(ops->gather(p->d, p->lane, s->B, m->n_tables, m->dim, s->table, s->stride, s->slot,
                    p->w->t), done);
    TRY(ops->interact_forward(p->d, p->lane, s->B, m->n_tables, m->dim, p->w->t, p->w->r), done);
    for (uint32_t k = 0; k < m->n_top; k++) TRY(layer_forward(p, top_layer(p, k)), done);
done:
    return st;
}

/* Starts from the gradient of the logits in w->grad[0]; the two buffers take turns. */
static enum st backward(const struct pass *p, float *grad, float *dt)
{
    const struct model *m = p->m;
    float *const *buffer = p->w->grad;
    uint32_t at = 0; /* buffer[at] holds dy */
    enum st st = ST_OK;
    for (uint32_t k = m->n_top; k-- > 0; at = 1 - at)
        TRY(layer_backward(p, top_layer(p, k), buffer[at], grad, buffer[1 - at]), done);
    TRY(p->d->ops->interact_backward(p->d, p->lane, p->s->B, m->n_tables, m->dim, p->w->t,
                                     buffer[at], dt), done);
    float *dy = dt; /* of the last bottom layer: dt[b][0], rows (F+1)D apart */
    for (uint32_t k = m->n_bottom; k-- > 0; dy = buffer[at], at = 1 - at)
        TRY(layer_backward(p, bottom_layer(p, k), dy, grad, k == 0 ? NULL : buffer[at]), done);
done:
    return st;
}

enum st model_train(const struct model *m, struct device *d, uint32_t lane, struct model_work *w,
                    const struct model_params *params, const struct model_slice *s, float scale,
                    float *grad, float *dt)
{
    struct pass p = {m, d, lane, w, params, s};
    enum st st;
    TRY(forward(&p), done);
    TRY(d->ops->bce(d, lane, s->B, w->top[m->n_top - 1], s->label, scale, w->grad[0],
                    grad + m->n_floats, NULL), done);
    TRY(backward(&p, grad, dt), done);
done:
    return st;
}

enum st model_eval(const struct model *m, struct device *d, uint32_t lane, struct model_work *w,
                   const struct model_params *params, const struct model_slice *s, float *prob,
                   float *loss)
{
    struct pass p = {m, d, lane, w, params, s};
    enum st st;
    TRY(forward(&p), done);
    TRY(d->ops->bce(d, lane, s->B, w->top[m->n_top - 1], s->label, 0.0f, NULL, loss, prob), done);
done:
    return st;
}
