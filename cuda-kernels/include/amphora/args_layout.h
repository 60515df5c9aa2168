// Sizes and offsets of the argument structs, as src/args.rs has them. Included by args.h alone.
#pragma once

namespace amphora {

// NVRTC has no offsetof without the toolkit's headers; its front end has this instead.
#ifdef __CUDACC_RTC__
#define AMPHORA_OFFSET(type, field) __INTADDR__(&((type*)0)->field)
#else
#define AMPHORA_OFFSET(type, field) __builtin_offsetof(type, field)
#endif
#define AMPHORA_SIZE(type, bytes) static_assert(sizeof(type) == bytes, #type)
#define AMPHORA_AT(type, field, offset) \
  static_assert(AMPHORA_OFFSET(type, field) == offset, #type "." #field)

AMPHORA_SIZE(WriteTokensArgs, 24);
AMPHORA_AT(WriteTokensArgs, prompt, 0);
AMPHORA_AT(WriteTokensArgs, table, 8);
AMPHORA_AT(WriteTokensArgs, sequences, 16);
AMPHORA_AT(WriteTokensArgs, tokens, 20);

AMPHORA_SIZE(EmbedArgs, 48);
AMPHORA_AT(EmbedArgs, index, 0);
AMPHORA_AT(EmbedArgs, table, 8);
AMPHORA_AT(EmbedArgs, weight, 16);
AMPHORA_AT(EmbedArgs, out, 24);
AMPHORA_AT(EmbedArgs, out_pitch, 32);
AMPHORA_AT(EmbedArgs, tokens, 40);
AMPHORA_AT(EmbedArgs, width, 44);

AMPHORA_SIZE(GatherRowsArgs, 48);
AMPHORA_AT(GatherRowsArgs, x, 0);
AMPHORA_AT(GatherRowsArgs, rows, 8);
AMPHORA_AT(GatherRowsArgs, out, 16);
AMPHORA_AT(GatherRowsArgs, x_pitch, 24);
AMPHORA_AT(GatherRowsArgs, out_pitch, 32);
AMPHORA_AT(GatherRowsArgs, count, 40);
AMPHORA_AT(GatherRowsArgs, width, 44);

AMPHORA_SIZE(RmsNormArgs, 72);
AMPHORA_AT(RmsNormArgs, x, 0);
AMPHORA_AT(RmsNormArgs, add, 8);
AMPHORA_AT(RmsNormArgs, weight, 16);
AMPHORA_AT(RmsNormArgs, out, 24);
AMPHORA_AT(RmsNormArgs, x_pitch, 32);
AMPHORA_AT(RmsNormArgs, add_pitch, 40);
AMPHORA_AT(RmsNormArgs, out_pitch, 48);
AMPHORA_AT(RmsNormArgs, vectors, 56);
AMPHORA_AT(RmsNormArgs, inner, 60);
AMPHORA_AT(RmsNormArgs, width, 64);
AMPHORA_AT(RmsNormArgs, eps, 68);

AMPHORA_SIZE(RopeArgs, 128);
AMPHORA_AT(RopeArgs, q, 0);
AMPHORA_AT(RopeArgs, k, 8);
AMPHORA_AT(RopeArgs, position, 16);
AMPHORA_AT(RopeArgs, table, 24);
AMPHORA_AT(RopeArgs, q_scale, 32);
AMPHORA_AT(RopeArgs, v, 40);
AMPHORA_AT(RopeArgs, kv_index, 48);
AMPHORA_AT(RopeArgs, k_cache, 56);
AMPHORA_AT(RopeArgs, v_cache, 64);
AMPHORA_AT(RopeArgs, q_pitch, 72);
AMPHORA_AT(RopeArgs, k_pitch, 80);
AMPHORA_AT(RopeArgs, v_pitch, 88);
AMPHORA_AT(RopeArgs, tokens, 96);
AMPHORA_AT(RopeArgs, heads, 100);
AMPHORA_AT(RopeArgs, kv_heads, 104);
AMPHORA_AT(RopeArgs, dim, 108);
AMPHORA_AT(RopeArgs, rotary, 112);
AMPHORA_AT(RopeArgs, interleaved, 116);
AMPHORA_AT(RopeArgs, v_width, 120);
AMPHORA_AT(RopeArgs, row_threads, 124);

AMPHORA_SIZE(SwigluArgs, 48);
AMPHORA_AT(SwigluArgs, x, 0);
AMPHORA_AT(SwigluArgs, out, 8);
AMPHORA_AT(SwigluArgs, x_pitch, 16);
AMPHORA_AT(SwigluArgs, out_pitch, 24);
AMPHORA_AT(SwigluArgs, inner, 32);
AMPHORA_AT(SwigluArgs, activation, 36);
AMPHORA_AT(SwigluArgs, limit, 40);
AMPHORA_AT(SwigluArgs, alpha, 44);

AMPHORA_SIZE(KvWriteArgs, 64);
AMPHORA_AT(KvWriteArgs, k, 0);
AMPHORA_AT(KvWriteArgs, v, 8);
AMPHORA_AT(KvWriteArgs, kv_index, 16);
AMPHORA_AT(KvWriteArgs, k_cache, 24);
AMPHORA_AT(KvWriteArgs, v_cache, 32);
AMPHORA_AT(KvWriteArgs, k_pitch, 40);
AMPHORA_AT(KvWriteArgs, v_pitch, 48);
AMPHORA_AT(KvWriteArgs, k_width, 56);
AMPHORA_AT(KvWriteArgs, v_width, 60);

AMPHORA_SIZE(CopyBlocksArgs, 40);
AMPHORA_AT(CopyBlocksArgs, copies, 0);
AMPHORA_AT(CopyBlocksArgs, k_cache, 8);
AMPHORA_AT(CopyBlocksArgs, v_cache, 16);
AMPHORA_AT(CopyBlocksArgs, k_bytes, 24);
AMPHORA_AT(CopyBlocksArgs, v_bytes, 32);

AMPHORA_SIZE(AttentionArgs, 120);
AMPHORA_AT(AttentionArgs, q, 0);
AMPHORA_AT(AttentionArgs, k_cache, 8);
AMPHORA_AT(AttentionArgs, v_cache, 16);
AMPHORA_AT(AttentionArgs, q_start, 24);
AMPHORA_AT(AttentionArgs, context, 32);
AMPHORA_AT(AttentionArgs, block_table, 40);
AMPHORA_AT(AttentionArgs, sinks, 48);
AMPHORA_AT(AttentionArgs, out, 56);
AMPHORA_AT(AttentionArgs, q_pitch, 64);
AMPHORA_AT(AttentionArgs, out_pitch, 72);
AMPHORA_AT(AttentionArgs, sequences, 80);
AMPHORA_AT(AttentionArgs, table_width, 84);
AMPHORA_AT(AttentionArgs, block_size, 88);
AMPHORA_AT(AttentionArgs, heads, 92);
AMPHORA_AT(AttentionArgs, kv_heads, 96);
AMPHORA_AT(AttentionArgs, k_dim, 100);
AMPHORA_AT(AttentionArgs, v_dim, 104);
AMPHORA_AT(AttentionArgs, mask, 108);
AMPHORA_AT(AttentionArgs, mask_width, 112);
AMPHORA_AT(AttentionArgs, scale, 116);

AMPHORA_SIZE(SliceArgs, 16);
AMPHORA_AT(SliceArgs, table, 0);
AMPHORA_AT(SliceArgs, offset, 4);
AMPHORA_AT(SliceArgs, stride, 8);
AMPHORA_AT(SliceArgs, len, 12);

AMPHORA_SIZE(LoraArgs, 96);
AMPHORA_AT(LoraArgs, arena, 0);
AMPHORA_AT(LoraArgs, rows, 8);
AMPHORA_AT(LoraArgs, shrunk, 16);
AMPHORA_AT(LoraArgs, table_rows, 24);
AMPHORA_AT(LoraArgs, slice_count, 28);
AMPHORA_AT(LoraArgs, slices, 32);

AMPHORA_SIZE(LoraShrinkArgs, 168);
AMPHORA_AT(LoraShrinkArgs, x, 0);
AMPHORA_AT(LoraShrinkArgs, tiles, 8);
AMPHORA_AT(LoraShrinkArgs, perm, 16);
AMPHORA_AT(LoraShrinkArgs, pair_weights, 24);
AMPHORA_AT(LoraShrinkArgs, lora, 32);
AMPHORA_AT(LoraShrinkArgs, x_pitch, 128);
AMPHORA_AT(LoraShrinkArgs, k, 136);
AMPHORA_AT(LoraShrinkArgs, tile_words, 140);
AMPHORA_AT(LoraShrinkArgs, pairs_per_row, 144);
AMPHORA_AT(LoraShrinkArgs, parts, 148);
AMPHORA_AT(LoraShrinkArgs, partials, 152);
AMPHORA_AT(LoraShrinkArgs, part_pitch, 160);

AMPHORA_SIZE(LinearArgs, 72);
AMPHORA_AT(LinearArgs, x, 0);
AMPHORA_AT(LinearArgs, weight, 8);
AMPHORA_AT(LinearArgs, bias, 16);
AMPHORA_AT(LinearArgs, out, 24);
AMPHORA_AT(LinearArgs, x_pitch, 32);
AMPHORA_AT(LinearArgs, out_pitch, 40);
AMPHORA_AT(LinearArgs, tokens, 48);
AMPHORA_AT(LinearArgs, n, 52);
AMPHORA_AT(LinearArgs, k, 56);
AMPHORA_AT(LinearArgs, weight_type, 60);
AMPHORA_AT(LinearArgs, out_f32, 64);
AMPHORA_AT(LinearArgs, aligned, 68);

AMPHORA_SIZE(DenseArgs, 216);
AMPHORA_AT(DenseArgs, base, 0);
AMPHORA_AT(DenseArgs, lora, 72);
AMPHORA_AT(DenseArgs, slot, 168);
AMPHORA_AT(DenseArgs, perm, 176);
AMPHORA_AT(DenseArgs, sums, 184);
AMPHORA_AT(DenseArgs, ready, 192);
AMPHORA_AT(DenseArgs, parts, 200);
AMPHORA_AT(DenseArgs, group, 204);
AMPHORA_AT(DenseArgs, factor_bytes, 208);

AMPHORA_SIZE(DenseClusterArgs, 512);
AMPHORA_AT(DenseClusterArgs, weight, 0);
AMPHORA_AT(DenseClusterArgs, x, 128);
AMPHORA_AT(DenseClusterArgs, of, 256);
AMPHORA_AT(DenseClusterArgs, x_rows, 472);
AMPHORA_AT(DenseClusterArgs, stages, 476);
AMPHORA_AT(DenseClusterArgs, streams, 480);

AMPHORA_SIZE(DenseShrinkArgs, 152);
AMPHORA_AT(DenseShrinkArgs, x, 0);
AMPHORA_AT(DenseShrinkArgs, tiles, 8);
AMPHORA_AT(DenseShrinkArgs, perm, 16);
AMPHORA_AT(DenseShrinkArgs, lora, 24);
AMPHORA_AT(DenseShrinkArgs, x_pitch, 120);
AMPHORA_AT(DenseShrinkArgs, k, 128);
AMPHORA_AT(DenseShrinkArgs, aligned, 132);
AMPHORA_AT(DenseShrinkArgs, rank_rows, 136);
AMPHORA_AT(DenseShrinkArgs, early, 140);
AMPHORA_AT(DenseShrinkArgs, tile_count, 144);
AMPHORA_AT(DenseShrinkArgs, block_tiles, 148);

AMPHORA_SIZE(LoraLinearArgs, 192);
AMPHORA_AT(LoraLinearArgs, base, 0);
AMPHORA_AT(LoraLinearArgs, lora, 72);
AMPHORA_AT(LoraLinearArgs, perm, 168);
AMPHORA_AT(LoraLinearArgs, tiles, 176);
AMPHORA_AT(LoraLinearArgs, tile_count, 184);
AMPHORA_AT(LoraLinearArgs, reserved, 188);

AMPHORA_SIZE(MoeGateUpArgs, 200);
AMPHORA_AT(MoeGateUpArgs, x, 0);
AMPHORA_AT(MoeGateUpArgs, weight, 8);
AMPHORA_AT(MoeGateUpArgs, bias, 16);
AMPHORA_AT(MoeGateUpArgs, act, 24);
AMPHORA_AT(MoeGateUpArgs, perm, 32);
AMPHORA_AT(MoeGateUpArgs, tiles, 40);
AMPHORA_AT(MoeGateUpArgs, pair_weights, 48);
AMPHORA_AT(MoeGateUpArgs, lora_tiles, 56);
AMPHORA_AT(MoeGateUpArgs, lora, 64);
AMPHORA_AT(MoeGateUpArgs, x_pitch, 160);
AMPHORA_AT(MoeGateUpArgs, lora_tile_count, 168);
AMPHORA_AT(MoeGateUpArgs, hidden, 172);
AMPHORA_AT(MoeGateUpArgs, inner, 176);
AMPHORA_AT(MoeGateUpArgs, top_k, 180);
AMPHORA_AT(MoeGateUpArgs, weight_type, 184);
AMPHORA_AT(MoeGateUpArgs, activation, 188);
AMPHORA_AT(MoeGateUpArgs, limit, 192);
AMPHORA_AT(MoeGateUpArgs, alpha, 196);

AMPHORA_SIZE(MoeDownArgs, 168);
AMPHORA_AT(MoeDownArgs, act, 0);
AMPHORA_AT(MoeDownArgs, weight, 8);
AMPHORA_AT(MoeDownArgs, bias, 16);
AMPHORA_AT(MoeDownArgs, y, 24);
AMPHORA_AT(MoeDownArgs, perm, 32);
AMPHORA_AT(MoeDownArgs, tiles, 40);
AMPHORA_AT(MoeDownArgs, lora_tiles, 48);
AMPHORA_AT(MoeDownArgs, lora, 56);
AMPHORA_AT(MoeDownArgs, lora_tile_count, 152);
AMPHORA_AT(MoeDownArgs, hidden, 156);
AMPHORA_AT(MoeDownArgs, inner, 160);
AMPHORA_AT(MoeDownArgs, weight_type, 164);

AMPHORA_SIZE(MoeStreamArgs, 208);
AMPHORA_AT(MoeStreamArgs, x, 0);
AMPHORA_AT(MoeStreamArgs, weight, 8);
AMPHORA_AT(MoeStreamArgs, bias, 16);
AMPHORA_AT(MoeStreamArgs, out, 24);
AMPHORA_AT(MoeStreamArgs, perm, 32);
AMPHORA_AT(MoeStreamArgs, tiles, 40);
AMPHORA_AT(MoeStreamArgs, lora_tiles, 48);
AMPHORA_AT(MoeStreamArgs, clear, 56);
AMPHORA_AT(MoeStreamArgs, state, 64);
AMPHORA_AT(MoeStreamArgs, lora, 72);
AMPHORA_AT(MoeStreamArgs, x_pitch, 168);
AMPHORA_AT(MoeStreamArgs, tile_count, 176);
AMPHORA_AT(MoeStreamArgs, lora_tile_count, 180);
AMPHORA_AT(MoeStreamArgs, n, 184);
AMPHORA_AT(MoeStreamArgs, top_k, 188);
AMPHORA_AT(MoeStreamArgs, pairs, 192);
AMPHORA_AT(MoeStreamArgs, activation, 196);
AMPHORA_AT(MoeStreamArgs, limit, 200);
AMPHORA_AT(MoeStreamArgs, alpha, 204);

AMPHORA_SIZE(MoeCombineArgs, 56);
AMPHORA_AT(MoeCombineArgs, y, 0);
AMPHORA_AT(MoeCombineArgs, experts, 8);
AMPHORA_AT(MoeCombineArgs, weights, 16);
AMPHORA_AT(MoeCombineArgs, out, 24);
AMPHORA_AT(MoeCombineArgs, out_pitch, 32);
AMPHORA_AT(MoeCombineArgs, hidden, 40);
AMPHORA_AT(MoeCombineArgs, top_k, 44);
AMPHORA_AT(MoeCombineArgs, add, 48);
AMPHORA_AT(MoeCombineArgs, reserved, 52);

AMPHORA_SIZE(MoePrefillArgs, 1344);
AMPHORA_AT(MoePrefillArgs, map, 0);
AMPHORA_AT(MoePrefillArgs, tokens, 128);
AMPHORA_AT(MoePrefillArgs, shrunk_map, 256);
AMPHORA_AT(MoePrefillArgs, factors, 384);
AMPHORA_AT(MoePrefillArgs, weight, 1152);
AMPHORA_AT(MoePrefillArgs, x, 1160);
AMPHORA_AT(MoePrefillArgs, bias, 1168);
AMPHORA_AT(MoePrefillArgs, out, 1176);
AMPHORA_AT(MoePrefillArgs, perm, 1184);
AMPHORA_AT(MoePrefillArgs, tiles, 1192);
AMPHORA_AT(MoePrefillArgs, lora_tiles, 1200);
AMPHORA_AT(MoePrefillArgs, arena, 1208);
AMPHORA_AT(MoePrefillArgs, rows, 1216);
AMPHORA_AT(MoePrefillArgs, shrunk, 1224);
AMPHORA_AT(MoePrefillArgs, x_pitch, 1232);
AMPHORA_AT(MoePrefillArgs, tile_count, 1240);
AMPHORA_AT(MoePrefillArgs, lora_tile_count, 1244);
AMPHORA_AT(MoePrefillArgs, table_rows, 1248);
AMPHORA_AT(MoePrefillArgs, tables, 1252);
AMPHORA_AT(MoePrefillArgs, hidden, 1260);
AMPHORA_AT(MoePrefillArgs, inner, 1264);
AMPHORA_AT(MoePrefillArgs, experts, 1268);
AMPHORA_AT(MoePrefillArgs, top_k, 1272);
AMPHORA_AT(MoePrefillArgs, activation, 1276);
AMPHORA_AT(MoePrefillArgs, limit, 1280);
AMPHORA_AT(MoePrefillArgs, alpha, 1284);
AMPHORA_AT(MoePrefillArgs, ready, 1288);

AMPHORA_SIZE(MoePrefillBothArgs, 2688);
AMPHORA_AT(MoePrefillBothArgs, gate_up, 0);
AMPHORA_AT(MoePrefillBothArgs, down, 1344);

AMPHORA_SIZE(MoePrefillGatherArgs, 48);
AMPHORA_AT(MoePrefillGatherArgs, x, 0);
AMPHORA_AT(MoePrefillGatherArgs, perm, 8);
AMPHORA_AT(MoePrefillGatherArgs, out, 16);
AMPHORA_AT(MoePrefillGatherArgs, x_pitch, 24);
AMPHORA_AT(MoePrefillGatherArgs, pairs, 32);
AMPHORA_AT(MoePrefillGatherArgs, hidden, 36);
AMPHORA_AT(MoePrefillGatherArgs, top_k, 40);
AMPHORA_AT(MoePrefillGatherArgs, reserved, 44);

AMPHORA_SIZE(MoePrefillShrinkArgs, 88);
AMPHORA_AT(MoePrefillShrinkArgs, x, 0);
AMPHORA_AT(MoePrefillShrinkArgs, perm, 8);
AMPHORA_AT(MoePrefillShrinkArgs, lora_tiles, 16);
AMPHORA_AT(MoePrefillShrinkArgs, arena, 24);
AMPHORA_AT(MoePrefillShrinkArgs, rows, 32);
AMPHORA_AT(MoePrefillShrinkArgs, shrunk, 40);
AMPHORA_AT(MoePrefillShrinkArgs, x_pitch, 48);
AMPHORA_AT(MoePrefillShrinkArgs, lora_tile_count, 56);
AMPHORA_AT(MoePrefillShrinkArgs, table_rows, 60);
AMPHORA_AT(MoePrefillShrinkArgs, tables, 64);
AMPHORA_AT(MoePrefillShrinkArgs, k, 72);
AMPHORA_AT(MoePrefillShrinkArgs, top_k, 76);
AMPHORA_AT(MoePrefillShrinkArgs, needs, 80);
AMPHORA_AT(MoePrefillShrinkArgs, reserved, 84);

AMPHORA_SIZE(MoePrefillGatherShrinkArgs, 136);
AMPHORA_AT(MoePrefillGatherShrinkArgs, gather, 0);
AMPHORA_AT(MoePrefillGatherShrinkArgs, shrink, 48);

AMPHORA_SIZE(RouteTopkArgs, 96);
AMPHORA_AT(RouteTopkArgs, logits, 0);
AMPHORA_AT(RouteTopkArgs, live, 8);
AMPHORA_AT(RouteTopkArgs, slot, 16);
AMPHORA_AT(RouteTopkArgs, correction, 24);
AMPHORA_AT(RouteTopkArgs, chosen, 32);
AMPHORA_AT(RouteTopkArgs, weights, 40);
AMPHORA_AT(RouteTopkArgs, keys, 48);
AMPHORA_AT(RouteTopkArgs, experts, 56);
AMPHORA_AT(RouteTopkArgs, top_k, 60);
AMPHORA_AT(RouteTopkArgs, slots, 64);
AMPHORA_AT(RouteTopkArgs, score, 68);
AMPHORA_AT(RouteTopkArgs, groups, 72);
AMPHORA_AT(RouteTopkArgs, keep, 76);
AMPHORA_AT(RouteTopkArgs, best, 80);
AMPHORA_AT(RouteTopkArgs, renorm, 84);
AMPHORA_AT(RouteTopkArgs, scale, 88);
AMPHORA_AT(RouteTopkArgs, reserved, 92);

AMPHORA_SIZE(RouteSortArgs, 144);
AMPHORA_AT(RouteSortArgs, choose, 0);
AMPHORA_AT(RouteSortArgs, perm, 96);
AMPHORA_AT(RouteSortArgs, tiles, 104);
AMPHORA_AT(RouteSortArgs, lora_tiles, 112);
AMPHORA_AT(RouteSortArgs, tokens, 120);
AMPHORA_AT(RouteSortArgs, tile_rows, 124);
AMPHORA_AT(RouteSortArgs, tile_count, 128);
AMPHORA_AT(RouteSortArgs, lora_tile_count, 132);
AMPHORA_AT(RouteSortArgs, chosen, 136);
AMPHORA_AT(RouteSortArgs, reserved, 140);

AMPHORA_SIZE(RouteRankArgs, 32);
AMPHORA_AT(RouteRankArgs, keys, 0);
AMPHORA_AT(RouteRankArgs, sorted, 8);
AMPHORA_AT(RouteRankArgs, perm, 16);
AMPHORA_AT(RouteRankArgs, pairs, 24);
AMPHORA_AT(RouteRankArgs, reserved, 28);

AMPHORA_SIZE(RouteTilesArgs, 48);
AMPHORA_AT(RouteTilesArgs, sorted, 0);
AMPHORA_AT(RouteTilesArgs, tiles, 8);
AMPHORA_AT(RouteTilesArgs, lora_tiles, 16);
AMPHORA_AT(RouteTilesArgs, pairs, 24);
AMPHORA_AT(RouteTilesArgs, slots, 28);
AMPHORA_AT(RouteTilesArgs, tile_rows, 32);
AMPHORA_AT(RouteTilesArgs, tile_count, 36);
AMPHORA_AT(RouteTilesArgs, lora_tile_count, 40);
AMPHORA_AT(RouteTilesArgs, reserved, 44);

AMPHORA_SIZE(SamplePartial, 40);
AMPHORA_AT(SamplePartial, first, 0);
AMPHORA_AT(SamplePartial, bound, 8);
AMPHORA_AT(SamplePartial, mass, 16);
AMPHORA_AT(SamplePartial, raw_mass, 24);
AMPHORA_AT(SamplePartial, raw_peak, 32);
AMPHORA_AT(SamplePartial, reserved, 36);

AMPHORA_SIZE(SampleArgs, 96);
AMPHORA_AT(SampleArgs, logits, 0);
AMPHORA_AT(SampleArgs, sampling, 8);
AMPHORA_AT(SampleArgs, sample_slot, 16);
AMPHORA_AT(SampleArgs, edit_start, 24);
AMPHORA_AT(SampleArgs, edits, 32);
AMPHORA_AT(SampleArgs, table, 40);
AMPHORA_AT(SampleArgs, result, 48);
AMPHORA_AT(SampleArgs, partials, 56);
AMPHORA_AT(SampleArgs, keys, 64);
AMPHORA_AT(SampleArgs, edited, 72);
AMPHORA_AT(SampleArgs, vocab, 80);
AMPHORA_AT(SampleArgs, chunks, 84);
AMPHORA_AT(SampleArgs, candidates, 88);
AMPHORA_AT(SampleArgs, reserved, 92);

AMPHORA_SIZE(LogprobPartial, 24);
AMPHORA_AT(LogprobPartial, first, 0);
AMPHORA_AT(LogprobPartial, mass, 8);
AMPHORA_AT(LogprobPartial, before, 16);
AMPHORA_AT(LogprobPartial, reserved, 20);

AMPHORA_SIZE(LogprobsArgs, 72);
AMPHORA_AT(LogprobsArgs, logits, 0);
AMPHORA_AT(LogprobsArgs, target, 8);
AMPHORA_AT(LogprobsArgs, best, 16);
AMPHORA_AT(LogprobsArgs, sample_slot, 24);
AMPHORA_AT(LogprobsArgs, table, 32);
AMPHORA_AT(LogprobsArgs, out, 40);
AMPHORA_AT(LogprobsArgs, partials, 48);
AMPHORA_AT(LogprobsArgs, keys, 56);
AMPHORA_AT(LogprobsArgs, vocab, 64);
AMPHORA_AT(LogprobsArgs, chunks, 68);

#undef AMPHORA_SIZE
#undef AMPHORA_AT
#undef AMPHORA_OFFSET

}  // namespace amphora
