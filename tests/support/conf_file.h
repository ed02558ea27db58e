/* tests/support/conf_file.h - for tests of configurations: a temporary directory with one file in
 * it, and what was logged while it was opened. */
#ifndef CHANTER_TESTS_CONF_FILE_H
#define CHANTER_TESTS_CONF_FILE_H

#include <stddef.h>

#include "base/status.h"
#include "config/config.h"

extern char conf_dir[64];             /* made by conf_group_start         */
extern char conf_path[96];            /* conf.yml in it                   */

int conf_group_start(void **state);   /* cmocka group setup and teardown  */
int conf_group_stop(void **state);

void conf_put_file(const char *path, const void *text, size_t len);
/* config_open, nothing caught before. */
enum st conf_try_open(const char *path, const char *const *set, size_t n, struct config **c);
/* Write `text` to conf_path and open it; fails the test unless that works without a word. */
struct config *conf_must_open(const char *text, const char *const *set, size_t n);

#endif
