// The shrink of a dense projection (dense_shrink.cuh) for the many rows of a prompt on Hopper, in front of linear_group:
// shrunk[row, slice] = scale · x·Aᵀ for every row with an adapter, summed in f32 and kept as two elements each.
//
// Grid: (parts, rows / 128). k is cut into parts, whose blocks are a cluster. A block holds 128 rows of x, by slot
// through the permutation, for its part of k: a tensor map brings them where they follow one another. For each adapter
// among them, in the order of its first row, it takes the adapter's rows of A, those of all slices counted through, 96
// at a time, which come through a ring of stages; so does x, behind them, where a block's part of it is more than it
// can hold (`streams`). Two warpgroups multiply all rows with them, the parts' sums meet through each other's shared
// memory, in the order of the parts, and each block stores some of the rows that are the adapter's. So a row's bits
// depend on its own row of x and its own A alone.
//
// The plan, the table and the first rows of A are read while the kernel in front ends. The next one is let begin
// when x is complete, and then reads x without waiting itself.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/cluster.cuh"
#include "amphora/dense.cuh"
#include "amphora/group_product.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, int kThreads>
struct ShrinkGroup {
  static constexpr int kRows = 128, kPass = 96, kDepth = 64, kPitch = kDepth * 2;
  static constexpr int kStageBytes = kPass * kPitch, kStepBytes = kRows * kPitch;
  static constexpr int kMostSteps = 8, kMostStages = 8, kMostParts = 8;
  static constexpr int kMultiply = 256, kBring = kThreads - kMultiply;
  static constexpr int kSumPitch = kPass + 4;  // of a row of sums
  static constexpr int kListed = 1;
  static constexpr int kFew = 32;  // rows of A of a pass that has no more
  static constexpr int kCopies = kPass * 8 / kBring;
  static_assert(kBring == 128 && kPass * 8 % kBring == 0, "whole rounds of copies");

  struct Shared {
    Barrier full[kMostStages], empty[kMostStages], x_full[kMostSteps];
    int count;           // adapters among the rows
    int run;             // of x, the first of the rows, where they follow one another; -1: they do not
    int row[kRows];      // of x; -1: none
    int slot[kRows];     // of each row; -1: none
    int present[kRows];  // the slots, in the order of their first rows
  };

  const DenseClusterArgs& map;
  const DenseArgs& args;
  Shared& shared;
  const int parts = gridDim.x, part = blockIdx.x, first_row = blockIdx.y * kRows;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int stages, stage_bytes;
  const bool streams;
  int first_step, steps;
  unsigned x_shared, ring, sums;
  int stage = 0;
  unsigned parity = 0;

  __device__ ShrinkGroup(const DenseClusterArgs& map, Shared& shared, unsigned memory)
      : map(map),
        args(map.of),
        shared(shared),
        stages(map.stages),
        stage_bytes(kStageBytes + (map.streams ? kStepBytes : 0)),
        streams(map.streams != 0),
        x_shared(memory) {
    const int all = (args.base.k + kDepth - 1) / kDepth;
    first_step = all * part / parts;
    steps = all * (part + 1) / parts - first_step;
    ring = x_shared + (streams ? 0 : (all + parts - 1) / parts * kStepBytes);
    sums = ring + stages * stage_bytes;
  }

  __device__ __forceinline__ void next_stage() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ unsigned at_stage() const { return ring + stage * stage_bytes; }

  // An adapter's rows of A: of all slices, counted through.
  struct Factors {
    LoraRow of[kMaxSlices];
    int rows;
    __device__ __forceinline__ Factors(const LoraArgs& lora, int slot) : rows(0) {
#pragma unroll
      for (int i = 0; i < kMaxSlices; ++i) {
        of[i] = i < lora.slice_count ? lora_row(lora, slot, i, 0) : LoraRow{0, 0, 0, 0.f};
        rows += static_cast<int>(of[i].rank);
      }
    }
    // The slice of row `row`, and the row within it.
    __device__ __forceinline__ int find(int& row, LoraRow& found) const {
      int slice = 0;
      found = of[0];
#pragma unroll
      for (int i = 0; i + 1 < kMaxSlices; ++i) {
        if (slice == i && row >= static_cast<int>(of[i].rank)) {
          row -= static_cast<int>(of[i].rank);
          slice = i + 1;
          found = of[i + 1];
        }
      }
      return slice;
    }
  };

  // The adapters among the rows, by one warp, which asks for all rows at once: each answer takes as long as a product.
  __device__ void list() {
    constexpr int kEach = kRows / kWarp;
    int row[kEach], own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int position = first_row + i * kWarp + lane;
      row[i] = position < args.base.tokens ? args.perm[position] : -1;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) own[i] = row[i] >= 0 ? args.slot[row[i]] : -1;
    int count = 0;
    const int run = __shfl_sync(kFullWarp, row[0], 0);
    bool follows = run >= 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      follows = follows && (row[i] < 0 || row[i] == run + i * kWarp + lane);
      shared.row[i * kWarp + lane] = row[i];
      shared.slot[i * kWarp + lane] = own[i];
      const unsigned same = __match_any_sync(kFullWarp, own[i]);
      bool first = own[i] >= 0 && __ffs(same) - 1 == lane;
      for (int j = 0; j < count; ++j) first = first && shared.present[j] != own[i];
      const unsigned firsts = __ballot_sync(kFullWarp, first);
      if (first) shared.present[count + __popc(firsts & ((1u << lane) - 1))] = own[i];
      count += __popc(firsts);
      __syncwarp();
    }
    follows = __all_sync(kFullWarp, follows);
    if (lane == 0) {
      shared.count = count;
      shared.run = follows ? run : -1;
      for (int i = 0; i < stages; ++i) {
        barrier_init(&shared.full[i], kBring + (streams && follows ? 1 : 0));
        barrier_init(&shared.empty[i], kMultiply / kWarp);
      }
      for (int i = 0; i < steps && !streams; ++i) barrier_init(&shared.x_full[i], follows ? 1 : kMultiply);
      barrier_init_done();
    }
    __syncwarp();
  }

  // All rows of x of a step, which follow one another.
  __device__ __forceinline__ void bring_run(unsigned to, int step, Barrier* barrier) const {
    barrier_expect(barrier, kStepBytes);
    load_box(to, &map.x, barrier, (first_step + step) * kDepth, shared.run);
  }

  // Octet `piece` of every kApart-th row of x from `top` on, of a step.
  template <int kApart>
  __device__ __forceinline__ void bring_x(unsigned to, int step, int top, int piece) const {
    const int at = (first_step + step) * kDepth + piece * kOctet;
#pragma unroll
    for (int j = 0; j < kRows / kApart; ++j) {
      const int position = top + j * kApart, row = shared.row[position];
      const bool there = row >= 0 && at < args.base.k;
      const Element* from = static_cast<const Element*>(args.base.x) + (there ? row * args.base.x_pitch + at : 0);
      copy16(to + position * kPitch + ((piece ^ (position & 7)) << 4), from, there);
    }
  }

  // A pass of rows of A through the ring.
  __device__ void bring(const Factors& factors, int pass) {
    const int thread = threadIdx.x - kMultiply, piece = thread % 8;
    const Element* from[kCopies];
    bool there[kCopies];
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      int row = pass * kPass + thread / 8 + j * (kBring / 8);
      there[j] = row < factors.rows;
      LoraRow lora;
      if (!there[j]) row = 0;
      factors.find(row, lora);
      from[j] = lora_block<Element>(args.lora, lora.a) + static_cast<long long>(row) * args.base.k;
    }
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&shared.empty[stage], parity ^ 1);
      if (streams && shared.run < 0) bring_x<kBring / 8>(at_stage() + kStageBytes, step, thread / 8, piece);
      if (streams && shared.run >= 0 && thread == 0) bring_run(at_stage() + kStageBytes, step, &shared.full[stage]);
      const int at = (first_step + step) * kDepth + piece * kOctet;
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        const int row = thread / 8 + j * (kBring / 8);
        const unsigned to = at_stage() + row * kPitch + ((piece ^ (row & 7)) << 4);
        // What is not there are columns that nobody reads; beyond k are zeros.
        if (there[j]) copy16(to, from[j] + (at < args.base.k ? at : 0), at < args.base.k);
      }
      copies_arrive(&shared.full[stage]);
      next_stage();
    }
  }

  __device__ __forceinline__ void release(int of) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[of]);
  }

  // This part's sums of a pass of kCols rows of A, into shared memory.
  template <int kCols>
  __device__ __forceinline__ void multiply(int group) {
    float acc[kCols / 2];
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) acc[i] = 0.f;
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      if (!streams) barrier_wait(&shared.x_full[step], 0);
      barrier_wait(&shared.full[stage], parity);
      async_proxy_fence();
      products_begin();
      const unsigned x = streams ? at_stage() + kStageBytes : x_shared + step * kStepBytes;
      const unsigned long long left = operand(x + group * kGroupBytes), right = operand(at_stage());
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) GroupProduct<Element, kCols>::run(acc, left + 2 * i, right + 2 * i);
      products_commit();
      if (step > 0) {
        products_wait<1>();
        release(before);
      }
      before = stage;
      next_stage();
    }
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    if (steps > 0) release(before);
    const unsigned to = sums + ((warp * 16 + lane / 4) * kSumPitch + lane % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + (half * 8 * kSumPitch + j * 8) * 4),
                     "f"(acc[4 * j + 2 * half]), "f"(acc[4 * j + 2 * half + 1])
                     : "memory");
      }
    }
  }

  // The sums of all parts; a block stores its share of the rows that are the adapter's.
  __device__ void meet(const Factors& factors, int slot, int pass) const {
    constexpr int kFours = kPass / 4;
    for (int i = part * kThreads + threadIdx.x; i < kRows * kFours; i += parts * kThreads) {
      const int row = i / kFours, col = i % kFours * 4;
      int rank = pass * kPass + col;
      if (shared.slot[row] != slot || rank >= factors.rows) continue;
      // Others' shared memory is far: all are asked at once.
      float4 each[kMostParts];
#pragma unroll
      for (int of = 0; of < kMostParts; ++of) {
        if (of < parts) each[of] = read_four(sums + (row * kSumPitch + col) * 4, of);
      }
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int of = 0; of < kMostParts; ++of) {
        if (of >= parts) break;
        sum.x += each[of].x;
        sum.y += each[of].y;
        sum.z += each[of].z;
        sum.w += each[of].w;
      }
      LoraRow lora;
      const int slice = factors.find(rank, lora);
      const float value[4] = {sum.x * lora.scale, sum.y * lora.scale, sum.z * lora.scale, sum.w * lora.scale};
      unsigned large[2], small[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        large[j] = pack_pair<Element>(value[2 * j], value[2 * j + 1]);
        small[j] = pack_pair<Element>(value[2 * j] - unpack_first<Element>(large[j]),
                                      value[2 * j + 1] - unpack_second<Element>(large[j]));
      }
      Element* out = shrunk_at<Element>(args.lora, shared.row[row], slice) + rank;
      *reinterpret_cast<uint2*>(out) = make_uint2(large[0], large[1]);
      *reinterpret_cast<uint2*>(out + lora.rank) = make_uint2(small[0], small[1]);
    }
  }

  __device__ void run() {
    if (threadIdx.x == 0) prefetch_map(&map.x);
    const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    const bool brings = group == kMultiply / 128;
    if (brings && warp == kMultiply / kWarp) list();
    named_barrier(kListed, kThreads);
    if (!brings || streams) {
      wait_for_front();
      let_next_begin();
    }
    const int count = __shfl_sync(kFullWarp, shared.count, 0);
    const bool follows = shared.run >= 0;
    if (!brings && !streams && count > 0) {
      for (int step = 0; step < steps && follows && threadIdx.x == 0; ++step) {
        bring_run(x_shared + step * kStepBytes, step, &shared.x_full[step]);
      }
      for (int step = 0; step < steps && !follows; ++step) {
        bring_x<kMultiply / 8>(x_shared + step * kStepBytes, step, threadIdx.x / 8, threadIdx.x % 8);
        copies_arrive(&shared.x_full[step]);
      }
    }
    for (int i = 0; i < count; ++i) {
      const int slot = shared.present[i];
      const Factors factors(args.lora, slot);
      const int rows = __shfl_sync(kFullWarp, factors.rows, 0);
      for (int pass = 0; pass * kPass < rows; ++pass) {
        if (brings) {
          bring(factors, pass);
        } else if (rows - pass * kPass > kFew) {
          multiply<kPass>(group);
        } else {
          multiply<kFew>(group);
        }
        cluster_barrier();
        meet(factors, slot, pass);
        cluster_barrier();  // the sums have been read by all
      }
    }
    // What lands of x is awaited by nobody else if no adapter has rows of A.
    copies_commit();
    copies_wait<0>();
    for (int step = 0; step < steps && follows && !streams && count > 0; ++step) barrier_wait(&shared.x_full[step], 0);
    wait_for_front();
    let_next_begin();
  }

  static __device__ __forceinline__ float4 read_four(unsigned address, int rank) {
    float4 out;
    asm volatile(
        "{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;"
        " ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];}"
        : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
        : "r"(address), "r"(rank)
        : "memory");
    return out;
  }
};

#endif

template <class Config, int kThreads>
__device__ __forceinline__ void dense_shrink_group(const DenseClusterArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = ShrinkGroup<typename Config::Element, kThreads>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ typename Kernel::Shared shared;
  Kernel(args, shared, (shared_address(dynamic) + 1023) / 1024 * 1024).run();
#endif
}

}  // namespace amphora
