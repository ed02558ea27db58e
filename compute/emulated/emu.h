/* compute/emulated/emu.h - what the emulation's own files share. One lock guards everything; the
 * functions here are called with it held, unless they say otherwise. */
#ifndef CHANTER_COMPUTE_EMULATED_EMU_H
#define CHANTER_COMPUTE_EMULATED_EMU_H

#include <pthread.h>
#include <stdbool.h>

#include "compute/emulated/cuda.h"

/* Work on a stream or in a graph. */
struct emu_work {
    const char *kind;              /* as in struct emu_record; NULL: nothing to do (a wait)      */
    void (*body)(void *args);
    void *args;                    /* owned                                                      */
    const char *read, *written;    /* memory of a copy, for checks; NULL                         */
    size_t bytes;
};

enum { EMU_TAILS = 32 };
struct emu_tails {                 /* nodes that whatever comes next in a capture has to wait for */
    uint32_t n, node[EMU_TAILS];
};

struct emu_op {
    struct emu_op *next;
    struct emu_work work;
    struct emu_stream *after;      /* wait: until after->done >= after_n; NULL none              */
    uint64_t after_n;
    struct emu_graph *graph;       /* launch of a graph: holds a reference                       */
    bool *node_done;               /* [graph->n], owned                                          */
    uint32_t nodes_left, issued;
};

struct emu_stream {
    struct emu_stream *next;
    uint32_t number;
    uint64_t issued, done;         /* operations; they are done in order                         */
    struct emu_op *head, **tail;
    uint64_t priority;
    struct emu_graph *capture;     /* NULL: not capturing                                        */
    bool origin;                   /* capture began here                                         */
    struct emu_tails tails;
    bool destroyed;
};

struct emu_event {
    struct emu_stream *stream;     /* last recorded there, as operation n; NULL: never           */
    uint64_t n;
    struct emu_graph *capture;     /* last recorded in this capture                              */
    struct emu_tails tails;
};

struct emu_node {
    struct emu_work work;
    struct emu_tails after;
};

struct emu_graph {
    struct emu_node *node;         /* [n]                                                        */
    uint32_t n, cap, users;
    bool capturing, invalid;
    pthread_t thread;              /* that captures                                              */
};

/* runtime.c */
void emu_lock(void);               /* lock not held */
void emu_unlock(void);
_Noreturn void emu_misuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Counts one call, with injected failures; takes the lock and holds it on cudaSuccess only. */
cudaError_t emu_begin(const char *name);
/* Lets go of the lock and remembers e as the thread's last error. */
cudaError_t emu_end(cudaError_t e);
uint64_t emu_random(void);
void emu_count_live(int change);
/* Add to a stream, or to the capture it is part of. Takes work.args. */
cudaError_t emu_add(struct emu_stream *s, struct emu_work work);
void emu_append(struct emu_stream *s, struct emu_op *op);   /* never to a capture */
void emu_run_until(struct emu_stream *s, uint64_t n);
void emu_run_all(void);
void emu_run_work(const struct emu_stream *s, const struct emu_work *work, uint32_t issued);
/* Is [p, p + bytes) used by copies that have yet to be carried out? */
bool emu_copy_pending(const char *p, size_t bytes);
/* All streams that are part of g's capture are ordinary ones again. */
void emu_leave_capture(const struct emu_graph *g);
struct emu_stream *emu_check_stream(struct emu_stream *s);

/* graph.c */
/* This thread captures: what would wait or allocate breaks the capture. */
bool emu_breaks_capture(void);
cudaError_t emu_capture_add(struct emu_stream *s, struct emu_work work);
cudaError_t emu_capture_wait(struct emu_stream *s, const struct emu_event *e);
bool emu_graph_step(const struct emu_stream *s, struct emu_op *op);   /* true: all done */
void emu_graph_put(struct emu_graph *g);

#endif
