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

// An adapter of a pass.
struct alignas(16) PassAdapter {
  unsigned char begin, end;  // its tokens of the pass
  unsigned char shared;      // one shrunk row for both slices
  unsigned char reserved;
  unsigned short rank[2];
  unsigned b[2];             // B of each slice in units of kArenaUnit
};
static_assert(sizeof(PassAdapter) == 16, "one load");

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
    PassAdapter of;
    of.begin = static_cast<unsigned char>(max(0, lists.job_first[job] - first));
    of.end = static_cast<unsigned char>(
        min(static_cast<int>(item.count), lists.job_first[job] + lists.job_rows[job] - first));
    of.shared = kSlices > 1 && same_factor(rows[0], rows[1]);
    of.reserved = 0;
    of.rank[0] = static_cast<unsigned short>(rows[0].rank);
    of.rank[1] = static_cast<unsigned short>(rows[1].rank);
    of.b[0] = rows[0].b;
    of.b[1] = rows[1].b;
    found.of[lane] = of;
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
  const int rank0 = of.rank[0], rank1 = kSlices == 1 ? rank0 : of.rank[1];
  FactorRows<Element> rows;
  // Of one slice, rows 2g and 2g + 1 of 16; of two, row g of 8 of each.
  const int row = kSlices == 1 ? tile * kTileRows + 2 * g : tile * (kTileRows / 2) + g;
  rows.even = lora_block<Element>(lora, of.b[0]) + static_cast<long long>(row) * rank0 + at;
  rows.odd = kSlices == 1 ? rows.even + rank0
                          : lora_block<Element>(lora, of.b[1]) + static_cast<long long>(row) * rank1 + at;
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
        if (q * 8 + g < of.begin || q * 8 + g >= of.end) continue;
        rank[q][0] = of.rank[0];
        if (kSlices > 1) rank[q][kSlices - 1] = of.shared ? 0 : of.rank[1];
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
#pragma unroll 2
  for (int j = 0; j < count; ++j) {
    const PassAdapter of = adapters.of[j];
    const int piece = chunk * count + j;
    uint4 u = nothing, v = nothing;
    if (piece < Shape::kPieces) {
      u = pieces[piece][0][lane];
      v = pieces[piece][1][lane];
    } else {
      const auto rows = factor_rows<Element, kSlices>(args.lora, of, tile, chunk);
      if (rows.has_even) u = *reinterpret_cast<const uint4*>(rows.even);
      if (rows.has_odd) v = *reinterpret_cast<const uint4*>(rows.odd);
    }
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      if (of.begin >= q * 8 + 8 || of.end <= q * 8) continue;
      const bool mine = q * 8 + g >= of.begin && q * 8 + g < of.end;
      const bool one = kSlices == 1 || of.shared;
      shrunk.part[q][0].multiply(sum[q], low[q], u, one ? v : nothing, mine);
      if (!one) shrunk.part[q][kSlices - 1].multiply(sum[q], low[q], nothing, v, mine);
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
