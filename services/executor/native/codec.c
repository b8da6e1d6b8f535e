/* See codec.h. */
#include "codec.h"

#include <float.h>
#include <string.h>

#include "digits.h"

/* What `count` values are counted in. */
static float unit_of(int codec, const bf16 *values, long count)
{
    f32 peak = f32_zero();
    for (long i = 0; i < count; i += LANES)
        peak = f32_max(peak, f32_abs(f32_load_bf16(values + i)));
    const float unit = f32_largest(peak) / codec_limit(codec);
    return unit > FLT_MIN ? unit : FLT_MIN;
}

static void encode_rows(int codec, const bf16 *values, long count, float unit, uint8_t *codes)
{
    for (long i = 0; i < count; i += LANES)
        codec_store(codec, codes + i, f32_div(f32_load_bf16(values + i), f32_set1(unit)));
}

void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale)
{
    *scale = unit_of(codec, values, count);
    encode_rows(codec, values, count, *scale, codes);
}

/* `count` tokens of `width` values: in groups. */
static void store_groups(int codec, const bf16 *values, int count, int width, int which, float unit, int8_t *groups)
{
    for (const int8_t *end = groups + (long)count * width; groups < end; groups += LANES * width, values += LANES * width) {
        int8_t lines[LANES * MAX_KEY_DIM];
        encode_rows(codec, values, (long)LANES * width, unit, (uint8_t *)lines);
        if (which == 0)
            rz_pack_as_columns(groups, lines, width);
        for (int column = 0; column < width && which; column += COLUMNS)
            rz_pack_as_lines(groups + column * LANES, lines, column, width);
    }
}

void rz_compress_plane(const rz_cache *cache, int size, int width, int which, long writable, long quantized)
{
    const long count = (long)size * width;
    const bf16 *from = cache->writable + writable * count;
    if (cache->codec == RZ_CODEC_NONE) {
        memcpy((bf16 *)cache->codes + quantized * count, from, (size_t)count * sizeof(bf16));
        return;
    }
    uint8_t *codes = (uint8_t *)cache->codes + quantized * count;
    float *scale = (float *)cache->scales + quantized;
    if (!cache->in_groups) {
        rz_encode(cache->codec, from, count, codes, scale);
        return;
    }
    *scale = unit_of(cache->codec, from, count);
    store_groups(cache->codec, from, size, width, which, *scale, (int8_t *)codes);
}
