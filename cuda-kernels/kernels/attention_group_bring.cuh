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
  static constexpr int kAtOnce = kWarp / kOctets;
  static constexpr int kFar = Shape::kTile * 128;  // from an element to that 64 further
  static_assert(kOwn <= kWarp, "a lane looks up one place");
  static_assert(kOwn % kAtOnce == 0, "whole rounds of copies");

  const AttentionArgs& args;
  const AttentionRows& rows;
  const AttentionRing<Shape>& ring;
  const int lane = threadIdx.x % kWarp, own = threadIdx.x % Shape::kBring / kWarp * kOwn;
  const int octet = lane % kOctets, beside = lane / kOctets;

  // The place of the lane's position; -1: none, or not seen.
  __device__ __forceinline__ int look_up(int tile) const {
    const int at = tile * Shape::kTile + own + lane;
    const bool seen = lane < kOwn && at >= rows.first_seen && at < rows.end_seen;
    return seen ? place_of(args, rows.blocks, at) : -1;
  }
  // `from` is where the lane's octet of position 0 begins. Zeros where nothing is seen, as what lies there may
  // be no number.
  __device__ __forceinline__ void copy(unsigned to, int places, const char* from, int pitch, bool inside) const {
    const unsigned at = to + octet / 8 * kFar + (own + beside) * 128;
#pragma unroll
    for (int i = 0; i < kOwn / kAtOnce; ++i) {
      const int row = i * kAtOnce + beside;
      const int place = __shfl_sync(kFullWarp, places, row);
      const bool there = inside && place >= 0;
      copy_16(at + i * kAtOnce * 128 + ((octet ^ row) & 7) * 16,
              from + (there ? static_cast<long long>(place) * pitch : 0), there ? 16 : 0);
    }
  }
  __device__ void run() const {
    const int first = rows.first_seen / Shape::kTile, end = (rows.end_seen - 1) / Shape::kTile + 1;
    int places = look_up(first);
    const int k_bytes = args.k_dim * 2, v_bytes = args.v_dim * 2;
    const bool k_inside = octet * 8 < args.k_dim, v_inside = octet * 8 < args.v_dim;
    const char* keys = static_cast<const char*>(args.k_cache) + rows.kv_head * k_bytes + (k_inside ? octet * 16 : 0);
    const char* values = static_cast<const char*>(args.v_cache) + rows.kv_head * v_bytes + (v_inside ? octet * 16 : 0);
    wait_for_front();
    AttentionTurn<Shape> turn;
    for (int tile = first; tile < end; ++tile) {
      barrier_wait(ring.empty_keys(turn.stage), turn.parity ^ 1);
      copy(ring.keys(turn.stage), places, keys, args.kv_heads * k_bytes, k_inside);
      copies_arrive(ring.full_keys(turn.stage));
      barrier_wait(ring.empty_values(turn.stage), turn.parity ^ 1);
      copy(ring.values(turn.stage), places, values, args.kv_heads * v_bytes, v_inside);
      copies_arrive(ring.full_values(turn.stage));
      places = look_up(tile + 1);
      turn.step();
    }
    commit_copies();
    wait_copies<0>();  // none may land in the memory of another block
  }
};

}  // namespace amphora
