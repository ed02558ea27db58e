#include "launch/fit.h"

#include <inttypes.h>

#include "base/log.h"
#include "compute/device.h"
#include "launch/sizes.h"

/* Of free memory: the rest is for the device's libraries and for pieces that do not fit together. */
static const double USABLE = 0.85;

/* Floats that one sample takes: activations and their gradients, looked-up vectors there and back,
 * and a row on its way in, out and to its sum for each look-up. */
static uint64_t sample_floats(const struct config *c)
{
    uint64_t F = c->model.n_tables, D = c->model.dim, widths = D + F * (F + 1) / 2;
    for (uint32_t k = 0; k < c->model.n_bottom_mlp; k++) widths += c->model.bottom_mlp[k];
    for (uint32_t k = 0; k < c->model.n_top_mlp; k++) widths += c->model.top_mlp[k];
    return 3 * widths + 8 * (F + 1) * D;
}

uint64_t fit_rows(const struct config *c, uint64_t free_bytes, uint32_t sharing)
{
    uint32_t D = c->model.dim, record = D + config_row_state(c->train.optimizer, D);
    uint64_t slices = (c->train.slices + c->cluster.trainers - 1) / c->cluster.trainers;
    uint64_t samples = c->train.global_batch / c->train.slices * slices;
    uint64_t usable = (uint64_t)((double)free_bytes * USABLE) / sharing;
    uint64_t taken = sizes_dense_bytes(c) + samples * sample_floats(c) * sizeof(float);
    return usable <= taken ? 0 : (usable - taken) / (record * sizeof(float));
}

enum st fit_to_device(struct config *c, uint64_t *free_bytes)
{
    struct device *d;
    struct device_cfg cfg = {1, 0, c->device.precision};
    enum st st = device_open(c->cluster.device, &cfg, &d);
    if (st != ST_OK) return st;
    uint64_t bytes = d->ops->free_bytes(d);
    uint32_t sharing = (c->cluster.trainers + d->siblings - 1) / d->siblings;
    bool own_memory = !d->host_memory;
    device_close(d);
    if (free_bytes != NULL) *free_bytes = bytes;
    if (!own_memory) return ST_OK;
    uint64_t rows = fit_rows(c, bytes, sharing);
    if (rows == 0 || rows < c->cluster.cache_rows)
        return log_fail(ST_CONFIG, "cluster.cache_rows", "the device has room for %" PRIu64 " rows "
                        "for each trainer; lower %s", rows,
                        rows == 0 ? "train.global_batch" : "cluster.cache_rows");
    if (c->cluster.cache_rows == 0 && rows < config_cache_rows(c)) c->cluster.cache_rows = rows;
    return ST_OK;
}
