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

// The adapters that meet in one pass; lane j holds the j-th, in the order of the tokens.
template <int kSlices>
struct PassAdapters {
  int count;          // the same in every lane
  int staged;         // bytes of B rows that fit the ring; the same in every lane
  int chunks;         // of 32 ranks, of the largest rank; the same in every lane
  int begin, end;     // tokens of the pass
  int rank[kSlices];
  unsigned b[kSlices];
  bool shared;        // one shrunk row for both slices
  int slab;           // where its B rows lie in the ring; -1: they are read from memory
};

// A slice's B rows of one tile take 32 bytes a rank over all slices.
template <int kSlices>
__device__ __forceinline__ int factor_bytes(const PassAdapters<kSlices>& adapters, int slice) {
  return 2 * kTileRows / kSlices * adapters.rank[slice];
}

template <class Shape, int kSlices>
__device__ __forceinline__ PassAdapters<kSlices> find_adapters(const MoeStreamArgs& args,
                                                               const WorkLists& lists, const Work& work,
                                                               int expert, int first, int count) {
  const int lane = threadIdx.x % kWarp;
  int low = 0, high = work.jobs;  // the first LoRA tile that ends behind `first`
  while (low < high) {
    const int middle = (low + high) / 2;
    if (lists.job_first[middle] + lists.job_rows[middle] > first) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  PassAdapters<kSlices> found;
  const int job = low + lane;
  const bool real = job < work.jobs && lists.job_first[job] < first + count;
  found.count = __popc(__ballot_sync(kFullWarp, real));
  found.begin = real ? lists.job_first[job] - first : 0;
  found.end = real ? found.begin + lists.job_rows[job] : 0;
  found.shared = false;
  LoraRow rows[kSlices];
  int bytes = 0, most = 0;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    rows[slice] = LoraRow{0, 0, 0, 0.f};
    if (real) rows[slice] = lora_row(args.lora, lists.job_slot[job], slice, lists.expert[expert]);
    found.rank[slice] = static_cast<int>(rows[slice].rank);
    found.b[slice] = rows[slice].b;
    bytes += factor_bytes(found, slice);
    most = max(most, found.rank[slice]);
  }
  if (kSlices > 1) found.shared = same_factor(rows[0], rows[kSlices - 1]);
  int end = bytes;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const int before = __shfl_up_sync(kFullWarp, end, lanes);
    if (lane >= lanes) end += before;
  }
  const bool fits = end <= Shape::kFactorBytes;
  found.slab = fits ? end - bytes : -1;
  found.staged = warp_reduce(fits ? end : 0, Max{});
  found.chunks = (warp_reduce(most, Max{}) + 31) / 32;
  return found;
}

// Brings the B rows of a tile of `adapters` into buffer `buffer`.
template <class Shape, class Element, int kSlices>
__device__ __forceinline__ void issue_factors(const MoeStreamArgs& args, typename Shape::Stream& own,
                                              const PassAdapters<kSlices>& adapters, int tile,
                                              int buffer) {
  const int lane = threadIdx.x % kWarp;
  if (adapters.staged == 0) return;
  Barrier* full = &own.factors_full[buffer];
  if (lane == 0) barrier_expect(full, adapters.staged);
  __syncwarp();
  if (lane >= adapters.count || adapters.slab < 0) return;
  unsigned char* to = own.factors[buffer] + adapters.slab;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int bytes = factor_bytes(adapters, slice);
    if (bytes == 0) continue;
    const Element* from = lora_block<Element>(args.lora, adapters.b[slice]) +
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

  __device__ __forceinline__ void find(const PassAdapters<kSlices>& adapters) {
    const int g = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int q = 0; q < kGroups; ++q)
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) rank[q][slice] = 0;
    for (int j = 0; j < adapters.count; ++j) {
      const int begin = __shfl_sync(kFullWarp, adapters.begin, j);
      const int end = __shfl_sync(kFullWarp, adapters.end, j);
      const bool shared = __shfl_sync(kFullWarp, adapters.shared, j);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int of = __shfl_sync(kFullWarp, adapters.rank[slice], j);
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          const bool mine = q * 8 + g >= begin && q * 8 + g < end;
          if (mine && !(slice > 0 && shared)) rank[q][slice] = of;
        }
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

// sum += the deltas of 32 ranks, of a tile's rows for the tokens of each adapter.
template <class Shape, class Element, int kSlices, int kGroups>
__device__ __forceinline__ void add_deltas(const MoeStreamArgs& args, typename Shape::Stream& own,
                                           const PassAdapters<kSlices>& adapters,
                                           const ShrunkRows<Element, kSlices, kGroups>& shrunk, int tile,
                                           int chunk, int buffer, float (&sum)[kGroups][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, at = chunk * 32 + lane % 4 * 8;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  for (int j = 0; j < adapters.count; ++j) {
    const int begin = __shfl_sync(kFullWarp, adapters.begin, j);
    const int end = __shfl_sync(kFullWarp, adapters.end, j);
    const int slab = __shfl_sync(kFullWarp, adapters.slab, j);
    const bool shared = __shfl_sync(kFullWarp, adapters.shared, j);
    int rank[kSlices];
    const Element* rows[kSlices];
    int offset = slab;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      rank[slice] = __shfl_sync(kFullWarp, adapters.rank[slice], j);
      const unsigned b = __shfl_sync(kFullWarp, adapters.b[slice], j);
      const int elements = kTileRows / kSlices * rank[slice];
      rows[slice] = slab >= 0 ? reinterpret_cast<const Element*>(own.factors[buffer] + offset)
                              : lora_block<Element>(args.lora, b) + static_cast<long long>(tile) * elements;
      offset += 2 * elements;
    }
    const auto load = [&](int slice, int row) {
      return at < rank[slice]
                 ? *reinterpret_cast<const uint4*>(rows[slice] + row * rank[slice] + at)
                 : nothing;
    };
    const uint4 u = kSlices == 1 ? load(0, 2 * g) : load(0, g);
    const uint4 v = kSlices == 1 ? load(0, 2 * g + 1) : load(kSlices - 1, g);
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      if (begin >= q * 8 + 8 || end <= q * 8) continue;
      const bool mine = q * 8 + g >= begin && q * 8 + g < end;
      if (kSlices == 1 || shared) {
        shrunk.part[q][0].multiply(sum[q], u, v, mine);
      } else {
        if (rank[0] > chunk * 32) shrunk.part[q][0].multiply(sum[q], u, nothing, mine);
        if (rank[kSlices - 1] > chunk * 32) {
          shrunk.part[q][kSlices - 1].multiply(sum[q], nothing, v, mine);
        }
      }
    }
  }
}

// Stores the products of a tile of A, times its scale.
template <int kGroups>
__device__ __forceinline__ void store_shrunk(const MoeStreamArgs& args, const ShrinkTile& tile, int first,
                                             int count, const float (&sum)[kGroups][4]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if (2 * g >= tile.rows) return;
#pragma unroll
  for (int q = 0; q < kGroups; ++q)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int p = q * 8 + 2 * t + j;
      if (p >= count) continue;
      float* to = shrunk_row(args.lora, first + p, tile.slice) + tile.rank + 2 * g;
      *reinterpret_cast<float2*>(to) =
          make_float2(sum[q][j] * tile.scale, sum[q][j + 2] * tile.scale);
    }
}

}  // namespace amphora
