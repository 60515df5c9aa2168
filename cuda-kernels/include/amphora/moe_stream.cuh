// Both expert projections for few tokens, plain and with deltas: each weight is read once, in order, as
// fast as memory gives it, and everything else hides behind that stream.
//
//   stream_gate_up   act[p] = activation(gate_up_e · x[t] + b + delta), rounded    p: position
//   stream_down      y[pair] = down_e · act[p] + b' + delta, f32
//   stream_combine   out[t] = Σ_j w_j · y[t, j], in j order, rounded once
//
// Grid of the products: a block for each multiprocessor; moe_work.cuh says which tiles (16 rows × all of
// k) a block takes. A block runs kStreams streams of tiles in turn. In each, kWarps product warps share
// k: a warp brings its columns of a tile by bulk copies into its own ring, keeps its columns of the
// tokens in registers (8 for each of kGroups groups), and multiplies by mma, weights as the 16-row
// operand. kEpilogues warps add the partial results in the order of the warps, add bias and delta,
// activate and store. No barrier spans the block inside the loop.
//
// Deltas: tiles of A come first in the stream; their products, S, are stored in f32 and counted in
// `ready`. Epilogues alone wait for the count, behind the first tiles of the weights, and multiply the
// B rows of a tile, copied ahead, into the reduced sums: S as two narrow parts, so as f32 (see Split).
// All blocks run at once (the grid is at most one a multiprocessor) and a block's tiles of A precede
// its others, so the count is always reached. Each kernel of the pair clears the other's count.
//
// Rows of a tile lie in shared memory as 2g, 2g + 1 for rows g, g + 8 of the mma, gates in even and ups
// in odd ones, so that a gate meets its up in one thread.
#pragma once

#include "amphora/activation.cuh"
#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/mma.cuh"
#include "amphora/moe_deltas.cuh"
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
  // What the rest leaves goes to B rows, but for the padding between fields.
  static constexpr int kFixed = kStreams * (kWarps * kUnits * kUnitBytes + kBuffers * kGroups * kWarps * 512 +
                                            8 * (kWarps * kUnits + 3 * kBuffers)) +
                                static_cast<int>(sizeof(WorkLists)) + 1024;
  static constexpr int kLeft = (Config::kStreamShared - kFixed) / (kStreams * kBuffers) / 128 * 128;
  static constexpr int kFactorBytes = !kLora ? 128 : kLeft < 16384 ? kLeft : 16384;
  static constexpr int kThreads = Config::kStreamThreads;
  static_assert(kK % 64 == 0 && kTail > 0 && kTail <= kPairs, "k is shared out");
  static_assert(kStreams * (kWarps + kEpilogues) * kWarp <= kThreads, "every warp has a role");
  static_assert(kBuffers % kEpilogues == 0, "a buffer belongs to one epilogue");

  // Of one stream. Rows are dense: a copy that does not land on a 128-byte line is slow.
  struct Stream {
    alignas(128) unsigned char ring[kWarps][kUnits][kUnitBytes];
    alignas(128) unsigned char factors[kBuffers][kFactorBytes];
    float4 partial[kBuffers][kGroups][kWarps][kWarp];
    Barrier unit_full[kWarps][kUnits];
    Barrier sum_full[kBuffers];
    Barrier sum_empty[kBuffers];
    Barrier factors_full[kBuffers];
  };
  struct Shared {
    Stream streams[kStreams];
    WorkLists lists;
  };
  static_assert(sizeof(Shared) <= Config::kStreamShared, "shared memory");
};

// One tile of a block's list: where its rows and its tokens come from.
struct StreamItem {
  int expert;  // among the active ones; -1: a tile of A
  int tile;    // of the expert; or of `own`
  int first;   // position of the first token
  int count;   // tokens
};

template <int kPassRows>
__device__ __forceinline__ StreamItem item_at(const WorkLists& lists, const Work& work, int item,
                                              int of_expert) {
  if (item < work.own) {
    const ShrinkTile& own = lists.own[item];
    return StreamItem{-1, item, own.first, own.count};
  }
  const int at = work.begin + item - work.own, expert = at / of_expert;
  const int first = lists.first[expert];
  return StreamItem{expert, at - expert * of_expert, first, lists.first[expert + 1] - first};
}

// Where row `row` of a weight tile lies in the weight, in rows of the expert.
template <bool kGateUp>
__device__ __forceinline__ int weight_row(const MoeStreamArgs& args, int tile, int row) {
  if (!kGateUp || args.activation == kClampedInterleaved) return tile * kTileRows + row;
  return tile * (kTileRows / 2) + row / 2 + row % 2 * (args.n / 2);
}

template <class Shape, class Element, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_products(const MoeStreamArgs& args, typename Shape::Shared& shared,
                                                const Work& work, int stream, int warp) {
  constexpr int kPairs = Shape::kPairs, kUnits = Shape::kUnits, kK = Shape::kK;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const WorkLists& lists = shared.lists;
  typename Shape::Stream& own = shared.streams[stream];
  const int items = work.own + max(0, work.end - work.begin), of_expert = args.n / kTileRows;
  const int pieces = Shape::kTail != kPairs && warp == Shape::kWarps - 1 ? Shape::kTail : kPairs;
  const int column = warp * kPairs * 64;

  const auto issue = [&](int item, int unit) {
    const StreamItem at = item_at<Shape::kTokens>(lists, work, item, of_expert);
    Barrier* full = &own.unit_full[warp][unit];
    const Element* source;
    int rows = kTileRows;
    if (at.expert < 0) {
      const ShrinkTile& tile = lists.own[at.tile];
      rows = tile.rows;
      source = lora_block<Element>(args.lora, tile.a) + static_cast<long long>(lane) * kK;
    } else {
      const long long row = static_cast<long long>(lists.expert[at.expert]) * args.n +
                            weight_row<kGateUp>(args, at.tile, lane);
      source = static_cast<const Element*>(args.weight) + row * kK;
    }
    if (lane == 0) barrier_expect(full, rows * pieces * 128);
    __syncwarp();
    if (lane < rows) {
      bulk_copy(own.ring[warp][unit] + lane * Shape::kRowBytes, source + column, pieces * 128, full);
    }
  };
  for (int u = 0; u < kUnits && stream + u * Shape::kStreams < items; ++u) {
    issue(stream + u * Shape::kStreams, u);
  }
  if (!kGateUp) wait_for_front();  // the activations; a gate_up has waited already

  uint4 x[kGroups][2 * kPairs];
  int x_first = -1, unit_count = 0, sum_count = 0;
  for (int item = stream; item < items; item += Shape::kStreams, ++unit_count) {
    const StreamItem at = item_at<Shape::kTokens>(lists, work, item, of_expert);
    const int unit = unit_count % kUnits;
    for (int pass = 0; pass * Shape::kTokens < at.count; ++pass, ++sum_count) {
      const int first = at.first + pass * Shape::kTokens;
      const int count = min(Shape::kTokens, at.count - pass * Shape::kTokens);
      // Tiles of A and of the weights may begin at one position with other numbers of tokens.
      const int x_key = first * 64 + count;
      if (x_key != x_first) {
        x_first = x_key;
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          const int p = q * 8 + g;
          const bool real = p < count;
          const int position = first + (real ? p : 0);
          const int pair = lists.pair[position];
          const long long row = kGateUp ? pair / args.top_k : position;
          const Element* from = static_cast<const Element*>(args.x) + row * args.x_pitch + column + t * 8;
#pragma unroll
          for (int c = 0; c < 2 * kPairs; ++c) {
            x[q][c] = real && c < 2 * pieces ? __ldcg(reinterpret_cast<const uint4*>(from + c * 32))
                                             : make_uint4(0, 0, 0, 0);
          }
          if (kGateUp && args.pair_weights != nullptr) {
            // An operand of the product, so it is rounded to the element type.
            const float weight = __ldcg(args.pair_weights + pair);
#pragma unroll
            for (int c = 0; c < 2 * kPairs; ++c) {
              const auto scaled = [&](unsigned pair_of) {
                return pack_pair<Element>(unpack_first<Element>(pair_of) * weight,
                                          unpack_second<Element>(pair_of) * weight);
              };
              x[q][c] = make_uint4(scaled(x[q][c].x), scaled(x[q][c].y), scaled(x[q][c].z),
                                   scaled(x[q][c].w));
            }
          }
        }
      }
      float sum[kGroups][2][4];  // two chains, added at the end
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[q][0][j] = sum[q][1][j] = 0.f;
      if (pass == 0) barrier_wait(&own.unit_full[warp][unit], unit_count / kUnits & 1);
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
      if ((pass + 1) * Shape::kTokens >= at.count) {
        __syncwarp();  // the unit has been read by all lanes
        const int next = item + kUnits * Shape::kStreams;
        if (next < items) issue(next, unit);
      }
      const int buffer = sum_count % Shape::kBuffers;
      barrier_wait(&own.sum_empty[buffer], (sum_count / Shape::kBuffers & 1) ^ 1);
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        own.partial[buffer][q][warp][lane] =
            make_float4(sum[q][0][0] + sum[q][1][0], sum[q][0][1] + sum[q][1][1],
                        sum[q][0][2] + sum[q][1][2], sum[q][0][3] + sum[q][1][3]);
      }
      __syncwarp();
      barrier_arrive(&own.sum_full[buffer]);
    }
  }
}

template <class Shape, class Element, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_epilogue(const MoeStreamArgs& args, typename Shape::Shared& shared,
                                                const Work& work, int stream, int epilogue) {
  constexpr int kSlices = kGateUp ? 2 : 1, kBuffers = Shape::kBuffers, kEpilogues = Shape::kEpilogues;
  constexpr int kTokens = Shape::kTokens;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const WorkLists& lists = shared.lists;
  typename Shape::Stream& own = shared.streams[stream];
  const int items = work.own + max(0, work.end - work.begin), of_expert = args.n / kTileRows;

  // Walks ahead of the sums, to bring B rows while products are made.
  struct {
    int item, pass, number, key;
    PassAdapters<kSlices> adapters;
  } ahead;
  ahead.item = stream;
  ahead.pass = ahead.number = 0;
  ahead.key = -1;
  const auto bring = [&](int number) {
    if (!kLora) return;
    while (ahead.item < items) {
      const StreamItem at = item_at<kTokens>(lists, work, ahead.item, of_expert);
      if (ahead.number == number) {
        if (at.expert < 0) return;
        const int key = at.first + ahead.pass * kTokens;
        if (key != ahead.key) {
          ahead.key = key;
          ahead.adapters = find_adapters<Shape, kSlices>(args, lists, work, at.expert, key,
                                                         min(kTokens, at.count - ahead.pass * kTokens));
        }
        issue_factors<Shape, Element, kSlices>(args, own, ahead.adapters, at.tile, number % kBuffers);
        return;
      }
      ++ahead.number;
      if (++ahead.pass * kTokens >= at.count) {
        ahead.pass = 0;
        ahead.item += Shape::kStreams;
      }
    }
  };
  for (int number = epilogue; number < kBuffers; number += kEpilogues) bring(number);
  if (!kGateUp) wait_for_front();
  // The kernel of the pair that used it has ended.
  if (kLora && blockIdx.x == 0 && stream == 0 && epilogue == 0 && lane == 0) *args.other_ready = 0;

  PassAdapters<kSlices> adapters;
  ShrunkRows<Element, kSlices, kGroups> shrunk;
  bool ready = false;
  unsigned phases = 0;
  int number = 0, key = -1;
  for (int item = stream; item < items; item += Shape::kStreams) {
    const StreamItem at = item_at<kTokens>(lists, work, item, of_expert);
    for (int pass = 0; pass * kTokens < at.count; ++pass, ++number) {
      if (number % kEpilogues != epilogue) continue;
      const int buffer = number % kBuffers;
      const int first = at.first + pass * kTokens, count = min(kTokens, at.count - pass * kTokens);
      const bool weights = !kLora || at.expert >= 0;
      float bias[2] = {0.f, 0.f};
      if (weights && args.bias != nullptr) {
        const float* of = args.bias + static_cast<long long>(lists.expert[at.expert]) * args.n;
        bias[0] = of[weight_row<kGateUp>(args, at.tile, 2 * g)];
        bias[1] = of[weight_row<kGateUp>(args, at.tile, 2 * g + 1)];
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
        store_shrunk<kGroups>(args, lists.own[at.tile], first, count, sum);
        __syncwarp();
        if (lane == 0) {
          __threadfence();
          add_release(args.ready, 1);
        }
        bring(number + kBuffers);
        continue;
      }
      if (kLora) {
        if (first != key) {
          key = first;
          adapters = find_adapters<Shape, kSlices>(args, lists, work, at.expert, first, count);
          if (adapters.chunks > 0) {
            while (!ready) ready = load_acquire(args.ready) >= work.shrinks;
            shrunk.find(adapters);
            shrunk.load(args.lora, first, 0);
          }
        }
        if (adapters.staged > 0) {
          barrier_wait(&own.factors_full[buffer], phases >> buffer & 1);
          phases ^= 1u << buffer;
        }
        if (adapters.chunks > 0) {
          add_deltas<Shape, Element, kSlices, kGroups>(args, own, adapters, shrunk, at.tile, 0, buffer,
                                                       sum);
        }
        for (int chunk = 1; chunk < adapters.chunks; ++chunk) {
          ShrunkRows<Element, kSlices, kGroups> more = shrunk;
          more.load(args.lora, first, chunk);
          add_deltas<Shape, Element, kSlices, kGroups>(args, own, adapters, more, at.tile, chunk, buffer,
                                                       sum);
        }
        __syncwarp();  // the B rows have been read by all lanes
        bring(number + kBuffers);
      }
#pragma unroll
      for (int q = 0; q < kGroups; ++q)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int p = q * 8 + 2 * t + j;
          if (p >= count) continue;
          const float even = sum[q][j] + bias[0], odd = sum[q][j + 2] + bias[1];
          if (kGateUp) {
            const int inner = args.n / 2;
            Element* act = static_cast<Element*>(args.out) + static_cast<long long>(first + p) * inner;
            act[at.tile * (kTileRows / 2) + g] =
                narrow<Element>(activate(args.activation, args.limit, args.alpha, even, odd));
          } else {
            float* y = static_cast<float*>(args.out) +
                       static_cast<long long>(lists.pair[first + p]) * args.n + at.tile * kTileRows;
            *reinterpret_cast<float2*>(y + 2 * g) = make_float2(even, odd);
          }
        }
    }
  }
}

template <class Config, int kThreads, bool kGateUp, bool kLora, int kGroups>
__device__ __forceinline__ void stream_block(const MoeStreamArgs& args) {
  using Element = typename Config::Element;
  using Shape = StreamShape<Config, kLora, kGroups>;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  if (kGateUp) wait_for_front();  // routing comes from the kernel in front; down's is older
  if (threadIdx.x < Shape::kStreams * Shape::kWarps * Shape::kUnits) {
    const int stream = threadIdx.x / (Shape::kWarps * Shape::kUnits);
    barrier_init(&shared.streams[stream].unit_full[0][0] + threadIdx.x % (Shape::kWarps * Shape::kUnits),
                 1);
  }
  if (threadIdx.x < Shape::kStreams * Shape::kBuffers) {
    typename Shape::Stream& own = shared.streams[threadIdx.x / Shape::kBuffers];
    const int buffer = threadIdx.x % Shape::kBuffers;
    // All lanes arrive: a sanitizer does not follow one that arrives for its warp.
    barrier_init(&own.sum_full[buffer], Shape::kWarps * kWarp);
    barrier_init(&own.sum_empty[buffer], kWarp);
    barrier_init(&own.factors_full[buffer], 1);
  }
  barrier_init_done();
  const Work work =
      plan_work<kThreads, Shape::kK, kGateUp ? 2 : 1, kLora, Shape::kTokens>(shared.lists, args);
  let_next_begin();
  const int warp = threadIdx.x / kWarp;
  constexpr int kProducts = Shape::kStreams * Shape::kWarps;
  if (warp < kProducts) {
    stream_products<Shape, Element, kGateUp, kLora, kGroups>(args, shared, work, warp / Shape::kWarps,
                                                             warp % Shape::kWarps);
  } else if (warp < kProducts + Shape::kStreams * Shape::kEpilogues) {
    const int of = warp - kProducts;
    stream_epilogue<Shape, Element, kGateUp, kLora, kGroups>(
        args, shared, work, of / Shape::kEpilogues, of % Shape::kEpilogues);
  } else if (!kGateUp) {
    wait_for_front();
  }
}

}  // namespace amphora
