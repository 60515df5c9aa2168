// What the attention kernels share: rows to sequences, masks, and places in the paged cache.
#pragma once

#include "amphora/args.h"
#include "amphora/copies.cuh"
#include "amphora/mma.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

constexpr float kLog2E = 1.4426950408889634f;

// The sequence that owns `row`, which is below q_start[sequences]: the last that starts at or in front
// of it. Padding sequences start behind all rows. For whole warps.
__device__ __forceinline__ int sequence_of_row(const int* q_start, int sequences, int row) {
  int in_front = 0;
  for (int first = 0; first < sequences; first += kWarp) {
    const int sequence = first + threadIdx.x % kWarp;
    const bool starts = sequence < sequences && q_start[sequence] <= row;
    in_front += __popc(__ballot_sync(kFullWarp, starts));
  }
  return in_front - 1;
}

// The first position that `position` sees. Never decreases from one position to the next.
__device__ __forceinline__ int first_position_seen(const AttentionArgs& args, int position) {
  switch (args.mask) {
    case kWindow:
      return position >= args.mask_width ? position - args.mask_width + 1 : 0;
    case kChunk:
      return position / args.mask_width * args.mask_width;
    default:
      return 0;
  }
}

// Where a position of a sequence lies in the cache, in positions.
__device__ __forceinline__ int place_of(const AttentionArgs& args, const int* blocks, int position) {
  return blocks[position / args.block_size] * args.block_size + position % args.block_size;
}

// Rows of keys or values in shared memory: kDim elements, whose octets are exchanged by octet ^ row % 8,
// so that eight rows of one octet touch all banks.
template <int kDim>
__device__ __forceinline__ unsigned octet_at(unsigned tile, int row, int octet) {
  return tile + row * (kDim * 2) + ((octet ^ row & 7) * 16);
}

// One octet of a cached row of `width` elements (a multiple of 8) into shared memory; zeros where
// nothing is seen, as what lies there may be no number.
template <class Element>
__device__ __forceinline__ void copy_cached(unsigned to, const void* cache, long long row, int width,
                                            int octet, bool seen) {
  const bool there = seen && octet * 8 < width;
  const Element* from = static_cast<const Element*>(cache) + (there ? row * width + octet * 8 : 0);
  copy_16(to, from, there ? 16 : 0);
}

// Queries of a 16-row block in fragment order. `low` and `high` are rows l/4 and l/4 + 8; null: zeros.
template <class Element, int kDim>
__device__ __forceinline__ void load_queries(unsigned (&to)[kDim / 16][4], const Element* low,
                                             const Element* high, int width) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = i * 16 + half * 8 + pair;
      const bool inside = at < width;
      to[i][half * 2] = inside && low != nullptr ? *reinterpret_cast<const unsigned*>(low + at) : 0;
      to[i][half * 2 + 1] = inside && high != nullptr ? *reinterpret_cast<const unsigned*>(high + at) : 0;
    }
  }
}

// 2 to the power of `value`, to two units in the last place; 0 for -inf.
__device__ __forceinline__ float power_of_two(float value) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
}

// The running softmax of two rows (l/4 and l/4 + 8) of a 16-row block over tiles of positions, and
// their weighted values (Milakov and Gimelshein 2018). Logits are in powers of two. `mass` is this
// lane's part of a row's sum: four lanes share a row.
template <class Element, int kDim>
struct Attended {
  float peak[2] = {-infinity(), -infinity()};
  float mass[2] = {0.f, 0.f};
  float sum[kDim / 8][4] = {};

  // Logits of one of the two rows to probabilities; what was added before keeps its share.
  template <int kBlocks>
  __device__ __forceinline__ void weigh(float (&logits)[kBlocks][4], int half) {
    float higher = peak[half];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      higher = fmaxf(higher, fmaxf(logits[j][half * 2], logits[j][half * 2 + 1]));
    }
    higher = fmaxf(higher, __shfl_xor_sync(kFullWarp, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(kFullWarp, higher, 2));
    // A row that has seen nothing yet keeps peak -inf, and must not subtract it from itself.
    const float level = higher == -infinity() ? 0.f : higher;
    if (__any_sync(kFullWarp, higher != peak[half])) {
      const float keep = power_of_two(peak[half] - level);
      mass[half] *= keep;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        sum[j][half * 2] *= keep;
        sum[j][half * 2 + 1] *= keep;
      }
    }
    peak[half] = higher;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      logits[j][half * 2] = power_of_two(logits[j][half * 2] - level);
      logits[j][half * 2 + 1] = power_of_two(logits[j][half * 2 + 1] - level);
      mass[half] += logits[j][half * 2] + logits[j][half * 2 + 1];
    }
  }

  // Adds kBlocks · 8 positions: `logits` of the block in fragment order, -inf where a row sees
  // nothing, and their values in shared memory. With kHalves 1 the upper eight rows do not exist.
  template <int kBlocks, int kHalves>
  __device__ __forceinline__ void add(float (&logits)[kBlocks][4], unsigned values) {
    static_assert(kBlocks % 2 == 0, "16 positions are one product");
#pragma unroll
    for (int half = 0; half < kHalves; ++half) weigh<kBlocks>(logits, half);
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      // A probability is the sum of two operands, the rounded one and what rounding took.
      unsigned a[4] = {0, 0, 0, 0}, rest[4] = {0, 0, 0, 0};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        if (word % 2 >= kHalves) continue;
        const float low = logits[2 * i + word / 2][word % 2 * 2], high = logits[2 * i + word / 2][word % 2 * 2 + 1];
        const Element low_rounded = narrow<Element>(low), high_rounded = narrow<Element>(high);
        a[word] = low_rounded.bits | static_cast<unsigned>(high_rounded.bits) << 16;
        rest[word] = pack_pair<Element>(low - widen(low_rounded), high - widen(high_rounded));
      }
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
        unsigned b[4];
        const int row = i * 16 + lane / 8 % 2 * 8 + lane % 8;
        load_matrices_turned(b, octet_at<kDim>(values, row, j * 2 + lane / 16));
        mma_k16<Element>(sum[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_k16<Element>(sum[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        mma_k16<Element>(sum[2 * j], rest[0], rest[1], rest[2], rest[3], b[0], b[1]);
        mma_k16<Element>(sum[2 * j + 1], rest[0], rest[1], rest[2], rest[3], b[2], b[3]);
      }
    }
  }

  // Completes `mass` over the lanes of a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 1);
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 2);
    }
  }
};

// logits = queries · keysᵀ for kBlocks · 8 positions whose keys lie in shared memory. `query(i, to)` gives
// the 16-row block's elements 16 · i to 16 · i + 15 in fragment order.
template <class Element, int kDim, int kBlocks, class Query>
__device__ __forceinline__ void multiply_keys(float (&logits)[kBlocks][4], const Query& query_at, unsigned keys) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) logits[j][c] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    unsigned query[4];
    query_at(i, query);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      unsigned b[4];
      const int row = j * 8 + lane / 16 * 8 + lane % 8;
      load_matrices(b, octet_at<kDim>(keys, row, i * 2 + lane / 8 % 2));
      mma_k16<Element>(logits[j], query[0], query[1], query[2], query[3], b[0], b[1]);
      mma_k16<Element>(logits[j + 1], query[0], query[1], query[2], query[3], b[2], b[3]);
    }
  }
}

}  // namespace amphora
