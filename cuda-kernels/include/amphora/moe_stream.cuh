// Both expert projections for few tokens, plain and with deltas: each weight is read once, in order, as
// fast as memory gives it, and everything else hides behind that stream.
//
//   stream_gate_up   act[p] = activation(gate_up_e · x[t] + b + delta), rounded    p: position
//   stream_down      y[pair] = down_e · act[p] + b' + delta, f32
//   stream_combine   out[t] = Σ_j w_j · y[t, j], in j order, rounded once
//
// Grid of the products: a block for each multiprocessor; moe_work.cuh says which tiles (16 rows × all of
// k) a block takes, moe_rest.cuh who takes the last. A block runs kStreams streams of tiles in turn. In
// each, kWarps product warps share k: a warp brings its columns of a tile by bulk copies into its own ring,
// keeps its columns of the tokens in registers (8 for each of kGroups groups), and multiplies by mma,
// weights as the 16-row operand. kEpilogues warps add the partial results in the order of the warps, add
// bias and delta, activate and store. No barrier spans the block inside the loop.
//
// Deltas: tiles of A come first in the stream; their products, S, are stored in f32. Epilogues alone wait
// for S, behind the first tiles of the weights, and multiply the B rows of a tile, brought ahead, into the
// reduced sums: S as two narrow parts, so as f32 (see Split). All blocks run at once (the grid is at most
// one a multiprocessor) and a block's tiles of A precede its others, so what is waited for always comes.
//
// Rows of a tile lie in shared memory as 2g, 2g + 1 for rows g, g + 8 of the mma, gates in even and ups
// in odd ones, so that a gate meets its up in one thread.
#pragma once

#include "amphora/activation.cuh"
#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/mma.cuh"
#include "amphora/moe_deltas.cuh"
#include "amphora/moe_rest.cuh"
#include "amphora/moe_work.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Config, bool kLora, int kGroups>
struct StreamShape {
  static constexpr int kK = Config::kWidth;
  static constexpr int kWarps = Config::kStreamWarps;      // over k
  static constexpr int kPairs = Config::kStreamPairs;      // 64-column pieces of a warp
  static constexpr int kStreams = Config::kStreams;
  static constexpr int kTail = kK / 64 - (kWarps - 1) * kPairs;  // pieces of the last warp
  static constexpr int kEpilogues = kStreams == 1 ? 2 : 1;
  static constexpr int kUnits = 2;                         // tiles of a ring
  static constexpr int kBuffers = kGroups == 1 ? 4 : 2;    // results on their way to an epilogue
  static constexpr int kRowBytes = kPairs * 128;
  static constexpr int kUnitBytes = kTileRows * kRowBytes;
  static constexpr int kTokens = 8 * kGroups;
  // What the rest leaves goes to B rows, but for the padding between fields: kPieces of 1 KB of each of the
  // kAhead items that an epilogue looks ahead.
  static constexpr int kSets = 4;  // of adapters: of a power of two more than kAhead passes
  static constexpr int kFixed = kStreams * (kWarps * kUnits * kUnitBytes + kBuffers * kGroups * kWarps * 512 +
                                            8 * (kWarps * kUnits + 2 * kBuffers) +
                                            static_cast<int>(sizeof(PassAdapters)) * kEpilogues * kSets) +
                                static_cast<int>(sizeof(WorkLists) + sizeof(RestItems)) + 1024;
  static constexpr int kLeft = (Config::kStreamShared - kFixed) / (kStreams * kEpilogues * 1024);
  static constexpr int kAhead = kStreams > 1 ? 2 : 1;
  static constexpr int kPieces = !kLora ? 1 : kLeft / kAhead < 16 ? kLeft / kAhead : 16;
  static constexpr int kThreads = Config::kStreamThreads;
  // Whether some tiles belong to no block: a warp must be left to take them, and at up to eight tokens it
  // costs each launch more than it evens out.
  static constexpr bool kRest = kGroups > 1 && kStreams == 1 && (kWarps + kEpilogues) * kWarp < kThreads;
  static_assert(kK % 64 == 0 && kTail > 0 && kTail <= kPairs, "k is shared out");
  static_assert(kStreams * (kWarps + kEpilogues) * kWarp <= kThreads, "every warp has a role");
  static_assert(kBuffers % kEpilogues == 0, "a buffer belongs to one epilogue");

  // Of one stream. Rows are dense: a copy that does not land on a 128-byte line is slow.
  struct Stream {
    alignas(128) unsigned char ring[kWarps][kUnits][kUnitBytes];
    uint4 factors[kLora ? kEpilogues : 1][kAhead][kPieces][2][kWarp];
    float4 partial[kBuffers][kGroups][kWarps][kWarp];
    Barrier unit_full[kWarps][kUnits];
    Barrier sum_full[kBuffers];
    Barrier sum_empty[kBuffers];
    // Of each epilogue, as many as it looks ahead and as it has at hand.
    PassAdapters adapters[kLora ? kEpilogues : 1][kLora ? kSets : 1];
  };
  struct Shared {
    Stream streams[kStreams];
    RestItems rest;
    WorkLists lists;
  };
  // Item `number` of a stream of which `count` are the block's own; false behind the last.
  static __device__ __forceinline__ bool find_item(Shared& shared, int stream, int count, int number,
                                                   WorkItem& item) {
    if (number < count) {
      item = shared.lists.item[stream + number * kStreams];
      return true;
    }
    if (!kRest) return false;
    item = shared.rest.get(number - count);
    return item.count > 0;
  }
  static_assert(sizeof(Shared) <= Config::kStreamShared, "shared memory");
};

// Where row `row` of a weight tile lies in the weight, in rows of the expert.
template <bool kGateUp>
__device__ __forceinline__ int weight_row(const MoeStreamArgs& args, int tile, int row) {
  if (!kGateUp || args.activation == kClampedInterleaved) return tile * kTileRows + row;
  return tile * (kTileRows / 2) + row / 2 + row % 2 * (args.n / 2);
}

// The lane's columns of the tokens of `item`, zero where there is none.
template <class Shape, class Element, bool kGateUp, int kGroups>
__device__ __forceinline__ void load_tokens(const MoeStreamArgs& args, const WorkLists& lists,
                                            const WorkItem& item, int column, int pieces,
                                            uint4 (&x)[kGroups][2 * Shape::kPairs]) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int p = q * 8 + g;
    const bool real = p < item.count;
    const int position = item.first + (real ? p : 0);
    const int pair = kGateUp ? lists.pair[position] : position;
    const long long row = kGateUp ? pair / args.top_k : position;
    const Element* from = static_cast<const Element*>(args.x) + row * args.x_pitch + column + t * 8;
#pragma unroll
    for (int c = 0; c < 2 * Shape::kPairs; ++c) {
      x[q][c] = real && c < 2 * pieces ? __ldcg(reinterpret_cast<const uint4*>(from + c * 32))
                                       : make_uint4(0, 0, 0, 0);
    }
  }
}

template <class Shape, class Element, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_products(const MoeStreamArgs& args, typename Shape::Shared& shared,
                                                int count, int stream, int warp) {
  constexpr int kPairs = Shape::kPairs, kUnits = Shape::kUnits, kK = Shape::kK;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const WorkLists& lists = shared.lists;
  typename Shape::Stream& own = shared.streams[stream];
  const int pieces = Shape::kTail != kPairs && warp == Shape::kWarps - 1 ? Shape::kTail : kPairs;
  const int column = warp * kPairs * 64;
  uint4 x[kGroups][2 * kPairs];
  int x_key = -1;
  // Each turn of the loop multiplies an item while the next is on its way. No more than that: what is
  // asked of memory beyond its latency waits in queues, and whatever else a block asks for waits behind it.
  const auto bring = [&](int unit, const WorkItem& item) {
    Barrier* full = &own.unit_full[warp][unit];
    const Element* source = static_cast<const Element*>(args.weight);
    int rows = kTileRows;
    if (kLora && item.expert < 0) {
      const ShrinkTile& tile = lists.own[item.tile];
      rows = tile.rows;
      source = lora_block<Element>(args.lora, tile.a) + static_cast<long long>(lane) * kK;
    } else {
      source += (static_cast<long long>(item.expert) * args.n +
                 weight_row<kGateUp>(args, item.tile, lane)) * kK;
    }
    if (lane == 0) barrier_expect(full, rows * pieces * 128);
    __syncwarp();
    if (lane < rows) {
      bulk_copy(own.ring[warp][unit] + lane * Shape::kRowBytes, source + column, pieces * 128, full);
    }
  };
  const bool opens = Shape::kRest && warp == 0 && lane == 0;
  if (opens) {
    for (int k = 0; count + k < kRestAhead; ++k) shared.rest.open(k);
  }
  WorkItem item{0, 0, 0, 0}, next{0, 0, 0, 0};
  bool more = true;
  // The unit of the item at hand, what it and the other hold, and for each unit the parity of its next copy.
  // Passes of eight tokens have no further ones: units take turns.
  constexpr bool kHolds = kGroups > 1;
  int held_in = kUnits - 1, here = kNoTile, other = kNoTile;
  unsigned parities = 0;
#pragma unroll 1
  for (int number = -1; more; ++number) {
    const int unit = kHolds ? held_in : number & (kUnits - 1);
    float sum[kGroups][2][4];  // two chains, added at the end
    if (number >= 0) {
      if (!kGateUp && number == 0) wait_for_front();  // the activations; a gate_up has waited already
      // Tiles of A and of the weights may begin at one position with other numbers of tokens.
      const int key = item.first * 64 + item.count;
      if (key != x_key) {
        x_key = key;
        load_tokens<Shape, Element, kGateUp, kGroups>(args, lists, item, column, pieces, x);
      }
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[q][0][j] = sum[q][1][j] = 0.f;
      barrier_wait(&own.unit_full[warp][unit], kHolds ? (parities >> unit & 1) ^ 1 : number / kUnits & 1);
    }
    more = Shape::find_item(shared, stream, count, number + 1, next);
    bool turns = true;  // the next item is in the other unit
    if (more && !kHolds) {
      bring((number + 1) & (kUnits - 1), next);
    } else if (more) {
      // A further pass finds its tile where an earlier one left it.
      const int tile = next.expert * (1 << 16) + next.tile;
      turns = tile != here;
      if (turns && tile != other) {
        bring(unit ^ 1, next);
        parities ^= 1u << (unit ^ 1);
        other = tile;
      }
    }
    if (more) {
      if (opens && number + 1 + kRestAhead >= count) shared.rest.open(number + 1 + kRestAhead - count);
    }
    if (number >= 0) {
      // Rows are a multiple of 128 bytes apart, so eight lanes that read two rows at one offset would
      // meet in the banks: odd g read the two halves of a line in the other order, and swap them.
      const unsigned char* rows = own.ring[warp][unit] + 2 * g * Shape::kRowBytes + t * 16;
      const bool odd = g % 2;
      const int near = odd ? 64 : 0;
#pragma unroll
      for (int c = 0; c < 2 * kPairs; c += 2) {
        if (Shape::kTail != kPairs && c >= 2 * pieces) break;
        const auto load = [&](int row, int half) {
          return *reinterpret_cast<const uint4*>(rows + row * Shape::kRowBytes + c * 64 + half);
        };
        const uint4 u0 = load(0, near), u1 = load(0, 64 - near);
        const uint4 v0 = load(1, near), v1 = load(1, 64 - near);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool second = odd != (h != 0);
          const uint4 u = make_uint4(second ? u1.x : u0.x, second ? u1.y : u0.y, second ? u1.z : u0.z,
                                     second ? u1.w : u0.w);
          const uint4 v = make_uint4(second ? v1.x : v0.x, second ? v1.y : v0.y, second ? v1.z : v0.z,
                                     second ? v1.w : v0.w);
#pragma unroll
          for (int q = 0; q < kGroups; ++q) {
            const uint4 k = x[q][c + h];
            mma_k16<Element>(sum[q][0], u.x, v.x, u.y, v.y, k.x, k.y);
            mma_k16<Element>(sum[q][1], u.z, v.z, u.w, v.w, k.z, k.w);
          }
        }
      }
      __syncwarp();  // the unit has been read by all lanes
    }
    if (number >= 0) {
      const int buffer = number & (Shape::kBuffers - 1);
      barrier_wait(&own.sum_empty[buffer], (number / Shape::kBuffers & 1) ^ 1);
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        own.partial[buffer][q][warp][lane] =
            make_float4(sum[q][0][0] + sum[q][1][0], sum[q][0][1] + sum[q][1][1],
                        sum[q][0][2] + sum[q][1][2], sum[q][0][3] + sum[q][1][3]);
      }
      __syncwarp();
      barrier_arrive(&own.sum_full[buffer]);
    }
    if (!kGateUp && number < 0 && !more) wait_for_front();
    item = next;
    if (kHolds && turns) {
      held_in = unit ^ 1;
      const int held = here;
      here = other;
      other = held;
    }
  }
}

template <class Shape, class Element, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_epilogue(const MoeStreamArgs& args, typename Shape::Shared& shared,
                                                const Work& work, int count, int stream, int epilogue) {
  constexpr int kSlices = kGateUp ? 2 : 1, kBuffers = Shape::kBuffers, kEpilogues = Shape::kEpilogues;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const WorkLists& lists = shared.lists;
  typename Shape::Stream& own = shared.streams[stream];
  // Once, before anything that a kernel in front writes or reads is touched. The other product of the pair
  // has ended, and its shrunk rows are cleared for its next turn.
  const auto begin = [&] {
    if (!kGateUp) wait_for_front();
    const int first = (blockIdx.x * Shape::kStreams + stream) * kEpilogues + epilogue;
    if (first == 0 && lane == 0) {
      args.state[kTaken + kGateUp] = 0;
      if (kLora) args.state[kShrunkQuads + !kGateUp] = args.pairs * kSlices * kMaxRank / 4;
    }
    if (!kLora) return;
    constexpr int kLanes = Shape::kStreams * kEpilogues * kWarp;
    float4* clear = reinterpret_cast<float4*>(args.clear);
    const unsigned quads = __ldcg(args.state + kShrunkQuads + kGateUp);
#pragma unroll 1
    for (unsigned i = first * kWarp + lane; i < quads; i += gridDim.x * kLanes) {
      clear[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  // Of the item whose B rows are brought next, and of the item at hand: first tokens, which name a pass,
  // and sets of adapters found so far.
  int ahead_key = -1, ahead_set = -1, key = -1, set = -1;
  // Passes over an expert's tokens come again with its next tiles: the passes that sets are of, by first
  // tokens of 16 bits each, and the set that was filled last.
  constexpr bool kAgain = kGroups > 1;
  unsigned long long firsts = ~0ull;
  int filled = -1;
  const auto set_of = [&](int first) {
    int found = -1;
#pragma unroll
    for (int s = 0; s < Shape::kSets; ++s) {
      if (static_cast<int>(firsts >> 16 * s & 0xffff) == first) found = s;
    }
    return found;
  };
  ShrunkRows<Element, kSlices, kGroups> shrunk;
  constexpr int kLead = kLora ? Shape::kAhead * kEpilogues : 0;
#pragma unroll 1
  for (int number = epilogue - kLead;; number += kEpilogues) {
    const int buffer = number & (kBuffers - 1);
    // The item at hand and the one kLead on share a place.
    auto& factors =
        own.factors[kLora ? epilogue : 0][kLora ? (number + kLead) / kEpilogues & (Shape::kAhead - 1) : 0];
    if (number >= 0) {
      if (number == epilogue) begin();
      WorkItem item;
      if (!Shape::find_item(shared, stream, count, number, item)) break;
      const bool weights = !kLora || item.expert >= 0;
      float bias[2] = {0.f, 0.f};
      if (weights && args.bias != nullptr) {
        const float* of = args.bias + static_cast<long long>(item.expert) * args.n;
        bias[0] = of[weight_row<kGateUp>(args, item.tile, 2 * g)];
        bias[1] = of[weight_row<kGateUp>(args, item.tile, 2 * g + 1)];
      }
      barrier_wait(&own.sum_full[buffer], number / kBuffers & 1);
      float sum[kGroups][4];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float4 all = own.partial[buffer][q][0][lane];
#pragma unroll
        for (int w = 1; w < Shape::kWarps; ++w) {
          const float4 part = own.partial[buffer][q][w][lane];
          all.x += part.x;
          all.y += part.y;
          all.z += part.z;
          all.w += part.w;
        }
        sum[q][0] = all.x;
        sum[q][1] = all.y;
        sum[q][2] = all.z;
        sum[q][3] = all.w;
      }
      __syncwarp();
      barrier_arrive(&own.sum_empty[buffer]);
      if (kLora && !weights) {
        store_shrunk<kSlices, kGroups>(args, lists.own[item.tile], item, sum);
      }
      if (kLora && weights && work.shrinks > 0) {
        const bool other = item.first != key;
        if (other) {
          key = item.first;
          set = kAgain ? set_of(key) : (set + 1) & (Shape::kSets - 1);
        }
        const PassAdapters& adapters = own.adapters[epilogue][set];
        const int chunks = adapters.chunks;
        float low[kGroups][4];  // of the second parts: a chain of its own
#pragma unroll
        for (int q = 0; q < kGroups; ++q)
#pragma unroll
          for (int j = 0; j < 4; ++j) low[q][j] = 0.f;
        if (other && chunks > 0) {
          shrunk.find(adapters);
          shrunk.load(args.lora, item.first, 0);
        }
        copies_wait<Shape::kAhead - 1>();
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
          if (chunk > 0 || (chunks > 1 && !other)) shrunk.load(args.lora, item.first, chunk);
          add_deltas<Shape, Element, kSlices, kGroups>(args, adapters, factors, shrunk, item.tile, chunk,
                                                       sum, low);
        }
#pragma unroll
        for (int q = 0; q < kGroups; ++q)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[q][j] += low[q][j];
      }
      if (weights) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int p = q * 8 + 2 * t + j;
            if (p >= item.count) continue;
            const float even = sum[q][j] + bias[0], odd = sum[q][j + 2] + bias[1];
            const int position = item.first + p;
            if (kGateUp) {
              Element* act = static_cast<Element*>(args.out) + static_cast<long long>(position) * (args.n / 2);
              act[item.tile * (kTileRows / 2) + g] =
                  narrow<Element>(activate(args.activation, args.limit, args.alpha, even, odd));
            } else {
              float* y = static_cast<float*>(args.out) +
                         static_cast<long long>(lists.pair[position]) * args.n + item.tile * kTileRows;
              *reinterpret_cast<float2*>(y + 2 * g) = make_float2(even, odd);
            }
          }
      }
    }
    if (kLora && work.shrinks > 0) {
      WorkItem item;
      if (Shape::find_item(shared, stream, count, number + kLead, item) && item.expert >= 0) {
        if (item.first != ahead_key) {
          ahead_key = item.first;
          const int found = kAgain ? set_of(ahead_key) : -1;
          if (found < 0) {
            // Never the set of the item in front, which may wait and have been filled long ago.
            filled = ((kAgain ? filled : ahead_set) + 1) & (Shape::kSets - 1);
            if (kAgain && filled == ahead_set) filled = (filled + 1) & (Shape::kSets - 1);
            firsts = (firsts & ~(0xffffull << 16 * filled)) |
                     static_cast<unsigned long long>(ahead_key) << 16 * filled;
            if (kAgain) __syncwarp();  // a set that was at hand has been read by all lanes
            find_adapters<kSlices>(args, lists, work.jobs, item, own.adapters[epilogue][filled]);
          }
          ahead_set = found < 0 ? filled : found;
        }
        issue_factors<Shape, Element, kSlices>(args, own.adapters[epilogue][ahead_set], item.tile, factors);
      }
      copies_commit();  // a group of each item, with B rows or without
    }
  }
}

template <class Config, int kThreads, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_block(const MoeStreamArgs& args) {
  using Element = typename Config::Element;
  using Shape = StreamShape<Config, kLora, kGroups>;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  // A warp's lanes take turns at this, so a barrier goes to each warp before any gets a second.
  const int number = threadIdx.x % kWarp * (kThreads / kWarp) + threadIdx.x / kWarp;
  constexpr int kUnitBarriers = Shape::kStreams * Shape::kWarps * Shape::kUnits;
  if (number < kUnitBarriers) {
    const int stream = number / (Shape::kWarps * Shape::kUnits);
    barrier_init(&shared.streams[stream].unit_full[0][0] + number % (Shape::kWarps * Shape::kUnits), 1);
  }
  const int sum = number - kUnitBarriers;
  if (sum >= 0 && sum < Shape::kStreams * Shape::kBuffers) {
    typename Shape::Stream& own = shared.streams[sum / Shape::kBuffers];
    const int buffer = sum % Shape::kBuffers;
    // All lanes arrive: a sanitizer does not follow one that arrives for its warp.
    barrier_init(&own.sum_full[buffer], Shape::kWarps * kWarp);
    barrier_init(&own.sum_empty[buffer], kWarp);
  }
  if (Shape::kRest) shared.rest.init(sum - Shape::kStreams * Shape::kBuffers);
  barrier_init_done();
  if (kGateUp) wait_for_front();  // routing comes from the kernel in front; down's is older
  const Work work =
      plan_work<kThreads, Shape::kK, kGateUp ? 2 : 1, kLora, Shape::kTokens, Shape::kRest,
                Shape::kUnits * Shape::kStreams>(shared.lists, args);
  let_next_begin();
  const int warp = threadIdx.x / kWarp;
  constexpr int kProducts = Shape::kStreams * Shape::kWarps;
  // Items of a stream: every kStreams-th of the block's.
  const auto items_of = [&](int stream) {
    return (work.items - stream + Shape::kStreams - 1) / Shape::kStreams;
  };
  if (warp < kProducts) {
    const int stream = warp / Shape::kWarps;
    stream_products<Shape, Element, kGateUp, kLora, kGroups>(args, shared, items_of(stream), stream,
                                                             warp % Shape::kWarps);
  } else if (warp < kProducts + Shape::kStreams * Shape::kEpilogues) {
    const int stream = (warp - kProducts) / Shape::kEpilogues;
    stream_epilogue<Shape, Element, kGateUp, kLora, kGroups>(
        args, shared, work, items_of(stream), stream, (warp - kProducts) % Shape::kEpilogues);
  } else {
    if (!kGateUp) wait_for_front();
    if (Shape::kRest && warp == kProducts + Shape::kEpilogues) {
      shared.rest.template take_all<Shape::kTokens>(args, shared.lists, work,
                                                    args.state + kTaken + !kGateUp);
    }
  }
}

}  // namespace amphora
