/* tests/support/model_shapes.h - three models: odd widths, one layer each, Criteo Kaggle's. */
#ifndef CHANTER_TESTS_SUPPORT_MODEL_SHAPES_H
#define CHANTER_TESTS_SUPPORT_MODEL_SHAPES_H

#include "config/config.h"
#include "tests/support/floats.h"
#include "trainer/model.h"

enum { MODEL_SHAPES = 3 };
struct config model_shape(int which);  /* its arrays are static */
/* Which of the device's n_floats hold a number of some tensor: 1 there, 0 for padding inside a
 * weight, NaN between tensors. For a device in host memory. */
struct floats model_places(const struct model *m, struct device *d);

#endif
