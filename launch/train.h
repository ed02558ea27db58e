/* launch/train.h - `chanter train`: all roles as threads of this process. */
#ifndef CHANTER_LAUNCH_TRAIN_H
#define CHANTER_LAUNCH_TRAIN_H

#include "base/status.h"

enum st train_main(int argc, char **argv);

#endif
