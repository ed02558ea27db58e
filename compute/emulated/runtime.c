/* compute/emulated/runtime.c - streams and events as queues, and the order in which they are worked
 * off.
 *
 * Each stream is a list of operations. An operation may be carried out when it is first on its list
 * and the event it waits for, if any, has been reached. Which stream goes next: each has a random
 * priority, the highest that can go goes, and now and then priorities are drawn anew. That lets one
 * stream run far ahead of another, as real ones do, more often than drawing a stream for each step
 * would. Operations are carried out when something waits, and, by the seed, some when issued. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/emulated/emu.h"

/* Recursive: a test framework that jumps out of a kernel that crashed has to be able to go on. */
static pthread_mutex_t lock;
static pthread_once_t lock_made = PTHREAD_ONCE_INIT;
static struct emu_stream *streams;     /* in use                                                  */
static struct emu_stream *past;        /* destroyed and empty: events may still name them         */
static uint32_t n_streams;
static size_t live;
static uint64_t rng;
static uint32_t eager;                 /* of 256: how likely one more operation runs when issued */

static uint64_t calls, fail_nth, failed; /* calls since emu_fail_at; fail_nth 0: none fails */
static cudaError_t fail_with;
static int fail_all;
static const char *failed_call = "";
static _Thread_local cudaError_t last_error;

static struct emu_record *records;
static size_t n_records, cap_records;
static int recording;
static uint32_t issued;

_Noreturn void emu_misuse(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("emulated cuda: misuse: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    abort();
}

/* --- random numbers and counters ------------------------------------------------------------ */

uint64_t emu_random(void) /* xorshift64* */
{
    rng ^= rng >> 12;
    rng ^= rng << 25;
    rng ^= rng >> 27;
    return rng * UINT64_C(0x2545F4914F6CDD1D);
}

static void draw_priorities(void)
{
    for (struct emu_stream *s = streams; s != NULL; s = s->next) s->priority = emu_random();
}

static void set_seed(uint64_t seed)
{
    rng = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (int i = 0; i < 8; i++) emu_random();
    eager = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 256 : (uint32_t)(emu_random() >> 56);
    draw_priorities();
}

static void make_lock(void)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &attr);
    pthread_mutexattr_destroy(&attr);
}

void emu_lock(void)
{
    pthread_once(&lock_made, make_lock);
    pthread_mutex_lock(&lock);
    if (rng != 0) return;
    const char *text = getenv("CHANTER_EMU_SEED");
    set_seed(text != NULL ? strtoull(text, NULL, 10) : 1);
}

void emu_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

void emu_seed(uint64_t seed)
{
    emu_lock();
    set_seed(seed);
    emu_unlock();
}

cudaError_t emu_begin(const char *name)
{
    emu_lock();
    calls++;
    if (fail_nth == 0 || calls < fail_nth || (calls > fail_nth && !fail_all)) return cudaSuccess;
    failed++;
    failed_call = name;
    return emu_end(fail_with);
}

cudaError_t emu_end(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    emu_unlock();
    return e;
}

void emu_fail_at(uint64_t nth, cudaError_t e, int all)
{
    emu_lock();
    calls = 0;
    failed = 0;
    fail_nth = nth;
    fail_with = e;
    fail_all = all;
    emu_unlock();
}

uint64_t emu_fail_stop(void)
{
    emu_lock();
    uint64_t n = failed;
    fail_nth = failed = 0;
    emu_unlock();
    return n;
}

const char *emu_failed_call(void)
{
    return failed_call;
}

void emu_count_live(int change)
{
    live += (size_t)change;
}

size_t emu_live(void)
{
    emu_lock();
    size_t n = live;
    emu_unlock();
    return n;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    default: return "another CUDA error";
    }
}

/* --- records -------------------------------------------------------------------------------- */

void emu_record(int on)
{
    emu_lock();
    recording = on;
    n_records = 0;
    issued = 0;
    emu_unlock();
}

size_t emu_records(const struct emu_record **out)
{
    emu_lock();
    *out = records;
    size_t n = n_records;
    emu_unlock();
    return n;
}

static void record(const struct emu_stream *s, const char *kind, uint32_t call)
{
    if (!recording || kind == NULL) return;
    if (n_records == cap_records) {
        cap_records = 2 * cap_records + 64;
        records = realloc(records, cap_records * sizeof(*records));
        if (records == NULL) emu_misuse("out of memory for records");
    }
    records[n_records++] = (struct emu_record){s->number, call, kind};
}

/* --- carrying out --------------------------------------------------------------------------- */

void emu_run_work(const struct emu_stream *s, const struct emu_work *work, uint32_t call)
{
    if (work->body != NULL) work->body(work->args);
    record(s, work->kind, call);
}

static void retire(struct emu_stream *s)
{
    struct emu_stream **at = &streams;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    s->next = past;
    past = s;
}

static bool ready(const struct emu_stream *s)
{
    const struct emu_op *op = s->head;
    return op != NULL && (op->after == NULL || op->after->done >= op->after_n);
}

/* One step of the stream that is to go next. False: none can go. */
static bool step(void)
{
    if (emu_random() % 8 == 0) draw_priorities();
    struct emu_stream *s = NULL;
    for (struct emu_stream *i = streams; i != NULL; i = i->next)
        if (ready(i) && (s == NULL || i->priority > s->priority)) s = i;
    if (s == NULL) return false;

    struct emu_op *op = s->head;
    if (op->graph != NULL) {
        if (!emu_graph_step(s, op)) return true;
        emu_graph_put(op->graph);
        free(op->node_done);
    } else {
        emu_run_work(s, &op->work, op->issued);
        free(op->work.args);
    }
    s->head = op->next;
    if (s->head == NULL) s->tail = &s->head;
    s->done++;
    free(op);
    if (s->destroyed && s->head == NULL) retire(s);
    return true;
}

void emu_run_until(struct emu_stream *s, uint64_t n)
{
    while (s->done < n)
        if (!step()) emu_misuse("nothing can go on: a wait that is never reached");
}

void emu_run_all(void)
{
    while (step()) continue;
}

static bool overlaps(const char *p, size_t bytes, const char *q, size_t q_bytes)
{
    return q != NULL && q < p + bytes && p < q + q_bytes;
}

/* After a call that was made to fail, which may have been a wait, the caller is always right. */
bool emu_copy_pending(const char *p, size_t bytes)
{
    if (failed > 0) return false;
    for (struct emu_stream *s = streams; s != NULL; s = s->next)
        for (struct emu_op *op = s->head; op != NULL; op = op->next)
            if (overlaps(p, bytes, op->work.read, op->work.bytes) ||
                overlaps(p, bytes, op->work.written, op->work.bytes))
                return true;
    return false;
}

void emu_append(struct emu_stream *s, struct emu_op *op)
{
    op->issued = ++issued;
    *s->tail = op;
    s->tail = &op->next;
    s->issued++;
    while (emu_random() >> 56 < eager && step()) continue;
}

cudaError_t emu_add(struct emu_stream *s, struct emu_work work)
{
    if (s->capture != NULL) return emu_capture_add(s, work);
    struct emu_op *op = calloc(1, sizeof(*op));
    if (op == NULL) emu_misuse("out of memory for an operation");
    op->work = work;
    emu_append(s, op);
    return cudaSuccess;
}

/* --- streams -------------------------------------------------------------------------------- */

struct emu_stream *emu_check_stream(struct emu_stream *s)
{
    if (s == NULL) emu_misuse("the default stream, which waits for all others, is not used here");
    if (s->destroyed) emu_misuse("stream %u after its end", s->number);
    return s;
}

void emu_leave_capture(const struct emu_graph *g)
{
    for (struct emu_stream *s = streams; s != NULL; s = s->next)
        if (s->capture == g) s->capture = NULL;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    if (flags != cudaStreamNonBlocking) emu_misuse("a stream that waits for the default stream");
    struct emu_stream *s = calloc(1, sizeof(*s));
    if (s == NULL) emu_misuse("out of memory for a stream");
    *s = (struct emu_stream){.next = streams, .number = n_streams++, .priority = emu_random()};
    s->tail = &s->head;
    streams = s;
    emu_count_live(1);
    *out = s;
    return emu_end(cudaSuccess);
}

/* As in CUDA, a call that gives something back does so even when it reports an earlier fault. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) emu_lock();
    emu_check_stream(s)->destroyed = true;
    if (s->head == NULL) retire(s);
    emu_count_live(-1);
    return emu_end(e);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    emu_check_stream(s);
    if (emu_breaks_capture()) return emu_end(cudaErrorStreamCaptureUnsupported);
    emu_run_until(s, s->issued);
    return emu_end(cudaSuccess);
}

/* --- events --------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    if (flags != cudaEventDisableTiming) emu_misuse("an event that keeps times");
    struct emu_event *event = calloc(1, sizeof(*event));
    if (event == NULL) emu_misuse("out of memory for an event");
    emu_count_live(1);
    *out = event;
    return emu_end(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) emu_lock();
    if (event == NULL) emu_misuse("destroying no event");
    free(event);
    emu_count_live(-1);
    return emu_end(e);
}

/* An event stands for all that its stream was given until now. */
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    emu_check_stream(s);
    event->capture = s->capture;
    event->tails = s->tails;
    if (s->capture == NULL) {
        event->stream = s;
        event->n = s->issued;
    }
    return emu_end(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned flags)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    (void)flags;
    emu_check_stream(s);
    if (s->capture != NULL || event->capture != NULL)
        return emu_end(emu_capture_wait(s, event));
    if (event->stream == NULL) return emu_end(cudaSuccess); /* never recorded: as in CUDA */
    struct emu_op *op = calloc(1, sizeof(*op));
    if (op == NULL) emu_misuse("out of memory for an operation");
    op->after = event->stream;
    op->after_n = event->n;
    emu_append(s, op);
    return emu_end(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t e = emu_begin(__func__);
    if (e != cudaSuccess) return e;
    if (event->capture != NULL) return emu_end(cudaErrorCapturedEvent);
    if (emu_breaks_capture()) return emu_end(cudaErrorStreamCaptureUnsupported);
    if (event->stream != NULL) emu_run_until(event->stream, event->n);
    return emu_end(cudaSuccess);
}
