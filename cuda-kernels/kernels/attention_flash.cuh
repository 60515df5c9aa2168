// Paged attention for many rows: tiles of query rows against tiles of positions, on tensor cores.
//
// Grid: (tiles of rows, KV heads · groups of query heads). A block takes 128 (row, query head) pairs of
// one sequence and one KV head, rows first: 128 / group rows, each with the heads of its group, so a
// cached row is read once for all of them. Tiles of 64 positions (32 for the widest heads, whose sums fill
// the registers) come through a ring of stages by cp.async; a warp keeps the running softmax of 16 pairs.
// Blocks find their rows from q_start: a tile never spans two sequences, and surplus blocks end at once.
// Positions are always cut at multiples of a tile, so a row's bits depend on itself alone.
//
//   attention_flash_64, _128, _256   heads of up to so many elements, in multiples of 8
#pragma once

#include "amphora/args.h"
#include "amphora/attention.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Element, int kThreads, int kDim>
struct FlashAttention {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kPairs = kWarps * 16;              // (row, head) pairs of a block
  static constexpr int kTile = kDim > 128 ? 32 : 64;      // positions of a tile
  static constexpr int kPart = 32;                        // positions whose logits lie in registers
  static constexpr int kStages = 3;                       // both as in the host's heuristics
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;      // keys, then values
  static constexpr int kOctets = kDim / 8;
  static constexpr int kLoaders = kThreads / kOctets;     // positions copied at once
  static constexpr int kCopies = kTile / kLoaders;
  static_assert(kThreads % kOctets == 0 && kTile % kLoaders == 0, "whole rounds of copies");

  const AttentionArgs& args;
  const unsigned ring;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int octet = threadIdx.x % kOctets, loader = threadIdx.x / kOctets;
  int kv_head, first_head, heads;   // query heads of the block
  int row, rows, position;          // its first row, its rows, and the position of the first
  const int* blocks;
  int first_seen, end_seen;         // of all its rows

  __device__ FlashAttention(const AttentionArgs& args, unsigned ring) : args(args), ring(ring) {}

  // The block's heads and rows; false if there are none.
  __device__ bool find(int* scratch, int* found) {
    const int group = args.heads / args.kv_heads, parts = (group + kPairs - 1) / kPairs;
    kv_head = blockIdx.y / parts;
    first_head = kv_head * group + blockIdx.y % parts * kPairs;
    heads = min(kPairs, kv_head * group + group - first_head);
    const int rows_of_tile = kPairs / heads, wanted = blockIdx.x;
    if (threadIdx.x == 0) found[0] = -1;
    int in_front = 0;
    for (int first = 0; first < args.sequences; first += kThreads) {
      const int sequence = first + threadIdx.x;
      int tiles = 0;
      if (sequence < args.sequences) {
        const int of = args.q_start[sequence + 1] - args.q_start[sequence];
        tiles = (of + rows_of_tile - 1) / rows_of_tile;
      }
      int total = 0;
      const int before = in_front + block_exclusive_sum<kThreads>(tiles, scratch, &total);
      if (before <= wanted && wanted < before + tiles) {
        found[0] = sequence;
        found[1] = wanted - before;
      }
      in_front += total;
      __syncthreads();
      if (wanted < in_front) break;
    }
    if (found[0] < 0) return false;
    const int sequence = found[0], skip = found[1] * rows_of_tile;
    const int start = args.q_start[sequence], of = args.q_start[sequence + 1] - start;
    row = start + skip;
    rows = min(rows_of_tile, of - skip);
    position = args.context[sequence] - of + skip;
    blocks = args.block_table + static_cast<long long>(sequence) * args.table_width;
    first_seen = first_position_seen(args, position);
    end_seen = position + rows;
    return true;
  }

  __device__ __forceinline__ void look_up(int (&places)[kCopies], int tile) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = tile * kTile + loader + i * kLoaders;
      places[i] = at >= first_seen && at < end_seen ? place_of(args, blocks, at) : -1;
    }
  }

  __device__ __forceinline__ void copy_tile(int stage, const int (&places)[kCopies]) {
    const unsigned keys = ring + stage * kStageBytes, values = keys + kTileBytes;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = loader + i * kLoaders;
      const long long from = static_cast<long long>(places[i]) * args.kv_heads + kv_head;
      copy_cached<Element>(octet_at<kDim>(keys, at, octet), args.k_cache, from, args.k_dim, octet, places[i] >= 0);
      copy_cached<Element>(octet_at<kDim>(values, at, octet), args.v_cache, from, args.v_dim, octet,
                           places[i] >= 0);
    }
  }

  // Where pair `pair` of the block begins in q or out; null: there is no such pair.
  template <class T>
  __device__ __forceinline__ T* pair_at(T* base, long long pitch, int dim, int pair) const {
    const int in = pair / heads;
    if (in >= rows) return nullptr;
    return base + (row + in) * pitch + static_cast<long long>(first_head + pair % heads) * dim;
  }

  // Each warp's queries into shared memory behind the stages; zeros for pairs that do not exist.
  __device__ __forceinline__ void put_queries() {
    const unsigned queries = ring + kStages * kStageBytes;
    const Element* q = static_cast<const Element*>(args.q);
    for (int i = lane; i < 16 * kDim / 2; i += kWarp) {
      const int in = i / (kDim / 2), at = i % (kDim / 2) * 2;
      const Element* from = at < args.k_dim ? pair_at(q, args.q_pitch, args.k_dim, warp * 16 + in) : nullptr;
      const unsigned word = from != nullptr ? *reinterpret_cast<const unsigned*>(from + at) : 0;
      const unsigned to = octet_at<kDim>(queries, warp * 16 + in, at / 8) + at % 8 * 2;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
    }
    __syncwarp();  // a warp reads its own alone
  }

  __device__ void run() {
    const int own = warp * 16 + lane / 4;  // this lane's pairs are `own` and `own` + 8
    put_queries();
    const unsigned queries = ring + kStages * kStageBytes;
    const auto query_at = [&](int i, unsigned(&to)[4]) {
      load_matrices(to, octet_at<kDim>(queries, warp * 16 + lane % 16, i * 2 + lane / 16));
    };
    int sees_from[2], sees_to[2];  // -1: no such pair
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in = (own + half * 8) / heads;
      sees_to[half] = in < rows ? position + in : -1;
      sees_from[half] = in < rows ? first_position_seen(args, position + in) : 0;
    }
    // What any pair of this warp sees.
    const int top = min((warp * 16 + 15) / heads, rows - 1), bottom = warp * 16 / heads;
    const int warp_to = bottom < rows ? position + top : -1;
    const int warp_from = bottom < rows ? first_position_seen(args, position + bottom) : 0;
    // What all of them see: pairs that do not exist may see anything.
    const int all_from = first_position_seen(args, position + top), all_to = position + bottom + 1;

    const int first = first_seen / kTile, end = (end_seen + kTile - 1) / kTile;
    int places[kCopies], next = first, next_stage = 0;
    look_up(places, next);
    const auto issue = [&] {
      if (next < end) {
        copy_tile(next_stage, places);
        look_up(places, ++next);  // used one tile later
      }
      next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue();
    const float scale = args.scale * kLog2E;
    Attended<Element, kDim> state;
    int stage = 0;
    for (int tile = first; tile < end; ++tile) {
      wait_copies<kStages - 2>();
      __syncthreads();  // all copies have landed, and the stage before this one has been read
      issue();
      const unsigned keys = ring + stage * kStageBytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
      for (int part = 0; part < kTile / kPart; ++part) {
        const int begin = tile * kTile + part * kPart;
        if (begin > warp_to || begin + kPart <= warp_from) continue;
        float logits[kPart / 8][4];
        multiply_keys<Element, kDim, kPart / 8>(logits, query_at, keys + part * kPart * kDim * 2);
        // Most parts are seen whole by every pair of the warp.
        const bool all = begin >= all_from && begin + kPart <= all_to;
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int at = begin + j * 8 + lane % 4 * 2 + c % 2;
            const bool seen = all || (at >= sees_from[c / 2] && at <= sees_to[c / 2]);
            logits[j][c] = seen ? logits[j][c] * scale : -infinity();
          }
        }
        state.template add<kPart / 8, 2>(logits, keys + kTileBytes + part * kPart * kDim * 2);
      }
    }
    wait_copies<0>();
    state.finish();

    Element* out = static_cast<Element*>(args.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = own + half * 8;
      Element* to = pair_at(out, args.out_pitch, args.v_dim, pair);
      if (to == nullptr) continue;
      const float sink =
          args.sinks != nullptr ? args.sinks[first_head + pair % heads] * kLog2E : -infinity();
      const float peak = fmaxf(state.peak[half], sink);
      const float share = power_of_two(state.peak[half] - peak);
      const float mass = state.mass[half] * share + power_of_two(sink - peak);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const int at = j * 8 + lane % 4 * 2;
        if (at >= args.v_dim) continue;
        *reinterpret_cast<unsigned*>(to + at) =
            pack_pair<Element>(state.sum[j][half * 2] * share / mass, state.sum[j][half * 2 + 1] * share / mass);
      }
    }
  }
};

template <class Element, int kThreads, int kDim>
__device__ __forceinline__ void attention_flash(const AttentionArgs& args) {
  using F = FlashAttention<Element, kThreads, kDim>;
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ int scratch[kThreads / kWarp], found[2];
  let_next_begin();
  F flash(args, shared_address(dynamic));
  const bool any = flash.find(scratch, found);  // the plan alone
  wait_for_front();
  if (any) flash.run();
}

template <class Config, int kThreads>
__device__ void attention_flash_64(const AttentionArgs& args) {
  attention_flash<typename Config::Element, kThreads, 64>(args);
}

template <class Config, int kThreads>
__device__ void attention_flash_128(const AttentionArgs& args) {
  attention_flash<typename Config::Element, kThreads, 128>(args);
}

template <class Config, int kThreads>
__device__ void attention_flash_256(const AttentionArgs& args) {
  attention_flash<typename Config::Element, kThreads, 256>(args);
}

}  // namespace amphora
