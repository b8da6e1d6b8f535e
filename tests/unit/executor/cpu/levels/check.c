/* What one level of the kernels comes to, as lines of "name value value ...": compiled for a level, and run on a processor
 * that has it, or on a model of one. Its inputs are the same everywhere.
 *
 * Lines that are called "exact ..." must be the same at every level; the others are sums of floats. What must not depend
 * on neighbours is compared here: the program ends with 1 and says what differs. */
#include CHECKED_LEVEL

#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;

static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* In [-1, 1), with 8 bits: exact in bf16. */
static float draw_float(void)
{
    return (float)((int)(draw() >> 8 & 255) - 128) / 128.0f;
}

static bf16 to_bf16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)(bits >> 16);
}

static void *room(size_t bytes)
{
    return calloc(1, bytes + 64);
}

static void show_floats(const char *name, const float *values, long count)
{
    printf("%s", name);
    for (long i = 0; i < count; i++)
        printf(" %.9g", (double)values[i]);
    printf("\n");
}

static void show_ints(const char *name, const int32_t *values, long count)
{
    printf("exact %s", name);
    for (long i = 0; i < count; i++)
        printf(" %d", values[i]);
    printf("\n");
}

static void must(int holds, const char *what)
{
    if (holds)
        return;
    printf("differs: %s\n", what);
    exit(1);
}

/* --- vectors ----------------------------------------------------------------------------------------- */

static void check_vectors(void)
{
    const float values[LANES] = { 0.5f, 1.5f, -2.5f, 3.0e-3f, 448.0f, -1.0e-9f, 1.0e30f, -0.0f,
                                  2.0f, 100.25f, -7.75f, 1.0f / 3, 65504.0f, 1e-5f, -126.5f, 12.0f };
    float out[LANES];
    int32_t whole[LANES];
    bf16 halves[LANES];
    f32 a = f32_load(values);
    f32_store(out, f32_round(f32_min(a, f32_set1(1000.0f))));
    show_floats("exact round", out, LANES);
    f32_store(out, f32_power_below(a));
    show_floats("exact power", out, LANES);
    f32_store(out, exp2_f32(f32_load((const float[LANES]){ 0, 1, -1, 127.5f, 128, 200, -126.5f, -140, -200, -INFINITY, 3.25f,
                                                           0.1f, -0.1f, 10, -10, 1e9f })));
    show_floats("exp2", out, LANES);
    const float powers[LANES] = { 0, -0.0f, -1, -126, -126.5f, -125.75f, -200, -INFINITY, -3.25f, -0.1f, -1e-7f, -10, -1e9f,
                                  -1e20f, -64, NAN };
    f32_store(out, exp2_nonpositive_f32(f32_load(powers)));
    show_floats("nonpositive", out, LANES);
    f32_store(out, f32_as_bf16(f32_select(f32_above(a, f32_set1(1.0f)), a, f32_set1(1.00390625f))));
    show_floats("exact rounded", out, LANES);
    f32_store(out, tanh_f32(a));
    show_floats("tanh", out, LANES);
    f32_store(out, gelu_tanh_f32(f32_max(f32_min(a, f32_set1(50.0f)), f32_set1(-50.0f))));
    show_floats("gelu", out, LANES);
    f32_store_bf16(halves, f32_select(f32_above(a, f32_set1(1.0f)), f32_set1(NAN), f32_mul(a, f32_set1(1.00390625f))));
    for (int i = 0; i < LANES; i++)
        whole[i] = (halves[i] & 0x7fff) > 0x7f80 ? -1 : halves[i] == 0x8000 ? 0 : halves[i];
    whole[5] = 0; /* near where some levels have no smaller numbers */
    show_ints("bf16", whole, LANES);
    printf("exact sums %.9g %.9g\n", (double)f32_sum(f32_min(a, f32_set1(9.0f))), (double)f32_largest(a));
    for (int count = -1; count <= LANES + 1; count++) {
        for (int i = 0; i < LANES; i++)
            out[i] = 77.0f;
        f32_store_some(lanes_first(count), out, f32_load_some(lanes_first(count - 2), values));
        show_floats("exact some", out, LANES);
        for (int i = 0; i < LANES; i++)
            whole[i] = halves[i] = 77;
        f32_store_some_bf16(lanes_first(count), halves, f32_set1(1.0f));
        for (int i = 0; i < LANES; i++)
            whole[i] = halves[i];
        show_ints("some bf16", whole, LANES);
    }
    uint16_t f16[LANES];
    f32_store_f16(f16, f32_min(a, f32_set1(60000.0f)));
    f32_store(out, f32_load_f16(f16));
    show_floats("exact f16", out, LANES);
}

static void check_integers(void)
{
    uint8_t a[64], b[64], masked[64];
    int32_t out[LANES];
    for (int turn = 0; turn < 6; turn++) {
        for (int i = 0; i < 64; i++) {
            a[i] = turn == 0 ? 255 : (uint8_t)draw();
            b[i] = turn == 0 ? 127 : turn == 1 ? (uint8_t)-127 : (uint8_t)((int)(draw() % 255) - 127);
            a[i] = turn == 1 ? 255 : a[i];
        }
        i32 sum = i32_set1(turn);
        i32_store(out, i32_dot_u8(sum, bytes_load(a), bytes_load(b)));
        show_ints("dot_u8", out, LANES);
        bytes seven = bytes_and(bytes_load(a), bytes_set1(0x7f));
        i32_store(out, i32_dot_u7(sum, seven, bytes_repeat4(b + 4)));
        show_ints("dot_u7", out, LANES);
        bytes_store(masked, bytes_and(bytes_right(bytes_load(a), 3), bytes_set1(0x1f)));
        for (int i = 0; i < 64; i++)
            must(masked[i] == a[i] >> 3, "bytes_right");
        bytes_store(masked, bytes_left(bytes_and(bytes_load(a), bytes_set1(3)), 6));
        for (int i = 0; i < 64; i++)
            must(masked[i] == (uint8_t)(a[i] << 6), "bytes_left");
        bytes_store(masked, bytes_look_up(bytes_repeat16(b), bytes_and(bytes_load(a), bytes_set1(15))));
        for (int i = 0; i < 64; i++)
            must(masked[i] == b[a[i] & 15], "bytes_look_up");
        bytes_store(masked, bytes_xor(bytes_or(bytes_load(a), bytes_load(b)), bytes_set1(128)));
        for (int i = 0; i < 64; i++)
            must(masked[i] == ((a[i] | b[i]) ^ 128), "bytes_xor");
        i32 product = i32_mul(i32_load_u8(a), i32_sub(i32_load_i8((const int8_t *)b), i32_set1(3)));
        i32_store(out, product);
        show_ints("mul", out, LANES);
        float floats[LANES];
        f32_store(floats, f32_from_i32(product));
        show_floats("exact from_i32", floats, LANES);
        i32_store(out, i32_select(i32_greater(product, i32_set1(0)), product, i32_set1(-5)));
        show_ints("select", out, LANES);
    }
}

/* --- products ---------------------------------------------------------------------------------------- */

static void check_tiles(long outputs, long inputs)
{
    enum { MOST_ROWS = 32 }; /* of a tile, at any level */
    const long pairs = (inputs + 1) / 2;
    bf16 *weights = room((size_t)(outputs * inputs) * 2), *packed = room(rz_packed_bytes(outputs, inputs));
    bf16 *x = room((size_t)(MOST_ROWS * inputs) * 2), *row = room((size_t)inputs * 2);
    for (long i = 0; i < outputs * inputs; i++)
        weights[i] = to_bf16_of(draw_float());
    for (long i = 0; i < MOST_ROWS * inputs; i++)
        x[i] = to_bf16_of(draw_float());
    rz_pack(packed, weights, outputs, inputs, inputs, 0, outputs, outputs);
    uint32_t digest = 0;
    for (size_t i = 0; i < rz_packed_bytes(outputs, inputs) / 2; i++)
        digest = digest * 31 + packed[i];
    printf("exact packed %u\n", digest);
    for (long output = 0; output < outputs; output++) {
        rz_unpack_row(row, packed, output, inputs);
        must(!memcmp(row, weights + output * inputs, (size_t)inputs * 2), "rz_unpack_row");
    }
    float all[TILE_ROWS * PANEL], some[TILE_ROWS * PANEL];
    for (int i = 0; i < TILE_ROWS * PANEL; i++)
        all[i] = 0.25f * (float)(i % 7);
    memcpy(some, all, sizeof all);
    rz_tile(TILE_ROWS, x, inputs, packed, pairs, all, PANEL, 1, NULL, (rz_sums_end){ 0 });
    show_floats("tile", all, 12 * PANEL);
    for (int rows = 1; rows < TILE_ROWS; rows++) {
        float *c = room(sizeof some);
        memcpy(c, some, sizeof some);
        rz_ahead ahead = rz_look_ahead(packed, 2);
        const rz_sums_end end = { (const char *)c, sizeof some / TILE_ROWS, sizeof some / TILE_ROWS, rows };
        rz_tile(rows, x, inputs, packed, pairs, c, PANEL, 1, &ahead, end);
        must(!memcmp(c, all, (size_t)(rows * PANEL) * sizeof *c), "a row, of the rows of its tile");
        must(!memcmp(c + rows * PANEL, some + rows * PANEL, (size_t)(TILE_ROWS - rows) * PANEL * sizeof *c), "other rows");
        free(c);
    }
}

/* Any number of rows by several panels, against one tile after the other. */
static void check_panels(long inputs)
{
    enum { ROWS_TRIED = 75, PANELS = 3, WIDTH = PANELS * PANEL };
    const long pairs = (inputs + 1) / 2, step = pairs * 2 * PANEL;
    bf16 *packed = room((size_t)(PANELS * step) * 2);
    operand *x = room((size_t)(ROWS_TRIED * 2 * pairs) * sizeof *x);
    float *all = room(ROWS_TRIED * WIDTH * sizeof *all), *one = room(ROWS_TRIED * WIDTH * sizeof *one);
    for (long i = 0; i < PANELS * step; i++)
        packed[i] = to_bf16_of(draw_float());
    for (long i = 0; i < ROWS_TRIED * 2 * pairs; i++) {
        const bf16 value = to_bf16_of(draw_float());
        widen(x + i, &value, 1);
    }
    for (int i = 0; i < ROWS_TRIED * WIDTH; i++)
        all[i] = one[i] = 0.25f * (float)(i % 5);
    for (int add = 1; add >= 0; add--)
        for (int rows = ROWS_TRIED; rows > 0; rows -= 9) {
            rz_tiles(rows, x, 2 * pairs, packed, PANELS, step, pairs, all, WIDTH, add);
            for (int panel = 0; panel < PANELS; panel++)
                for (int row = 0; row < rows; row++)
                    rz_tile_operands(1, x + row * 2 * pairs, 2 * pairs, packed + panel * step, pairs,
                                     one + row * WIDTH + panel * PANEL, WIDTH, add, NULL);
            must(!memcmp(all, one, ROWS_TRIED * WIDTH * sizeof *all), "rows by several panels");
        }
    rz_end_products();
}

/* bf16 in 12 bits, against the same as it is: a few weights have exponents of their own. */
static void check_short_exponents(long inputs)
{
    enum { PANELS = 2, ROWS_TRIED = 27 };
    const long panel = inputs * PANEL;
    const size_t bytes = rz_short_exponents_panel_bytes(inputs);
    const rz_format format = { .bits = 12, .columns = (int32_t)inputs, .floats = RZ_SHORT_EXPONENTS };
    bf16 *packed = room((size_t)(PANELS * panel) * 2), *span = room((size_t)panel * 2), *row = room((size_t)inputs * 2);
    operand *x = room((size_t)(ROWS_TRIED * inputs) * sizeof *x);
    uint8_t *shortened = room(PANELS * bytes);
    float one[ROWS_TRIED * PANEL], all[ROWS_TRIED * PANEL];
    for (long i = 0; i < PANELS * panel; i++)
        packed[i] = to_bf16_of(draw_float() * (i % 901 == 7 ? 1e-30f : i % 901 == 9 ? 1e30f : i % 901 == 300 ? 0 : 1));
    for (long i = 0; i < ROWS_TRIED * inputs; i++) {
        const bf16 value = to_bf16_of(draw_float());
        widen(x + i, &value, 1);
    }
    must(rz_short_exponents_pack(shortened, packed, inputs, 0, PANELS), "short exponents have room");
    for (int i = 0; i < PANELS; i++) {
        const uint8_t *from = shortened + i * bytes;
        const bf16 *plain = packed + i * panel;
        for (long first = 0; first < inputs; first += 128) {
            const long end = first + 128 < inputs ? first + 128 : inputs;
            rz_short_exponents_span(from, inputs, first, end, span);
            must(!memcmp(span, plain + first * PANEL, (size_t)((end - first) * PANEL) * 2), "a span of short exponents");
        }
        rz_unpack_row(row, plain, 17, inputs);
        rz_unpack_rows(span, 0, inputs, &format, from, inputs, 17, 1, 1, 0, 1);
        must(!memcmp(span, row, (size_t)inputs * 2), "a row of short exponents");
        for (int each = 0; each < ROWS_TRIED; each++)
            rz_tile_operands(1, x + each * inputs, inputs, plain, inputs / 2, one + each * PANEL, PANEL, 0, NULL);
        for (int rows = 1; rows <= ROWS_TRIED; rows++) {
            rz_short_exponents_panel(&format, from, rows % 2 ? from : NULL, x, inputs, rows, all);
            must(!memcmp(all, one, (size_t)(rows * PANEL) * sizeof *all), "products with short exponents");
        }
    }
    rz_end_products();
}

enum { QUANTIZED_OUTPUTS = 40, QUANTIZED_COLUMNS = 256, QUANTIZED_ROWS = 35 };

/* Every row of products with a packed weight, however many there are. */
static void check_quantized_rows(const rz_format *format, const rz_codes *weight)
{
    enum { ROWS_TRIED = QUANTIZED_ROWS, COLUMNS = QUANTIZED_COLUMNS };
    uint8_t *packed = room(rz_quantized_bytes(format, QUANTIZED_OUTPUTS));
    rz_quantized_pack(packed, format, weight, 0, 2);
    float row[COLUMNS];
    rz_quantized_row(row, format, packed, 37);
    show_floats("row", row, format->columns);
    bf16 x[ROWS_TRIED * COLUMNS];
    for (int i = 0; i < ROWS_TRIED * COLUMNS; i++)
        x[i] = to_bf16_of(draw_float());
    rz_rounded rounded = rz_rounded_in(room(ROWS_TRIED * rz_rounded_bytes(COLUMNS)), format, ROWS_TRIED);
    for (int i = 0; i < ROWS_TRIED; i++)
        rz_round_row(&rounded, format, i, x + i * COLUMNS, format->columns);
    float all[ROWS_TRIED * PANEL], some[ROWS_TRIED * PANEL];
    rz_quantized_panel(format, packed, NULL, &rounded, 0, ROWS_TRIED, all);
    show_floats("quantized", all, ROWS_TRIED * PANEL);
    for (int rows = 1; rows < ROWS_TRIED; rows++) {
        rz_quantized_panel(format, packed, NULL, &rounded, ROWS_TRIED - rows, rows, some);
        must(!memcmp(some, all + (ROWS_TRIED - rows) * PANEL, (size_t)(rows * PANEL) * sizeof *some),
             "a row of quantized products, of its neighbours");
    }
    rz_end_products();
}

static uint8_t *draw_numbers(long count, uint32_t below)
{
    uint8_t *to = room((size_t)count);
    for (long i = 0; i < count; i++)
        to[i] = (uint8_t)(draw() % below);
    return to;
}

static void fill_table(rz_format *format)
{
    for (int i = 0; i < 16; i++)
        format->table[i] = (int8_t)(i * i - 120);
}

/* A weight whose scales and minimums are float32, by `group` columns. */
static void check_quantized(int bits, int group, int minimums, int tabled)
{
    enum { OUTPUTS = QUANTIZED_OUTPUTS, COLUMNS = QUANTIZED_COLUMNS };
    const long groups = COLUMNS / group;
    rz_format format = { .bits = bits, .group = group, .offset = bits == 8 ? 128 : 3, .scale_type = RZ_F32,
                         .minimums = minimums, .has_table = tabled, .columns = COLUMNS };
    float *scales = room((size_t)(OUTPUTS * groups) * 4), *least = room((size_t)(OUTPUTS * groups) * 4);
    fill_table(&format);
    uint8_t *codes = draw_numbers(OUTPUTS * COLUMNS, 1u << bits), *zeros = draw_numbers(OUTPUTS * groups, 1u << bits);
    for (int i = 0; i < OUTPUTS * groups; i++) {
        scales[i] = draw_float();
        least[i] = draw_float();
    }
    rz_codes weight = { .codes = codes, .scales = scales, .minimums = minimums == RZ_ZEROS ? (void *)zeros : least,
                        .outputs = OUTPUTS, .code_stride = COLUMNS, .scale_stride = groups, .minimum_stride = groups };
    weight.minimums = minimums ? weight.minimums : NULL;
    check_quantized_rows(&format, &weight);
}

/* One whose groups have whole numbers as scales, `per` of them under one of float32; without `minimums` with signs. */
static void check_spans(int bits, int group, int per, int minimums, int tabled)
{
    enum { OUTPUTS = QUANTIZED_OUTPUTS };
    const int groups = QUANTIZED_COLUMNS / (group * per) * per, supers = groups / per, columns = groups * group;
    rz_format format = { .bits = bits, .group = group, .per = per, .offset = minimums || tabled ? 0 : 1 << (bits - 1),
                         .scale_type = minimums ? RZ_U8 : RZ_I8, .super_type = RZ_F32, .minimums = minimums,
                         .has_table = tabled, .columns = columns };
    fill_table(&format);
    uint8_t *codes = draw_numbers(OUTPUTS * columns, 1u << bits), *scales = draw_numbers(OUTPUTS * groups, 64);
    uint8_t *least = draw_numbers(OUTPUTS * groups, 64);
    float *upper = room((size_t)(OUTPUTS * supers) * 4), *under = room((size_t)(OUTPUTS * supers) * 4);
    for (int i = 0; i < OUTPUTS * supers; i++) {
        upper[i] = draw_float();
        under[i] = draw_float();
    }
    for (int i = 0; i < OUTPUTS * groups && !minimums; i++)
        scales[i] = (uint8_t)(scales[i] - 32);
    const rz_codes weight = { .codes = codes, .scales = scales, .minimums = minimums ? least : NULL, .supers = upper,
                              .super_minimums = minimums ? under : NULL, .outputs = OUTPUTS, .code_stride = columns,
                              .scale_stride = groups, .minimum_stride = groups, .super_stride = supers,
                              .super_minimum_stride = supers };
    check_quantized_rows(&format, &weight);
}

/* Those that tiles multiply: of odd and even blocks, and of those that are no whole ones. */
static void check_all_spans(void)
{
    for (int per = 5; per <= 8; per++) {
        check_spans(4, 32, per, RZ_MINIMUMS, 0);
        check_spans(6, 16, 2 * per, RZ_NO_MINIMUMS, 0);
        check_spans(3, 16, per, RZ_NO_MINIMUMS, 0);
        check_spans(4, 32, per, RZ_NO_MINIMUMS, 1);
    }
    check_quantized(4, 64, RZ_ZEROS, 0);
    check_quantized(8, 256, RZ_NO_MINIMUMS, 0);
}

/* e4m3 (8 bits), or a table of 16: all their codes. */
static void check_float_codes(int bits)
{
    enum { OUTPUTS = 40, COLUMNS = 256, GROUPS = 4, ROWS_DRAWN = 13, ROWS_TRIED = 20 /* more than few */ };
    rz_format format = { .bits = bits, .group = COLUMNS / GROUPS, .scale_type = RZ_F32, .columns = COLUMNS,
                         .floats = bits == 8 ? RZ_E4M3 : RZ_FLOAT_TABLE };
    uint8_t *codes = room(OUTPUTS * COLUMNS);
    float scales[OUTPUTS * GROUPS], row[COLUMNS], all[ROWS_TRIED * PANEL], some[ROWS_TRIED * PANEL];
    for (int i = 0; i < 16; i++)
        format.float_table[i] = to_bf16_of((float)(i * i - 120));
    for (int i = 0; i < OUTPUTS * COLUMNS; i++)
        codes[i] = (uint8_t)((i + i / COLUMNS) & ((1 << bits) - 1));
    for (int i = 0; i < OUTPUTS * GROUPS; i++)
        scales[i] = draw_float();
    const rz_codes weight = { .codes = codes, .scales = scales, .outputs = OUTPUTS, .code_stride = COLUMNS,
                              .scale_stride = GROUPS };
    uint8_t *packed = room(rz_quantized_bytes(&format, OUTPUTS));
    rz_quantized_pack(packed, &format, &weight, 0, 2);
    for (int output = 0; output < OUTPUTS; output += 13) {
        rz_quantized_row(row, &format, packed, output);
        show_floats("row", row, COLUMNS);
    }
    bf16 drawn[ROWS_DRAWN * COLUMNS];
    for (int i = 0; i < ROWS_DRAWN * COLUMNS; i++)
        drawn[i] = to_bf16_of(draw_float());
    operand x[ROWS_TRIED * COLUMNS];
    widen(x, drawn, ROWS_DRAWN * COLUMNS);
    widen(x + ROWS_DRAWN * COLUMNS, drawn, (ROWS_TRIED - ROWS_DRAWN) * COLUMNS);
    rz_float_codes_panel(&format, packed, NULL, x, COLUMNS, ROWS_TRIED, all);
    show_floats("float_codes", all, ROWS_DRAWN * PANEL);
    for (int rows = 1; rows < ROWS_TRIED; rows++) {
        rz_float_codes_panel(&format, packed, NULL, x + (ROWS_TRIED - rows) * COLUMNS, COLUMNS, rows, some);
        must(!memcmp(some, all + (ROWS_TRIED - rows) * PANEL, (size_t)(rows * PANEL) * sizeof *some),
             "a row of products with codes of floats, of its neighbours");
    }
}

static void check_codecs(void)
{
    enum { COUNT = 64 };
    bf16 values[COUNT];
    for (int codec = RZ_CODEC_NONE + 1; codec < RZ_CODECS; codec++) {
        uint8_t codes[COUNT];
        int32_t shown[COUNT];
        float scale;
        for (int i = 0; i < COUNT; i++)
            values[i] = to_bf16_of(draw_float() * (i % 5 ? 1.0f : 0.01f));
        rz_encode(codec, values, COUNT, codes, &scale);
        for (int i = 0; i < COUNT; i++)
            shown[i] = codes[i];
        show_ints("codes", shown, COUNT);
        show_floats("exact scale", &scale, 1);
    }
}

static void check_largest(void)
{
    for (long count = 1; count < 70; count += 3) {
        float *values = room((size_t)count * sizeof *values);
        for (long i = 0; i < count; i++)
            values[i] = (float)(draw() % 7);
        if (count % 2)
            values[count / 2] = NAN;
        int32_t at = (int32_t)rz_largest(values, count);
        show_ints("largest", &at, 1);
        free(values);
    }
}

/* --- a whole decoder --------------------------------------------------------------------------------- */

enum { HIDDEN = 62, INNER = 96, HEADS = 4, KV_HEADS = 2, DIM = 32, VOCABULARY = 83, LAYERS = 2, TOKENS_OF_BLOCK = 16, KV_BLOCKS = 16,
       TOKENS = 150 };

static float *floats_of(long count, float base, float spread)
{
    float *values = room((size_t)(count + 64) * sizeof *values);
    for (long i = 0; i < count; i++)
        values[i] = base + spread * draw_float();
    return values;
}

static rz_linear linear_of(long outputs, long inputs, int biased)
{
    bf16 *weights = room((size_t)(outputs * inputs) * 2), *packed = room(rz_packed_bytes(outputs, inputs));
    for (long i = 0; i < outputs * inputs; i++)
        weights[i] = to_bf16_of(0.25f * draw_float());
    rz_pack(packed, weights, outputs, inputs, inputs, 0, outputs, outputs);
    free(weights);
    return (rz_linear){ .packed = packed, .bias = biased ? floats_of((outputs + 31) / 32 * 32, 0, 0.1f) : NULL,
                        .outputs = (int32_t)outputs, .inputs = (int32_t)inputs };
}

/* What each step's sequence has, where its model's linears are adapted. */
static int32_t adapter = -1;
static int64_t adapter_slots = 0;

enum { SLOTS = 4, CODED = 3, COLUMNS_BETWEEN = 16 };

/* Factors of 6 columns for one module, as Python lays them out. */
static rz_low_rank *factors_of(const rz_linear *linear)
{
    const long columns = 6, taken = (linear->outputs + LANES - 1) / LANES, pairs = (linear->inputs + 1) / 2;
    bf16 *a = room((size_t)(COLUMNS_BETWEEN * pairs * 2) * 2), *b = room((size_t)(taken * LANES * columns) * 2);
    for (long pair = 0; pair < pairs; pair++)
        for (long i = 0; i < 2 * columns; i++)
            a[pair * 2 * LANES + i] = to_bf16_of(0.25f * draw_float());
    for (long i = 0; i < taken * LANES * columns; i++)
        b[i] = to_bf16_of(0.25f * draw_float());
    rz_low_rank *made = room(sizeof *made);
    *made = (rz_low_rank){ .shrink = a, .expand = { b }, .columns = COLUMNS_BETWEEN, .pairs = { columns / 2 } };
    return made;
}

/* Scales of 16 rows, and what they are of: codes of any value. */
static uint8_t *draw_codes(uint8_t *to, long count)
{
    for (int i = 0; i < LANES; i++, to += sizeof(bf16)) {
        const bf16 scale = to_bf16_of(0.002f + 0.001f * draw_float());
        memcpy(to, &scale, sizeof scale);
    }
    for (long i = 0; i < count; i++)
        to[i] = (uint8_t)(int)(127.0f * draw_float());
    return to + count;
}

/* The same as codes, of as many columns as one block of A has. */
static rz_low_rank *codes_of(const rz_linear *linear)
{
    const long pairs = (linear->inputs + 1) / 2, taken = (linear->outputs + LANES - 1) / LANES;
    rz_low_rank *made = room(sizeof *made);
    *made = (rz_low_rank){ .columns = COLUMNS_BETWEEN, .pairs = { COLUMNS_BETWEEN / 2 }, .coded = 1 };
    uint8_t *a = room(rz_shrink_bytes(made, linear->inputs)), *b = room((size_t)taken * rz_expand_bytes(made, COLUMNS_BETWEEN / 2));
    made->shrink = a;
    made->expand[0] = b;
    for (long pair = 0; pair < pairs; pair += 64)
        a = draw_codes(a, least(64, pairs - pair) * 2 * LANES);
    for (long block = 0; block < taken; block++)
        b = draw_codes(b, COLUMNS_BETWEEN * LANES);
    return made;
}

/* Has `linear` take adapters in all slots but one. */
static void adapt(rz_linear *linear)
{
    const int32_t taken = (linear->outputs + LANES - 1) / LANES, halves = (linear->outputs + PANEL - 1) / PANEL * 2;
    int32_t *first = room((size_t)(halves + 1) * sizeof *first);
    rz_adapted_block *entries = room((size_t)taken * sizeof *entries);
    for (int32_t i = 0; i <= halves; i++)
        first[i] = i < taken ? i : taken;
    for (int32_t i = 0; i < taken; i++)
        entries[i] = (rz_adapted_block){ 0, i };
    const rz_low_rank **slots = room(SLOTS * sizeof *slots);
    slots[0] = factors_of(linear);
    slots[2] = factors_of(linear);
    slots[CODED] = codes_of(linear);
    rz_adapted *adapted = room(sizeof *adapted);
    *adapted = (rz_adapted){ first, entries, slots };
    linear->adapted = adapted;
}

/* Logits of the last token of `step`. */
static void forward_tokens(rz_decoder *decoder, int first, int count, float *logits)
{
    int32_t ids[TOKENS], positions[TOKENS], slots[TOKENS], tables[KV_BLOCKS], last = count - 1, context = first + count;
    int32_t pairs[2 * KV_BLOCKS];
    int64_t compressions = 0;
    _Atomic int64_t progress = 0;
    for (int i = 0; i < count; i++) {
        ids[i] = (first + i) * 7 % VOCABULARY;
        positions[i] = first + i;
        slots[i] = first + i;
    }
    for (int block = 0; block < KV_BLOCKS; block++)
        tables[block] = (block + 1) * TOKENS_OF_BLOCK <= context ? KV_BLOCKS + block : block;
    for (int block = first / TOKENS_OF_BLOCK; (block + 1) * TOKENS_OF_BLOCK <= context; block++, compressions++) {
        pairs[2 * compressions] = block;
        pairs[2 * compressions + 1] = KV_BLOCKS + block;
    }
    rz_step step = { .tokens = count, .sequences = 1, .sampled = 1, .table_blocks = (context + TOKENS_OF_BLOCK - 1) / TOKENS_OF_BLOCK,
                     .token_ids = ids, .positions = positions, .slots = slots, .query_lens = &count,
                     .context_lens = &context, .block_tables = tables, .sample_rows = &last, .logits = logits,
                     .progress = &progress, .compressions = pairs, .num_compressions = compressions, .adapters = &adapter,
                     .num_adapters = adapter_slots ? 1 : 0, .adapter_slots = adapter_slots, .shrunk_columns = COLUMNS_BETWEEN };
    must(rz_decoder_forward(decoder, &step) == RZ_OK, "a step fails");
    float value;
    int64_t index;
    rz_decoder_largest(decoder, logits, 1, VOCABULARY, &value, &index);
    must(value == logits[index], "rz_decoder_largest");
    float fused;
    int64_t fused_index;
    step.logits = NULL;
    step.values = &fused;
    step.indices = &fused_index;
    must(rz_decoder_forward(decoder, &step) == RZ_OK, "a step fails");
    must(fused == value && fused_index == index, "the largest logit while it is computed");
}

/* Of a model: logits are those of its last token, however the tokens before it are cut. */
static void check_steps(const char *name, const rz_model *model)
{
    rz_decoder *decoder = rz_decoder_new(model, 2, NULL);
    float whole[VOCABULARY], alone[VOCABULARY], pieces[VOCABULARY];
    forward_tokens(decoder, 0, TOKENS, whole);
    show_floats(name, whole, VOCABULARY);
    forward_tokens(decoder, TOKENS - 1, 1, alone);
    must(!memcmp(whole, alone, sizeof whole), "a token, of its chunk");
    for (int first = 0; first < TOKENS; first += 37)
        forward_tokens(decoder, first, first + 37 < TOKENS ? 37 : TOKENS - first, pieces);
    must(!memcmp(whole, pieces, sizeof whole), "a token, of how its prompt was cut");
    rz_decoder_free(decoder);
}

static void check_decoder(int codec, int activation, float cap)
{
    const long plane = (long)KV_BLOCKS * 2 * KV_HEADS, inner = (long)TOKENS_OF_BLOCK * DIM;
    rz_layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (rz_layer){
            .attention_norm = floats_of(HIDDEN, 1, 0.1f), .feed_forward_norm = floats_of(HIDDEN, 1, 0.1f),
            .after_attention_norm = cap ? floats_of(HIDDEN, 1, 0.1f) : NULL, .query_norm = floats_of(DIM, 1, 0.1f),
            .key_norm = floats_of(DIM, 1, 0.1f), .qkv = linear_of((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 1),
            .output = linear_of(HIDDEN, HEADS * DIM, 0), .gate_up = linear_of(2 * INNER, HIDDEN, 0),
            .down = linear_of(HIDDEN, INNER, 1), .rotary = 0, .window = i ? 40 : 0, .scale = 1,
            .writable = room((size_t)(plane * inner) * 2), .codes = room((size_t)(plane * inner) * 2),
            .scales = room((size_t)plane * sizeof(float)), .num_writable = KV_BLOCKS, .codec = codec };
    rz_linear head = linear_of(VOCABULARY, HIDDEN, 0);
    rz_model model = { .layers = LAYERS, .hidden = HIDDEN, .intermediate = INNER, .num_heads = 1,
                       .heads = { { .q_heads = HEADS, .kv_heads = KV_HEADS, .lines = 2, .key_dim = DIM, .value_dim = DIM } },
                       .block_size = TOKENS_OF_BLOCK, .activation = activation, .rotary_dim = { DIM },
                       .num_writable = KV_BLOCKS, .num_quantized = KV_BLOCKS, .rows_in_embedding = VOCABULARY,
                       .ranks = 1, .eps = 1e-5f,
                       .attention_scale = 0.2f, .attention_cap = cap, .embedding_scale = 1, .residual_scale = 0.5f,
                       .logit_scale = 1, .logit_cap = cap, .layer = layers, .final_norm = floats_of(HIDDEN, 1, 0.1f),
                       .embedding = head, .head = head };
    float *frequencies = floats_of(DIM / 2, 0, 0);
    for (int i = 0; i < DIM / 2; i++)
        frequencies[i] = 1.0f / (float)(1 + i);
    model.frequencies[0] = frequencies;
    model.rotary_scale[0] = 1;
    check_steps("logits", &model);
    float plain[VOCABULARY], without[VOCABULARY];
    rz_decoder *decoder = rz_decoder_new(&model, 2, NULL);
    forward_tokens(decoder, 0, TOKENS, plain);
    rz_decoder_free(decoder);
    const uint32_t before = state;
    for (int i = 0; i < LAYERS; i++) {
        rz_linear *linears[] = { &layers[i].qkv, &layers[i].output, &layers[i].gate_up, &layers[i].down };
        for (int j = 0; j < 4; j++)
            adapt(linears[j]);
    }
    adapter_slots = SLOTS;
    adapter = 2;
    check_steps("adapted", &model);
    adapter = CODED;
    check_steps("coded", &model);
    adapter = 1;
    decoder = rz_decoder_new(&model, 2, NULL);
    forward_tokens(decoder, 0, TOKENS, without);
    must(!memcmp(plain, without, sizeof plain), "an adapter that is not there");
    rz_decoder_free(decoder);
    adapter = -1;
    adapter_slots = 0;
    state = before; /* what follows draws as ever */
}

/* Two layers that keep lines of 64 + 32 values, with and without query latents, the one rotated in halves, the other in
 * pairs that become halves. */
static void check_latents(int codec)
{
    enum { MANY = 50, PLAIN = 32, ROTATED = 32, RANK = 64, VALUES = 32, QUERIES = 96, LINE = RANK + ROTATED };
    const long inner = (long)TOKENS_OF_BLOCK * LINE;
    rz_layer layers[2];
    rz_latent latents[2];
    for (int i = 0; i < 2; i++) {
        const int queries = i ? MANY * (PLAIN + ROTATED) : QUERIES;
        latents[i] = (rz_latent){
            .keys = linear_of(MANY * RANK, PLAIN, 0), .values = linear_of(MANY * VALUES, RANK, 0),
            .norm = floats_of(RANK, 1, 0.1f), .plain = PLAIN, .rotated = ROTATED, .rank = RANK, .value_dim = VALUES,
            .pairs = i, .position_span = 40, .position_growth = 0.2f, .query_eps = 1e-6f, .eps = 1e-6f };
        if (!i) {
            latents[i].query_b = linear_of(MANY * (PLAIN + ROTATED), QUERIES, 0);
            latents[i].query_norm = floats_of(QUERIES, 1, 0.1f);
            latents[i].query_rank = QUERIES;
        }
        layers[i] = (rz_layer){
            .attention_norm = floats_of(HIDDEN, 1, 0.1f), .feed_forward_norm = floats_of(HIDDEN, 1, 0.1f),
            .qkv = linear_of(queries + LINE, HIDDEN, 1), .output = linear_of(HIDDEN, MANY * VALUES, 0),
            .gate_up = linear_of(2 * INNER, HIDDEN, 0), .down = linear_of(HIDDEN, INNER, 1), .latent = &latents[i],
            .writable = room((size_t)(KV_BLOCKS * inner) * 2), .codes = room((size_t)(KV_BLOCKS * inner) * 2),
            .scales = room(KV_BLOCKS * sizeof(float)), .num_writable = KV_BLOCKS, .codec = codec };
    }
    rz_linear head = linear_of(VOCABULARY, HIDDEN, 0);
    rz_model model = { .layers = 2, .hidden = HIDDEN, .intermediate = INNER, .num_heads = 1,
                       .heads = { { .q_heads = MANY, .kv_heads = 1, .lines = 1, .key_dim = LINE, .value_dim = RANK } },
                       .block_size = TOKENS_OF_BLOCK, .activation = RZ_SILU, .rotary_dim = { ROTATED },
                       .num_writable = KV_BLOCKS, .num_quantized = KV_BLOCKS, .rows_in_embedding = VOCABULARY,
                       .ranks = 1, .eps = 1e-5f,
                       .attention_scale = 0.2f, .embedding_scale = 1, .residual_scale = 0.5f, .logit_scale = 1,
                       .layer = layers, .final_norm = floats_of(HIDDEN, 1, 0.1f), .embedding = head, .head = head };
    float *frequencies = floats_of(ROTATED / 2, 0, 0);
    for (int i = 0; i < ROTATED / 2; i++)
        frequencies[i] = 1.0f / (float)(1 + i);
    model.frequencies[0] = frequencies;
    model.rotary_scale[0] = 1;
    check_steps("latents", &model);
}

/* --- attention over codes of int8 -------------------------------------------------------------------- */

enum { CODED_KEYS = 192, CODED_ROWS = 3, CODED_HEADS = 2 }; /* rows of a block behind the keys */

/* What one query comes to, by the definition, from keys [first, last). */
static void attend_slowly(const rz_attention_shape *shape, const rz_cache *cache, const int32_t *table, const bf16 *query,
                          int first, int last, double *out)
{
    const int d = shape->key_dim, size = shape->block_size;
    double total = 0;
    for (int i = 0; i < d; i++)
        out[i] = 0;
    for (int key = first; key < last; key++) {
        const long plane = (table[key / size] - cache->num_writable) * 2L;
        const int8_t *codes = (const int8_t *)cache->codes + (plane * size + key % size) * d;
        double score = 0;
        for (int i = 0; i < d; i++)
            score += (double)bf16_to_float(query[i]) * codes[i] * cache->scales[plane];
        const double weight = exp(score * shape->scale);
        total += weight;
        for (int i = 0; i < d; i++)
            out[i] += weight * codes[(long)size * d + i] * cache->scales[plane + 1];
    }
    for (int i = 0; i < d; i++)
        out[i] /= total;
}

/* Codes of keys and values in turns, `size` lines of each, become groups; taken apart they are what they were. */
static void put_in_groups(int8_t *codes, int lines, int d, int size)
{
    int8_t *packed = room((size_t)(LANES * d)), *back = room((size_t)(LANES * d));
    for (int line = 0; line < lines; line += LANES, codes += LANES * d) {
        if (line / size % 2 == 0)
            rz_pack_as_columns(packed, codes, d);
        for (int column = 0; column < d && line / size % 2; column += COLUMNS)
            rz_pack_as_lines(packed + column * LANES, codes, column, d);
        if (line / size % 2)
            rz_unpack_lines(back, packed, d);
        else
            rz_unpack_columns(back, packed, d);
        must(!memcmp(back, codes, (size_t)(LANES * d)), "a group taken apart");
        memcpy(codes, packed, (size_t)(LANES * d));
    }
}

/* Rounds of keys that are all codes, in blocks of `size`: near what they are by the definition, and a row the same bits
 * alone. */
static void check_coded_attention(int d, int size, int window)
{
    const int blocks = CODED_KEYS / size, width = CODED_HEADS * d;
    int32_t *table = room((size_t)blocks * sizeof *table), slots[CODED_ROWS] = { 0 };
    bf16 *writable = room((size_t)(2 * size * d) * sizeof *writable);
    bf16 *queries = room((size_t)(CODED_ROWS * width) * sizeof *queries);
    int8_t *codes = room((size_t)(blocks * 2 * size * d));
    float *scales = room((size_t)(blocks * 2) * sizeof *scales);
    for (int i = 0; i < blocks; i++)
        table[i] = 1 + (i * 5 + 2) % blocks;
    for (int i = 0; i < blocks * 2 * size * d; i++)
        codes[i] = (int8_t)((int)(draw() % 255) - 127);
    for (int i = 0; i < blocks * 2; i++)
        scales[i] = 0.001f + (float)(draw() % 1000) * 1e-5f;
    for (int i = 0; i < CODED_ROWS * width; i++)
        queries[i] = to_bf16_of(4 * draw_float());
    const rz_attention_shape shape = { 1, 2, d, d, size, window, 0.125f, 0, NULL };
    const rz_cache cache = { writable, codes, scales, 1, RZ_CODEC_INT8 };
    float together[CODED_ROWS * CODED_HEADS][MAX_VALUE_DIM + 2], alone[CODED_HEADS][MAX_VALUE_DIM + 2];
    float apart[CODED_ROWS * CODED_HEADS][MAX_VALUE_DIM + 2];
    void *scratch = aligned_alloc(64, rz_attention_scratch());
    rz_attention_part part = { table, slots, queries, NULL, together[0], width, width, CODED_ROWS, 0, 0, CODED_HEADS,
                               CODED_KEYS, 0, CODED_KEYS, 1, 0, 1, 1 };
    rz_attend(&shape, &cache, &part, NULL, scratch);
    const long result = CODED_HEADS * (d + 2);
    for (int row = 0; row < CODED_ROWS; row++) {
        part.rows = 1, part.position = CODED_KEYS + row, part.queries = queries + row * width, part.partial = alone[0];
        rz_attend(&shape, &cache, &part, &part, scratch);
        must(!memcmp(alone, together[0] + row * result, (size_t)result * sizeof(float)), "a row of attention, of its neighbours");
        for (int head = 0; head < CODED_HEADS; head++) {
            double expected[MAX_VALUE_DIM];
            const float *found = alone[0] + head * (d + 2);
            attend_slowly(&shape, &cache, table, queries + row * width + head * d,
                          window ? CODED_KEYS + row - window + 1 : 0, CODED_KEYS, expected);
            for (int i = 0; i < d; i++)
                must(fabs(found[i] / found[d + 1] - expected[i]) < 2e-4, "attention over codes, of what it is by definition");
        }
    }
    show_floats("attention", together[0], result);
    if (d % COLUMNS || size % LANES)
        return;
    put_in_groups(codes, blocks * 2 * size, d, size);
    const rz_cache grouped = { writable, codes, scales, 1, RZ_CODEC_INT8, 1 };
    part.rows = CODED_ROWS, part.position = CODED_KEYS, part.queries = queries, part.partial = apart[0];
    rz_attend(&shape, &grouped, &part, NULL, scratch);
    must(!memcmp(apart, together, (size_t)(CODED_ROWS * result) * sizeof(float)), "attention over groups, of that in order");
}

#ifndef ONLY_TILES
#define ONLY_TILES 0 /* 1: a compiler that sees it leaves out what lies behind them, which is most of its work */
#endif

/* Without a word all of it; `few` leaves out variants of decoders, which take a minute in an emulator. */
int main(int arguments, char **words)
{
    const char *which = arguments > 1 ? words[1] : "";
    const int few = !strcmp(which, "few");
    check_vectors();
    check_integers();
    check_tiles(40, 70);
    check_tiles(64, 1024);
    if (ONLY_TILES) {
        check_all_spans();
        return 0;
    }
    check_codecs();
    check_largest();
    check_decoder(RZ_CODEC_INT8, RZ_SILU, 0);
    if (!few) {
        check_decoder(RZ_CODEC_FP8, RZ_GELU_TANH, 0);
        check_decoder(RZ_CODEC_NONE, RZ_GELU_TANH, 20);
        check_latents(RZ_CODEC_NONE);
    }
    check_latents(RZ_CODEC_INT8);
    for (int bits = 2; bits <= 8; bits += bits < 6 ? 1 : 2) {
        check_quantized(bits, 32, RZ_NO_MINIMUMS, 0);
        check_quantized(bits, bits == 6 ? 16 : 128, RZ_MINIMUMS, 0);
        check_quantized(bits, 64, RZ_ZEROS, 0);
    }
    check_quantized(4, 32, RZ_NO_MINIMUMS, 1);
    check_float_codes(8);
    check_float_codes(4);
    check_all_spans();
    check_spans(2, 16, 16, RZ_MINIMUMS, 0);
    check_spans(5, 32, 8, RZ_MINIMUMS, 0);
    check_spans(6, 32, 4, RZ_NO_MINIMUMS, 0);
    check_coded_attention(64, 16, 0);
    check_coded_attention(128, 32, 100);
    check_coded_attention(96, 8, 100);
    check_coded_attention(32, 24, 0);
    check_panels(64);
    check_panels(70);
    check_short_exponents(64);
    check_short_exponents(2300);
    return 0;
}
