/* Scales and codes of packed panels, unpacked: see quantized_layout.h. */
#include "quantized_quads.h"

RZ_INLINE void unpack_block(const int bits, const int has_table, const int has_zeros, const uint8_t *block,
                            const amends *amend, int first, int end, uint8_t *to)
{
#pragma GCC unroll 8
    for (int quad = first; quad < end; quad++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            bytes codes = quad_codes(bits, block, quad, side);
            if (has_table)
                codes = bytes_look_up(amend->table, codes);
            if (has_zeros)
                codes = bytes_add(codes, amend->more[side]);
            bytes_store(to + (quad * 2 + side) * LINE_BYTES, codes);
        }
}

/* Those of the groups of a slab; of a group that is summed in parts, its own for each. `minimums`: whether there are
 * any; `simple`: groups are summed at once, and have no zero points. */
RZ_INLINE void unpack_scales_of(const int type, const int super, const int two, const int minimums, const int simple,
                                const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const long many = blocks_together(format), halves = format->group == BLOCK / 2 ? 2 : 1;
    const long parts = (blocks * halves + many - 1) / many, begin = first * halves / many;
    /* How many parts a group is summed in: larger ones than MANY blocks. */
    const long times = !simple && format->group > MANY * BLOCK ? format->group / (MANY * BLOCK) : 1;
    const int zeros = !simple && format->minimums == RZ_ZEROS;
    long group = simple || format->group ? begin / times : 0, part = simple ? 0 : begin % times;
    long over = two ? group / format->per : 0, under = two ? group % format->per : 0;
    for (long i = 0; i < parts; i++) {
        const uint8_t *scales = group_at(at, at->scales, type_bytes(type), group);
        const uint8_t *least = group_at(at, at->minimums, zeros ? 1 : type_bytes(type), group);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const long here = side * LANES, there = over * PANEL + side * LANES;
            f32 scale = scales_at(scales, type, here);
            if (two)
                scale = f32_mul(scale, scales_at(at->supers, super, there));
            f32_store(to->scales[i] + side * LANES, scale);
            if (!minimums)
                continue;
            f32 minimum = scales_at(least, zeros ? RZ_U8 : type, here);
            if (zeros || two)
                minimum = f32_mul(minimum, zeros ? scale : scales_at(at->super_minimums, super, there));
            f32_store(to->minimums[i] + side * LANES, f32_sub(f32_zero(), minimum));
        }
        if ((simple || format->group) && ++part == times) {
            part = 0;
            group++;
            if (two && ++under == format->per) {
                under = 0;
                over++;
            }
        }
    }
}

void rz_unpack_scales(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const int type = format->scale_type, super = format->super_type, two = format->per > 0;
    const int minimums = has_minimums(format);
    const int simple = format->group && format->group <= MANY * BLOCK && !(minimums && format->minimums == RZ_ZEROS);
#define UNPACK_SCALES(type, super, two, minimums, simple) \
    unpack_scales_of(type, super, two, minimums, simple, format, at, first, blocks, to)
    if (simple && type == RZ_F16 && !two && !minimums)
        UNPACK_SCALES(RZ_F16, 0, 0, 0, 1);
    else if (simple && type == RZ_F16 && !two)
        UNPACK_SCALES(RZ_F16, 0, 0, 1, 1);
    else if (simple && type == RZ_U8 && two && super == RZ_F16 && minimums)
        UNPACK_SCALES(RZ_U8, RZ_F16, 1, 1, 1);
    else if (simple && type == RZ_I8 && two && super == RZ_F16 && !minimums)
        UNPACK_SCALES(RZ_I8, RZ_F16, 1, 0, 1);
    else
        UNPACK_SCALES(type, super, two, minimums, 0);
}

/* What is added to the codes of one group for its zero points: 2 ** bits less the zero point, in every byte. */
RZ_INLINE void amend_zeros(amends *amend, const uint8_t *zeros, int bits)
{
    for (int side = 0; side < 2; side++) {
        int32_t more[LANES];
        i32 here = i32_sub(i32_set1(1 << bits), i32_load_u8(zeros + side * LANES));
        i32_store(more, i32_mul(here, i32_set1(0x01010101)));
        amend->more[side] = bytes_load(more);
    }
}

void rz_unpack_zeros(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const long many = blocks_together(format);
    for (long i = 0; i * many < blocks; i++) {
        amends amend;
        const long group = format->group ? (first + i * many) * BLOCK / format->group : 0;
        amend_zeros(&amend, group_at(at, at->minimums, 1, group), format->bits);
        bytes_store(to->added[i], amend.more[0]);
        bytes_store(to->added[i] + LINE_BYTES, amend.more[1]);
    }
}

RZ_INLINE void unpack_codes_of(const int bits, const int has_table, const int has_zeros, const rz_format *format,
                            const places *at, long first, long blocks, uint8_t *to)
{
    amends amend = { 0 };
    if (has_table) {
        const int shift = unpacked_offset(format) - (has_zeros ? 1 << bits : 0);
        amend.table = bytes_add(bytes_repeat16(format->table), bytes_set1((uint8_t)shift));
    }
    for (long block = first; block < first + blocks; block++, to += BLOCK_BYTES) {
        const uint8_t *from = block_at(at, bits, block);
        ask_for(from + at->ahead, block_bytes(bits));
        if (has_zeros && format->group == BLOCK / 2) {
            for (int half = 0; half < 2; half++) {
                amend_zeros(&amend, group_at(at, at->minimums, 1, block * 2 + half), bits);
                unpack_block(bits, has_table, has_zeros, from, &amend, half * QUADS / 2, (half + 1) * QUADS / 2, to);
            }
            continue;
        }
        if (has_zeros)
            amend_zeros(&amend, group_at(at, at->minimums, 1, format->group ? block * BLOCK / format->group : 0), bits);
        unpack_block(bits, has_table, has_zeros, from, &amend, 0, QUADS, to);
    }
}

void rz_unpack_codes(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const int zeros = format->minimums == RZ_ZEROS;
    to->codes = to->unpacked;
#define UNPACK_OF(n, table, zeros) unpack_codes_of(n, table, zeros, format, at, first, blocks, to->unpacked)
#define UNPACK(n) \
    case n: \
        if (format->has_table) \
            UNPACK_OF(n, 1, 0); \
        else if (zeros) \
            UNPACK_OF(n, 0, 1); \
        else \
            UNPACK_OF(n, 0, 0); \
        break
    switch (format->bits) {
        UNPACK(2);
        UNPACK(3);
        UNPACK(4);
        UNPACK(5);
        UNPACK(6);
    default:
        to->codes = block_at(at, 8, first);
    }
}

void rz_unpack_slab(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    rz_unpack_scales(format, at, first, blocks, to);
    rz_unpack_codes(format, at, first, blocks, to);
}
