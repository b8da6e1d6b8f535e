/* Compression of full KV blocks: eight bits per value and one scale per block and head (kv_cache/codecs.py). */
#ifndef RZ_CODEC_H
#define RZ_CODEC_H

#include "attention.h"

/* Compresses the keys or values of one head of one block, `count` of them (a multiple of 16).
 * The same codes and scales as the Python codec gives. */
void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale);

/* The same from a hot plane of a layer's cache to a cold one, both counted in planes of `count` values from the first
 * hot block on, and from the first cold one. */
void rz_compress_plane(const rz_cache *cache, long count, long hot, long cold);

#endif
