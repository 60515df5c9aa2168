// A warpgroup of a prefill block that multiplies: the base, the deltas in the same accumulators, and what
// becomes of them.
#pragma once

#include "amphora/matrices.cuh"
#include "kernels/moe_prefill_block.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, class Shape, bool kGateUp>
struct PrefillMultiply {
  using Block = PrefillBlock<Shape, kGateUp>;
  using Shared = typename Block::Shared;
  static constexpr int kAcc = Shape::kMaxTokens / 2;

  const MoePrefillArgs& args;
  const Shared& shared;
  int group;
  typename Block::WeightRing weights;
  typename Block::TokenRing tokens;

  __device__ __forceinline__ void wait_full() const {
    barrier_wait(shared.tokens_full(tokens.stage), tokens.parity);
    barrier_wait(shared.weights_full(weights.stage), weights.parity);
  }
  __device__ __forceinline__ void step() {
    weights.step();
    tokens.step();
  }
  // This warp has done with a stage of each ring.
  __device__ __forceinline__ void release(int weight_stage, int token_stage) const {
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) barrier_arrive(shared.weights_empty(weight_stage));
    if constexpr (Shape::kCluster == 1) {
      if (lane == 0) barrier_arrive(shared.tokens_empty(token_stage));
    } else {
      if (lane < Shape::kCluster) barrier_arrive_at(shared.tokens_empty(token_stage), lane);
    }
  }
  __device__ __forceinline__ unsigned own_weights() const {
    return shared.weights(weights.stage) + group * Shape::kBlocks * kGroupBytes;
  }
  // Results are read behind a wait that the compiler does not tie to them.
  static __device__ __forceinline__ void settle(float (&acc)[Shape::kBlocks][kAcc]) {
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) asm volatile("" : "+f"(acc[b][i])::"memory");
    }
  }

  // Sixteens of tokens are a constant of the instruction. The last stage is released by the caller.
  template <int kSixteens>
  __device__ __forceinline__ void base(float (&acc)[Shape::kBlocks][kAcc], int steps) {
    int weights_before = 0, tokens_before = 0;
    for (int at = 0; at < steps; ++at) {
      wait_full();
      products_begin();
      const unsigned long long right = operand(shared.tokens(tokens.stage));
      const unsigned long long left = operand(own_weights());
#pragma unroll
      for (int i = 0; i < kOperandK / 16; ++i) {
#pragma unroll
        for (int b = 0; b < Shape::kBlocks; ++b) {
          GroupProduct<Element, 16 * kSixteens>::run(acc[b], left + b * (kGroupBytes >> 4) + 2 * i,
                                                     right + 2 * i);
        }
      }
      products_commit();
      if (at > 0) {
        products_wait<1>();
        release(weights_before, tokens_before);
      }
      weights_before = weights.stage;
      tokens_before = tokens.stage;
      step();
    }
    products_wait<0>();
    settle(acc);
  }

  // Each width is a loop of its own to compile; small ones wait for memory, so they need no fine steps.
  static __host__ __device__ constexpr int narrower(int sixteens) {
    return sixteens > 12 ? sixteens - 1 : sixteens > 4 ? sixteens - 2 : sixteens / 2;
  }
  template <int kSixteens>
  __device__ __forceinline__ void choose(float (&acc)[Shape::kBlocks][kAcc], int sixteens, int steps) {
    if constexpr (kSixteens > 1) {
      if (sixteens <= narrower(kSixteens)) {
        choose<narrower(kSixteens)>(acc, sixteens, steps);
        return;
      }
    }
    base<kSixteens>(acc, steps);
  }

  // A value that is the same in every lane, so that the compiler knows: products in a branch that it
  // thinks divergent are made one after the other.
  static __device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(kFullWarp, value, 0);
  }

  // The deltas, in the accumulators of the base. Only windows of tokens that the slot meets are touched;
  // others' tokens in them meet zeros, which leave every bit of an accumulator as it is.
  __device__ __forceinline__ void deltas(float (&acc)[Shape::kBlocks][kAcc], int stages, bool active) {
    for (int at = 0; at < stages; ++at) {
      wait_full();
      if (active) {
        async_proxy_fence();  // threads' copies brought both operands
        int row = 0;          // of the shrunk numbers
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
          const int range = uniform(shared.info(tokens.stage)[side]);
          const int low = range & 0xffff, high = range >> 16;
          if (high == 0) continue;
          delta(acc, low, high, side, row - windows_start(low));
          row += windows_end(high) - windows_start(low);
        }
      }
      release(weights.stage, tokens.stage);
      step();
    }
  }

  // In registers of its own: with accumulators that are a part of others' the compiler would make all
  // products one after the other, the base's too.
  template <int kColumns>
  static __device__ __forceinline__ void window_product(float* acc, unsigned long long rows,
                                                        unsigned long long window) {
    float own[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) asm volatile("mov.b32 %0, %1;" : "=f"(own[i]) : "f"(acc[i]));
    products_begin();
#pragma unroll
    for (int i = 3; i >= 0; --i) {  // the rest, then the rounded
      GroupProduct<Element, kColumns>::run(own, rows + i % 2 * 2, window + 2 * i);
    }
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      asm volatile("mov.b32 %0, %1;" : "=f"(acc[i]) : "f"(own[i]) : "memory");
    }
  }

  // One step of one, in a half `side` of the rows of B; `row`: of the shrunk numbers, that of column 0. In
  // bf16 their two parts lie side by side and meet the same B.
  __device__ __forceinline__ void delta(float (&acc)[Shape::kBlocks][kAcc], int low, int high, int side,
                                        int row) const {
    if constexpr (Shrunk<Element>::kElements) {
      const unsigned long long right = operand(shared.tokens(tokens.stage)) + row * (kOperandRow >> 4);
      const unsigned long long left = operand(own_weights()) + side * (kOperandRow >> 5);
#pragma unroll
      for (int first = 0; first < Shape::kMaxTokens; first += kDeltaWindow) {
        if (first >= high || first + kDeltaWindow <= low) continue;
        const unsigned long long window = right + first * (kOperandRow >> 4);
        constexpr int kRest = Shape::kMaxTokens % kDeltaWindow;
#pragma unroll
        for (int b = 0; b < Shape::kBlocks; ++b) {
          const unsigned long long rows = left + b * (kGroupBytes >> 4);
          if (kRest == 0 || first + kDeltaWindow <= Shape::kMaxTokens) {
            window_product<kDeltaWindow>(acc[b] + first / 2, rows, window);
          } else {
            window_product<kRest == 0 ? 16 : kRest>(acc[b] + first / 2, rows, window);
          }
        }
      }
    } else {
      // Each warp's share of a warpgroup product is laid out as its own products are.
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;
      unsigned left[Shape::kBlocks][2][4];
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_matrices(left[b][i], own_weights() + b * kGroupBytes +
                                        swizzled(warp * 16 + lane % 16, 4 * side + 2 * i + lane / 16));
        }
      }
#pragma unroll
      for (int j = 0; j < Shape::kMaxTokens / 8; ++j) {
        if (8 * j < high && 8 * j + 8 > low) {
          Shrunk<Element> shrunk;
          shrunk.load(shared.tokens(tokens.stage), row + 8 * j);
#pragma unroll
          for (int b = 0; b < Shape::kBlocks; ++b) shrunk.multiply(acc[b] + 4 * j, left[b]);
        }
      }
    }
  }

  // Before the first work nothing is stored, but as if it were: instructions come from memory too, and now
  // there is time, as operands are on their way.
  __device__ void run() {
    const int steps = Block::steps(args);
    for (int number = -1;; ++number) {
      const bool rehearsal = number < 0;
      Work work{0, 0, Shape::kUnits, 0, 0};
      if (!rehearsal) {
        barrier_wait(shared.tokens_full(tokens.stage), tokens.parity);
        work = this->work(number & 1);
        if (work.count == 0) return;
      }
      const bool active = group * Shape::kBlocks < work.units;
      // What the stores need of memory is asked for now.
      using Store = PrefillStore<Element, kGateUp>;
      const int sixteen = (work.unit + group * Shape::kBlocks) * 4 + threadIdx.x / kWarp % 4;
      Store store(args, work, sixteen);
      float acc[Shape::kBlocks][kAcc];
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) acc[b][i] = 0.f;
      }
      if (!rehearsal) multiply(acc, work, steps, active);
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
        if (group * Shape::kBlocks + b >= work.units) break;
        if (b > 0) store = Store(args, work, sixteen + 4 * b);
        store_all(store, acc[b], rehearsal ? Shape::kMaxTokens : work.count, shared.index(number & 1));
      }
      if (rehearsal) {
        wait_for_front();
      } else {
        barrier_arrive(shared.done(number & 1));
      }
    }
  }

  // The base and its deltas.
  __device__ __forceinline__ void multiply(float (&acc)[Shape::kBlocks][kAcc], const Work& work, int steps,
                                           bool active) {
    if (active) {
      choose<Shape::kMaxTokens / 16>(acc, (work.count + 15) / 16, steps);
    } else {
      for (int at = 0; at < steps; ++at) {
        wait_full();
        if (at + 1 < steps) release(weights.stage, tokens.stage);
        step();
      }
    }
    // The last stage of the base is still ours: it says how many stages the deltas have.
    const int last = (tokens.stage + Shape::kTokenStages - 1) % Shape::kTokenStages;
    const int more = uniform(shared.info(last)[2]);
    release((weights.stage + Shape::kWeightStages - 1) % Shape::kWeightStages, last);
    deltas(acc, more, active);
  }

  // Of `columns`, some at a time, so that they overlap.
  static constexpr int kEights = Shape::kMaxTokens / 8, kPass = 4;
  static __device__ __forceinline__ void store_all(const PrefillStore<Element, kGateUp>& store,
                                                   const float (&acc)[kAcc], int columns,
                                                   const int* index) {
#pragma unroll
    for (int first = 0; first < kEights; first += kPass) {
      if (8 * first >= columns) break;
#pragma unroll
      for (int j = first; j < first + kPass && j < kEights; ++j) store(acc + 4 * j, 8 * j, index);
    }
  }

  __device__ __forceinline__ Work work(int which) const {
    volatile Work* from = shared.work(which);
    return Work{uniform(from->expert), uniform(from->unit), uniform(from->units), uniform(from->first),
                uniform(from->count)};
  }
};

#endif

}  // namespace amphora
