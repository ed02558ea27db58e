/* compute/cpu_bf16.c - the only file with oneDNN. A product's object is made when its shape is
 * first met, and kept: a run has a few dozen shapes, so a lane's list is searched from the front.
 *
 * I1: oneDNN splits a product over as many threads as OpenMP offers the caller, and chooses kernels
 * by that number. So each calling thread offers it one, whatever OMP_NUM_THREADS says. */
#include "compute/cpu_bf16.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

struct product {
    struct bf16_shape shape;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c;       /* their data is set before each use                           */
    struct product *next;
};

struct lane {
    _Alignas(64) dnnl_stream_t stream;
    struct product *products;
    uint16_t *scratch[2];
    size_t n_scratch[2];
};

struct bf16 {
    dnnl_engine_t engine;
    uint32_t lanes;
    struct lane lane[];
};

static enum st refused(dnnl_status_t s, const char *what)
{
    if (s == dnnl_success) return ST_OK;
    return log_fail(s == dnnl_out_of_memory ? ST_NOMEM : ST_DEVICE, "cpu device",
                    "oneDNN refuses %s: status %d", what, (int)s);
}

static void be_one_thread(void)
{
    static _Thread_local bool told; /* the setting is per thread */
    if (told) return;
    omp_set_num_threads(1);
    told = true;
}

/* --- one product ------------------------------------------------------------------------------ */

static dnnl_status_t describe(dnnl_memory_desc_t *md, uint32_t rows, uint32_t cols, bool transposed,
                              uint32_t ld, dnnl_data_type_t type)
{
    dnnl_dims_t dims = {rows, cols}, strides = {transposed ? 1 : ld, transposed ? ld : 1};
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides);
}

static void product_free(struct product *p)
{
    if (p->c != NULL) dnnl_memory_destroy(p->c);
    if (p->b != NULL) dnnl_memory_destroy(p->b);
    if (p->a != NULL) dnnl_memory_destroy(p->a);
    if (p->primitive != NULL) dnnl_primitive_destroy(p->primitive);
    mem_free(p);
}

static dnnl_status_t product_fill(struct product *p, dnnl_engine_t engine)
{
    const struct bf16_shape *s = &p->shape;
    dnnl_memory_desc_t a, b, c;
    dnnl_matmul_desc_t d;
    dnnl_primitive_desc_t pd;
    dnnl_status_t st;
    if ((st = describe(&a, s->M, s->K, s->trans_a, s->trans_a ? s->M : s->K, dnnl_bf16)) ||
        (st = describe(&b, s->K, s->N, s->trans_b, s->trans_b ? s->K : s->N, dnnl_bf16)) ||
        (st = describe(&c, s->M, s->N, false, s->ldc, dnnl_f32)) ||
        (st = dnnl_matmul_desc_init(&d, &a, &b, NULL, &c)) ||
        (st = dnnl_primitive_desc_create(&pd, &d, NULL, engine, NULL)))
        return st;
    st = dnnl_primitive_create(&p->primitive, pd);
    dnnl_primitive_desc_destroy(pd);
    if (st || (st = dnnl_memory_create(&p->a, &a, engine, DNNL_MEMORY_NONE)) ||
        (st = dnnl_memory_create(&p->b, &b, engine, DNNL_MEMORY_NONE)))
        return st;
    return dnnl_memory_create(&p->c, &c, engine, DNNL_MEMORY_NONE);
}

static dnnl_status_t product_open(const struct bf16_shape *s, dnnl_engine_t engine,
                                  struct product **out)
{
    struct product *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) return dnnl_out_of_memory;
    p->shape = *s;
    dnnl_status_t st = product_fill(p, engine);
    if (st == dnnl_success)
        *out = p;
    else
        product_free(p);
    return st;
}

static bool same_shape(const struct bf16_shape *a, const struct bf16_shape *b)
{
    return a->M == b->M && a->N == b->N && a->K == b->K && a->ldc == b->ldc &&
           a->trans_a == b->trans_a && a->trans_b == b->trans_b;
}

static enum st find(struct bf16 *h, struct lane *l, const struct bf16_shape *s,
                    struct product **out)
{
    for (struct product *p = l->products; p != NULL; p = p->next)
        if (same_shape(&p->shape, s)) {
            *out = p;
            return ST_OK;
        }
    struct product *p = NULL;
    enum st st = refused(product_open(s, h->engine, &p), "a bf16 product");
    if (st != ST_OK) return st;
    p->next = l->products;
    l->products = p;
    *out = p;
    return ST_OK;
}

enum st bf16_product(struct bf16 *h, uint32_t lane, const struct bf16_shape *s, const uint16_t *a,
                     const uint16_t *b, float *c)
{
    struct product *p;
    be_one_thread();
    enum st st = find(h, &h->lane[lane], s, &p);
    if (st != ST_OK) return st;
    dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, p->a}, {DNNL_ARG_WEIGHTS, p->b}, {DNNL_ARG_DST, p->c}};
    dnnl_status_t ds;
    /* oneDNN's handles are not const; a and b are only read. */
    if ((ds = dnnl_memory_set_data_handle(p->a, (void *)(uintptr_t)a)) ||
        (ds = dnnl_memory_set_data_handle(p->b, (void *)(uintptr_t)b)) ||
        (ds = dnnl_memory_set_data_handle(p->c, c)) ||
        (ds = dnnl_primitive_execute(p->primitive, h->lane[lane].stream, 3, args)))
        return refused(ds, "to compute a bf16 product");
    return refused(dnnl_stream_wait(h->lane[lane].stream), "to finish a bf16 product");
}

/* --- factors ---------------------------------------------------------------------------------- */

void bf16_round(size_t n, const float *restrict from, uint16_t *restrict to)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof(bits));
        uint32_t nearest = bits + 0x7FFF + (bits >> 16 & 1);
        bool nan = (bits & 0x7FFFFFFF) > 0x7F800000; /* rounding would carry it into the sign */
        to[i] = (uint16_t)((nan ? bits | 0x400000 : nearest) >> 16);
    }
}

static enum st grow(struct lane *l, int which, size_t n)
{
    if (n <= l->n_scratch[which]) return ST_OK;
    uint16_t *p = mem_alloc(n, sizeof(*p));
    if (p == NULL)
        return log_fail(ST_NOMEM, "cpu device", "no memory for %zu numbers in bf16; free some", n);
    mem_free(l->scratch[which]);
    l->scratch[which] = p;
    l->n_scratch[which] = n;
    return ST_OK;
}

enum st bf16_scratch(struct bf16 *h, uint32_t lane, size_t n0, size_t n1, uint16_t **out0,
                     uint16_t **out1)
{
    struct lane *l = &h->lane[lane];
    enum st st = grow(l, 0, n0);
    if (st == ST_OK) st = grow(l, 1, n1);
    if (st != ST_OK) return st;
    *out0 = l->scratch[0];
    *out1 = l->scratch[1];
    return ST_OK;
}

/* --- opening ---------------------------------------------------------------------------------- */

static void lane_close(struct lane *l)
{
    for (struct product *p = l->products, *next; p != NULL; p = next) {
        next = p->next;
        product_free(p);
    }
    mem_free(l->scratch[0]);
    mem_free(l->scratch[1]);
    if (l->stream != NULL) dnnl_stream_destroy(l->stream);
}

void bf16_close(struct bf16 *h)
{
    if (h == NULL) return;
    for (uint32_t i = 0; i < h->lanes; i++) lane_close(&h->lane[i]);
    if (h->engine != NULL) dnnl_engine_destroy(h->engine);
    mem_free(h);
}

static enum st can(const struct bf16 *h)
{
    struct product *p = NULL;
    be_one_thread();
    const struct bf16_shape any = {.M = 16, .N = 16, .K = 16, .ldc = 16, .trans_b = true};
    dnnl_status_t s = product_open(&any, h->engine, &p);
    if (s == dnnl_unimplemented)
        return log_fail(ST_CONFIG, "device.precision", "oneDNN has no bf16 products for this CPU "
                        "(it takes AVX-512 at least); use fp32");
    if (s == dnnl_success) product_free(p);
    return refused(s, "a bf16 product");
}

enum st bf16_open(uint32_t lanes, struct bf16 **out)
{
    struct bf16 *h = mem_zalloc(1, sizeof(*h) + lanes * sizeof(h->lane[0]));
    if (h == NULL) return log_fail(ST_NOMEM, "cpu device", "out of memory; free some");
    h->lanes = lanes;
    enum st st = refused(dnnl_engine_create(&h->engine, dnnl_cpu, 0), "this CPU");
    if (st == ST_OK) st = can(h);
    for (uint32_t i = 0; i < lanes && st == ST_OK; i++)
        st = refused(dnnl_stream_create(&h->lane[i].stream, h->engine, dnnl_stream_in_order),
                     "a stream");
    if (st == ST_OK)
        *out = h;
    else
        bf16_close(h);
    return st;
}
