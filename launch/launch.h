/* launch/launch.h - `chanter launch`: the job as processes on this machine. */
#ifndef CHANTER_LAUNCH_LAUNCH_H
#define CHANTER_LAUNCH_LAUNCH_H

#include "base/status.h"

enum st launch_main(int argc, char **argv);

#endif
