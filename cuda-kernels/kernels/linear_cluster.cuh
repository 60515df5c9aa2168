// out = x·Wᵀ + bias, plain and with deltas, for up to 64 rows on Hopper: k is cut into parts, whose blocks
// are a cluster.
//
// Grid: (parts, outputs / 144). A block has 64 rows and 144 outputs for its part of k. Its rows of x lie in
// shared memory from the start; the weights stream through a ring of stages, 64 elements of k deep, which
// tensor maps fill; four warps multiply (wgmma), four bring. The parts' sums meet through each other's
// shared memory, in the order of the parts, and each block finishes some of the outputs.
//
// Deltas: behind the last stage of W come further steps, each 32 of the rank of one adapter and slice: the
// shrunk rows of dense_shrink, zero in rows of others, times rows of B, into the same sums. Which part has a
// step depends on slot, slice and rank alone. What a step adds to rows that are not its own is zero, so a
// row's bits do not show which other adapters are there.
//
// With deltas, the kernel in front is the shrink, which lets this one begin at once: the ring fills while it
// works, and x is read behind it.
//
// A step's stage: B, 144 rows of 32 numbers; then the first elements of the shrunk numbers, 64 rows of 32,
// and the second ones, as 64-byte rows whose four pieces are exchanged by row / 2.
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
struct DenseCluster {
  static constexpr int kRows = 64, kCols = 144, kDepth = 64;
  static constexpr int kStageBytes = kCols * kDepth * 2;
  static constexpr int kChunk = 32;                    // of the rank, in a step of the deltas
  static constexpr int kMostSteps = 16, kMostStages = 12;
  static constexpr int kEntries = kRows * kMaxSlices;
  static constexpr int kItems = kEntries * (kMaxRank / kChunk);
  static constexpr int kHalf = kThreads / 2;           // warps that multiply; as many bring
  static constexpr int kArranged = 1, kBrought = 2;
  static constexpr int kPitch = kCols + 4;             // of a row of sums
  static_assert(kHalf == 128, "a warpgroup of each kind");

  struct Shared {
    Barrier full[kMostStages], empty[kMostStages], x_full[kMostSteps];
    int count;                                // adapters present, in the order of their first rows
    int slot[kRows];                          // of each row; later, of each adapter
    int item[kRows];                          // the adapter of each row; -1: none
    int firsts[2];                            // a bit for each row that is its adapter's first
    alignas(16) LoraRow entry[kEntries];      // by adapter and slice
    int deltas;                               // steps of this block
    unsigned short step[kItems];              // entry · 8 + 32s of the rank
  };

  const DenseClusterArgs& map;
  const DenseArgs& args;
  Shared& shared;
  const int parts = gridDim.x, part = blockIdx.x;
  const unsigned x_shared, ring;
  const int x_bytes;  // of a step
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, thread = threadIdx.x % kHalf;
  const int first_col = blockIdx.y * kCols;
  const int stages;
  int first_step, steps;
  int stage = 0;
  unsigned parity = 0;

  __device__ DenseCluster(const DenseClusterArgs& map, Shared& shared, unsigned memory)
      : map(map),
        args(map.of),
        shared(shared),
        x_shared(memory),
        ring(memory + (all_steps() + parts - 1) / parts * map.x_rows * kDepth * 2),
        x_bytes(map.x_rows * kDepth * 2),
        stages(map.stages) {
    const int all = all_steps();
    first_step = all * part / parts;
    steps = all * (part + 1) / parts - first_step;
  }

  __device__ __forceinline__ int all_steps() const { return (args.base.k + kDepth - 1) / kDepth; }
  __device__ __forceinline__ void next_stage() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ unsigned at_stage() const { return ring + stage * kStageBytes; }

  // ---- Warps that bring.

  __device__ __forceinline__ void bring_weights(int step) {
    barrier_wait(&shared.empty[stage], parity ^ 1);
    if (thread == 0) {
      barrier_expect(&shared.full[stage], kStageBytes);
      load_box(at_stage(), &map.weight, &shared.full[stage], (first_step + step) * kDepth, first_col);
    } else {
      barrier_arrive(&shared.full[stage]);
    }
    next_stage();
  }

  // Finds the adapters present and this block's steps. The plan and the table alone are read.
  __device__ void arrange() {
    const int slices = args.lora.slice_count;
    int slot = -1, first = 0;
    if (thread < kRows) {
      slot = thread < args.base.tokens ? args.slot[thread] : -1;
      shared.slot[thread] = slot;
    }
    named_barrier(kBrought, kHalf);
    if (thread < kRows) {
      while (first < thread && shared.slot[first] != slot) ++first;
      const unsigned firsts = __ballot_sync(kFullWarp, slot >= 0 && first == thread);
      if (lane == 0) shared.firsts[thread / kWarp] = static_cast<int>(firsts);
    }
    named_barrier(kBrought, kHalf);
    if (thread < kRows) {
      const unsigned low = shared.firsts[0], high = shared.firsts[1];
      const auto before = [&](int row) {
        return row < kWarp ? __popc(low & ((1u << row) - 1))
                           : __popc(low) + __popc(high & ((1u << (row - kWarp)) - 1));
      };
      shared.item[thread] = slot >= 0 ? before(first) : -1;
      if (slot >= 0 && first == thread) shared.slot[before(thread)] = slot;
      if (thread == 0) shared.count = __popc(low) + __popc(high);
    }
    named_barrier(kBrought, kHalf);
    const int entries = shared.count * kMaxSlices;
    for (int i = thread; i < entries; i += kHalf) {
      const int slice = i % kMaxSlices;
      shared.entry[i] = slice < slices ? lora_row(args.lora, shared.slot[i / kMaxSlices], slice, 0)
                                       : LoraRow{0, 0, 0, 0.f};
    }
    named_barrier(kBrought, kHalf);
    if (thread < kWarp) {
      int found = 0;
      for (int slice = 0; slice < slices; ++slice) {
        if (!slice_meets(args.lora.slices[slice], first_col, first_col + kCols)) continue;
        for (int chunk = 0; chunk < kMaxRank / kChunk; ++chunk) {
          for (int base = 0; base < shared.count; base += kWarp) {
            const int item = base + lane, entry = item * kMaxSlices + slice;
            const bool mine = item < shared.count &&
                              chunk * kChunk < static_cast<int>(shared.entry[entry].rank) &&
                              (shared.slot[item] + slice + chunk) % parts == part;
            const unsigned all = __ballot_sync(kFullWarp, mine);
            if (mine) {
              shared.step[found + __popc(all & ((1u << lane) - 1))] =
                  static_cast<unsigned short>(entry * (kMaxRank / kChunk) + chunk);
            }
            found += __popc(all);
          }
        }
      }
      if (lane == 0) shared.deltas = found;
    }
  }

  static __device__ __forceinline__ unsigned place(int row, int piece) {
    return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
  }

  __device__ void bring_deltas() {
    const int piece = thread % 4;
    for (int i = 0; i < shared.deltas; ++i) {
      const int number = shared.step[i], entry = number / (kMaxRank / kChunk), slice = entry % kMaxSlices;
      const int item = entry / kMaxSlices, at = number % (kMaxRank / kChunk) * kChunk + piece * kOctet;
      const LoraRow lora = shared.entry[entry];
      const int rank = static_cast<int>(lora.rank);  // a multiple of 8
      barrier_wait(&shared.empty[stage], parity ^ 1);
      const Element* b = lora_block<Element>(args.lora, lora.b) + at;
#pragma unroll
      for (int j = 0; j < (kCols + 31) / 32; ++j) {
        const int r = thread / 4 + j * 32, n = first_col + r;
        if (r >= kCols) break;
        const int element = n < args.base.n ? slice_element(args.lora.slices[slice], n) : -1;
        const bool there = element >= 0 && at < rank;
        copy16(at_stage() + place(r, piece), there ? b + static_cast<long long>(element) * rank : b, there);
      }
      const unsigned to = at_stage() + kCols * 64;
#pragma unroll
      for (int j = 0; j < kRows / 32; ++j) {
        const int row = thread / 4 + j * 32;
        const bool there = shared.item[row] == item && at < rank;
        const Element* from = shrunk_at<Element>(args.lora, there ? row : 0, slice) + at;
        copy16(to + place(row, piece), from, there);
        copy16(to + kRows * 64 + place(row, piece), from + (there ? rank : 0), there);
      }
      copies_arrive(&shared.full[stage]);
      next_stage();
    }
  }

  __device__ void bring() {
    for (int step = 0; step < steps; ++step) {
      // The table's latency is over before the last stages are free.
      if (step == stages && args.lora.slice_count > 0) arrange();
      bring_weights(step);
    }
    if (args.lora.slice_count > 0) {
      if (steps <= stages) arrange();
      named_barrier(kArranged, kThreads);
    }
    wait_for_front();
    if (args.lora.slice_count > 0) bring_deltas();
  }

  // ---- Warps that multiply.

  __device__ __forceinline__ void release(int of) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[of]);
  }

  __device__ __forceinline__ unsigned long long x_operand(int step) const {
    return operand(x_shared + step * x_bytes);
  }

  template <int kCount>
  static __device__ __forceinline__ void settle(float (&acc)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  }

  __device__ __forceinline__ void multiply_weights(float (&acc)[kCols / 2]) {
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&shared.x_full[step], 0);
      barrier_wait(&shared.full[stage], parity);
      products_begin();
      const unsigned long long left = x_operand(step), right = operand(at_stage());
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
    settle(acc);
    release(before);
  }

  // Rows of 64 bytes: eight of them are 512.
  static __device__ __forceinline__ unsigned long long narrow_operand(unsigned address) {
    constexpr unsigned long long kSwizzle64 = 2ull << 62, kStride = 32ull << 32, kLeading = 1ull << 16;
    return kSwizzle64 | kStride | kLeading | ((address & 0x3ffff) >> 4);
  }

  __device__ void multiply_deltas(float (&acc)[kCols / 2]) {
    for (int i = 0; i < shared.deltas; ++i) {
      barrier_wait(&shared.full[stage], parity);
      async_proxy_fence();
      products_begin();
      const unsigned long long right = narrow_operand(at_stage());
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const unsigned long long left = narrow_operand(at_stage() + kCols * 64 + second * kRows * 64);
#pragma unroll
        for (int j = 0; j < kChunk / 16; ++j) GroupProduct<Element, kCols>::run(acc, left + 2 * j, right + 2 * j);
      }
      products_commit();
      products_wait<0>();
      settle(acc);
      release(stage);
      next_stage();
    }
  }

  __device__ void multiply(float (&acc)[kCols / 2]) {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) acc[i] = 0.f;
    wait_for_front();
    if (threadIdx.x == 0) {
      for (int step = 0; step < steps; ++step) {
        barrier_expect(&shared.x_full[step], x_bytes);
        load_box(x_shared + step * x_bytes, &map.x, &shared.x_full[step], (first_step + step) * kDepth, 0);
      }
    }
    __syncwarp();
    multiply_weights(acc);
    if (args.lora.slice_count > 0) {
      named_barrier(kArranged, kThreads);
      multiply_deltas(acc);
    }
  }

  // The sums of all parts; a block writes its share of the outputs.
  __device__ void meet(const float (&acc)[kCols / 2]) {
    const unsigned sums = x_shared;  // x and the weights have been read by all
    __syncthreads();
    if (warp < kHalf / kWarp) {
      const unsigned to = sums + ((warp * 16 + lane / 4) * kPitch + lane % 4 * 2) * 4;
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + (half * 8 * kPitch + j * 8) * 4),
                       "f"(acc[4 * j + 2 * half]), "f"(acc[4 * j + 2 * half + 1])
                       : "memory");
        }
      }
    }
    cluster_barrier();
    for (int i = part * kThreads + threadIdx.x; i < args.base.tokens * (kCols / 4); i += parts * kThreads) {
      const int row = i / (kCols / 4), col = i % (kCols / 4) * 4, n = first_col + col;
      if (n >= args.base.n) continue;
      float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int of = 0; of < parts; ++of) {
        const float4 more = read_four(sums + (row * kPitch + col) * 4, of);
        value.x += more.x;
        value.y += more.y;
        value.z += more.z;
        value.w += more.w;
      }
      store_pair<Element>(args.base, row, n, value.x, value.y);
      if (n + 2 < args.base.n) store_pair<Element>(args.base, row, n + 2, value.z, value.w);
    }
    cluster_barrier();  // until all have read, no block's memory may go
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

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        barrier_init(&shared.full[i], kHalf);
        barrier_init(&shared.empty[i], kHalf / kWarp);
      }
      for (int i = 0; i < steps; ++i) barrier_init(&shared.x_full[i], 1);
      barrier_init_done();
    }
    __syncthreads();
    let_next_begin();
    float acc[kCols / 2];
    if (warp < kHalf / kWarp) {
      multiply(acc);
    } else {
      bring();
    }
    meet(acc);
  }
};

#endif

template <class Config, int kThreads>
__device__ void linear_cluster(const DenseClusterArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = DenseCluster<typename Config::Element, kThreads>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ typename Kernel::Shared shared;
  // The layouts of wgmma want memory at multiples of 1024 bytes; the host adds room for it.
  Kernel(args, shared, (shared_address(dynamic) + 1023) / 1024 * 1024).run();
#endif
}

}  // namespace amphora
