/* From checked text to struct config and back. libcyaml maps names to members (the schema below);
 * it is given only what has passed keys_check, because its own errors carry no line and its
 * readings are looser than ours (a misspelt boolean is true, 010 is eight).
 *
 *   open:   file -> doc, --set over it -> keys_check, defaults -> YAML -> libcyaml -> config_check
 *   write:  libcyaml -> YAML -> doc, floats put in with all their digits -> file
 *
 * Numbers are read and written in the C locale, whatever the process has set. */
#include "config/config.h"

#include <cyaml/cyaml.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "config/config_check.h"
#include "config/doc.h"
#include "config/keys.h"
#include "config/set.h"

/* --- where each key goes --------------------------------------------------------------------
 * Members are named from struct config itself, whose sections have no types of their own; so a
 * section stands at offset 0 and its keys at their offsets in the whole. */

#define REF CYAML_FLAG_POINTER
#define OPTIONAL_REF (CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL)
#define KEY_OF(type, key, member) CYAML_FIELD_##type(key, CYAML_FLAG_DEFAULT, struct config, member)
#define ENUM_OF(key, member, names) \
    CYAML_FIELD_ENUM(key, CYAML_FLAG_STRICT, struct config, member, names, CYAML_ARRAY_LEN(names))
#define TEXT_OF(key, flags, member) \
    CYAML_FIELD_STRING_PTR(key, flags, struct config, member, 1, KEY_TEXT_MAX)
#define LIST_OF(key, member, count, item) \
    CYAML_FIELD_SEQUENCE_COUNT(key, REF, struct config, member, count, item, 1, CYAML_UNLIMITED)
#define SECTION_OF(key_, fields) \
    {.key = key_, .value = {CYAML_VALUE_MAPPING(CYAML_FLAG_DEFAULT, struct config, fields)}}

static const cyaml_strval_t FORMATS[] = {
    {"criteo_tsv", DATA_CRITEO_TSV}, {"prepared", DATA_PREPARED}, {"synthetic", DATA_SYNTHETIC}};
static const cyaml_strval_t MODELS[] = {{"dlrm", MODEL_DLRM}};
static const cyaml_strval_t OPTIMIZERS[] = {
    {"sgd", OPT_SGD}, {"adagrad", OPT_ADAGRAD}, {"rowwise_adagrad", OPT_ROWWISE_ADAGRAD}};
static const cyaml_strval_t TRANSPORTS[] = {{"local", TRANSPORT_LOCAL}, {"grpc", TRANSPORT_GRPC}};
static const cyaml_strval_t DEVICES[] = {{"cpu", DEVICE_CPU}, {"cuda", DEVICE_CUDA}};
static const cyaml_strval_t PRECISIONS[] = {
    {"fp32", PRECISION_FP32}, {"tf32", PRECISION_TF32}, {"bf16", PRECISION_BF16}};

static const cyaml_schema_value_t U32 = {CYAML_VALUE_UINT(CYAML_FLAG_DEFAULT, uint32_t)};
static const cyaml_schema_value_t U64 = {CYAML_VALUE_UINT(CYAML_FLAG_DEFAULT, uint64_t)};

static const cyaml_schema_field_t DATA[] = {
    ENUM_OF("format", data.format, FORMATS),
    TEXT_OF("path", OPTIONAL_REF, data.path),
    KEY_OF(UINT, "train_rows", data.train_rows),
    TEXT_OF("eval_path", OPTIONAL_REF, data.eval_path),
    KEY_OF(UINT, "eval_rows", data.eval_rows),
    KEY_OF(UINT, "rows", data.rows),
    KEY_OF(UINT, "seed", data.seed),
    CYAML_FIELD_END};
static const cyaml_schema_field_t MODEL[] = {
    ENUM_OF("kind", model.kind, MODELS),
    KEY_OF(UINT, "dense_features", model.dense_features),
    KEY_OF(UINT, "dim", model.dim),
    LIST_OF("bottom_mlp", model.bottom_mlp, model.n_bottom_mlp, &U32),
    LIST_OF("top_mlp", model.top_mlp, model.n_top_mlp, &U32),
    LIST_OF("tables", model.tables, model.n_tables, &U64),
    CYAML_FIELD_END};
static const cyaml_schema_field_t TRAIN[] = {
    KEY_OF(UINT, "global_batch", train.global_batch),
    KEY_OF(UINT, "slices", train.slices),
    KEY_OF(UINT, "iterations", train.iterations),
    KEY_OF(UINT, "epochs", train.epochs),
    ENUM_OF("optimizer", train.optimizer, OPTIMIZERS),
    KEY_OF(FLOAT, "learning_rate", train.learning_rate),
    KEY_OF(FLOAT, "epsilon", train.epsilon),
    KEY_OF(UINT, "seed", train.seed),
    CYAML_FIELD_END};
static const cyaml_schema_field_t ORACLE[] = {
    KEY_OF(UINT, "lookahead", oracle.lookahead),
    KEY_OF(UINT, "queue", oracle.queue),
    CYAML_FIELD_END};
static const cyaml_schema_field_t CLUSTER[] = {
    KEY_OF(UINT, "trainers", cluster.trainers),
    KEY_OF(UINT, "servers", cluster.servers),
    KEY_OF(UINT, "cache_rows", cluster.cache_rows),
    ENUM_OF("transport", cluster.transport, TRANSPORTS),
    ENUM_OF("device", cluster.device, DEVICES),
    KEY_OF(UINT, "threads", cluster.threads),
    KEY_OF(UINT, "server_threads", cluster.server_threads),
    KEY_OF(UINT, "prefetch", cluster.prefetch),
    KEY_OF(UINT, "timeout_s", cluster.timeout_s),
    CYAML_FIELD_END};
static const cyaml_schema_field_t DEVICE[] = {
    ENUM_OF("precision", device.precision, PRECISIONS),
    CYAML_FIELD_END};
static const cyaml_schema_field_t RUN[] = {
    TEXT_OF("dir", OPTIONAL_REF, run.dir),
    KEY_OF(BOOL, "save_initial", run.save_initial),
    KEY_OF(BOOL, "save_final", run.save_final),
    KEY_OF(UINT, "eval_every", run.eval_every),
    KEY_OF(UINT, "snapshot_every", run.snapshot_every),
    CYAML_FIELD_END};

static const cyaml_schema_field_t SECTIONS[] = {
    SECTION_OF("data", DATA),       SECTION_OF("model", MODEL), SECTION_OF("train", TRAIN),
    SECTION_OF("oracle", ORACLE),   SECTION_OF("cluster", CLUSTER),
    SECTION_OF("device", DEVICE),   SECTION_OF("run", RUN),
    CYAML_FIELD_END};
static const cyaml_schema_value_t SCHEMA = {CYAML_VALUE_MAPPING(REF, struct config, SECTIONS)};

/* --- libcyaml's memory comes from ours ------------------------------------------------------ */

/* In front of each block, as long as an alignment step so that the block stays aligned. */
struct block_head { _Alignas(64) size_t room; };

/* cyaml_mem_fn_t. Lists grow by one item a call: room doubles, so that they stay linear. */
static void *cyaml_memory(void *ctx, void *p, size_t size)
{
    struct block_head *old = p == NULL ? NULL : (struct block_head *)p - 1;
    if (size == 0) {
        mem_free(old);
        return NULL;
    }
    if (old != NULL && old->room >= size) return p;
    size_t room = old != NULL && 2 * old->room > size ? 2 * old->room : size;
    if (room > SIZE_MAX - sizeof(*old)) return NULL;
    struct block_head *new = mem_alloc(1, sizeof(*new) + room);
    if (new == NULL) return NULL;
    new->room = room;
    if (old != NULL) memcpy(new + 1, p, old->room);
    mem_free(old);
    return new + 1;
}

static const cyaml_config_t CYAML = {.mem_fn = cyaml_memory, .log_level = CYAML_LOG_ERROR};

static enum st cyaml_fail(const char *path, cyaml_err_t err)
{
    if (err == CYAML_ERR_OOM) return log_fail(ST_NOMEM, path, "out of memory for configuration");
    return log_fail(ST_INTERNAL, path, "keys and schema differ: %s", cyaml_strerror(err));
}

/* Make this thread's numbers those of the C locale; give the result to locale_leave. */
static locale_t locale_enter(void)
{
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    CHECK(c != (locale_t)0, "the C locale is always there");
    return uselocale(c);
}

static void locale_leave(locale_t before)
{
    freelocale(uselocale(before));
}

/* --- open ----------------------------------------------------------------------------------- */

static enum st config_load(struct doc *d, struct config **out)
{
    char *text = NULL;
    size_t len = 0;
    enum st st = doc_emit(d, &text, &len);
    if (st != ST_OK) return st;
    cyaml_data_t *data = NULL;
    cyaml_err_t err = cyaml_load_data((const uint8_t *)text, len, &CYAML, &SCHEMA, &data, NULL);
    mem_free(text);
    if (err != CYAML_OK) return cyaml_fail(d->path, err);
    *out = data;
    return ST_OK;
}

static enum st open_checked(const char *path, const char *const *set, size_t n_set,
                            struct config **out)
{
    struct doc *d = NULL;
    struct config *c = NULL;
    enum st st = doc_open(path, &d);
    if (st != ST_OK) return st;
    for (size_t i = 0; i < n_set; i++) TRY(set_apply(d, set[i]), err_doc);
    TRY(keys_check(d), err_doc);
    TRY(config_load(d, &c), err_doc);
    TRY(config_check(c, d), err_config);
    doc_close(d);
    *out = c;
    return ST_OK;

err_config: config_close(c);
err_doc:    doc_close(d);
    return st;
}

enum st config_open(const char *path, const char *const *set, size_t n_set, struct config **out)
{
    locale_t before = locale_enter();
    enum st st = open_checked(path, set, n_set, out);
    locale_leave(before);
    return st;
}

void config_close(struct config *c)
{
    if (c != NULL) cyaml_free(&CYAML, &SCHEMA, c, 0);
}

/* --- write ---------------------------------------------------------------------------------- */

/* libcyaml writes six digits. Nine tell every float from its neighbours; 0.02 needs one. */
static enum st put_float(struct doc *d, const char *key, float value)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return doc_put(d, "train", key, DOC_DEFAULT, text);
}

static enum st config_to_doc(const struct config *c, const char *path, struct doc **out)
{
    char *text = NULL;
    size_t len = 0;
    struct doc *d = NULL;
    cyaml_err_t err = cyaml_save_data(&text, &len, &CYAML, &SCHEMA, c, 0);
    if (err != CYAML_OK) return cyaml_fail(path, err);
    enum st st = doc_parse(path, text, len, &d);
    cyaml_memory(NULL, text, 0);
    if (st != ST_OK) return st;
    TRY(put_float(d, "learning_rate", c->train.learning_rate), err);
    TRY(put_float(d, "epsilon", c->train.epsilon), err);
    *out = d;
    return ST_OK;

err:
    doc_close(d);
    return st;
}

static enum st write_all(int fd, const char *path, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t put = write(fd, p, n);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return log_fail(ST_IO, path, "cannot write: %s", strerror(errno));
        p += put;
        n -= (size_t)put;
    }
    return ST_OK;
}

/* All of the file or none of it: written beside, then renamed over. */
static enum st write_file(const char *path, const char *text, size_t len)
{
    char part[KEY_TEXT_MAX + 16];
    if (snprintf(part, sizeof(part), "%s.part", path) >= (int)sizeof(part))
        return log_fail(ST_CANTCREATE, path, "path too long");
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return log_fail(ST_CANTCREATE, part, "cannot create: %s", strerror(errno));
    enum st st = write_all(fd, part, text, len);
    if (st == ST_OK && fsync(fd) != 0)
        st = log_fail(ST_IO, part, "cannot fsync: %s", strerror(errno));
    if (close(fd) != 0 && st == ST_OK)
        st = log_fail(ST_IO, part, "cannot close: %s", strerror(errno));
    if (st == ST_OK && rename(part, path) != 0)
        st = log_fail(ST_CANTCREATE, path, "cannot rename: %s", strerror(errno));
    if (st != ST_OK) unlink(part);
    return st;
}

static enum st write_text(const struct config *c, const char *path)
{
    struct doc *d = NULL;
    char *text = NULL;
    size_t len = 0;
    enum st st = config_to_doc(c, path, &d);
    if (st != ST_OK) return st;
    TRY(doc_emit(d, &text, &len), err);
    st = write_file(path, text, len);
    mem_free(text);

err:
    doc_close(d);
    return st;
}

enum st config_write(const struct config *c, const char *path)
{
    locale_t before = locale_enter();
    enum st st = write_text(c, path);
    locale_leave(before);
    return st;
}

/* --- small questions ------------------------------------------------------------------------ */

uint32_t config_row_state(enum optimizer opt, uint32_t dim)
{
    switch (opt) {
    case OPT_ADAGRAD: return dim;
    case OPT_ROWWISE_ADAGRAD: return 1;
    case OPT_SGD: break;
    }
    return 0;
}

uint32_t config_shards(const struct config *c)
{
    return c->cluster.servers * c->cluster.server_threads;
}

const char *config_optimizer_name(enum optimizer opt)
{
    return key_find("train", "optimizer")->names[opt];
}

const char *config_device_name(enum device_kind kind)
{
    return key_find("cluster", "device")->names[kind];
}
