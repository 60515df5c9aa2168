// Shrunk rows of a dense product that its own blocks make and wait for: f32 numbers in memory that is zero
// between launches, so that a number is its own flag. The blocks of such a launch run at once, so whatever
// one waits for comes.
//
// Two halves take turns. A launch has one to itself and clears the other, whose launch has ended: so no
// reader of a launch is overtaken by its own cleaning. The turn changes when all blocks have read it.
//
// A half: [tokens, kMaxSlices, parts, kMaxRank], of the parts of k that are kept apart.
#pragma once

#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/mma.cuh"

namespace amphora {

// Numbers of a half, for 64 rows and 8 parts of k.
constexpr int kShrunkHalf = 64 * 8 * kMaxSlices * kMaxRank;

// Lies at DenseArgs::ready, zero when the stream was made.
struct alignas(16) ShrunkState {
  unsigned turn;
  unsigned seen;      // blocks that have read the turn
  unsigned reserved[2];
  unsigned rows[2];   // of each half, what its last launch may have written: rows of kMaxRank numbers, and
  unsigned quads[2];  // so many times four in front of each
};

// What a launch does with it, from the time that the kernel in front has ended.
struct ShrunkTurn {
  ShrunkState* state;
  float* halves;
  unsigned half;

  __device__ __forceinline__ ShrunkTurn(const DenseArgs& args)
      : state(reinterpret_cast<ShrunkState*>(args.ready)),
        halves(args.lora.shrunk),
        half(__ldcg(&state->turn) & 1) {}

  // What `clear` wants; read early, as it is a way to memory.
  __device__ __forceinline__ uint4 extents() const {
    return __ldcg(reinterpret_cast<const uint4*>(state->rows));
  }

  // Where the numbers of a row, slice and part begin.
  __device__ __forceinline__ float* at(int row, int slice, int part, int parts) const {
    return halves + half * kShrunkHalf + ((row * kMaxSlices + slice) * parts + part) * kMaxRank;
  }

  // Says what this launch writes; one thread of it.
  __device__ __forceinline__ void announce(int rows, int widest) const {
    state->rows[half] = rows;
    state->quads[half] = widest / 4;
  }

  // Clears the other half; threads of the launch share it.
  __device__ __forceinline__ void clear(const uint4& extents, int thread, int threads) const {
    const unsigned other = half ^ 1, quads = other ? extents.w : extents.z;
    const unsigned all = (other ? extents.y : extents.x) * quads;
    float* from = halves + other * kShrunkHalf;
    for (unsigned i = thread; i < all; i += threads) {
      *reinterpret_cast<float4*>(from + i / quads * kMaxRank + i % quads * 4) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  // One thread of each block, when its others have read the turn. The blocks that left before it; the last
  // one ends the turn.
  static __device__ __forceinline__ unsigned leave(const DenseArgs& args) {
    return atomicAdd(&reinterpret_cast<ShrunkState*>(args.ready)->seen, 1u);
  }
  static __device__ __forceinline__ void end(const DenseArgs& args, unsigned half) {
    ShrunkState* state = reinterpret_cast<ShrunkState*>(args.ready);
    state->seen = 0;
    state->turn = half ^ 1;
  }
};

// A number as it is stored: never the zero that says that it is not there.
__device__ __forceinline__ float as_flag(float value) { return value == 0.f ? -0.f : value; }

__device__ __forceinline__ bool is_there(const float4& four) {
  return __float_as_uint(four.x) != 0 && __float_as_uint(four.y) != 0 && __float_as_uint(four.z) != 0 &&
         __float_as_uint(four.w) != 0;
}

// Waits for eight numbers of each part, kMaxRank apart, and adds them in the order of the parts.
__device__ __forceinline__ void await_octet(const float* from, int parts, float (&sum)[8]) {
  constexpr int kAtOnce = 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.f;
  for (int base = 0; base < parts; base += kAtOnce) {
    float4 four[kAtOnce][2];
    bool there = false;
    while (!there) {
      there = true;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (base + p >= parts) continue;
        four[p][0] = load_relaxed(from + (base + p) * kMaxRank);
        four[p][1] = load_relaxed(from + (base + p) * kMaxRank + 4);
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (base + p < parts) there = there && is_there(four[p][0]) && is_there(four[p][1]);
      }
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      if (base + p >= parts) continue;
      sum[0] += four[p][0].x;
      sum[1] += four[p][0].y;
      sum[2] += four[p][0].z;
      sum[3] += four[p][0].w;
      sum[4] += four[p][1].x;
      sum[5] += four[p][1].y;
      sum[6] += four[p][1].z;
      sum[7] += four[p][1].w;
    }
  }
}

// Each number, scaled, as the sum of two elements.
template <class Element>
__device__ __forceinline__ void split(const float (&sum)[8], float scale, uint4& large, uint4& small) {
  unsigned first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = sum[2 * i] * scale, high = sum[2 * i + 1] * scale;
    first[i] = pack_pair<Element>(low, high);
    second[i] = pack_pair<Element>(low - unpack_first<Element>(first[i]), high - unpack_second<Element>(first[i]));
  }
  large = make_uint4(first[0], first[1], first[2], first[3]);
  small = make_uint4(second[0], second[1], second[2], second[3]);
}

}  // namespace amphora
