// The deltas of a weight stream's tiles, as its epilogues make them: which adapters meet in a pass, their
// B rows of a tile on the way to shared memory, the shrunk rows in registers, and the products.
#pragma once

#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/mma.cuh"
#include "amphora/moe_work.cuh"
#include "amphora/reduce.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

// An adapter of a pass.
struct alignas(16) PassAdapter {
  unsigned char begin, end;  // its tokens of the pass
  unsigned char shared;      // one shrunk row for both slices
  unsigned char staged;      // its B rows come through the ring
  unsigned short rank[2];
  unsigned b[2];             // B of each slice in units of kArenaUnit; staged: b[0] is its place in the ring
};
static_assert(sizeof(PassAdapter) == 16, "one load");

// The adapters that meet in one pass, in the order of the tokens.
struct PassAdapters {
  int count;
  int staged;  // bytes of B rows of a tile that come through the ring
  int chunks;  // of 32 ranks, of the largest rank
  int reserved;
  PassAdapter of[kTileRows];
};

// A lane's own part of what it copies for its adapter.
struct FactorCopy {
  unsigned b[2];
  int bytes[2];  // of a tile's B rows of each slice; 0: nothing to copy
  int slab;
};

// Fills `found`, and gives each lane its copies; lane j has the j-th adapter.
template <class Shape, int kSlices>
__device__ __forceinline__ FactorCopy find_adapters(const MoeStreamArgs& args, const WorkLists& lists,
                                                    int jobs, const WorkItem& item,
                                                    PassAdapters& found) {
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
  FactorCopy copy;
  // A slice's B rows of one tile: 32 bytes a rank over all slices.
#pragma unroll
  for (int slice = 0; slice < 2; ++slice) {
    copy.b[slice] = rows[slice].b;
    copy.bytes[slice] = 2 * kTileRows / kSlices * static_cast<int>(rows[slice].rank);
  }
  const int bytes = copy.bytes[0] + copy.bytes[1];
  int end = bytes;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const int before = __shfl_up_sync(kFullWarp, end, lanes);
    if (lane >= lanes) end += before;
  }
  copy.slab = end - bytes;
  const bool staged = end <= Shape::kFactorBytes;
  if (!staged) copy.bytes[0] = copy.bytes[1] = 0;
  const int count = __popc(__ballot_sync(kFullWarp, real));
  const int all = __reduce_max_sync(kFullWarp, staged ? end : 0);
  const int most = __reduce_max_sync(kFullWarp, static_cast<int>(max(rows[0].rank, rows[1].rank)));
  if (real) {
    const int begin = max(0, lists.job_first[job] - first);
    PassAdapter of;
    of.begin = static_cast<unsigned char>(begin);
    of.end = static_cast<unsigned char>(
        min(static_cast<int>(item.count), lists.job_first[job] + lists.job_rows[job] - first));
    of.shared = kSlices > 1 && same_factor(rows[0], rows[1]);
    of.staged = staged;
    of.rank[0] = static_cast<unsigned short>(rows[0].rank);
    of.rank[1] = static_cast<unsigned short>(rows[1].rank);
    of.b[0] = staged ? static_cast<unsigned>(copy.slab) : rows[0].b;
    of.b[1] = rows[1].b;
    found.of[lane] = of;
  }
  if (lane == 0) {
    found.count = count;
    found.staged = all;
    found.chunks = (most + 31) / 32;
  }
  __syncwarp();
  return copy;
}

// Brings the B rows of a tile into buffer `buffer`; `staged` bytes over all lanes.
template <class Shape, class Element, int kSlices>
__device__ __forceinline__ void issue_factors(const MoeStreamArgs& args, typename Shape::Stream& own,
                                              const FactorCopy& copy, int staged, int tile, int buffer) {
  if (staged == 0) return;
  Barrier* full = &own.factors_full[buffer];
  if (threadIdx.x % kWarp == 0) barrier_expect(full, staged);
  __syncwarp();
  unsigned char* to = own.factors[buffer] + copy.slab;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int bytes = copy.bytes[slice];
    if (bytes == 0) continue;
    const Element* from = lora_block<Element>(args.lora, copy.b[slice]) +
                          static_cast<long long>(tile) * (bytes / 2);
    bulk_copy(to, from, bytes, full);
    to += bytes;
  }
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

  __device__ __forceinline__ void load(const LoraArgs& lora, int first, int chunk) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, at = chunk * 32 + lane % 4 * 8;
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
        if (at < rank[q][slice]) {
          const float* from = shrunk_row(lora, first + q * 8 + g, slice) + at;
          low = __ldcg(reinterpret_cast<const float4*>(from));
          high = __ldcg(reinterpret_cast<const float4*>(from + 4));
        }
        const float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        part[q][slice].set(value);
      }
  }
};

// sum + low += the deltas of 32 ranks, of a tile's rows for the tokens of each adapter.
template <class Shape, class Element, int kSlices, int kGroups>
__device__ __forceinline__ void add_deltas(const MoeStreamArgs& args, typename Shape::Stream& own,
                                           const PassAdapters& adapters,
                                           const ShrunkRows<Element, kSlices, kGroups>& shrunk, int tile,
                                           int chunk, int buffer, float (&sum)[kGroups][4],
                                           float (&low)[kGroups][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, at = chunk * 32 + lane % 4 * 8;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll 2
  for (int j = 0; j < adapters.count; ++j) {
    const PassAdapter of = adapters.of[j];
    const int elements = kTileRows / kSlices * of.rank[0];  // of the first slice's B rows of the tile
    const Element* even = reinterpret_cast<const Element*>(own.factors[buffer] + of.b[0]);
    const Element* odd = even + (kSlices == 1 ? of.rank[0] : elements);
    if (!of.staged) {
      even = lora_block<Element>(args.lora, of.b[0]) + static_cast<long long>(tile) * elements;
      odd = kSlices == 1 ? even + of.rank[0]
                         : lora_block<Element>(args.lora, of.b[1]) +
                               static_cast<long long>(tile) * (kTileRows / kSlices * of.rank[1]);
    }
    const int rank1 = kSlices == 1 ? of.rank[0] : of.rank[1];
    uint4 u = nothing, v = nothing;
    if (at < of.rank[0]) u = *reinterpret_cast<const uint4*>(even + 2 / kSlices * g * of.rank[0] + at);
    if (at < rank1) v = *reinterpret_cast<const uint4*>(odd + 2 / kSlices * g * rank1 + at);
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
template <int kGroups>
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
      float* to = shrunk_row(args.lora, item.first + p, tile.slice) + tile.rank + 2 * g;
      *reinterpret_cast<float2*>(to) =
          make_float2(sum[q][j] * tile.scale, sum[q][j + 2] * tile.scale);
    }
}

}  // namespace amphora
