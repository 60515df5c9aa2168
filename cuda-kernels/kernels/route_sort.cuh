// moe_route for shapes that shared memory holds: the choice of experts in registers, and one stable sort
// of the pairs by (expert, slot) whose ranks are counts. No atomics, no fills.
//
//   route_choose  a warp for each token: experts, weights, sort keys
//   route_few     one block does all, for few pairs: a pair's place is the number of pairs in front of
//                 it, found by comparing each with each
//   route_sort    a cluster of blocks; the choice is its own first part (few tokens) or has been made by
//                 route_choose. Blocks have contiguous tokens, warps contiguous pairs, with a histogram
//                 of keys for each warp; matching lanes give the ranks among 32 pairs. Histograms are
//                 summed over warps, then over blocks through the cluster's shared memory
//
// A key is expert · (slots + 1) + slot, with `slots` for no adapter; padding has the key behind all.
#pragma once

#include "amphora/args.h"
#include "amphora/cluster.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

constexpr int kRouteExperts = 256;  // values of a token that lanes hold

// The same order as floats have, -0 below +0.
__device__ __forceinline__ unsigned ascending_key(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One token by one warp; kValues · 32 is at least the number of experts. Lane j gets the key of the j-th
// pair.
template <int kValues>
__device__ __forceinline__ int choose_experts(const RouteSortArgs& args, int token) {
  const RouteTopkArgs& of = args.choose;
  const int lane = threadIdx.x % kWarp;
  const long long first = static_cast<long long>(token) * of.top_k;
  const int padding = of.experts * (of.slots + 1);
  const float* logits = of.logits + static_cast<long long>(token) * of.experts;
  float score[kValues];
  unsigned choice[kValues];
  float peak = -infinity();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int expert = i * kWarp + lane;
    const float logit = expert < of.experts ? __ldcg(logits + expert) : -infinity();
    score[i] = logit == logit ? logit : -infinity();  // what is no number is never preferred
    peak = fmaxf(peak, score[i]);
  }
  const int live = __ldcg(of.live + token), slot = __ldcg(of.slot + token);
  float mass = 1.f;
  if (of.score == kSoftmax) {
    peak = warp_reduce(peak, Max{});
    mass = 0.f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) mass += i * kWarp + lane < of.experts ? expf(score[i] - peak) : 0.f;
    mass = warp_reduce(mass, Sum{});
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int expert = i * kWarp + lane;
    const float logit = score[i];
    if (of.score == kSoftmax) score[i] = expf(logit - peak) / mass;
    if (of.score == kSigmoid) score[i] = 1.f / (1.f + expf(-logit));
    // Without correction the logit itself is the choice: it orders as the score does, and has no ties
    // that only rounding made. Adding +0 makes -0 and +0 one where the score does not tell them apart.
    float value = of.score == kSoftmaxTopk ? logit : logit + 0.f;
    if (of.correction != nullptr && expert < of.experts) {
      value = score[i] + __ldg(of.correction + expert);
      value = value == value ? value : -infinity();
    }
    choice[i] = expert < of.experts ? ascending_key(value) : 0;  // less than any value's
  }
  float weight = 0.f;
  int chosen = -1;
  for (int j = 0; j < of.top_k; ++j) {
    unsigned best = choice[0];
#pragma unroll
    for (int i = 1; i < kValues; ++i) best = max(best, choice[i]);
    best = __reduce_max_sync(kFullWarp, best);
    unsigned index = 0xffffffffu;  // ties go to the lower
#pragma unroll
    for (int i = kValues - 1; i >= 0; --i) {
      if (choice[i] == best) index = i * kWarp + lane;
    }
    index = __reduce_min_sync(kFullWarp, index);
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (index / kWarp == i) value = score[i];
      if (index == static_cast<unsigned>(i * kWarp + lane)) choice[i] = 0;
    }
    value = __shfl_sync(kFullWarp, value, index % kWarp);
    if (lane == j) {
      chosen = static_cast<int>(index);
      weight = value;
    }
  }
  const bool mine = lane < of.top_k;
  if (of.score == kSoftmaxTopk) {
    const float top = warp_reduce(mine ? weight : -infinity(), Max{});
    const float part = mine ? expf(weight - top) : 0.f;
    weight = part / warp_reduce(part, Sum{});
  }
  const float divisor = of.renorm ? warp_reduce(mine ? weight : 0.f, Sum{}) : 1.f;
  weight = weight / divisor * of.scale;
  if (live < 0) {
    chosen = -1;
    weight = 0.f;
  }
  if (mine) {
    of.chosen[first + lane] = chosen;
    of.weights[first + lane] = weight;
  }
  return live < 0 ? padding : chosen * (of.slots + 1) + (slot < 0 ? of.slots : slot);
}

__device__ __forceinline__ int choose_experts(const RouteSortArgs& args, int token) {
  if (args.choose.experts <= kWarp) return choose_experts<1>(args, token);
  if (args.choose.experts <= 2 * kWarp) return choose_experts<2>(args, token);
  if (args.choose.experts <= 4 * kWarp) return choose_experts<4>(args, token);
  return choose_experts<8>(args, token);
}

template <class Config, int kThreads>
__device__ void route_choose(const RouteSortArgs& args) {
  wait_for_front();
  let_next_begin();
  const int token = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (token >= args.tokens) return;
  const int key = choose_experts(args, token);
  if (lane < args.choose.top_k) args.choose.keys[token * args.choose.top_k + lane] = key;
}

__device__ __forceinline__ void put_tile(int* tiles, int index, int expert, int slot, int first,
                                         int rows) {
  reinterpret_cast<int4*>(tiles)[index] = make_int4(expert, slot, first, rows);
}

// At most kThreads pairs.
template <class Config, int kThreads>
__device__ void route_few(const RouteSortArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ __align__(16) int keys[kThreads];
  __shared__ int2 starts[kThreads];  // by place: rows of the base tile and of the LoRA tile begun there
  __shared__ int place_key[kThreads];
  __shared__ int scratch[kWarps];
  const int top_k = args.choose.top_k, pairs = args.tokens * top_k, classes = args.choose.slots + 1;
  const int tid = threadIdx.x, warp = tid / kWarp, lane = tid % kWarp;
  const int padding = args.choose.experts * classes;
  wait_for_front();
  let_next_begin();
  for (int i = pairs + tid; i < (pairs + 3) / 4 * 4; i += kThreads) keys[i] = 0x7fffffff;
  for (int token = warp; token < args.tokens; token += kWarps) {
    const int key = choose_experts(args, token);
    if (lane < top_k) keys[token * top_k + lane] = key;
  }
  __syncthreads();
  if (tid < pairs) {
    const int key = keys[tid], expert = key / classes * classes;  // its first key
    int smaller = 0, before = 0, equal = 0, expert_before = 0, of_expert = 0;
    for (int i = 0; i < pairs; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(keys + i);
      const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        smaller += others[j] < key;
        equal += others[j] == key;
        before += others[j] == key && i + j < tid;
        expert_before += others[j] < expert;
        of_expert += others[j] >= expert && others[j] < expert + classes;
      }
    }
    const int place = smaller + before, in_expert = place - expert_before;
    const bool real = key < padding;
    args.perm[place] = real ? tid : -1;
    int2 rows = make_int2(0, 0);
    if (real && in_expert % args.tile_rows == 0) rows.x = min(args.tile_rows, of_expert - in_expert);
    if (real && key % classes < args.choose.slots && before % args.tile_rows == 0) {
      rows.y = min(args.tile_rows, equal - before);
    }
    starts[place] = rows;
    place_key[place] = key;
  }
  __syncthreads();
  const int2 rows = tid < pairs ? starts[tid] : make_int2(0, 0);
  int total;
  const int front = block_exclusive_sum<kThreads>((rows.x > 0) | (rows.y > 0) << 16, scratch, &total);
  if (tid < pairs) {
    const int key = place_key[tid], expert = key / classes;
    if (rows.x > 0) put_tile(args.tiles, front & 0xffff, expert, -1, tid, rows.x);
    if (rows.y > 0) put_tile(args.lora_tiles, front >> 16, expert, key % classes, tid, rows.y);
  }
  for (int i = (total & 0xffff) + tid; i < args.tile_count; i += kThreads) {
    put_tile(args.tiles, i, 0, -1, 0, 0);
  }
  for (int i = (total >> 16) + tid; i < args.lora_tile_count; i += kThreads) {
    put_tile(args.lora_tiles, i, 0, -1, 0, 0);
  }
}

// Quotients without a division for each. The multiplier is 2^32 / of, rounded up, so too large by less than
// one: exact for numbers whose product with `of` is below 2^32.
struct Divisor {
  unsigned of, multiplier;
  __device__ __forceinline__ explicit Divisor(int of)
      : of(static_cast<unsigned>(of)), multiplier(0xffffffffu / static_cast<unsigned>(of) + 1) {}
  __device__ __forceinline__ int quotient(int number) const {
    return of == 1 ? number : static_cast<int>(__umulhi(static_cast<unsigned>(number), multiplier));
  }
  __device__ __forceinline__ int remainder(int number) const {
    return number - quotient(number) * static_cast<int>(of);
  }
  __device__ __forceinline__ int quotient_up(int number) const { return quotient(number + static_cast<int>(of) - 1); }
};

// Dynamic shared memory, of `keys` keys and at most `pairs` pairs of a block, both rounded up to 8:
// int counts[keys], front[keys], all[keys]; u16 histogram[warps][keys], key[pairs], rank[pairs].
template <class Config, int kThreads>
__device__ void route_sort(const RouteSortArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % 16 == 0, "sixteen lanes a key");
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ unsigned long long scratch[kWarps];
  using Half = unsigned short;
  const int tid = threadIdx.x, warp = tid / kWarp, lane = tid % kWarp;
  const int blocks = cluster_blocks(), rank = cluster_rank();
  const int top_k = args.choose.top_k, classes = args.choose.slots + 1;
  const int padding = args.choose.experts * classes, keys = padding + 1, pitch = (keys + 7) / 8 * 8;
  const int share = (args.tokens + blocks - 1) / blocks, first_token = rank * share;
  const int tokens = max(0, min(share, args.tokens - first_token)), pairs = tokens * top_k;
  const int first_pair = first_token * top_k;
  int* counts = reinterpret_cast<int*>(memory);  // pairs of a key here; others read it
  int* front = counts + pitch;                   // in lower blocks; then the first place of this block
  int* all = front + pitch;                      // in all blocks; then the first place of the key
  Half* histogram = reinterpret_cast<Half*>(all + pitch);
  Half* pair_key = histogram + kWarps * pitch;
  Half* pair_rank = pair_key + (share * top_k + 7) / 8 * 8;

  const int part = ((pairs + kWarps - 1) / kWarps + kWarp - 1) / kWarp * kWarp;  // of a warp
  const Divisor by_class(classes), by_tile(args.tile_rows), by_part(max(part, 1));
  for (int i = tid; i < kWarps * pitch / 8; i += kThreads) {
    reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
  }
  wait_for_front();
  let_next_begin();
  if (args.chosen) {
    for (int i = tid; i < pairs; i += kThreads) {
      pair_key[i] = static_cast<Half>(__ldcg(args.choose.keys + first_pair + i));
    }
  } else {
    for (int t = warp; t < tokens; t += kWarps) {
      const int key = choose_experts(args, first_token + t);
      if (lane < top_k) pair_key[t * top_k + lane] = static_cast<Half>(key);
    }
  }
  __syncthreads();

  const int low = warp * part, high = min(pairs, low + part);
  Half* own = histogram + warp * pitch;
  for (int i = low; i < high; i += kWarp) {
    const bool real = i + lane < high;
    const int key = real ? pair_key[i + lane] : 0xffff;
    const unsigned peers = __match_any_sync(kFullWarp, key), lower = peers & ((1u << lane) - 1);
    const int before = real ? own[key] + __popc(lower) : 0;
    __syncwarp();
    if (real && lower == 0) own[key] = static_cast<Half>(own[key] + __popc(peers));
    if (real) pair_rank[i + lane] = static_cast<Half>(before);
    __syncwarp();
  }
  __syncthreads();
  for (int k = tid; k < keys; k += kThreads) {
    int of_warp[kWarps], sum = 0;  // all loads before the first store, or they would wait for each other
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warp[w] = histogram[w * pitch + k];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      histogram[w * pitch + k] = static_cast<Half>(sum);
      sum += of_warp[w];
    }
    counts[k] = all[k] = sum;
    front[k] = 0;
  }
  const bool few_keys = blocks > 1 && keys <= kThreads;
  if (few_keys) {
    // A thread for each key reads the counts of all blocks.
    cluster_barrier();
    if (tid < keys) {
      int of_block[16], lower = 0, sum = 0;
#pragma unroll
      for (int b = 0; b < 16; ++b) of_block[b] = b < blocks ? cluster_load(counts + tid, b) : 0;
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        lower += b < rank ? of_block[b] : 0;
        sum += of_block[b];
      }
      front[tid] = lower;
      all[tid] = sum;
    }
    cluster_arrive();
    __syncthreads();
  } else if (blocks > 1) {
    // Each block sums a stretch of the keys for all, sixteen lanes a key, and gives every block its own.
    cluster_barrier();
    const int stretch = (keys + blocks - 1) / blocks, end = min(keys, (rank + 1) * stretch);
    const int of = tid % 16;
    for (int start = rank * stretch; start < end; start += kThreads / 16) {
      const int k = start + tid / 16;
      const bool real = k < end && of < blocks;
      const int value = real ? cluster_load(counts + k, of) : 0;
      int inclusive = value;
#pragma unroll
      for (int lanes = 1; lanes < 16; lanes *= 2) {
        const int below = __shfl_up_sync(kFullWarp, inclusive, lanes, 16);
        if (of >= lanes) inclusive += below;
      }
      const int sum = __shfl_sync(kFullWarp, inclusive, 15, 16);
      if (real) {
        cluster_store(front + k, of, inclusive - value);
        cluster_store(all + k, of, sum);
      }
    }
    cluster_barrier();
  } else {
    __syncthreads();
  }

  // First places of keys, and LoRA tiles in front of them: each thread has a stretch of keys.
  const auto lora_tiles = [&](int k) {
    return k < padding && by_class.remainder(k) < classes - 1 ? by_tile.quotient_up(all[k]) : 0;
  };
  const int stretch = (keys + kThreads - 1) / kThreads;
  const int from = min(keys, tid * stretch), to = min(keys, from + stretch);
  unsigned long long mine = 0;
  for (int k = from; k < to; ++k) {
    mine += static_cast<unsigned long long>(all[k]) |
            static_cast<unsigned long long>(lora_tiles(k)) << 32;
  }
  const unsigned long long inclusive = warp_inclusive_sum(mine, lane);
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  __syncthreads();
  unsigned long long running = inclusive - mine, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) running += scratch[w];
    total += scratch[w];
  }
  for (int k = from; k < to; ++k) {
    const int count = all[k], tiles = lora_tiles(k), first = static_cast<int>(running & 0xffffffffu);
    if (rank == 0) {
      for (int i = 0; i < tiles; ++i) {
        put_tile(args.lora_tiles, static_cast<int>(running >> 32) + i, by_class.quotient(k), by_class.remainder(k),
                 first + i * args.tile_rows, min(args.tile_rows, count - i * args.tile_rows));
      }
    }
    running += static_cast<unsigned long long>(count) | static_cast<unsigned long long>(tiles) << 32;
    front[k] += first;
    all[k] = first;
  }
  __syncthreads();

  for (int i = tid; i < pairs; i += kThreads) {
    const int key = pair_key[i];
    const int place = front[key] + histogram[by_part.quotient(i) * pitch + key] + pair_rank[i];
    args.perm[place] = key == padding ? -1 : first_pair + i;
  }
  if (rank == 0) {
    for (int i = static_cast<int>(total >> 32) + tid; i < args.lora_tile_count; i += kThreads) {
      put_tile(args.lora_tiles, i, 0, -1, 0, 0);
    }
  }
  if (rank == blocks - 1) {
    // Each warp counts the tiles of all experts and writes those of every kWarps-th.
    int begun = 0;  // tiles of the experts in front
    for (int start = 0; start < args.choose.experts; start += kWarp) {
      const int expert = start + lane;
      const bool real = expert < args.choose.experts;
      const int first = real ? all[expert * classes] : 0;
      const int rows = real ? all[(expert + 1) * classes] - first : 0;
      const int tiles = by_tile.quotient_up(rows);
      const int upto = warp_inclusive_sum(tiles, lane);
      for (int of = warp; of < kWarp; of += kWarps) {
        const int count = __shfl_sync(kFullWarp, tiles, of), place = __shfl_sync(kFullWarp, upto, of);
        const int from = __shfl_sync(kFullWarp, first, of), all_rows = __shfl_sync(kFullWarp, rows, of);
        for (int i = lane; i < count; i += kWarp) {
          put_tile(args.tiles, begun + place - count + i, start + of, -1, from + i * args.tile_rows,
                   min(args.tile_rows, all_rows - i * args.tile_rows));
        }
      }
      begun += __shfl_sync(kFullWarp, upto, kWarp - 1);
    }
    for (int i = begun + tid; i < args.tile_count; i += kThreads) put_tile(args.tiles, i, 0, -1, 0, 0);
  }
  if (few_keys) cluster_wait();  // others may read this block's counts until here
}

}  // namespace amphora
