/* launch/main.c - the `chanter` command: which commands there are. A new one is one line here. */
#include "launch/check.h"
#include "launch/command.h"
#include "launch/launch.h"
#include "launch/train.h"

static const struct command COMMANDS[] = {
    {"train", "train in one process: all roles as threads", train_main},
    {"launch", "train as processes: oracle, servers, and trainers under mpirun", launch_main},
    {"check", "say what would keep a configuration from running", check_main},
};

int main(int argc, char **argv)
{
    return command_main(COMMANDS, sizeof(COMMANDS) / sizeof(COMMANDS[0]), argc, argv);
}
