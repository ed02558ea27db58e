/* compute/emulated/block.c - threads of a block as fibers: each has its own stack and gives way at
 * barriers only. A kernel whose threads never wait needs none: its threads are plain calls.
 *
 * A team is the fibers of one block at a time. Teams are static, so that a launch allocates
 * nothing, and only their touched pages are real. A fiber lives for one launch: it runs its thread
 * of one block, hands back, and goes on with the next block's. */
#include "compute/emulated/block.h"

#include <pthread.h>
#include <stdio.h>

#include "base/check.h"
#include "base/rng.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

enum { TEAMS = 4, STACK_BYTES = 64 * 1024, MAX_COPIES = 256, GUARD_BYTES = 64 };
enum { RETURNED = 0, GUARD = 0xA5, NOTHING = 0xFF }; /* four bytes NOTHING are a NaN */

struct launch {
    const struct emu_kernel *kernel;
    dim3 grid, block;
    uint32_t shared_bytes;
    _Alignas(16) unsigned char args[EMU_MAX_ARGS];
};

struct copy { void *to; const void *from; uint32_t bytes, group; };

struct fiber {
    void *stack_at;              /* where its registers are while it does not run             */
    int line;                    /* of the barrier that it waits at, or RETURNED              */
    uint32_t commits, n_copies;  /* copy groups closed; copies not arrived                    */
    struct copy copy[MAX_COPIES];
    void *fake_stack, *tsan;     /* the sanitizers' own                                       */
};

struct team {
    pthread_mutex_t taken;
    const struct launch *launch;
    void *home_at;               /* of whoever runs the launch                                */
    const void *home_stack;      /* the sanitizers' own, likewise                             */
    size_t home_bytes;
    void *home_tsan;
    struct fiber fiber[EMU_MAX_THREADS];
    _Alignas(64) unsigned char shared[EMU_MAX_SHARED + GUARD_BYTES];
    _Alignas(64) unsigned char stack[EMU_MAX_THREADS][STACK_BYTES];
};

static struct team teams[TEAMS] = {
    {.taken = PTHREAD_MUTEX_INITIALIZER}, {.taken = PTHREAD_MUTEX_INITIALIZER},
    {.taken = PTHREAD_MUTEX_INITIALIZER}, {.taken = PTHREAD_MUTEX_INITIALIZER},
};
static uint64_t shuffle_seed; /* atomic */

_Thread_local struct emu_place emu_place;
static _Thread_local struct team *team;   /* while a launch with barriers runs                */
static _Thread_local struct fiber *self;  /* while one of its fibers runs                     */

/* --- fibers --------------------------------------------------------------------------------- */

#ifndef __x86_64__
#error "the emulation of CUDA switches stacks on x86-64 only"
#endif
/* Saves what a call has to preserve on this stack, leaves its top in *save, and goes on where the
 * stack `at` was left. ucontext would do, at two system calls a switch. */
void emu_switch(void **save, void *at);
__asm__(".text\n"
        ".globl emu_switch\n"
        ".type emu_switch, @function\n"
        "emu_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size emu_switch, . - emu_switch\n");
enum { SAVED_WORDS = 6 };

/* The sanitizers have to be told, before and after. */
static void before_switch(void **fake_stack, const void *stack, size_t bytes, void *tsan)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(tsan, 0);
#endif
    (void)fake_stack, (void)stack, (void)bytes, (void)tsan;
}

static void after_switch(void *fake_stack, const void **stack, size_t *bytes)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
#endif
    (void)fake_stack, (void)stack, (void)bytes;
}

static void to_home(void)
{
    struct fiber *me = self;
    before_switch(&me->fake_stack, team->home_stack, team->home_bytes, team->home_tsan);
    emu_switch(&me->stack_at, team->home_at);
    after_switch(me->fake_stack, &team->home_stack, &team->home_bytes);
}

static void fiber_main(void)
{
    after_switch(NULL, &team->home_stack, &team->home_bytes);
    for (;;) {
        team->launch->kernel->thread(team->launch->args);
        CHECK(self->n_copies == 0, "a kernel returns with copies under way");
        self->line = RETURNED;
        to_home();
    }
}

static void fiber_open(struct team *t, uint32_t k)
{
    struct fiber *f = &t->fiber[k];
    void **top = (void **)(t->stack[k] + STACK_BYTES);
    memset(t->stack[k], GUARD, GUARD_BYTES);
    *--top = NULL;                         /* fiber_main's own return address: never used */
    *--top = (void *)(uintptr_t)fiber_main;
    for (int i = 0; i < SAVED_WORDS; i++) *--top = NULL;
    f->stack_at = top;
    f->line = RETURNED;
    f->commits = f->n_copies = 0;
#ifdef __SANITIZE_THREAD__
    f->tsan = __tsan_create_fiber(0);
#endif
}

static int is_whole(const unsigned char *guard)
{
    for (int i = 0; i < GUARD_BYTES; i++)
        if (guard[i] != GUARD) return 0;
    return 1;
}

static void fiber_close(struct team *t, uint32_t k)
{
    CHECK(is_whole(t->stack[k]), "a kernel needs more stack than the emulation has");
#ifdef __SANITIZE_THREAD__
    __tsan_destroy_fiber(t->fiber[k].tsan);
#endif
}

static void resume(struct team *t, uint32_t k)
{
    void *fake_stack = NULL;
    self = &t->fiber[k];
    before_switch(&fake_stack, t->stack[k], STACK_BYTES, self->tsan);
    emu_switch(&t->home_at, self->stack_at);
    after_switch(fake_stack, NULL, NULL);
    self = NULL;
}

/* --- orders --------------------------------------------------------------------------------- */

/* k -> (k step + start) % n: each of 0..n-1 once, where step and n have no common divisor. */
struct order { uint64_t n, step, start; };

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static struct order order_of(uint64_t n, uint64_t n_drawn)
{
    uint64_t seed = __atomic_load_n(&shuffle_seed, __ATOMIC_RELAXED);
    struct order o = {n, 1, 0};
    uint32_t w[4];
    if (seed == 0 || n == 1) return o;
    rng_words(seed, 0, n_drawn, 0, w);
    o.start = w[0] % n;
    o.step = 1 + w[1] % (n - 1);
    while (common_divisor(o.step, n) != 1) o.step = o.step % (n - 1) + 1;
    return o;
}

static uint64_t at(const struct order *o, uint64_t k)
{
    return (k * o->step + o->start) % o->n;
}

static dim3 place_of(uint64_t i, dim3 size)
{
    return (dim3){(uint32_t)(i % size.x), (uint32_t)(i / size.x % size.y),
                  (uint32_t)(i / size.x / size.y)};
}

void emu_shuffle(uint64_t seed)
{
    __atomic_store_n(&shuffle_seed, seed, __ATOMIC_RELAXED);
}

/* --- blocks --------------------------------------------------------------------------------- */

static uint32_t threads_of(const struct launch *l)
{
    return l->block.x * l->block.y * l->block.z;
}

static _Noreturn void parted(const struct team *t, uint32_t k)
{
    char why[200];
    snprintf(why, sizeof(why), "kernel %s: thread 0 is at %d, thread %u at %d (line of a barrier; "
             "0: returned)", t->launch->kernel->name, t->fiber[0].line, k, t->fiber[k].line);
    check_failed(__FILE__, __LINE__, "all threads of a block meet at each barrier", why);
}

/* From barrier to barrier, until all have returned. */
static void run_waiting_block(struct team *t, uint64_t block)
{
    uint32_t n = threads_of(t->launch), stretch = 0;
    memset(t->shared, NOTHING, t->launch->shared_bytes);
    memset(t->shared + t->launch->shared_bytes, GUARD, GUARD_BYTES);
    do {
        struct order o = order_of(n, block << 32 | ++stretch);
        for (uint32_t k = 0; k < n; k++) {
            uint32_t thread = (uint32_t)at(&o, k);
            emu_place.thread = place_of(thread, t->launch->block);
            resume(t, thread);
        }
        for (uint32_t k = 1; k < n; k++)
            if (t->fiber[k].line != t->fiber[0].line) parted(t, k);
    } while (t->fiber[0].line != RETURNED);
    CHECK(is_whole(t->shared + t->launch->shared_bytes), "a kernel writes behind shared memory");
}

static void run_block(const struct launch *l, uint64_t block)
{
    uint32_t n = threads_of(l);
    struct order o = order_of(n, block << 32);
    for (uint32_t k = 0; k < n; k++) {
        emu_place.thread = place_of(at(&o, k), l->block);
        l->kernel->thread(l->args);
    }
}

static struct team *team_take(const struct launch *l)
{
    struct team *t = NULL;
    for (uint32_t i = 0; i < TEAMS && t == NULL; i++)
        if (pthread_mutex_trylock(&teams[i].taken) == 0) t = &teams[i];
    if (t == NULL) {
        t = &teams[0];
        pthread_mutex_lock(&t->taken);
    }
    t->launch = l;
#ifdef __SANITIZE_THREAD__
    t->home_tsan = __tsan_get_current_fiber();
#endif
    for (uint32_t k = 0; k < threads_of(l); k++) fiber_open(t, k);
    return t;
}

static void team_give(struct team *t)
{
    for (uint32_t k = 0; k < threads_of(t->launch); k++) fiber_close(t, k);
    pthread_mutex_unlock(&t->taken);
}

static void run(void *p)
{
    const struct launch *l = p;
    struct order o = order_of((uint64_t)l->grid.x * l->grid.y * l->grid.z, UINT64_MAX);
    emu_place.threads = l->block;
    emu_place.blocks = l->grid;
    if (l->kernel->waits) team = team_take(l);
    for (uint64_t k = 0; k < o.n; k++) {
        uint64_t block = at(&o, k);
        emu_place.block = place_of(block, l->grid);
        if (team != NULL)
            run_waiting_block(team, block);
        else
            run_block(l, block);
    }
    if (team != NULL) team_give(team);
    team = NULL;
}

cudaError_t emu_launch(cudaStream_t s, const struct emu_kernel *k, dim3 grid, dim3 block,
                       size_t shared_bytes, const void *args, size_t bytes)
{
    struct launch l = {k, grid, block, (uint32_t)shared_bytes, {0}};
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    CHECK(threads != 0 && threads <= k->max_threads && threads <= EMU_MAX_THREADS,
          "a block has as many threads as its kernel was built for");
    emu_check_launch(grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
    CHECK(shared_bytes <= EMU_MAX_SHARED && (shared_bytes == 0 || k->waits),
          "shared memory is within the limit, and for threads that wait for each other");
    CHECK(bytes <= sizeof(l.args), "a kernel's arguments fit");
    memcpy(l.args, args, bytes);
    return emu_enqueue(s, run, &l, sizeof(l));
}

/* --- what a thread calls -------------------------------------------------------------------- */

void emu_barrier(int line)
{
    CHECK(self != NULL, "only threads of a KERNEL_THAT_WAITS wait");
    self->line = line;
    to_home();
}

void *emu_shared(void)
{
    CHECK(self != NULL, "only threads of a KERNEL_THAT_WAITS share memory");
    return team->shared;
}

void emu_copy_async(void *to, const void *from, size_t bytes)
{
    CHECK(self != NULL && self->n_copies < MAX_COPIES, "copies under way are few");
    CHECK((bytes == 4 || bytes == 16) && (uintptr_t)to % bytes == 0 &&
              (uintptr_t)from % bytes == 0, "4 or 16 bytes are copied, aligned");
    self->copy[self->n_copies++] = (struct copy){to, from, (uint32_t)bytes, self->commits};
}

void emu_copy_commit(void)
{
    CHECK(self != NULL, "only threads of a KERNEL_THAT_WAITS copy");
    self->commits++;
}

void emu_copy_wait(uint32_t n_left)
{
    CHECK(self != NULL, "only threads of a KERNEL_THAT_WAITS copy");
    uint32_t kept = 0;
    for (uint32_t i = 0; i < self->n_copies; i++) {
        struct copy c = self->copy[i];
        if (c.group + n_left < self->commits)
            memcpy(c.to, c.from, c.bytes);
        else
            self->copy[kept++] = c;
    }
    self->n_copies = kept;
}
