#include "tests/support/reference_dlrm.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"

static void *zeros(size_t n, size_t size)
{
    void *p = mem_zalloc(n, size);
    CHECK(p != NULL, "tests have memory");
    return p;
}

/* --- one sample ----------------------------------------------------------------------------- */

struct mlp {
    uint32_t n;
    const uint32_t *width;   /* [n + 1]                                             */
    int last_relu;
    const double *params;    /* W, b of its first layer                             */
    double *grad;            /* likewise, or NULL                                   */
    double **act;            /* [n + 1] activations of this sample; act[0] is input */
};

static size_t layer_size(const uint32_t *width, uint32_t k)
{
    return (size_t)width[k + 1] * width[k] + width[k + 1];
}

static void mlp_init(struct mlp *m, uint32_t n, const uint32_t *width, int last_relu)
{
    *m = (struct mlp){.n = n, .width = width, .last_relu = last_relu};
    m->act = zeros(n + 1, sizeof(*m->act));
    for (uint32_t k = 0; k <= n; k++) m->act[k] = zeros(width[k], sizeof(double));
}

static void mlp_fini(struct mlp *m)
{
    for (uint32_t k = 0; k <= m->n; k++) mem_free(m->act[k]);
    mem_free(m->act);
}

static void mlp_forward(struct mlp *m)
{
    const double *w = m->params;
    for (uint32_t k = 0; k < m->n; w += layer_size(m->width, k), k++) {
        uint32_t in = m->width[k], out = m->width[k + 1];
        const double *bias = w + (size_t)out * in;
        for (uint32_t i = 0; i < out; i++) {
            double z = bias[i];
            for (uint32_t j = 0; j < in; j++) z += w[(size_t)i * in + j] * m->act[k][j];
            int relu = k + 1 < m->n || m->last_relu;
            m->act[k + 1][i] = relu && z < 0 ? 0 : z;
        }
    }
}

/* d: gradient of the output on entry, of the input on return; room for the widest layer. */
static void mlp_backward(struct mlp *m, double *d, double *scratch)
{
    size_t at = 0;
    for (uint32_t k = 0; k < m->n; k++) at += layer_size(m->width, k);
    for (uint32_t k = m->n; k-- > 0;) {
        uint32_t in = m->width[k], out = m->width[k + 1];
        at -= layer_size(m->width, k);
        double *dw = m->grad + at, *db = dw + (size_t)out * in;
        const double *w = m->params + at;
        int relu = k + 1 < m->n || m->last_relu;
        memset(scratch, 0, in * sizeof(*scratch));
        for (uint32_t i = 0; i < out; i++) {
            if (relu && m->act[k + 1][i] == 0) continue;
            db[i] += d[i];
            for (uint32_t j = 0; j < in; j++) {
                dw[(size_t)i * in + j] += d[i] * m->act[k][j];
                scratch[j] += d[i] * w[(size_t)i * in + j];
            }
        }
        memcpy(d, scratch, in * sizeof(*d));
    }
}

/* --- a batch -------------------------------------------------------------------------------- */

struct net {
    const struct ref_shape *s;
    struct mlp bottom, top;
    double *t, *dt;          /* (F+1, D)          */
    double *d, *scratch;     /* (widest)          */
};

static size_t mlp_params(uint32_t n, const uint32_t *width)
{
    size_t all = 0;
    for (uint32_t k = 0; k < n; k++) all += layer_size(width, k);
    return all;
}

size_t ref_params(const struct ref_shape *s)
{
    return mlp_params(s->n_bottom, s->bottom) + mlp_params(s->n_top, s->top);
}

size_t ref_tensor(const struct ref_shape *s, uint32_t k, size_t *offset)
{
    uint32_t layer = k / 2;
    int top = layer >= s->n_bottom;
    const uint32_t *width = top ? s->top : s->bottom;
    if (top) layer -= s->n_bottom;
    size_t at = top ? mlp_params(s->n_bottom, s->bottom) : 0;
    size_t weights = (size_t)width[layer + 1] * width[layer];
    at += mlp_params(layer, width);
    *offset = k % 2 == 0 ? at : at + weights;
    return k % 2 == 0 ? weights : width[layer + 1];
}

static void net_init(struct net *n, const struct ref_shape *s, const double *params, double *grad)
{
    size_t vectors = (size_t)s->n_tables + 1, widest = 0;
    size_t bottom_params = mlp_params(s->n_bottom, s->bottom);
    n->s = s;
    mlp_init(&n->bottom, s->n_bottom, s->bottom, 1);
    mlp_init(&n->top, s->n_top, s->top, 0);
    n->bottom.params = params;
    n->top.params = params + bottom_params;
    n->bottom.grad = grad;
    n->top.grad = grad == NULL ? NULL : grad + bottom_params;
    for (uint32_t k = 0; k <= s->n_bottom; k++) widest += s->bottom[k];
    for (uint32_t k = 0; k <= s->n_top; k++) widest += s->top[k];
    n->t = zeros(vectors * s->dim, sizeof(double));
    n->dt = zeros(vectors * s->dim, sizeof(double));
    n->d = zeros(widest, sizeof(double));
    n->scratch = zeros(widest, sizeof(double));
}

static void net_fini(struct net *n)
{
    mem_free(n->scratch);
    mem_free(n->d);
    mem_free(n->dt);
    mem_free(n->t);
    mlp_fini(&n->top);
    mlp_fini(&n->bottom);
}

/* Returns the logit. */
static double net_forward(struct net *n, const float *dense, const double *rows)
{
    const struct ref_shape *s = n->s;
    uint32_t D = s->dim, V = s->n_tables + 1;
    for (uint32_t j = 0; j < s->dense_features; j++) n->bottom.act[0][j] = (double)dense[j];
    mlp_forward(&n->bottom);
    double *r = n->top.act[0];
    memcpy(n->t, n->bottom.act[s->n_bottom], D * sizeof(double));
    memcpy(n->t + D, rows, (size_t)s->n_tables * D * sizeof(double));
    memcpy(r, n->t, D * sizeof(double));
    r += D;
    for (uint32_t i = 0; i < V; i++)
        for (uint32_t j = 0; j < i; j++, r++) {
            *r = 0;
            for (uint32_t d = 0; d < D; d++) *r += n->t[i * D + d] * n->t[j * D + d];
        }
    mlp_forward(&n->top);
    return n->top.act[s->n_top][0];
}

/* Adds to the gradients of the parameters; leaves the rows' in dt + D. */
static void net_backward(struct net *n, double dlogit)
{
    const struct ref_shape *s = n->s;
    uint32_t D = s->dim, V = s->n_tables + 1;
    n->d[0] = dlogit;
    mlp_backward(&n->top, n->d, n->scratch);
    memset(n->dt, 0, (size_t)V * D * sizeof(double));
    memcpy(n->dt, n->d, D * sizeof(double));
    const double *dz = n->d + D;
    for (uint32_t i = 0; i < V; i++)
        for (uint32_t j = 0; j < i; j++, dz++)
            for (uint32_t d = 0; d < D; d++) {
                n->dt[i * D + d] += *dz * n->t[j * D + d];
                n->dt[j * D + d] += *dz * n->t[i * D + d];
            }
    memcpy(n->d, n->dt, D * sizeof(double));
    mlp_backward(&n->bottom, n->d, n->scratch);
}

double ref_dlrm(const struct ref_shape *s, const double *params, const struct ref_batch *batch,
                double scale, const struct ref_grads *out)
{
    struct net n;
    double loss = 0;
    size_t row_values = (size_t)s->n_tables * s->dim;
    double *grad = out->params;
    if (out->rows != NULL && grad == NULL) grad = zeros(ref_params(s), sizeof(double));
    if (out->params != NULL) memset(grad, 0, ref_params(s) * sizeof(double));
    net_init(&n, s, params, grad);
    for (uint32_t b = 0; b < batch->B; b++) {
        double y = (double)batch->label[b];
        double z = net_forward(&n, batch->dense + (size_t)b * s->dense_features,
                               batch->rows + b * row_values);
        double p = 1 / (1 + exp(-z));
        loss += (z > 0 ? z : 0) - z * y + log1p(exp(-fabs(z)));
        if (out->prob != NULL) out->prob[b] = p;
        if (grad != NULL) net_backward(&n, (p - y) * scale);
        if (out->rows != NULL)
            memcpy(out->rows + b * row_values, n.dt + s->dim, row_values * sizeof(double));
    }
    net_fini(&n);
    if (grad != out->params) mem_free(grad);
    return loss;
}

/* --- a run ---------------------------------------------------------------------------------- */

struct ref_trainer *ref_trainer_open(const struct ref_shape *s, const uint64_t *table_rows,
                                     enum optimizer optimizer, double learning_rate,
                                     double epsilon)
{
    struct ref_trainer *t = zeros(1, sizeof(*t));
    t->shape = *s;
    t->optimizer = optimizer;
    t->learning_rate = learning_rate;
    t->epsilon = epsilon;
    t->params = zeros(ref_params(s), sizeof(double));
    t->state = zeros(ref_params(s), sizeof(double));
    t->table = zeros(s->n_tables, sizeof(*t->table));
    t->table_state = zeros(s->n_tables, sizeof(*t->table_state));
    t->table_rows = zeros(s->n_tables, sizeof(*t->table_rows));
    for (uint32_t f = 0; f < s->n_tables; f++) {
        size_t state_width = optimizer == OPT_ROWWISE_ADAGRAD ? 1 : s->dim;
        t->table_rows[f] = table_rows[f];
        t->table[f] = zeros(table_rows[f] * s->dim, sizeof(double));
        t->table_state[f] = zeros(table_rows[f] * state_width, sizeof(double));
    }
    return t;
}

void ref_trainer_close(struct ref_trainer *t)
{
    for (uint32_t f = 0; f < t->shape.n_tables; f++) {
        mem_free(t->table_state[f]);
        mem_free(t->table[f]);
    }
    mem_free(t->table_rows);
    mem_free(t->table_state);
    mem_free(t->table);
    mem_free(t->state);
    mem_free(t->params);
    mem_free(t);
}

static void update(const struct ref_trainer *t, size_t n, const double *g, double *w, double *state)
{
    for (size_t i = 0; i < n; i++) {
        if (t->optimizer == OPT_SGD) {
            w[i] -= t->learning_rate * g[i];
            continue;
        }
        state[i] += g[i] * g[i];
        w[i] -= t->learning_rate * g[i] / (sqrt(state[i]) + t->epsilon);
    }
}

static void update_row(const struct ref_trainer *t, uint32_t f, uint64_t row, const double *g)
{
    uint32_t D = t->shape.dim;
    double *w = t->table[f] + row * D;
    if (t->optimizer != OPT_ROWWISE_ADAGRAD) {
        update(t, D, g, w, t->table_state[f] + row * D);
        return;
    }
    double *state = t->table_state[f] + row, squares = 0;
    for (uint32_t d = 0; d < D; d++) squares += g[d] * g[d];
    *state += squares / D;
    for (uint32_t d = 0; d < D; d++)
        w[d] -= t->learning_rate * g[d] / (sqrt(*state) + t->epsilon);
}

/* Sum the gradients of equal rows of table f, then one step for each. drows (B,F,D). */
static void update_table(struct ref_trainer *t, uint32_t f, uint32_t B, const uint64_t *row,
                         const double *drows)
{
    uint32_t F = t->shape.n_tables, D = t->shape.dim;
    double *sum = zeros((size_t)t->table_rows[f] * D, sizeof(*sum));
    char *used = zeros(t->table_rows[f], 1);
    for (size_t b = 0; b < B; b++) {
        uint64_t r = row[b * F + f];
        CHECK(r < t->table_rows[f], "row numbers fit their table");
        used[r] = 1;
        for (uint32_t d = 0; d < D; d++) sum[r * D + d] += drows[(b * F + f) * D + d];
    }
    for (uint64_t r = 0; r < t->table_rows[f]; r++)
        if (used[r]) update_row(t, f, r, sum + r * D);
    mem_free(used);
    mem_free(sum);
}

double ref_trainer_step(struct ref_trainer *t, uint32_t B, const float *dense, const float *label,
                        const uint64_t *row)
{
    uint32_t F = t->shape.n_tables, D = t->shape.dim;
    double *rows = zeros((size_t)B * F * D, sizeof(*rows));
    double *drows = zeros((size_t)B * F * D, sizeof(*drows));
    double *grad = zeros(ref_params(&t->shape), sizeof(*grad));
    for (size_t i = 0; i < (size_t)B * F; i++) {
        CHECK(row[i] < t->table_rows[i % F], "row numbers fit their table");
        memcpy(rows + i * D, t->table[i % F] + row[i] * D, D * sizeof(*rows));
    }
    struct ref_batch batch = {B, dense, label, rows};
    struct ref_grads out = {.params = grad, .rows = drows};
    double loss = ref_dlrm(&t->shape, t->params, &batch, 1.0 / B, &out);
    update(t, ref_params(&t->shape), grad, t->params, t->state);
    for (uint32_t f = 0; f < F; f++) update_table(t, f, B, row, drows);
    mem_free(grad);
    mem_free(drows);
    mem_free(rows);
    return loss / B;
}
