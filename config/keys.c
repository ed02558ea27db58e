#include "config/keys.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/row.h"
#include "base/tree.h"
#include "config/config.h"
#include "config/nearest.h"

static const char *const FORMATS[] = {[DATA_CRITEO_TSV] = "criteo_tsv",
                                      [DATA_PREPARED] = "prepared",
                                      [DATA_SYNTHETIC] = "synthetic", NULL};
static const char *const MODELS[] = {[MODEL_DLRM] = "dlrm", NULL};
static const char *const OPTIMIZERS[] = {[OPT_SGD] = "sgd", [OPT_ADAGRAD] = "adagrad",
                                         [OPT_ROWWISE_ADAGRAD] = "rowwise_adagrad", NULL};
static const char *const TRANSPORTS[] = {[TRANSPORT_LOCAL] = "local", [TRANSPORT_GRPC] = "grpc",
                                         NULL};
static const char *const DEVICES[] = {[DEVICE_CPU] = "cpu", [DEVICE_CUDA] = "cuda", NULL};
static const char *const PRECISIONS[] = {[PRECISION_FP32] = "fp32", [PRECISION_TF32] = "tf32",
                                         [PRECISION_BF16] = "bf16", NULL};

#define SAMPLES_MAX UINT64_C(1000000000000) /* of a file or a run: far from any overflow */
#define ROWS_MAX ((UINT64_C(1) << ROW_BITS) - 1)

/* --- the table ------------------------------------------------------------------------------ */

#define UINT(s, k, def, min, max) \
    {.section = s, .name = k, .kind = KEY_UINT, .fallback = def, .lo = min, .hi = max}
#define UINTS(s, k, min, max, items) \
    {.section = s, .name = k, .kind = KEY_UINTS, .lo = min, .hi = max, .max_items = items}
#define REAL(s, k, def, max) \
    {.section = s, .name = k, .kind = KEY_REAL, .fallback = def, .most = max}
#define BOOL(s, k, def) {.section = s, .name = k, .kind = KEY_BOOL, .fallback = def}
#define NAME(s, k, def, list) \
    {.section = s, .name = k, .kind = KEY_NAME, .fallback = def, .names = list}
#define TEXT(s, k, def) {.section = s, .name = k, .kind = KEY_TEXT, .fallback = def}

const struct config_key config_keys[] = {
    NAME("data", "format", NULL, FORMATS),
    TEXT("data", "path", ""),
    UINT("data", "train_rows", "0", 0, SAMPLES_MAX),
    TEXT("data", "eval_path", ""),
    UINT("data", "eval_rows", "0", 0, SAMPLES_MAX),
    UINT("data", "rows", "0", 0, SAMPLES_MAX),
    UINT("data", "seed", "1", 0, UINT64_MAX),

    NAME("model", "kind", "dlrm", MODELS),
    UINT("model", "dense_features", "13", 1, 65536),
    UINT("model", "dim", NULL, 1, 4096),
    UINTS("model", "bottom_mlp", 1, 65536, 64),
    UINTS("model", "top_mlp", 1, 65536, 64),
    UINTS("model", "tables", 1, ROWS_MAX, ROW_MAX_TABLES),

    UINT("train", "global_batch", NULL, 1, 1048576),
    UINT("train", "slices", "8", 1, TREE_MAX_SLICES),
    UINT("train", "iterations", "0", 0, SAMPLES_MAX),
    UINT("train", "epochs", "0", 0, 1000000),
    NAME("train", "optimizer", "sgd", OPTIMIZERS),
    REAL("train", "learning_rate", NULL, 10.0f),
    REAL("train", "epsilon", "1e-8", 1.0f),
    UINT("train", "seed", "1", 0, UINT64_MAX),

    UINT("oracle", "lookahead", "200", 0, 4096),
    UINT("oracle", "queue", "4", 1, 64),

    UINT("cluster", "trainers", "1", 1, TREE_MAX_SLICES),
    UINT("cluster", "servers", "1", 1, 256),
    UINT("cluster", "cache_rows", "0", 0, 4000000000), /* a slot is 32 bits */
    NAME("cluster", "transport", "local", TRANSPORTS),
    NAME("cluster", "device", "cpu", DEVICES),
    UINT("cluster", "threads", "1", 1, 64),
    UINT("cluster", "server_threads", "1", 1, 64),
    UINT("cluster", "prefetch", "4", 1, 16),
    UINT("cluster", "timeout_s", "60", 1, 86400),

    NAME("device", "precision", "fp32", PRECISIONS),

    TEXT("run", "dir", ""),
    BOOL("run", "save_initial", "false"),
    BOOL("run", "save_final", "true"),
    UINT("run", "eval_every", "0", 0, SAMPLES_MAX),
    UINT("run", "snapshot_every", "0", 0, SAMPLES_MAX),
};
const size_t config_n_keys = sizeof(config_keys) / sizeof(config_keys[0]);

const struct config_key *key_find(const char *section, const char *name)
{
    for (size_t i = 0; i < config_n_keys; i++)
        if (strcmp(config_keys[i].section, section) == 0 && strcmp(config_keys[i].name, name) == 0)
            return &config_keys[i];
    return NULL;
}

const char *key_guess(const char *name, char out[KEY_GUESS_BYTES])
{
    size_t at = 0;
    out[0] = '\0';
    for (size_t i = 0; i < config_n_keys && at < KEY_GUESS_BYTES; i++) {
        const struct config_key *k = &config_keys[i];
        char whole[2 * DOC_NAME_BYTES];
        snprintf(whole, sizeof(whole), "%s.%s", k->section, k->name);
        if (strcmp(k->name, name) != 0 && strcmp(whole, name) != 0) continue;
        at += (size_t)snprintf(out + at, KEY_GUESS_BYTES - at, "%s%s", at > 0 ? " or " : "", whole);
    }
    return out;
}

/* --- names ---------------------------------------------------------------------------------- */

static bool section_known(const char *section)
{
    for (size_t i = 0; i < config_n_keys; i++)
        if (strcmp(config_keys[i].section, section) == 0) return true;
    return false;
}

static enum st unknown_section(const char *where, const char *section)
{
    char hint[NEAREST_HINT_BYTES];
    struct nearest near;
    nearest_start(&near, section);
    for (size_t i = 0; i < config_n_keys; i++) nearest_offer(&near, config_keys[i].section);
    nearest_hint(&near, "'", "'", hint);
    return log_fail(ST_CONFIG, where, "unknown section '%s'%s", section, hint);
}

static enum st unknown_key(const char *where, const char *section, const char *name)
{
    char hint[NEAREST_HINT_BYTES];
    struct nearest near;
    nearest_start(&near, name);
    for (size_t i = 0; i < config_n_keys; i++) {
        const struct config_key *k = &config_keys[i];
        if (strcmp(k->section, section) == 0) nearest_offer(&near, k->name);
        else if (strcmp(k->name, name) == 0)
            return log_fail(ST_CONFIG, where, "unknown key '%s' in %s (it belongs in %s)", name,
                            section, k->section);
    }
    nearest_hint(&near, "'", "'", hint);
    return log_fail(ST_CONFIG, where, "unknown key '%s' in %s%s", name, section, hint);
}

/* --- values --------------------------------------------------------------------------------- */

static bool is_number(const char *text)
{
    char *end;
    strtod(text, &end);
    return text[0] != '\0' && !isspace((unsigned char)text[0]) && *end == '\0';
}

/* Decimal digits only: YAML 1.1 would read 010 as eight and 0x10 as sixteen. */
static bool parse_uint(const char *text, uint64_t *out)
{
    size_t n = strlen(text);
    if (n == 0 || strspn(text, "0123456789") != n || (text[0] == '0' && n > 1)) return false;
    errno = 0;
    *out = strtoull(text, NULL, 10);
    return errno == 0;
}

static enum st check_uint(const char *where, const struct config_key *k, const char *name,
                          const char *text)
{
    uint64_t v;
    if (parse_uint(text, &v) && v >= k->lo && v <= k->hi) return ST_OK;
    if (!is_number(text)) return log_fail(ST_CONFIG, where, "%s '%s' is not a number", name, text);
    return log_fail(ST_CONFIG, where, "%s '%s': want an integer %" PRIu64 "..%" PRIu64, name, text,
                    k->lo, k->hi);
}

enum { LIST_TEXT_BYTES = 128 };

/* "500 20" as it should be written, "500, 20". */
static const char *as_list(const char *text, char out[LIST_TEXT_BYTES])
{
    static const char BETWEEN[] = " ,;";
    size_t at = 0;
    out[0] = '\0';
    for (text += strspn(text, BETWEEN); *text != '\0' && at < LIST_TEXT_BYTES;) {
        size_t n = strcspn(text, BETWEEN);
        at += (size_t)snprintf(out + at, LIST_TEXT_BYTES - at, "%s%.*s", at > 0 ? ", " : "",
                               (int)n, text);
        text += n;
        text += strspn(text, BETWEEN);
    }
    return out;
}

static enum st check_uints(const char *where, const struct config_key *k, const struct doc_entry *e)
{
    char list[LIST_TEXT_BYTES];
    if (!e->list)
        return log_fail(ST_CONFIG, where, "%s '%s' is not a list; write [%s]", k->name, e->text,
                        as_list(e->text, list));
    if (e->n == 0 || e->n > k->max_items)
        return log_fail(ST_CONFIG, where, "%s has %zu values: want 1..%" PRIu32, k->name, e->n,
                        k->max_items);
    const char *text = e->text;
    for (size_t i = 0; i < e->n; i++, text += strlen(text) + 1) {
        char name[DOC_NAME_BYTES + 24];
        snprintf(name, sizeof(name), "%s[%zu]", k->name, i);
        enum st st = check_uint(where, k, name, text);
        if (st != ST_OK) return st;
    }
    return ST_OK;
}

static const char *short_name(const struct config_key *k)
{
    return strcmp(k->name, "learning_rate") == 0 ? "lr" : k->name;
}

static enum st check_real(const char *where, const struct config_key *k, const char *text)
{
    /* YAML writes .nan and .inf; strtof reads them without the dot. */
    bool special = strstr(text, ".nan") != NULL || strstr(text, ".inf") != NULL;
    bool decimal = strspn(text, "0123456789.eE+-") == strlen(text);
    if (!special && !is_number(text))
        return log_fail(ST_CONFIG, where, "%s '%s' is not a number", k->name, text);
    float v = decimal && !special ? strtof(text, NULL) : NAN;
    if (v > 0.0f && v <= k->most) return ST_OK;
    return log_fail(ST_CONFIG, where, "%s %s: want 0 < %s <= %g", k->name, text, short_name(k),
                    (double)k->most);
}

static enum st check_name(const char *where, const struct config_key *k, const char *text)
{
    char hint[NEAREST_HINT_BYTES], all[256] = "";
    struct nearest near;
    nearest_start(&near, text);
    for (size_t i = 0, at = 0; k->names[i] != NULL && at < sizeof(all); i++) {
        if (strcmp(k->names[i], text) == 0) return ST_OK;
        nearest_offer(&near, k->names[i]);
        at += (size_t)snprintf(all + at, sizeof(all) - at, "%s%s", i > 0 ? ", " : "", k->names[i]);
    }
    nearest_hint(&near, "'", "'", hint);
    return log_fail(ST_CONFIG, where, "%s '%s': want %s%s%s", k->name, text,
                    k->names[1] != NULL ? "one of " : "", all, hint);
}

static enum st check_text(const char *where, const struct config_key *k, const char *text)
{
    if (strlen(text) <= KEY_TEXT_MAX) return ST_OK;
    return log_fail(ST_CONFIG, where, "%s has %zu bytes: want at most %d", k->name, strlen(text),
                    KEY_TEXT_MAX);
}

/* Nothing, or what YAML takes for nothing. */
static bool is_null(const struct doc_entry *e)
{
    if (e->list) return false;
    if (e->text[0] == '\0') return true;
    return e->plain && doc_null_word(e->text);
}

static enum st check_value(const char *where, const struct config_key *k, const struct doc_entry *e)
{
    if (is_null(e))
        return log_fail(ST_CONFIG, where, "%s has no value; give one or leave the key out",
                        k->name);
    if (k->kind == KEY_UINTS) return check_uints(where, k, e);
    if (e->list) return log_fail(ST_CONFIG, where, "%s is a list; want one value", k->name);
    switch (k->kind) {
    case KEY_UINT: return check_uint(where, k, k->name, e->text);
    case KEY_REAL: return check_real(where, k, e->text);
    case KEY_NAME: return check_name(where, k, e->text);
    case KEY_BOOL:
        if (strcmp(e->text, "true") == 0 || strcmp(e->text, "false") == 0) return ST_OK;
        return log_fail(ST_CONFIG, where, "%s '%s': want true or false", k->name, e->text);
    default: return check_text(where, k, e->text);
    }
}

static enum st check_entry(struct doc *d, const struct doc_entry *e)
{
    char where[DOC_WHERE_BYTES];
    doc_where(d, e, where);
    if (!section_known(e->section)) return unknown_section(where, e->section);
    if (e->key[0] == '\0' && e->origin == DOC_FILE) return ST_OK; /* the section itself */
    const struct config_key *k = key_find(e->section, e->key);
    if (k == NULL) return unknown_key(where, e->section, e->key);
    return check_value(where, k, e);
}

static enum st add_default(struct doc *d, const struct config_key *k)
{
    if (doc_find(d, k->section, k->name) != NULL) return ST_OK;
    if (k->fallback == NULL)
        return log_fail(ST_CONFIG, d->path, "%s.%s is missing", k->section, k->name);
    if (k->fallback[0] == '\0') return ST_OK;
    return doc_put(d, k->section, k->name, DOC_DEFAULT, k->fallback);
}

enum st keys_check(struct doc *d)
{
    enum st st = ST_OK;
    for (size_t i = 0; i < d->n && st == ST_OK; i++) st = check_entry(d, &d->entry[i]);
    for (size_t i = 0; i < config_n_keys && st == ST_OK; i++) st = add_default(d, &config_keys[i]);
    return st;
}
