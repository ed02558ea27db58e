/* The only file with MPI. Point-to-point messages in one order on both sides; nothing here adds
 * numbers up, so no order of summation is left to MPI (I1). Waiting yields the processor: trainers
 * may share cores with servers and with each other. */
#include <limits.h>
#include <mpi.h>
#include <mpi-ext.h>
#include <sched.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "trainer/comm.h"

enum { TAG = 1, SPINS_BEFORE_SLEEP = 2000 };
static const uint64_t SLEEP_NS = 50000; /* short against an iteration, long against a spin */

struct comm_mpi {
    struct comm base;
    MPI_Request *req;   /* [cap] */
    uint32_t cap;
};

static enum st failed(const char *what, int rc)
{
    char text[MPI_MAX_ERROR_STRING];
    int n = 0;
    MPI_Error_string(rc, text, &n);
    return log_fail(ST_COMM, what, "MPI: %.*s", n, text);
}

static enum st start(struct comm_mpi *c, const char *what, const struct comm_part *part,
                     uint32_t n, int sending, uint32_t *n_req)
{
    for (uint32_t i = 0; i < n; i++) {
        if (part[i].bytes == 0) continue;
        if (part[i].bytes > INT_MAX)
            return log_fail(ST_COMM, what, "a message of %zu bytes is more than MPI can carry; "
                            "use a smaller train.global_batch", part[i].bytes);
        MPI_Request *r = &c->req[*n_req];
        int peer = (int)part[i].peer, bytes = (int)part[i].bytes;
        int rc = sending ? MPI_Isend(part[i].p, bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, r)
                         : MPI_Irecv(part[i].p, bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, r);
        if (rc != MPI_SUCCESS) return failed(what, rc);
        (*n_req)++;
    }
    return ST_OK;
}

static enum st wait_all(struct comm_mpi *c, const char *what, uint32_t n_req, uint32_t timeout_ms)
{
    uint64_t until = clock_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (uint32_t spin = 0;; spin++) {
        int done = 0;
        int rc = MPI_Testall((int)n_req, c->req, &done, MPI_STATUSES_IGNORE);
        if (rc != MPI_SUCCESS) return failed(what, rc);
        if (done) return ST_OK;
        if (spin < SPINS_BEFORE_SLEEP) {
            sched_yield();
            continue;
        }
        clock_sleep_ns(SLEEP_NS);
        if (clock_now_ns() > until)
            return log_fail(ST_TIMEOUT, what, "rank %u has waited %u s for the other trainers",
                            c->base.rank, timeout_ms / 1000);
    }
}

static enum st mpi_exchange(struct comm *base, const char *what, const struct comm_part *out,
                            uint32_t n_out, const struct comm_part *in, uint32_t n_in,
                            uint32_t timeout_ms)
{
    struct comm_mpi *c = (struct comm_mpi *)base;
    if (n_out + n_in > c->cap) {
        MPI_Request *req = mem_alloc(2 * ((size_t)n_out + n_in), sizeof(*req));
        if (req == NULL) return ST_NOMEM;
        mem_free(c->req);
        c->req = req;
        c->cap = 2 * (n_out + n_in);
    }
    uint32_t n_req = 0;
    enum st st = start(c, what, in, n_in, 0, &n_req);
    if (st == ST_OK) st = start(c, what, out, n_out, 1, &n_req);
    if (st == ST_OK && n_req > 0) st = wait_all(c, what, n_req, timeout_ms);
    return st;
}

static void mpi_close(struct comm *base)
{
    struct comm_mpi *c = (struct comm_mpi *)base;
    mem_free(c->req);
    mem_free(c);
    MPI_Finalize();
}

static const struct comm_ops OPS = {"mpi", mpi_exchange, mpi_close};

/* Does this MPI, as built and as it runs, send from and receive into GPU memory? */
static bool mpi_reaches_device(void)
{
    return MPIX_Query_cuda_support() == 1;
}

static uint32_t rank_on_machine(void)
{
    MPI_Comm machine;
    int rank = 0;
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine) !=
        MPI_SUCCESS)
        return 0;
    MPI_Comm_rank(machine, &rank);
    MPI_Comm_free(&machine);
    return (uint32_t)rank;
}

enum st comm_mpi_open(struct comm **out)
{
    int level = 0, rank = 0, size = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS)
        return log_fail(ST_COMM, NULL, "MPI does not start; run trainers under mpirun");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    struct comm_mpi *c = level < MPI_THREAD_SERIALIZED ? NULL : mem_zalloc(1, sizeof(*c));
    if (c == NULL) {
        MPI_Finalize();
        return level < MPI_THREAD_SERIALIZED
                   ? log_fail(ST_COMM, NULL, "this MPI does not allow threads; it needs "
                              "MPI_THREAD_SERIALIZED")
                   : ST_NOMEM;
    }
    c->base = (struct comm){&OPS, (uint32_t)rank, (uint32_t)size, rank_on_machine(),
                            mpi_reaches_device()};
    *out = &c->base;
    return ST_OK;
}
