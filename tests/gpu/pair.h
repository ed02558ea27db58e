/* tests/gpu/pair.h - one operation on the CPU device and on the GPU, and what has to come out.
 *
 * An operation is a function of a device (struct op). `compare` runs it on the CPU and twice on the
 * GPU: both times on the GPU must give the same bits, and those have to be the CPU's, bit for bit
 * where data is moved or added in a given order, or else within `terms` roundings of the sum of
 * magnitudes, which the same operation on absolute values gives. */
#ifndef CHANTER_TESTS_GPU_PAIR_H
#define CHANTER_TESTS_GPU_PAIR_H

#include "compute/device.h"
#include "tests/support/floats.h"

#define OK(call) assert_int_equal((call), ST_OK)
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

extern struct device *cpu, *gpu;     /* fp32                                                    */
extern bool small;                   /* sizes for a slow GPU                                    */
extern size_t guard;                 /* floats before and behind what is tested                 */
extern size_t shift;                 /* floats that memory of the GPU is off an aligned address */
extern bool magnitudes;              /* absolute values are asked for                           */

struct device *must_open(enum device_kind kind, enum precision precision, uint32_t lanes);

/* n floats of NaN, until release. */
float *nan_room(struct device *d, size_t n);
float *put(struct device *d, const float *host, size_t n);
/* n numbers of [-1, 1) from `seed`, with rough times powers of 2; or their magnitudes. */
struct floats numbers(size_t n, uint64_t seed, bool rough);
float *put_numbers(struct device *d, size_t n, uint64_t seed, bool rough);
struct floats take(struct device *d, const float *p, size_t n);
/* Gives all rooms back; fails the test when a byte around one was written. */
void release(void);

struct results {
    uint32_t n;
    struct floats of[4];
    const char *name[4];
    double terms[4];                 /* roundings; 0: the bits                                  */
};
typedef void op(struct device *d, const void *the_case, struct results *r);

/* Takes f. */
void result(struct results *r, const char *name, struct floats f, double terms);
struct results run(struct device *d, op *fn, const void *the_case);
void results_close(struct results *r);
void compare(struct device *g, op *fn, const void *the_case);

/* pair_layers.c: how many of its tests failed. */
int test_layers(void);

#endif
