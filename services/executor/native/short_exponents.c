/* See short_exponents.h. */
#include "short_exponents.h"

#include "gemm.h"

enum {
    LINE_COLUMNS = 4,
    PAIR_WEIGHTS = 2 * PANEL,
    LINE_WEIGHTS = 2 * PAIR_WEIGHTS,
    SHORT_LINE = LINE_WEIGHTS + LINE_WEIGHTS / 2, /* bytes of a line */
    SHORT_SPAN = 2048,                            /* columns that are kept for other tiles, in the second cache */
    COLUMNS_OF_PATCH = 16,                        /* for each so many there is room for one */
    SIGN = 0x80, FRACTION = 0x7f,                 /* of a weight's byte */
    EXPONENT = 0x7f80,                            /* of its bf16 */
    MOST_COLUMNS = 1 << 19,                       /* a patch has 24 bits for its weight */
#if defined(__AMX_BF16__)
    ROWS_AS_UNPACKED = 0, /* rows that multiply what was just unpacked */
#else
    ROWS_AS_UNPACKED = VECTORS >= 32 ? 8 : 2,
#endif
};

typedef struct {
    uint8_t exponents[16];
    uint32_t patches; /* how many there are */
    uint8_t unused[44];
} short_head;

/* Upper and lower byte of each exponent in its place in bf16. */
typedef struct {
    bytes upper, lower;
} exponent_table;

/* A panel while it is read from its first line on. */
typedef struct {
    const uint8_t *lines;
    const uint32_t *patch, *last; /* the next one, and where they end */
    exponent_table table;
    rz_ahead ahead; /* of the panel that comes; a line is two pairs */
} short_panel;

RZ_INLINE size_t patches_room(long columns)
{
    return (size_t)(columns / COLUMNS_OF_PATCH) * sizeof(uint32_t) / 64 * 64 + 64;
}

size_t rz_short_exponents_panel_bytes(long columns)
{
    if (columns <= 0 || columns % LINE_COLUMNS || columns >= MOST_COLUMNS)
        return 0;
    return sizeof(short_head) + patches_room(columns) + (size_t)(columns / LINE_COLUMNS) * SHORT_LINE;
}

/* --- packing --- */

/* The most frequent exponents of `count` weights, a multiple of four. */
static void choose_exponents(const bf16 *weights, long count, uint8_t *exponents)
{
    uint32_t seen[4][256] = { 0 }; /* neighbours are counted apart: often they are the same */
    for (long i = 0; i < count; i += 4)
        for (int j = 0; j < 4; j++)
            seen[j][weights[i + j] >> 7 & 0xff]++;
    for (int i = 0; i < 256; i++)
        seen[0][i] += seen[1][i] + seen[2][i] + seen[3][i];
    for (int chosen = 0; chosen < 16; chosen++) {
        int best = 0;
        for (int i = 1; i < 256; i++)
            best = seen[0][i] > seen[0][best] ? i : best;
        exponents[chosen] = (uint8_t)best;
        seen[0][best] = 0;
    }
}

enum { NO_CODE = 16 };

/* A byte of each of 64 weights, in the order of a line. */
static void put_in_line(uint8_t *to, const uint8_t *from)
{
    for (int h = 0; h < 2; h++)
        for (int q = 0; q < 4; q++)
            memcpy(to + 16 * q + 8 * h, from + 32 * h + 8 * q, 8);
}

/* The line of `weights`, with code 0 for exponents that have none in `codes` [256]. Whether there are such. */
static int pack_line(uint8_t *to, const bf16 *weights, const uint8_t *codes)
{
    uint8_t rest[LINE_WEIGHTS], own[LINE_WEIGHTS], laid[LINE_WEIGHTS], all = 0;
    for (int i = 0; i < LINE_WEIGHTS; i++)
        rest[i] = (uint8_t)((weights[i] >> 8 & SIGN) | (weights[i] & FRACTION));
    for (int i = 0; i < LINE_WEIGHTS; i++)
        own[i] = codes[weights[i] >> 7 & 0xff];
    for (int i = 0; i < LINE_WEIGHTS; i++)
        all |= own[i];
    for (int pair = 0; pair < LINE_WEIGHTS; pair += PAIR_WEIGHTS) {
        put_in_line(to + pair, rest + pair);
        put_in_line(laid + pair, own + pair);
    }
    for (int i = 0; i < PAIR_WEIGHTS; i++)
        to[LINE_WEIGHTS + i] = (uint8_t)((laid[i] & (NO_CODE - 1)) | laid[PAIR_WEIGHTS + i] << 4);
    return all & NO_CODE;
}

static int pack_panel(uint8_t *to, const bf16 *weights, long columns)
{
    const uint32_t room = (uint32_t)(patches_room(columns) / sizeof(uint32_t));
    short_head head = { .patches = 0 };
    uint8_t codes[256];
    uint32_t *patches = (uint32_t *)(to + sizeof head);
    choose_exponents(weights, columns * PANEL, head.exponents);
    memset(codes, NO_CODE, sizeof codes);
    for (int i = 15; i >= 0; i--)
        codes[head.exponents[i]] = (uint8_t)i;
    memset(patches, 0, patches_room(columns));
    uint8_t *line = to + sizeof head + patches_room(columns);
    for (uint32_t first = 0; first < columns * PANEL; first += LINE_WEIGHTS, line += SHORT_LINE) {
        if (!pack_line(line, weights + first, codes))
            continue;
        for (uint32_t i = first; i < first + LINE_WEIGHTS; i++) {
            const uint32_t exponent = weights[i] >> 7 & 0xff;
            if (codes[exponent] != NO_CODE)
                continue;
            if (head.patches == room)
                return 0;
            patches[head.patches++] = i << 8 | exponent;
        }
    }
    memcpy(to, &head, sizeof head);
    return 1;
}

int rz_short_exponents_pack(uint8_t *to, const bf16 *packed, long columns, long first, long end)
{
    const size_t bytes = rz_short_exponents_panel_bytes(columns);
    for (long panel = first; panel < end; panel++)
        if (!pack_panel(to + (size_t)panel * bytes, packed + panel * columns * PANEL, columns))
            return 0;
    return 1;
}

/* --- unpacking --- */

RZ_INLINE exponent_table exponent_table_of(const uint8_t *exponents)
{
    uint8_t upper[16], lower[16];
    for (int i = 0; i < 16; i++) {
        upper[i] = exponents[i] >> 1;
        lower[i] = (uint8_t)(exponents[i] << 7);
    }
    return (exponent_table){ bytes_repeat16(upper), bytes_repeat16(lower) };
}

RZ_INLINE short_panel short_panel_of(const uint8_t *panel, long columns)
{
    const short_head *head = (const short_head *)panel;
    const uint32_t *patches = (const uint32_t *)(panel + sizeof *head);
    return (short_panel){ panel + sizeof *head + patches_room(columns), patches, patches + head->patches,
                          exponent_table_of(head->exponents), { (const char *)panel, 0 } };
}

/* As much as a line has, at most, for the second cache: a panel and what comes would fill the first. */
RZ_INLINE void ask_for_line(rz_ahead *ahead)
{
#pragma GCC unroll 3
    for (int byte = 0; byte < SHORT_LINE; byte += 64)
        __builtin_prefetch(ahead->next + byte, 0, 2);
    ahead->next += 2 * ahead->step;
}

RZ_INLINE void unpack_short_line(const exponent_table *table, const uint8_t *line, bytes *four)
{
    const bytes codes = bytes_load(line + LINE_WEIGHTS);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; pair++) {
        const bytes rest = bytes_load(line + pair * PAIR_WEIGHTS);
        const bytes code = bytes_and(pair ? bytes_right(codes, 4) : codes, bytes_set1(15));
        const bytes lower = bytes_and_or(rest, bytes_set1(FRACTION), bytes_look_up(table->lower, code));
        const bytes upper = bytes_and_or(rest, bytes_set1(SIGN), bytes_look_up(table->upper, code));
        four[2 * pair] = bytes_zip_low(lower, upper);
        four[2 * pair + 1] = bytes_zip_high(lower, upper);
    }
}

RZ_INLINE void store_line(bf16 *to, const bytes *four)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        bytes_store(to + i * PANEL, four[i]);
}

/* The line of the next patch, or `end`. */
RZ_INLINE long next_patched(const short_panel *at, long end)
{
    const long line = at->patch < at->last ? (long)(*at->patch >> 8) / LINE_WEIGHTS : end;
    return line < end ? line : end;
}

/* `line`, unpacked, whose patches are the next ones. */
static void patch_line(short_panel *at, long line, bf16 *weights)
{
    for (; next_patched(at, line + 1) == line; at->patch++) {
        bf16 *weight = weights + (*at->patch >> 8) % LINE_WEIGHTS;
        *weight = (bf16)((*weight & ~EXPONENT) | (*at->patch & 0xff) << 7);
    }
}

static void unpack_short_lines(short_panel *at, long first, long end, bf16 *to)
{
    const exponent_table table = at->table;
    for (long line = first; line < end; line++, to += LINE_WEIGHTS) {
        const uint8_t *from = at->lines + line * SHORT_LINE;
        bytes four[4];
        ask_for_line(&at->ahead);
        unpack_short_line(&table, from, four);
        store_line(to, four);
        if (next_patched(at, end) == line)
            patch_line(at, line, to);
    }
}

void rz_short_exponents_span(const uint8_t *panel, long columns, long first, long end, bf16 *to)
{
    short_panel at = short_panel_of(panel, columns);
    while (next_patched(&at, first / LINE_COLUMNS) < first / LINE_COLUMNS)
        at.patch++;
    unpack_short_lines(&at, first / LINE_COLUMNS, end / LINE_COLUMNS, to);
}

/* --- products --- */

#if !defined(__AMX_BF16__)
/* c[rows][PANEL] of `lines` lines without patches, summed as by rz_tile; what is unpacked goes to `kept`, unless NULL. */
RZ_INLINE void multiply_lines(const int rows, short_panel *at, const uint8_t *line, long lines, const operand *x,
                              long ldx, float *c, int add, bf16 *kept)
{
    const exponent_table table = at->table;
    rz_ahead ahead = at->ahead;
    wide sums[ROWS_AS_UNPACKED][PANEL / WIDTH];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            sums[row][v] = add ? wide_load(c + row * PANEL + v * WIDTH) : wide_zero();
    for (; lines; lines--, line += SHORT_LINE) {
        _Alignas(64) bf16 weights[LINE_WEIGHTS];
        bytes four[4];
        ask_for_line(&ahead);
        unpack_short_line(&table, line, four);
        if (kept) {
            store_line(kept, four);
            kept += LINE_WEIGHTS;
        }
        store_line(weights, four);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++, x += 2)
#pragma GCC unroll 2
            for (int turn = 0; turn < TURNS; turn++) {
                wide some[PANEL / WIDTH];
#pragma GCC unroll 8
                for (int v = 0; v < PANEL / WIDTH; v++)
                    some[v] = weights_of(weights + pair * PAIR_WEIGHTS + v * 2 * WIDTH, turn);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const wide one = operand_of(x + row * ldx, turn);
#pragma GCC unroll 8
                    for (int v = 0; v < PANEL / WIDTH; v++)
                        sums[row][v] = multiply_add(sums[row][v], one, some[v]);
                }
            }
    }
    at->ahead = ahead;
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            wide_store(c + row * PANEL + v * WIDTH, sums[row][v]);
}

typedef void (*lines_function)(short_panel *, const uint8_t *, long, const operand *, long, float *, int, bf16 *);

#define LINES_OF(n) \
    static __attribute__((noinline)) void lines_##n(short_panel *at, const uint8_t *line, long lines, \
                                                    const operand *x, long ldx, float *c, int add, bf16 *kept) \
    { \
        multiply_lines(n, at, line, lines, x, ldx, c, add, kept); \
    }

LINES_OF(1) LINES_OF(2)
#if VECTORS >= 32
LINES_OF(3) LINES_OF(4) LINES_OF(5) LINES_OF(6) LINES_OF(7) LINES_OF(8)
#endif

static const lines_function LINES[ROWS_AS_UNPACKED + 1] = {
    NULL, lines_1, lines_2,
#if VECTORS >= 32
    lines_3, lines_4, lines_5, lines_6, lines_7, lines_8,
#endif
};

/* The lines [first, end); `x` begins with the first. */
static void multiply_short_lines(short_panel *at, long first, long end, const operand *x, long stride, long rows, float *sums,
                                 bf16 *kept)
{
    for (long line = first; line < end;) {
        const long clean = next_patched(at, end);
        if (line < clean)
            LINES[rows](at, at->lines + line * SHORT_LINE, clean - line, x + (line - first) * LINE_COLUMNS, stride, sums,
                        line > 0, kept ? kept + (line - first) * LINE_WEIGHTS : NULL);
        line = clean;
        if (line == end)
            return;
        _Alignas(64) bf16 own[LINE_WEIGHTS], *weights = kept ? kept + (line - first) * LINE_WEIGHTS : own;
        unpack_short_lines(at, line, line + 1, weights);
        rz_tile_operands((int)rows, x + (line - first) * LINE_COLUMNS, stride, weights, LINE_COLUMNS / 2, sums, PANEL, line > 0,
                         NULL);
        line++;
    }
}
#endif

/* How many of `rows` multiply what was just unpacked, the first of them. */
RZ_INLINE long rows_as_unpacked(long rows)
{
    if (rows <= ROWS_AS_UNPACKED)
        return rows;
    return VECTORS >= 32 ? ROWS_AS_UNPACKED : 0;
}

void rz_short_exponents_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const operand *x,
                              long stride, long rows, float *sums)
{
    enum { AT_ONCE = ROWS_AS_UNPACKED ? MOST_AT_ONCE : TILE_ROWS };
    _Alignas(64) bf16 weights[SHORT_SPAN * PANEL];
    const long columns = format->columns, first = rows_as_unpacked(rows), tiles = (rows - first + AT_ONCE - 1) / AT_ONCE;
    const long together = tiles ? SHORT_SPAN : columns;
    short_panel at = short_panel_of(panel, columns);
    if (coming) { /* each tile asks for its share of the lines */
        __builtin_prefetch(coming, 0, 2);
        __builtin_prefetch(coming + sizeof(short_head), 0, 2);
        at.ahead = (rz_ahead){ (const char *)coming + (at.lines - panel), (SHORT_LINE / 2 + tiles) / (tiles + 1) };
    }
    for (long begin = 0; begin < columns; begin += together) {
        const long end = begin + together < columns ? begin + together : columns;
        const long begin_line = begin / LINE_COLUMNS, end_line = end / LINE_COLUMNS;
#if !defined(__AMX_BF16__)
        if (first)
            multiply_short_lines(&at, begin_line, end_line, x + begin, stride, first, sums, tiles ? weights : NULL);
        else
#endif
            unpack_short_lines(&at, begin_line, end_line, weights);
        long row = first;
        for (long left = tiles; left; left--) {
            const long here = (rows - row + left - 1) / left;
            rz_tile_operands((int)here, x + begin + row * stride, stride, weights, (end - begin) / 2, sums + row * PANEL,
                             PANEL, begin > 0, &at.ahead);
            row += here;
        }
    }
}
