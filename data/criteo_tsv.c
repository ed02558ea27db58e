/* Criteo's text format, one sample a line: label TAB n integers TAB F hexadecimal ids.
 *
 * zlib reads plain and gzipped files alike into one fixed buffer; lines are found in it with
 * memchr and never copied. Every line is a sample, so that row r is line r + 1. A field is parsed
 * by hand: the locale plays no part, and what does not parse stops the job with FILE:LINE.
 *
 * Lines may be short, since copies lose trailing TABs; so a file made for fewer tables would pass
 * for one that lost them everywhere. A reader therefore begins by looking for a line that is whole.
 *
 * A line that is wrong because somebody is writing to the file is reported as the change it is,
 * not as the damage it looks like. */
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "data/infile.h"
#include "data/reader.h"

enum {
    LINE_MAX_BYTES = 64 << 10,
    BUFFER_BYTES = 4 * LINE_MAX_BYTES,
    ID_DIGITS = 8,
    SHOWN_BYTES = 32,              /* of a bad field, in messages */
    WIDTH_LINES = 1000,            /* one of the first so many has all fields */
    SUM_BYTES = 96,
};

/* A process opens a file more than once, for training and for evaluation; said once is enough. */
static atomic_flag noted_crlf = ATOMIC_FLAG_INIT, noted_bom = ATOMIC_FLAG_INIT;

struct field { const char *p; size_t n; };   /* into the buffer, until the next line is read */

struct line {
    const char *p;
    size_t n;                      /* without the newline and a CR before it */
    bool terminated;
};

struct tsv {
    struct reader base;
    const struct config *cfg;      /* borrowed */
    const char *path;              /* borrowed */
    struct infile file;            /* its descriptor is owned by gz */
    gzFile gz;
    char *buffer;                  /* owns; [BUFFER_BYTES]; unread text is [head, tail)  */
    size_t head, tail;
    uint64_t text_end;             /* bytes of text read so far: the offset of tail      */
    bool at_end;                   /* no more text behind tail                           */
    uint64_t row;                  /* the next sample                                    */
    struct { uint64_t row, offset; } mark; /* where the last seek ended                  */
    struct field *field;           /* owns; [1 + dense_features + n_tables]              */
    unsigned widest;               /* most fields of a line so far                       */
};

static unsigned n_fields(const struct tsv *t)
{
    return 1 + t->cfg->model.dense_features + t->cfg->model.n_tables;
}

/* What the number of fields is the sum of, for messages. */
static const char *sum_text(const struct tsv *t, char out[SUM_BYTES])
{
    snprintf(out, SUM_BYTES, " (label + %u of model.dense_features + %u of model.tables)",
             t->cfg->model.dense_features, t->cfg->model.n_tables);
    return out;
}

/* ST_DATA for the line at t->row, unless the file has changed: then that is what is said. */
__attribute__((format(printf, 2, 3)))
static enum st bad_line(const struct tsv *t, const char *fmt, ...)
{
    enum st st = infile_unchanged(&t->file, t->path);
    if (st != ST_OK) return st;
    char where[512], what[256];
    snprintf(where, sizeof(where), "%s:%llu", t->path, (unsigned long long)t->row + 1);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    return log_fail(ST_DATA, where, "%s", what);
}

/* The start of a field, fit to be printed. */
static const char *show(struct field f, char out[SHOWN_BYTES + 4])
{
    size_t n = f.n < SHOWN_BYTES ? f.n : SHOWN_BYTES;
    for (size_t i = 0; i < n; i++) out[i] = f.p[i] >= ' ' && f.p[i] <= '~' ? f.p[i] : '?';
    memcpy(out + n, f.n > n ? "..." : "", f.n > n ? 4 : 1);
    return out;
}

/* --- text in ----------------------------------------------------------------------------- */

static enum st text_failed(struct tsv *t, int got)
{
    int code;
    const char *why = gzerror(t->gz, &code);
    unsigned long long after = t->text_end + (uint64_t)(got > 0 ? got : 0);
    if (code == Z_ERRNO) return log_fail(ST_IO, t->path, "cannot read: %s", strerror(errno));
    if (code == Z_MEM_ERROR) return log_fail(ST_NOMEM, t->path, "out of memory");
    enum st st = infile_unchanged(&t->file, t->path);
    if (st != ST_OK) return st;
    if (code == Z_BUF_ERROR)
        return log_fail(ST_DATA, t->path, "gzip ends early after %llu bytes of text; the file is "
                        "not whole, fetch it again", after);
    return log_fail(ST_DATA, t->path, "gzip is damaged after %llu bytes of text: %s", after, why);
}

/* Move the unread text to the front and read more behind it. */
static enum st refill(struct tsv *t)
{
    memmove(t->buffer, t->buffer + t->head, t->tail - t->head);
    t->tail -= t->head;
    t->head = 0;
    unsigned room = (unsigned)(BUFFER_BYTES - t->tail);
    int got = gzread(t->gz, t->buffer + t->tail, room);
    if (got < 0) return text_failed(t, got);
    if ((unsigned)got < room) { /* the end, or what looks like it in a torn gzip file */
        int code;
        gzerror(t->gz, &code);
        if (code != Z_OK) return text_failed(t, got);
        t->at_end = true;
    }
    t->tail += (size_t)got;
    t->text_end += (uint64_t)got;
    return ST_OK;
}

/* The next line; ST_END, unlogged, when there is none. */
static enum st next_line(struct tsv *t, struct line *out)
{
    size_t scanned = t->head;
    for (;;) {
        const char *end = memchr(t->buffer + scanned, '\n', t->tail - scanned);
        size_t n = end != NULL ? (size_t)(end - t->buffer) - t->head : t->tail - t->head;
        if (n > LINE_MAX_BYTES) return bad_line(t, "line longer than 64 KiB");
        if (end == NULL && !t->at_end) {
            scanned = n;           /* refill moves the line to the front */
            enum st st = refill(t);
            if (st != ST_OK) return st;
            continue;
        }
        if (end == NULL && n == 0) return ST_END;
        *out = (struct line){t->buffer + t->head, n, end != NULL};
        t->head += n + (end != NULL);
        if (n > 0 && out->p[n - 1] == '\r') out->n--;
        return ST_OK;
    }
}

/* --- a line's fields --------------------------------------------------------------------- */

/* Split at TABs into t->field; counts on past its end without storing. */
static unsigned split(struct tsv *t, const struct line *line)
{
    unsigned n = 0, room = n_fields(t);
    const char *p = line->p, *end = line->p + line->n;
    for (;;) {
        const char *tab = memchr(p, '\t', (size_t)(end - p));
        const char *stop = tab != NULL ? tab : end;
        if (n < room) t->field[n] = (struct field){p, (size_t)(stop - p)};
        n++;
        if (tab == NULL) return n;
        p = tab + 1;
    }
}

static bool parse_label(struct field f, uint8_t *out)
{
    if (f.n != 1 || (f.p[0] != '0' && f.p[0] != '1')) return false;
    *out = (uint8_t)(f.p[0] - '0');
    return true;
}

/* [-]digits within int64; empty is 0. */
static bool parse_integer(struct field f, int64_t *out)
{
    int64_t v = 0;
    size_t i = f.n > 0 && f.p[0] == '-';
    if (i == f.n && i > 0) return false;
    bool negative = i > 0;
    for (; i < f.n; i++) {
        unsigned digit = (unsigned char)f.p[i] - '0';
        if (digit > 9) return false;
        int64_t step = negative ? -(int64_t)digit : (int64_t)digit;
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, step, &v)) return false;
    }
    *out = v;
    return true;
}

/* Up to eight hexadecimal digits; empty is 0. */
static bool parse_hex(struct field f, uint32_t *out)
{
    uint32_t v = 0;
    if (f.n > ID_DIGITS) return false;
    for (size_t i = 0; i < f.n; i++) {
        unsigned c = (unsigned char)f.p[i];
        unsigned decimal = c - '0', letter = (c | 32) - 'a'; /* wrap to large when below */
        if (decimal > 9 && letter > 5) return false;
        v = v << 4 | (decimal <= 9 ? decimal : letter + 10);
    }
    *out = v;
    return true;
}

/* A last line without a newline may have been cut anywhere. It is whole when all fields are there
 * and its last id has as many digits as the others (files pad ids to eight). */
static bool last_line_is_whole(const struct tsv *t, unsigned n)
{
    if (n < n_fields(t)) return false;
    size_t widest = 0;
    for (unsigned i = 1 + t->cfg->model.dense_features; i < n; i++)
        if (t->field[i].n > widest) widest = t->field[i].n;
    return t->field[n - 1].n == widest;
}

/* Kaggle's test.txt has no label: its fields stand one place too far left. I1 may pass for a
 * label, but the last integer's place then holds an id, and those are padded to eight digits. */
static bool looks_unlabelled(const struct tsv *t, unsigned n)
{
    const unsigned nd = t->cfg->model.dense_features;
    uint8_t label;
    if (n >= n_fields(t) || n <= nd) return false;
    return t->field[nd].n == ID_DIGITS ||
           (n == n_fields(t) - 1 && !parse_label(t->field[0], &label));
}

/* Split, check the number of fields, pad what a copy has stripped. */
static enum st take_fields(struct tsv *t, const struct line *line)
{
    char sum[SUM_BYTES];
    const char *nul = memchr(line->p, '\0', line->n);
    if (nul != NULL) return bad_line(t, "NUL byte at column %zu", (size_t)(nul - line->p) + 1);
    unsigned n = split(t, line), want = n_fields(t);
    if (n == 1 && (line->terminated || t->row == 0))
        return bad_line(t, "1 field; separator must be TAB");
    if (!line->terminated && n <= want && !last_line_is_whole(t, n))
        return bad_line(t, "last line incomplete (file truncated?); end it with a newline if it "
                           "is whole");
    if (looks_unlabelled(t, n))
        return bad_line(t, "%u fields, expected %u (label missing? this looks like a test file)",
                        n, want);
    if (n < 1 + t->cfg->model.dense_features || n > want)
        return bad_line(t, "%u fields, expected %u%s", n, want, sum_text(t, sum));
    if (n > t->widest) t->widest = n;
    for (; n < want; n++) t->field[n] = (struct field){line->p, 0};
    return ST_OK;
}

static enum st parse_line(struct tsv *t, const struct line *line, float *dense, uint8_t *label,
                          uint32_t *id)
{
    char text[SHOWN_BYTES + 4];
    enum st st = take_fields(t, line);
    if (st != ST_OK) return st;
    const struct field *f = t->field;
    if (!parse_label(f[0], label)) return bad_line(t, "label '%s' not 0/1", show(f[0], text));
    f++;
    for (unsigned i = 0; i < t->cfg->model.dense_features; i++, f++) {
        int64_t v;
        if (!parse_integer(*f, &v))
            return bad_line(t, "dense I%u '%s' out of range or not an integer; want 64 bits or an "
                               "empty field", i + 1, show(*f, text));
        dense[i] = dense_transform(v);
    }
    for (unsigned i = 0; i < t->cfg->model.n_tables; i++, f++)
        if (!parse_hex(*f, &id[i]))
            return bad_line(t, "C%u '%s' is not hex; want up to 8 digits or an empty field", i + 1,
                            show(*f, text));
    return ST_OK;
}

static void note_crlf(const struct tsv *t, const struct line *line)
{
    if (!line->terminated || line->p[line->n] != '\r') return;
    if (atomic_flag_test_and_set_explicit(&noted_crlf, memory_order_relaxed)) return;
    log_note(t->path, "lines end in CR LF; accepted");
}

/* --- the reader -------------------------------------------------------------------------- */

static enum st tsv_read(struct reader *r, struct raw_samples *out, uint32_t want, uint32_t *got)
{
    struct tsv *t = (struct tsv *)r;
    const unsigned nd = t->cfg->model.dense_features, F = t->cfg->model.n_tables;
    uint32_t n = 0;
    for (; n < want; n++, t->row++) {
        struct line line;
        enum st st = next_line(t, &line);
        if (st == ST_END) {
            st = infile_unchanged(&t->file, t->path);
            if (st != ST_OK) return st;
            t->base.rows = t->row;
            break;
        }
        if (st != ST_OK) return st;
        note_crlf(t, &line);
        st = parse_line(t, &line, out->dense + (size_t)n * nd, out->label + n,
                        out->id + (size_t)n * F);
        if (st != ST_OK) return st;
    }
    *got = n;
    return ST_OK;
}

static enum st skip_bom(struct tsv *t)
{
    enum st st = refill(t);
    if (st != ST_OK) return st;
    if (t->tail < 3 || memcmp(t->buffer, "\xEF\xBB\xBF", 3) != 0) return ST_OK;
    t->head = 3;
    t->mark.offset = 3;
    if (!atomic_flag_test_and_set_explicit(&noted_bom, memory_order_relaxed))
        log_note(t->path, "starts with a UTF-8 byte order mark; accepted");
    return ST_OK;
}

/* Go to the mark; the buffer is read anew, so that what has changed on disk is not hidden. */
static enum st go_to_mark(struct tsv *t)
{
    if (gzseek(t->gz, (z_off_t)t->mark.offset, SEEK_SET) < 0) return text_failed(t, 0);
    t->head = t->tail = 0;
    t->text_end = t->mark.offset;
    t->at_end = false;
    t->row = t->mark.row;
    return ST_OK;
}

/* Look for a line with all fields; most often the first is one. Begins and ends at the first. */
static enum st check_width(struct tsv *t)
{
    char sum[SUM_BYTES];
    enum st st = ST_OK;
    while (st == ST_OK && t->widest < n_fields(t) && t->row < WIDTH_LINES) {
        struct line line;
        st = next_line(t, &line);
        if (st == ST_OK) st = take_fields(t, &line);
        if (st == ST_OK) t->row++;
    }
    if (st != ST_OK && st != ST_END) return st;
    if (t->row > 0 && t->widest < n_fields(t))
        return log_fail(ST_DATA, t->path, "no line has %u fields%s; the longest of the first %u "
                        "has %u", n_fields(t), sum_text(t, sum), (unsigned)t->row, t->widest);
    return go_to_mark(t);
}

/* At the start of the text. */
static enum st check_head(struct tsv *t)
{
    enum st st = skip_bom(t);
    if (st != ST_OK || t->widest > 0) return st; /* a later pass */
    if (t->tail >= 8 && memcmp(t->buffer, "CHANTERP", 8) == 0)
        return log_fail(ST_DATA, t->path, "is a prepared file; set data.format=prepared");
    return check_width(t);
}

static enum st tsv_seek(struct reader *r, uint64_t row, uint64_t *held)
{
    struct tsv *t = (struct tsv *)r;
    enum st st = infile_unchanged(&t->file, t->path);
    if (st != ST_OK) return st;
    if (row < t->mark.row) t->mark.row = t->mark.offset = 0; /* a BOM is then met again */
    st = go_to_mark(t);
    if (st == ST_OK && t->mark.offset == 0) st = check_head(t);
    while (st == ST_OK && t->row < row) {
        struct line line;
        st = next_line(t, &line);
        if (st == ST_OK) t->row++;
    }
    if (st == ST_OK && t->head == t->tail && !t->at_end) st = refill(t);
    if (st == ST_OK && t->head == t->tail) st = ST_END;
    if (st == ST_END) *held = t->base.rows = t->row;
    if (st != ST_OK) return st;
    t->mark.row = row;
    t->mark.offset = t->text_end - (t->tail - t->head);
    return ST_OK;
}

static void tsv_close(struct reader *r)
{
    struct tsv *t = (struct tsv *)r;
    if (t == NULL) return;
    gzclose_r(t->gz); /* a torn gzip file was reported by the read that met it */
    mem_free(t->field);
    mem_free(t->buffer);
    mem_free(t);
}

enum st criteo_tsv_open(const struct config *cfg, const char *path, struct reader **out)
{
    static const struct reader_ops ops = {tsv_read, tsv_seek, tsv_close};
    enum st st = ST_NOMEM;
    struct tsv *t = mem_zalloc(1, sizeof(*t));
    if (t == NULL) goto err;
    t->base = (struct reader){&ops, READER_ROWS_UNKNOWN};
    t->cfg = cfg;
    t->path = path;
    t->buffer = mem_alloc(BUFFER_BYTES, 1);
    t->field = mem_alloc(n_fields(t), sizeof(*t->field));
    if (t->buffer == NULL || t->field == NULL) goto err_tsv;
    TRY(infile_open(path, &t->file), err_tsv);
    t->gz = gzdopen(t->file.fd, "rb");
    if (t->gz == NULL) goto err_file;
    gzbuffer(t->gz, BUFFER_BYTES);
    *out = &t->base;
    return ST_OK;

err_file: close(t->file.fd);
          st = ST_NOMEM;
err_tsv:  mem_free(t->field);
          mem_free(t->buffer);
          mem_free(t);
err:      if (st == ST_NOMEM) log_fail(st, path, "out of memory");
          return st;
}
