// Chooses experts, and sorts the pairs (token, j) by (expert, slot), rows without an adapter last in
// each expert.
//
//   route_topk    one warp a token: scores, the best experts, their weights, the pairs' sort keys
//   route_rank    one thread a pair: its place is the number of pairs with a smaller key, or with the
//                 same key and a smaller number. Stable, exact, and made of independent counts
//   route_tiles   one block: tile lists from the sorted keys, placed by a running count
//
// A key is expert · (slots + 1) + slot, with `slots` for no adapter; padding has the largest key and so
// ends up behind.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"

namespace amphora {

constexpr int kPaddingKey = 0x7fffffff;

// A value with its index, in the order of choice: larger first, ties to the lower index.
struct Candidate {
  float value;
  int index;
};

__device__ __forceinline__ bool before(const Candidate& a, const Candidate& b) {
  const unsigned first = descending_key(a.value), second = descending_key(b.value);
  return first < second || (first == second && a.index < b.index);
}

// The first of `count` values that comes after `last` in the order; the same in every lane. Indices of
// values that `open` refuses are passed over; `index` is -1 when none is left.
template <class Open>
__device__ __forceinline__ Candidate next_after(const float* values, int count, Candidate last,
                                                Open open) {
  Candidate best{0.f, -1};
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
    const Candidate here{values[i], i};
    if (open(i) && before(last, here) && (best.index < 0 || before(here, best))) best = here;
  }
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const Candidate other{__shfl_xor_sync(kFullWarp, best.value, lanes),
                          __shfl_xor_sync(kFullWarp, best.index, lanes)};
    if (other.index >= 0 && (best.index < 0 || before(other, best))) best = other;
  }
  return best;
}

// What is no number is never preferred, so that every index chosen is in range.
__device__ __forceinline__ float ordered(float value) {
  return value == value ? value : -infinity();
}

__device__ __forceinline__ Candidate before_all() { return Candidate{infinity(), -1}; }

// Marks the `keep` best groups, a group's score being the sum of its `best` best choices.
__device__ __forceinline__ void keep_groups(const RouteTopkArgs& args, const float* choice,
                                            float* group_score, int* kept) {
  const int size = args.experts / args.groups, lane = threadIdx.x % kWarp;
  for (int group = 0; group < args.groups; ++group) {
    Candidate last = before_all();
    float score = 0.f;
    for (int i = 0; i < args.best; ++i) {
      last = next_after(choice + group * size, size, last, [](int) { return true; });
      score += last.value;
    }
    if (lane == 0) {
      group_score[group] = ordered(score);
      kept[group] = 0;
    }
  }
  __syncwarp();
  Candidate last = before_all();
  for (int i = 0; i < args.keep; ++i) {
    last = next_after(group_score, args.groups, last, [](int) { return true; });
    if (lane == 0) kept[last.index] = 1;
  }
  __syncwarp();
}

// Shared memory: experts choices, experts scores, groups scores, groups marks; all of 4 bytes.
template <class Config, int kThreads>
__device__ void route_topk(const RouteTopkArgs& args) {
  static_assert(kThreads == kWarp, "one warp a token");
  extern __shared__ float shared[];
  float* choice = shared;
  float* score = choice + args.experts;
  float* group_score = score + args.experts;
  int* kept = reinterpret_cast<int*>(group_score + args.groups);

  const long long token = blockIdx.x;
  const int lane = threadIdx.x, experts = args.experts;
  int* chosen = args.chosen + token * args.top_k;
  float* weights = args.weights + token * args.top_k;
  int* keys = args.keys + token * args.top_k;
  if (args.live[token] < 0) {
    for (int j = lane; j < args.top_k; j += kWarp) {
      chosen[j] = -1;
      weights[j] = 0.f;
      keys[j] = kPaddingKey;
    }
    return;
  }

  const float* logits = args.logits + token * experts;
  float peak = -infinity();
  for (int e = lane; e < experts; e += kWarp) {
    const float logit = ordered(logits[e]);
    score[e] = logit;
    peak = fmaxf(peak, logit);
  }
  peak = warp_reduce(peak, Max{});
  float mass = 0.f;
  if (args.score == kSoftmax) {
    for (int e = lane; e < experts; e += kWarp) mass += expf(score[e] - peak);
    mass = warp_reduce(mass, Sum{});
  }
  // Without correction or groups the logit itself is the choice: it orders as the score does, and has
  // no ties that only rounding made.
  const bool by_score = args.correction != nullptr || args.groups > 0;
  for (int e = lane; e < experts; e += kWarp) {
    const float logit = score[e];
    float value = logit;
    if (args.score == kSoftmax) value = expf(logit - peak) / mass;
    if (args.score == kSigmoid) value = 1.f / (1.f + expf(-logit));
    score[e] = value;
    const float correction = args.correction != nullptr ? args.correction[e] : 0.f;
    // Scores that pass through an exponential do not tell -0 from +0; adding +0 makes them one.
    const float bare = args.score == kSoftmaxTopk ? logit : logit + 0.f;
    choice[e] = by_score ? ordered(value + correction) : bare;
  }
  __syncwarp();
  if (args.groups > 0) keep_groups(args, choice, group_score, kept);

  const int group_size = args.groups > 0 ? experts / args.groups : experts;
  const auto open = [&](int e) { return args.groups == 0 || kept[e / group_size] != 0; };
  const int slot_key = args.slot[token] < 0 ? args.slots : args.slot[token];
  Candidate last = before_all();
  for (int j = 0; j < args.top_k; ++j) {
    last = next_after(choice, experts, last, open);
    if (lane == 0) {
      chosen[j] = last.index;
      weights[j] = score[last.index];
      keys[j] = last.index * (args.slots + 1) + slot_key;
    }
  }

  // The weights of a token are few: one lane makes them, in order.
  if (lane != 0) return;
  if (args.score == kSoftmaxTopk) {
    float top = weights[0], sum = 0.f;
    for (int j = 1; j < args.top_k; ++j) top = fmaxf(top, weights[j]);
    for (int j = 0; j < args.top_k; ++j) sum += expf(weights[j] - top);
    for (int j = 0; j < args.top_k; ++j) weights[j] = expf(weights[j] - top) / sum;
  }
  float divisor = 1.f;
  if (args.renorm) {
    divisor = 0.f;
    for (int j = 0; j < args.top_k; ++j) divisor += weights[j];
  }
  for (int j = 0; j < args.top_k; ++j) weights[j] = weights[j] / divisor * args.scale;
}

template <class Config, int kThreads>
__device__ void route_rank(const RouteRankArgs& args) {
  __shared__ int chunk[kThreads];
  const int pair = blockIdx.x * kThreads + threadIdx.x;
  const int key = pair < args.pairs ? args.keys[pair] : kPaddingKey;
  int place = 0;
  for (int start = 0; start < args.pairs; start += kThreads) {
    const int count = min(kThreads, args.pairs - start);
    __syncthreads();  // the chunk before has been read by all
    if (threadIdx.x < count) chunk[threadIdx.x] = args.keys[start + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      place += chunk[i] < key || (chunk[i] == key && start + i < pair);
    }
  }
  if (pair >= args.pairs) return;
  args.sorted[place] = key;
  args.perm[place] = key == kPaddingKey ? -1 : pair;
}

// The first place whose key is at least `key`.
__device__ __forceinline__ int lower_bound(const int* sorted, int count, int key) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (sorted[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The run of equal groups that a place lies in.
struct Run {
  int first;
  int end;
};

__device__ __forceinline__ void put_tile(int* tiles, int index, int expert, int slot, int first,
                                         int rows) {
  int* tile = tiles + 4ll * index;
  tile[0] = expert;
  tile[1] = slot;
  tile[2] = first;
  tile[3] = rows;
}

template <class Config, int kThreads>
__device__ void route_tiles(const RouteTilesArgs& args) {
  __shared__ int scratch[kThreads / kWarp];
  const int classes = args.slots + 1;  // of a token: one of the slots, or no adapter
  int base_count = 0, lora_count = 0;
  for (int start = 0; start < args.pairs; start += kThreads) {
    const int place = start + threadIdx.x;
    const int key = place < args.pairs ? args.sorted[place] : kPaddingKey;
    const int expert = key / classes, slot = key % classes;
    Run base{0, 0}, lora{0, 0};
    bool base_starts = false, lora_starts = false;
    if (key != kPaddingKey) {
      const int expert_key = expert * classes;
      base.first = lower_bound(args.sorted, args.pairs, expert_key);
      base.end = lower_bound(args.sorted, args.pairs, expert_key + classes);
      base_starts = (place - base.first) % args.tile_rows == 0;
      if (slot < args.slots) {
        lora.first = lower_bound(args.sorted, args.pairs, key);
        lora.end = lower_bound(args.sorted, args.pairs, key + 1);
        lora_starts = (place - lora.first) % args.tile_rows == 0;
      }
    }
    int found = 0;
    const int base_index =
        base_count + block_exclusive_sum<kThreads>(base_starts ? 1 : 0, scratch, &found);
    base_count += found;
    const int lora_index =
        lora_count + block_exclusive_sum<kThreads>(lora_starts ? 1 : 0, scratch, &found);
    lora_count += found;
    if (base_starts) {
      put_tile(args.tiles, base_index, expert, -1, place, min(args.tile_rows, base.end - place));
    }
    if (lora_starts) {
      put_tile(args.lora_tiles, lora_index, expert, slot, place,
               min(args.tile_rows, lora.end - place));
    }
  }
  for (int i = base_count + threadIdx.x; i < args.tile_count; i += kThreads) {
    put_tile(args.tiles, i, 0, -1, 0, 0);
  }
  for (int i = lora_count + threadIdx.x; i < args.lora_tile_count; i += kThreads) {
    put_tile(args.lora_tiles, i, 0, -1, 0, 0);
  }
}

}  // namespace amphora
