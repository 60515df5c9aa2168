// Both projections of the chosen experts, plain and with the deltas of each (expert, adapter).
//
//   moe_gate_up   act[p] = activation(gate_up_e · x[t] + b), rounded      p: position in the permutation
//   moe_down      y[pair] = down_e · act[p] + b', f32
//   moe_down_delta  y[pair] += the delta of down, behind moe_down without deltas: the same bits
//   moe_combine   out[t] = Σ_j w_j · y[t, j], in j order, rounded once
//
// Grid of the products: (tiles, outputs / columns); surplus tiles end at once. A tile is one expert's
// rows, whatever their adapters: each row finds its slot in the list of LoRA tiles.
#pragma once

#include "amphora/activation.cuh"
#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/overlap.cuh"
#include "amphora/product.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

// A block's columns are kCols / 2 gates, then their ups, so that a pair meets in one thread.
template <class Config, int kThreads, bool kLora>
__device__ __forceinline__ void gate_up_tile(const MoeGateUpArgs& args) {
  using Element = typename Config::Element;
  using P = Product<Config, kThreads>;
  constexpr int kPairs = P::kCols / 2, kHalf = P::kPerThread / 2;
  __shared__ typename P::Shared shared;
  const Tile tile = tile_at(args.tiles, 4, blockIdx.x);
  if (tile.rows == 0) return;
  const int first = blockIdx.y * kPairs;
  const Element* x = static_cast<const Element*>(args.x);
  const long long matrix = 2ll * args.inner * tile.expert;
  // The output of the weight that column `c` is.
  const auto output = [&](int c) {
    const int i = first + c % kPairs;
    if (i >= args.inner) return -1;
    const int up = c / kPairs;
    return gate_up_column(args.activation, i, up, args.inner);
  };

  for (int start = 0; start < tile.rows; start += P::kRows) {
    const auto x_at = [&](int r, int i) {
      if (start + r >= tile.rows) return 0.f;
      const int pair = args.perm[tile.first + start + r];
      const float value = widen(x[pair / args.top_k * args.x_pitch + i]);
      if (args.pair_weights == nullptr) return value;
      // An operand of the product, so it is rounded to the element type.
      return widen(narrow<Element>(value * args.pair_weights[pair]));
    };
    const auto w_at = [&](int c, int i) {
      const int n = output(c);
      return n < 0 ? 0.f : widen_at(args.weight, (matrix + n) * args.hidden + i, args.weight_type);
    };
    float acc[P::kPerThread];
    P::run(shared, args.hidden, x_at, w_at, acc);

    if (start + P::row() >= tile.rows) continue;
    const int position = tile.first + start + P::row();
    const int slot = kLora ? slot_at(args.lora_tiles, 4, args.lora_tile_count, position) : -1;
#pragma unroll
    for (int j = 0; j < P::kPerThread; ++j) {
      const int n = output(P::col(j));
      if (n < 0) continue;
      if (args.bias != nullptr) acc[j] += args.bias[matrix + n];
      if (kLora && slot >= 0) {
        acc[j] += lora_delta<Element>(args.lora, slot, tile.expert, position, n);
      }
    }
    Element* act = static_cast<Element*>(args.act) + static_cast<long long>(position) * args.inner;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const int i = first + P::col(j);
      if (i >= args.inner) continue;
      act[i] = narrow<Element>(
          activate(args.activation, args.limit, args.alpha, acc[j], acc[j + kHalf]));
    }
  }
}

template <class Config, int kThreads, bool kLora>
__device__ __forceinline__ void down_tile(const MoeDownArgs& args) {
  using Element = typename Config::Element;
  using P = Product<Config, kThreads>;
  __shared__ typename P::Shared shared;
  const Tile tile = tile_at(args.tiles, 4, blockIdx.x);
  if (tile.rows == 0) return;
  const int first = blockIdx.y * P::kCols;
  const Element* act = static_cast<const Element*>(args.act);
  const long long matrix = static_cast<long long>(args.hidden) * tile.expert;

  for (int start = 0; start < tile.rows; start += P::kRows) {
    const auto x_at = [&](int r, int i) {
      const long long position = tile.first + start + r;
      return start + r < tile.rows ? widen(act[position * args.inner + i]) : 0.f;
    };
    const auto w_at = [&](int c, int i) {
      const int n = first + c;
      return n < args.hidden ? widen_at(args.weight, (matrix + n) * args.inner + i, args.weight_type)
                             : 0.f;
    };
    float acc[P::kPerThread];
    P::run(shared, args.inner, x_at, w_at, acc);

    if (start + P::row() >= tile.rows) continue;
    const int position = tile.first + start + P::row();
    const int slot = kLora ? slot_at(args.lora_tiles, 4, args.lora_tile_count, position) : -1;
    float* y = args.y + static_cast<long long>(args.perm[position]) * args.hidden;
#pragma unroll
    for (int j = 0; j < P::kPerThread; ++j) {
      const int n = first + P::col(j);
      if (n >= args.hidden) continue;
      float value = acc[j];
      if (args.bias != nullptr) value += args.bias[matrix + n];
      if (kLora && slot >= 0) {
        value += lora_delta<Element>(args.lora, slot, tile.expert, position, n);
      }
      y[n] = value;
    }
  }
}

template <class Config, int kThreads>
__device__ void moe_gate_up(const MoeGateUpArgs& args) {
  gate_up_tile<Config, kThreads, false>(args);
}
template <class Config, int kThreads>
__device__ void moe_gate_up_lora(const MoeGateUpArgs& args) {
  gate_up_tile<Config, kThreads, true>(args);
}
template <class Config, int kThreads>
__device__ void moe_down(const MoeDownArgs& args) {
  down_tile<Config, kThreads, false>(args);
}
template <class Config, int kThreads>
__device__ void moe_down_lora(const MoeDownArgs& args) {
  down_tile<Config, kThreads, true>(args);
}

// Grid: (LoRA tiles, hidden / kThreads); a thread makes an output of each row of the tile.
template <class Config, int kThreads>
__device__ void moe_down_delta(const MoeDownArgs& args) {
  const Tile tile = tile_at(args.lora_tiles, 4, blockIdx.x);
  const int n = blockIdx.y * kThreads + threadIdx.x;
  if (n >= args.hidden) return;
  for (int position = tile.first; position < tile.first + tile.rows; ++position) {
    float* y = args.y + static_cast<long long>(args.perm[position]) * args.hidden + n;
    *y += lora_delta<typename Config::Element>(args.lora, tile.slot, tile.expert, position, n);
  }
}

// Grid: (tokens, hidden / outputs of a block); a thread makes kOutputs of them. Rows of y lie on 16 bytes
// where hidden is a multiple of 4. What is behind waits for all of this, so it may begin at once.
template <class Config, int kThreads>
__device__ void moe_combine(const MoeCombineArgs& args) {
  using Element = typename Config::Element;
  constexpr int kOutputs = 4;
  constexpr int kBatch = 8;    // experts whose rows are on the way at a time
  constexpr int kFew = 64;     // tokens whose rows are asked for before it is known that they are nobody's
  const long long token = blockIdx.x, pairs = token * args.top_k;
  const int first = (blockIdx.y * kThreads + threadIdx.x) * kOutputs;
  let_next_begin();
  wait_for_front();
  if (first >= args.hidden) return;
  const bool routed = args.experts[pairs] >= 0;  // padding is routed nowhere
  if (gridDim.x > kFew && !routed) return;
  Element* out = static_cast<Element*>(args.out) + token * args.out_pitch + first;
  const int count = min(kOutputs, args.hidden - first);
  const bool whole = args.hidden % kOutputs == 0;
  float sum[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) sum[i] = args.add && i < count ? widen(out[i]) : 0.f;
  for (int j = 0; j < args.top_k; j += kBatch) {
    float y[kBatch][kOutputs], weight[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (j + k >= args.top_k) break;
      const float* from = args.y + (pairs + j + k) * args.hidden + first;
      weight[k] = args.weights == nullptr ? 1.f : args.weights[pairs + j + k];
      if (whole) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        y[k][0] = four.x;
        y[k][1] = four.y;
        y[k][2] = four.z;
        y[k][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) y[k][i] = i < count ? from[i] : 0.f;
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (j + k >= args.top_k) break;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        sum[i] = args.weights == nullptr ? sum[i] + y[k][i] : fmaf(weight[k], y[k][i], sum[i]);
      }
    }
  }
  if (!routed) return;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    if (i < count) out[i] = narrow<Element>(sum[i]);
  }
}

}  // namespace amphora
