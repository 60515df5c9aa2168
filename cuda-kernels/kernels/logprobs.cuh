// Log-probability and rank of a token, and the most likely tokens, of each row that asks.
//
//   logprobs_survey   grid (chunks, rows): of each chunk, its first token, the mass of its softmax, how
//                     many of its tokens come before the target, and the keys of its first tokens
//   logprobs_finish   a block a row: the chunks together
#pragma once

#include "amphora/args.h"
#include "amphora/logits.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

__device__ __forceinline__ int target_of(const LogprobsArgs& args, int row) {
  const int target = args.target[row];
  return target < 0 ? args.table[args.sample_slot[row]] : target;
}

template <class Config, int kThreads>
__device__ void logprobs_survey(const LogprobsArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ __align__(16) float values[kLogitChunk];
  __shared__ unsigned long long keys[kWarps];
  __shared__ double sums[kWarps];
  __shared__ int counts[kWarps];
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.y, best = args.best[row];
  if (best < 0) return;
  const Chunk<kThreads> chunk(args.vocab);
  const float* logits = args.logits + static_cast<long long>(row) * args.vocab;
  chunk.load(logits, args.vocab, values);

  LogprobPartial partial{};
  const int target = target_of(args, row);
  const unsigned long long wanted = order_key(descending_key(number(logits[target])), target);
  int before = 0;
  chunk.each([&](int i, int) {
    before += order_key(descending_key(values[i]), chunk.first + i) < wanted;
  });
  partial.before = block_reduce<kThreads>(before, Sum{}, counts);
  partial.first = chunk.first_key(values, keys);
  partial.mass = chunk.mass(values, logit_of(partial.first), 1.f, sums);
  const long long place = static_cast<long long>(row) * args.chunks + blockIdx.x;
  if (best > 0) chunk.select(values, best, args.keys + place * kMostBest, counts);
  if (threadIdx.x == 0) args.partials[place] = partial;
}

template <class Config, int kThreads>
__device__ void logprobs_finish(const LogprobsArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ unsigned long long best_keys[kWarps];
  __shared__ double sums[kWarps];
  __shared__ int counts[kWarps];
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x, best = args.best[row];
  if (best < 0) return;
  const long long place = static_cast<long long>(row) * args.chunks;
  const LogprobPartial* partials = args.partials + place;

  unsigned long long first = kNoKey;
  int before = 0;
  for (int c = threadIdx.x; c < args.chunks; c += kThreads) {
    first = min(first, partials[c].first);
    before += partials[c].before;
  }
  first = block_reduce<kThreads>(first, Min{}, best_keys);
  before = block_reduce<kThreads>(before, Sum{}, counts);
  const float peak = logit_of(first);
  double mass = 0.0;
  for (int c = threadIdx.x; c < args.chunks; c += kThreads) {
    mass += partials[c].mass * softmax_weight(logit_of(partials[c].first), peak, 1.f);
  }
  mass = block_reduce<kThreads>(mass, Sum{}, sums);

  int* out = args.out + static_cast<long long>(row) * kLogprobWords;
  if (threadIdx.x == 0) {
    const int target = target_of(args, row);
    const float logit = number(args.logits[static_cast<long long>(row) * args.vocab + target]);
    out[0] = target;
    out[1] = __float_as_int(log_probability(logit, peak, mass));
    out[2] = before + 1;
  }
  // One after the other: the first key behind the last.
  const unsigned long long* keys = args.keys + place * kMostBest;
  unsigned long long key = first;
  for (int found = 0; found < best && key != kNoKey; ++found) {
    if (threadIdx.x == 0) {
      out[3 + 2 * found] = id_of(key);
      out[4 + 2 * found] = __float_as_int(log_probability(logit_of(key), peak, mass));
    }
    unsigned long long next = kNoKey;
    for (int i = threadIdx.x; i < args.chunks * best; i += kThreads) {
      const unsigned long long candidate = keys[i / best * kMostBest + i % best];
      if (candidate > key) next = min(next, candidate);
    }
    key = block_reduce<kThreads>(next, Min{}, best_keys);
  }
}

}  // namespace amphora
