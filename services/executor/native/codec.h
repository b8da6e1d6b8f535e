/* Compression of full KV blocks: eight bits per value and one scale per block and head (kv_cache/codecs.py). */
#ifndef RZ_CODEC_H
#define RZ_CODEC_H

#include "attention.h"

RZ_INLINE f32 limited(f32 values, float limit)
{
    return f32_min(f32_max(values, f32_set1(-limit)), f32_set1(limit));
}

/* Rounded to what e4m3 can hold, which float16 holds too; its bits are float16's, moved (vector_avx512.h). */
RZ_INLINE void store_e4m3(uint8_t *to, f32 values)
{
    values = limited(values, 448.0f);
    f32 step = f32_mul(f32_max(f32_power_below(values), f32_set1(1.0f / 64)), f32_set1(0.125f));
    f32 rounded = f32_mul(f32_round(f32_div(values, step)), step);
    uint16_t half[LANES];
    f32_store_f16(half, f32_mul(rounded, f32_set1(1.0f / 256)));
    for (int i = 0; i < LANES; i++)
        to[i] = (uint8_t)((half[i] >> 7 & 0x7f) | (half[i] >> 8 & 0x80));
}

/* --- the codecs: each is what these say of its number, which is that of kv_cache/codecs.py ------------ */

enum { RZ_CODEC_NONE = 0, RZ_CODEC_INT8 = 1, RZ_CODEC_FP8 = 2, RZ_CODECS };

/* The largest code. */
RZ_INLINE float codec_limit(int codec)
{
    return codec == RZ_CODEC_FP8 ? 448.0f : 127.0f;
}

/* Whether codes are integers of eight bits, which attention multiplies as they are kept (digits.h). */
RZ_INLINE int codec_is_integer(int codec)
{
    return codec == RZ_CODEC_INT8;
}

/* A code's number over what `codec_load` makes of it. */
RZ_INLINE float codec_unit(int codec)
{
    return codec == RZ_CODEC_FP8 ? 256.0f : 1.0f;
}

/* 2 * LANES codes. */
RZ_INLINE void codec_load(int codec, const void *codes, f32 *first, f32 *second)
{
    if (codec == RZ_CODEC_FP8) {
        f32_load_two_e4m3(codes, first, second);
    } else {
        *first = f32_load_i8(codes);
        *second = f32_load_i8((const int8_t *)codes + LANES);
    }
}

/* LANES codes of values over their scale. */
RZ_INLINE void codec_store(int codec, void *codes, f32 values)
{
    if (codec == RZ_CODEC_FP8)
        store_e4m3(codes, values);
    else
        f32_store_i8(codes, limited(values, codec_limit(codec)));
}

/* Compresses the keys or values of one head of one block, `count` of them (a multiple of 16).
 * The same codes and scales as the Python codec gives. */
void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale);

/* The same from a writable plane of a layer's cache to a quantized one, of `size` keys (which = 0) or values of `width`,
 * both counted in planes from the first writable block on, and from the first quantized one. */
void rz_compress_plane(const rz_cache *cache, int size, int width, int which, long writable, long quantized);

#endif
