// A row of logits in chunks, one block each: loading them, and the best of a chunk without sorting it.
//
// Tokens are ordered by (logit descending, id ascending). A *key* is a token with its logit as one
// integer, ascending in that order; no two are equal.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"

namespace amphora {

constexpr unsigned long long kNoKey = ~0ull;  // behind every key

// What a logit counts as: no number is -inf, and -0 is +0.
__device__ __forceinline__ float number(float logit) {
  return logit == logit ? logit + 0.f : -infinity();
}

__device__ __forceinline__ unsigned long long order_key(unsigned descending, int id) {
  return static_cast<unsigned long long>(descending) << 32 | static_cast<unsigned>(id);
}
__device__ __forceinline__ int id_of(unsigned long long key) {
  return static_cast<int>(key & 0xffffffffu);
}
__device__ __forceinline__ float logit_of(unsigned long long key) {
  const unsigned descending = static_cast<unsigned>(key >> 32);
  return __uint_as_float(descending & 0x80000000u ? descending : ~descending & 0x7fffffffu);
}

// 1 for the largest even if it is infinite.
__device__ __forceinline__ double softmax_weight(float logit, float peak, float temperature) {
  return logit == peak ? 1.0 : static_cast<double>(expf((logit - peak) / temperature));
}

__device__ __forceinline__ float log_probability(float logit, float peak, double mass) {
  const double above = logit == peak ? 0.0 : static_cast<double>(logit) - peak;
  return static_cast<float>(above - log(mass));
}

// The chunk of a block: blockIdx.x of row blockIdx.y.
template <int kThreads>
struct Chunk {
  static constexpr int kEach = kLogitChunk / kThreads;
  static_assert(kLogitChunk % (4 * kThreads) == 0, "whole vectors for each thread");

  int first;  // id of its first token
  int len;

  __device__ __forceinline__ explicit Chunk(int vocab) {
    first = blockIdx.x * kLogitChunk;
    len = min(kLogitChunk, vocab - first);
  }

  // `values[i]` gets the number of token first + i.
  __device__ __forceinline__ void load(const float* row, int vocab, float* values) const {
    const float* from = row + first;
    // A chunk starts at a whole vector of its row, so what is aligned at its start is throughout.
    const bool wide = (reinterpret_cast<unsigned long long>(row) | vocab * sizeof(float)) % 16 == 0;
    if (wide) {
#pragma unroll 4
      for (int i = 4 * threadIdx.x; i < len; i += 4 * kThreads) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        values[i] = number(four.x);
        values[i + 1] = number(four.y);
        values[i + 2] = number(four.z);
        values[i + 3] = number(four.w);
      }
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < len; i += kThreads) values[i] = number(from[i]);
    }
    __syncthreads();
  }

  // Calls `body(local index, j)` for the tokens of this thread.
  template <class Body>
  __device__ __forceinline__ void each(Body body) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * kThreads + threadIdx.x;
      if (i < len) body(i, j);
    }
  }

  __device__ __forceinline__ unsigned long long first_key(const float* values,
                                                          unsigned long long* scratch) const {
    unsigned long long best = kNoKey;
    each([&](int i, int) { best = min(best, order_key(descending_key(values[i]), first + i)); });
    return block_reduce<kThreads>(best, Min{}, scratch);
  }

  __device__ __forceinline__ double mass(const float* values, float peak, float temperature,
                                         double* scratch) const {
    double sum = 0.0;
    each([&](int i, int) { sum += softmax_weight(values[i], peak, temperature); });
    return block_reduce<kThreads>(sum, Sum{}, scratch);
  }

  // The keys of its first `most` tokens to `keys`, in no particular order, filled up with kNoKey.
  // Gives the last of them, up to which none of the chunk is missing; kNoKey if none is missing at
  // all. The last is found by halving the range of keys, counting what lies in front.
  __device__ unsigned long long select(const float* values, int most, unsigned long long* keys,
                                       int* scratch) const {
    unsigned own[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) own[j] = 0xffffffffu;  // behind -inf
    each([&](int i, int j) { own[j] = descending_key(values[i]); });
    const auto count = [&](auto test) {
      int sum = 0;
      each([&](int i, int j) { sum += test(own[j], i); });
      return block_reduce<kThreads>(sum, Sum{}, scratch);
    };
    unsigned last = 0xffffffffu;
    int last_tie = kLogitChunk;
    if (most < len) {
      unsigned low = 0;
      while (low < last) {
        const unsigned middle = low + (last - low) / 2;
        if (count([&](unsigned key, int) { return key <= middle; }) >= most) {
          last = middle;
        } else {
          low = middle + 1;
        }
      }
      // Of equal logits the lower ids.
      const int missing = most - count([&](unsigned key, int) { return key < last; });
      int low_tie = 0, high_tie = len - 1;
      while (low_tie < high_tie) {
        const int middle = (low_tie + high_tie) / 2;
        if (count([&](unsigned key, int i) { return key == last && i <= middle; }) >= missing) {
          high_tie = middle;
        } else {
          low_tie = middle + 1;
        }
      }
      last_tie = high_tie;
    }
    const auto taken = [&](unsigned key, int i) {
      return key < last || (key == last && i <= last_tie);
    };
    int sum = 0, total = 0;
    each([&](int i, int j) { sum += taken(own[j], i); });
    int at = block_exclusive_sum<kThreads>(sum, scratch, &total);
    each([&](int i, int j) {
      if (taken(own[j], i)) keys[at++] = order_key(own[j], first + i);
    });
    for (int i = total + threadIdx.x; i < most; i += kThreads) keys[i] = kNoKey;
    return most < len ? order_key(last, first + last_tie) : kNoKey;
  }
};

}  // namespace amphora
