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
  __device__ __forceinline__ T* pair_at(T* base, long long pitch, int dim, int pair) const {
    const int in = pair / rows.heads;
    if (in >= rows.rows) return nullptr;
    return base + (rows.row + in) * pitch + static_cast<long long>(rows.first_head + pair % rows.heads) * dim;
  }

  // The group's queries into shared memory; zeros for pairs and elements that do not exist. Logits are scaled by
  // a factor that is positive: a negative one turns the queries round, and zero makes them zeros.
  __device__ __forceinline__ void put_queries() {
    const unsigned round = args.scale < 0.f ? 0x80008000u : 0u;
    const bool none = args.scale == 0.f;
    scale = none ? 1.f : fabsf(args.scale) * kLog2E;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Element* q = pair_at(static_cast<const Element*>(args.q), args.q_pitch, args.k_dim, pair(half));
      const int row = warp * 16 + lane / 4 + half * 8;
      const unsigned to = ring.queries(group) + row * 128 + lane % 4 * 4;
#pragma unroll
      for (int octet = 0; octet < kDim / 8; ++octet) {
        const int at = octet * 8 + lane % 4 * 2;
        const bool there = q != nullptr && at < args.k_dim && !none;
        const unsigned word = there ? *reinterpret_cast<const unsigned*>(q + at) ^ round : 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + octet / 8 * kGroupBytes + ((octet ^ row) & 7) * 16),
                     "r"(word)
                     : "memory");
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
  // A probability is the sum of two operands.
  __device__ __forceinline__ void multiply_values(const unsigned (&high)[kTile / 16][4],
                                                  const unsigned (&low)[kTile / 16][4]) {
    const unsigned long long values = turned_operand(ring.values(turn.stage), kTile * 128);
    products_begin();
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      ValueProduct<Element, kDim>::run(sum, high[i], values + i * 128);
      ValueProduct<Element, kDim>::run(sum, low[i], values + i * 128);
    }
    products_commit();
  }

  __device__ __forceinline__ void hide_unseen(Logits& logits, int begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Found anew, as few tiles need it and registers are short. -1: there is no such pair.
      const int in = pair(half) / rows.heads, to = in < rows.rows ? rows.position + in : -1;
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

  // Logits to probabilities; what was added before keeps its share.
  __device__ __forceinline__ void weigh(Logits& logits) {
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
      const float level = higher == -infinity() ? 0.f : higher;
      keep[half] = peak[half] == higher ? 1.f : power_of_two(peak[half] - level);
      peak[half] = higher;
      mass[half] *= keep[half];
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& logit = logits[j * 4 + half * 2 + c];
          logit = power_of_two(fmaf(logit, scale, -level));
          mass[half] += logit;
        }
      }
    }
    if (__any_sync(kFullWarp, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sum[i] *= keep[i / 2 % 2];
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
    weigh(logits);
    unsigned high[kTile / 16][4], low[kTile / 16][4];
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) {
      split_pair<Element>(logits[i * 2], logits[i * 2 + 1], high[i / 4][i % 4], low[i / 4][i % 4]);
    }

    barrier_wait(ring.full_values(turn.stage), turn.parity);
    async_proxy_fence();
    multiply_values(high, low);
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

    const int bottom = group * kGroupRows / rows.heads;
    const int top = min((group * kGroupRows + kGroupRows - 1) / rows.heads, rows.rows - 1);
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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 1);
      mass[half] += __shfl_xor_sync(kFullWarp, mass[half], 2);
      Element* to = pair_at(static_cast<Element*>(args.out), args.out_pitch, args.v_dim, pair(half));
      if (to == nullptr) continue;
      const int head = rows.first_head + pair(half) % rows.heads;
      const float sink = args.sinks != nullptr ? args.sinks[head] * kLog2E : -infinity();
      const float highest = fmaxf(peak[half], sink);
      const float share = power_of_two(peak[half] - highest);
      const float of = share / (mass[half] * share + power_of_two(sink - highest));
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const int at = j * 8 + lane % 4 * 2;
        if (at >= args.v_dim) continue;
        *reinterpret_cast<unsigned*>(to + at) =
            narrow_pair<Element>(sum[j * 4 + half * 2] * of, sum[j * 4 + half * 2 + 1] * of);
      }
    }
  }
};

#endif

}  // namespace amphora
