/* The prepared format: see prepared.h for its layout.
 *
 * Blocks are read with pread, not mapped: a file that shrinks under a mapping kills the process
 * with SIGBUS, a short read is an error with a name. What is handed out is what the checksum was
 * computed over: each block is verified when it is read, in this pass and in the next. */
#include "data/prepared.h"

#include <stddef.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/mem.h"
#include "data/infile.h"
#include "data/outfile.h"
#include "data/reader.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the layout is little endian");

enum {
    VERSION = 1,
    BLOCK_ROWS = 4096,
    ALIGN = 64,
    MAX_FEATURES = 1 << 16,        /* of either kind: keeps all sizes below in 64 bits */
    MAX_BLOCK_ROWS = 1 << 20,
};
static const char MAGIC[8] = {'C', 'H', 'A', 'N', 'T', 'E', 'R', 'P'};
static const char TRANSFORM[16] = "log1p";

struct header {
    char magic[8];
    uint32_t version, dense_features, n_tables, block_rows;
    uint64_t rows;
    char transform[16];
    uint64_t zero, checksum;
};
struct block_head {
    uint64_t checksum;
    uint32_t rows;
    char zero[52];
};
_Static_assert(sizeof(struct header) == ALIGN && sizeof(struct block_head) == ALIGN, "layout");

static size_t pad(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t dense_bytes(const struct header *h, size_t rows)
{
    return pad(rows * h->dense_features * sizeof(float));
}

static size_t id_bytes(const struct header *h, size_t rows)
{
    return pad(rows * h->n_tables * sizeof(uint32_t));
}

/* The block's bytes in the file, its head included. */
static size_t block_bytes(const struct header *h, size_t rows)
{
    return ALIGN + dense_bytes(h, rows) + id_bytes(h, rows) + pad(rows);
}

/* Where the sections of a block of `rows` samples lie in memory. */
static struct raw_samples sections(const struct header *h, char *block, size_t rows)
{
    char *dense = block + ALIGN, *id = dense + dense_bytes(h, rows);
    return (struct raw_samples){(float *)(void *)dense, (uint8_t *)id + id_bytes(h, rows),
                                (uint32_t *)(void *)id};
}

static uint64_t header_checksum(const struct header *h)
{
    return XXH3_64bits(h, offsetof(struct header, checksum));
}

static uint64_t block_checksum(const struct header *h, const char *block, size_t rows,
                               uint64_t number)
{
    return XXH3_64bits_withSeed(block + ALIGN, block_bytes(h, rows) - ALIGN, number);
}

/* --- reading ----------------------------------------------------------------------------- */

struct prepared {
    struct reader base;
    const char *path;              /* borrowed */
    struct infile file;            /* owns the descriptor */
    struct header header;          /* checked */
    char *block;                   /* owns; one block as it is in the file */
    uint64_t loaded;               /* its number; UINT64_MAX: none */
    uint64_t row;                  /* the next sample */
};

/* Bytes of the file that the header describes; UINT64_MAX for an impossible number of rows. */
static uint64_t file_bytes(const struct header *h)
{
    uint64_t blocks = h->rows / h->block_rows, tail = h->rows % h->block_rows, bytes;
    if (__builtin_mul_overflow(blocks, block_bytes(h, h->block_rows), &bytes) ||
        __builtin_add_overflow(bytes, sizeof(*h), &bytes) ||
        __builtin_add_overflow(bytes, tail == 0 ? 0 : block_bytes(h, tail), &bytes))
        return UINT64_MAX;
    return bytes;
}

/* For the message: rows that a file of this size can hold at most (padding leaves a choice for small
 * rows), and whether it is exactly theirs. */
static uint64_t rows_in_file(const struct header *h, uint64_t size, int *exact)
{
    uint64_t left = size - sizeof(*h), whole = block_bytes(h, h->block_rows);
    uint64_t rows = left / whole * h->block_rows;
    left %= whole;
    size_t tail = 0;
    while (tail + 1 < h->block_rows && block_bytes(h, tail + 1) <= left) tail++;
    *exact = left == (tail == 0 ? 0 : block_bytes(h, tail));
    return rows + tail;
}

static enum st check_header(const struct header *h, const char *path, uint64_t size)
{
    if (memcmp(h->magic, MAGIC, sizeof(MAGIC)) != 0)
        return log_fail(ST_DATA, path, "not a prepared file; make one with `chanter prepare`, or set "
                        "data.format=criteo_tsv if it is text");
    if (h->version != VERSION)
        return log_fail(ST_DATA, path, "format version %u, this program reads %u; rebuild it with "
                        "`chanter prepare`", h->version, (unsigned)VERSION);
    if (h->checksum != header_checksum(h))
        return log_fail(ST_DATA, path, "header checksum mismatch; the file is damaged, rebuild it");
    if (h->dense_features > MAX_FEATURES || h->n_tables > MAX_FEATURES || h->block_rows == 0 ||
        h->block_rows > MAX_BLOCK_ROWS)
        return log_fail(ST_DATA, path, "impossible header: %u dense features, %u tables, %u rows "
                        "per block", h->dense_features, h->n_tables, h->block_rows);
    if (memcmp(h->transform, TRANSFORM, sizeof(TRANSFORM)) != 0)
        return log_fail(ST_DATA, path, "built with dense transform '%.16s', need '%s'; rebuild",
                        h->transform, TRANSFORM);
    if (file_bytes(h) == size) return ST_OK;
    int exact;
    uint64_t held = rows_in_file(h, size, &exact);
    return log_fail(ST_DATA, path, "header says %llu rows, file holds %llu%s; rebuild",
                    (unsigned long long)h->rows, (unsigned long long)held,
                    exact ? "" : " and a part");
}

static enum st check_shape(const struct header *h, const char *path, const struct config *cfg)
{
    if (h->n_tables != cfg->model.n_tables)
        return log_fail(ST_DATA, path, "built for %u tables, need %u; rebuild", h->n_tables,
                        cfg->model.n_tables);
    if (h->dense_features != cfg->model.dense_features)
        return log_fail(ST_DATA, path, "built for %u dense features, need %u; rebuild",
                        h->dense_features, cfg->model.dense_features);
    return ST_OK;
}

static size_t rows_of_block(const struct header *h, uint64_t number)
{
    uint64_t left = h->rows - number * h->block_rows;
    return left < h->block_rows ? (size_t)left : h->block_rows;
}

static enum st load_block(struct prepared *p, uint64_t number)
{
    const struct header *h = &p->header;
    size_t rows = rows_of_block(h, number);
    uint64_t offset = sizeof(*h) + number * block_bytes(h, h->block_rows);
    p->loaded = UINT64_MAX;
    enum st st = infile_unchanged(&p->file, p->path);
    if (st == ST_OK) st = infile_read(&p->file, p->path, offset, p->block, block_bytes(h, rows));
    if (st != ST_OK) return st;
    struct block_head head;
    memcpy(&head, p->block, sizeof(head));
    if (head.rows != rows || head.checksum != block_checksum(h, p->block, rows, number))
        return log_fail(ST_DATA, p->path, "checksum mismatch in block %llu (rows %llu to %llu); "
                        "the file is damaged, rebuild it", (unsigned long long)number,
                        (unsigned long long)(number * h->block_rows),
                        (unsigned long long)(number * h->block_rows + rows - 1));
    p->loaded = number;
    return ST_OK;
}

static enum st prepared_read(struct reader *r, struct raw_samples *out, uint32_t want,
                             uint32_t *got)
{
    struct prepared *p = (struct prepared *)r;
    const struct header *h = &p->header;
    const size_t nd = h->dense_features, F = h->n_tables;
    uint32_t done = 0;
    while (done < want && p->row < h->rows) {
        uint64_t number = p->row / h->block_rows;
        size_t from = (size_t)(p->row % h->block_rows), rows = rows_of_block(h, number);
        if (p->loaded != number) {
            enum st st = load_block(p, number);
            if (st != ST_OK) return st;
        }
        size_t n = rows - from < want - done ? rows - from : want - done;
        struct raw_samples in = sections(h, p->block, rows);
        memcpy(out->dense + done * nd, in.dense + from * nd, n * nd * sizeof(float));
        memcpy(out->id + done * F, in.id + from * F, n * F * sizeof(uint32_t));
        memcpy(out->label + done, in.label + from, n);
        done += (uint32_t)n;
        p->row += n;
    }
    *got = done;
    return ST_OK;
}

static enum st prepared_seek(struct reader *r, uint64_t row, uint64_t *held)
{
    struct prepared *p = (struct prepared *)r;
    enum st st = infile_unchanged(&p->file, p->path);
    if (st != ST_OK) return st;
    if (row >= p->header.rows) {
        *held = p->header.rows;
        return ST_END;
    }
    p->row = row;
    return ST_OK;
}

static void prepared_close(struct reader *r)
{
    struct prepared *p = (struct prepared *)r;
    if (p == NULL) return;
    close(p->file.fd);
    mem_free(p->block);
    mem_free(p);
}

/* cfg NULL: any shape will do. */
static enum st open_any(const struct config *cfg, const char *path, struct prepared **out)
{
    static const struct reader_ops ops = {prepared_read, prepared_seek, prepared_close};
    enum st st = ST_NOMEM;
    struct prepared *p = mem_zalloc(1, sizeof(*p));
    if (p == NULL) goto err;
    p->path = path;
    p->loaded = UINT64_MAX;
    TRY(infile_open(path, &p->file), err_prepared);
    struct header *h = &p->header;
    if (p->file.size < sizeof(*h)) {
        st = log_fail(ST_DATA, path, "not a prepared file: %llu bytes",
                      (unsigned long long)p->file.size);
        goto err_file;
    }
    TRY(infile_read(&p->file, path, 0, h, sizeof(*h)), err_file);
    TRY(check_header(h, path, p->file.size), err_file);
    if (cfg != NULL) TRY(check_shape(h, path, cfg), err_file);
    p->base = (struct reader){&ops, h->rows};
    p->block = mem_alloc(block_bytes(h, h->block_rows), 1);
    if (p->block == NULL) goto err_nomem;
    *out = p;
    return ST_OK;

err_nomem:    st = ST_NOMEM;
err_file:     close(p->file.fd);
err_prepared: mem_free(p);
err:          if (st == ST_NOMEM) log_fail(st, path, "out of memory");
              return st;
}

enum st prepared_open(const struct config *cfg, const char *path, struct reader **out)
{
    struct prepared *p;
    enum st st = open_any(cfg, path, &p);
    if (st == ST_OK) *out = &p->base;
    return st;
}

enum st prepared_verify(const char *path, uint64_t *rows)
{
    struct prepared *p;
    enum st st = open_any(NULL, path, &p);
    if (st != ST_OK) return st;
    const struct header *h = &p->header;
    for (uint64_t b = 0; st == ST_OK && b * h->block_rows < h->rows; b++) st = load_block(p, b);
    if (st == ST_OK) *rows = h->rows;
    prepared_close(&p->base);
    return st;
}

/* --- writing ----------------------------------------------------------------------------- */

/* Write the block in `block` [sections of `rows` samples]. */
static enum st write_block(struct outfile *o, const struct header *h, char *block, size_t rows,
                           uint64_t number)
{
    struct block_head head = {block_checksum(h, block, rows, number), (uint32_t)rows, {0}};
    memcpy(block, &head, sizeof(head));
    return outfile_write(o, block, block_bytes(h, rows));
}

/* The last block's sections lie closer together: read `rows` < block_rows samples, move them. */
static void close_ranks(const struct header *h, char *block, size_t rows)
{
    struct raw_samples from = sections(h, block, h->block_rows), to = sections(h, block, rows);
    size_t dense = rows * h->dense_features * sizeof(float);
    size_t id = rows * h->n_tables * sizeof(uint32_t);
    memset((char *)to.dense + dense, 0, dense_bytes(h, rows) - dense);
    memmove(to.id, from.id, id);
    memset((char *)to.id + id, 0, id_bytes(h, rows) - id);
    memmove(to.label, from.label, rows);
    memset(to.label + rows, 0, pad(rows) - rows);
}

static enum st write_blocks(struct reader *in, struct outfile *o, struct header *h, char *block,
                            void (*progress)(void *ctx, uint64_t rows), void *ctx)
{
    for (uint64_t number = 0;; number++) {
        struct raw_samples to = sections(h, block, h->block_rows);
        uint32_t n = 0;
        enum st st = in->ops->read(in, &to, h->block_rows, &n);
        if (st != ST_OK || n == 0) return st;
        if (n < h->block_rows) close_ranks(h, block, n);
        st = write_block(o, h, block, n, number);
        if (st != ST_OK) return st;
        h->rows += n;
        if (progress != NULL) progress(ctx, h->rows);
        if (n < h->block_rows) return ST_OK;
    }
}

enum st prepare_write(const struct config *cfg, const char *out_path,
                      void (*progress)(void *ctx, uint64_t rows), void *ctx, uint64_t *rows)
{
    struct header h = {.version = VERSION, .dense_features = cfg->model.dense_features,
                       .n_tables = cfg->model.n_tables, .block_rows = BLOCK_ROWS};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    memcpy(h.transform, TRANSFORM, sizeof(TRANSFORM));
    const char *in_name = cfg->data.format == DATA_SYNTHETIC ? "synthetic data" : cfg->data.path;
    struct reader *in;
    struct outfile *o;
    uint64_t held = 0;
    enum st st = reader_open(cfg, cfg->data.path, &in);
    if (st != ST_OK) return st;
    st = in->ops->seek(in, 0, &held);
    if (st == ST_END) st = log_fail(ST_DATA, in_name, "0 samples; need >= 1");
    if (st != ST_OK) goto err_reader;
    char *block = mem_zalloc(block_bytes(&h, BLOCK_ROWS), 1);
    if (block == NULL) {
        st = log_fail(ST_NOMEM, out_path, "out of memory");
        goto err_reader;
    }
    TRY(outfile_create(out_path, &o), err_block);
    TRY(outfile_write(o, &h, sizeof(h)), err_outfile); /* its place; rewritten below */
    TRY(write_blocks(in, o, &h, block, progress, ctx), err_outfile);
    h.checksum = header_checksum(&h);
    TRY(outfile_rewrite(o, 0, &h, sizeof(h)), err_outfile);
    st = outfile_commit(o);
    if (st == ST_OK) *rows = h.rows;
    goto err_block;

err_outfile: outfile_abandon(o);
err_block:   mem_free(block);
err_reader:  in->ops->close(in);
             return st;
}
