/* compute/emulated/graph.c - stream capture and graphs. A capture turns what streams are given into
 * nodes; a stream that waits for an event of the capture joins it. Each launch works the nodes off
 * one by one, in a random order that their dependencies allow, between other streams' work. */
#include <stdlib.h>
#include <string.h>

#include "compute/emulated/emu.h"

static _Thread_local struct emu_graph *capturing; /* by this thread */

bool emu_breaks_capture(void)
{
    if (capturing != NULL) capturing->invalid = true;
    return capturing != NULL;
}

static void add_tail(struct emu_tails *t, uint32_t node)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (t->node[i] == node) return;
    if (t->n == EMU_TAILS) emu_misuse("more than %d branches in a capture", EMU_TAILS);
    t->node[t->n++] = node;
}

cudaError_t emu_capture_add(struct emu_stream *s, struct emu_work work)
{
    struct emu_graph *g = s->capture;
    if (g->invalid) {
        free(work.args);
        return cudaErrorStreamCaptureInvalidated;
    }
    if (g->n == g->cap) {
        g->cap = 2 * g->cap + 16;
        g->node = realloc(g->node, g->cap * sizeof(*g->node));
        if (g->node == NULL) emu_misuse("out of memory for nodes");
    }
    g->node[g->n] = (struct emu_node){work, s->tails};
    s->tails = (struct emu_tails){1, {g->n}};
    g->n++;
    return cudaSuccess;
}

cudaError_t emu_capture_wait(struct emu_stream *s, const struct emu_event *e)
{
    struct emu_graph *g = s->capture != NULL ? s->capture : e->capture;
    if (g->invalid) return cudaErrorStreamCaptureInvalidated;
    if (e->capture != g || !g->capturing) { /* from outside, or of a capture that has ended */
        g->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (s->capture == NULL) s->tails = (struct emu_tails){0};
    s->capture = g;
    for (uint32_t i = 0; i < e->tails.n; i++) add_tail(&s->tails, e->tails.node[i]);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    (void)mode;
    if (emu_check_stream(s)->capture != NULL || capturing != NULL)
        emu_misuse("a capture inside a capture");
    struct emu_graph *g = calloc(1, sizeof(*g));
    if (g == NULL) emu_misuse("out of memory for a graph");
    g->users = 1;
    g->capturing = true;
    g->thread = pthread_self();
    capturing = g;
    s->capture = g;
    s->origin = true;
    s->tails = (struct emu_tails){0};
    emu_count_live(1);
    return emu_end(cudaSuccess);
}

void emu_graph_put(struct emu_graph *g)
{
    if (--g->users > 0) return;
    for (uint32_t i = 0; i < g->n; i++) free(g->node[i].work.args);
    free(g->node);
    free(g);
}

/* Nodes that no other node waits for have to be what the origin waits for: otherwise a stream that
 * joined the capture was not joined back. */
static bool joined(const struct emu_graph *g, const struct emu_tails *origin)
{
    for (uint32_t i = 0; i < g->n; i++) {
        bool used = false;
        for (uint32_t k = 0; k < origin->n; k++) used |= origin->node[k] == i;
        for (uint32_t j = i + 1; j < g->n && !used; j++)
            for (uint32_t k = 0; k < g->node[j].after.n; k++)
                used |= g->node[j].after.node[k] == i;
        if (!used) return false;
    }
    return true;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) emu_lock(); /* the capture ends all the same */
    struct emu_graph *g = emu_check_stream(s)->capture;
    if (g == NULL || !s->origin) emu_misuse("the end of a capture that did not begin here");
    if (!pthread_equal(g->thread, pthread_self())) emu_misuse("a capture ended by another thread");
    if (e == cudaSuccess && g->invalid) e = cudaErrorStreamCaptureInvalidated;
    if (e == cudaSuccess && !joined(g, &s->tails)) e = cudaErrorStreamCaptureUnjoined;
    g->capturing = false;
    capturing = NULL;
    s->origin = false;
    emu_leave_capture(g);
    *out = e == cudaSuccess ? g : NULL;
    if (e != cudaSuccess) {
        emu_graph_put(g);
        emu_count_live(-1);
    }
    return emu_end(e);
}

static struct emu_graph *checked(struct emu_graph *g)
{
    if (g == NULL || g->capturing) emu_misuse("a graph that is none");
    return g;
}

/* The graph itself serves as its executable form, with one more user. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    (void)flags;
    checked(g)->users++;
    emu_count_live(1);
    *exec = g;
    return emu_end(cudaSuccess);
}

static cudaError_t end_of(const char *name, struct emu_graph *g)
{
    cudaError_t e = emu_begin(name);
    if (e != cudaSuccess) emu_lock();
    emu_graph_put(checked(g));
    emu_count_live(-1);
    return emu_end(e);
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    return end_of(__func__, g);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return end_of(__func__, exec);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    if (emu_check_stream(s)->capture != NULL) emu_misuse("a graph launched into a capture");
    struct emu_op *op = calloc(1, sizeof(*op));
    if (op == NULL) emu_misuse("out of memory for an operation");
    op->graph = checked(exec);
    op->graph->users++;
    op->nodes_left = exec->n;
    op->node_done = calloc(exec->n + 1, sizeof(*op->node_done));
    if (op->node_done == NULL) emu_misuse("out of memory for a launch");
    emu_append(s, op);
    return emu_end(cudaSuccess);
}

static bool node_ready(const struct emu_op *op, uint32_t i)
{
    const struct emu_tails *after = &op->graph->node[i].after;
    if (op->node_done[i]) return false;
    for (uint32_t k = 0; k < after->n; k++)
        if (!op->node_done[after->node[k]]) return false;
    return true;
}

bool emu_graph_step(const struct emu_stream *s, struct emu_op *op)
{
    uint32_t n = op->graph->n;
    if (op->nodes_left == 0) return true;
    uint32_t i = (uint32_t)(emu_random() % n);
    while (!node_ready(op, i)) i = (i + 1) % n; /* there is one: dependencies point backwards */
    emu_run_work(s, &op->graph->node[i].work, op->issued);
    op->node_done[i] = true;
    return --op->nodes_left == 0;
}
