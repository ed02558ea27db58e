#include "tests/support/model_shapes.h"

#include "base/check.h"

static uint32_t BOTTOM_A[] = {9, 6, 5}, TOP_A[] = {39, 23, 1}; /* odd widths                */
static uint32_t BOTTOM_B[] = {4}, TOP_B[] = {1};              /* one layer each             */
static uint32_t BOTTOM_C[] = {512, 256, 64, 16}, TOP_C[] = {512, 256, 1}; /* Criteo Kaggle  */

static struct config shape(uint32_t dense, uint32_t F, uint32_t *bottom, uint32_t n_bottom,
                           uint32_t *top, uint32_t n_top)
{
    struct config c = {0};
    c.model.dense_features = dense;
    c.model.dim = bottom[n_bottom - 1];
    c.model.bottom_mlp = bottom, c.model.n_bottom_mlp = n_bottom;
    c.model.top_mlp = top, c.model.n_top_mlp = n_top;
    c.model.n_tables = F;
    return c;
}

struct config model_shape(int which)
{
    return which == 0   ? shape(13, 3, BOTTOM_A, 3, TOP_A, 3)
           : which == 1 ? shape(1, 1, BOTTOM_B, 1, TOP_B, 1)
                        : shape(13, 26, BOTTOM_C, 4, TOP_C, 3);
}

struct floats model_places(const struct model *m, struct device *d)
{
    struct floats ones = floats_open(m->n_params, 0), at = floats_open(m->n_floats, 0);
    for (size_t i = 0; i < ones.n; i++) ones.p[i] = 1;
    enum st st = model_put(m, d, ones.p, at.p);
    CHECK(st == ST_OK, "tests put what they have made");
    floats_close(ones);
    return at;
}
