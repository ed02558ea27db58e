/* launch/main.c - the `chanter` command: which commands there are. A new one is one line here. */
#include "launch/check.h"
#include "launch/command.h"

static const struct command COMMANDS[] = {
    {"check", "say what would keep a configuration from running", check_main},
};

int main(int argc, char **argv)
{
    return command_main(COMMANDS, sizeof(COMMANDS) / sizeof(COMMANDS[0]), argc, argv);
}
