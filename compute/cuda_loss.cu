/* compute/cuda_loss.cu - binary cross-entropy of logits, in f64: a logit is one number a sample,
 * and 1 - sigmoid(z) keeps its digits near 0. e^-|z| never overflows. A NaN logit gives a NaN loss
 * through log1p and z y, although max(z, 0) drops it.
 *
 * Gradients are for many blocks, the loss is one block's: thread k sums up the samples k, k +
 * LOSS_THREADS, ... in this order, then the threads' sums are folded, halves onto each other. */
#include "compute/cuda_kernels.h"

#include <math.h>

#include "compute/cuda_kernel.h"

enum { LOSS_THREADS = 1024 };

struct loss_args {
    const float *logit, *label;
    float *dlogit, *loss, *prob;     /* dlogit, prob: may be NULL                            */
    uint32_t B;
    float scale;
};

KERNEL(bce_gradient, loss_args, a, BLOCK)
{
    uint32_t b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= a.B) return;
    double z = (double)a.logit[b], e = exp(-fabs(z));
    double p = (z >= 0.0 ? 1.0 : e) / (1.0 + e);
    if (a.dlogit != NULL) a.dlogit[b] = (float)((p - (double)a.label[b]) * (double)a.scale);
    if (a.prob != NULL) a.prob[b] = (float)p;
}

KERNEL_THAT_WAITS(bce_loss, loss_args, a, LOSS_THREADS)
{
    SHARED(double, sum);                                     /* [LOSS_THREADS]                */
    double mine = 0.0;
    for (uint32_t b = threadIdx.x; b < a.B; b += LOSS_THREADS) {
        double z = (double)a.logit[b], y = (double)a.label[b];
        mine += log1p(exp(-fabs(z))) + (z > 0.0 ? z : 0.0) - z * y;
    }
    sum[threadIdx.x] = mine;
    for (uint32_t half = LOSS_THREADS / 2; half != 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sum[threadIdx.x] += sum[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *a.loss = (float)sum[0];
}

cudaError_t cuda_bce(cudaStream_t s, uint32_t B, const float *logit, const float *label,
                     float scale, float *dlogit, float *loss, float *prob)
{
    struct loss_args a = {logit, label, dlogit, loss, prob, B, scale};
    if (B == 0) return cudaSuccess;
    if (dlogit != NULL || prob != NULL) {
        cudaError_t e = LAUNCH(s, bce_gradient, dim(ceil_div(B, BLOCK), 1), dim(BLOCK, 1), 0, &a);
        if (e != cudaSuccess) return e;
    }
    return LAUNCH(s, bce_loss, dim(1, 1), dim(LOSS_THREADS, 1), LOSS_THREADS * sizeof(double), &a);
}
