/* See proof.h. Small matrices of odd shapes, of whole numbers: products are exact in any order of sums, and are compared
 * for equality where no scale rounds them. */
#include "proof.h"

#include "codec.h"
#include "digits.h"
#include "gemm.h"
#include "quantized.h"
#include "reference.h"
#include "short_exponents.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    PROOF_OUTPUTS = 40, /* one panel, and a part of another */
    PROOF_INPUTS = 256, /* at most */
    PROOF_ROWS = 32,
    PROOF_KEYS = 150, /* two rounds, and a part of another */
    PROOF_DIM = COLUMNS,
    PROOF_BLOCK = LANES,
    PROOF_BLOCKS = (PROOF_KEYS + PROOF_BLOCK - 1) / PROOF_BLOCK,
    PROOF_FEW = 2, PROOF_HEADS = 6, /* queries of a key: those of few, and of more */
};

typedef struct {
    uint32_t state;
    int32_t x[PROOF_ROWS * PROOF_INPUTS], w[COLUMNS * PROOF_INPUTS];
    int32_t expected[PROOF_ROWS * COLUMNS];
    bf16 inputs[PROOF_ROWS * PROOF_INPUTS], weights[COLUMNS * PROOF_INPUTS];
    operand operands[PROOF_ROWS * PROOF_INPUTS];
    float sums[PROOF_ROWS * COLUMNS];
    digit_sums digit_sums;
    uint8_t codes[COLUMNS * PROOF_INPUTS], digits[2 * PROOF_ROWS * PROOF_INPUTS];
    int32_t keys[2][PROOF_BLOCKS * PROOF_BLOCK * PROOF_DIM], queries[PROOF_HEADS * PROOF_DIM];
    bf16 asked[PROOF_HEADS * PROOF_DIM], writable[PROOF_BLOCKS * 2 * PROOF_BLOCK * PROOF_DIM];
    int8_t coded[PROOF_BLOCKS * 2 * PROOF_BLOCK * PROOF_DIM];
    float scales[PROOF_BLOCKS * 2], partial[PROOF_HEADS * (PROOF_DIM + 2)];
    int32_t table[PROOF_BLOCKS];
} proof;

/* In [-largest, largest]. */
static int32_t proof_draw(proof *of, int32_t largest)
{
    of->state = of->state * 1664525u + 1013904223u;
    return (int32_t)((of->state >> 8) % (uint32_t)(2 * largest + 1)) - largest;
}

/* Exact up to 256, in units that are powers of two. */
static bf16 bf16_of_number(int32_t number, float unit)
{
    union { float value; uint32_t bits; } both = { (float)number * unit };
    return (bf16)(both.bits >> 16);
}

static void proof_fill(proof *of, int32_t *numbers, bf16 *values, long count, int32_t largest)
{
    for (long i = 0; i < count; i++) {
        numbers[i] = proof_draw(of, largest);
        values[i] = bf16_of_number(numbers[i], 1);
    }
}

/* Whether sums [rows][ld] are the expected ones [rows][outputs] from output `first` on, in `unit`s, up to `rounding`. */
static int proof_holds(const proof *of, int rows, int outputs, int first, int ld, float unit, float rounding)
{
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < ld && first + i < outputs; i++) {
            const float expected = unit * (float)of->expected[row * outputs + first + i];
            if (!(fabsf(of->sums[row * ld + i] - expected) <= rounding))
                return 0;
        }
    return 1;
}

/* The products that were proven last, with the same weights in twelve bits each. */
static int proof_of_short_exponents(proof *of, int rows, int inputs, const bf16 *packed)
{
    const rz_format format = { .bits = 12, .columns = inputs, .floats = RZ_SHORT_EXPONENTS };
    const size_t bytes = rz_short_exponents_panel_bytes(inputs);
    uint8_t *shortened = (uint8_t *)packed + rz_packed_bytes(PROOF_OUTPUTS, inputs);
    if (!rz_short_exponents_pack(shortened, packed, inputs, 0, (PROOF_OUTPUTS + PANEL - 1) / PANEL))
        return 0;
    widen(of->operands, of->inputs, (long)rows * inputs);
    for (int panel = 0; panel * PANEL < PROOF_OUTPUTS; panel++) {
        const uint8_t *from = shortened + (size_t)panel * bytes;
        rz_short_exponents_panel(&format, from, NULL, of->operands, inputs, rows, of->sums);
        if (!proof_holds(of, rows, PROOF_OUTPUTS, panel * PANEL, PANEL, 1.0f, 0))
            return 0;
    }
    return 1;
}

static int proof_of_bf16(proof *of, int rows, int inputs, void *packed)
{
    const long pairs = (inputs + 1) / 2;
    rows = rows < TILE_ROWS ? rows : TILE_ROWS;
    proof_fill(of, of->x, of->inputs, (long)rows * inputs, 8);
    proof_fill(of, of->w, of->weights, (long)PROOF_OUTPUTS * inputs, 8);
    rz_reference_products(rows, PROOF_OUTPUTS, inputs, of->x, of->w, of->expected);
    memset(packed, 0, rz_packed_bytes(PROOF_OUTPUTS, inputs));
    rz_pack(packed, of->weights, PROOF_OUTPUTS, inputs, inputs, 0, PROOF_OUTPUTS, PROOF_OUTPUTS);
    for (int panel = 0; panel * PANEL < PROOF_OUTPUTS; panel++)
        for (int add = 0; add < 2; add++) { /* twice: the second time to the negative of what comes */
            const bf16 *from = (const bf16 *)packed + panel * pairs * 2 * PANEL;
            for (int i = 0; i < rows * PANEL; i++)
                of->sums[i] = add ? -of->sums[i] : NAN;
            rz_tile(rows, of->inputs, inputs, from, pairs, of->sums, PANEL, add, NULL, (rz_sums_end){ 0 });
            if (!proof_holds(of, rows, PROOF_OUTPUTS, panel * PANEL, PANEL, add ? 0.0f : 1.0f, 0))
                return 0;
        }
    return !rz_short_exponents_panel_bytes(inputs) || proof_of_short_exponents(of, rows, inputs, packed);
}

enum proof_scales { OF_GROUPS, OF_GROUPS_WHOLE, OF_ROWS };

/* Codes of `bits` bits, whose scale is a half, or a whole number under one of a quarter. */
static int proof_of_int8(proof *of, int bits, enum proof_scales of_what, int rows, void *packed)
{
    enum { INPUTS = 256, GROUP = 32, GROUPS = INPUTS / GROUP };
    const int offset = 1 << (bits - 1), whole = of_what == OF_GROUPS_WHOLE;
    float scales[PROOF_OUTPUTS * GROUPS], supers[PROOF_OUTPUTS];
    int8_t numbers[PROOF_OUTPUTS * GROUPS];
    for (int i = 0; i < PROOF_OUTPUTS * GROUPS; i++)
        scales[i] = 0.5f, numbers[i] = -2;
    for (int i = 0; i < PROOF_OUTPUTS; i++)
        supers[i] = -0.25f;
    proof_fill(of, of->x, of->inputs, (long)rows * INPUTS, 127);
    for (int i = 0; i < rows * INPUTS; i += BLOCK) /* so that a block's unit is one */
        of->x[i] = 127, of->inputs[i] = bf16_of_number(127, 1);
    for (int i = 0; i < PROOF_OUTPUTS * INPUTS; i++) {
        of->w[i] = proof_draw(of, offset - 1);
        of->codes[i] = (uint8_t)(of->w[i] + offset);
    }
    rz_reference_products(rows, PROOF_OUTPUTS, INPUTS, of->x, of->w, of->expected);
    const rz_format format = { .bits = bits, .group = of_what == OF_ROWS ? 0 : GROUP, .per = whole ? GROUPS : 0,
                               .offset = offset, .scale_type = whole ? RZ_I8 : RZ_F32, .super_type = RZ_F32,
                               .minimums = RZ_NO_MINIMUMS, .columns = INPUTS };
    const rz_codes weight = { .codes = of->codes, .scales = whole ? (const void *)numbers : scales, .supers = supers,
                              .outputs = PROOF_OUTPUTS, .code_stride = INPUTS,
                              .scale_stride = of_what == OF_ROWS ? 1 : GROUPS, .super_stride = 1 };
    rz_quantized_pack(packed, &format, &weight, 0, (PROOF_OUTPUTS + PANEL - 1) / PANEL);
    rz_rounded rounded = rz_rounded_in((char *)packed + rz_quantized_bytes(&format, PROOF_OUTPUTS), &format, rows);
    for (int row = 0; row < rows; row++)
        rz_round_row(&rounded, &format, row, of->inputs + (long)row * INPUTS, INPUTS);
    for (int panel = 0; panel * PANEL < PROOF_OUTPUTS; panel++) {
        const uint8_t *from = (const uint8_t *)packed + (size_t)panel * rz_quantized_panel_bytes(&format);
        rz_quantized_panel(&format, from, NULL, &rounded, 0, rows, of->sums);
        /* Units are rounded: 127 times the inverse of 127. */
        if (!proof_holds(of, rows, PROOF_OUTPUTS, panel * PANEL, PANEL, 0.5f, 1e-6f * 127 * (float)offset * INPUTS))
            return 0;
    }
    return 1;
}

/* Numbers of 14 bits; quads of codes behind theirs are zeros. */
static int proof_of_digits(proof *of, int rows, int inputs, void *packed)
{
    enum { STRIDE = PROOF_INPUTS };
    const int quads = (inputs + 63) / 64 * 16;
    int8_t *codes = packed;
    memset(codes, 0, (size_t)quads * 4 * COLUMNS);
    memset(of->digits, 0x55, sizeof of->digits);
    for (int i = 0; i < rows * inputs; i++) {
        of->x[i] = proof_draw(of, LARGEST_SIGNED);
        uint8_t *digit = of->digits + i / inputs * 2 * STRIDE + i % inputs;
        const int upper = (of->x[i] + LARGEST_SIGNED + 1 + UPPER / 2) / UPPER - UPPER / 2;
        digit[0] = (uint8_t)upper, digit[STRIDE] = (uint8_t)(of->x[i] - UPPER * upper);
    }
    for (int column = 0; column < COLUMNS; column++)
        for (int i = 0; i < inputs; i++) {
            of->w[column * inputs + i] = proof_draw(of, 3); /* sums stay below 2^24, where floats are exact */
            codes[((column / LANES * quads + i / 4) * LANES + column % LANES) * 4 + i % 4]
                = (int8_t)(of->w[column * inputs + i] ^ -128);
        }
    const int8_t *groups[QUARTERS];
    for (int group = 0; group < QUARTERS; group++)
        groups[group] = codes + (long)group * quads * 4 * LANES;
    rz_reference_products(rows, COLUMNS, inputs, of->x, of->w, of->expected);
    for (int row = 0; row < rows; row++) {
        const int first = row - row % NUMBERS_AT_ONCE;
        const digit_product product = { rows - row < NUMBERS_AT_ONCE ? rows - row : NUMBERS_AT_ONCE, quads,
                                        of->digits + 2L * row * STRIDE, STRIDE, groups, QUARTERS, 0, &of->digit_sums,
                                        NULL };
        waiting_quarter last = { 0 };
        for (int quarter = 0; quarter < QUARTERS && row == first; quarter++)
            rz_multiply_quarter(&product, quarter, &last);
        rz_end_quarters(&last);
        int32_t sum = 0;
        for (int i = 0; i < inputs; i++)
            sum += of->x[row * inputs + i];
        for (int v = 0; v < COLUMNS; v += LANES)
            f32_store(of->sums + row * COLUMNS + v, f32_from_i32(i32_sub(digit_sum(of->digit_sums.of[row - first], v / LANES),
                                                                         i32_set1(sum * COUNTS_MORE_BY))));
    }
    return proof_holds(of, rows, COLUMNS, 0, COLUMNS, 1, 0);
}

/* Numbers in units as the cache keeps them: every block as bf16, and behind these all of them as codes. */
static void proof_keep(proof *of, int codec, float unit)
{
    for (int block = 0; block < PROOF_BLOCKS; block++) {
        const int full = (block * 3 + 1) % PROOF_BLOCKS, is_own = block == PROOF_BLOCKS - 1;
        of->table[block] = codec && !is_own ? PROOF_BLOCKS + full : full;
        for (int line = 0; line < 2; line++) {
            const long at = (full * 2L + line) * PROOF_BLOCK * PROOF_DIM;
            int32_t *numbers = of->keys[line] + (long)block * PROOF_BLOCK * PROOF_DIM;
            int8_t lines[PROOF_BLOCK * PROOF_DIM];
            proof_fill(of, numbers, of->writable + at, PROOF_BLOCK * PROOF_DIM, codec ? 127 : 8);
            for (long i = 0; i < PROOF_BLOCK * PROOF_DIM; i++) {
                lines[i] = (int8_t)numbers[i];
                of->writable[at + i] = bf16_of_number(numbers[i], unit);
            }
            if (line == 0)
                rz_pack_as_columns(of->coded + at, lines, PROOF_DIM);
            else
                rz_pack_as_lines(of->coded + at, lines, 0, PROOF_DIM);
            of->scales[full * 2 + line] = unit;
        }
    }
}

/* The last of PROOF_KEYS tokens asks all of them, by `heads` heads: its own block is bf16, the others as `codec` says. */
static int proof_of_attention(proof *of, int codec, int heads, void *scratch)
{
    const float unit = codec ? 0.03125f : 1.0f;
    of->state = 1; /* whatever was drawn before */
    proof_fill(of, of->queries, of->asked, heads * PROOF_DIM, 8);
    proof_keep(of, codec, unit);
    const int32_t slot = of->table[PROOF_BLOCKS - 1] * PROOF_BLOCK + (PROOF_KEYS - 1) % PROOF_BLOCK;
    const rz_attention_shape shape = { .kv_heads = 1, .lines = 2, .key_dim = PROOF_DIM, .value_dim = PROOF_DIM,
                                       .block_size = PROOF_BLOCK, .scale = 0.01f };
    const rz_cache cache = { of->writable, of->coded, of->scales, PROOF_BLOCKS, codec, codec != RZ_CODEC_NONE };
    const rz_attention_part part = { .table = of->table, .slots = &slot, .queries = of->asked, .partial = of->partial,
                                     .q_stride = heads * PROOF_DIM, .out_stride = heads * PROOF_DIM, .rows = 1,
                                     .heads = heads, .position = PROOF_KEYS - 1, .last_key = PROOF_KEYS, .parts = 1,
                                     .until_layer = 1, .kv_heads = 1 };
    rz_attend(&shape, &cache, &part, NULL, scratch);
    for (int head = 0; head < heads; head++) {
        double expected[PROOF_DIM];
        const float *found = of->partial + head * (PROOF_DIM + 2);
        rz_reference_attention(PROOF_DIM, 0, PROOF_KEYS, of->queries + head * PROOF_DIM, of->keys[0], of->keys[1],
                               0.01 * (double)unit, (double)unit, expected);
        for (int i = 0; i < PROOF_DIM; i++)
            if (!(fabs((double)(found[i] / found[PROOF_DIM + 1]) - expected[i]) <= 0.02)) /* of weights as bf16 */
                return 0;
    }
    return 1;
}

static int proof_of_all(proof *of, void *memory)
{
    of->state = 1;
    for (int rows = 1; rows <= PROOF_ROWS; rows += 1 + rows / 2)
        if (!proof_of_bf16(of, rows, 70, memory) || !proof_of_bf16(of, rows, 6, memory) || !proof_of_bf16(of, rows, 72, memory))
            return RZ_WRONG_BF16;
    static const int some_rows[] = { 1, 13, 19, PROOF_ROWS }; /* 19: tiles of which two share rows */
    for (size_t i = 0; i < sizeof some_rows / sizeof *some_rows; i++)
        if (!proof_of_int8(of, 4, OF_GROUPS, some_rows[i], memory) || !proof_of_int8(of, 8, OF_GROUPS, some_rows[i], memory)
            || !proof_of_int8(of, 4, OF_GROUPS_WHOLE, some_rows[i], memory)
            || !proof_of_int8(of, 8, OF_ROWS, some_rows[i], memory))
            return RZ_WRONG_INT8;
    for (int rows = 1; rows <= 19; rows += 6)
        if (!proof_of_digits(of, rows, 72, memory))
            return RZ_WRONG_DIGITS;
    if (!proof_of_attention(of, RZ_CODEC_NONE, PROOF_FEW, memory)
        || !proof_of_attention(of, RZ_CODEC_NONE, PROOF_HEADS, memory))
        return RZ_WRONG_ATTENTION;
    if (!proof_of_attention(of, RZ_CODEC_INT8, PROOF_FEW, memory)
        || !proof_of_attention(of, RZ_CODEC_INT8, PROOF_HEADS, memory))
        return RZ_WRONG_CODED_ATTENTION;
    return RZ_PROVEN;
}

int rz_prove(void)
{
    enum { WEIGHTS = 1 << 18 }; /* packed weights and rounded activations: less than 64 KiB */
    const size_t scratch = rz_attention_scratch(), room = scratch > WEIGHTS ? scratch : WEIGHTS;
    proof *of = calloc(1, sizeof *of);
    void *memory = aligned_alloc(64, (room + 63) / 64 * 64);
    const int result = of && memory ? proof_of_all(of, memory) : RZ_UNPROVEN;
    rz_end_products();
    free(memory);
    free(of);
    return result;
}
