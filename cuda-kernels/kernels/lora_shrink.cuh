// The first half of a delta: shrunk[position, slice] = scale · x·Aᵀ, in f32, for every row that has an
// adapter which touches the slice.
// Grid: (tiles, slices, rank classes / kTileCols); blocks beyond a tile's rank, and surplus tiles, end
// at once. Serves dense projections and both expert projections: see LoraShrinkArgs.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/product.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void lora_shrink(const LoraShrinkArgs& args) {
  using Element = typename Config::Element;
  using P = Product<Config, kThreads>;
  __shared__ typename P::Shared shared;
  const Tile tile = tile_at(args.tiles, args.tile_words, blockIdx.x);
  if (tile.rows == 0) return;
  const int slice = blockIdx.y, first_rank = blockIdx.z * P::kCols;
  const LoraRow row = lora_row(args.lora, tile.slot, slice, tile.expert);
  const int rank = static_cast<int>(row.rank);
  if (first_rank >= rank) return;
  const Element* x = static_cast<const Element*>(args.x);
  const Element* a = lora_block<Element>(args.lora, row.a);

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
    P::run(shared, args.k, x_at, a_at, acc);
    if (start + P::row() >= tile.rows) continue;
    float* out = shrunk_row(args.lora, tile.first + start + P::row(), slice);
#pragma unroll
    for (int j = 0; j < P::kPerThread; ++j) {
      const int r = first_rank + P::col(j);
      if (r < rank) out[r] = acc[j] * row.scale;
    }
  }
}

}  // namespace amphora
