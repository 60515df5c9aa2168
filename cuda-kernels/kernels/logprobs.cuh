// Log-probability and rank of a token, and the most likely tokens, of each row that asks. One block a
// row; tokens are ordered by (logit descending, id ascending), a key of both is unique.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"

namespace amphora {

__device__ __forceinline__ unsigned long long order_key(const float* logits, int id) {
  const unsigned long long key = descending_key(number(logits[id]));
  return key << 32 | static_cast<unsigned>(id);
}

template <class Config, int kThreads>
__device__ void logprobs(const LogprobsArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ unsigned long long keys[kWarps];
  __shared__ double masses[kWarps];
  __shared__ int counts[kWarps];
  const int row = blockIdx.x, best = args.best[row];
  if (best < 0) return;
  const float* logits = args.logits + static_cast<long long>(row) * args.vocab;
  int target = args.target[row];
  if (target < 0) target = args.table[args.sample_slot[row]];
  const unsigned long long wanted = order_key(logits, target);

  unsigned long long first = ~0ull;
  int before = 0;
  for (int id = threadIdx.x; id < args.vocab; id += kThreads) {
    const unsigned long long key = order_key(logits, id);
    first = min(first, key);
    before += key < wanted;
  }
  first = block_reduce<kThreads>(first, Min{}, keys);
  before = block_reduce<kThreads>(before, Sum{}, counts);
  const float peak = number(logits[first & 0xffffffffu]);
  double mass = 0.0;
  for (int id = threadIdx.x; id < args.vocab; id += kThreads) {
    const float value = number(logits[id]);
    mass += value == peak ? 1.0 : static_cast<double>(expf(value - peak));
  }
  mass = block_reduce<kThreads>(mass, Sum{}, masses);

  const auto bits = [&](int id) {
    const float value = number(logits[id]);
    const double above = value == peak ? 0.0 : static_cast<double>(value) - peak;
    return __float_as_int(static_cast<float>(above - log(mass)));
  };
  int* out = args.out + static_cast<long long>(row) * kLogprobWords;
  if (threadIdx.x == 0) {
    out[0] = target;
    out[1] = bits(target);
    out[2] = before + 1;
  }
  unsigned long long key = first;
  for (int i = 0; i < best && key != ~0ull; ++i) {
    const int id = static_cast<int>(key & 0xffffffffu);
    if (threadIdx.x == 0) {
      out[3 + 2 * i] = id;
      out[4 + 2 * i] = bits(id);
    }
    unsigned long long next = ~0ull;
    for (int other = threadIdx.x; other < args.vocab; other += kThreads) {
      const unsigned long long candidate = order_key(logits, other);
      if (candidate > key) next = min(next, candidate);
    }
    key = block_reduce<kThreads>(next, Min{}, keys);
  }
}

}  // namespace amphora
