// out = x·Wᵀ + bias, and the same with the deltas of the rows' adapters.
// Grid: (rows / kTileRows, outputs / kTileCols). The plain product takes rows in order; the one with
// adapters takes them by slot, through the permutation, so that a block meets few adapters.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/product.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

// `row_of` maps a position of the grid to a row of x; `delta(position, n, value)` gives an output with its delta.
template <class Config, int kThreads, class RowOf, class Delta>
__device__ __forceinline__ void linear_tile(const LinearArgs& args, RowOf row_of, Delta delta) {
  using Element = typename Config::Element;
  using P = Product<Config, kThreads>;
  __shared__ typename P::Shared shared;
  const int first_row = blockIdx.x * P::kRows, first_col = blockIdx.y * P::kCols;
  const Element* x = static_cast<const Element*>(args.x);
  const auto x_at = [&](int r, int i) {
    const int position = first_row + r;
    return position < args.tokens ? widen(x[row_of(position) * args.x_pitch + i]) : 0.f;
  };
  const auto w_at = [&](int c, int i) {
    const long long n = first_col + c;
    return n < args.n ? widen_at(args.weight, n * args.k + i, args.weight_type) : 0.f;
  };
  float acc[P::kPerThread];
  P::run(shared, args.k, x_at, w_at, acc);

  const int position = first_row + P::row();
  if (position >= args.tokens) return;
  const long long out_row = row_of(position) * args.out_pitch;
#pragma unroll
  for (int j = 0; j < P::kPerThread; ++j) {
    const int n = first_col + P::col(j);
    if (n >= args.n) continue;
    float value = acc[j];
    if (args.bias != nullptr) value += args.bias[n];
    value = delta(position, n, value);
    if (args.out_f32) {
      static_cast<float*>(args.out)[out_row + n] = value;
    } else {
      static_cast<Element*>(args.out)[out_row + n] = narrow<Element>(value);
    }
  }
}

template <class Config, int kThreads>
__device__ void linear(const LinearArgs& args) {
  linear_tile<Config, kThreads>(
      args, [](int position) { return static_cast<long long>(position); },
      [](int, int, float value) { return value; });
}

template <class Config, int kThreads>
__device__ void lora_linear(const LoraLinearArgs& args) {
  using Element = typename Config::Element;
  // A thread's outputs share a row, so its slot is looked up once.
  const int own = blockIdx.x * Config::kTileRows + Product<Config, kThreads>::row();
  const int slot = slot_at(args.tiles, 3, args.tile_count, own);
  linear_tile<Config, kThreads>(
      args.base, [&](int position) { return static_cast<long long>(args.perm[position]); },
      [&](int position, int n, float value) {
        return slot < 0 ? value : value + lora_delta<Element>(args.lora, slot, 0, position, n);
      });
}

}  // namespace amphora
