/* launch/tools.h - the commands around training: they look at finished runs and make data
 * files. Each is one file, NAME.c, and one row of the table in main.c. */
#ifndef CHANTER_LAUNCH_TOOLS_H
#define CHANTER_LAUNCH_TOOLS_H

#include "base/status.h"

/* argv[0] is the command's name. Results go to standard output. Log what went wrong; ST_END:
 * --help. */
enum st eval_main(int argc, char **argv);
enum st digest_main(int argc, char **argv);
enum st export_main(int argc, char **argv);
enum st inspect_main(int argc, char **argv);
enum st synth_main(int argc, char **argv);
enum st prepare_main(int argc, char **argv);

#endif
