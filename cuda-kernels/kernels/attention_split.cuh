// Paged attention for few rows: a row's positions are split over the warps of one or more blocks, and
// the query heads of a KV head are one block of a matrix product, so a cached row is read once for all.
//
// Grid: (splits, KV heads · groups of 16 query heads, rows); the splits of a row are a cluster. Each warp
// takes a run of 32-position tiles, brings them by cp.async into a ring of its own, without a barrier,
// and keeps its own running softmax. Tiles that earlier steps wrote are on their way before the kernel
// in front, which writes this step's positions, has ended. The parts meet in fixed order: warps of a block in shared memory,
// blocks through each other's shared memory. How a row is split depends on the grid and its own
// positions alone. A head's sink is one more mass at the end.
//
//   attention_split_64, _128, _256   heads of up to so many elements, in multiples of 8
#pragma once

#include "amphora/args.h"
#include "amphora/attention.cuh"
#include "amphora/cluster.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Element, int kThreads, int kDim>
struct SplitAttention {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kHeads = 16;                        // query heads of a block
  static constexpr int kTile = kDim > 128 ? 16 : 32;       // positions of a tile
  static constexpr int kStages = 3;                        // both as in the host's heuristics
  static constexpr int kBlocks = kTile / 8;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;       // keys, then values
  static_assert(kWarps * kStages * kStageBytes >= kWarps * kHeads * kDim * 4, "parts fit the rings");

  // What a block leaves for its cluster.
  struct Shared {
    float peak[kWarps][kHeads], mass[kWarps][kHeads];
    float block_peak[kHeads], block_mass[kHeads];
  };

  const AttentionArgs& args;
  Shared& shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int kv_head, first_head, heads;
  const unsigned ring;
  const int* blocks;
  int first_seen, end_seen;
  int next, end, next_stage = 0, place;  // the next tile to copy, and where its positions lie

  __device__ SplitAttention(const AttentionArgs& args, Shared& shared, unsigned dynamic, int group)
      : args(args),
        shared(shared),
        kv_head(blockIdx.y / ((group + kHeads - 1) / kHeads)),
        first_head(kv_head * group + blockIdx.y % ((group + kHeads - 1) / kHeads) * kHeads),
        heads(min(kHeads, kv_head * group + group - first_head)),
        ring(dynamic + warp * kStages * kStageBytes) {}

  // The place of position lane % kTile of a tile; -1: none.
  __device__ __forceinline__ int look_up(int tile) const {
    const int position = tile * kTile + lane % kTile;
    const bool seen = tile < end && position >= first_seen && position < end_seen;
    return seen ? place_of(args, blocks, position) : -1;
  }

  // Copies the next tile, if there is one; in any case one group.
  __device__ __forceinline__ void issue() {
    if (next < end) {
      copy_tile(next_stage, place);
      place = look_up(++next);  // used one tile later
    }
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
    commit_copies();
  }

  __device__ __forceinline__ void copy_tile(int stage, int place) {
    constexpr int kOctets = kDim / 8;
    const unsigned keys = ring + stage * kStageBytes, values = keys + kTileBytes;
#pragma unroll
    for (int i = 0; i < kTile * kOctets / kWarp; ++i) {
      const int row = (i * kWarp + lane) / kOctets, octet = (i * kWarp + lane) % kOctets;
      const int at = __shfl_sync(kFullWarp, place, row);
      const long long from = static_cast<long long>(at) * args.kv_heads + kv_head;
      copy_cached<Element>(octet_at<kDim>(keys, row, octet), args.k_cache, from, args.k_dim, octet, at >= 0);
      copy_cached<Element>(octet_at<kDim>(values, row, octet), args.v_cache, from, args.v_dim, octet, at >= 0);
    }
  }

  // All tiles of this warp from `begin` on, of which kStages - 1 are on their way.
  template <int kHalves>
  __device__ __forceinline__ void attend(Attended<Element, kDim>& state, const unsigned (&query)[kDim / 16][4],
                                         int begin) {
    const float scale = args.scale * kLog2E;
    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
      wait_copies<kStages - 2>();
      __syncwarp();  // all lanes' copies have landed, and the stage before this one has been read
      issue();
      const unsigned keys = ring + stage * kStageBytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      float logits[kBlocks][4];
      const auto query_at = [&](int i, unsigned(&to)[4]) {
#pragma unroll
        for (int word = 0; word < 4; ++word) to[word] = query[i][word];
      };
      multiply_keys<Element, kDim, kBlocks>(logits, query_at, keys);
      const bool all = tile * kTile >= first_seen && (tile + 1) * kTile <= end_seen;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int position = tile * kTile + j * 8 + lane % 4 * 2 + c % 2;
          const bool seen = all || (position >= first_seen && position < end_seen);
          logits[j][c] = seen ? logits[j][c] * scale : -infinity();
        }
      }
      state.template add<kBlocks, kHalves>(logits, keys + kTileBytes);
    }
    state.finish();
  }

  // The sums of the block's warps, for each head.
  __device__ void meet_warps(const Attended<Element, kDim>& state, float* parts) {
    wait_copies<0>();
    __syncthreads();  // the rings have been read: their memory takes the parts
    float* own = parts + warp * kHeads * kDim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = lane / 4 + half * 8;
      if (lane % 4 == 0) {
        shared.peak[warp][head] = state.peak[half];
        shared.mass[warp][head] = state.mass[half];
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        own[head * kDim + j * 8 + lane % 4 * 2] = state.sum[j][half * 2];
        own[head * kDim + j * 8 + lane % 4 * 2 + 1] = state.sum[j][half * 2 + 1];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * args.v_dim; i += kThreads) {
      const int head = i / args.v_dim, at = head * kDim + i % args.v_dim;
      float peak = -infinity();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, shared.peak[w][head]);
      const float level = peak == -infinity() ? 0.f : peak;
      float sum = 0.f, mass = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float share = power_of_two(shared.peak[w][head] - level);
        sum += parts[w * kHeads * kDim + at] * share;
        mass += shared.mass[w][head] * share;
      }
      parts[at] = sum;  // each element is read and written by one thread
      if (i % args.v_dim == 0) {
        shared.block_peak[head] = peak;
        shared.block_mass[head] = mass;
      }
    }
  }

  // The sums of all blocks of the row, and the output. A block writes its share of it.
  __device__ void meet_blocks(const float* parts, int row) {
    const int splits = gridDim.x, rank = blockIdx.x;
    if (splits > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
    const unsigned peaks = shared_address(shared.block_peak), masses = shared_address(shared.block_mass);
    const unsigned sums = shared_address(parts);
    const int all = heads * args.v_dim;
    Element* out = static_cast<Element*>(args.out) + row * args.out_pitch +
                   static_cast<long long>(first_head) * args.v_dim;
    for (int i = all * rank / splits + threadIdx.x; i < all * (rank + 1) / splits; i += kThreads) {
      const int head = i / args.v_dim, at = head * kDim + i % args.v_dim;
      const float sink = args.sinks != nullptr ? args.sinks[first_head + head] * kLog2E : -infinity();
      float sum, mass;
      if (splits == 1) {
        const float peak = fmaxf(shared.block_peak[head], sink);
        const float share = power_of_two(shared.block_peak[head] - peak);
        sum = parts[at] * share;
        mass = shared.block_mass[head] * share + power_of_two(sink - peak);
      } else {
        float peak = sink;
        for (int block = 0; block < splits; ++block) {
          peak = fmaxf(peak, read_block(peaks + head * 4, block));
        }
        sum = 0.f;
        mass = power_of_two(sink - peak);
        for (int block = 0; block < splits; ++block) {
          const float share = power_of_two(read_block(peaks + head * 4, block) - peak);
          sum += read_block(sums + at * 4, block) * share;
          mass += read_block(masses + head * 4, block) * share;
        }
      }
      out[i] = narrow<Element>(sum / mass);
    }
    if (splits > 1) cluster_barrier();  // until all have read, no block's memory may go
  }

  __device__ void run(int row, float* parts) {
    const int sequence = sequence_of_row(args.q_start, args.sequences, row);
    const int start = args.q_start[sequence], rows = args.q_start[sequence + 1] - start;
    const int position = args.context[sequence] - rows + (row - start);
    blocks = args.block_table + static_cast<long long>(sequence) * args.table_width;
    first_seen = first_position_seen(args, position);
    end_seen = position + 1;
    const int first = first_seen / kTile, tiles = (end_seen + kTile - 1) / kTile - first;
    const int parts_of_row = gridDim.x * kWarps, part = blockIdx.x * kWarps + warp;
    const int begin = first + static_cast<int>(static_cast<long long>(tiles) * part / parts_of_row);
    end = first + static_cast<int>(static_cast<long long>(tiles) * (part + 1) / parts_of_row);
    next = begin;
    place = look_up(next);
    const int old = args.context[sequence] - rows;  // positions in front were written by earlier steps
    int issued = 0;
    for (; issued < kStages - 1 && next < end && (next + 1) * kTile <= old; ++issued) issue();
    wait_for_front();
    for (; issued < kStages - 1; ++issued) issue();

    const Element* q = static_cast<const Element*>(args.q) + row * args.q_pitch +
                       static_cast<long long>(first_head) * args.k_dim;
    const int low = lane / 4, high = low + 8;
    unsigned query[kDim / 16][4];
    load_queries<Element, kDim>(query, low < heads ? q + low * args.k_dim : nullptr,
                                high < heads ? q + high * args.k_dim : nullptr, args.k_dim);
    Attended<Element, kDim> state;
    if (heads <= 8) {
      attend<1>(state, query, begin);
    } else {
      attend<2>(state, query, begin);
    }
    meet_warps(state, parts);
    meet_blocks(parts, row);
  }
};

template <class Element, int kThreads, int kDim>
__device__ __forceinline__ void attention_split(const AttentionArgs& args) {
  using S = SplitAttention<Element, kThreads, kDim>;
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ typename S::Shared shared;
  const int row = blockIdx.z;
  let_next_begin();
  if (row >= args.q_start[args.sequences]) {  // padding: all blocks of the cluster agree
    wait_for_front();
    return;
  }
  S(args, shared, shared_address(dynamic), args.heads / args.kv_heads).run(row, reinterpret_cast<float*>(dynamic));
}

template <class Config, int kThreads>
__device__ void attention_split_64(const AttentionArgs& args) {
  attention_split<typename Config::Element, kThreads, 64>(args);
}

template <class Config, int kThreads>
__device__ void attention_split_128(const AttentionArgs& args) {
  attention_split<typename Config::Element, kThreads, 128>(args);
}

template <class Config, int kThreads>
__device__ void attention_split_256(const AttentionArgs& args) {
  attention_split<typename Config::Element, kThreads, 256>(args);
}

}  // namespace amphora
