// The deltas of a weight stream's tiles, as its epilogues make them: which adapters meet in a pass, their
// B rows of a tile on the way to shared memory, the shrunk rows in registers, and the products.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/mma.cuh"
#include "amphora/moe_work.cuh"
#include "amphora/reduce.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

// An adapter of a pass. In words, since the compiler copies a structure of smaller fields to local memory, whose
// stores cost the stream more than all else of the deltas.
struct PassAdapter {
  // Its tokens of the pass: begin, end in 8 bits each, above them 1 where one shrunk row is for both slices.
  // The slices' ranks, 16 bits each. B of each slice in units of kArenaUnit.
  uint4 words;

  __device__ __forceinline__ int begin() const { return static_cast<int>(words.x & 0xff); }
  __device__ __forceinline__ int end() const { return static_cast<int>(words.x >> 8 & 0xff); }
  __device__ __forceinline__ bool shared() const { return words.x >> 16 != 0; }
  __device__ __forceinline__ int rank0() const { return static_cast<int>(words.y & 0xffff); }
  __device__ __forceinline__ int rank1() const { return static_cast<int>(words.y >> 16); }
  __device__ __forceinline__ unsigned b0() const { return words.z; }
  __device__ __forceinline__ unsigned b1() const { return words.w; }
};

// The adapters that meet in one pass, in the order of the tokens.
struct PassAdapters {
  int count;
  int chunks;  // of 32 ranks, of the largest rank
  PassAdapter of[kTileRows];
};

// Fills `found` for the pass of `item`; all lanes call.
template <int kSlices>
__device__ __forceinline__ void find_adapters(const MoeStreamArgs& args, const WorkLists& lists,
                                              int jobs, const WorkItem& item, PassAdapters& found) {
  const int lane = threadIdx.x % kWarp, first = item.first;
  int low = 0, high = jobs;  // the first LoRA tile that ends behind `first`
#pragma unroll 1
  while (low < high) {
    const int middle = (low + high) / 2;
    if (lists.job_first[middle] + lists.job_rows[middle] > first) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int job = low + lane;
  const bool real = job < jobs && lists.job_first[job] < first + item.count;
  LoraRow rows[2] = {LoraRow{0, 0, 0, 0.f}, LoraRow{0, 0, 0, 0.f}};
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (real) rows[slice] = lora_row(args.lora, lists.job_slot[job], slice, item.expert);
  }
  const int count = __popc(__ballot_sync(kFullWarp, real));
  const int most = __reduce_max_sync(kFullWarp, static_cast<int>(max(rows[0].rank, rows[1].rank)));
  if (real) {
    const int begin = max(0, lists.job_first[job] - first);
    const int end = min(static_cast<int>(item.count), lists.job_first[job] + lists.job_rows[job] - first);
    const bool shared = kSlices > 1 && same_factor(rows[0], rows[1]);
    found.of[lane] = PassAdapter{make_uint4(begin | end << 8 | (shared ? 1 << 16 : 0),
                                            rows[0].rank | rows[1].rank << 16, rows[0].b, rows[1].b)};
  }
  if (lane == 0) {
    found.count = count;
    found.chunks = (most + 31) / 32;
  }
  __syncwarp();
}

// The lane's part of the B rows of a tile and an adapter: 8 ranks of rows g (`even`) and g + 8 (`odd`) of
// the mma.
template <class Element>
struct FactorRows {
  const Element* even;
  const Element* odd;
  bool has_even, has_odd;
};
template <class Element, int kSlices>
__device__ __forceinline__ FactorRows<Element> factor_rows(const LoraArgs& lora, const PassAdapter& of,
                                                           int tile, int chunk) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, at = chunk * 32 + lane % 4 * 8;
  const int rank0 = of.rank0(), rank1 = kSlices == 1 ? rank0 : of.rank1();
  FactorRows<Element> rows;
  // Of one slice, rows 2g and 2g + 1 of 16; of two, row g of 8 of each.
  const int row = kSlices == 1 ? tile * kTileRows + 2 * g : tile * (kTileRows / 2) + g;
  rows.even = lora_block<Element>(lora, of.b0()) + static_cast<long long>(row) * rank0 + at;
  rows.odd = kSlices == 1 ? rows.even + rank0
                          : lora_block<Element>(lora, of.b1()) + static_cast<long long>(row) * rank1 + at;
  rows.has_even = at < rank0;
  rows.has_odd = at < rank1;
  return rows;
}

// Brings the lane's B rows of a tile, each lane for itself, so that nothing but its own wait orders them.
// Single pieces and not bulk copies: those would queue behind the weights on the way. Of each of the
// first kPieces of (chunk, adapter) there are two pieces; what is left is brought near.
template <class Shape, class Element, int kSlices>
__device__ __forceinline__ void issue_factors(const MoeStreamArgs& args, const PassAdapters& adapters,
                                              int tile, uint4 (*to)[2][kWarp]) {
  const int lane = threadIdx.x % kWarp, count = adapters.count, chunks = adapters.chunks;
  int piece = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 2
    for (int j = 0; j < count; ++j, ++piece) {
      const auto rows = factor_rows<Element, kSlices>(args.lora, adapters.of[j], tile, chunk);
      if (piece < Shape::kPieces) {
        copy16(shared_address(&to[piece][0][lane]), rows.even, rows.has_even);
        copy16(shared_address(&to[piece][1][lane]), rows.odd, rows.has_odd);
      } else {
        if (rows.has_even) prefetch_l2(rows.even);
        if (rows.has_odd) prefetch_l2(rows.odd);
      }
    }
  }
}

// Where the shrunk row of a slice lies. +0 means that it is not there yet: what is stored is never that, and
// the other product of the pair writes it over again. So a number is its own flag, and reaches those who wait
// for it in one way to the L2 cache and back, where a count behind it would take three.
template <int kSlices>
__device__ __forceinline__ float* shrunk_place(const LoraArgs& lora, int position, int slice) {
  return lora.shrunk + (position * kSlices + slice) * kMaxRank;
}
__device__ __forceinline__ bool is_there(const float4& value) {
  return __float_as_uint(value.x) != 0 && __float_as_uint(value.y) != 0 &&
         __float_as_uint(value.z) != 0 && __float_as_uint(value.w) != 0;
}

// The shrunk rows of the lane's tokens: ranks 32 chunk + 8t .. + 8 of column g of each group.
template <class Element, int kSlices, int kGroups>
struct ShrunkRows {
  int rank[kGroups][kSlices];  // of the adapter of the lane's token; 0: it has none
  Split<Element> part[kGroups][kSlices];

  __device__ __forceinline__ void find(const PassAdapters& adapters) {
    const int g = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) rank[q][slice] = 0;
#pragma unroll 1
    for (int j = 0; j < adapters.count; ++j) {
      const PassAdapter of = adapters.of[j];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        if (q * 8 + g < of.begin() || q * 8 + g >= of.end()) continue;
        rank[q][0] = of.rank0();
        if (kSlices > 1) rank[q][kSlices - 1] = of.shared() ? 0 : of.rank1();
      }
    }
  }

  // Waits until they are all there.
  __device__ __forceinline__ void load(const LoraArgs& lora, int first, int chunk) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, at = chunk * 32 + lane % 4 * 8;
    float4 value[kGroups][kSlices][2];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          float4(&of)[2] = value[q][slice];
          of[0] = of[1] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (at >= rank[q][slice]) continue;
          const float* from = shrunk_place<kSlices>(lora, first + q * 8 + g, slice) + at;
          of[0] = load_relaxed(from);
          of[1] = load_relaxed(from + 4);
        }
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          if (at >= rank[q][slice]) continue;
          there = there && is_there(value[q][slice][0]) && is_there(value[q][slice][1]);
        }
    } while (!__all_sync(kFullWarp, there));
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const float4 low = value[q][slice][0], high = value[q][slice][1];
        const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        part[q][slice].set(eight);
      }
  }
};

// sum + low += the deltas of 32 ranks, of a tile's rows for the tokens of each adapter; `pieces` are the
// B rows that were brought.
template <class Shape, class Element, int kSlices, int kGroups>
__device__ __forceinline__ void add_deltas(const MoeStreamArgs& args, const PassAdapters& adapters,
                                           const uint4 (*pieces)[2][kWarp],
                                           const ShrunkRows<Element, kSlices, kGroups>& shrunk, int tile,
                                           int chunk, float (&sum)[kGroups][4],
                                           float (&low)[kGroups][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, count = adapters.count;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  // What was brought of an adapter is read while the one in front of it is multiplied.
  const int base = chunk * count;
  PassAdapter of = adapters.of[0];
  uint4 u = nothing, v = nothing;
  const auto read = [&](int piece) {
    if (piece >= Shape::kPieces) return;
    u = pieces[piece][0][lane];
    v = pieces[piece][1][lane];
  };
  read(base);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const PassAdapter at = of;
    if (base + j >= Shape::kPieces) {
      const auto rows = factor_rows<Element, kSlices>(args.lora, at, tile, chunk);
      u = v = nothing;
      if (rows.has_even) u = *reinterpret_cast<const uint4*>(rows.even);
      if (rows.has_odd) v = *reinterpret_cast<const uint4*>(rows.odd);
    }
    const uint4 even = u, odd = v;
    if (j + 1 < count) {
      of = adapters.of[j + 1];
      read(base + j + 1);
    }
    const bool one = kSlices == 1 || at.shared();
    const uint4 second = one ? odd : nothing;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      if (at.begin() >= q * 8 + 8 || at.end() <= q * 8) continue;
      const bool mine = q * 8 + g >= at.begin() && q * 8 + g < at.end();
      shrunk.part[q][0].multiply(sum[q], low[q], even, second, mine);
      if (!one) shrunk.part[q][kSlices - 1].multiply(sum[q], low[q], nothing, odd, mine);
    }
  }
}

// Stores the products of a tile of A, times its scale.
template <int kSlices, int kGroups>
__device__ __forceinline__ void store_shrunk(const MoeStreamArgs& args, const ShrinkTile& tile,
                                             const WorkItem& item, const float (&sum)[kGroups][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if (2 * g >= tile.rows) return;
#pragma unroll
  for (int q = 0; q < kGroups; ++q)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int p = q * 8 + 2 * t + j;
      if (p >= item.count) continue;
      float* to = shrunk_place<kSlices>(args.lora, item.first + p, tile.slice) + tile.rank + 2 * g;
      const float even = sum[q][j] * tile.scale, odd = sum[q][j + 2] * tile.scale;
      store_relaxed(to, even == 0.f ? -0.f : even, odd == 0.f ? -0.f : odd);
    }
}

}  // namespace amphora
