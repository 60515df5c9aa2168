// A block of the warpgroup form of the expert products of a prefill step: its shape, what lies where in
// its shared memory, and the rings through which operands come.
//
// Weights and tokens have a ring each, 64 of k in a stage. Weights come from memory and take longest, so
// theirs is deep; tokens are in the cache, and come once for all blocks of a cluster. Two deltas take a stage
// of both, for B and for their shrunk rows.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/cluster.cuh"
#include "amphora/group_product.cuh"
#include "kernels/moe_prefill_epilogue.cuh"
#include "kernels/moe_prefill_plan.cuh"

namespace amphora {

// What those that multiply are told of a stage.
struct __align__(16) StageInfo {
  int4 delta[2];  // as DeltaInfo says; zeros: there is none
  int deltas;     // of the last stage of a base: stages of deltas behind it
};
// A step of a delta, in words for those that have least time: x: its tokens, low | high << 16; y: where in the stage its
// shrunk row of token 0 would be, in bytes; z: bytes from row to row of B; w: eights of the rank that rows of the
// gate (or of down) have, and of the up << 8.
__device__ __forceinline__ int4 delta_info(int range, const FactorInfo& factor, int windows_before) {
  const int row = windows_before * kDeltaWindow - windows_start(range & 0xffff);
  return make_int4(range, row * kOperandRow, static_cast<int>(factor.pitch()),
                   (factor.gates ? factor.eights : 0) | (factor.ups ? factor.eights << 8 : 0));
}
template <int kGroups_, int kBlocks_, int kCluster_, int kMaxTokens_, int kWeightStages_, int kTokenStages_>
struct PrefillShape {
  static constexpr int kGroups = kGroups_;              // warpgroups that multiply
  static constexpr int kBlocks = kBlocks_;              // units of each
  static constexpr int kCluster = kCluster_;            // blocks that share tokens
  static constexpr int kMaxTokens = kMaxTokens_;        // columns
  static constexpr int kWeightStages = kWeightStages_;  // of the rings
  static constexpr int kTokenStages = kTokenStages_;
  // Of few tokens an expert has one tile as a rule, and a weight is not looked for again. It pays there alone, by 1 %.
  static constexpr bool kOnce = kMaxTokens <= 64;
  static constexpr int kUnits = kGroups * kBlocks;
  static constexpr int kWorkUnits = kCluster * kUnits;  // of a whole work
  static constexpr int kBring = 96;                     // threads that bring tokens and deltas
  static constexpr int kArrivals = kBring + 1;          // at a stage of tokens
  static constexpr int kThreads = 128 * kGroups + kBring + 32;  // and a warp that brings weights
  static constexpr int kWeightBytes = kUnits * kGroupBytes;     // of a stage
  static constexpr int kTokenBytes = kMaxTokens * kOperandRow;
  // Deltas by products of single warps, for which shrunk rows of others' tokens are made zeros first; or by the
  // warpgroup's onto the sums, where all of a tile's tokens have one adapter. Tiles of fewer
  // tokens have fewer stages of deltas, for which that would be waited for: there products of the warpgroup take all
  // columns of a window, of which those of others are not added.
  static constexpr bool kMasked = kMaxTokens > 128;
  // Of a stage of weights with B of two deltas: the second's start, and where a delta's ups are.
  static constexpr int kFactor = kWeightBytes / 2, kFactorUps = kFactor / 2;
  static_assert(kMaxTokens % kDeltaWindow == 0 && kMaxTokens <= 256, "columns of a warpgroup product");

  // Shared memory, from a multiple of 1024 on: the weights' ring, then
  static constexpr int kTokens = kWeightStages * kWeightBytes;         // the tokens' ring
  static constexpr int kDeltas = kTokens + kTokenStages * kTokenBytes; // Delta [kMaxTokens]
  static constexpr int kBarriers = kDeltas + kMaxTokens * 16;          // Barrier: full and empty, done, landed
  static constexpr int kInfo = kBarriers + (2 * kWeightStages + 3 * kTokenStages + 2) * 8;  // StageInfo
  static constexpr int kIndex = kInfo + kTokenStages * 48;             // int [2, kMaxTokens]
  static constexpr int kWork = kIndex + 2 * kMaxTokens * 4;            // Work [2], 32 bytes each
  static constexpr int kScratch = kWork + 64;                          // int [4]
  static constexpr int kListed = 32;                                   // stages of deltas of a tile
  static constexpr int kStageList = kScratch + 16;                     // DeltaStage [kListed]
  static constexpr int kMostCuts = 63;                                 // of down's shrink, of a block
  static constexpr int kCuts = kStageList + kListed * 32;              // int: their number, and [kMostCuts]
  static constexpr int kCutWorks = 6;                                  // that are found with the list
  static constexpr int kCutWork = kCuts + 4 * (kMostCuts + 1);         // ShrinkWork [kCutWorks]
  static constexpr int kStage = kCutWork + kCutWorks * 80;             // outputs of gate_up on their way
  static constexpr int kStageTokens = kMaxTokens > 128 ? 32 : 0;       // of each warpgroup, 64 bytes each
  static constexpr int kTables = kStage + kGroups * kStageTokens * 64; // int [4, experts + 1]
  static __host__ __device__ constexpr int bytes(int experts) { return 1024 + kTables + 16 * (experts + 1); }
};

// Where in a ring a thread is.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void step() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What a launch makes: one product, with adapters or without; or both, one after the other, without adapters or with.
enum class PrefillForm { kOne, kBoth, kBothDeltas };

template <class Shape, bool kGateUp, PrefillForm kForm>
struct PrefillBlock {
  static constexpr bool kBoth = kForm != PrefillForm::kOne, kDeltas = kForm != PrefillForm::kBoth;
  static constexpr int kRowBytes = 2;  // of an element
  using WeightRing = Ring<Shape::kWeightStages>;
  using TokenRing = Ring<Shape::kTokenStages>;

  struct Shared {
    unsigned base;
    char* bytes;
    __device__ unsigned weights(int stage) const { return base + stage * Shape::kWeightBytes; }
    __device__ unsigned tokens(int stage) const {
      return base + Shape::kTokens + stage * Shape::kTokenBytes;
    }
    __device__ Barrier* barrier(int index) const {
      return reinterpret_cast<Barrier*>(bytes + Shape::kBarriers) + index;
    }
    __device__ Barrier* weights_full(int stage) const { return barrier(stage); }
    __device__ Barrier* weights_empty(int stage) const { return barrier(Shape::kWeightStages + stage); }
    __device__ Barrier* tokens_full(int stage) const { return barrier(2 * Shape::kWeightStages + stage); }
    __device__ Barrier* tokens_empty(int stage) const {
      return barrier(2 * Shape::kWeightStages + Shape::kTokenStages + stage);
    }
    __device__ Barrier* done(int which) const {
      return barrier(2 * (Shape::kWeightStages + Shape::kTokenStages) + which);
    }
    // Shrunk rows are in a stage of tokens, but others' tokens are not zeros yet.
    __device__ Barrier* landed(int stage) const {
      return barrier(2 * (Shape::kWeightStages + Shape::kTokenStages) + 2 + stage);
    }
    // Of a stage of tokens.
    __device__ StageInfo* info(int stage) const {
      return reinterpret_cast<StageInfo*>(bytes + Shape::kInfo) + stage;
    }
    __device__ int* index(int which) const {
      return reinterpret_cast<int*>(bytes + Shape::kIndex) + which * Shape::kMaxTokens;
    }
    __device__ volatile Work* work(int which) const {
      return reinterpret_cast<Work*>(bytes + Shape::kWork + which * 32);
    }
    __device__ DeltaStage* delta_stages() const {
      return reinterpret_cast<DeltaStage*>(bytes + Shape::kStageList);
    }
    __device__ char* stage(int group) const { return bytes + Shape::kStage + group * Shape::kStageTokens * 64; }
    __device__ Delta* deltas() const { return reinterpret_cast<Delta*>(bytes + Shape::kDeltas); }
    // Tiles of down's shrink that are the block's, behind their number, the last to be made first.
    __device__ int* cuts() const { return reinterpret_cast<int*>(bytes + Shape::kCuts); }
    __device__ char* cut_works() const { return bytes + Shape::kCutWork; }
    // 0 for find_deltas, 1 and 2 for what it found.
    __device__ int* scratch() const { return reinterpret_cast<int*>(bytes + Shape::kScratch); }
    __device__ ExpertTables tables(int experts) const {
      int* at = reinterpret_cast<int*>(bytes + Shape::kTables);
      return ExpertTables{at, at + experts + 1, at + 2 * (experts + 1), at + 3 * (experts + 1), experts};
    }
  };

  static __device__ __forceinline__ void init(const Shared& shared) {
    for (int i = 0; i < Shape::kWeightStages; ++i) {
      barrier_init(shared.weights_full(i), 1);
      barrier_init(shared.weights_empty(i), 4 * Shape::kGroups);  // warps
    }
    for (int i = 0; i < Shape::kTokenStages; ++i) {
      barrier_init(shared.tokens_full(i), Shape::kArrivals);  // all that copy, and one for `info`
      barrier_init(shared.landed(i), 1);
      barrier_init(shared.tokens_empty(i), 4 * Shape::kGroups * Shape::kCluster);
    }
    // Who multiplies, and where they wait, too, the two warps that bring and do not lead: so they see every phase.
    constexpr int kSee = kBoth ? Shape::kBring / kWarp - 1 : 0;
    for (int i = 0; i < 2; ++i) barrier_init(shared.done(i), 128 * Shape::kGroups + kSee);
    barrier_init_done();
  }

  static __device__ __forceinline__ int k(const MoePrefillArgs& args) {
    return kGateUp ? args.hidden : args.inner;
  }
  static __device__ __forceinline__ int steps(const MoePrefillArgs& args) {
    return (k(args) + kOperandK - 1) / kOperandK;
  }
};

}  // namespace amphora
