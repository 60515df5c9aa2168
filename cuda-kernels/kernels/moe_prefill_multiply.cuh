// A warpgroup of a prefill block that multiplies: the base by products of the warpgroup, then the deltas onto the same
// sums, by products of single warps or by the warpgroup's, and what becomes of them.
#pragma once

#include "amphora/matrices.cuh"
#include "kernels/moe_prefill_block.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, class Shape, bool kGateUp, PrefillForm kForm>
struct PrefillMultiply {
  using Block = PrefillBlock<Shape, kGateUp, kForm>;
  using Shared = typename Block::Shared;
  static constexpr int kAcc = Shape::kMaxTokens / 2;

  const MoePrefillArgs& args;
  const Shared& shared;
  int group;
  typename Block::WeightRing weights;
  typename Block::TokenRing tokens;
  int number;  // works before this one; -1: before the first

  // Goes on where the product in front has ended.
  template <class Front>
  __device__ __forceinline__ void follow(const Front& front) {
    weights = front.weights;
    tokens = front.tokens;
    number = front.number;
  }
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
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared.weights_empty(weight_stage));
    release_tokens(token_stage);
  }
  __device__ __forceinline__ void release_tokens(int token_stage) const {
    const int lane = threadIdx.x % kWarp;
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

  // The deltas, added to the base. With many adapters this is a few products among many other instructions: what a
  // lane needs in each stage is found once.
  __device__ __forceinline__ void deltas(float (&acc)[Shape::kBlocks][kAcc], const Work& work, int stages, bool active) {
    // The range of a tile whose tokens have one adapter, as those of a prompt do.
    const int all = work.count << 16, sixteens = (work.count + 15) / 16;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4, g = lane / 4;
    const bool pairs = !kGateUp && args.hidden % 16 == 0;
    int row = group * Shape::kBlocks * kFactorRows + (kGateUp ? warp * 8 + g : warp * 16 + (pairs ? 2 * g : g));
    unsigned rounded = swizzled(lane % 8, lane / 8), rests = swizzled(lane % 8, 4 + lane / 8);
    keep(row);
    keep(rounded);
    keep(rests);
    for (int at = 0; at < stages; ++at) {
      wait_full();
      if (active) {
        const StageInfo* info = shared.info(tokens.stage);
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
          const int4 delta = info->delta[side];
          const int range = uniform(delta.x);
          if (range == 0) continue;
          const unsigned shrunk = shared.tokens(tokens.stage) + delta.y;
#pragma unroll
          for (int b = 0; b < Shape::kBlocks; ++b) {
            const unsigned factor = shared.weights(weights.stage) + side * Shape::kFactor + lane % 4 * 16 +
                                    (row + b * kFactorRows) * delta.z;
            const Factor<Element> left = load_factor(factor, delta, pairs);
            if constexpr (Shape::kMasked) {
              if (range == all) {
                choose_all<Shape::kMaxTokens / 16>(acc[b], left, sixteens, operand(shared.tokens(tokens.stage)));
              } else {
                add_delta(acc[b], left, range, shrunk + rounded, shrunk + rests);
              }
            } else {
              add_windows(acc[b], left, range, operand(shared.tokens(tokens.stage)) + uniform(delta.y) / 16);
            }
          }
        }
      }
      release(weights.stage, tokens.stage);
      step();
    }
  }
  static constexpr int kFactorRows = kGateUp ? 32 : 64;  // of B, of gate or of down, in a unit

  // Held where it is: the compiler would rather find it again each time.
  template <class T>
  static __device__ __forceinline__ void keep(T& value) {
    asm volatile("" : "+r"(value));
  }

  // This lane's two rows of B.
  static __device__ __forceinline__ Factor<Element> load_factor(unsigned at, const int4& delta, bool pairs) {
    const int t = threadIdx.x % 4;
    uint4 first = make_uint4(0, 0, 0, 0), second = first;
    if (t < (delta.w & 0xff)) first = load_shared16(at);
    if constexpr (kGateUp) {
      if (t < delta.w >> 8) second = load_shared16(at + Shape::kFactorUps);
    } else {
      if (t < (delta.w & 0xff)) second = load_shared16(at + (pairs ? delta.z : 8 * delta.z));
    }
    Factor<Element> rows;
    rows.set(first, second, static_cast<unsigned>(delta.w) >> 16);
    return rows;
  }

  // A step of a delta of all columns, by products of the warpgroup onto the sums.
  template <int kSixteens>
  static __device__ __forceinline__ void add_all(float (&acc)[kAcc], const Factor<Element>& left, unsigned long long right) {
    using Product = RegisterProduct<16 * kSixteens>;
    products_begin();
    // What is small first.
#pragma unroll
    for (int i = 0; i < 2; ++i) Product::run(acc, left.high[i], right + 4 + 2 * i);
    if constexpr (Factor<Element>::kTwo) {
#pragma unroll
      for (int i = 0; i < 2; ++i) Product::run(acc, left.low[i], right + 2 * i);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) Product::run(acc, left.high[i], right + 2 * i);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < kAcc; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  }
  template <int kSixteens>
  static __device__ __forceinline__ void choose_all(float (&acc)[kAcc], const Factor<Element>& left, int sixteens,
                                                    unsigned long long right) {
    if constexpr (kSixteens > 1) {
      if (sixteens <= narrower(kSixteens)) {
        choose_all<narrower(kSixteens)>(acc, left, sixteens, right);
        return;
      }
    }
    add_all<kSixteens>(acc, left, right);
  }

  // Products of the warpgroup, each window a sum of its own of which columns of the slot are added. `right`: shrunk rows
  // from column 0 on.
  static __device__ __forceinline__ void add_windows(float (&acc)[kAcc], const Factor<Element>& left, int range,
                                                     unsigned long long right) {
    const int low = range & 0xffff, high = range >> 16;
#pragma unroll
    for (int first = 0; first < Shape::kMaxTokens; first += kDeltaWindow) {
      if (first >= high || first + kDeltaWindow <= low) continue;
      const unsigned long long window = right + first * (kOperandRow >> 4);
      float own[kDeltaWindow / 2];
      products_begin();
      // What is small first.
      RegisterProduct<kDeltaWindow, true>::run(own, left.high[0], window + 4);
      RegisterProduct<kDeltaWindow>::run(own, left.high[1], window + 6);
      if constexpr (Factor<Element>::kTwo) {
#pragma unroll
        for (int i = 0; i < 2; ++i) RegisterProduct<kDeltaWindow>::run(own, left.low[i], window + 2 * i);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) RegisterProduct<kDeltaWindow>::run(own, left.high[i], window + 2 * i);
      products_commit();
      products_wait<0>();
#pragma unroll
      for (int i = 0; i < kDeltaWindow / 2; ++i) asm volatile("" : "+f"(own[i])::"memory");
#pragma unroll
      for (int j = 0; j < kDeltaWindow / 8; ++j) {
        add_columns(acc + first / 2 + 4 * j, own + 4 * j, first + 8 * j, low, high);
      }
    }
  }
  // Adds eight columns from `first` on to those of them that are in low .. high.
  static __device__ __forceinline__ void add_columns(float* acc, const float* own, int first, int low, int high) {
    const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (static_cast<unsigned>(column + c - low) < static_cast<unsigned>(high - low)) {
        acc[c] += own[c];
        acc[2 + c] += own[2 + c];
      }
    }
  }

  // Products of single warps: a step of a delta, to the sixteens of columns that it meets, each in a place of its own: so
  // an accumulator's is known to the compiler. Shrunk rows of others' tokens are zeros. `rounded` and `rests`: this lane's of the shrunk rows from column 0 on.
  static __device__ __forceinline__ void add_delta(float (&acc)[kAcc], const Factor<Element>& left, int range,
                                                   unsigned rounded, unsigned rests) {
    const int high = range >> 16;
    switch ((range & 0xffff) / 16) {
#define AMPHORA_SIXTEEN(n)                                      \
  case n:                                                       \
    if constexpr (16 * n < Shape::kMaxTokens) {                 \
      add_sixteen<n>(acc, left, rounded, rests);                \
      if (high <= 16 * (n + 1)) break;                          \
    }                                                           \
    [[fallthrough]];
      AMPHORA_SIXTEEN(0)
      AMPHORA_SIXTEEN(1)
      AMPHORA_SIXTEEN(2)
      AMPHORA_SIXTEEN(3)
      AMPHORA_SIXTEEN(4)
      AMPHORA_SIXTEEN(5)
      AMPHORA_SIXTEEN(6)
      AMPHORA_SIXTEEN(7)
      AMPHORA_SIXTEEN(8)
      AMPHORA_SIXTEEN(9)
      AMPHORA_SIXTEEN(10)
      AMPHORA_SIXTEEN(11)
      AMPHORA_SIXTEEN(12)
      AMPHORA_SIXTEEN(13)
      AMPHORA_SIXTEEN(14)
      AMPHORA_SIXTEEN(15)
#undef AMPHORA_SIXTEEN
      default:
        break;
    }
  }
  // Each warp's share of a warpgroup's product is laid out as its own products are.
  template <int kSixteen>
  static __device__ __forceinline__ void add_sixteen(float (&acc)[kAcc], const Factor<Element>& left, unsigned rounded,
                                                     unsigned rests) {
    Shrunk shrunk[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      constexpr int kEight = 8 * kOperandRow;
      load_matrices(shrunk[j].part[0], rounded + (2 * kSixteen + j) * kEight);
      load_matrices(shrunk[j].part[1], rests + (2 * kSixteen + j) * kEight);
    }
    Shrunk::multiply(acc + 8 * kSixteen, left, shrunk);
  }

  // Makes the works of this product. Before the first of all nothing is stored, but as if it were: instructions
  // come from memory too, and now there is time, as operands are on their way.
  __device__ __forceinline__ void run() {
    const int steps = Block::steps(args);
    for (;; ++number) {
      const bool rehearsal = number < 0;
      Work work{0, 0, Shape::kUnits, 0, 0, 0};
      if (!rehearsal) {
        barrier_wait(shared.tokens_full(tokens.stage), tokens.parity);
        work = this->work(number & 1);
        if (work.product != (kGateUp ? kGateUpProduct : kDownProduct)) return;
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
        const int columns = rehearsal ? Shape::kMaxTokens : work.count;
        if constexpr (kStaged) {
          store_staged(store, acc[b], columns, work, work.unit + group * Shape::kBlocks + b);
        } else {
          store_all(store, acc[b], columns, shared.index(number & 1));
        }
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
    const int more = Block::kDeltas ? uniform(shared.info(last)->deltas) : 0;
    release((weights.stage + Shape::kWeightStages - 1) % Shape::kWeightStages, last);
    if constexpr (Block::kDeltas) deltas(acc, work, more, active);
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

  // Gate_up's outputs go through shared memory where a launch makes both products: so that a token's 64 bytes are
  // written at once, which each warp has a quarter of.
  static constexpr bool kStaged = kGateUp && Block::kBoth && Shape::kStageTokens > 0;
  __device__ __forceinline__ void store_staged(const PrefillStore<Element, kGateUp>& store, const float (&acc)[kAcc],
                                               int columns, const Work& work, int unit) const {
    static_assert(sizeof(Element) == 2, "32 outputs are 64 bytes");
    static_assert(Shape::kStageTokens == 8 * kPass, "a pass is a stage");
    char* stage = shared.stage(group);
    // Pieces of 16 bytes, exchanged by the row so that banks differ.
    const auto piece = [&](int n, int at) { return stage + n * 64 + (at ^ (n / 2 % 4)) * 16; };
    const int thread = threadIdx.x % 128, lane = thread % kWarp, warp = thread / kWarp;
    const int token = thread / 4, output = unit * 32 + thread % 4 * 8;
    char* out = static_cast<char*>(args.out) + (static_cast<long long>(work.first + token) * args.inner + output) * 2;
#pragma unroll
    for (int first = 0; first < kEights; first += kPass) {
      if (8 * first >= columns) break;
#pragma unroll
      for (int j = 0; j < kPass; ++j) {
        const int n = 8 * j + store.token();
        *reinterpret_cast<unsigned*>(piece(n, warp) + lane / 8 * 4) = store.outputs(acc + 4 * (first + j));
      }
      named_barrier(kStore + group, 128);
      if (8 * first + token < work.count && output < args.inner) {
        const uint4 value = *reinterpret_cast<const uint4*>(piece(token, thread % 4));
        *reinterpret_cast<uint4*>(out + static_cast<long long>(8 * first) * args.inner * 2) = value;
      }
      named_barrier(kStore + group, 128);
    }
  }
  static constexpr int kStore = 4;  // the first of named barriers, one of each group

  __device__ __forceinline__ Work work(int which) const {
    volatile Work* from = shared.work(which);
    return Work{uniform(from->expert), uniform(from->unit), uniform(from->units), uniform(from->first),
                uniform(from->count), uniform(from->product)};
  }
};

#endif

}  // namespace amphora
