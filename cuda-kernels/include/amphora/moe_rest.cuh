// The last tiles of a weight stream, which belong to no block: whoever comes first takes them, one by one.
//
// Multiprocessors do not read memory at one speed; with adapters they differ by a seventh, for no reason
// that a plan could know. What a tile's outputs are does not depend on who makes them.
//
// A warp that has nothing else to do takes items ahead of the block's others and puts them in a ring,
// where these find them behind the block's own items. It takes the k-th when the block asks memory for the
// item two in front of it, so that a slow block keeps few for itself. All passes over a tile are one block's.
#pragma once

#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/moe_work.cuh"

namespace amphora {

constexpr int kRestRing = 16;   // items; warps of a block are at most 8 items apart
constexpr int kRestAhead = 2;   // items
constexpr int kRestTurns = 4;   // more than the turns that may be open at a time, kRestAhead + 1
constexpr int kRestEnds = 8;    // items that a warp looks ahead, or more

// Words of `MoeStreamArgs::state`: of each product, how many tiles of the rest have been taken, and
// 16-byte words of its shrunk rows in its last call. Each product clears the other's count.
enum StreamState : int { kTaken = 0, kShrunkQuads = 2 };

struct RestItems {
  WorkItem item[kRestRing];  // no tokens: the end
  Barrier full[kRestRing];
  Barrier turn[kRestTurns];

  // The thread's share: as many threads as there are barriers call with numbers from 0.
  __device__ __forceinline__ void init(int number) {
    if (number >= 0 && number < kRestRing) barrier_init(&full[number], 1);
    if (number >= kRestRing && number < kRestRing + kRestTurns) barrier_init(&turn[number - kRestRing], 1);
  }

  // The `number`-th item, from 0; waits for it.
  __device__ __forceinline__ WorkItem get(int number) {
    const int at = number % kRestRing;
    barrier_wait(&full[at], number / kRestRing & 1);
    return item[at];
  }

  // Lets the `number`-th be taken. One thread calls, in order.
  __device__ __forceinline__ void open(int number) { barrier_arrive(&turn[number % kRestTurns]); }

  // One warp's work: takes and puts until none is left.
  template <int kPassRows>
  __device__ __forceinline__ void take_all(const MoeStreamArgs& args, const WorkLists& lists,
                                           const Work& work, unsigned* taken) {
    const int lane = threadIdx.x % kWarp, of_expert = args.n / kTileRows;
    const auto passes_of = [&](int e) {
      return (lists.first[e + 1] - lists.first[e] + kPassRows - 1) / kPassRows;
    };
    // The expert at hand, its first tile of the rest, and tiles of the rest in front of it.
    int e = 0, first_tile = 0, own = work.shared_out;
#pragma unroll 1
    for (; e < work.active && own >= of_expert * passes_of(e); ++e) own -= of_expert * passes_of(e);
    if (e < work.active) first_tile = (own + passes_of(e) - 1) / passes_of(e);
    unsigned in_front = 0;
    int tile = 0, pass = 0, passes = 0;  // of the tile taken last; its next pass
#pragma unroll 1
    for (int number = 0;; ++number) {
      barrier_wait(&turn[number % kRestTurns], number / kRestTurns & 1);
      if (pass == passes) {
        unsigned mine = 0;
        if (lane == 0) mine = atomicAdd(taken, 1u);
        mine = __shfl_sync(kFullWarp, mine, 0);
#pragma unroll 1
        for (; e < work.active; ++e, first_tile = 0) {
          const unsigned tiles = static_cast<unsigned>(of_expert - first_tile);
          if (mine < in_front + tiles) break;
          in_front += tiles;
        }
        tile = first_tile + static_cast<int>(mine - in_front);
        pass = 0;
        passes = e < work.active ? passes_of(e) : 0;
      }
      const bool some = e < work.active;
      if (lane == 0 && some) {
        const int first = lists.first[e] + pass * kPassRows;
        item[number % kRestRing] = WorkItem{lists.expert[e], static_cast<short>(tile), static_cast<short>(first),
                                            static_cast<short>(min(kPassRows, lists.first[e + 1] - first))};
        barrier_arrive(&full[number % kRestRing]);
      }
      ++pass;
      if (some) continue;
      if (lane < kRestEnds) {
        item[(number + lane) % kRestRing] = WorkItem{0, 0, 0, 0};
        barrier_arrive(&full[(number + lane) % kRestRing]);
      }
      break;
    }
  }
};

}  // namespace amphora
