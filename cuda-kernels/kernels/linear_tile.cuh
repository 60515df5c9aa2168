// out = x·Wᵀ + bias, plain and with deltas, for more rows than `linear_stream` takes.
//
// Grid: (parts, rows / kRows, outputs / kCols). A block walks k in steps of 64 elements, through a ring
// of stages that cp.async fills; rows of a stage are 128 bytes whose eight octets are exchanged by
// octet ^ row % 8, which is free of bank conflicts and is the layout that wgmma reads.
//
//   linear_narrow  64 × 32 outputs, 4 warps, mma.sync: few rows, bound by memory
//   linear_wide    128 × 128 outputs, 8 warps: wgmma on sm_90a, mma.sync elsewhere
//   linear_clear   zeros where parts add their sums as they come
//   linear_finish  64 × 128 outputs, 4 warps: the base product is there in f32 already, made by a library;
//                  the steps are those of the deltas alone, and without deltas it uses no shared memory of
//                  the host's
//
// Row tiles of a column tile follow each other; with args.group, those of so many neighbouring column tiles
// do, a row tile's beside each other, so that what runs together reads fewer rows and weights. With kEvenK,
// a constant of the unit, rows are whole steps and nothing is masked along k.
//
// Where there are too few blocks for the device, the steps of k are cut into parts that are a cluster,
// and one more part has the steps of the deltas; the sums meet through each other's shared memory in
// the order of the parts. With one part, a block does all. With args.sums, the parts of linear_narrow and
// linear_wide are no cluster: they are added to it as they come, and linear_finish does the rest.
//
// Deltas are further steps of the same walk. Rows are taken by slot, through the permutation, so a
// block meets few adapters; for each run of rows with one slot, each slice that meets the block's
// outputs, and each 64 of the rank, a step multiplies the shrunk rows, zero outside the run, with rows
// of B, zero outside the slice. So base and delta meet in the f32 accumulator, which is rounded once;
// what a step or a part adds to rows outside its run is zero, so their bits are those of the plain
// product, and a row's bits do not show which other adapters are there.
//
// With deltas, the kernel in front is the shrink, which lets this one begin only when x is complete; the
// wait for the shrunk rows comes before the first step that reads them.
#pragma once

#include "amphora/args.h"
#include "amphora/cluster.cuh"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"
#include "amphora/wgmma.cuh"

namespace amphora {

// Sizes of a block; the host's heuristics has the same.
template <int kRowsOf, int kColsOf, int kWarpsDownOf, int kWarpsAcrossOf, int kStagesOf, bool kGroupsOf>
struct TileForm {
  static constexpr int kRows = kRowsOf, kCols = kColsOf;
  static constexpr int kWarpsDown = kWarpsDownOf, kWarpsAcross = kWarpsAcrossOf;
  static constexpr int kStages = kStagesOf;
  static constexpr bool kGroups = kGroupsOf;  // products of warp groups (wgmma)
  static constexpr bool kSums = false;        // the base product is there
};

using NarrowForm = TileForm<64, 32, 4, 1, 4, false>;
struct FinishForm : TileForm<64, 128, 4, 1, 2, false> {
  static constexpr bool kSums = true;
};
#if AMPHORA_WGMMA
using WideForm = TileForm<128, 128, 8, 1, 6, true>;
#else
using WideForm = TileForm<128, 128, 2, 4, 4, false>;
#endif

__device__ __forceinline__ float4 as_floats(uint4 words) {
  return make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                     __uint_as_float(words.w));
}

__device__ __forceinline__ float read_shared(unsigned from) {
  float out;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(from) : "memory");
  return out;
}

template <class Element, int kThreads, class Form, bool kEvenK>
struct DenseTile {
  static constexpr int kRows = Form::kRows, kCols = Form::kCols, kStages = Form::kStages;
  static constexpr int kDepth = 64;                       // elements of k in a step
  static constexpr int kPitch = kDepth * 2;               // bytes of a row of a stage
  static constexpr int kStageBytes = (kRows + kCols) * kPitch;
  static constexpr int kBlocksDown = kRows / Form::kWarpsDown / 16;      // 16-row blocks of a warp
  static constexpr int kBlocksAcross = kCols / Form::kWarpsAcross / 8;   // 8-column blocks of a warp
  static constexpr int kLoaders = kThreads / 8;           // rows that are copied at once
  static constexpr int kCopiesX = kRows / kLoaders, kCopiesW = kCols / kLoaders;
  static constexpr int kEntries = kRows * kMaxSlices;     // runs × slices
  static constexpr int kChunks = 2 * kMaxRank / kDepth;   // steps of a shrunk row
  static_assert(Form::kWarpsDown * Form::kWarpsAcross * kWarp == kThreads, "a part for each warp");
  static_assert(kRows % kLoaders == 0 && kCols % kLoaders == 0, "whole rounds of copies");
  static_assert(kBlocksAcross % 2 == 0, "two column blocks are one load");
  static_assert(kRows <= kThreads, "a thread for each row");

  // What the steps of the deltas are made of.
  struct Shared {
    int row_of[kRows];       // row of x at each position of the block; -1 beyond the rows
    int run_start[kRows + 1];
    LoraRow entry[kEntries]; // by run and slice
    unsigned short item[kEntries * kChunks];  // entry · kChunks + chunk, in order
    int scratch[kThreads / kWarp];
  };

  const DenseArgs& args;
  Shared& shared;
  const unsigned stages;
  const int2 tile = tile_of(args.group);
  const int first_row = tile.x * kRows, first_col = tile.y * kCols;
  const int octet = threadIdx.x % 8, loader = threadIdx.x / 8;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int first_step, base_steps;      // steps of k that are this block's
  bool with_deltas;                // whether those of the deltas are
  unsigned here;                   // a bit for each row that this thread copies: x first, then the weight
  const Element* x_row[kCopiesX];
  const Element* weight;           // the first of this thread's rows
  float acc[kBlocksDown][kBlocksAcross][4];

  __device__ DenseTile(const DenseArgs& args, Shared& shared, unsigned stages)
      : args(args), shared(shared), stages(stages) {
    const int all = (args.base.k + kDepth - 1) / kDepth, part = blockIdx.x;
    first_step = part < args.parts ? all * part / args.parts : all;
    base_steps = part < args.parts ? all * (part + 1) / args.parts - first_step : 0;
    if (Form::kSums) base_steps = 0;
    with_deltas = args.lora.slice_count > 0 && part + 1 == static_cast<int>(gridDim.x);
#pragma unroll
    for (int i = 0; i < kBlocksDown; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksAcross; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] = 0.f;
      }
    }
  }

  // Row and column tile of this block.
  static __device__ __forceinline__ int2 tile_of(int group) {
    if (group <= 1) return make_int2(blockIdx.y, blockIdx.z);
    const int rows = gridDim.y, cols = gridDim.z, index = blockIdx.y + blockIdx.z * rows;
    const int first = index / (rows * group) * group, wide = min(group, cols - first);
    const int inside = index - first * rows;
    return make_int2(inside / wide, first + inside % wide);
  }

  // The block's rows. Rows that are not there are zeroed in every stage, once.
  __device__ void find_rows() {
    const int at = threadIdx.x;
    if (at < kRows) {
      const bool there = first_row + at < args.base.tokens;
      shared.row_of[at] = !there ? -1 : args.perm != nullptr ? args.perm[first_row + at] : first_row + at;
    }
    __syncthreads();
    here = 0;
#pragma unroll
    for (int i = 0; i < kCopiesX; ++i) {
      const int row = shared.row_of[loader + i * kLoaders];
      x_row[i] = static_cast<const Element*>(args.base.x) + (row < 0 ? 0 : row) * args.base.x_pitch +
                 first_step * kDepth + octet * kOctet;
      here |= (row >= 0 ? 1u : 0u) << i;
    }
    const int n = first_col + loader;
    weight = static_cast<const Element*>(args.base.weight) + static_cast<long long>(n) * args.base.k +
             first_step * kDepth + octet * kOctet;
#pragma unroll
    for (int i = 0; i < kCopiesW; ++i) here |= (n + i * kLoaders < args.base.n ? 1u : 0u) << (kCopiesX + i);
#pragma unroll
    for (int i = 0; i < kCopiesX + kCopiesW; ++i) {
      if (here >> i & 1) continue;
      for (int stage = 0; stage < kStages; ++stage) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(place(stage, i)), "r"(0) : "memory");
      }
    }
#if AMPHORA_WGMMA
    if constexpr (Form::kGroups) shared_to_async();
#endif
  }

  // The steps of the block's deltas; how many they are.
  __device__ int find_items() {
    const int at = threadIdx.x;
    int slot = -1, before = -1;
    if (at < kRows && first_row + at < args.base.tokens) {
      slot = args.slot[shared.row_of[at]];
      if (at > 0) before = args.slot[shared.row_of[at - 1]];
    }
    const bool starts = at < kRows && (at == 0 || slot != before);
    int runs = 0, items = 0;
    const int run = block_exclusive_sum<kThreads>(starts ? 1 : 0, shared.scratch, &runs);
    if (starts) {
      shared.run_start[run] = at;
#pragma unroll
      for (int slice = 0; slice < kMaxSlices; ++slice) {
        const bool meets = slot >= 0 && slice < args.lora.slice_count &&
                           slice_meets(args.lora.slices[slice], first_col, first_col + kCols);
        shared.entry[run * kMaxSlices + slice] =
            meets ? lora_row(args.lora, slot, slice, 0) : LoraRow{0, 0, 0, 0.f};
      }
    }
    if (at == 0) shared.run_start[runs] = kRows;
    __syncthreads();
    for (int round = 0; round < runs * kMaxSlices; round += kThreads) {
      const int entry = round + at;
      const int chunks = entry < runs * kMaxSlices
                             ? (2 * static_cast<int>(shared.entry[entry].rank) + kDepth - 1) / kDepth
                             : 0;
      int total = 0;
      const int front = items + block_exclusive_sum<kThreads>(chunks, shared.scratch, &total);
      for (int chunk = 0; chunk < chunks; ++chunk) shared.item[front + chunk] = entry * kChunks + chunk;
      items += total;
    }
    __syncthreads();
    return items;
  }

  // Where this thread's copy `i` (of x first, then of the weight) goes in a stage. The rounds of copies
  // are whole groups of 8 rows apart, so they exchange octets alike.
  __device__ __forceinline__ unsigned place(int stage, int i) const {
    const int row = i < kCopiesX ? loader + i * kLoaders : kRows + loader + (i - kCopiesX) * kLoaders;
    return stages + stage * kStageBytes + row * kPitch + ((octet ^ loader & 7) * 16);
  }

  // Copies of step `step` of k: those of x or those of the weight.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_rows(int step) {
    const int at = (first_step + step) * kDepth + octet * kOctet, stage = step % kStages;
    if ((args.base.aligned & kAlignedOperands) != 0) {
      const int bytes = kEvenK || at < args.base.k ? 16 : 0;  // rows are whole octets
#pragma unroll
      for (int i = kFirst; i < kEnd; ++i) {
        const Element* from = i < kCopiesX ? x_row[i < kCopiesX ? i : 0]
                                           : weight + static_cast<long long>((i - kCopiesX) * kLoaders) * args.base.k;
        if (here >> i & 1) copy_16(place(stage, i), from + step * kDepth, bytes);
      }
      return;
    }
    for (int i = kFirst; i < kEnd; ++i) {
      if ((here >> i & 1) == 0) continue;
      const long long row = i < kCopiesX ? shared.row_of[loader + i * kLoaders] * args.base.x_pitch
                                         : static_cast<long long>(first_col + loader + (i - kCopiesX) * kLoaders) * args.base.k;
      const void* of = i < kCopiesX ? args.base.x : args.base.weight;
      copy_octet(place(stage, i), static_cast<const Element*>(of) + row, at, args.base.k, false);
    }
  }

  // Operands of a step of the deltas. Blocks of the arena and shrunk rows start at multiples of 16 bytes.
  __device__ void copy_item(int step, int index) {
    const int item = shared.item[index], entry = item / kChunks, stage = step % kStages;
    const int run = entry / kMaxSlices, slice = entry % kMaxSlices;
    const LoraRow lora = shared.entry[entry];
    const int rank = static_cast<int>(lora.rank), at = item % kChunks * kDepth + octet * kOctet;
    const int begin = shared.run_start[run], end = shared.run_start[run + 1];
    const Element* b = lora_block<Element>(args.lora, lora.b);
#pragma unroll
    for (int i = 0; i < kCopiesX; ++i) {
      if ((here >> i & 1) == 0) continue;  // zeroed once
      const int position = loader + i * kLoaders;
      const bool there = position >= begin && position < end && at < 2 * rank;
      const Element* from = shrunk_at<Element>(args.lora, shared.row_of[position], slice);
      copy_16(place(stage, i), from + (there ? at : 0), there ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kCopiesW; ++i) {
      if ((here >> (kCopiesX + i) & 1) == 0) continue;
      const int element = slice_element(args.lora.slices[slice], first_col + loader + i * kLoaders);
      const bool there = element >= 0 && at < 2 * rank;
      // Both halves of a shrunk row meet the same B.
      const long long from = there ? static_cast<long long>(element) * rank + (at < rank ? at : at - rank) : 0;
      copy_16(place(stage, kCopiesX + i), b + from, there ? 16 : 0);
    }
  }

  __device__ __forceinline__ void copy_step(int step, int steps) {
    if (step < base_steps) {
      copy_rows<0, kCopiesX + kCopiesW>(step);
    } else if (step < steps) {
      if (step == base_steps) wait_for_front();  // the shrunk rows
      copy_item(step, step - base_steps);
    }
    commit_copies();
  }

  // acc += the product of a stage, by warps.
  __device__ __forceinline__ void multiply(int step) {
    const unsigned stage = stages + step % kStages * kStageBytes;
    const int top = warp / Form::kWarpsAcross * (kBlocksDown * 16);
    const int left = warp % Form::kWarpsAcross * (kBlocksAcross * 8);
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      unsigned a[kBlocksDown][4];
#pragma unroll
      for (int i = 0; i < kBlocksDown; ++i) {
        const int row = top + i * 16 + lane % 16, column = part * 2 + lane / 16;
        load_matrices(a[i], stage + row * kPitch + ((column ^ row & 7) * 16));
      }
#pragma unroll
      for (int j = 0; j < kBlocksAcross; j += 2) {
        unsigned b[4];
        const int row = left + j * 8 + lane / 16 * 8 + lane % 8, column = part * 2 + lane / 8 % 2;
        load_matrices(b, stage + kRows * kPitch + row * kPitch + ((column ^ row & 7) * 16));
#pragma unroll
        for (int i = 0; i < kBlocksDown; ++i) {
          mma_k16<Element>(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
          mma_k16<Element>(acc[i][j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
        }
      }
    }
  }

  __device__ void run() {
    if constexpr (Form::kSums) {
      if (args.lora.slice_count == 0) {
        wait_for_front();
        let_next_begin();
        finish<false>();
        return;
      }
    }
    // A product of warp groups may still read the stage before the last, so it is filled one step later.
    constexpr int kAhead = Form::kGroups ? kStages - 2 : kStages - 1;
    find_rows();
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (step < base_steps) copy_rows<kCopiesX, kCopiesX + kCopiesW>(step);
    }
    // With deltas, the kernel in front has seen x complete.
    if (args.lora.slice_count == 0) wait_for_front();
    let_next_begin();
    const int early = min(kAhead, base_steps);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (step >= early) continue;
      copy_rows<0, kCopiesX>(step);
      commit_copies();
    }
    const int steps = base_steps + (with_deltas ? find_items() : 0);
    for (int step = early; step < kAhead; ++step) copy_step(step, steps);
    for (int step = 0; step < steps; ++step) {
      wait_copies<kAhead - 1>();
#if AMPHORA_WGMMA
      if constexpr (Form::kGroups) {
        shared_to_async();
        __syncthreads();
        const unsigned stage = stages + step % kStages * kStageBytes;
        group_begin();
#pragma unroll
        for (int part = 0; part < kDepth / 16; ++part) {
          const unsigned a = stage + warp / 4 * (64 * kPitch) + part * 32;
          const unsigned b = stage + kRows * kPitch + part * 32;
          group_mma<Element>(acc[0], group_operand(a), group_operand(b));
        }
        group_commit();
        copy_step(step + kAhead, steps);
        group_wait<1>();
        continue;
      }
#endif
      __syncthreads();
      copy_step(step + kAhead, steps);
      multiply(step);
    }
#if AMPHORA_WGMMA
    if constexpr (Form::kGroups) group_wait<0>();
#endif
    wait_copies<0>();
    wait_for_front();
    if constexpr (Form::kSums) {
      leave_deltas();
      finish<true>();
    } else if (args.sums != nullptr) {
      add_sums();
    } else if (gridDim.x == 1) {
      store();
    } else {
      meet();
    }
  }

  // Adds this part's sums to those of all parts, as they come.
  __device__ void add_sums() const {
    const int top = warp / Form::kWarpsAcross * (kBlocksDown * 16) + lane / 4;
    const int left = warp % Form::kWarpsAcross * (kBlocksAcross * 8) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlocksDown; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = shared.row_of[top + i * 16 + half * 8];
        if (row < 0) continue;
        float* to = const_cast<float*>(args.sums) + static_cast<long long>(row) * args.base.n + first_col + left;
#pragma unroll
        for (int j = 0; j < kBlocksAcross; ++j) {
          // What is finished apart has even numbers of outputs.
          if (first_col + left + j * 8 >= args.base.n) continue;
          add_relaxed(to + j * 8, acc[i][j][half * 2]);
          add_relaxed(to + j * 8 + 1, acc[i][j][half * 2 + 1]);
        }
      }
    }
  }

  // The sums of all parts; a block writes its share of the outputs.
  __device__ void meet() {
    __syncthreads();  // the stages have been read: their memory takes the sums
    const int top = warp / Form::kWarpsAcross * (kBlocksDown * 16) + lane / 4;
    const int left = warp % Form::kWarpsAcross * (kBlocksAcross * 8) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlocksDown; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksAcross; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned to = stages + ((top + i * 16 + half * 8) * kCols + left + j * 8) * 4;
          asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(acc[i][j][half * 2]),
                       "f"(acc[i][j][half * 2 + 1])
                       : "memory");
        }
      }
    }
    cluster_barrier();
    const int parts = gridDim.x;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kRows * kCols; i += parts * kThreads) {
      const int row = shared.row_of[i / kCols], n = first_col + i % kCols;
      if (row < 0 || n >= args.base.n) continue;
      float value = 0.f;
      for (int part = 0; part < parts; ++part) value += read_block(stages + i * 4, part);
      store_output<Element>(args.base, row, n, value);
    }
    cluster_barrier();  // until all have read, no block's memory may go
  }

  // The block's deltas in f32, in shared memory, for whichever thread finishes an output.
  static constexpr int kDeltaPitch = kCols + 4;
  __device__ void leave_deltas() {
    static_assert(!Form::kSums || kRows * kDeltaPitch * 4 <= kStages * kStageBytes, "the deltas fit the stages");
    __syncthreads();  // the stages have been read
    const int top = warp / Form::kWarpsAcross * (kBlocksDown * 16) + lane / 4;
    const int left = warp % Form::kWarpsAcross * (kBlocksAcross * 8) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlocksDown; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksAcross; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned to = stages + ((top + i * 16 + half * 8) * kDeltaPitch + left + j * 8) * 4;
          asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(acc[i][j][half * 2]),
                       "f"(acc[i][j][half * 2 + 1])
                       : "memory");
        }
      }
    }
    __syncthreads();
  }

  template <bool kDeltas>
  __device__ __forceinline__ int finished_row(int at) const {
    if (kDeltas) return shared.row_of[at];
    return first_row + at < args.base.tokens ? first_row + at : -1;
  }

  // The block's outputs: the sums that were made elsewhere, the deltas, the bias. Without deltas zero stands for
  // them, so that a sum has the same bits. Eight neighbours are one load and one store where rows allow it.
  template <bool kDeltas>
  __device__ void finish() {
    constexpr int kOctets = kCols / kOctet, kRounds = kRows * kOctets / kThreads;
    static_assert(kRows * kOctets % kThreads == 0, "whole rounds");
    if ((args.base.aligned & kAlignedRows) == 0) {
      for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
        const int row = finished_row<kDeltas>(i / kCols), n = first_col + i % kCols;
        if (row < 0 || n >= args.base.n) continue;
        float delta = 0.f;
        if (kDeltas) delta = read_shared(stages + (i / kCols * kDeltaPitch + i % kCols) * 4);
        const float sum = __ldcg(args.sums + static_cast<long long>(row) * args.base.n + n);
        store_output<Element>(args.base, row, n, sum + delta);
      }
      return;
    }
    const int part = threadIdx.x % kOctets, n = first_col + part * kOctet;
    if (n >= args.base.n) return;  // rows are whole octets
    float4 sums[kRounds][2];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int row = finished_row<kDeltas>(round * (kThreads / kOctets) + threadIdx.x / kOctets);
      const float* from = args.sums + static_cast<long long>(max(row, 0)) * args.base.n + n;
      sums[round][0] = __ldcg(reinterpret_cast<const float4*>(from));
      sums[round][1] = __ldcg(reinterpret_cast<const float4*>(from + 4));
    }
    float bias[kOctet] = {};
    if (args.base.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) bias[i] = args.base.bias[n + i];
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int at = round * (kThreads / kOctets) + threadIdx.x / kOctets, row = finished_row<kDeltas>(at);
      if (row < 0) continue;
      float4 deltas[2] = {make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
      if (kDeltas) {
        const unsigned from = stages + (at * kDeltaPitch + part * kOctet) * 4;
        deltas[0] = as_floats(load_shared(from));
        deltas[1] = as_floats(load_shared(from + 16));
      }
      unsigned words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 sum = sums[round][half], delta = deltas[half];
        const float* more = bias + half * 4;
        words[half * 2] = pack_pair<Element>(sum.x + delta.x + more[0], sum.y + delta.y + more[1]);
        words[half * 2 + 1] = pack_pair<Element>(sum.z + delta.z + more[2], sum.w + delta.w + more[3]);
      }
      Element* to = static_cast<Element*>(args.base.out) + row * args.base.out_pitch + n;
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ void store() {
    const int top = warp / Form::kWarpsAcross * (kBlocksDown * 16) + lane / 4;
    const int left = warp % Form::kWarpsAcross * (kBlocksAcross * 8) + lane % 4 * 2;
    const bool whole = (args.base.aligned & kAlignedRows) != 0 && first_col + kCols <= args.base.n;
    // Rows of outputs leave through shared memory, so that each is written in whole lines.
    constexpr int kOutPitch = kCols * 2 + 16;
    static_assert(kRows * kOutPitch <= kStages * kStageBytes, "the outputs fit the stages");
    if (whole) __syncthreads();  // the stages have been read
#pragma unroll
    for (int j = 0; j < kBlocksAcross; ++j) {
      const int n = first_col + left + j * 8;
      if (n >= args.base.n) continue;
      float2 bias = make_float2(0.f, 0.f);
      if (whole && args.base.bias != nullptr) bias = make_float2(args.base.bias[n], args.base.bias[n + 1]);
#pragma unroll
      for (int i = 0; i < kBlocksDown; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = top + i * 16 + half * 8, row = shared.row_of[at];
          if (row < 0) continue;
          const float2 value = make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
          if (whole) {
            const unsigned to = stages + at * kOutPitch + (left + j * 8) * 2;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pack_pair<Element>(value.x + bias.x, value.y + bias.y))
                         : "memory");
          } else {
            store_pair<Element>(args.base, row, n, value.x, value.y);
          }
        }
      }
    }
    if (!whole) return;
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * (kCols / kOctet); i += kThreads) {
      const int at = i / (kCols / kOctet), part = i % (kCols / kOctet), row = shared.row_of[at];
      if (row < 0) continue;
      Element* to = static_cast<Element*>(args.base.out) + row * args.base.out_pitch + first_col + part * kOctet;
      *reinterpret_cast<uint4*>(to) = load_shared(stages + at * kOutPitch + part * 16);
    }
  }
};

template <class Config, int kThreads, class Form>
__device__ __forceinline__ void dense_tile(const DenseArgs& args) {
  using T = DenseTile<typename Config::Element, kThreads, Form, Config::kEvenK != 0>;
  extern __shared__ __align__(1024) unsigned char dynamic_stages[];
  __shared__ typename T::Shared shared;
  // The layout of wgmma wants stages at multiples of 1024 bytes; the host adds room for it.
  const unsigned stages = (shared_address(dynamic_stages) + 1023) / 1024 * 1024;
  T(args, shared, stages).run();
}

template <class Config, int kThreads>
__device__ void linear_narrow(const DenseArgs& args) {
  dense_tile<Config, kThreads, NarrowForm>(args);
}

template <class Config, int kThreads>
__device__ void linear_wide(const DenseArgs& args) {
  dense_tile<Config, kThreads, WideForm>(args);
}

// Zeros in args.sums, [tokens, n] of whole 16 bytes. Grid: (blocks that run at once).
template <class Config, int kThreads>
__device__ void linear_clear(const DenseArgs& args) {
  wait_for_front();
  let_next_begin();
  const long long fours = static_cast<long long>(args.base.tokens) * args.base.n / 4;
  float4* sums = reinterpret_cast<float4*>(const_cast<float*>(args.sums));
  for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; i < fours; i += gridDim.x * kThreads) {
    sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

template <class Config, int kThreads>
__device__ void linear_finish(const DenseArgs& args) {
  dense_tile<Config, kThreads, FinishForm>(args);
}

}  // namespace amphora
