// Draws the next token of each sequence.
//
//   sample_survey   grid (chunks, rows): of each chunk of a row, its first token, the mass of its softmax,
//                   and the keys of its first tokens, *candidates*
//   sample_finish   a block a row: the candidates in order, the prefix that min-p, top-k and top-p keep,
//                   and the token that the draw falls on
//
// Greedy rows need first tokens alone. Otherwise a candidate counts only up to the first place where a
// chunk may miss a token: in front of it nothing is missing. A vocabulary of few chunks has all its tokens
// among the candidates; a large one about its first thousand, which a draw seldom leaves. Where it does,
// `sample_all.cuh` draws from the whole row. Sums are double, in an order that depends on the vocabulary
// alone.
#pragma once

#include "amphora/args.h"
#include "amphora/logits.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"
#include "kernels/sample_all.cuh"

namespace amphora {

// The edits of a row.
struct Edits {
  const LogitEdit* data;
  int count;

  __device__ __forceinline__ Edits(const SampleArgs& args, int row) {
    const int first = args.edit_start[row];
    data = static_cast<const LogitEdit*>(args.edits) + first;
    count = args.edit_start[row + 1] - first;
  }
  // The first whose token is not below `token`.
  __device__ __forceinline__ int from(int token) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (data[middle].token < static_cast<unsigned>(token)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Words of a row's bits for edited tokens.
__device__ __forceinline__ long long edited_words(const SampleArgs& args) {
  return static_cast<long long>(args.chunks) * (kLogitChunk / 32);
}

template <class Config, int kThreads>
__device__ void sample_survey(const SampleArgs& args) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kLogitChunk / 32 <= kThreads, "a thread for each word of bits");
  __shared__ __align__(16) float values[kLogitChunk];
  __shared__ unsigned edited[kLogitChunk / 32];
  __shared__ unsigned long long keys[kWarps];
  __shared__ double sums[kWarps];
  __shared__ int counts[kWarps];
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.y;
  if (args.sample_slot[row] < 0) return;
  const SampleRow params = static_cast<const SampleRow*>(args.sampling)[row];
  const Chunk<kThreads> chunk(args.vocab);
  const float* logits = args.logits + static_cast<long long>(row) * args.vocab;
  chunk.load(logits, args.vocab, values);

  SamplePartial partial{};
  if (params.logprob != 0) {
    partial.raw_peak = logit_of(chunk.first_key(values, keys));
    partial.raw_mass = chunk.mass(values, partial.raw_peak, 1.f, sums);
  }

  const Edits edits(args, row);
  if (edits.count > 0) {
    if (threadIdx.x < kLogitChunk / 32) edited[threadIdx.x] = 0;
    __syncthreads();
    const int end = edits.from(chunk.first + chunk.len);
    for (int e = edits.from(chunk.first) + threadIdx.x; e < end; e += kThreads) {
      const int i = static_cast<int>(edits.data[e].token) - chunk.first;
      values[i] = number(edit_logit(values[i], edits.data[e], params));
      atomicOr(&edited[i / 32], 1u << i % 32);
    }
    __syncthreads();
    if (threadIdx.x < kLogitChunk / 32) {
      unsigned* words = args.edited + row * edited_words(args);
      words[blockIdx.x * (kLogitChunk / 32) + threadIdx.x] = edited[threadIdx.x];
    }
  }

  partial.first = chunk.first_key(values, keys);
  partial.bound = kNoKey;
  const long long place = static_cast<long long>(row) * args.chunks + blockIdx.x;
  if (params.temperature > 0.f) {
    partial.mass = chunk.mass(values, logit_of(partial.first), params.temperature, sums);
    unsigned long long* candidates = args.keys + place * args.candidates;
    partial.bound = chunk.select(values, args.candidates, candidates, counts);
  }
  if (threadIdx.x == 0) args.partials[place] = partial;
}

// The SplitMix64 finaliser (Steele, Lea and Flood 2014) over seed and position, as hal defines it.
__device__ __forceinline__ unsigned long long mix(unsigned long long z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ float uniform(unsigned long long seed, unsigned position) {
  constexpr unsigned long long kStep = 0x9e3779b97f4a7c15ull;
  unsigned long long z = mix(seed + kStep);
  z = mix(z + (static_cast<unsigned long long>(position) + 1) * kStep);
  return static_cast<float>(z >> 40) / static_cast<float>(1u << 24);
}

// A row's candidates in order, and the mass up to each.
template <int kThreads>
struct Candidates {
  static constexpr int kEach = kMostCandidates / kThreads;
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kMostCandidates % kThreads == 0, "the same for each thread");

  struct Shared {
    unsigned long long keys[kMostCandidates];
    double masses[kMostCandidates];  // inclusive
    unsigned long long best[kWarps];
    double sums[kWarps];
    int counts[kWarps];
  };

  const SampleRow& row;
  float peak;
  Shared& shared;

  // How many of the first `of` pass; passing ones come first.
  template <class Test>
  __device__ __forceinline__ int count(int of, Test test) {
    int sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * kThreads + threadIdx.x;
      if (i < of) sum += test(i);
    }
    return block_reduce<kThreads>(sum, Sum{}, shared.counts);
  }

  __device__ __forceinline__ double weight(int i) const {
    return softmax_weight(logit_of(shared.keys[i]), peak, row.temperature);
  }

  // Takes `total` keys, and sorts them: bitonic (Batcher 1968), over the next power of two.
  __device__ void sort(const unsigned long long* keys, int total) {
    int size = 2;
    while (size < total) size *= 2;
    for (int i = threadIdx.x; i < size; i += kThreads) shared.keys[i] = i < total ? keys[i] : kNoKey;
    for (int run = 2; run <= size; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += kThreads) {
          const int other = i ^ apart;
          if (other < i) continue;
          const unsigned long long a = shared.keys[i], b = shared.keys[other];
          if ((a > b) == ((i & run) == 0)) {
            shared.keys[i] = b;
            shared.keys[other] = a;
          }
        }
      }
    }
    __syncthreads();
  }

  // The masses of the first `of`.
  __device__ void accumulate(int of) {
    double own[kEach], sum = 0.0, total = 0.0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = threadIdx.x * kEach + j;
      own[j] = i < of ? weight(i) : 0.0;
      sum += own[j];
    }
    double front = block_exclusive_sum<kThreads>(sum, shared.sums, &total);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      front += own[j];
      shared.masses[threadIdx.x * kEach + j] = front;
    }
    __syncthreads();
  }

  // The token that `u` draws; -1 if it may be none of the candidates. `total` keys, complete up to
  // `bound`; `mass` is that of the row.
  __device__ int draw(const unsigned long long* keys, int total, unsigned long long bound, int vocab,
                      double mass, double u) {
    sort(keys, total);
    const int complete =
        count(total, [&](int i) { return shared.keys[i] <= bound && shared.keys[i] != kNoKey; });
    int kept = count(complete, [&](int i) {
      const double w = weight(i);
      return w > 0.0 && w >= row.min_p;
    });
    // Whether nothing behind the kept ones is kept.
    bool closed = kept < complete || bound == kNoKey;
    if (row.top_k > 0 && row.top_k < static_cast<unsigned>(vocab)) {
      if (row.top_k <= static_cast<unsigned>(kept)) {
        kept = static_cast<int>(row.top_k);
        closed = true;
      } else if (!closed) {
        return -1;
      }
    }
    if (kept == 0 || (!closed && row.min_p > 0.f)) return -1;
    accumulate(kept);
    if (closed) mass = shared.masses[kept - 1];
    if (row.top_p < 1.f) {
      const double target = static_cast<double>(row.top_p) * mass;
      const int below = count(kept, [&](int i) { return shared.masses[i] < target; });
      if (below == kept && !closed) return -1;
      kept = min(below + 1, kept);
      closed = true;
      mass = shared.masses[kept - 1];
    }
    const double target = u * mass;
    const int below = count(kept, [&](int i) { return shared.masses[i] <= target; });
    if (below == kept && !closed) return -1;
    return id_of(shared.keys[min(below, kept - 1)]);
  }
};

template <class Config, int kThreads>
__device__ void sample_finish(const SampleArgs& args) {
  using C = Candidates<kThreads>;
  using S = Sampler<kThreads>;
  __shared__ typename C::Shared shared;
  __shared__ typename S::Shared whole;
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x, slot = args.sample_slot[row];
  if (slot < 0) return;
  const SampleRow params = static_cast<const SampleRow*>(args.sampling)[row];
  const float* logits = args.logits + static_cast<long long>(row) * args.vocab;
  const SamplePartial* partials = args.partials + static_cast<long long>(row) * args.chunks;

  // Over the chunks, in an order that depends on their number alone.
  const auto over_chunks = [&](auto start, auto of, auto op, auto* scratch) {
    auto all = start;
    for (int c = threadIdx.x; c < args.chunks; c += kThreads) all = op(all, of(partials[c]));
    return block_reduce<kThreads>(all, op, scratch);
  };
  using Partial = const SamplePartial&;
  const unsigned long long first =
      over_chunks(kNoKey, [](Partial p) { return p.first; }, Min{}, shared.best);
  const float peak = logit_of(first);
  int token = peak > -infinity() ? id_of(first) : 0;
  if (params.temperature > 0.f && peak > -infinity()) {
    const unsigned long long bound =
        over_chunks(kNoKey, [](Partial p) { return p.bound; }, Min{}, shared.best);
    const auto mass_of = [&](Partial p) {
      return p.mass * softmax_weight(logit_of(p.first), peak, params.temperature);
    };
    const double mass = over_chunks(0.0, mass_of, Sum{}, shared.sums);
    const unsigned long long seed =
        static_cast<unsigned long long>(params.seed_high) << 32 | params.seed_low;
    const double u = uniform(seed, params.position);
    const int total = args.chunks * args.candidates;
    const unsigned long long* keys = args.keys + static_cast<long long>(row) * total;
    token = C{params, peak, shared}.draw(keys, total, bound, args.vocab, mass, u);
    if (token < 0) {
      const Edits edits(args, row);
      const unsigned* edited = args.edited + row * edited_words(args);
      S all{logits,     args.vocab,  params.temperature, peak,  params,
            edits.data, edits.count, edited,             whole};
      token = all.draw(u);
    }
  }
  float logprob = 0.f;
  if (params.logprob != 0) {
    const float raw_peak =
        over_chunks(-infinity(), [](Partial p) { return p.raw_peak; }, Max{},
                    reinterpret_cast<float*>(shared.counts));
    const auto mass_of = [&](Partial p) {
      return p.raw_mass * softmax_weight(p.raw_peak, raw_peak, 1.f);
    };
    const double mass = over_chunks(0.0, mass_of, Sum{}, shared.sums);
    logprob = log_probability(number(logits[token]), raw_peak, mass);
  }
  if (threadIdx.x == 0) {
    args.table[slot] = token;
    args.result[2 * row] = token;
    args.result[2 * row + 1] = __float_as_int(logprob);
  }
}

}  // namespace amphora
