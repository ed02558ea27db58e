#include "tests/gpu/pair.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

struct device *cpu, *gpu;
size_t guard = 64, shift;
bool magnitudes;
#ifdef CHANTER_CUDA_EMULATED
bool small = true;
#else
bool small;
#endif

struct device *must_open(enum device_kind kind, enum precision precision, uint32_t lanes)
{
    struct device_cfg cfg = {.lanes = lanes, .precision = precision};
    struct device *d;
    OK(device_open(kind, &cfg, &d));
    return d;
}

/* --- device memory -------------------------------------------------------------------------- */

struct room { struct device *d; float *base; size_t n, before; };
static struct room rooms[64];
static uint32_t n_rooms;

float *nan_room(struct device *d, size_t n)
{
    struct room r = {d, NULL, n, guard + (d == cpu ? 0 : shift)};
    struct floats nan = floats_open(r.before + n + guard, 0);
    assert_true(n_rooms < LENGTH(rooms));
    r.base = d->ops->alloc(d, (nan.n + 1) * sizeof(float));
    assert_non_null(r.base);
    OK(d->ops->copy_in(d, r.base, nan.p, nan.n * sizeof(float)));
    rooms[n_rooms++] = r;
    floats_close(nan);
    return r.base + r.before;
}

float *put(struct device *d, const float *host, size_t n)
{
    float *p = nan_room(d, n);
    OK(d->ops->copy_in(d, p, host, n * sizeof(float)));
    return p;
}

struct floats numbers(size_t n, uint64_t seed, bool rough)
{
    struct floats f = rough ? floats_rough(n, 0, seed) : floats_random(n, 0, seed);
    for (size_t i = 0; i < n && magnitudes; i++) f.p[i] = fabsf(f.p[i]);
    return f;
}

float *put_numbers(struct device *d, size_t n, uint64_t seed, bool rough)
{
    struct floats f = numbers(n, seed, rough);
    float *p = put(d, f.p, n);
    floats_close(f);
    return p;
}

struct floats take(struct device *d, const float *p, size_t n)
{
    struct floats f = floats_open(n, 0);
    OK(d->ops->copy_out(d, p, f.p, n * sizeof(float), NULL));
    return f;
}

void release(void)
{
    while (n_rooms > 0) {
        struct room r = rooms[--n_rooms];
        size_t all = r.before + r.n + guard;
        struct floats nan = floats_open(r.before + guard, 0), got = take(r.d, r.base, all);
        assert_same_bits(got.p, nan.p, r.before, "guard before");
        assert_same_bits(got.p + r.before + r.n, nan.p, guard, "guard behind");
        floats_close(nan);
        floats_close(got);
        r.d->ops->free(r.d, r.base, (all + 1) * sizeof(float));
    }
}

/* --- one operation on both ------------------------------------------------------------------ */

void result(struct results *r, const char *name, struct floats f, double terms)
{
    assert_true(r->n < LENGTH(r->of));
    r->of[r->n] = f;
    r->name[r->n] = name;
    r->terms[r->n++] = terms;
}

struct results run(struct device *d, op *fn, const void *c)
{
    struct results r = {0};
    fn(d, c, &r);
    release();
    return r;
}

static void near_each(const struct results *got, const struct results *want,
                      const struct results *size, uint32_t k)
{
    for (size_t i = 0; i < got->of[k].n; i++)
        assert_near(got->of[k].p[i], (double)want->of[k].p[i], fabs((double)size->of[k].p[i]),
                    got->terms[k], got->name[k], i);
}

void results_close(struct results *r)
{
    for (uint32_t k = 0; k < r->n; k++) floats_close(r->of[k]);
}

void compare(struct device *g, op *fn, const void *c)
{
    struct results want = run(cpu, fn, c), got = run(g, fn, c), again = run(g, fn, c);
    magnitudes = true;
    struct results size = run(cpu, fn, c);
    magnitudes = false;
    for (uint32_t k = 0; k < got.n; k++) {
        assert_same_bits(again.of[k].p, got.of[k].p, got.of[k].n, got.name[k]);
        if (got.terms[k] > 0)
            near_each(&got, &want, &size, k);
        else
            assert_same_bits(got.of[k].p, want.of[k].p, want.of[k].n, got.name[k]);
    }
    results_close(&want);
    results_close(&got);
    results_close(&again);
    results_close(&size);
}
