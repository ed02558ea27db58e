/* The law behind the synthetic ids.
 *
 * A column draws a rank, by inverse CDF from one uniform number: rank 0 with the probability that
 * was measured for the top id, else floor(x) with x on [1, last) of density ~ (x + q)^-s. With no
 * last rank and s = 1/d this is the law of a Pitman-Yor process of discount d, whose distinct ids
 * grow like rows^d, but it needs no memory of what was drawn before: sample i is a function of
 * (seed, i). s and q were solved from two counts of the real file each: distinct ids in the first
 * 10,000 rows and in all 45.8 M rows (small columns: their number of ids and the second share).
 * Ranks behind 2^31 are as good as new: they are drawn evenly from the 2^30 behind it.
 *
 * Column 12 and 21 are functions of column 3, and 16 of 12 (counted from 1): most ranks are taken
 * over, a share of the unpopular ones is merged into another rank, which the law itself picks.
 *
 * A rank becomes a row by rank mod N, then a permutation of the N rows, so that popular ids do not
 * lie side by side. Row 0 is the empty field in columns that have any; then N is one less. */
#include "data/synthetic_law.h"

#include <math.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"

enum { PROFILES = 26, DENSE_PROFILES = 13, MERGE_FROM = 1000 };

enum group { NEVER, BIG_SIX, GROUP_19, GROUP_22, GROUP_6 }; /* columns that go missing together */

static const struct profile {
    double top;                   /* share of the top id among non-empty fields          */
    double s, q;                  /* shape of the other ranks                            */
    uint32_t ranks;               /* ids there are; 0: no end                            */
    enum group group;
    uint32_t from;                /* column this one is a function of, from 1; 0: none   */
    double merged;                /* share of the unpopular ranks that lose their own id */
} PROFILE[PROFILES] = {
    {0.5000, 1.826, 0.00, 1460, NEVER, 0, 0},     {0.1230, 2.031, 10.81, 583, NEVER, 0, 0},
    {0.0488, 1.120, 4.52, 0, BIG_SIX, 0, 0},      {0.0757, 1.340, 65.05, 0, BIG_SIX, 0, 0},
    {0.6660, 2.327, 0.00, 305, NEVER, 0, 0},      {0.5294, 7.739, 0.76, 23, GROUP_6, 0, 0},
    {0.0110, 1.263, 51.51, 12517, NEVER, 0, 0},   {0.5890, 2.080, 0.00, 633, NEVER, 0, 0},
    {0.8870, 0.000, 0.00, 3, NEVER, 0, 0},        {0.2760, 2.750, 1382.27, 0, NEVER, 0, 0},
    {0.0200, 1.408, 37.69, 5683, NEVER, 0, 0},    {0.0488, 1.145, 8.58, 0, BIG_SIX, 3, 0.08},
    {0.0220, 1.397, 32.25, 3194, NEVER, 0, 0},    {0.3630, 7.812, 10.81, 27, NEVER, 0, 0},
    {0.0190, 1.601, 51.51, 14992, NEVER, 0, 0},   {0.0488, 1.195, 15.49, 0, BIG_SIX, 12, 0.20},
    {0.4300, 8.000, 5.00, 10, NEVER, 0, 0},       {0.0510, 1.697, 20.19, 5652, NEVER, 0, 0},
    {0.6018, 1.145, 0.00, 2172, GROUP_19, 0, 0},  {0.3618, 8.000, 1000.0, 3, GROUP_19, 0, 0},
    {0.0488, 1.165, 11.12, 0, BIG_SIX, 3, 0.16},  {0.5275, 7.590, 1.42, 17, GROUP_22, 0, 0},
    {0.4510, 7.801, 3.63, 15, NEVER, 0, 0},       {0.0778, 1.800, 168.27, 0, BIG_SIX, 0, 0},
    {0.3291, 6.051, 12.64, 104, GROUP_19, 0, 0},  {0.0818, 2.050, 350.95, 0, GROUP_19, 0, 0},
};

/* How groups 19 {19, 20, 25, 26}, 22 and 6 go missing together; shares of rows that add up to 1.
 * The big six are missing on their own, in 3.6 % of rows. */
static const struct { double share; bool g19, g22, g6; } PATTERN[] = {
    {0.353, false, true, false}, {0.332, true, true, false}, {0.104, false, true, true},
    {0.093, false, false, false}, {0.089, true, false, false}, {0.029, true, true, true},
};
enum { PATTERNS = sizeof(PATTERN) / sizeof(PATTERN[0]) };
static const double BIG_SIX_MISSING = 0.036;

/* floor((median + shift) * exp(width * normal) - shift + 1/2), kept within [low, high]. */
static const struct dense_profile {
    double median, shift, width, low, high;
    double missing;
    uint32_t group;               /* same group, same draw: features go missing together */
} DENSE[DENSE_PROFILES] = {
    {1, 1, 1.11, 0, 214, 0.448, 0},    {3, 3, 2.01, -2, 18522, 0.0, 1},
    {7, 1, 2.15, 0, 65535, 0.204, 2},  {4, 1, 0.96, 0, 280, 0.198, 3},
    {2469, 1, 1.54, 0, 1618112, 0.049, 4}, {40, 1, 1.36, 0, 12167, 0.251, 5},
    {3, 1, 1.43, 0, 1658, 0.049, 4},   {7, 1, 1.06, 0, 682, 0.001, 6},
    {41, 1, 1.23, 0, 7335, 0.049, 4},  {0, 1, 0.46, 0, 6, 0.448, 0},
    {1, 1, 0.88, 0, 79, 0.049, 4},     {0, 1, 1.09, 0, 98, 0.773, 7},
    {5, 1, 1.16, 0, 770, 0.198, 3},
};
enum { DENSE_GROUPS = 8 };

struct column {
    const struct profile *profile;
    double start, span, power;    /* x = (start - u * span)^power - q                    */
    uint64_t rows, step, shift;   /* row = first + (rank % rows * step + shift) % rows   */
    uint32_t first;               /* 1 where row 0 stands for empty                      */
};

struct law {
    uint64_t seed;
    uint32_t n_dense, n_tables;
    struct column *column;        /* owns; [n_tables] */
};

static double unit(uint32_t low, uint32_t high) /* [0, 1) on a grid of 2^-53 */
{
    return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void column_init(struct column *c, uint64_t seed, uint32_t t, uint64_t table_rows)
{
    const struct profile *p = &PROFILE[t % PROFILES];
    c->profile = p;
    c->start = pow(1.0 + p->q, 1.0 - p->s);
    double last = p->ranks == 0 ? 0.0 : pow((double)p->ranks + p->q, 1.0 - p->s);
    c->span = c->start - last;
    c->power = 1.0 / (1.0 - p->s);
    if (table_rows > UINT32_MAX) table_rows = UINT32_MAX; /* ids are u32 */
    c->first = p->group != NEVER && table_rows > 1;
    c->rows = table_rows - c->first;
    uint32_t w[4];
    rng_words(seed, RNG_SYNTHETIC + LAW_IDS, UINT64_MAX, t, w);
    c->shift = w[0] % c->rows;
    c->step = (uint64_t)((double)c->rows * 0.6180339887) | 1; /* golden: neighbours far apart */
    while (gcd(c->step, c->rows) != 1) c->step += 2;
}

enum st law_open(const struct config *cfg, struct law **out)
{
    struct law *l = mem_zalloc(1, sizeof(*l));
    if (l == NULL) goto err;
    l->seed = cfg->data.seed;
    l->n_dense = cfg->model.dense_features;
    l->n_tables = cfg->model.n_tables;
    l->column = mem_alloc(l->n_tables, sizeof(*l->column));
    if (l->column == NULL) goto err_law;
    for (uint32_t t = 0; t < l->n_tables; t++)
        column_init(&l->column[t], l->seed, t, cfg->model.tables[t]);
    *out = l;
    return ST_OK;

err_law: mem_free(l);
err:     return log_fail(ST_NOMEM, "synthetic data", "out of memory");
}

void law_close(struct law *l)
{
    if (l == NULL) return;
    mem_free(l->column);
    mem_free(l);
}

/* A rank from two words of uniform bits and one more for ranks out of reach. */
static uint32_t rank_of(const struct column *c, const uint32_t w[4])
{
    const struct profile *p = c->profile;
    double u = unit(w[0], w[1]);
    if (u < p->top) return 0;
    u = (u - p->top) / (1.0 - p->top);
    double x = pow(c->start - u * c->span, c->power) - p->q;
    if (!(x < 0x1p31)) return (uint32_t)1 << 31 | w[2] >> 2;
    uint32_t rank = x < 1.0 ? 1 : (uint32_t)x;
    return p->ranks != 0 && rank >= p->ranks ? p->ranks - 1 : rank;
}

static uint32_t derived_rank(const struct law *l, uint32_t t, uint32_t source_rank)
{
    const struct column *c = &l->column[t];
    if (source_rank < MERGE_FROM) return source_rank;
    uint32_t w[4], lot[4];
    rng_words(l->seed, RNG_SYNTHETIC + LAW_MERGE, source_rank, t * 2, lot);
    if ((double)lot[0] * 0x1p-32 >= c->profile->merged) return source_rank;
    rng_words(l->seed, RNG_SYNTHETIC + LAW_MERGE, source_rank, t * 2 + 1, w);
    return rank_of(c, w);
}

/* `rank` < c->rows; `empty` counts only where a row stands for it. */
static void put_id(const struct column *c, uint32_t rank, bool empty, uint32_t *id, uint32_t *out)
{
    empty = empty && c->first == 1;
    *out = empty ? LAW_NO_RANK : rank;
    *id = empty ? 0 : (uint32_t)(c->first + (rank * c->step + c->shift) % c->rows);
}

/* Which groups are empty in this sample, as a bit each, for one set of 26 columns. */
static unsigned empty_groups(const struct law *l, uint64_t index, uint32_t set)
{
    uint32_t w[4];
    rng_words(l->seed, RNG_SYNTHETIC + LAW_MISSING, index, set, w);
    double u = (double)w[0] * 0x1p-32;
    unsigned i = 0;
    while (i + 1 < PATTERNS && u >= PATTERN[i].share) u -= PATTERN[i++].share;
    bool six = (double)w[1] * 0x1p-32 < BIG_SIX_MISSING;
    return (unsigned)PATTERN[i].g19 << GROUP_19 | (unsigned)PATTERN[i].g22 << GROUP_22 |
           (unsigned)PATTERN[i].g6 << GROUP_6 | (unsigned)six << BIG_SIX;
}

static void draw_ids(const struct law *l, uint64_t index, uint32_t *id, uint32_t *rank)
{
    uint32_t drawn[PROFILES] = {0}; /* ranks of this sample, empty or not, for derived columns */
    unsigned empty = 0;
    for (uint32_t t = 0; t < l->n_tables; t++) {
        const struct column *c = &l->column[t];
        uint32_t k = t % PROFILES, w[4];
        if (k == 0) empty = empty_groups(l, index, t / PROFILES);
        if (c->profile->from != 0) {
            drawn[k] = derived_rank(l, t, drawn[c->profile->from - 1]);
        } else {
            rng_words(l->seed, RNG_SYNTHETIC + LAW_IDS, index, t, w);
            drawn[k] = rank_of(c, w);
        }
        drawn[k] = (uint32_t)(drawn[k] % c->rows); /* now as fine as the id, for derived ones */
        put_id(c, drawn[k], empty >> c->profile->group & 1, &id[t], &rank[t]);
    }
}

static int64_t dense_value(const struct dense_profile *p, double normal)
{
    double x = floor((p->median + p->shift) * exp(p->width * normal) - p->shift + 0.5);
    return (int64_t)fmin(fmax(x, p->low), p->high);
}

static void draw_dense(const struct law *l, uint64_t index, int64_t *dense)
{
    uint32_t lot[DENSE_GROUPS];
    float normal[DENSE_PROFILES + 1];
    for (uint32_t i = 0; i < l->n_dense; i++) {
        uint32_t k = i % DENSE_PROFILES, set = i / DENSE_PROFILES;
        if (k == 0) {
            rng_words(l->seed, RNG_SYNTHETIC + LAW_DENSE_MISSING, index, 2 * set, lot);
            rng_words(l->seed, RNG_SYNTHETIC + LAW_DENSE_MISSING, index, 2 * set + 1, lot + 4);
            rng_normal(l->seed ^ set, RNG_SYNTHETIC + LAW_DENSE, index * (DENSE_PROFILES + 1), 1.0f,
                       normal, DENSE_PROFILES);
        }
        const struct dense_profile *p = &DENSE[k];
        bool none = (double)lot[p->group] * 0x1p-32 < p->missing;
        dense[i] = none ? LAW_EMPTY : dense_value(p, (double)normal[k]);
    }
}

void law_draw(const struct law *l, uint64_t index, int64_t *dense, uint32_t *id, uint32_t *rank)
{
    draw_dense(l, index, dense);
    draw_ids(l, index, id, rank);
}

bool law_is_empty(const struct law *l, uint32_t t, uint32_t id)
{
    return id == 0 && l->column[t].first == 1;
}

double law_dense_width(uint32_t i)
{
    return DENSE[i % DENSE_PROFILES].width;
}
