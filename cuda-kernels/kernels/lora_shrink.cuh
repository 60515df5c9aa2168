// The first half of a delta: shrunk[position, slice] = scale · x·Aᵀ, in f32, for every row that has an
// adapter which touches the slice.
//
//   lora_shrink        the products; where parts of blocks share k, the sums of each part
//   lora_shrink_sum    behind them: the sums of the parts, in their order (`partials`)
//   lora_shrink_clear  in front of them: zeros, which the parts are added to as they come (no `partials`)
//
// Grid: (tiles, slices, parts · rank classes / kTileCols), the other two (tiles, slices); blocks beyond a
// tile's rank, and surplus tiles, end at once. Serves dense projections and both expert projections: see
// LoraShrinkArgs.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/product.cuh"
#include "amphora/reduce.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void lora_shrink(const LoraShrinkArgs& args) {
  using Element = typename Config::Element;
  using P = Product<Config, kThreads>;
  constexpr int kRankBlocks = kMaxRank / P::kCols;
  static_assert(kMaxRank % P::kCols == 0, "a part has whole blocks");
  __shared__ typename P::Shared shared;
  const Tile tile = tile_at(args.tiles, args.tile_words, blockIdx.x);
  if (tile.rows == 0) return;
  const int slice = blockIdx.y, first_rank = blockIdx.z % kRankBlocks * P::kCols;
  const LoraRow row = lora_row(args.lora, tile.slot, slice, tile.expert);
  const int rank = static_cast<int>(row.rank);
  if (first_rank >= rank) return;
  // Parts are whole chunks of k.
  const int part = blockIdx.z / kRankBlocks, chunks = (args.k + P::kDepth - 1) / P::kDepth;
  const int from = chunks * part / args.parts * P::kDepth;
  const int to = min(args.k, chunks * (part + 1) / args.parts * P::kDepth);
  const Element* x = static_cast<const Element*>(args.x) + from;
  const Element* a = lora_block<Element>(args.lora, row.a) + from;

  for (int start = 0; start < tile.rows; start += P::kRows) {
    const auto x_at = [&](int r, int i) {
      if (start + r >= tile.rows) return 0.f;
      const long long position = tile.first + start + r;
      if (args.perm == nullptr) return widen(x[position * args.x_pitch + i]);
      const int pair = args.perm[position];
      const float value = widen(x[pair / args.pairs_per_row * args.x_pitch + i]);
      if (args.pair_weights == nullptr) return value;
      // An operand of the product, so it is rounded to the element type.
      return widen(narrow<Element>(value * args.pair_weights[pair]));
    };
    const auto a_at = [&](int c, int i) {
      const long long r = first_rank + c;
      return r < rank ? widen(a[r * args.k + i]) : 0.f;
    };
    float acc[P::kPerThread];
    P::run(shared, to - from, x_at, a_at, acc);
    if (start + P::row() >= tile.rows) continue;
    const long long position = tile.first + start + P::row();
    float* out = shrunk_row(args.lora, position, slice);
    if (args.partials != nullptr) out = args.partials + part * args.part_pitch + (out - args.lora.shrunk);
#pragma unroll
    for (int j = 0; j < P::kPerThread; ++j) {
      const int r = first_rank + P::col(j);
      if (r >= rank) continue;
      const float value = acc[j] * row.scale;
      if (args.parts > 1 && args.partials == nullptr) {
        add_relaxed(out + r, value);
      } else {
        out[r] = value;
      }
    }
  }
}

// Each number of the tile's shrunk rows in one slice is what `value` makes of its place.
template <int kThreads, class Value>
__device__ __forceinline__ void each_shrunk(const LoraShrinkArgs& args, Value value) {
  const Tile tile = tile_at(args.tiles, args.tile_words, blockIdx.x);
  if (tile.rows == 0) return;
  const int slice = blockIdx.y;
  const int rank = static_cast<int>(lora_row(args.lora, tile.slot, slice, tile.expert).rank);
  for (int i = threadIdx.x; i < tile.rows * rank; i += kThreads) {
    float* at = shrunk_row(args.lora, tile.first + i / rank, slice) + i % rank;
    *at = value(at - args.lora.shrunk);
  }
}

template <class Config, int kThreads>
__device__ void lora_shrink_clear(const LoraShrinkArgs& args) {
  each_shrunk<kThreads>(args, [](long long) { return 0.f; });
}

template <class Config, int kThreads>
__device__ void lora_shrink_sum(const LoraShrinkArgs& args) {
  each_shrunk<kThreads>(args, [&](long long at) {
    float sum = 0.f;
    for (int part = 0; part < args.parts; ++part) sum += args.partials[part * args.part_pitch + at];
    return sum;
  });
}

}  // namespace amphora
