// A warpgroup of an attention block that multiplies: logits, the running softmax of its 64 pairs (Milakov and
// Gimelshein 2018), and their weighted values.
#pragma once

#include "amphora/overlap.cuh"
#include "kernels/attention_group_block.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Two numbers side by side, the first in the low half.
template <class Element>
__device__ __forceinline__ unsigned narrow_pair(float first, float second);
template <>
__device__ __forceinline__ unsigned narrow_pair<bf16>(float first, float second) {
  unsigned out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}
template <>
__device__ __forceinline__ unsigned narrow_pair<f16>(float first, float second) {
  unsigned out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

// Two numbers, each as the sum of two that are narrow.
template <class Element>
__device__ __forceinline__ void split_pair(float first, float second, unsigned& high, unsigned& low);
// Half of the bits cut off takes less than rounding does, and the rest makes up for either.
template <>
__device__ __forceinline__ void split_pair<bf16>(float first, float second, unsigned& high, unsigned& low) {
  const unsigned a = __float_as_uint(first), b = __float_as_uint(second);
  high = __byte_perm(a, b, 0x7632);
  low = narrow_pair<bf16>(first - __uint_as_float(a & 0xffff0000u), second - __uint_as_float(b & 0xffff0000u));
}
template <>
__device__ __forceinline__ void split_pair<f16>(float first, float second, unsigned& high, unsigned& low) {
  high = narrow_pair<f16>(first, second);
  low = narrow_pair<f16>(first - unpack_first<f16>(high), second - unpack_second<f16>(high));
}

template <class Element, class Shape>
struct AttentionMultiply {
  static constexpr int kDim = Shape::kDim, kTile = Shape::kTile;
  using Logits = float[kTile / 2];

  const AttentionArgs& args;
  const AttentionRows& rows;
  const AttentionRing<Shape>& ring;
  const int group;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;

  AttentionTurn<Shape> turn;
  float scale;             // to powers of two; not negative
  float sum[kDim / 2];     // this lane's pairs are `pair(0)` and `pair(1)`
  float peak[2], mass[2];  // of powers of two; `mass` is this lane's part: four lanes share a pair
  int all_from, all_to;    // what all pairs of the group see; those that do not exist may see anything

  __device__ __forceinline__ int pair(int half) const {
    return group * kGroupRows + warp * 16 + lane / 4 + half * 8;
  }
  // Where pair `pair` of the block begins in q or out; null: there is no such pair.
  template <class T>
  static __device__ __forceinline__ T* pair_at(const AttentionRows& rows, T* base, long long pitch, int dim,
                                               int pair) {
    const int in = rows.row_of(pair), head = rows.first_head + pair - in * rows.heads;
    return in < rows.rows ? base + (rows.row + in) * pitch + head * dim : nullptr;
  }

  // Where an octet of a row lies among those of the group; 64 elements further lie behind all rows.
  __device__ __forceinline__ unsigned queries_at(int row, int octet) const {
    return ring.queries(group) + octet / 8 * kGroupBytes + row * 128 + ((octet ^ row) & 7) * 16;
  }
  // Whether rows may be read or written by 16 bytes.
  static __device__ __forceinline__ bool by_octets(const void* start, long long pitch) {
    return reinterpret_cast<unsigned long long>(start) % 16 == 0 && pitch % 8 == 0;
  }

  // The group's queries into shared memory; zeros for pairs and elements that do not exist. Logits are scaled by
  // a factor that is positive: a negative one turns the queries round, and zero makes them zeros.
  __device__ __forceinline__ void put_queries() {
    const unsigned round = args.scale < 0.f ? 0x80008000u : 0u;
    const bool none = args.scale == 0.f;
    scale = none ? 1.f : fabsf(args.scale) * kLog2E;
    const Element* q = static_cast<const Element*>(args.q);
    const AttentionRows rows = this->rows;
    if (by_octets(q, args.q_pitch)) {
      constexpr int kOctets = kDim / 8, kAtOnce = 128 / kOctets, kRounds = kGroupRows / kAtOnce;
      const int octet = threadIdx.x % kOctets, first = threadIdx.x % 128 / kOctets;
      uint4 words[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const Element* from = pair_at(rows, q, args.q_pitch, args.k_dim, group * kGroupRows + first + i * kAtOnce);
        const bool there = from != nullptr && octet * 8 < args.k_dim && !none;
        words[i] = there ? *reinterpret_cast<const uint4*>(from + octet * 8) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const uint4 word = words[i];
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(queries_at(first + i * kAtOnce, octet)),
                     "r"(word.x ^ round), "r"(word.y ^ round), "r"(word.z ^ round), "r"(word.w ^ round)
                     : "memory");
      }
    } else {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const Element* from = pair_at(rows, q, args.q_pitch, args.k_dim, pair(half));
        const int row = warp * 16 + lane / 4 + half * 8;
#pragma unroll
        for (int octet = 0; octet < kDim / 8; ++octet) {
          const int at = octet * 8 + lane % 4 * 2;
          const bool there = from != nullptr && at < args.k_dim && !none;
          const unsigned word = there ? *reinterpret_cast<const unsigned*>(from + at) : 0;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(queries_at(row, octet) + lane % 4 * 4), "r"(word ^ round)
                       : "memory");
        }
      }
    }
    async_proxy_fence();
    named_barrier(1 + group, 128);
  }

  __device__ __forceinline__ void multiply_keys(Logits& logits) const {
    const unsigned long long queries = operand(ring.queries(group)), keys = operand(ring.keys(turn.stage));
    products_begin();
    LogitProduct<Element>::template run<false>(logits, queries, keys);
#pragma unroll
    for (int i = 1; i < kDim / 16; ++i) {
      const int in = i % 4 * 2, far = i / 4 * 64;  // a row's 16 elements; 64 of 16 bytes for each row
      LogitProduct<Element>::template run<true>(logits, queries + in + far * (kGroupRows / 8),
                                                keys + in + far * (kTile / 8));
    }
    products_commit();
  }

  __device__ __forceinline__ void hide_unseen(Logits& logits, int begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Found anew, as few tiles need it and registers are short. -1: there is no such pair.
      const int in = rows.row_of(pair(half)), to = in < rows.rows ? rows.position + in : -1;
      const int from = first_position_seen(args, to);
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at = begin + j * 8 + lane % 4 * 2 + c;
          if (at < from || at > to) logits[j * 4 + half * 2 + c] = -infinity();
        }
      }
    }
  }

  // The peaks with these logits; what was added before keeps its share. `level` is what to subtract of logits.
  __device__ __forceinline__ void raise(const Logits& logits, float (&level)[2]) {
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = logits[half * 2];
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j) {
        highest = fmaxf(highest, fmaxf(logits[j * 4 + half * 2], logits[j * 4 + half * 2 + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const float higher = fmaxf(peak[half], highest * scale);
      // A row that has seen nothing yet keeps peak -inf, and must not subtract it from itself.
      level[half] = higher == -infinity() ? 0.f : higher;
      keep[half] = peak[half] == higher ? 1.f : power_of_two(peak[half] - level[half]);
      peak[half] = higher;
      mass[half] *= keep[half];
    }
    if (__any_sync(kFullWarp, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sum[i] *= keep[i / 2 % 2];
    }
  }

  // Sixteen positions: logits to probabilities, which are the sum of two operands.
  __device__ __forceinline__ void weigh(const float* logits, const float (&level)[2], unsigned (&high)[4],
                                        unsigned (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2;
      const float first = power_of_two(fmaf(logits[i * 2], scale, -level[half]));
      const float second = power_of_two(fmaf(logits[i * 2 + 1], scale, -level[half]));
      mass[half] += first + second;
      split_pair<Element>(first, second, high[i], low[i]);
    }
  }

  // A tile of which the group sees something.
  __device__ __forceinline__ void add(int tile) {
    Logits logits;
    barrier_wait(ring.full_keys(turn.stage), turn.parity);
    async_proxy_fence();  // they came by threads' copies
    multiply_keys(logits);
    products_wait<0>();
    products_settle(logits);
    ring.release(ring.empty_keys(turn.stage));

    const int begin = tile * kTile;  // most tiles are seen whole
    if (begin < all_from || begin + kTile > all_to) hide_unseen(logits, begin);
    float level[2];
    raise(logits, level);
    barrier_wait(ring.full_values(turn.stage), turn.parity);
    async_proxy_fence();
    // Sixteen positions are multiplied while the next are weighed.
    const unsigned long long values = turned_operand(ring.values(turn.stage), kTile * 128);
    unsigned high[kTile / 16][4], low[kTile / 16][4];
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      weigh(logits + i * 8, level, high[i], low[i]);
      products_begin();
      ValueProduct<Element, kDim>::run(sum, high[i], values + i * 128);
      ValueProduct<Element, kDim>::run(sum, low[i], values + i * 128);
    }
    products_commit();
    products_wait<0>();
    products_settle(sum);
    ring.release(ring.empty_values(turn.stage));
    turn.step();
  }
  // A tile that only other groups of the block see.
  __device__ __forceinline__ void pass() {
    barrier_wait(ring.full_keys(turn.stage), turn.parity);
    ring.release(ring.empty_keys(turn.stage));
    barrier_wait(ring.full_values(turn.stage), turn.parity);
    ring.release(ring.empty_values(turn.stage));
    turn.step();
  }

  __device__ void run() {
    wait_for_front();
    put_queries();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      peak[half] = -infinity();
      mass[half] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) sum[i] = 0.f;

    const int bottom = rows.row_of(group * kGroupRows);
    const int top = min(rows.row_of(group * kGroupRows + kGroupRows - 1), rows.rows - 1);
    all_from = first_position_seen(args, rows.position + top);
    all_to = rows.position + bottom + 1;
    const bool any = bottom < rows.rows;
    const int finish = (rows.end_seen - 1) / kTile + 1;
    const int first = any ? first_position_seen(args, rows.position + bottom) / kTile : finish;
    const int end = any ? (rows.position + top) / kTile + 1 : finish;
    int tile = rows.first_seen / kTile;
    for (; tile < first; ++tile) pass();
    for (; tile < end; ++tile) add(tile);
    for (; tile < finish; ++tile) pass();
    store();
  }

  __device__ __forceinline__ void store() {
    Element* out = static_cast<Element*>(args.out);
    const AttentionRows rows = this->rows;
    const bool octets = by_octets(out, args.out_pitch);
    if (octets) named_barrier(1 + group, 128);  // the queries have been read: results take their place
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 1);
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 2);
      Element* to = pair_at(rows, out, args.out_pitch, args.v_dim, pair(half));
      if (to == nullptr) continue;
      const int head = rows.first_head + pair(half) - rows.row_of(pair(half)) * rows.heads;
      const float sink = args.sinks != nullptr ? args.sinks[head] * kLog2E : -infinity();
      const float highest = fmaxf(peak[half], sink);
      const float share = power_of_two(peak[half] - highest);
      const float of = share / (mass[half] * share + power_of_two(sink - highest));
      const int row = warp * 16 + lane / 4 + half * 8;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const int at = j * 8 + lane % 4 * 2;
        const unsigned word = narrow_pair<Element>(sum[j * 4 + half * 2] * of, sum[j * 4 + half * 2 + 1] * of);
        if (octets) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(queries_at(row, j) + lane % 4 * 4), "r"(word) : "memory");
        } else if (at < args.v_dim) {
          *reinterpret_cast<unsigned*>(to + at) = word;
        }
      }
    }
    if (!octets) return;
    __syncwarp();  // a warp copies its own rows
    constexpr int kOctets = kDim / 8, kAtOnce = kWarp / kOctets;
    const int octet = lane % kOctets;
#pragma unroll
    for (int i = 0; i < 16 / kAtOnce; ++i) {
      const int row = warp * 16 + i * kAtOnce + lane / kOctets;
      Element* to = pair_at(rows, out, args.out_pitch, args.v_dim, group * kGroupRows + row);
      if (to == nullptr || octet * 8 >= args.v_dim) continue;
      uint4 word;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "r"(queries_at(row, octet)));
      *reinterpret_cast<uint4*>(to + octet * 8) = word;
    }
  }
};

#endif

}  // namespace amphora
