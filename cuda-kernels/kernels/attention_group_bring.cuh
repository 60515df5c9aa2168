// The warps of a warpgroup attention block that copy keys and values out of the paged cache.
#pragma once

#include "amphora/overlap.cuh"
#include "kernels/attention_group_block.cuh"

namespace amphora {

// Each warp copies positions of its own of every tile, some at once, a lane an octet of each.
template <class Element, class Shape>
struct AttentionBring {
  static constexpr int kOwn = Shape::kTile / (Shape::kBring / kWarp);
  static constexpr int kOctets = Shape::kDim / 8;
  static constexpr int kAtOnce = kWarp / kOctets, kRounds = kOwn / kAtOnce;
  static constexpr int kFar = Shape::kTile * 128;  // from an element to that 64 further
  static_assert(kOwn <= kWarp, "a lane looks up one place");
  static_assert(kOwn % kAtOnce == 0, "whole rounds of copies");

  const AttentionArgs& args;
  const AttentionRows& rows;
  const AttentionRing<Shape>& ring;
  const int lane = threadIdx.x % kWarp, own = threadIdx.x % Shape::kBring / kWarp * kOwn;
  const int octet = lane % kOctets, beside = lane / kOctets;

  // The place of the lane's position; -1: none, or not seen.
  __device__ __forceinline__ int look_up(const AttentionRows& rows, int tile) const {
    const int at = tile * Shape::kTile + own + lane;
    if (lane >= kOwn || at < rows.first_seen || at >= rows.end_seen) return -1;
    const int size = args.block_size;
    if ((size & (size - 1)) != 0) return place_of(args, rows.blocks, at);
    const int block = at >> (__ffs(size) - 1);
    return rows.blocks[block] * size + (at & (size - 1));
  }
  // `from` is where the lane's octet of position 0 begins. Zeros where nothing is seen, as what lies there may
  // be no number.
  __device__ __forceinline__ void copy(unsigned to, const int (&places)[kRounds], const char* from, int pitch,
                                       bool inside) const {
    const unsigned at = to + octet / 8 * kFar + (own + beside) * 128;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = i * kAtOnce + beside;
      copy_16(at + i * kAtOnce * 128 + ((octet ^ row) & 7) * 16,
              from + static_cast<long long>(max(places[i], 0)) * pitch, inside && places[i] >= 0 ? 16 : 0);
    }
  }
  __device__ void run() const {
    const AttentionRows rows = this->rows;
    const int first = rows.first_seen / Shape::kTile, end = (rows.end_seen - 1) / Shape::kTile + 1;
    int next = look_up(rows, first);
    const int k_bytes = args.k_dim * 2, v_bytes = args.v_dim * 2;
    const bool k_inside = octet * 8 < args.k_dim, v_inside = octet * 8 < args.v_dim;
    const char* keys = static_cast<const char*>(args.k_cache) + rows.kv_head * k_bytes + (k_inside ? octet * 16 : 0);
    const char* values = static_cast<const char*>(args.v_cache) + rows.kv_head * v_bytes + (v_inside ? octet * 16 : 0);
    wait_for_front();
    AttentionTurn<Shape> turn;
    for (int tile = first; tile < end; ++tile) {
      int places[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) places[i] = __shfl_sync(kFullWarp, next, i * kAtOnce + beside);
      next = look_up(rows, tile + 1);
      barrier_wait(ring.empty_keys(turn.stage), turn.parity ^ 1);
      copy(ring.keys(turn.stage), places, keys, args.kv_heads * k_bytes, k_inside);
      copies_arrive(ring.full_keys(turn.stage));
      barrier_wait(ring.empty_values(turn.stage), turn.parity ^ 1);
      copy(ring.values(turn.stage), places, values, args.kv_heads * v_bytes, v_inside);
      copies_arrive(ring.full_values(turn.stage));
      turn.step();
    }
    commit_copies();
    wait_copies<0>();  // none may land in the memory of another block
  }
};

}  // namespace amphora
