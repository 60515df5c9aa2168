// out = x·Wᵀ + bias, plain and with deltas, for at most 16 rows: the weight is read once, as fast as
// memory gives it, and everything else stays on the chip.
//
// Grid: as many blocks as run at once, each taking every gridDim.x-th tile of 8 outputs. The warps of a
// block share k in fixed parts; a warp streams its part of the tile's 8 weight rows through a ring of
// its own (lines of 64 elements, cp.async, no barrier), multiplies it with its part of x, which lies in
// shared memory, and leaves a partial sum. Partial sums meet in the order of the warps: an output's bits
// depend on its rows of x and W alone. Rows of x are the 16-row operand, outputs the 8-column one.
//
// Deltas are added for a few tiles at a time, so that what they wait for is waited for once: warp w
// multiplies the shrunk rows of every 8th adapter present, zero in rows of others, with the tiles' rows
// of B, the first of which are on their way while the last tile is multiplied. They are summed apart
// from the base product and added to it in f32: a row without an adapter keeps the base's bits, and an
// adapter's row does not show who else is there.
//
// With deltas, the kernel in front is the shrink, which lets this one begin only when x is complete; the
// wait for the shrunk rows comes after the first tiles. Shared memory, in order: the rings, base sums,
// sums of deltas, staged shrunk rows, x; sizes as in the host's heuristics.
#pragma once

#include "amphora/args.h"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

template <class Element, int kThreads>
struct Stream {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kRows = 16;             // most rows of x
  static constexpr int kCols = 8;              // outputs of a tile
  static constexpr int kLine = 64;             // elements of k in a stage
  static constexpr int kLineBytes = kLine * 2;
  static constexpr int kStages = 8;
  static constexpr int kEarly = 3;             // stages that are on their way before x
  static constexpr int kStageBytes = kCols * kLineBytes;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kOutputs = kRows * kCols;
  static constexpr int kGroup = 3;             // tiles whose deltas are added at once
  static constexpr int kSums = kGroup * kWarps * kOutputs;
  static constexpr int kStagedBytes = 8192;    // shrunk rows, if they are no more

  // The adapters present, in the order of their first rows.
  struct Shared {
    int count;
    int widest;                       // the largest rank
    int slots[kRows];
    unsigned rows[kRows];             // a bit for each row
    LoraRow entry[kRows][kMaxSlices];
  };

  const DenseArgs& args;
  Shared& shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int tiles, begin, end;  // tiles of the product; lines of this warp
  const unsigned ring, staged, x_shared, x_pitch;
  int next_tile = blockIdx.x, next_line, next_stage = 0;
  int stage = 0;
  int slot_of = -1;             // of row `lane`
  bool in_shared = false;       // whether the shrunk rows are staged

  __device__ Stream(const DenseArgs& args, Shared& shared, unsigned dynamic, int lines)
      : args(args),
        shared(shared),
        tiles((args.base.n + kCols - 1) / kCols),
        begin(lines * warp / kWarps),
        end(lines * (warp + 1) / kWarps),
        ring(dynamic + warp * kStages * kStageBytes),
        staged(dynamic + kRingBytes + 2 * kSums * 4),
        x_shared(staged + kStagedBytes),
        // Half a line more, so that neighbouring rows lie in other banks.
        x_pitch(lines * kLineBytes + 64),
        next_line(begin) {}

  // Copies the next line of this warp's stream, if there is one.
  __device__ __forceinline__ void issue() {
    if (begin < end && next_tile < tiles) {
      const Element* weight = static_cast<const Element*>(args.base.weight);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = half * 4 + lane / 8, octet = lane % 8;
        const int n = next_tile * kCols + r, at = next_line * kLine + octet * kOctet;
        const bool there = n < args.base.n && at < args.base.k;
        const long long from = there ? static_cast<long long>(n) * args.base.k + at : 0;
        // Odd rows keep the halves of a line swapped: reads of two rows then touch all banks.
        const unsigned to = ring + next_stage * kStageBytes + r * kLineBytes + ((octet ^ (r & 1) << 2) * 16);
        copy_16(to, weight + from, there ? 16 : 0);
      }
      if (++next_line == end) {
        next_line = begin;
        next_tile += gridDim.x;
      }
    }
    next_stage = (next_stage + 1) % kStages;
    commit_copies();
  }

  // This warp's part of all rows of x, zeros behind their end.
  __device__ void copy_x() {
    const Element* x = static_cast<const Element*>(args.base.x);
    const int octets = (end - begin) * (kLine / kOctet);
    for (int row = 0; row < args.base.tokens; ++row) {
      for (int i = lane; i < octets; i += kWarp) {
        const int octet = begin * (kLine / kOctet) + i;
        copy_octet(x_shared + row * x_pitch + octet * 16, x + row * args.base.x_pitch, octet * kOctet, args.base.k,
                   true);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ uint4 x_at(int row, int line, int half) const {
    if (row >= args.base.tokens) return make_uint4(0, 0, 0, 0);
    return load_shared(x_shared + row * x_pitch + line * kLineBytes + half * 64 + quad * 16);
  }

  // One tile: waits for each line, and issues the one that takes the place of the last.
  __device__ __forceinline__ void multiply(float (&acc)[4]) {
    for (int line = begin; line < end; ++line) {
      wait_copies<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and the stage before this one has been read
      issue();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned octet = (half * 4 + quad) ^ (group & 1) << 2;
        const uint4 w = load_shared(ring + stage * kStageBytes + group * kLineBytes + octet * 16);
        const uint4 low = x_at(group, line, half), high = x_at(group + 8, line, half);
        mma_k16<Element>(acc, low.x, high.x, low.y, high.y, w.x, w.y);
        mma_k16<Element>(acc, low.z, high.z, low.w, high.w, w.z, w.w);
      }
      stage = (stage + 1) % kStages;
    }
  }

  // Finds the adapters present, each once, at its first row. The plan and the table alone are read.
  __device__ void arrange() {
    if (warp == 0) {
      int count = 0;
      for (int row = 0; row < args.base.tokens; ++row) {
        const int slot = __shfl_sync(kFullWarp, slot_of, row);
        const unsigned same = __ballot_sync(kFullWarp, slot_of == slot);
        if (slot < 0 || __ffs(same) - 1 != row) continue;
        if (lane == 0) {
          shared.slots[count] = slot;
          shared.rows[count] = same;
        }
        ++count;
      }
      if (lane == 0) {
        shared.count = count;
        shared.widest = 0;
      }
    }
    __syncthreads();
    const int item = threadIdx.x / kMaxSlices, slice = threadIdx.x % kMaxSlices;
    if (item < shared.count) {
      const bool there = slice < args.lora.slice_count;
      const LoraRow lora = there ? lora_row(args.lora, shared.slots[item], slice, 0) : LoraRow{0, 0, 0, 0.f};
      shared.entry[item][slice] = lora;
      atomicMax(&shared.widest, static_cast<int>(lora.rank));
    }
    __syncthreads();
    in_shared = args.base.tokens * args.lora.slice_count * shared.widest * 4 <= kStagedBytes;
  }

  // Where element `at` of a staged shrunk row lies.
  __device__ __forceinline__ unsigned staged_at(int row, int slice, int at) const {
    return staged + ((row * args.lora.slice_count + slice) * 2 * shared.widest + at) * 2;
  }

  // All shrunk rows into shared memory, if they fit.
  __device__ void stage_shrunk() {
    if (in_shared) {
      const int octets = 2 * shared.widest / kOctet, slices = args.lora.slice_count;
      for (int i = threadIdx.x; i < args.base.tokens * slices * octets; i += kThreads) {
        const int octet = i % octets, slice = i / octets % slices, row = i / octets / slices;
        // Beyond a row's own rank lies what nobody reads.
        const uint4 value = load_fresh(shrunk_at<Element>(args.lora, row, slice) + octet * kOctet);
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(staged_at(row, slice, octet * kOctet)),
                     "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                     : "memory");
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint4 shrunk_octet(int row, int slice, int at) const {
    if (in_shared) return load_shared(staged_at(row, slice, at));
    return load_fresh(shrunk_at<Element>(args.lora, row, slice) + at);
  }

  // The first slice that a tile meets; -1: none.
  __device__ __forceinline__ int first_slice(int tile) const {
    for (int slice = 0; slice < args.lora.slice_count; ++slice) {
      if (slice_meets(args.lora.slices[slice], tile * kCols, tile * kCols + kCols)) return slice;
    }
    return -1;
  }

  // This lane's octet of B for one step of a shrunk row of twice the rank.
  __device__ __forceinline__ uint4 factor_at(const LoraRow& lora, int element, int at) const {
    const int rank = static_cast<int>(lora.rank);
    if (element < 0 || at >= 2 * rank) return make_uint4(0, 0, 0, 0);
    const Element* b = lora_block<Element>(args.lora, lora.b) + static_cast<long long>(element) * rank;
    return load_fresh(b + (at < rank ? at : at - rank));
  }

  // What a tile's deltas of this warp's first adapter begin with.
  __device__ __forceinline__ uint4 first_factor(int tile) const {
    const int slice = tile < tiles && warp < shared.count ? first_slice(tile) : -1;
    if (slice < 0) return make_uint4(0, 0, 0, 0);
    const int n = tile * kCols + group;
    const int element = n < args.base.n ? slice_element(args.lora.slices[slice], n) : -1;
    return factor_at(shared.entry[warp][slice], element, quad * kOctet);
  }

  // This warp's share of a tile's deltas; `first` is its `first_factor`.
  __device__ __forceinline__ void expand(float (&delta)[4], int tile, const uint4& first) {
    const int n = tile * kCols + group, first_met = first_slice(tile);
    for (int slice = 0; slice < args.lora.slice_count; ++slice) {
      if (!slice_meets(args.lora.slices[slice], tile * kCols, tile * kCols + kCols)) continue;
      const int element = n < args.base.n ? slice_element(args.lora.slices[slice], n) : -1;
      for (int item = warp; item < shared.count; item += kWarps) {
        const LoraRow lora = shared.entry[item][slice];
        const int rank = static_cast<int>(lora.rank);
        const unsigned rows = shared.rows[item];
        for (int step = 0; step < 2 * rank; step += 4 * kOctet) {
          const int at = step + quad * kOctet;
          // With a rank of one step the second half meets what the first did.
          const bool known = item == warp && slice == first_met && (step == 0 || rank == 4 * kOctet);
          const uint4 factor = known ? first : factor_at(lora, element, at);
          uint4 low = make_uint4(0, 0, 0, 0), high = low;
          if (at < 2 * rank) {
            if (rows >> group & 1) low = shrunk_octet(group, slice, at);
            if (rows >> (group + 8) & 1) high = shrunk_octet(group + 8, slice, at);
          }
          mma_k16<Element>(delta, low.x, high.x, low.y, high.y, factor.x, factor.y);
          mma_k16<Element>(delta, low.z, high.z, low.w, high.w, factor.z, factor.w);
        }
      }
    }
  }

  // Leaves this warp's sums of tile `of` of the group.
  __device__ __forceinline__ void put(float* sums, int of, const float (&acc)[4]) const {
    float* own = sums + (of * kWarps + warp) * kOutputs + group * kCols + quad * 2;
    own[0] = acc[0];
    own[1] = acc[1];
    own[8 * kCols] = acc[2];
    own[8 * kCols + 1] = acc[3];
  }

  __device__ __forceinline__ float sum_of(const float* sums, int of, int output) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[(of * kWarps + w) * kOutputs + output];
    return sum;
  }

  __device__ void run(float* base_sums, float* delta_sums) {
    const bool deltas = args.lora.slice_count > 0;
#pragma unroll
    for (int i = 0; i < kEarly; ++i) issue();
    if (!deltas) wait_for_front();
    let_next_begin();
    if (deltas && lane < args.base.tokens) slot_of = args.slot[lane];
    copy_x();
#pragma unroll
    for (int i = kEarly; i < kStages - 1; ++i) issue();
    wait_copies<kStages - 1 - kEarly>();  // x, and the stages in front of it
    __syncwarp();

    bool waited = !deltas, arranged = false;
    for (int first = blockIdx.x; first < tiles; first += kGroup * gridDim.x) {
      uint4 factor[kGroup];
#pragma unroll
      for (int of = 0; of < kGroup; ++of) {
        const int tile = first + of * gridDim.x;
        if (tile >= tiles) continue;
        const bool last = of == kGroup - 1 || tile + gridDim.x >= tiles;
        if (deltas && last && arranged) {
#pragma unroll
          for (int j = 0; j < kGroup; ++j) factor[j] = first_factor(first + j * gridDim.x);
        }
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        multiply(acc);
        put(base_sums, of, acc);
        if (deltas && !arranged) {
          // Behind the first tile: in front of it, the stream would stand still.
          arrange();
          arranged = true;
          if (last) {
#pragma unroll
            for (int j = 0; j < kGroup; ++j) factor[j] = first_factor(first + j * gridDim.x);
          }
        }
      }
      if (deltas) {
        if (!waited) {
          wait_for_front();
          stage_shrunk();
          waited = true;
        }
#pragma unroll
        for (int of = 0; of < kGroup; ++of) {
          const int tile = first + of * gridDim.x;
          if (tile >= tiles) continue;
          float delta[4] = {0.f, 0.f, 0.f, 0.f};
          expand(delta, tile, factor[of]);
          put(delta_sums, of, delta);
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kGroup * kOutputs; i += kThreads) {
        const int of = i / kOutputs, output = i % kOutputs;
        const int tile = first + of * gridDim.x, row = output / kCols, n = tile * kCols + output % kCols;
        if (tile >= tiles || row >= args.base.tokens || n >= args.base.n) continue;
        float value = sum_of(base_sums, of, output);
        if (deltas) value += sum_of(delta_sums, of, output);
        store_output<Element>(args.base, row, n, value);
      }
      __syncthreads();  // before the sums are written again
    }
  }
};

template <class Config, int kThreads>
__device__ void linear_stream(const DenseArgs& args) {
  using Element = typename Config::Element;
  using S = Stream<Element, kThreads>;
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ typename S::Shared shared;
  float* base_sums = reinterpret_cast<float*>(dynamic + S::kRingBytes);
  const int lines = (args.base.k + S::kLine - 1) / S::kLine;
  S(args, shared, shared_address(dynamic), lines).run(base_sums, base_sums + S::kSums);
}

}  // namespace amphora
