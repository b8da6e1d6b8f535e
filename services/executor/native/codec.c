/* See codec.h. */
#include "codec.h"

#include <float.h>
#include <string.h>

void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale)
{
    f32 peak = f32_zero();
    for (long i = 0; i < count; i += LANES)
        peak = f32_max(peak, f32_abs(f32_load_bf16(values + i)));
    float unit = f32_largest(peak) / codec_limit(codec);
    unit = unit > FLT_MIN ? unit : FLT_MIN;
    *scale = unit;
    for (long i = 0; i < count; i += LANES)
        codec_store(codec, (uint8_t *)codes + i, f32_div(f32_load_bf16(values + i), f32_set1(unit)));
}

void rz_compress_plane(const rz_cache *cache, long count, long writable, long quantized)
{
    const bf16 *from = cache->writable + writable * count;
    if (cache->codec == RZ_CODEC_NONE)
        memcpy((bf16 *)cache->codes + quantized * count, from, (size_t)count * sizeof(bf16));
    else
        rz_encode(cache->codec, from, count, (uint8_t *)cache->codes + quantized * count,
                  (float *)cache->scales + quantized);
}
