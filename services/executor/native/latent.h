/* Latent attention: a token keeps one line for all heads, of whose latent a head's keys and values would be made.
 *
 *     line     [latent: r | rotated part of the key: d]
 *     a head   W_k [n, r] and W_v [v, r]
 *
 *     qkv ─┬─ (norm ─ query_b) ─ a head's [plain: n | turned: d] ─ plain W_k ─▶ [r | d] ─┬─ attention ─▶ [r] ─ W_v ─▶ [v]
 *          └─ [norm | rotation] ─▶ line ─────────────────────────────────────────────────┘
 *
 * So keys and values are never made: lines are attended to as they are, by all heads as by queries of one KV head. A row
 * and a key that it sees cost a head 2 (2r + d) operations this way, and 2 (n + d + v) with keys and values, which also
 * have to be made once for all rows of a chunk: fewer in long prompts (of DeepSeek V2 Lite 7% of a layer's operations at
 * 1,000 tokens), many more in all other steps. It is done this way in prompts too, because what a row comes to must not
 * depend on the step that it is in (ADR 0024), and rounding differs between the two ways.
 *
 * Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.
 */
#ifndef RZ_LATENT_H
#define RZ_LATENT_H

#include "state.h"

/* Of the projected rows: the step's lines go to the cache, and queries, for lines, to the workspace. Called by all
 * threads alike, as what follows. */
void rz_place_latents(rz_decoder *decoder, int thread, const rz_layer *layer);

/* Of the latents that the heads have attended: their outputs, bf16 [tokens, heads * value_dim]. */
const bf16 *rz_open_latents(rz_decoder *decoder, int thread, const rz_layer *layer);

/* Values of a row that the workspace must have room for: of what is projected, of queries and of what is attended. */
long rz_latent_projected(const rz_latent *latent);
long rz_latent_queries(const rz_latent *latent, const rz_heads *heads);
long rz_latent_attended(const rz_latent *latent, const rz_heads *heads);

#endif
