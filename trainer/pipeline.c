/* The COMPUTE thread: follows the plans, one after the other. What one iteration does, and in which
 * order, is said in proto/plan.h; here each line of that list is one call. */
#include "trainer/pipeline.h"

#include <math.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/row.h"
#include "data/synthetic.h"
#include "trainer/checkpoint.h"
#include "trainer/dense.h"
#include "trainer/evaluate.h"
#include "trainer/grads.h"
#include "trainer/metrics.h"
#include "trainer/prefetch.h"
#include "trainer/values.h"
#include "trainer/writeback.h"

/* What goes on behind the compute of one iteration: deferred gradients of the iteration before and,
 * in the same messages, deferred values for the one after. */
struct deferred {
    struct grads grads;
    struct exchange_job job;
};

/* An iteration whose work is with the device: what is still to be asked and told. */
struct pending {
    bool open;
    int64_t iteration;
    uint32_t total;                /* samples of the global batch */
    uint64_t waited_ns;
    uint64_t mark;                 /* the device's; then the loss is there */
};

struct trainer {
    const struct trainer_cfg *cfg;
    const struct config *config;
    uint32_t rank, size, timeout_ms;
    struct rpc_header header;
    struct rpc_peer *oracle, **server;

    struct model *model;
    struct device *device;
    struct step *step;
    struct dense dense;
    struct evaluate evaluate;
    uint64_t cap_rows;
    uint32_t stride;               /* floats of a record: D + state                    */
    float *table;                  /* device [cap_rows][stride]: the row cache         */
    uint64_t *slot_row;            /* [cap_rows] id of the row owned there, for errors */

    struct exchange *exchange;
    struct prefetch *prefetch;
    struct writeback *writeback;
    struct exchange_job urgent_1, urgent_2;
    struct grads urgent;
    struct values urgent_values, deferred_values;   /* staged for the next boundary    */
    struct deferred deferred[2];
    uint32_t flying;               /* deferred[flying] is with EXCHANGE; the other one collects */
    struct pending pending;

    struct metrics *metrics;       /* rank 0 */
    struct trainer_result result;
    uint64_t start_ns, eval_ns, waited_ns;
};

static struct opt_step opt_of(const struct config *c)
{
    return (struct opt_step){c->train.optimizer, c->train.learning_rate, c->train.epsilon};
}

/* --- deferred work -------------------------------------------------------------------------- */

/* The deferred exchange that flies has landed: gradients are applied, values stay staged. */
static enum st deferred_finish(struct trainer *t)
{
    struct deferred *d = &t->deferred[t->flying];
    struct opt_step opt = opt_of(t->config);
    enum st st = exchange_wait(t->exchange, &d->job);
    if (st == ST_OK) st = grads_apply(&d->grads, &opt, t->table, t->stride);
    exchange_job_reset(&d->job, "deferred exchange");
    return st;
}

/* Start what has been collected, and the plan's deferred values with it. */
static enum st deferred_start(struct trainer *t, const struct plan *plan)
{
    enum st st = ST_OK;
    t->flying = !t->flying;
    struct deferred *d = &t->deferred[t->flying];
    if (plan != NULL)
        st = values_collect(&t->deferred_values, plan, VALUES_DEFERRED, t->device, t->table,
                            t->stride, t->config->model.dim, &d->job);
    return st == ST_OK ? exchange_start(t->exchange, &d->job) : st;
}

/* --- one iteration -------------------------------------------------------------------------- */

/* Rows that have left may be what others wait for, and this trainer for them in turn: so they are
 * sent before any wait. But to send them is to wait for an accelerator that still computes the
 * iteration before; when all rows are here already, they go once it has more work (run_train). */
static enum st wait_rows(struct trainer *t, struct ticket *ticket, uint64_t *waited_ns)
{
    enum st st = ST_OK;
    bool ahead = t->config->oracle.lookahead > 0;
    if (t->device->host_memory || !ahead || !prefetch_ready(t->prefetch, ticket))
        TRY(writeback_send(t->writeback, ticket->plan), err);
    if (!ahead) TRY(prefetch_send(t->prefetch, ticket), err);
    TRY(prefetch_wait(t->prefetch, ticket, waited_ns), err);
err:
    return st;
}

static enum st install_values(struct trainer *t)
{
    uint32_t D = t->config->model.dim;
    enum st st = values_install(&t->urgent_values, t->device, t->table, t->stride, D);
#ifndef BUG_deferred_value_late
    if (st == ST_OK)
        st = values_install(&t->deferred_values, t->device, t->table, t->stride, D);
#endif
    return st;
}

static void name_slots(struct trainer *t, const struct plan *plan)
{
    const struct plan_fetch *f = &plan->fetch;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->owned[i]) t->slot_row[f->slot[i]] = f->row_id[i];
}

static enum st boundary(struct trainer *t, struct ticket *ticket, uint64_t *waited_ns)
{
    enum st st = ST_OK;
    struct plan *plan = ticket->plan;
    TRY(deferred_finish(t), err);
#ifdef BUG_slot_freed_early
    TRY(wait_rows(t, ticket, waited_ns), err);
    TRY(prefetch_install(t->prefetch, ticket, t->device, t->table, t->stride), err);
    TRY(writeback_take(t->writeback, plan, t->table, t->stride), err);
#else
    TRY(writeback_take(t->writeback, plan, t->table, t->stride), err);
    TRY(wait_rows(t, ticket, waited_ns), err);
    TRY(prefetch_install(t->prefetch, ticket, t->device, t->table, t->stride), err);
#endif
    TRY(install_values(t), err);
    TRY(deferred_start(t, plan), err);
err:
    return st;
}

/* Has the device met a gradient that is not finite? `at`: the iteration that is said to have. */
static enum st check_fault(struct trainer *t, int64_t at)
{
    struct device_fault fault;
    enum st st = t->device->ops->fault(t->device, &fault);
    if (st != ST_OK || (!fault.row && !fault.dense)) return st;
    uint64_t id = t->slot_row[fault.row ? fault.slot : 0];
    if (fault.row)
        return log_fail(ST_DATA, "train", "iteration %lld: the gradient of row %llu of table %u is "
                        "not finite; lower train.learning_rate or look for extreme values in the "
                        "data", (long long)at, (unsigned long long)row_number(id), row_table(id));
    return log_fail(ST_DATA, "train", "iteration %lld: a dense gradient is not finite; lower "
                    "train.learning_rate or look for extreme values in the data", (long long)at);
}

/* The iteration before is complete, or is waited for: its loss is told. An accelerator computes the
 * next one meanwhile. Before slots get new names: a fault is told by the row's. */
static enum st settle(struct trainer *t)
{
    enum st st = ST_OK;
    struct pending *p = &t->pending;
    if (!p->open) return ST_OK;
    p->open = false;
    TRY(t->device->ops->wait(t->device, p->mark), err);
    TRY(check_fault(t, p->iteration), err);
    t->result.loss = (double)*t->dense.loss / p->total;
    if (!isfinite(t->result.loss))
        return log_fail(ST_DATA, "train", "iteration %lld: the loss is not finite; lower "
                        "train.learning_rate or look for extreme values in the data",
                        (long long)p->iteration);
    t->result.iterations++;
    t->result.samples += p->total;
    if (t->metrics != NULL)
        TRY(metrics_train(t->metrics, p->iteration, t->result.loss, p->total, p->waited_ns), err);
err:
    return st;
}

/* Alone, everything is this trainer's own, and at hand. */
static enum st update_alone(struct trainer *t, const struct plan *plan)
{
    enum st st = ST_OK;
    struct opt_step opt = opt_of(t->config);
    TRY(dense_scatter(&t->dense, t->step, plan->batch_total, &t->urgent_1), err);
    TRY(dense_gather(&t->dense, plan->batch_total, &t->urgent_2), err);
    TRY(grads_apply_alone(&t->urgent, t->step, &opt, t->table, t->stride), err);
    TRY(dense_apply(&t->dense, &opt, &t->pending.mark), err);
err:
    return st;
}

/* Urgent exchange: sums to where they are added up, then results to where they are needed next.
 * Deferred gradients are packed while the first one runs. */
static enum st exchange_urgent(struct trainer *t, const struct plan *plan)
{
    enum st st = ST_OK;
    struct opt_step opt = opt_of(t->config);
    struct deferred *later = &t->deferred[!t->flying];
    exchange_job_reset(&t->urgent_1, "gradient exchange");
    exchange_job_reset(&t->urgent_2, "value exchange");
    TRY(dense_scatter(&t->dense, t->step, plan->batch_total, &t->urgent_1), err);
    TRY(grads_collect(&t->urgent, plan, t->rank, t->step, GRADS_URGENT, &t->urgent_1), err);
    TRY(exchange_start(t->exchange, &t->urgent_1), err);
    TRY(grads_collect(&later->grads, plan, t->rank, t->step, GRADS_DEFERRED, &later->job), err);
    TRY(exchange_wait(t->exchange, &t->urgent_1), err);

    TRY(dense_gather(&t->dense, plan->batch_total, &t->urgent_2), err);
    TRY(grads_apply(&t->urgent, &opt, t->table, t->stride), err);
    TRY(values_collect(&t->urgent_values, plan, VALUES_URGENT, t->device, t->table, t->stride,
                       t->config->model.dim, &t->urgent_2), err);
    TRY(exchange_start(t->exchange, &t->urgent_2), err);
    TRY(exchange_wait(t->exchange, &t->urgent_2), err);
    TRY(dense_apply(&t->dense, &opt, &t->pending.mark), err);
err:
    return st;
}

static enum st run_train(struct trainer *t, struct ticket *ticket, uint64_t plan_wait_ns)
{
    enum st st = ST_OK;
    const struct plan *plan = ticket->plan;
    uint64_t waited_ns = plan_wait_ns;
    TRY(boundary(t, ticket, &waited_ns), err);
    if (t->start_ns == 0) t->start_ns = clock_now_ns(); /* the pipeline is full from here on */
    else t->waited_ns += waited_ns;
    TRY(step_train(t->step, plan, &t->dense.params, t->table, t->stride), err);
    TRY(settle(t), err);
    name_slots(t, plan);
    TRY(writeback_send(t->writeback, plan), err);
#ifdef BUG_deferred_value_late
    TRY(values_install(&t->deferred_values, t->device, t->table, t->stride,
                       t->config->model.dim), err);
#endif
    TRY(t->size == 1 ? update_alone(t, plan) : exchange_urgent(t, plan), err);
    t->pending = (struct pending){true, plan->iteration, plan->batch_total, waited_ns,
                                  t->pending.mark};
err:
    return st;
}

static enum st run_flush(struct trainer *t, struct ticket *ticket)
{
    enum st st;
    uint64_t waited_ns = 0;
    TRY(settle(t), err);
    TRY(boundary(t, ticket, &waited_ns), err);
    TRY(t->device->ops->wait(t->device, 0), err); /* the last updates of all */
    TRY(check_fault(t, ticket->plan->iteration), err);
    name_slots(t, ticket->plan);
    TRY(writeback_send(t->writeback, ticket->plan), err);
err:
    return st;
}

static enum st run_eval(struct trainer *t, struct ticket *ticket)
{
    enum st st = ST_OK;
    const struct plan *plan = ticket->plan;
    uint64_t start_ns = clock_now_ns(), waited_ns = 0;
    float *scratch;
    int done = 0;
    struct evaluation result;
    TRY(settle(t), err);
    /* Rows must be up to date where they are: nothing deferred may be open. */
    TRY(deferred_finish(t), err);
    TRY(deferred_start(t, NULL), err);
    TRY(deferred_finish(t), err);
    TRY(evaluate_scratch(&t->evaluate, plan, &scratch), err);
    TRY(wait_rows(t, ticket, &waited_ns), err);
    TRY(prefetch_install(t->prefetch, ticket, t->device, scratch, t->config->model.dim), err);
    TRY(evaluate_batch(&t->evaluate, plan, t->exchange, t->step, &t->dense.params, t->table,
                       t->stride, &done, &result), err);
    if (done) {
        t->result.has_eval = 1;
        t->result.eval_loss = result.loss;
        t->result.auc = result.auc;
        TRY(metrics_eval(t->metrics, plan->iteration, &result), err);
    }
    t->eval_ns += clock_now_ns() - start_ns;
err:
    return st;
}

static enum st run_ticket(struct trainer *t, struct ticket *ticket, uint64_t plan_wait_ns)
{
    switch (ticket->plan->kind) {
    case PLAN_TRAIN: return run_train(t, ticket, plan_wait_ns);
    case PLAN_EVAL: return run_eval(t, ticket);
    case PLAN_FLUSH: return run_flush(t, ticket);
    }
    return ST_INTERNAL;
}

static enum st run_plans(struct trainer *t)
{
    enum st st = ST_OK;
    while (st == ST_OK) {
        struct ticket *ticket = NULL;
        uint64_t waited_ns = 0;
        TRY(prefetch_next(t->prefetch, &ticket, &waited_ns), err);
        st = run_ticket(t, ticket, waited_ns);
        ticket_close(ticket);
    }
err:
    return st == ST_END ? settle(t) : st;
}

/* --- before and after ----------------------------------------------------------------------- */

/* Nobody goes on before all have come here. */
static enum st barrier(struct trainer *t, const char *what, uint32_t timeout_ms)
{
    enum st st = ST_OK;
    uint8_t token = 0, tokens[TREE_MAX_SLICES]; /* trainers <= slices */
    exchange_job_reset(&t->urgent_1, what);
    for (uint32_t r = 0; r < t->size; r++) {
        if (r == t->rank) continue;
        TRY(exchange_add_out(&t->urgent_1, r, &token, 1), err);
        TRY(exchange_add_in(&t->urgent_1, r, &tokens[r], 1), err);
    }
    st = t->cfg->comm->ops->exchange(t->cfg->comm, what, t->urgent_1.out.p, t->urgent_1.n_out,
                                     t->urgent_1.in.p, t->urgent_1.n_in, timeout_ms);
err:
    return st;
}

/* The state as it stands, dense part in host memory that `c` owns. */
static enum st checkpoint_open(struct trainer *t, struct checkpoint *c)
{
    bool stateless = t->config->train.optimizer == OPT_SGD;
    float *params = mem_zalloc(t->model->n_params, sizeof(float));
    float *state = stateless ? NULL : mem_zalloc(t->model->n_params, sizeof(float));
    *c = (struct checkpoint){t->config, t->model, t->server, t->header, params, state};
    if (params == NULL || (state == NULL && !stateless)) return ST_NOMEM;
    return dense_get(&t->dense, params, state);
}

static void checkpoint_close(struct checkpoint *c)
{
    mem_free((float *)c->params);
    mem_free((float *)c->state);
}

enum { WRITE_DEADLINE_FACTOR = 60 }; /* whole tables take longer than one iteration's messages */

/* Synthetic data: the best that can be reached is known. */
static enum st tell_planted(struct trainer *t)
{
    double loss, auc;
    if (t->config->data.format != DATA_SYNTHETIC || t->config->data.train_rows == 0) return ST_OK;
    enum st st = synthetic_best(t->config, 1, &loss, &auc);
    return st == ST_OK ? metrics_planted(t->metrics, loss, auc) : st;
}

static enum st write_initial(struct trainer *t)
{
    struct checkpoint c;
    enum st st = checkpoint_open(t, &c);
    if (st == ST_OK) st = checkpoint_write(&c, t->config->run.dir, "init", 0);
    checkpoint_close(&c);
    return st;
}

static enum st before(struct trainer *t)
{
    enum st st = ST_OK;
    if (t->rank == 0) {
        TRY(metrics_open(t->config->run.dir, t->cfg->progress, config_iterations(t->config),
                         &t->metrics), err);
        TRY(tell_planted(t), err);
        if (t->config->run.save_initial) TRY(write_initial(t), err);
    }
    TRY(barrier(t, "start", t->timeout_ms * WRITE_DEADLINE_FACTOR), err);
err:
    return st;
}

static enum st write_final(struct trainer *t)
{
    enum st st;
    struct checkpoint c;
    TRY(checkpoint_open(t, &c), err);
    TRY(checkpoint_digest(&c, &t->result.digest), err);
    TRY(checkpoint_model_json(t->config, t->result.iterations, t->config->run.dir), err);
    if (t->config->run.save_final)
        TRY(checkpoint_write(&c, t->config->run.dir, "final", 1), err);
err:
    checkpoint_close(&c);
    return st;
}

static enum st after(struct trainer *t)
{
    enum st st = ST_OK;
    struct trainer_result *r = &t->result;
    TRY(writeback_drain(t->writeback), err);
    r->seconds = t->start_ns == 0 ? 0 : (double)(clock_now_ns() - t->start_ns - t->eval_ns) * 1e-9;
    r->samples_per_s = r->seconds > 0 ? (double)r->samples / r->seconds : 0;
    r->exposed_wait_s = (double)t->waited_ns * 1e-9;
    r->plan_bytes = prefetch_plan_bytes(t->prefetch);
    r->fetch_bytes = prefetch_row_bytes(t->prefetch);
    r->write_back_bytes = writeback_bytes(t->writeback);
    r->exchange_bytes = exchange_bytes(t->exchange);
    TRY(barrier(t, "end", t->timeout_ms), err);
    if (t->rank == 0) {
        TRY(write_final(t), err);
        TRY(metrics_end(t->metrics, r), err);
    }
err:
    return st;
}

/* --- opening and closing -------------------------------------------------------------------- */

static enum st connect_peers(struct trainer *t)
{
    enum st st;
    uint32_t n = t->config->cluster.servers;
    t->server = mem_zalloc(n, sizeof(struct rpc_peer *));
    if (t->server == NULL) return ST_NOMEM;
    TRY(rpc_connect(t->cfg->transport, t->cfg->oracle, &t->oracle), err);
    for (uint32_t s = 0; s < n; s++)
        TRY(rpc_connect(t->cfg->transport, t->cfg->server[s], &t->server[s]), err);
err:
    return st;
}

static enum st open_compute(struct trainer *t)
{
    enum st st;
    const struct config *c = t->config;
    TRY(model_open(c, &t->model), err);
    struct device_cfg dc = {c->cluster.threads, t->cfg->comm->local_rank, c->device.precision};
    TRY(device_open(c->cluster.device, &dc, &t->device), err);
    model_place(t->model, t->device);
    struct step_cfg sc = {c, t->model, t->device, t->rank, t->size, t->cap_rows,
                          t->cfg->comm->reaches_device};
    TRY(step_open(&sc, &t->step), err);
    TRY(dense_init(&t->dense, &sc), err);
    evaluate_init(&t->evaluate, t->step);
    t->stride = c->model.dim + config_row_state(c->train.optimizer, c->model.dim);
    t->table = t->device->ops->alloc(t->device, t->cap_rows * t->stride * sizeof(float));
    t->slot_row = mem_map(t->cap_rows * sizeof(*t->slot_row));
    if (t->table == NULL || t->slot_row == NULL)
        return log_fail(ST_NOMEM, "cluster.cache_rows", "no memory for %llu rows of %u bytes; "
                        "lower it", (unsigned long long)t->cap_rows, t->stride * 4);
    TRY(grads_init(&t->urgent, t->device, c->model.dim, t->cap_rows), err);
    for (int i = 0; i < 2; i++)
        TRY(grads_init(&t->deferred[i].grads, t->device, c->model.dim, t->cap_rows), err);
err:
    return st;
}

static enum st open_stages(struct trainer *t)
{
    enum st st;
    const struct config *c = t->config;
    uint32_t state = config_row_state(c->train.optimizer, c->model.dim);
    struct writeback_cfg wc = {t->server, c->cluster.servers, c->cluster.server_threads, t->header,
                               c->model.dim, state, t->device, t->timeout_ms, t->cfg->over};
    struct prefetch_cfg pc = {
        .oracle = t->oracle, .server = t->server, .n_servers = c->cluster.servers,
        .threads = c->cluster.server_threads, .header = t->header,
        .limits = {t->size, c->model.n_tables, c->model.dense_features, t->cap_rows},
        .dim = c->model.dim, .state = state, .depth = c->cluster.prefetch,
        .ahead = c->oracle.lookahead > 0, .timeout_ms = t->timeout_ms,
        .over = t->cfg->over};
    TRY(exchange_open(t->cfg->comm, t->timeout_ms, &t->exchange), err);
    TRY(writeback_open(&wc, &t->writeback), err);
    TRY(prefetch_open(&pc, &t->prefetch), err);
    for (int i = 0; i < 2; i++)
        exchange_job_reset(&t->deferred[i].job, "deferred exchange");
err:
    return st;
}

static void close_compute(struct trainer *t)
{
    for (int i = 0; i < 2; i++) {
        grads_fini(&t->deferred[i].grads);
        exchange_job_fini(&t->deferred[i].job);
    }
    grads_fini(&t->urgent);
    values_fini(&t->urgent_values);
    values_fini(&t->deferred_values);
    exchange_job_fini(&t->urgent_1);
    exchange_job_fini(&t->urgent_2);
    if (t->device != NULL)
        t->device->ops->free(t->device, t->table, t->cap_rows * t->stride * sizeof(float));
    mem_unmap(t->slot_row, t->cap_rows * sizeof(*t->slot_row));
    evaluate_fini(&t->evaluate);
    dense_fini(&t->dense);
    step_close(t->step);
    device_close(t->device);
    model_close(t->model);
}

static void close_all(struct trainer *t, enum st st)
{
    /* After a failure nothing is waited for: every call still open comes back at once. */
    for (uint32_t s = 0; st != ST_OK && t->server != NULL && s < t->config->cluster.servers; s++)
        if (t->server[s] != NULL) rpc_peer_cancel(t->server[s]);
    if (st != ST_OK && t->oracle != NULL) rpc_peer_cancel(t->oracle);
    prefetch_close(t->prefetch);
    writeback_close(t->writeback);
    exchange_close(t->exchange);
    for (uint32_t s = 0; t->server != NULL && s < t->config->cluster.servers; s++)
        rpc_peer_close(t->server[s]);
    mem_free(t->server);
    rpc_peer_close(t->oracle);
    close_compute(t);
    metrics_close(t->metrics);
}

enum st trainer_run(const struct trainer_cfg *cfg, struct trainer_result *out)
{
    enum st st;
    struct trainer t = {.cfg = cfg, .config = cfg->config, .rank = cfg->comm->rank,
                        .size = cfg->comm->size,
                        .timeout_ms = cfg->config->cluster.timeout_s * 1000,
                        .cap_rows = config_cache_rows(cfg->config)};
    t.header = (struct rpc_header){cfg->job, cfg->attempt, ROLE_TRAINER, t.rank, 0};
    TRY(connect_peers(&t), err);
    TRY(open_compute(&t), err);
    TRY(before(&t), err);
    TRY(open_stages(&t), err);
    TRY(run_plans(&t), err);
    TRY(after(&t), err);
    *out = t.result;
err:
    close_all(&t, st);
    return st;
}
