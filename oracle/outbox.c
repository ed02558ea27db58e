/* Per trainer a ring of plans:
 *
 *        first                        first + n
 *     ... | worked on | ready | ready | being planned ...
 *              ^ asked - 1: the last one asked for; kept until the next is asked for
 *
 * A plan is answered with a copy, because the trainer may ask again (a lost reply). Copies are made
 * and calls answered without the lock: an answer may run the trainer's next request on this very
 * thread. */
#include "oracle/outbox.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

enum { TEXT_BYTES = 200 };

struct kept {                  /* a plan's bytes, shared by its ring and those that copy it */
    struct msg *bytes;
    uint32_t refs;             /* under the lock                                            */
};

struct box {                   /* one trainer's                                             */
    struct kept **plan;        /* [cap] ring                                                */
    uint64_t first;            /* seq of the oldest                                         */
    uint32_t n;
    uint64_t asked;            /* plans asked for so far                                    */
    struct rpc_call *waiting;  /* for plan asked - 1, which is not there yet                */
    bool told;                 /* of the failure                                            */
};

struct outbox {
    uint32_t n_trainers, cap;
    struct box *box;           /* [n_trainers]; contents under the lock                     */

    pthread_mutex_t lock;
    pthread_cond_t room;       /* a plan was dropped, or the end has come                   */
    enum st end;               /* ST_OK: not yet                                            */
    char text[TEXT_BYTES];     /* why; never changes after `end` was set                    */
};

enum st outbox_open(uint32_t n_trainers, uint32_t ready, struct outbox **out)
{
    uint32_t cap = ready + 1;
    struct outbox *o = mem_zalloc(1, sizeof(*o));
    if (o == NULL) goto err;
    o->n_trainers = n_trainers;
    o->cap = cap;
    o->box = mem_zalloc(n_trainers, sizeof(*o->box));
    if (o->box == NULL) goto err_outbox;
    struct kept **rings = mem_zalloc((size_t)n_trainers * cap, sizeof(*rings));
    if (rings == NULL) goto err_box;
    for (uint32_t t = 0; t < n_trainers; t++) o->box[t].plan = rings + (size_t)t * cap;
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->room, NULL);
    *out = o;
    return ST_OK;

err_box:    mem_free(o->box);
err_outbox: mem_free(o);
err:        return log_fail(ST_NOMEM, NULL, "no memory for a queue of plans");
}

/* Locked. What to free after unlocking, or NULL. */
static struct kept *kept_unref(struct kept *k)
{
    return --k->refs == 0 ? k : NULL;
}

static void kept_free(struct kept *k)
{
    if (k == NULL) return;
    msg_close(k->bytes);
    mem_free(k);
}

/* Locked. */
static struct kept **box_slot(const struct outbox *o, struct box *b, uint64_t seq)
{
    return &b->plan[seq % o->cap];
}

void outbox_close(struct outbox *o)
{
    if (o == NULL) return;
    for (uint32_t t = 0; t < o->n_trainers; t++)
        for (struct box *b = &o->box[t]; b->n > 0; b->n--, b->first++)
            kept_free(kept_unref(*box_slot(o, b, b->first)));
    pthread_cond_destroy(&o->room);
    pthread_mutex_destroy(&o->lock);
    mem_free(o->box[0].plan);
    mem_free(o->box);
    mem_free(o);
}

/* Not locked; `k` is referenced for this. */
static void answer(struct outbox *o, struct rpc_call *call, struct kept *k)
{
    struct msg *copy = NULL;
    enum st st = msg_open(k->bytes->len, &copy);
    if (st == ST_OK) {
        memcpy(copy->data, k->bytes->data, k->bytes->len);
        copy->len = k->bytes->len;
    }
    pthread_mutex_lock(&o->lock);
    struct kept *last = kept_unref(k);
    pthread_mutex_unlock(&o->lock);
    kept_free(last);
    if (st == ST_OK) rpc_reply(call, copy);
    else rpc_fail(call, st, "the oracle has no memory for a reply");
}

/* --- the planner's side ----------------------------------------------------------------------- */

/* Locked. */
static bool has_room(const struct outbox *o)
{
    for (uint32_t t = 0; t < o->n_trainers; t++)
        if (o->box[t].n == o->cap) return false;
    return true;
}

/* Takes `plan`. NULL when out of memory. */
static struct kept *keep(struct msg *plan)
{
    struct kept *k = mem_alloc(1, sizeof(*k));
    if (k == NULL) {
        msg_close(plan);
        return NULL;
    }
    *k = (struct kept){.bytes = plan, .refs = 1};
    return k;
}

/* Put `k` in trainer t's ring and answer whoever waits for it. Takes k. */
static void box_put(struct outbox *o, struct box *b, struct kept *k)
{
    pthread_mutex_lock(&o->lock);
    uint64_t seq = b->first + b->n++;
    *box_slot(o, b, seq) = k;
    struct rpc_call *call = b->waiting; /* waits for the next that comes: this one */
    b->waiting = NULL;
    if (call != NULL) k->refs++;
    pthread_mutex_unlock(&o->lock);
    if (call != NULL) answer(o, call, k);
}

enum st outbox_push(struct outbox *o, struct msg *const *plan)
{
    /* Not a wait for an answer (I6): trainers take plans as they get on, and their own deadlines
     * end the job when they do not. outbox_end ends it. */
    pthread_mutex_lock(&o->lock);
    while (!has_room(o) && o->end == ST_OK) pthread_cond_wait(&o->room, &o->lock);
    enum st st = o->end == ST_OK ? ST_OK : ST_CANCELLED;
    pthread_mutex_unlock(&o->lock);
    for (uint32_t t = 0; t < o->n_trainers; t++) {
        struct kept *k = st == ST_OK ? keep(plan[t]) : NULL;
        if (k != NULL) box_put(o, &o->box[t], k);
        else if (st == ST_OK) st = log_fail(ST_NOMEM, NULL, "no memory for a plan");
        else msg_close(plan[t]);
    }
    return st;
}

void outbox_end(struct outbox *o, enum st st, const char *text)
{
    pthread_mutex_lock(&o->lock);
    if (o->end == ST_OK) {
        snprintf(o->text, sizeof(o->text), "%s", text);
        o->end = st;
    }
    st = o->end;
    pthread_cond_broadcast(&o->room);
    pthread_mutex_unlock(&o->lock);
    for (uint32_t t = 0; t < o->n_trainers; t++) {
        pthread_mutex_lock(&o->lock);
        struct box *b = &o->box[t];
        struct rpc_call *call = b->waiting;
        b->waiting = NULL;
        b->told |= call != NULL;
        pthread_mutex_unlock(&o->lock);
        if (call != NULL) rpc_fail(call, st, o->text);
    }
}

/* --- the trainers' side ----------------------------------------------------------------------- */

/* Locked. False, with a reason: this trainer cannot ask for `seq` now. */
static bool may_ask(const struct box *b, uint64_t seq, char text[TEXT_BYTES])
{
    bool again = b->asked > 0 && seq == b->asked - 1;
    if (!again && seq != b->asked) {
        if (b->asked == 0)
            snprintf(text, TEXT_BYTES, "plan %" PRIu64 " asked before plan 0", seq);
        else
            snprintf(text, TEXT_BYTES, "plan %" PRIu64 " asked after %" PRIu64, seq, b->asked - 1);
        return false;
    }
    if (again || b->asked == 0 || b->n > 0) return true;
    snprintf(text, TEXT_BYTES, "plan %" PRIu64 " asked before plan %" PRIu64 " was there", seq,
             b->asked - 1);
    return false;
}

/* Locked. The trainer asks for its next plan: it has done with the one before. What to free. */
static struct kept *box_advance(struct outbox *o, struct box *b)
{
    struct kept *done = NULL;
    if (b->asked++ > 0) {
        done = kept_unref(*box_slot(o, b, b->first));
        b->first++;
        b->n--;
        pthread_cond_signal(&o->room);
    }
    return done;
}

void outbox_ask(struct outbox *o, uint32_t trainer, uint64_t seq, struct rpc_call *call)
{
    struct box *b = &o->box[trainer];
    struct kept *done = NULL, *found = NULL;
    struct rpc_call *before = NULL;
    char text[TEXT_BYTES];
    pthread_mutex_lock(&o->lock);
    enum st st = o->end == ST_END ? ST_OK : o->end;
    if (st != ST_OK) {
        b->told = true;
        memcpy(text, o->text, sizeof(text));
    } else if (!may_ask(b, seq, text)) {
        st = ST_BADMSG;
    } else {
        if (seq == b->asked) done = box_advance(o, b);
        if (b->n > 0) { /* the oldest is `seq`: all before it are dropped */
            found = *box_slot(o, b, seq);
            found->refs++;
        } else if (o->end == ST_END) {
            st = ST_END;
            memcpy(text, o->text, sizeof(text));
        } else {
            before = b->waiting;
            b->waiting = call;
        }
    }
    pthread_mutex_unlock(&o->lock);
    kept_free(done);
    if (before != NULL) rpc_fail(before, ST_CANCELLED, "the same plan was asked for again");
    if (found != NULL) answer(o, call, found);
    else if (st != ST_OK) rpc_fail(call, st, text);
}

enum st outbox_status(struct outbox *o)
{
    pthread_mutex_lock(&o->lock);
    enum st st = o->end;
    pthread_mutex_unlock(&o->lock);
    return st;
}

int outbox_told(struct outbox *o)
{
    pthread_mutex_lock(&o->lock);
    bool all = o->end != ST_OK && o->end != ST_END;
    for (uint32_t t = 0; t < o->n_trainers; t++) all &= o->box[t].told;
    pthread_mutex_unlock(&o->lock);
    return all;
}
