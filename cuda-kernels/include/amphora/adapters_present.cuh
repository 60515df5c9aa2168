// The adapters of at most kRows rows of a dense product, each once, in the order of their first rows, and
// all their rows of A counted through. Lies in shared memory.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/reduce.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

template <int kRows>
struct AdaptersPresent {
  static constexpr int kEntries = kRows * kMaxSlices;
  static_assert(kRows == 2 * kWarp, "two words of bits");

  int count;
  alignas(16) int slot[kRows];          // of each row
  int item[kRows];                      // the adapter of each row; -1: none
  unsigned firsts[2];                   // a bit for each row that is its adapter's first
  int of_item[kRows];                   // the slot of each adapter
  unsigned rows[kRows][2];              // of each adapter, a bit for each row
  alignas(16) LoraRow entry[kEntries];  // by adapter and slice
  int start[kEntries + 1];              // rows of A in front
  int widest;                           // the largest rank

  // Fills all of it: kThreads threads, which meet at barrier kBarrier. The plan and the table alone are read.
  template <int kBarrier, int kThreads>
  __device__ void arrange(const DenseArgs& args, int thread) {
    constexpr int kTurns = kEntries / kThreads;
    static_assert(kEntries % kThreads == 0 && kThreads >= kRows, "whole turns");
    const int lane = thread % kWarp;
    int own = -1, first = 0;
    unsigned same[2] = {0, 0};
    if (thread < kRows) {
      own = thread < args.base.tokens ? args.slot[thread] : -1;
      slot[thread] = own;
    }
    // Table rows of every row's slot, on their way while slots are compared.
    LoraRow found[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = (i * kThreads + thread) / kMaxSlices, slice = thread % kMaxSlices;
      const int of = row < args.base.tokens ? args.slot[row] : -1;
      found[i] = of >= 0 && slice < args.lora.slice_count ? lora_row(args.lora, of, slice, 0) : LoraRow{0, 0, 0, 0.f};
    }
    named_barrier(kBarrier, kThreads);
    if (thread < kRows) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(&slot[i]);
        const unsigned bits = (four.x == own ? 1u : 0u) | (four.y == own ? 2u : 0u) | (four.z == own ? 4u : 0u) |
                              (four.w == own ? 8u : 0u);
        same[i / kWarp] |= bits << i % kWarp;
      }
      first = same[0] != 0 ? __ffs(same[0]) - 1 : kWarp + __ffs(same[1]) - 1;
      const unsigned bits = __ballot_sync(kFullWarp, own >= 0 && first == thread);
      if (lane == 0) firsts[thread / kWarp] = bits;
    }
    named_barrier(kBarrier, kThreads);
    if (thread < kRows) {
      const unsigned low = firsts[0], high = firsts[1];
      const int of = first < kWarp ? __popc(low & ((1u << first) - 1))
                                   : __popc(low) + __popc(high & ((1u << (first - kWarp)) - 1));
      item[thread] = own >= 0 ? of : -1;
      if (own >= 0 && first == thread) {
        of_item[of] = own;
        rows[of][0] = same[0];
        rows[of][1] = same[1];
      }
      if (thread == 0) count = __popc(low) + __popc(high);
    }
    named_barrier(kBarrier, kThreads);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = (i * kThreads + thread) / kMaxSlices;
      const bool is_first = firsts[row / kWarp] >> row % kWarp & 1;
      if (is_first) entry[item[row] * kMaxSlices + thread % kMaxSlices] = found[i];
    }
    named_barrier(kBarrier, kThreads);
    if (thread < kWarp) count_factors(lane);
    named_barrier(kBarrier, kThreads);
  }

  // Rows of A of all adapters.
  __device__ __forceinline__ int factor_rows() const { return start[count * kMaxSlices]; }

  // The entry that row `row` of those belongs to.
  __device__ __forceinline__ int entry_of(int row) const {
    int low = 0, high = count * kMaxSlices;  // start[low] <= row < start[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (start[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  // By one warp.
  __device__ __forceinline__ void count_factors(int lane) {
    const int entries = count * kMaxSlices;
    int front = 0, most = 0;
    for (int base = 0; base < entries; base += kWarp) {
      const int at = base + lane, rank = at < entries ? static_cast<int>(entry[at].rank) : 0;
      most = max(most, rank);
      const int upto = warp_inclusive_sum(rank, lane);
      if (at < entries) start[at] = front + upto - rank;
      front += __shfl_sync(kFullWarp, upto, kWarp - 1);
    }
    most = warp_reduce(most, Max{});
    if (lane == 0) {
      start[entries] = front;
      widest = most;
    }
  }
};

}  // namespace amphora
