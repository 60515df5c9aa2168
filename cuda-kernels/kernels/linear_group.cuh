// out = x·Wᵀ + bias, plain and with deltas, for the many rows of a prompt on Hopper: one launch, whose sums are
// rounded where they are made.
//
// Grid: clusters of two blocks, at most as many as run at once; they stay and take pairs of tiles in turn, row
// tiles first, so that what runs together reads few rows of W. The blocks of a cluster have the same rows of x
// and neighbouring outputs: each brings half of the rows to both. A block is a warpgroup that brings and kGroups
// that multiply 64 rows each with all outputs of the tile, 64 elements of k in a stage of the ring.
//
// Deltas are further stages, behind the last of k: for each adapter among the tile's rows, in the order of its first
// row, each slice that meets the cluster's outputs, and each 32 of the rank, the shrunk rows, zero in rows of
// others, times rows of B, zero outside the slice. So base and delta meet in the f32 accumulator, and what a stage
// adds to rows that are not its own is zero: their bits are those of the plain product, and a row's bits do not
// show which other adapters are there.
//
// A stage: kRows rows of x, then kCols of W, each of 128 bytes whose eight octets are exchanged by octet ^ row % 8.
// Of deltas, a row of x is 32 shrunk numbers and then what rounding took of them, and both meet the same 32 of B,
// which are the first half of a row of W.
//
// With deltas, the kernel in front is the shrink, which lets this one begin only when x is complete; the
// wait for the shrunk rows comes before the first stage that holds them.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/cluster.cuh"
#include "amphora/dense.cuh"
#include "amphora/group_product.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

// Sizes of a block; the host's heuristics has the same. Registers: of a thread that brings, and of one that
// multiplies.
template <int kBlocksOf, int kColsOf, int kStagesOf, int kBringsOf, int kMultipliesOf>
struct GroupForm {
  static constexpr int kGroups = 2, kBlocks = kBlocksOf, kCols = kColsOf, kStages = kStagesOf;
  static constexpr int kRows = 64 * kGroups * kBlocks;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kBringRegisters = kBringsOf, kMultiplyRegisters = kMultipliesOf;
  static_assert(128 * (kBringRegisters + kGroups * kMultiplyRegisters) <= 65536, "a processor's registers");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, class Form>
struct DenseGroup {
  static constexpr int kRows = Form::kRows, kCols = Form::kCols, kStages = Form::kStages, kGroups = Form::kGroups;
  static constexpr int kDepth = 64, kPitch = kDepth * 2;
  static constexpr int kLeftBytes = kRows * kPitch, kRightBytes = kCols * kPitch;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;
  static constexpr int kPair = 2;                       // blocks of a cluster
  static constexpr int kBlocks = Form::kBlocks;         // 64 rows each, of a warpgroup
  static constexpr int kChunk = 32;                     // of the rank, in a stage of deltas
  static constexpr int kHelpers = 96;                   // threads that bring deltas: all that bring but a warp
  static constexpr int kKept = 16;                      // adapters whose table is at hand
  static constexpr int kListed = 1, kBegun = 2, kBiased = 3;  // named barriers; the last is one of each warpgroup
  static constexpr int kAcc = kCols / 2;
  static_assert(kRows % 16 == 0 && kLeftBytes / 2 % 1024 == 0, "halves of x are whole groups of rows");
  static_assert(kCols % 8 == 0 && kCols <= 256, "columns of a warpgroup product");

  struct Shared {
    Barrier full[kStages], empty[kStages];
    float bias[kGroups][kCols];
    int stages_of_deltas[2];  // of a tile, by its number
    int count;                // adapters among the tile's rows
    int slot[kRows];          // of each row; -1: none
    int present[kRows];       // the slots, in the order of their first rows
    LoraRow entry[kKept * kMaxSlices];  // of the first of them
  };

  const DenseClusterArgs& map;
  const DenseArgs& args;
  Shared& shared;
  const unsigned ring;
  const int rank = blockIdx.x % kPair, cluster = blockIdx.x / kPair, clusters = gridDim.x / kPair;
  const int steps, row_tiles, pairs;
  int first_row = 0, first_col = 0, pair_col = 0;  // of a tile; the first output of the cluster's
  int stage = 0;
  unsigned parity = 0;

  __device__ DenseGroup(const DenseClusterArgs& map, Shared& shared, unsigned ring)
      : map(map),
        args(map.of),
        shared(shared),
        ring(ring),
        steps((args.base.k + kDepth - 1) / kDepth),
        row_tiles((args.base.tokens + kRows - 1) / kRows),
        pairs(row_tiles * ((args.base.n + kPair * kCols - 1) / (kPair * kCols))) {}

  __device__ __forceinline__ void go_to(int pair) {
    first_row = pair % row_tiles * kRows;
    pair_col = pair / row_tiles * (kPair * kCols);
    first_col = pair_col + rank * kCols;
  }
  __device__ __forceinline__ bool with_deltas() const { return args.lora.slice_count > 0; }
  // At a stage's barrier when it is full: the helpers, and one for the rest.
  __device__ __forceinline__ unsigned arrivals() const { return with_deltas() ? kHelpers + 1 : 1; }
  __device__ __forceinline__ unsigned left() const { return ring + stage * kStageBytes; }
  __device__ __forceinline__ unsigned right() const { return left() + kLeftBytes; }
  __device__ __forceinline__ void next_stage() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    const int to = stage + count;
    parity ^= to / kStages & 1;
    stage = to % kStages;
  }
  // A value that is the same in every lane, so that the compiler knows.
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullWarp, value, 0); }

  // ---- The warp that brings x and W.

  __device__ __forceinline__ void bring_weights(int step) const {
    barrier_expect(&shared.full[stage], kStageBytes, arrivals());
    load_box(right(), &map.weight, &shared.full[stage], step * kDepth, first_col);
  }
  __device__ __forceinline__ void bring_rows(int step) const {
    constexpr int kHalf = kRows / kPair;
    load_box_shared<kPair>(left() + rank * (kHalf * kPitch), &map.x, &shared.full[stage], step * kDepth,
                             first_row + rank * kHalf);
  }

  // One lane; the others wait where all of the warpgroup do.
  __device__ __forceinline__ void bring() {
    const bool leads = threadIdx.x % kWarp == 0;
    int number = 0;
    if (with_deltas()) {
      // The shrink has seen x complete.
    } else {
      go_to(cluster);
      const int early = cluster < pairs ? min(kStages, steps) : 0;
      for (int step = 0; step < early && leads; ++step) {
        bring_weights(step);
        next_stage();
      }
      stage = 0;
      parity = 0;
      wait_for_front();
    }
    for (int pair = cluster; pair < pairs; pair += clusters, ++number) {
      go_to(pair);
      for (int step = 0; step < steps; ++step) {
        if (with_deltas() && step == steps - 1) {
          __syncwarp();
          named_barrier(kListed, 128);
        }
        if (leads) {
          barrier_wait(&shared.empty[stage], parity ^ 1);
          const bool early = !with_deltas() && number == 0 && step < kStages;
          if (!early) bring_weights(step);
          bring_rows(step);
        }
        next_stage();
      }
      if (!with_deltas()) continue;
      const int more = shared.stages_of_deltas[number & 1];
      for (int i = 0; i < more; ++i) {
        if (leads) {
          barrier_wait(&shared.empty[stage], parity ^ 1);
          barrier_arrive(&shared.full[stage]);
        }
        next_stage();
      }
    }
  }

  // ---- Warps that bring deltas.

  __device__ __forceinline__ bool meets(int slice) const {
    return slice_meets(args.lora.slices[slice], pair_col, pair_col + kPair * kCols);
  }

  // The adapters among the tile's rows, by one warp, and the stages that they take.
  __device__ void list(int number) {
    const int lane = threadIdx.x % kWarp;
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < kRows; base += kWarp) {
      const int row = first_row + base + lane;
      const int own = row < args.base.tokens ? args.slot[row] : -1;
      shared.slot[base + lane] = own;
      const unsigned same = __match_any_sync(kFullWarp, own);
      bool first = own >= 0 && __ffs(same) - 1 == lane;
      for (int i = 0; i < count; ++i) first = first && shared.present[i] != own;
      const unsigned firsts = __ballot_sync(kFullWarp, first);
      if (first) shared.present[count + __popc(firsts & ((1u << lane) - 1))] = own;
      count += __popc(firsts);
      __syncwarp();
    }
    int found = 0;
    for (int i = lane; i < count; i += kWarp) {
      for (int slice = 0; slice < args.lora.slice_count; ++slice) {
        const LoraRow lora = lora_row(args.lora, shared.present[i], slice, 0);
        if (i < kKept) shared.entry[i * kMaxSlices + slice] = lora;
        if (meets(slice)) found += chunks(lora);
      }
    }
    found = warp_reduce(found, Sum{});
    if (lane == 0) {
      shared.count = count;
      shared.stages_of_deltas[number & 1] = found;
    }
  }
  static __device__ __forceinline__ int chunks(const LoraRow& lora) {
    return (static_cast<int>(lora.rank) + kChunk - 1) / kChunk;
  }

  __device__ __forceinline__ unsigned place(unsigned from, int row, int piece) const {
    return from + row * kPitch + ((piece ^ (row & 7)) << 4);
  }

  // One stage: 32 of a rank. A thread has the same piece of all its rows, which are so many apart.
  __device__ __forceinline__ void bring_chunk(int slot, int slice, const LoraRow& lora, int first, int thread) const {
    constexpr int kLeftApart = kHelpers / 8, kRightApart = kHelpers / 4;
    static_assert(kLeftApart % 4 == 0 && kRightApart % 8 == 0, "octets are exchanged alike");
    const int rank_of = static_cast<int>(lora.rank);
    {
      const int piece = thread % 8, at = first + piece % 4 * kOctet;
      const Element* rows = reinterpret_cast<const Element*>(args.lora.shrunk);
      long long from = (static_cast<long long>(first_row + thread / 8) * kMaxSlices + slice) * (2 * kMaxRank) + at +
                       piece / 4 * rank_of;
#pragma unroll 4
      for (int j = 0; j < (kRows + kLeftApart - 1) / kLeftApart; ++j) {
        const int row = thread / 8 + j * kLeftApart;
        if (row < kRows) {
          const bool there = at < rank_of && shared.slot[row] == slot;
          copy16(place(left(), row, piece), rows + (there ? from : 0), there);
        }
        from += kLeftApart * kMaxSlices * (2 * kMaxRank);
      }
    }
    const SliceArgs& outputs = args.lora.slices[slice];
    const Element* b = lora_block<Element>(args.lora, lora.b);
    const int piece = thread % 4, at = first + piece * kOctet, n = first_col + thread / 4;
    const bool run = outputs.stride == 1;
#pragma unroll 4
    for (int j = 0; j < (kCols + kRightApart - 1) / kRightApart; ++j) {
      const int row = thread / 4 + j * kRightApart, of = n + j * kRightApart;
      if (row >= kCols) continue;
      const int element = run ? of - outputs.offset : slice_element(outputs, of);
      const bool there = static_cast<unsigned>(element) < static_cast<unsigned>(outputs.len) && of < args.base.n && at < rank_of;
      copy16(place(right(), row, piece), b + (there ? static_cast<long long>(element) * rank_of + at : 0), there);
    }
    copies_arrive(&shared.full[stage]);
  }

  __device__ __forceinline__ void help() {
    const int thread = threadIdx.x % 128 - kWarp;
    int number = 0;
    for (int pair = cluster; pair < pairs; pair += clusters, ++number) {
      go_to(pair);
      if (thread < kWarp) list(number);
      // Behind it no warp is more than a turn of the ring from those that multiply.
      named_barrier(kListed, 128);
      skip(steps);
      if (number == 0) wait_for_front();
      for (int i = 0; i < shared.count; ++i) {
        const int slot = shared.present[i];
        for (int slice = 0; slice < args.lora.slice_count; ++slice) {
          if (!meets(slice)) continue;
          const LoraRow lora = i < kKept ? shared.entry[i * kMaxSlices + slice] : lora_row(args.lora, slot, slice, 0);
          for (int first = 0; first < static_cast<int>(lora.rank); first += kChunk) {
            barrier_wait(&shared.empty[stage], parity ^ 1);
            bring_chunk(slot, slice, lora, first, thread);
            next_stage();
          }
        }
      }
      named_barrier(kBegun, kHelpers);  // the lists have been read
    }
  }

  // ---- Warps that multiply.

  // A stage is free when it is in both blocks, which bring rows to each other.
  __device__ __forceinline__ void release(int of) const {
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
    if (lane < kPair) barrier_arrive_at(&shared.empty[of], lane);
  }

  static __device__ __forceinline__ void settle(float (&acc)[kBlocks][kAcc]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) asm volatile("" : "+f"(acc[b][i])::"memory");
    }
  }

  // Stages of k, and then those of deltas, of which the last one of k tells how many they are.
  __device__ __forceinline__ void multiply(float (&acc)[kBlocks][kAcc], int group, int number) {
    int before = 0, all = steps;
    for (int step = 0; step < all; ++step) {
      barrier_wait(&shared.full[stage], parity);
      if (with_deltas() && step == steps - 1) {
        all += uniform(*const_cast<volatile int*>(&shared.stages_of_deltas[number & 1]));
      }
      // Both halves of a row of shrunk numbers meet the first of B.
      const bool delta = step >= steps;
      const unsigned long long back = delta ? kChunk * 2 >> 4 : 0;
      if (delta) async_proxy_fence();
      products_begin();
      const unsigned long long of_x = operand(left() + group * (kBlocks * kGroupBytes)), of_w = operand(right());
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const unsigned long long along = of_w + 2 * i - (i < 2 ? 0 : back);
          GroupProduct<Element, kCols>::run(acc[b], of_x + b * (kGroupBytes >> 4) + 2 * i, along);
        }
      }
      products_commit();
      if (step > 0) {
        products_wait<1>();
        release(before);
      }
      before = stage;
      next_stage();
    }
    products_wait<0>();
    settle(acc);
    release(before);
  }

  // Words of four neighbouring groups of eight columns, a group's by four lanes: each lane gets all of one group.
  static __device__ __forceinline__ void exchange(unsigned (&word)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const unsigned other = __shfl_xor_sync(kFullWarp, odd ? word[i] : word[i + 1], 1);
      word[i] = odd ? other : word[i];
      word[i + 1] = odd ? word[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned other = __shfl_xor_sync(kFullWarp, high ? word[i] : word[i + 2], 2);
      word[i] = high ? other : word[i];
      word[i + 2] = high ? word[i + 2] : other;
    }
  }

  // 64 rows from `from` on.
  __device__ __forceinline__ void store(const float (&acc)[kAcc], const float* bias, int from) const {
    const int lane = threadIdx.x % kWarp, quad = lane % 4;
    const int top = from + threadIdx.x / kWarp % 4 * 16 + lane / 4;
    const bool whole = (args.base.aligned & kAlignedRows) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = top + half * 8;
      const bool there = row < args.base.tokens;
      if (!whole) {
        if (!there) continue;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) {
          const int n = first_col + j * 8 + quad * 2;
          if (n < args.base.n) store_pair<Element>(args.base, row, n, acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
        continue;
      }
      Element* to = static_cast<Element*>(args.base.out) + row * args.base.out_pitch + first_col;
#pragma unroll
      for (int first = 0; first < kCols / 8; first += 4) {
        unsigned word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i;
          if (j >= kCols / 8) continue;
          const float2 more = *reinterpret_cast<const float2*>(bias + j * 8 + quad * 2);
          word[i] = pack_pair<Element>(acc[4 * j + 2 * half] + more.x, acc[4 * j + 2 * half + 1] + more.y);
        }
        exchange(word);
        const int at = (first + quad) * 8;
        if (there && first + quad < kCols / 8 && first_col + at < args.base.n) {
          *reinterpret_cast<uint4*>(to + at) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_all(int group) {
    constexpr int kOwn = (kCols + 127) / 128;
    int number = 0;
    for (int pair = cluster; pair < pairs; pair += clusters, ++number) {
      go_to(pair);
      float bias[kOwn];  // on its way while the tile is
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int n = first_col + i * 128 + threadIdx.x % 128;
        bias[i] = args.base.bias != nullptr && n < args.base.n ? args.base.bias[n] : 0.f;
      }
      float acc[kBlocks][kAcc];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) acc[b][i] = 0.f;
      }
      multiply(acc, group, number);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int at = i * 128 + threadIdx.x % 128;
        if (at < kCols) shared.bias[group][at] = bias[i];
      }
      named_barrier(kBiased + group, 128);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        store(acc[b], shared.bias[group], first_row + (group * kBlocks + b) * 64);
      }
      named_barrier(kBiased + group, 128);  // the bias has been read
    }
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      prefetch_map(&map.weight);
      prefetch_map(&map.x);
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&shared.full[i], arrivals());
        barrier_init(&shared.empty[i], kPair * kGroups * 4);
      }
      barrier_init_done();
    }
    let_next_begin();
    cluster_barrier();  // nobody arrives at another block's barriers before they are made
    const int group = uniform(threadIdx.x / 128);
    if (group == kGroups) {
      give_registers<Form::kBringRegisters>();
      if (uniform(threadIdx.x % 128) < kWarp) {
        bring();
      } else if (with_deltas()) {
        help();
      }
    } else {
      take_registers<Form::kMultiplyRegisters>();
      multiply_all(group);
    }
    wait_for_front();
    __syncwarp();
    cluster_barrier();  // a block's memory is there for as long as the other writes it
  }
};

#endif

template <class Config, int kThreads, class Form>
__device__ __forceinline__ void dense_group(const DenseClusterArgs& args) {
  static_assert(kThreads == Form::kThreads, "threads");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = DenseGroup<typename Config::Element, Form>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ typename Kernel::Shared shared;
  // The layouts of wgmma want memory at multiples of 1024 bytes; the host adds room for it.
  Kernel(args, shared, (shared_address(dynamic) + 1023) / 1024 * 1024).run();
#endif
}

// 128 × 256 outputs.
template <class Config, int kThreads>
__device__ __forceinline__ void linear_group_flat(const DenseClusterArgs& args) {
  dense_group<Config, kThreads, GroupForm<1, 256, 4, 72, 216>>(args);
}

// 128 × 192.
template <class Config, int kThreads>
__device__ __forceinline__ void linear_group_slim(const DenseClusterArgs& args) {
  dense_group<Config, kThreads, GroupForm<1, 192, 5, 72, 216>>(args);
}

// 256 × 160.
template <class Config, int kThreads>
__device__ __forceinline__ void linear_group_square(const DenseClusterArgs& args) {
  dense_group<Config, kThreads, GroupForm<2, 160, 4, 72, 216>>(args);
}

// 256 × 192.
template <class Config, int kThreads>
__device__ __forceinline__ void linear_group_large(const DenseClusterArgs& args) {
  dense_group<Config, kThreads, GroupForm<2, 192, 3, 40, 232>>(args);
}

}  // namespace amphora
