/* launch/main.c - the `chanter` command: which commands there are. A new one is one line here. */
#include "launch/check.h"
#include "launch/command.h"
#include "launch/launch.h"
#include "launch/tools.h"
#include "launch/train.h"

static const struct command COMMANDS[] = {
    {"train", "train in one process: all roles as threads", train_main},
    {"launch", "train as processes: oracle, servers, and trainers under mpirun", launch_main},
    {"check", "say what would keep a configuration from running", check_main},
    {"eval", "score held-out rows with a run's final weights", eval_main},
    {"digest", "one number for everything that a run has learned", digest_main},
    {"export", "write a run's weights as one safetensors file", export_main},
    {"inspect", "say what a run directory or a file holds", inspect_main},
    {"synth", "write a synthetic click log with a known best score", synth_main},
    {"prepare", "parse a data file once, into one that is fast to read", prepare_main},
};

int main(int argc, char **argv)
{
    return command_main(COMMANDS, sizeof(COMMANDS) / sizeof(COMMANDS[0]), argc, argv);
}
