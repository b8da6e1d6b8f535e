/* Where the parts of a quantized weight lie: see quantized.h. */
#ifndef RZ_QUANTIZED_LAYOUT_H
#define RZ_QUANTIZED_LAYOUT_H

#include "gemm.h"
#include "quantized.h"

enum {
    QUADS = BLOCK / 4,                    /* of a block, on each side */
    LINE_BYTES = 64,                      /* of a quad, unpacked */
    BLOCK_BYTES = QUADS * 2 * LINE_BYTES, /* of a block, unpacked */
    PIECE = 4,                            /* blocks that lie together behind their scales */
    MANY = PIECE,                         /* blocks of a group that are summed before they are scaled, at most */
    WIDEST_GROUP = 512,                   /* columns */
    SLAB = 16,                            /* blocks that are unpacked together, at most */
    SLAB_GROUPS = 2 * SLAB,               /* at most */
};

/* A panel's slab, ready for tiles. */
typedef struct {
    _Alignas(LINE_BYTES) float scales[SLAB_GROUPS][PANEL];
    float minimums[SLAB_GROUPS][PANEL]; /* negative */
    union {
        uint8_t unpacked[SLAB * BLOCK_BYTES];
        uint8_t added[SLAB][2 * LINE_BYTES]; /* by groups: for zero points, to the codes of each side as they are packed */
    };
    const uint8_t *codes; /* [blocks][8 quads][left, right][64]; or as they are packed */
    ptrdiff_t ahead;      /* as in places, where codes are read as they are packed */
    size_t head;          /* likewise: bytes between pieces */
} slab;

RZ_INLINE long blocks_of(const rz_format *format)
{
    return (format->columns + BLOCK - 1) / BLOCK;
}

/* Groups of a row, of whole blocks. */
RZ_INLINE long groups_of(const rz_format *format)
{
    return format->group ? blocks_of(format) * BLOCK / format->group : 1;
}

RZ_INLINE long supers_of(const rz_format *format)
{
    return format->per ? (groups_of(format) + format->per - 1) / format->per : 0;
}

/* Blocks that share a scale and are summed before they are scaled; larger groups in parts. */
RZ_INLINE long blocks_together(const rz_format *format)
{
    if (format->group == 0 || format->group > MANY * BLOCK)
        return MANY;
    return format->group < BLOCK ? 1 : format->group / BLOCK;
}

/* Whether a row's minimum is added for each group; zero points of few bits become part of the codes. */
RZ_INLINE int has_minimums(const rz_format *format)
{
    return format->minimums == RZ_MINIMUMS || (format->minimums == RZ_ZEROS && format->bits == 8);
}

/* What unpacked codes are larger by than what they stand for. */
static int unpacked_offset(const rz_format *format)
{
    int offset = format->has_table ? 0 : format->offset;
    if (format->has_table)
        for (int code = 0; code < 16; code++)
            offset = -format->table[code] > offset ? -format->table[code] : offset;
    return offset + (format->minimums == RZ_ZEROS && format->bits < 8 ? 1 << format->bits : 0);
}

/* Of a block as it is packed; 7, and more than 8: unpacked, see WIDTHS. */
RZ_INLINE size_t block_bytes(int bits)
{
    return bits == 7 || bits > 8 ? (size_t)BLOCK_BYTES : (size_t)bits * BLOCK_BYTES / 8;
}

RZ_INLINE size_t whole_lines(size_t bytes)
{
    return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

RZ_INLINE size_t type_bytes(int type)
{
    return type == RZ_F32 ? 4 : type == RZ_F16 || type == RZ_BF16 ? 2 : 1;
}

/* 16 values of a type of scales. */
RZ_INLINE f32 scales_at(const uint8_t *from, const int type, long at)
{
    if (type == RZ_F16)
        return f32_load_f16((const uint16_t *)from + at);
    if (type == RZ_BF16)
        return f32_load_bf16((const bf16 *)from + at);
    if (type == RZ_F32)
        return f32_load((const float *)from + at);
    return f32_from_i32(type == RZ_U8 ? i32_load_u8(from + at) : i32_load_i8((const int8_t *)from + at));
}

/* Where a panel's parts lie. */
typedef struct {
    const uint8_t *scales, *minimums, *supers, *super_minimums, *codes; /* of the first group, or block */
    int minimum_type, shift;  /* a piece has 2^shift groups */
    size_t head, piece;       /* bytes of the scales that a piece begins with, and of all of it */
    ptrdiff_t ahead;          /* to the panel that comes, which is asked for while this one is computed; or 0 */
} places;

static places places_of(const rz_format *format, const uint8_t *panel)
{
    const int in_pieces = format->group && format->group <= PIECE * BLOCK, least = format->minimums == RZ_MINIMUMS;
    const size_t one = type_bytes(format->scale_type) * PANEL, super = type_bytes(format->super_type) * PANEL;
    const size_t supers = (size_t)supers_of(format) * super;
    places at = { .supers = panel, .super_minimums = panel + supers };
    at.minimum_type = format->minimums == RZ_ZEROS ? RZ_U8 : format->scale_type;
    const size_t groups = in_pieces ? (size_t)(PIECE * BLOCK / format->group) : (size_t)groups_of(format);
    const size_t scales = groups * one, minimums = format->minimums ? groups * PANEL * type_bytes(at.minimum_type) : 0;
    const size_t all = whole_lines(scales + minimums);
    const uint8_t *pieces = at.super_minimums + (least ? supers : 0);
    pieces = panel + whole_lines((size_t)(pieces - panel));
    at.scales = pieces;
    at.minimums = at.scales + scales;
    at.codes = pieces + all;
    at.head = in_pieces ? all : 0;
    at.piece = at.head + PIECE * block_bytes(format->bits);
    at.shift = in_pieces ? __builtin_ctz((unsigned)groups) : 30;
    return at;
}

/* Unpacks `blocks` blocks of the panel `at` from `first` on: scales and minimums by groups, where a group larger than MANY
 * blocks is one for each of its parts. */
void rz_unpack_scales(const rz_format *format, const places *at, long first, long blocks, slab *to);

/* Codes, with what zero points add to them; those of 8 bits are left where they are. Asks for the panel that comes. */
void rz_unpack_codes(const rz_format *format, const places *at, long first, long blocks, slab *to);

/* What zero points add to codes that are read as they are packed. */
void rz_unpack_zeros(const rz_format *format, const places *at, long first, long blocks, slab *to);

/* Scales and codes. */
void rz_unpack_slab(const rz_format *format, const places *at, long first, long blocks, slab *to);

/* Where group `group` of `of`, scales or minimums of `bytes` each, lies. */
RZ_INLINE const uint8_t *group_at(const places *at, const uint8_t *of, size_t bytes, long group)
{
    const size_t in_piece = (size_t)(group & ((1L << at->shift) - 1));
    return of + (size_t)(group >> at->shift) * at->piece + in_piece * PANEL * bytes;
}

RZ_INLINE const uint8_t *block_at(const places *at, int bits, long block)
{
    return at->codes + (size_t)(block / PIECE) * at->piece + (size_t)(block % PIECE) * block_bytes(bits);
}

#endif
