// What linear_finish (linear_tile.cuh) does where deltas are plain: all outputs of the block's tile that have
// any belong to one slice of neighbouring outputs, no rank is above 32, and a warp's 16 rows have few slots.
// Then nothing passes through shared memory: operands come straight from memory in fragment order, beside
// the sums, and a lane ends with eight neighbouring outputs of a row, which are two loads of sums and a store.
//
// For each slot a warp walks the tile by groups of 32 outputs, for the rows of that slot alone, those without
// an adapter with the first. A product is 16 rows × 8 outputs × 16 of the rank; the eight numbers that a lane
// reads of a shrunk row or a row of B stand for the two neighbours here and two there that the instruction
// means, in both operands alike. Rows of other slots are zeros in it and get +0, as without deltas.
#pragma once

#include "amphora/args.h"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

template <class Element, int kCols>
struct FinishRows {
  static constexpr int kRows = 16, kGroup = 32, kGroups = kCols / kGroup;
  static constexpr int kBlocks = kGroup / 8;  // products of 8 outputs, of a group
  static constexpr int kMostRank = 32;        // four lanes hold so much of a row
  static constexpr int kMostSlots = 4;
  static constexpr int kNone = 0x7fffffff;

  // What a lane needs of a group: eight sums of each of its two rows, and rows of B.
  struct Group {
    float4 sums[2][2];
    uint4 factor[kBlocks];
  };

  const DenseArgs& args;
  const int first_col;
  const int lane = threadIdx.x % kWarp, across = lane % 4, down = lane / 4;
  int slice = -1;   // of the tile's outputs; -1: none
  int row[2];       // -1: none
  int slot[2];      // -1: no adapter
  unsigned b[2], rank[2];

  __device__ __forceinline__ FinishRows(const DenseArgs& args, int first_col) : args(args), first_col(first_col) {}

  __device__ __forceinline__ int slot_behind(int last) const {
    const int first = slot[0] > last ? slot[0] : kNone, second = slot[1] > last ? slot[1] : kNone;
    return __reduce_min_sync(kFullWarp, min(first, second));
  }

  // Whether the warp's part, rows from `first` on, is plain.
  __device__ __forceinline__ bool find(int first) {
    bool plain = (args.base.aligned & kAlignedRows) != 0;
#pragma unroll
    for (int i = 0; i < kMaxSlices; ++i) {
      if (i >= args.lora.slice_count || !slice_meets(args.lora.slices[i], first_col, first_col + kCols)) continue;
      plain = plain && slice < 0 && args.lora.slices[i].stride == 1;
      slice = i;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + down + i * 8;
      const bool there = at < args.base.tokens;
      row[i] = !there ? -1 : args.perm != nullptr ? args.perm[at] : at;
      slot[i] = there ? args.slot[row[i]] : -1;
      const LoraRow lora = slot[i] >= 0 && slice >= 0 ? lora_row(args.lora, slot[i], slice, 0) : LoraRow{0, 0, 0, 0.f};
      b[i] = lora.b;
      rank[i] = lora.rank;
    }
    int slots = 0;
    for (int of = slot_behind(-1); of != kNone && slots <= kMostSlots; of = slot_behind(of)) ++slots;
    return plain && slots <= kMostSlots && max(rank[0], rank[1]) <= kMostRank;
  }

  __device__ __forceinline__ void run() const {
    bool bare = true;
    for (int of = slot_behind(-1); bare || of != kNone; bare = false) {
      walk(of, bare);
      if (of != kNone) of = slot_behind(of);
    }
  }

  // The rows of slot `of`, and with `bare` those without an adapter.
  __device__ __forceinline__ void walk(int of, bool bare) const {
    const unsigned owners = __ballot_sync(kFullWarp, slot[0] == of || slot[1] == of);
    const int owner = owners == 0 ? 0 : __ffs(owners) - 1;
    const int own = slot[0] == of ? 0 : 1;
    const unsigned block = __shfl_sync(kFullWarp, own == 0 ? b[0] : b[1], owner);
    const int width = owners == 0 ? 0 : static_cast<int>(__shfl_sync(kFullWarp, own == 0 ? rank[0] : rank[1], owner));
    const bool whole = across * kOctet < width;  // classes are multiples of 8
    bool mine[2];
    uint4 shrunk[2][2];  // by row: the rounded part, and what rounding took
    const float* sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[i] = row[i] >= 0 && (slot[i] == of || (bare && slot[i] < 0));
      const long long at = mine[i] ? row[i] : 0;
      sums[i] = args.sums + at * args.base.n;
      const bool there = whole && mine[i] && slot[i] == of;
      const Element* x = shrunk_at<Element>(args.lora, there ? at : 0, there ? slice : 0) + (there ? across * kOctet : 0);
      shrunk[i][0] = there ? load_fresh(x) : make_uint4(0, 0, 0, 0);
      shrunk[i][1] = there ? load_fresh(x + width) : make_uint4(0, 0, 0, 0);
    }
    const SliceArgs& outputs = args.lora.slices[max(slice, 0)];
    const Element* factor = lora_block<Element>(args.lora, block) + across * kOctet;
    // The output that column `down` of a group's first product stands for, counted in the slice.
    const int element = first_col + down / 2 * kOctet + down % 2 - outputs.offset;
    const auto load = [&](Group& to, int group) {
      const int n = first_col + group * kGroup + across * kOctet;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4* from = reinterpret_cast<const float4*>(sums[i] + (n < args.base.n ? n : 0));
        to.sums[i][0] = __ldcg(from);
        to.sums[i][1] = __ldcg(from + 1);
      }
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int e = element + group * kGroup + j * 2;
        const bool there = whole && e >= 0 && e < outputs.len;
        to.factor[j] = there ? *reinterpret_cast<const uint4*>(factor + e * width) : make_uint4(0, 0, 0, 0);
      }
    };
    Group groups[2];
    load(groups[0], 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const Group& here = groups[group % 2];
      if (group + 1 < kGroups) load(groups[(group + 1) % 2], group + 1);
      const int n = first_col + group * kGroup + across * kOctet;
      float bias[kOctet];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) bias[i] = args.base.bias != nullptr && n < args.base.n ? args.base.bias[n + i] : 0.f;
      float delta[kBlocks][4] = {};
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 &low = shrunk[0][part], &high = shrunk[1][part];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          mma_k16<Element>(delta[j], low.x, high.x, low.y, high.y, here.factor[j].x, here.factor[j].y);
          mma_k16<Element>(delta[j], low.z, high.z, low.w, high.w, here.factor[j].z, here.factor[j].w);
        }
      }
      if (n >= args.base.n) continue;  // rows are whole octets
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!mine[i]) continue;
        unsigned words[kBlocks];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const float4& four = here.sums[i][j / 2];
          words[j] = pack_pair<Element>((j % 2 == 0 ? four.x : four.z) + delta[j][i * 2] + bias[j * 2],
                                        (j % 2 == 0 ? four.y : four.w) + delta[j][i * 2 + 1] + bias[j * 2 + 1]);
        }
        Element* to = static_cast<Element*>(args.base.out) + row[i] * args.base.out_pitch + n;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

// The block's tile of 64 rows; `false`: its deltas are not plain, and nothing has been done.
template <class Element, int kCols>
__device__ __forceinline__ bool finish_rows(const DenseArgs& args, int first_row, int first_col) {
  using Rows = FinishRows<Element, kCols>;
  Rows rows(args, first_col);
  const bool plain = rows.find(first_row + threadIdx.x / kWarp * Rows::kRows);
  if (!__syncthreads_and(plain)) return false;
  wait_for_front();
  let_next_begin();
  rows.run();
  return true;
}

}  // namespace amphora
