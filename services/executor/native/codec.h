/* Compression of full KV blocks: eight bits per value and one scale per block and head (kv_cache/codecs.py). */
#ifndef RZ_CODEC_H
#define RZ_CODEC_H

#include "attention.h"

/* Compresses the keys or values of one head of one block, `count` of them (a multiple of 16).
 * The same codes and scales as the Python codec gives. */
void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale);

/* A block of a layer: all heads' keys and values, hot id to cold id. */
void rz_compress_block(const rz_cache *cache, int kv_heads, int block_size, int head_dim, long hot, long cold);

#endif
