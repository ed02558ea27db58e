#include "config/set.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "config/keys.h"

/* Bytes of the UTF-8 sequence at s; 0 if it is none. Surrogates and over-long forms are none. */
static size_t utf8_len(const unsigned char *s)
{
    static const uint32_t LEAST[] = {0, 0, 0x80, 0x800, 0x10000};
    if (s[0] < 0x80) return 1;
    size_t n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc0 ? 2 : 0;
    if (n == 0) return 0;
    uint32_t v = s[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        v = v << 6 | (s[i] & 0x3fu);
    }
    if (v < LEAST[n] || v > 0x10ffff || (v >= 0xd800 && v <= 0xdfff)) return 0;
    return n;
}

/* YAML holds text, so a value has to be text. */
static bool is_utf8(const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    while (*p != '\0') {
        size_t n = utf8_len(p);
        if (n == 0) return false;
        p += n;
    }
    return true;
}

/* Copy s[0..n) as a name; too long or empty is no name. */
static bool take_name(const char *s, size_t n, char out[DOC_NAME_BYTES])
{
    if (n == 0 || n >= DOC_NAME_BYTES) return false;
    memcpy(out, s, n);
    out[n] = '\0';
    return true;
}

static enum st not_a_key(const char *set)
{
    char name[DOC_NAME_BYTES], guess[KEY_GUESS_BYTES] = "";
    if (take_name(set, strcspn(set, "="), name)) key_guess(name, guess);
    return log_fail(ST_USAGE, NULL, "--set '%s': want SECTION.KEY=VALUE%s%s%s", set,
                    guess[0] != '\0' ? " (did you mean " : "", guess,
                    guess[0] != '\0' ? "?)" : "");
}

enum st set_apply(struct doc *d, const char *set)
{
    char section[DOC_NAME_BYTES], key[DOC_NAME_BYTES];
    const char *eq = strchr(set, '=');
    const char *dot = strchr(set, '.');
    if (eq == NULL || dot == NULL || dot > eq ||
        !take_name(set, (size_t)(dot - set), section) ||
        !take_name(dot + 1, (size_t)(eq - dot - 1), key))
        return not_a_key(set);

    const char *value = eq + 1;
    if (!is_utf8(value))
        return log_fail(ST_CONFIG, NULL, "--set %s.%s: the value is not UTF-8", section, key);
    const struct config_key *k = key_find(section, key);
    if (k != NULL && k->kind == KEY_UINTS) return doc_put_yaml(d, section, key, DOC_SET, value);
    return doc_put(d, section, key, DOC_SET, value);
}
