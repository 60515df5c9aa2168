// A draw from a row of which any token may be wanted, without sorting and without candidates: the way
// out where those of `sample` do not reach. One block.
//
// A *cut* is the last token of a prefix of the order. Each rule asks for the shortest prefix whose weight
// reaches a target: top-k counts tokens, top-p and the draw count mass, each inside the cut before it.
// Such a cut is found four bits of the value at a time: sums by digit, in double, in an order that depends
// on the block alone.
#pragma once

#include "amphora/args.h"
#include "amphora/logits.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

struct SampleRow {
  float temperature;  // 0: greedy
  float top_p;        // 1: off
  unsigned top_k;     // 0: off
  unsigned position;
  unsigned seed_low;
  unsigned seed_high;
  unsigned logprob;
  float min_p;        // 0: off
  float repetition;   // 1: off
  float presence;     // 0: off
  float frequency;    // 0: off
  unsigned reserved;
};
static_assert(sizeof(SampleRow) == 48, "SampleRow");

struct LogitEdit {
  unsigned token;  // ascending in a row
  unsigned output_count;
  unsigned flags;  // 1: occurs in prompt or output
  float bias;
};
static_assert(sizeof(LogitEdit) == 16, "LogitEdit");

// Rounded step by step as hal says, never contracted: equal logits stay equal.
__device__ __forceinline__ float edit_logit(float raw, const LogitEdit& edit, const SampleRow& row) {
  float logit = __fadd_rn(raw, edit.bias);
  if (edit.flags == 0) return logit;
  logit = logit > 0.f ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
  if (edit.output_count == 0) return logit;
  const float often = __fmul_rn(row.frequency, static_cast<float>(edit.output_count));
  return __fsub_rn(__fsub_rn(logit, row.presence), often);
}

// A prefix of the order: the tokens up to and including this one.
struct Cut {
  unsigned key;
  int id;
};

__device__ __forceinline__ bool inside(const Cut& cut, unsigned key, int id) {
  return key < cut.key || (key == cut.key && id <= cut.id);
}

enum class Weight { kCount, kMass };
enum class Reach { kAtLeast, kAbove };

// The logits of one sequence, and the scratch of its block. Dividing by a temperature keeps the order,
// so tokens are ordered by the logits themselves and only their masses are scaled.
template <int kThreads>
struct Sampler {
  static constexpr int kDigits = 16;
  static constexpr int kWarps = kThreads / kWarp;

  struct Shared {
    double sums[kWarps][kDigits];
    double totals[kDigits];
    double reduce[kWarps];
    int counts[kWarps];
    unsigned long long best[kWarps];
    int found;
  };

  const float* logits;
  int vocab;
  float temperature;       // not 0
  float peak;              // the largest logit
  const SampleRow& row;
  const LogitEdit* edits;  // by token
  int edit_count;
  const unsigned* edited;  // a bit for each token
  Shared& shared;

  __device__ __forceinline__ float logit(int id) const {
    const float raw = logits[id];
    if (edit_count == 0 || (edited[id / 32] >> id % 32 & 1) == 0) return number(raw);
    int low = 0, high = edit_count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (edits[middle].token < static_cast<unsigned>(id)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return number(edit_logit(raw, edits[low], row));
  }
  __device__ __forceinline__ double mass(float value) const {
    return softmax_weight(value, peak, temperature);
  }

  // The mass of a prefix.
  __device__ double mass_of(const Cut& cut) {
    double sum = 0.0;
    for (int id = threadIdx.x; id < vocab; id += kThreads) {
      const float value = logit(id);
      if (inside(cut, descending_key(value), id)) sum += mass(value);
    }
    return block_reduce<kThreads>(sum, Sum{}, shared.reduce);
  }

  // Weights by the 4-bit digit at `shift`, of the tokens inside `cut` whose bits above are `prefix`.
  __device__ void sum_digits(const Cut& cut, unsigned prefix, int shift, Weight weight) {
    double sums[kDigits];
#pragma unroll
    for (int d = 0; d < kDigits; ++d) sums[d] = 0.0;
    for (int id = threadIdx.x; id < vocab; id += kThreads) {
      const float value = logit(id);
      const unsigned key = descending_key(value);
      // Shifted in two steps: a shift by all 32 bits is undefined.
      if (!inside(cut, key, id) || (key >> shift >> 4) != (prefix >> shift >> 4)) continue;
      const double add = weight == Weight::kCount ? 1.0 : mass(value);
      const unsigned digit = key >> shift & (kDigits - 1);
#pragma unroll
      for (int d = 0; d < kDigits; ++d) sums[d] += digit == d ? add : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDigits; ++d) {
      const double sum = warp_reduce(sums[d], Sum{});
      if (threadIdx.x % kWarp == 0) shared.sums[threadIdx.x / kWarp][d] = sum;
    }
    __syncthreads();
    if (threadIdx.x < kDigits) {
      double total = 0.0;
      for (int warp = 0; warp < kWarps; ++warp) total += shared.sums[warp][threadIdx.x];
      shared.totals[threadIdx.x] = total;
    }
    __syncthreads();
  }

  // The `rank`-th (from 1) lowest id inside `cut` whose key is `key`; -1 if there are fewer.
  __device__ int tie(const Cut& cut, unsigned key, int rank) {
    const int share = (vocab + kThreads - 1) / kThreads;
    const int first = threadIdx.x * share, end = min(first + share, vocab);
    int own = 0;
    for (int id = first; id < end; ++id) {
      own += descending_key(logit(id)) == key && inside(cut, key, id);
    }
    if (threadIdx.x == 0) shared.found = -1;
    int total = 0;
    int seen = block_exclusive_sum<kThreads>(own, shared.counts, &total);
    __syncthreads();
    if (seen < rank && rank <= seen + own) {
      for (int id = first; id < end; ++id) {
        seen += descending_key(logit(id)) == key && inside(cut, key, id);
        if (seen == rank) {
          shared.found = id;
          break;
        }
      }
    }
    __syncthreads();
    const int found = shared.found;
    __syncthreads();  // all have read it before it is used again
    return found;
  }

  static __device__ __forceinline__ bool reaches(double sum, double target, Reach reach) {
    return reach == Reach::kAtLeast ? sum >= target : sum > target;
  }

  // The shortest prefix inside `cut` whose weight reaches `target`. If rounding keeps the whole below
  // the target, all of `cut` that has weight.
  __device__ Cut shortest(const Cut& cut, Weight weight, double target, Reach reach) {
    double front = 0.0;  // weight of the tokens in front of those with `prefix`
    unsigned prefix = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
      sum_digits(cut, prefix, shift, weight);
      double sum = front;
      int digit = -1, last = 0;
      double last_front = front;
      for (int d = 0; d < kDigits; ++d) {
        const double here = shared.totals[d];
        if (here <= 0.0) continue;
        last = d;
        last_front = sum;
        if (reaches(sum + here, target, reach)) {
          digit = d;
          break;
        }
        sum += here;
      }
      if (digit < 0) {
        digit = last;
        sum = last_front;
      }
      front = sum;
      prefix |= static_cast<unsigned>(digit) << shift;
    }
    // All ties of the value have the same weight: count how many the prefix takes.
    sum_digits(cut, prefix, 0, Weight::kCount);
    const int ties = static_cast<int>(shared.totals[prefix & (kDigits - 1)]);
    const double each = weight == Weight::kCount ? 1.0 : tie_mass(cut, prefix);
    int taken = 1;
    while (taken < ties && !reaches(front + taken * each, target, reach)) {
      // Straight to the neighbourhood, then one at a time over what rounding leaves.
      const double missing = (target - front) / each;
      const int jump = missing < ties ? static_cast<int>(missing) - 1 : ties - 1;
      taken = jump > taken ? jump : taken + 1;
    }
    return Cut{prefix, tie(cut, prefix, taken)};
  }

  // The mass of one token whose key is `key`.
  __device__ double tie_mass(const Cut& cut, unsigned key) { return mass(logit(tie(cut, key, 1))); }

  // The last token of the order whose mass is at least `least`.
  __device__ Cut last_with(double least) {
    unsigned long long last = 0;
    for (int id = threadIdx.x; id < vocab; id += kThreads) {
      const float value = logit(id);
      if (mass(value) < least) continue;
      last = max(last, order_key(descending_key(value), id));
    }
    last = block_reduce<kThreads>(last, Max{}, shared.best);
    return Cut{static_cast<unsigned>(last >> 32), id_of(last)};
  }

  // The token that `u` draws.
  __device__ int draw(double u) {
    Cut cut{0xffffffffu, 0x7fffffff};
    if (row.min_p > 0.f) cut = last_with(row.min_p);
    if (row.top_k > 0 && row.top_k < static_cast<unsigned>(vocab)) {
      cut = shortest(cut, Weight::kCount, row.top_k, Reach::kAtLeast);
    }
    if (row.top_p < 1.f) {
      const double share = static_cast<double>(row.top_p) * mass_of(cut);
      cut = shortest(cut, Weight::kMass, share, Reach::kAtLeast);
    }
    return shortest(cut, Weight::kMass, u * mass_of(cut), Reach::kAbove).id;
  }
};

}  // namespace amphora
