#include "trainer/checkpoint.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "data/safetensors.h"

enum { PAGE_BYTES = 1 << 20, PATH_BYTES = 512 };

/* --- model.json ----------------------------------------------------------------------------- */

static json_t *numbers(const uint32_t *v, uint32_t n)
{
    json_t *a = json_array();
    for (uint32_t i = 0; i < n; i++) json_array_append_new(a, json_integer(v[i]));
    return a;
}

static json_t *describe(const struct config *c, uint64_t iterations)
{
    json_t *tables = json_array();
    for (uint32_t t = 0; t < c->model.n_tables; t++)
        json_array_append_new(tables, json_integer((json_int_t)c->model.tables[t]));
    return json_pack(
        "{s:s, s:i, s:o, s:i, s:o, s:o, s:s, s:f, s:f, s:i, s:I, s:s, s:s, s:i, s:I}",
        "model", "dlrm", "dense_features", (int)c->model.dense_features, "tables", tables,
        "dim", (int)c->model.dim,
        "bottom_mlp", numbers(c->model.bottom_mlp, c->model.n_bottom_mlp),
        "top_mlp", numbers(c->model.top_mlp, c->model.n_top_mlp),
        "optimizer", config_optimizer_name(c->train.optimizer),
        "learning_rate", (double)c->train.learning_rate, "epsilon", (double)c->train.epsilon,
        "global_batch", (int)c->train.global_batch, "iterations", (json_int_t)iterations,
        "id_mapping", "modulo", "dense_transform", "log1p", "slices", (int)c->train.slices,
        "seed", (json_int_t)c->train.seed);
}

enum st checkpoint_model_json(const struct config *cfg, uint64_t iterations, const char *dir)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/model.json", dir);
    json_t *j = describe(cfg, iterations);
    if (j == NULL) return ST_NOMEM;
    int rc = json_dump_file(j, path, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(j);
    return rc == 0 ? ST_OK : log_fail(ST_CANTCREATE, path, "%s", strerror(errno));
}

/* --- weights -------------------------------------------------------------------------------- */

/* Two files at once: pages arrive with value and state together. */
struct files { struct safetensors_writer *value, *state; };

static enum st create(const struct checkpoint *c, const char *dir, const char *name, int state,
                      struct safetensors_writer **out)
{
    const struct config *cfg = c->config;
    uint32_t F = cfg->model.n_tables, D = cfg->model.dim;
    uint32_t K = config_row_state(cfg->train.optimizer, D);
    size_t n = F + c->model->n_tensors;
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/%s%s.safetensors", dir, name, state ? ".state" : "");
    struct st_tensor *t = mem_zalloc(n, sizeof(*t));
    if (t == NULL) return ST_NOMEM;
    const char *tail = state ? ".state" : "";
    for (uint32_t i = 0; i < F; i++) {
        snprintf(t[i].name, sizeof(t[i].name), "emb_l.%u.weight%s", i, tail);
        t[i].rows = cfg->model.tables[i];
        t[i].cols = state ? K : D;
    }
    for (uint32_t i = 0; i < c->model->n_tensors; i++) {
        const struct model_tensor *m = &c->model->tensor[i];
        snprintf(t[F + i].name, sizeof(t[F + i].name), "%s%s", m->name, tail);
        t[F + i].rows = m->rows;
        t[F + i].cols = m->is_bias ? 0 : m->cols;
    }
    enum st st = safetensors_create(path, t, n, out);
    mem_free(t);
    return st;
}

/* One page of a table: `count` rows from `first` on, spread over the servers. */
struct page {
    struct msg **reply;        /* [servers] */
    struct fetch_reply *rows;  /* [servers] */
    uint32_t *next;            /* [servers] rows taken so far */
};

static enum st ask(const struct checkpoint *c, const struct export_request *e, struct page *p)
{
    enum st st = ST_OK;
    uint32_t servers = c->config->cluster.servers;
    uint32_t timeout_ms = c->config->cluster.timeout_s * 1000;
    for (uint32_t s = 0; s < servers && st == ST_OK; s++) {
        struct msg *req;
        struct rpc_header from;
        p->next[s] = 0;
        TRY(export_request_encode(&c->header, e, &req), err);
        TRY(rpc_call_wait(c->server[s], RPC_EXPORT, req, timeout_ms, &p->reply[s]), err);
        TRY(fetch_reply_decode(p->reply[s]->data, p->reply[s]->len, &from, &p->rows[s]), err);
    }
err:
    return st;
}

static enum st split_page(const struct checkpoint *c, const struct export_request *e,
                          struct page *p, float *value, float *state)
{
    const struct config *cfg = c->config;
    uint32_t D = cfg->model.dim, K = config_row_state(cfg->train.optimizer, D);
    size_t record = (size_t)(D + K) * sizeof(float);
    for (uint32_t i = 0; i < e->count; i++) {
        uint64_t id = row_id(e->table, e->first + i);
        uint32_t s = row_shard(id, config_shards(cfg)) / cfg->cluster.server_threads;
        if (p->next[s] >= p->rows[s].n || p->rows[s].row_floats != D + K)
            return log_fail(ST_BADMSG, "server", "export of table %u: too few rows", e->table);
        const uint8_t *at = p->rows[s].rows + p->next[s]++ * record;
        memcpy(value + (size_t)i * D, at, D * sizeof(float));
        memcpy(state + (size_t)i * K, at + D * sizeof(float), K * sizeof(float));
    }
    return ST_OK;
}

static enum st write_table(const struct checkpoint *c, uint32_t table, struct page *p,
                           float *value, float *state, uint32_t page_rows, struct files *f)
{
    enum st st = ST_OK;
    const struct config *cfg = c->config;
    uint32_t D = cfg->model.dim, K = config_row_state(cfg->train.optimizer, D);
    uint64_t rows = cfg->model.tables[table];
    for (uint64_t first = 0; first < rows && st == ST_OK; first += page_rows) {
        uint64_t left = rows - first;
        struct export_request e = {table, first, left < page_rows ? (uint32_t)left : page_rows};
        st = ask(c, &e, p);
        if (st == ST_OK) st = split_page(c, &e, p, value, state);
        if (st == ST_OK) st = safetensors_append(f->value, value, (size_t)e.count * D);
        if (st == ST_OK && f->state != NULL)
            st = safetensors_append(f->state, state, (size_t)e.count * K);
        for (uint32_t s = 0; s < cfg->cluster.servers; s++) {
            msg_close(p->reply[s]);
            p->reply[s] = NULL;
        }
    }
    return st;
}

static enum st write_tables(const struct checkpoint *c, struct files *f)
{
    enum st st = ST_NOMEM;
    const struct config *cfg = c->config;
    uint32_t D = cfg->model.dim, K = config_row_state(cfg->train.optimizer, D);
    uint32_t servers = cfg->cluster.servers;
    uint32_t page_rows = PAGE_BYTES / ((D + K) * (uint32_t)sizeof(float)) + 1;
    float *value = mem_alloc((size_t)page_rows * (D + K), sizeof(float));
    struct page p = {mem_zalloc(servers, sizeof(*p.reply)), mem_zalloc(servers, sizeof(*p.rows)),
                     mem_zalloc(servers, sizeof(*p.next))};
    if (value == NULL || p.reply == NULL || p.rows == NULL || p.next == NULL) goto err;
    st = ST_OK;
    for (uint32_t t = 0; t < cfg->model.n_tables && st == ST_OK; t++)
        st = write_table(c, t, &p, value, value + (size_t)page_rows * D, page_rows, f);
err:
    mem_free(p.next);
    mem_free(p.rows);
    mem_free(p.reply);
    mem_free(value);
    return st;
}

static enum st write_dense(const struct model *m, const float *p, struct safetensors_writer *w)
{
    enum st st = ST_OK;
    for (uint32_t i = 0; i < m->n_tensors && st == ST_OK; i++)
        st = safetensors_append(w, p + m->tensor[i].offset,
                                (size_t)m->tensor[i].rows * m->tensor[i].cols);
    return st;
}

enum st checkpoint_write(const struct checkpoint *c, const char *dir, const char *name, int state)
{
    enum st st;
    struct files f = {NULL, NULL};
    TRY(create(c, dir, name, 0, &f.value), err);
    if (state && c->state != NULL) TRY(create(c, dir, name, 1, &f.state), err);
    TRY(write_tables(c, &f), err);
    TRY(write_dense(c->model, c->params, f.value), err);
    if (f.state != NULL) TRY(write_dense(c->model, c->state, f.state), err);
    st = safetensors_commit(f.value);
    f.value = NULL;
    if (st == ST_OK && f.state != NULL) {
        st = safetensors_commit(f.state);
        f.state = NULL;
    }
err:
    safetensors_abandon(f.value);
    safetensors_abandon(f.state);
    return st;
}

/* --- digest --------------------------------------------------------------------------------- */

static const uint64_t KEY_DENSE = UINT64_C(1) << 63, KEY_DENSE_STATE = UINT64_C(3) << 62;

void checkpoint_digest_dense(const struct model *m, const float *params, const float *state,
                             struct digest *d)
{
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        const struct model_tensor *t = &m->tensor[i];
        size_t bytes = (size_t)t->rows * t->cols * sizeof(float);
        digest_add(d, KEY_DENSE | i, params + t->offset, bytes);
        if (state != NULL) digest_add(d, KEY_DENSE_STATE | i, state + t->offset, bytes);
    }
}

enum st checkpoint_digest(const struct checkpoint *c, struct digest *out)
{
    enum st st = ST_OK;
    struct digest sum = {0, 0};
    checkpoint_digest_dense(c->model, c->params, c->state, &sum);
    for (uint32_t s = 0; s < c->config->cluster.servers; s++) {
        struct msg *req, *reply = NULL;
        struct rpc_header from;
        struct digest part;
        TRY(plain_encode(&c->header, &req), err);
        TRY(rpc_call_wait(c->server[s], RPC_DIGEST, req, c->config->cluster.timeout_s * 1000,
                          &reply), err);
        st = digest_reply_decode(reply->data, reply->len, &from, &part);
        msg_close(reply);
        if (st != ST_OK) return log_fail(st, "server", "%u: its digest cannot be read", s);
        digest_merge(&sum, part);
    }
    *out = sum;
err:
    return st;
}
