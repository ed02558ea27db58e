#include "tests/support/conf_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/caught.h"

char conf_dir[64];
char conf_path[96];

int conf_group_start(void **state)
{
    snprintf(conf_dir, sizeof(conf_dir), "/tmp/test_config.XXXXXX");
    if (mkdtemp(conf_dir) == NULL) return -1;
    snprintf(conf_path, sizeof(conf_path), "%s/conf.yml", conf_dir);
    caught_start();
    return 0;
}

int conf_group_stop(void **state)
{
    unlink(conf_path);
    caught_stop();
    return rmdir(conf_dir);
}

void conf_put_file(const char *path, const void *text, size_t len)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

enum st conf_try_open(const char *path, const char *const *set, size_t n, struct config **c)
{
    caught_reset();
    return config_open(path, set, n, c);
}

struct config *conf_must_open(const char *text, const char *const *set, size_t n)
{
    struct config *c = NULL;
    conf_put_file(conf_path, text, strlen(text));
    enum st st = conf_try_open(conf_path, set, n, &c);
    if (st != ST_OK) print_error("%s\n", caught_line);
    assert_int_equal(st, ST_OK);
    assert_int_equal(caught_lines, 0);
    return c;
}
