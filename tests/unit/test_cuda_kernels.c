/* Kernels of the GPU, run on the CPU: moving rows, interaction, loss and what surrounds products,
 * against plain code in f64 and bit for bit under every order of threads. Sums over slices and
 * updates: test_cuda_sums.c; the emulation itself: test_cuda_block.c. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "compute/cuda_kernels.h"
#include "compute/emulated/block.h"
#include "tests/support/floats.h"

enum { ORDERS = 3 };         /* seeds of emu_shuffle, from 0 on */

static cudaStream_t stream;

static int open_stream(void **state)
{
    return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? 0 : -1;
}

static int close_stream(void **state)
{
    emu_shuffle(0);
    return cudaStreamDestroy(stream) == cudaSuccess ? 0 : -1;
}

static void done(cudaError_t e)
{
    assert_int_equal(e, cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
}

static size_t triangle(size_t i)
{
    return i * (i - 1) / 2;
}

/* --- rows ----------------------------------------------------------------------------------- */

static void check_move(uint32_t n, uint32_t width, uint32_t pad, size_t shift, int named)
{
    uint32_t from_stride = width + pad, to_stride = width + 2 * pad, cap = 2 * n + 1;
    struct floats from = floats_random((size_t)cap * from_stride, shift, 1);
    struct floats to = floats_open((size_t)cap * to_stride, shift);
    struct floats want = floats_open((size_t)cap * to_stride, shift);
    uint32_t *from_slot = mem_alloc(2 * (size_t)cap, sizeof(*from_slot));
    uint32_t *to_slot = from_slot + cap;
    for (uint32_t i = 0; i < n; i++) {
        from_slot[i] = draw(2, i) % cap;
        to_slot[i] = 2 * (n - 1 - i) + 1;
        uint32_t f = named & 1 ? from_slot[i] : i, t = named & 2 ? to_slot[i] : i;
        memcpy(want.p + (size_t)t * to_stride, from.p + (size_t)f * from_stride,
               width * sizeof(float));
    }
    done(cuda_rows_move(stream, from.p, from_stride, named & 1 ? from_slot : NULL, n, to.p,
                        to_stride, named & 2 ? to_slot : NULL, width));
    assert_same_bits(to.p, want.p, want.n, "rows");
    mem_free(from_slot);
    floats_close(from);
    floats_close(to);
    floats_close(want);
}

static void rows_move_to_where_they_are_named(void **state)
{
    static const uint32_t N[] = {0, 1, 2, 85, 700}, WIDTH[] = {1, 3, 4, 10, 48, 1100};
    for (int i = 0; i < 5 * 6 * 4; i++)
        for (uint32_t pad = 0; pad < 5; pad += 2)
            check_move(N[i % 5], WIDTH[i / 5 % 6], pad, pad == 2, i / 30);
}

static void check_gather(uint32_t B, uint32_t F, uint32_t D, uint32_t stride, size_t shift)
{
    enum { CAP = 50 };
    struct floats table = floats_random((size_t)CAP * stride, shift, 3);
    struct floats t = floats_open((size_t)B * (F + 1) * D, shift);
    struct floats want = floats_open((size_t)B * (F + 1) * D, shift);
    uint32_t *slot = mem_alloc((size_t)B * F + 1, sizeof(*slot));
    for (uint32_t i = 0; i < B * F; i++) {
        slot[i] = draw(4, i) % CAP;
        memcpy(want.p + ((size_t)i / F * (F + 1) + i % F + 1) * D,
               table.p + (size_t)slot[i] * stride, D * sizeof(float));
    }
    done(cuda_rows_gather(stream, B, F, D, table.p, stride, slot, t.p));
    assert_same_bits(t.p, want.p, want.n, "t"); /* entry 0 too: left alone */
    mem_free(slot);
    floats_close(table);
    floats_close(t);
    floats_close(want);
}

static void look_ups_are_gathered_behind_entry_0(void **state)
{
    check_gather(0, 3, 4, 4, 0);
    check_gather(1, 1, 1, 1, 0);
    check_gather(37, 26, 48, 48, 0);
    check_gather(37, 26, 48, 97, 0);
    check_gather(5, 3, 7, 8, 1);
    check_gather(3, 2, 4096, 8192, 0);
}

/* --- interaction ---------------------------------------------------------------------------- */

struct interact {
    uint32_t B, V, D;
    size_t R;                /* floats of one r */
    struct floats t, dr;
};

static void check_r(const struct interact *c, const float *r)
{
    for (size_t b = 0; b < c->B; b++) {
        const float *t = c->t.p + b * c->V * c->D, *one = r + b * c->R;
        assert_same_bits(one, t, c->D, "r[0..D)");
        for (size_t i = 1; i < c->V; i++)
            for (size_t j = 0; j < i; j++) {
                double sum = 0, size = 0;
                for (size_t d = 0; d < c->D; d++) {
                    double p = (double)t[i * c->D + d] * (double)t[j * c->D + d];
                    sum += p;
                    size += fabs(p);
                }
                size_t at = c->D + triangle(i) + j;
                assert_near(one[at], sum, size, c->D, "dot", b * c->R + at);
            }
    }
}

static void check_dt(const struct interact *c, const float *dt)
{
    for (size_t b = 0; b < c->B; b++)
        for (size_t i = 0; i < c->V; i++)
            for (size_t d = 0; d < c->D; d++) {
                const float *t = c->t.p + b * c->V * c->D, *dr = c->dr.p + b * c->R;
                double sum = i == 0 ? (double)dr[d] : 0, size = fabs(sum);
                for (size_t j = 0; j < c->V; j++) {
                    if (j == i) continue;
                    size_t at = c->D + (i > j ? triangle(i) + j : triangle(j) + i);
                    double p = (double)dr[at] * (double)t[j * c->D + d];
                    sum += p;
                    size += fabs(p);
                }
                size_t at = (b * c->V + i) * c->D + d;
                assert_near(dt[at], sum, size, c->V + 1, "dt", at);
            }
}

static void check_interact(uint32_t B, uint32_t F, uint32_t D, size_t shift)
{
    struct interact c = {B, F + 1, D, D + triangle(F + 1), {0}, {0}};
    struct floats r[ORDERS], dt[ORDERS];
    c.t = floats_random((size_t)B * c.V * D, shift, 5);
    c.dr = floats_random(B * c.R, shift, 6);
    for (uint64_t o = 0; o < ORDERS; o++) {
        emu_shuffle(o);
        r[o] = floats_open(B * c.R, shift);
        dt[o] = floats_open((size_t)B * c.V * D, shift);
        done(cuda_interact_forward(stream, B, F, D, c.t.p, r[o].p));
        done(cuda_interact_backward(stream, B, F, D, c.t.p, c.dr.p, dt[o].p));
        assert_same_bits(r[o].p, r[0].p, r[0].n, "r in another order of threads");
        assert_same_bits(dt[o].p, dt[0].p, dt[0].n, "dt in another order of threads");
    }
    emu_shuffle(0);
    check_r(&c, r[0].p);
    check_dt(&c, dt[0].p);
    for (uint64_t o = 0; o < ORDERS; o++) {
        floats_close(r[o]);
        floats_close(dt[o]);
    }
    floats_close(c.t);
    floats_close(c.dr);
}

static void dots_of_all_pairs_and_back_agree_with_f64(void **state)
{
    static const uint32_t TABLES[] = {1, 2, 3, 4, 7, 8, 26, 31, 33}, DIM[] = {1, 3, 4, 16, 48, 65};
    for (int i = 0; i < 9 * 6; i++)
        check_interact(1 + (uint32_t)i % 5, TABLES[i % 9], DIM[i / 9], i % 4 == 3);
}

static void samples_share_a_block_when_there_are_many(void **state)
{
    check_interact(1027, 3, 4, 0);   /* 4 a block, the last one not full */
    check_interact(515, 1, 5, 1);
    check_interact(800, 26, 16, 0);
    check_interact(515, 66, 3, 0);   /* 2 a block, and two pieces of V each */
}

static void vectors_may_be_longer_and_more_than_shared_memory_holds(void **state)
{
    check_interact(2, 26, 128, 0);
    check_interact(2, 26, 76, 0);    /* pieces of 64 and 12 */
    check_interact(2, 5, 1023, 0);
    check_interact(1, 1, 4096, 0);
    check_interact(1, 100, 64, 0);   /* more pairs than threads; two pieces of V */
    check_interact(1, 64, 17, 1);
    check_interact(1, 180, 8, 0);    /* dots go straight to r */
}

static void samples_give_the_same_bits_in_any_batch(void **state)
{
    enum { B = 1030, F = 4, D = 12, R = D + 10, T = (F + 1) * D };
    struct floats t = floats_random(B * T, 0, 7), dr = floats_random(B * R, 0, 8);
    struct floats r = floats_open(B * R, 0), dt = floats_open(B * T, 0);
    struct floats one_r = floats_open(R, 0), one_dt = floats_open(T, 0);
    done(cuda_interact_forward(stream, B, F, D, t.p, r.p));
    done(cuda_interact_backward(stream, B, F, D, t.p, dr.p, dt.p));
    for (size_t b = 0; b < B; b += 103) {
        done(cuda_interact_forward(stream, 1, F, D, t.p + b * T, one_r.p));
        done(cuda_interact_backward(stream, 1, F, D, t.p + b * T, dr.p + b * R, one_dt.p));
        assert_same_bits(r.p + b * R, one_r.p, R, "r of one sample");
        assert_same_bits(dt.p + b * T, one_dt.p, T, "dt of one sample");
    }
    floats_close(t);
    floats_close(dr);
    floats_close(r);
    floats_close(dt);
    floats_close(one_r);
    floats_close(one_dt);
}

/* --- loss ----------------------------------------------------------------------------------- */

static void check_bce(uint32_t B, int gradient, int probability)
{
    struct floats z = floats_random(B, 1, 9), y = floats_open(B, 0), loss = floats_open(1, 0);
    struct floats dz = floats_open(gradient ? B : 0, 0), p = floats_open(probability ? B : 0, 0);
    double sum = 0, size = 0;
    for (uint32_t b = 0; b < B; b++) {
        z.p[b] = b % 50 == 7 ? 300.0f : b % 50 == 9 ? -300.0f : 8.0f * z.p[b];
        y.p[b] = (float)(draw(10, b) % 2);
    }
    done(cuda_bce(stream, B, z.p, y.p, 0.25f, gradient ? dz.p : NULL, loss.p,
                  probability ? p.p : NULL));
    for (uint32_t b = 0; b < B; b++) {
        double x = (double)z.p[b], q = 1 / (1 + exp(-x));
        double term = x > 0 ? x - x * (double)y.p[b] + log1p(exp(-x))
                            : log1p(exp(x)) - x * (double)y.p[b];
        sum += term;
        size += fabs(term);
        if (probability) assert_near(p.p[b], q, q, 1, "prob", b);
        if (gradient) assert_near(dz.p[b], (q - (double)y.p[b]) / 4, 0.25, 1, "dlogit", b);
    }
    assert_near(loss.p[0], sum, size, 1, "loss", 0);
    floats_close(z);
    floats_close(y);
    floats_close(loss);
    floats_close(dz);
    floats_close(p);
}

static void losses_agree_with_f64(void **state)
{
    static const uint32_t BATCH[] = {1, 2, 255, 257, 1023, 5000};
    for (int i = 0; i < 6; i++) {
        emu_shuffle((uint64_t)i);
        check_bce(BATCH[i], 1, 1);
        check_bce(BATCH[i], 0, 1);
        check_bce(BATCH[i], 1, 0);
        check_bce(BATCH[i], 0, 0);
    }
    emu_shuffle(0);
}

static void a_logit_that_is_nan_reaches_the_loss(void **state)
{
    enum { B = 300 };
    float z[B] = {0}, y[B] = {0}, dz[B], loss, p[B];
    for (int b = 0; b < B; b += 13) {
        z[b] = NAN;
        done(cuda_bce(stream, B, z, y, 1.0f, dz, &loss, p));
        assert_true(isnan(loss) && isnan(dz[b]) && isnan(p[b]));
        z[b] = 0;
    }
}

/* --- what surrounds products ---------------------------------------------------------------- */

static void check_mask(uint32_t B, uint32_t N, uint32_t ld, int relu, size_t shift)
{
    size_t n = (size_t)(B - 1) * ld + N;
    struct floats y = floats_random(n, shift, 11), before = floats_random(n, shift, 12);
    struct floats db0 = floats_open(N, shift);
    for (size_t i = 0; i < n; i += 3) y.p[i] = i % 2 ? 0.0f : -0.0f;
    for (uint64_t o = 0; o < ORDERS; o++) {
        struct floats dy = floats_random(n, shift, 12), db = floats_open(N, shift);
        struct floats scratch = floats_open(cuda_sum_scratch(B, N), shift);
        emu_shuffle(o);
        done(cuda_mask_and_sum(stream, B, N, y.p, ld, relu, dy.p, db.p, scratch.p));
        for (size_t c = 0; c < N; c++) {
            double sum = 0, size = 0;
            for (size_t b = 0, i = c; b < B; b++, i += ld) {
                float want = relu && y.p[i] == 0 ? 0 : before.p[i];
                assert_same_bits(&dy.p[i], &want, 1, "masked dy");
                sum += (double)want;
                size += fabs((double)want);
            }
            assert_near(db.p[c], sum, size, B, "db", c);
        }
        for (size_t i = 0; i < n; i++)
            if (i % ld >= N) assert_same_bits(&dy.p[i], &before.p[i], 1, "between rows");
        if (o == 0) memcpy(db0.p, db.p, N * sizeof(float));
        assert_same_bits(db.p, db0.p, N, "db in another order of threads");
        floats_close(dy);
        floats_close(db);
        floats_close(scratch);
    }
    emu_shuffle(0);
    floats_close(y);
    floats_close(before);
    floats_close(db0);
}

static void gradients_are_masked_and_summed_over_samples(void **state)
{
    static const uint32_t BATCH[] = {1, 7, 64, 65, 700}, OUT[] = {1, 3, 4, 48, 130, 260};
    for (int i = 0; i < 5 * 6; i++)
        for (uint32_t pad = 0; pad < 6; pad += 5)
            check_mask(BATCH[i % 5], OUT[i / 5], OUT[i / 5] + pad, (i + (int)pad) % 2, pad != 0);
}

static void check_one(uint32_t B, uint32_t K, uint32_t ld, int relu, size_t shift, int want_dx)
{
    struct floats x = floats_random((size_t)B * K, shift, 13), w = floats_random(K, shift, 14);
    struct floats dy = floats_random((size_t)B * ld, 0, 15), y = floats_open((size_t)B * ld, 0);
    struct floats dw = floats_open(K, shift), dx = floats_open(want_dx ? (size_t)B * K : 0, shift);
    struct floats scratch = floats_open(cuda_sum_scratch(B, K), shift);
    float b = 0.125f;
    done(cuda_forward_one(stream, B, K, x.p, w.p, &b, relu, y.p, ld));
    done(cuda_backward_one(stream, B, K, x.p, w.p, dy.p, ld, dw.p, want_dx ? dx.p : NULL,
                           scratch.p));
    for (size_t i = 0; i < B; i++) {
        double z = (double)b, size = (double)b;
        for (size_t k = 0; k < K; k++) {
            double p = (double)x.p[i * K + k] * (double)w.p[k];
            float d = dy.p[i * ld] * w.p[k];
            z += p;
            size += fabs(p);
            if (want_dx) assert_same_bits(&dx.p[i * K + k], &d, 1, "dx");
        }
        assert_near(y.p[i * ld], relu && z < 0 ? 0 : z, size, K + 1, "y", i);
        for (size_t k = 1; k < ld; k++) assert_true(isnan(y.p[i * ld + k])); /* not ours */
    }
    for (size_t k = 0; k < K; k++) {
        double sum = 0, size = 0;
        for (size_t i = 0; i < B; i++) {
            double p = (double)x.p[i * K + k] * (double)dy.p[i * ld];
            sum += p;
            size += fabs(p);
        }
        assert_near(dw.p[k], sum, size, B, "dw", k);
    }
    struct floats all[] = {x, w, dy, y, dw, dx, scratch};
    for (int i = 0; i < 7; i++) floats_close(all[i]);
}

static void the_layer_with_one_output_agrees_with_f64(void **state)
{
    static const uint32_t BATCH[] = {1, 31, 33, 64, 300}, IN[] = {1, 3, 16, 256, 517};
    for (int i = 0; i < 5 * 5; i++) {
        emu_shuffle((uint64_t)i);
        check_one(BATCH[i % 5], IN[i / 5], 1 + (uint32_t)i % 3, i % 2, i % 4 == 3, i % 3 != 0);
    }
    emu_shuffle(0);
}

static void relu_keeps_nan(void **state)
{
    float x[4] = {NAN, -1, 1, -INFINITY}, w = 1, b = 0, y[4];
    done(cuda_forward_one(stream, 4, 1, x, &w, &b, 1, y, 1));
    assert_true(isnan(y[0]) && y[1] == 0 && y[2] == 1 && y[3] == 0);
    done(cuda_bias_relu(stream, 4, 1, &b, 1, x, 1));
    assert_true(isnan(x[0]) && x[1] == 0 && x[2] == 1 && x[3] == 0);
}

static void a_bias_is_added_to_every_row(void **state)
{
    static const uint32_t OUT[] = {1, 4, 30, 64, 1030};
    for (uint32_t i = 0; i < 5 * 4; i++) {
        uint32_t B = 1 + i * 7, N = OUT[i % 5], ld = N + i % 3, relu = i / 5 % 2;
        struct floats b = floats_random(N, 1, 16), y = floats_random((size_t)B * ld, i == 4, 17);
        struct floats want = floats_random((size_t)B * ld, 0, 17);
        for (size_t k = 0; k < want.n; k++) {
            if (k % ld >= N) continue;
            float z = want.p[k] + b.p[k % ld];
            want.p[k] = relu && z < 0 ? 0 : z;
        }
        done(cuda_bias_relu(stream, B, N, b.p, (int)relu, y.p, ld));
        assert_same_bits(y.p, want.p, want.n, "y");
        floats_close(b);
        floats_close(y);
        floats_close(want);
    }
}

/* --- bf16 ----------------------------------------------------------------------------------- */

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void bf16_rounds_to_nearest_ties_to_even(void **state)
{
    static const struct { uint32_t from; uint16_t to; } CASE[] = {
        {0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, {0x3F808001, 0x3F81}, {0x3F818000, 0x3F82},
        {0x3F817FFF, 0x3F81}, {0x80000000, 0x8000}, {0x00008000, 0x0000}, {0x00018000, 0x0002},
        {0x7F7FFFFF, 0x7F80}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, {0x7F800001, 0x7FC0},
        {0xFFC12345, 0xFFC1}, {0x7FFFFFFF, 0x7FFF}, {0x3FFF8000, 0x4000},
    };
    enum { N = sizeof(CASE) / sizeof(CASE[0]) };
    for (uint32_t i = 0; i < N; i++) {
        float from[8];
        uint16_t to[8];
        for (int k = 0; k < 8; k++) from[k] = float_of(CASE[i].from);
        for (uint32_t width = 1; width <= 8; width++) { /* one at a time, and by four */
            memset(to, 0x11, sizeof(to));
            done(cuda_to_bf16(stream, 1, width, from, width, to, width));
            for (uint32_t k = 0; k < 8; k++)
                assert_int_equal(to[k], k < width ? CASE[i].to : 0x1111);
        }
    }
}

static void bf16_rows_are_padded_with_zeros(void **state)
{
    static const uint32_t WIDTH[] = {1, 5, 13, 16, 48, 1030};
    for (uint32_t i = 0; i < 6 * 4 * 2; i++) {
        uint32_t B = 1 + i * 5, N = WIDTH[i % 6], ld = N + i / 6 % 2 * 3, ld_to = N + i / 6 % 4 * 4;
        ld_to = i / 24 ? (ld_to + 7) / 8 * 8 : ld_to;
        struct floats from = floats_random((size_t)B * ld, 0, 18);
        size_t n = (size_t)B * ld_to;
        uint16_t *to = mem_alloc(n + 4, sizeof(*to));
        memset(to, 0x11, (n + 4) * sizeof(*to));
        done(cuda_to_bf16(stream, B, N, from.p, ld, to, ld_to));
        for (size_t k = 0; k < n; k++) {
            float back = float_of((uint32_t)to[k] << 16);
            float x = k % ld_to < N ? from.p[k / ld_to * ld + k % ld_to] : 0.0f;
            if (fabsf(back - x) > fabsf(x) * 0x1p-8f) fail_msg("[%zu] %a is %a", k, (double)x,
                                                              (double)back);
        }
        for (size_t k = n; k < n + 4; k++) assert_int_equal(to[k], 0x1111);
        mem_free(to);
        floats_close(from);
    }
}

static void nothing_is_launched_for_nothing(void **state)
{
    done(cuda_interact_forward(stream, 0, 3, 4, NULL, NULL));
    done(cuda_interact_backward(stream, 0, 3, 4, NULL, NULL, NULL));
    done(cuda_bce(stream, 0, NULL, NULL, 1.0f, NULL, NULL, NULL));
    done(cuda_mask_and_sum(stream, 0, 4, NULL, 4, 1, NULL, NULL, NULL));
    done(cuda_forward_one(stream, 0, 4, NULL, NULL, NULL, 1, NULL, 4));
    done(cuda_backward_one(stream, 0, 4, NULL, NULL, NULL, 1, NULL, NULL, NULL));
    done(cuda_bias_relu(stream, 0, 4, NULL, 1, NULL, 4));
    done(cuda_to_bf16(stream, 0, 4, NULL, 4, NULL, 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_move_to_where_they_are_named),
        cmocka_unit_test(look_ups_are_gathered_behind_entry_0),
        cmocka_unit_test(dots_of_all_pairs_and_back_agree_with_f64),
        cmocka_unit_test(samples_share_a_block_when_there_are_many),
        cmocka_unit_test(vectors_may_be_longer_and_more_than_shared_memory_holds),
        cmocka_unit_test(samples_give_the_same_bits_in_any_batch),
        cmocka_unit_test(losses_agree_with_f64),
        cmocka_unit_test(a_logit_that_is_nan_reaches_the_loss),
        cmocka_unit_test(gradients_are_masked_and_summed_over_samples),
        cmocka_unit_test(the_layer_with_one_output_agrees_with_f64),
        cmocka_unit_test(relu_keeps_nan),
        cmocka_unit_test(a_bias_is_added_to_every_row),
        cmocka_unit_test(bf16_rounds_to_nearest_ties_to_even),
        cmocka_unit_test(bf16_rows_are_padded_with_zeros),
        cmocka_unit_test(nothing_is_launched_for_nothing),
    };
    return cmocka_run_group_tests(tests, open_stream, close_stream);
}
