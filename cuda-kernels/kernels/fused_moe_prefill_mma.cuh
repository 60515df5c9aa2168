// Both expert products of a prefill step with mma.sync and cp.async, for architectures without the
// warpgroup products of fused_moe_prefill.cuh; the formulas, the work and the rounding are its own.
//
// A block of 8 warps takes 128 rows of a weight (2 units) and up to kMmaTokens tokens of one expert; warp w
// has rows 32 · (w / 2) .. and the even or the odd eights of tokens. kMmaStages stages of 64 of k are in
// flight; the steps of the deltas come one after the other behind them. With kEvenK, widths are whole stages
// and nothing is masked along k. The three are constants of the unit, with kMmaShared for what they take.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/dtype.cuh"
#include "amphora/matrices.cuh"
#include "amphora/overlap.cuh"
#include "kernels/moe_prefill_epilogue.cuh"
#include "kernels/moe_prefill_plan.cuh"

namespace amphora {

template <class Config>
struct PrefillMmaShape {
  static constexpr int kThreads = 256;
  static constexpr int kUnits = 2;
  static constexpr int kRows = 64 * kUnits;
  static constexpr int kMaxTokens = Config::kMmaTokens;
  static constexpr bool kEvenK = Config::kEvenK != 0;
  static constexpr int kEights = kMaxTokens / 16;  // of tokens, of one warp
  static constexpr int kStages = Config::kMmaStages;
  static constexpr int kWeightBytes = kRows * kOperandRow;
  static constexpr int kStageBytes = kWeightBytes + kMaxTokens * kOperandRow;

  static constexpr int kDeltas = kStages * kStageBytes;       // Delta [kMaxTokens]
  static constexpr int kIndex = kDeltas + kMaxTokens * 16;    // int [kMaxTokens]
  static constexpr int kScratch = kIndex + kMaxTokens * 4;    // int [8]
  static constexpr int kTables = kScratch + 32;               // int [4, experts + 1]
  static_assert(kTables == Config::kMmaShared, "the host asks for as much shared memory");
  static_assert(kEights % 2 == 0, "two eights are one load");
};

template <class Config, bool kGateUp>
struct PrefillMma {
  using Element = typename Config::Element;
  using Shape = PrefillMmaShape<Config>;

  const MoePrefillArgs& args;
  char* shared;
  unsigned base;
  Work work;

  __device__ unsigned weights(int stage) const { return base + stage * Shape::kStageBytes; }
  __device__ unsigned tokens(int stage) const { return weights(stage) + Shape::kWeightBytes; }
  __device__ int* index() const { return reinterpret_cast<int*>(shared + Shape::kIndex); }
  __device__ Delta* deltas() const { return reinterpret_cast<Delta*>(shared + Shape::kDeltas); }

  __device__ __forceinline__ void load_base(int step) {
    const int stage = step % Shape::kStages, k = kGateUp ? args.hidden : args.inner;
    const int piece = threadIdx.x % 8, k0 = step * kOperandK + piece * 8;
    const bool there = Shape::kEvenK || k0 < k;
    const char* weight = static_cast<const char*>(args.weight);
    const int outputs = kGateUp ? 2 * args.inner : args.hidden;
#pragma unroll
    for (int r = threadIdx.x / 8; r < Shape::kRows; r += Shape::kThreads / 8) {
      const int row = weight_row<kGateUp>(args, work.unit, r);
      const bool inside = there && row >= 0 && r < work.units * 64;
      const long long at = (static_cast<long long>(work.expert) * outputs + (inside ? row : 0)) * k;
      copy16(weights(stage) + swizzled(r, piece), weight + (at + (there ? k0 : 0)) * 2, inside);
    }
    const char* x = static_cast<const char*>(args.x);
    for (int n = threadIdx.x / 8; n < work.count; n += Shape::kThreads / 8) {
      const long long row = kGateUp ? index()[n] : work.first + n;
      copy16(tokens(stage) + swizzled(n, piece), x + (row * args.x_pitch + (there ? k0 : 0)) * 2, there);
    }
  }

  // Into the first stage: B of 128 outputs, and the tokens' shrunk numbers, zeros where the slot is
  // another's.
  __device__ __forceinline__ void load_delta(const Delta& delta, DeltaStep which) {
    const auto [part, step] = which;
    const int rank = 8 * delta.rank[part];
    const char* arena = static_cast<const char*>(args.arena);
    for (int i = threadIdx.x; i < Shape::kRows * 4; i += Shape::kThreads) {
      const int r = i / 4, at = step * kDeltaRank + i % 4 * 8;
      const DeltaRow row = delta_row<kGateUp>(args, work.unit, r);
      const bool in_part = !kGateUp || delta.shared || row.block == part;
      const bool there = row.there && in_part && at < rank && r < work.units * 64;
      const long long offset = static_cast<long long>(delta.b[row.block]) * kArenaUnit +
                               (static_cast<long long>(row.row) * rank + at) * 2;
      copy16(weights(0) + swizzled(r, i % 4), arena + (there ? offset : 0), there);
    }
    const char* shrunk = static_cast<const char*>(args.shrunk);
    for (int i = threadIdx.x; i < Shape::kMaxTokens * 8; i += Shape::kThreads) {
      const int n = i / 8;
      const bool there = n >= delta.low && n < delta.high;
      const long long at = static_cast<long long>(work.first + (there ? n : 0)) * kShrunkRow +
                           (part * kDeltaSteps + step) * kShrunkStep + i % 8 * 16;
      copy16(tokens(0) + swizzled(n, i % 8), shrunk + at, there);
    }
  }

  // 32 rows of a stage's weights, sixteen `i` of k.
  __device__ __forceinline__ void load_left(unsigned (&left)[2][4], int stage, int i) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = warp / 2 * 32 + m * 16 + lane % 16;
      load_matrices(left[m], weights(stage) + swizzled(row, i * 2 + lane / 16));
    }
  }

  __device__ __forceinline__ void multiply_base(int stage, float (&acc)[2][Shape::kEights][4]) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int i = 0; i < kOperandK / 16; ++i) {
      unsigned left[2][4];
      load_left(left, stage, i);
#pragma unroll
      for (int j = 0; j < Shape::kEights; j += 2) {
        // This warp's eights 2j and 2j + 2 (of its own parity), 16 of k each.
        if (8 * (2 * j + warp % 2) >= work.count) continue;
        unsigned right[4];
        const int n = 8 * (2 * (j + lane / 16) + warp % 2) + lane % 8;
        load_matrices(right, tokens(stage) + swizzled(n, i * 2 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          warp_product<Element>(acc[m][j], left[m], right[0], right[1]);
          warp_product<Element>(acc[m][j + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  // The first stage's step of a delta.
  __device__ __forceinline__ void multiply_delta(const Delta& delta, float (&acc)[2][Shape::kEights][4]) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    Factor<Element> left[2];  // sixteens of rows
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = warp / 2 * 32 + m * 16 + lane / 4;
      left[m].set(load_shared16(weights(0) + swizzled(row, lane % 4)),
                  load_shared16(weights(0) + swizzled(row + 8, lane % 4)), 0);
    }
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const int first = 8 * (2 * j + warp % 2);
      if (first >= delta.high || first + 8 <= delta.low) continue;
      Shrunk shrunk[1];
      shrunk[0].load(tokens(0), first);
#pragma unroll
      for (int m = 0; m < 2; ++m) Shrunk::multiply(acc[m][j], left[m], shrunk);
    }
  }

  __device__ __forceinline__ void run(const ExpertTables& tables) {
    const int k = kGateUp ? args.hidden : args.inner;
    const int steps = (k + kOperandK - 1) / kOperandK;
    float acc[2][Shape::kEights][4] = {};
    __syncthreads();  // the work before has been stored
    for (int n = threadIdx.x; n < work.count; n += Shape::kThreads) {
      const int pair = args.perm[work.first + n];
      index()[n] = kGateUp ? pair / args.top_k : pair;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Shape::kStages - 1; ++step) {
      if (step < steps) load_base(step);
      copies_commit();
    }
    for (int step = 0; step < steps; ++step) {
      copies_wait<Shape::kStages - 2>();
      __syncthreads();
      if (step + Shape::kStages - 1 < steps) load_base(step + Shape::kStages - 1);
      copies_commit();
      multiply_base(step % Shape::kStages, acc);
    }
    if (args.lora_tile_count > 0) {
      int* scratch = reinterpret_cast<int*>(shared + Shape::kScratch);
      const DeltaCount found = find_deltas<Shape::kMaxTokens, Shape::kThreads>(
          args, tables, work, threadIdx.x, deltas(), scratch, [] { __syncthreads(); });
      for (int i = 0; i < found.deltas; ++i) {
        const Delta delta = deltas()[i];
        for (int step = 0; step < delta.steps; ++step) {
          __syncthreads();  // the stage has been read
          load_delta(delta, delta_step(delta, step));
          copies_commit();
          copies_wait<0>();
          __syncthreads();
          multiply_delta(delta, acc);
        }
      }
      __syncthreads();
    }
    const int warp = threadIdx.x / kWarp;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int sixteen = warp / 2 * 2 + m;
      if (sixteen / 4 >= work.units) continue;
      PrefillStore<Element, kGateUp> store(args, work, work.unit * 4 + sixteen);
#pragma unroll
      for (int j = 0; j < Shape::kEights; ++j) {
        const int first = 8 * (2 * j + warp % 2);
        if (first < work.count) store(acc[m][j], first, index());
      }
    }
  }
};

template <class Config, bool kGateUp>
__device__ __forceinline__ void prefill_mma(const MoePrefillArgs& args) {
  using Shape = PrefillMmaShape<Config>;
  extern __shared__ __align__(128) char dynamic[];
  let_next_begin();
  wait_for_front();
  int* at = reinterpret_cast<int*>(dynamic + Shape::kTables);
  const ExpertTables tables{at, at + args.experts + 1, at + 2 * (args.experts + 1),
                             at + 3 * (args.experts + 1), args.experts};
  const int units = prefill_units<kGateUp>(args);
  build_tables<Shape::kMaxTokens, Shape::kThreads>(args, tables);
  Walk<Shape::kMaxTokens> walk(tables, units, Shape::kUnits, 1,
                                Turns{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), 0});
  PrefillMma<Config, kGateUp> product{args, dynamic, shared_address(dynamic), Work{}};
  while (walk.next(product.work)) product.run(tables);
}

template <class Config, int kThreads>
__device__ void moe_prefill_mma_gate_up(const MoePrefillArgs& args) {
  static_assert(kThreads == PrefillMmaShape<Config>::kThreads, "threads");
  prefill_mma<Config, true>(args);
}
template <class Config, int kThreads>
__device__ void moe_prefill_mma_down(const MoePrefillArgs& args) {
  static_assert(kThreads == PrefillMmaShape<Config>::kThreads, "threads");
  prefill_mma<Config, false>(args);
}

}  // namespace amphora
