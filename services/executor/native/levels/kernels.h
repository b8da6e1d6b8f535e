/* All kernels of one level of instructions, in one translation unit. A level's file names the instructions and itself
 * (RZ_LEVEL) and includes this; nothing in it may run before rz_levels() (support.c) has named the level.
 *
 * Its functions are called after it: rz_pack of avx2 is rz_pack_avx2. */
#ifndef RZ_LEVEL
#error "a level's file defines RZ_LEVEL"
#endif

#define RZ_JOINED(name, level) name##_##level
#define RZ_NAMED(name, level) RZ_JOINED(name, level)
#define RZ_OF_LEVEL(name) RZ_NAMED(name, RZ_LEVEL)

#define rz_add_few RZ_OF_LEVEL(rz_add_few)
#define rz_attend RZ_OF_LEVEL(rz_attend)
#define rz_attend_codes RZ_OF_LEVEL(rz_attend_codes)
#define rz_attend_rows RZ_OF_LEVEL(rz_attend_rows)
#define rz_attention_scratch RZ_OF_LEVEL(rz_attention_scratch)
#define rz_best_of RZ_OF_LEVEL(rz_best_of)
#define rz_block_codes RZ_OF_LEVEL(rz_block_codes)
#define rz_cache_of RZ_OF_LEVEL(rz_cache_of)
#define rz_code_values RZ_OF_LEVEL(rz_code_values)
#define rz_compress_plane RZ_OF_LEVEL(rz_compress_plane)
#define rz_choices_are_sound RZ_OF_LEVEL(rz_choices_are_sound)
#define rz_choose_blocks RZ_OF_LEVEL(rz_choose_blocks)
#define rz_choose_experts RZ_OF_LEVEL(rz_choose_experts)
#define rz_decoder_draw RZ_OF_LEVEL(rz_decoder_draw)
#define rz_decoder_find_candidates RZ_OF_LEVEL(rz_decoder_find_candidates)
#define rz_decoder_forward RZ_OF_LEVEL(rz_decoder_forward)
#define rz_decoder_beside RZ_OF_LEVEL(rz_decoder_beside)
#define rz_decoder_free RZ_OF_LEVEL(rz_decoder_free)
#define rz_decoder_largest RZ_OF_LEVEL(rz_decoder_largest)
#define rz_decoder_multiply RZ_OF_LEVEL(rz_decoder_multiply)
#define rz_decoder_new RZ_OF_LEVEL(rz_decoder_new)
#define rz_decoder_recur RZ_OF_LEVEL(rz_decoder_recur)
#define rz_decoder_spent RZ_OF_LEVEL(rz_decoder_spent)
#define rz_decoder_take_candidates RZ_OF_LEVEL(rz_decoder_take_candidates)
#define rz_embed_rows RZ_OF_LEVEL(rz_embed_rows)
#define rz_encode RZ_OF_LEVEL(rz_encode)
#define rz_experts_prepared RZ_OF_LEVEL(rz_experts_prepared)
#define rz_float_codes_panel RZ_OF_LEVEL(rz_float_codes_panel)
#define rz_float_codes_span RZ_OF_LEVEL(rz_float_codes_span)
#define rz_end_products RZ_OF_LEVEL(rz_end_products)
#define rz_end_quarters RZ_OF_LEVEL(rz_end_quarters)
#define rz_expand RZ_OF_LEVEL(rz_expand)
#define rz_expand_blocks RZ_OF_LEVEL(rz_expand_blocks)
#define rz_expand_bytes RZ_OF_LEVEL(rz_expand_bytes)
#define rz_expansion_of RZ_OF_LEVEL(rz_expansion_of)
#define rz_fetch_ahead RZ_OF_LEVEL(rz_fetch_ahead)
#define rz_fetch_chosen RZ_OF_LEVEL(rz_fetch_chosen)
#define rz_first_of_tail RZ_OF_LEVEL(rz_first_of_tail)
#define rz_free_adapters RZ_OF_LEVEL(rz_free_adapters)
#define rz_free_tail RZ_OF_LEVEL(rz_free_tail)
#define rz_keep_rows RZ_OF_LEVEL(rz_keep_rows)
#define rz_largest RZ_OF_LEVEL(rz_largest)
#define rz_latent_attended RZ_OF_LEVEL(rz_latent_attended)
#define rz_latent_projected RZ_OF_LEVEL(rz_latent_projected)
#define rz_latent_queries RZ_OF_LEVEL(rz_latent_queries)
#define rz_leaves_rows RZ_OF_LEVEL(rz_leaves_rows)
#define rz_look_ahead RZ_OF_LEVEL(rz_look_ahead)
#define rz_make_tail RZ_OF_LEVEL(rz_make_tail)
#define rz_merge RZ_OF_LEVEL(rz_merge)
#define rz_most_together RZ_OF_LEVEL(rz_most_together)
#define rz_multiply RZ_OF_LEVEL(rz_multiply)
#define rz_multiply_experts RZ_OF_LEVEL(rz_multiply_experts)
#define rz_multiply_heads RZ_OF_LEVEL(rz_multiply_heads)
#define rz_multiply_quarter RZ_OF_LEVEL(rz_multiply_quarter)
#define rz_norm_rows RZ_OF_LEVEL(rz_norm_rows)
#define rz_norm_sampled RZ_OF_LEVEL(rz_norm_sampled)
#define rz_now RZ_OF_LEVEL(rz_now)
#define rz_open_latents RZ_OF_LEVEL(rz_open_latents)
#define rz_pack RZ_OF_LEVEL(rz_pack)
#define rz_packed_bytes RZ_OF_LEVEL(rz_packed_bytes)
#define rz_place_few RZ_OF_LEVEL(rz_place_few)
#define rz_place_latents RZ_OF_LEVEL(rz_place_latents)
#define rz_pack_as_columns RZ_OF_LEVEL(rz_pack_as_columns)
#define rz_pack_as_lines RZ_OF_LEVEL(rz_pack_as_lines)
#define rz_plan_adapters RZ_OF_LEVEL(rz_plan_adapters)
#define rz_plan_attention RZ_OF_LEVEL(rz_plan_attention)
#define rz_plan_recurrent RZ_OF_LEVEL(rz_plan_recurrent)
#define rz_prepared_row RZ_OF_LEVEL(rz_prepared_row)
#define rz_prove RZ_OF_LEVEL(rz_prove)
#define rz_quantize RZ_OF_LEVEL(rz_quantize)
#define rz_quantized_bytes RZ_OF_LEVEL(rz_quantized_bytes)
#define rz_quantized_pack RZ_OF_LEVEL(rz_quantized_pack)
#define rz_quantized_panel RZ_OF_LEVEL(rz_quantized_panel)
#define rz_quantized_panel_bytes RZ_OF_LEVEL(rz_quantized_panel_bytes)
#define rz_quantized_row RZ_OF_LEVEL(rz_quantized_row)
#define rz_reads_some RZ_OF_LEVEL(rz_reads_some)
#define rz_recur_rows RZ_OF_LEVEL(rz_recur_rows)
#define rz_recurrent_channels RZ_OF_LEVEL(rz_recurrent_channels)
#define rz_recurrent_inner RZ_OF_LEVEL(rz_recurrent_inner)
#define rz_recurrent_projected RZ_OF_LEVEL(rz_recurrent_projected)
#define rz_reserve_attention RZ_OF_LEVEL(rz_reserve_attention)
#define rz_rotate RZ_OF_LEVEL(rz_rotate)
#define rz_round_row RZ_OF_LEVEL(rz_round_row)
#define rz_rounded_bytes RZ_OF_LEVEL(rz_rounded_bytes)
#define rz_rounded_in RZ_OF_LEVEL(rz_rounded_in)
#define rz_run_experts RZ_OF_LEVEL(rz_run_experts)
#define rz_run_rows RZ_OF_LEVEL(rz_run_rows)
#define rz_run_stage RZ_OF_LEVEL(rz_run_stage)
#define rz_short_exponents_pack RZ_OF_LEVEL(rz_short_exponents_pack)
#define rz_short_exponents_panel RZ_OF_LEVEL(rz_short_exponents_panel)
#define rz_short_exponents_panel_bytes RZ_OF_LEVEL(rz_short_exponents_panel_bytes)
#define rz_short_exponents_span RZ_OF_LEVEL(rz_short_exponents_span)
#define rz_shrink RZ_OF_LEVEL(rz_shrink)
#define rz_shrink_block RZ_OF_LEVEL(rz_shrink_block)
#define rz_shrink_bytes RZ_OF_LEVEL(rz_shrink_bytes)
#define rz_shrink_rows RZ_OF_LEVEL(rz_shrink_rows)
#define rz_shrinks RZ_OF_LEVEL(rz_shrinks)
#define rz_store_numbers RZ_OF_LEVEL(rz_store_numbers)
#define rz_score_few RZ_OF_LEVEL(rz_score_few)
#define rz_spans_panel RZ_OF_LEVEL(rz_spans_panel)
#define rz_sum_over_ranks RZ_OF_LEVEL(rz_sum_over_ranks)
#define rz_summarise RZ_OF_LEVEL(rz_summarise)
#define rz_tap_rows RZ_OF_LEVEL(rz_tap_rows)
#define rz_tile RZ_OF_LEVEL(rz_tile)
#define rz_tile_operands RZ_OF_LEVEL(rz_tile_operands)
#define rz_tiles RZ_OF_LEVEL(rz_tiles)
#define rz_turn_sums RZ_OF_LEVEL(rz_turn_sums)
#define rz_unpack_codes RZ_OF_LEVEL(rz_unpack_codes)
#define rz_unpack_columns RZ_OF_LEVEL(rz_unpack_columns)
#define rz_unpack_lines RZ_OF_LEVEL(rz_unpack_lines)
#define rz_unpack_row RZ_OF_LEVEL(rz_unpack_row)
#define rz_unpack_rows RZ_OF_LEVEL(rz_unpack_rows)
#define rz_unpack_scales RZ_OF_LEVEL(rz_unpack_scales)
#define rz_unpack_slab RZ_OF_LEVEL(rz_unpack_slab)
#define rz_unpack_zeros RZ_OF_LEVEL(rz_unpack_zeros)
#define rz_weigh_shared RZ_OF_LEVEL(rz_weigh_shared)
#define rz_workspace_free RZ_OF_LEVEL(rz_workspace_free)
#define rz_workspace_free_attention RZ_OF_LEVEL(rz_workspace_free_attention)
#define rz_workspace_measure RZ_OF_LEVEL(rz_workspace_measure)
#define rz_workspace_new RZ_OF_LEVEL(rz_workspace_new)
#define rz_workspace_reserve RZ_OF_LEVEL(rz_workspace_reserve)
#define rz_workspace_reserve_attention RZ_OF_LEVEL(rz_workspace_reserve_attention)
#define rz_workspace_reserve_bests RZ_OF_LEVEL(rz_workspace_reserve_bests)
#define rz_workspace_reserve_recurrent RZ_OF_LEVEL(rz_workspace_reserve_recurrent)
#define rz_workspace_reserve_prepared RZ_OF_LEVEL(rz_workspace_reserve_prepared)

#include "../activations.c"
#include "../adapters.c"
#include "../attention.c"
#include "../attention_codes.c"
#include "../attention_few.c"
#include "../attention_plan.c"
#include "../attention_stages.c"
#include "../blocks.c"
#include "../codec.c"
#include "../decoder.c"
#include "../digits.c"
#include "../experts.c"
#include "../fetch.c"
#include "../float_codes.c"
#include "../gemm.c"
#include "../largest.c"
#include "../latent.c"
#include "../low_rank.c"
#include "../products.c"
#include "../proof.c"
#include "../quantize.c"
#include "../quantized.c"
#include "../quantized_pack.c"
#include "../quantized_unpack.c"
#include "../recurrent.c"
#include "../residual.c"
#include "../sampling.c"
#include "../short_exponents.c"
#include "../spans.c"
#include "../sparse.c"
#include "../tail.c"
#include "../unpack.c"
#include "../workspace.c"
