// out = x·Wᵀ + bias, plain and with deltas, for up to 64 rows on Hopper: k is cut into parts, whose blocks
// are a cluster.
//
// Grid: (parts, outputs / 144). A block has 64 rows and 144 outputs for its part of k. Its rows of x lie in
// shared memory from the start; the weights stream through a ring of stages, 64 elements of k deep, which
// a warp of its own fills by tensor maps; four warps multiply (wgmma), four bring what adapters need. The
// parts' sums meet through each other's shared memory, in the order of the parts, and each block finishes some
// of the outputs.
//
// The shrink: the rows of A of the adapters present, counted through, are shared out among the tiles of
// outputs, 24 at a time, and take their way through the ring: the first ones behind the weights of its first
// turn, so that the stream goes on meanwhile, further ones behind all weights. A block multiplies its part of
// them with its part of x, and leaves sums in memory where the blocks that want them wait (`dense_shrunk.cuh`).
// Where not all blocks run at once, dense_shrink makes them in front (`ready` is null), and lets this kernel
// begin at once: the ring fills while it works, and x is read behind it.
//
// Where a block's share of x is more than it can hold (`streams`), x comes with the weights, its rows behind theirs in
// each stage. Then the shrink is in front, and lets this kernel begin when x is complete: the wait for it comes
// before the first of the deltas.
//
// Deltas: behind the last stage of W come further steps, each 32 of the rank of one adapter and slice: the
// shrunk rows, zero in rows of others, times rows of B, into the same sums. Which part has a step depends on
// slot, slice and rank alone. What a step adds to rows that are not its own is zero, so a row's bits do not
// show which other adapters are there.
//
// A step's stage: B, 144 rows of 32 numbers; then the first elements of the shrunk numbers, 64 rows of 32,
// and the second ones, as 64-byte rows whose four pieces are exchanged by row / 2. Of A, a stage has six
// steps of k of 24 rows.
#pragma once

#include "amphora/adapters_present.cuh"
#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/cluster.cuh"
#include "amphora/dense.cuh"
#include "amphora/dense_shrunk.cuh"
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
  static constexpr int kPass = 24;                     // rows of A at a time
  static constexpr int kPassBytes = kPass * kDepth * 2;
  static constexpr int kPassSteps = kStageBytes / kPassBytes;  // steps of a pass in a stage
  static constexpr int kMostSteps = 16, kMostStages = 12;
  using Present = AdaptersPresent<kRows>;
  static constexpr int kItems = Present::kEntries * (kMaxRank / kChunk);
  static constexpr int kHalf = kThreads / 2;           // threads that multiply; as many bring
  static constexpr int kArranged = 1, kBrought = 2, kFound = 3;
  static constexpr int kPitch = kCols + 4;             // of a row of sums
  static_assert(kHalf == 128, "a warpgroup of each kind");

  struct Shared {
    Barrier full[kMostStages], empty[kMostStages], x_full[kMostSteps];
    Present present;
    unsigned half;                            // of the shrunk rows, this launch's
    int deltas;                               // steps of this block
    unsigned short step[kItems];              // entry · 8 + 32s of the rank
    unsigned char list[kHalf / kWarp][kRows]; // rows of the adapters of some steps
    int listed[kHalf / kWarp];
  };

  const DenseClusterArgs& map;
  const DenseArgs& args;
  Shared& shared;
  const int parts = gridDim.x, part = blockIdx.x;
  const unsigned x_shared, ring;
  const int x_bytes;  // of a step
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, thread = threadIdx.x % kHalf;
  const int first_col = blockIdx.y * kCols;
  const int stages, stage_bytes;
  const bool streams;
  int first_step, steps;
  int stage = 0;
  unsigned parity = 0;

  __device__ DenseCluster(const DenseClusterArgs& map, Shared& shared, unsigned memory)
      : map(map),
        args(map.of),
        shared(shared),
        x_shared(memory),
        ring(memory + (map.streams ? 0 : (all_steps() + parts - 1) / parts * map.x_rows * kDepth * 2)),
        x_bytes(map.x_rows * kDepth * 2),
        stages(map.stages),
        stage_bytes(kStageBytes + (map.streams ? x_bytes : 0)),
        streams(map.streams != 0) {
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
  __device__ __forceinline__ unsigned at_stage() const { return ring + stage * stage_bytes; }

  // ---- Warps that bring.

  // This block's steps, by one warp; the others wait for it.
  __device__ __forceinline__ void find_steps() {
    if (thread < kWarp) list_steps();
    named_barrier(kBrought, kHalf);
    named_barrier_arrive(kFound, kThreads);
  }
  __device__ __forceinline__ void list_steps() {
    const int chunks = (shared.present.widest + kChunk - 1) / kChunk;
    int found = 0;
    for (int slice = 0; slice < args.lora.slice_count; ++slice) {
      if (!slice_meets(args.lora.slices[slice], first_col, first_col + kCols)) continue;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int base = 0; base < shared.present.count; base += kWarp) {
          const int item = base + lane, entry = item * kMaxSlices + slice;
          const bool mine = item < shared.present.count && chunk * kChunk < static_cast<int>(shared.present.entry[entry].rank) &&
                            (shared.present.of_item[item] + slice + chunk) % parts == part;
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

  // Rows of A, eight at a time, of this block's outputs' share: [first, end).
  __device__ __forceinline__ int factor_share(int side) const {
    const int groups = shared.present.factor_rows() / 8;
    return groups * (static_cast<int>(blockIdx.y) + side) / static_cast<int>(gridDim.y) * 8;
  }
  __device__ __forceinline__ int passes() const {
    return (factor_share(1) - factor_share(0) + kPass - 1) / kPass;
  }
  // Stages of a pass.
  __device__ __forceinline__ int pass_stages() const { return (steps + kPassSteps - 1) / kPassSteps; }

  __device__ void bring_factors(int pass) {
    const int piece = thread % 8, end = factor_share(1);
    const Element* from[2];
    bool there[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = thread / 8 + j * 16, all = factor_share(0) + pass * kPass + row;
      there[j] = row < kPass && all < end;
      const int entry = there[j] ? shared.present.entry_of(all) : 0;
      from[j] = lora_block<Element>(args.lora, shared.present.entry[entry].a) +
                static_cast<long long>(there[j] ? all - shared.present.start[entry] : 0) * args.base.k;
    }
    for (int step = 0; step < steps; ++step) {
      const int in = step % kPassSteps, at = (first_step + step) * kDepth + piece * kOctet;
      if (in == 0) barrier_wait(&shared.empty[stage], parity ^ 1);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = thread / 8 + j * 16;
        const unsigned to = at_stage() + in * kPassBytes + row * 128 + ((piece ^ (row & 7)) << 4);
        if (there[j]) copy16(to, from[j] + (at < args.base.k ? at : 0), at < args.base.k);
      }
      if (in == kPassSteps - 1 || step == steps - 1) {
        copies_arrive(&shared.full[stage]);
        next_stage();
      }
    }
  }

  static __device__ __forceinline__ unsigned place(int row, int piece) {
    return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
  }

  // Rows of B of a step.
  __device__ __forceinline__ void bring_outer(int i) {
    const int number = shared.step[i], entry = number / (kMaxRank / kChunk), slice = entry % kMaxSlices;
    const int piece = thread % 4, at = number % (kMaxRank / kChunk) * kChunk + piece * kOctet;
    const LoraRow lora = shared.present.entry[entry];
    const int rank = static_cast<int>(lora.rank);  // a multiple of 8
    const Element* b = lora_block<Element>(args.lora, lora.b) + at;
#pragma unroll
    for (int j = 0; j < (kCols + 31) / 32; ++j) {
      const int r = thread / 4 + j * 32, n = first_col + r;
      if (r >= kCols) break;
      const int element = n < args.base.n ? slice_element(args.lora.slices[slice], n) : -1;
      const bool there = element >= 0 && at < rank;
      copy16(at_stage() + place(r, piece), there ? b + static_cast<long long>(element) * rank : b, there);
    }
  }

  __device__ __forceinline__ unsigned shrunk_at_stage(int first, int i) const {
    return ring + (first + i) % stages * stage_bytes + kCols * 64;
  }

  // One warp lists the rows of a step's adapter, and leaves zeros for those of others.
  __device__ __forceinline__ void list_rows(int i, int step, unsigned to) {
    const int item = step / (kMaxRank / kChunk) / kMaxSlices;
    const unsigned low = shared.present.rows[item][0], high = shared.present.rows[item][1];
    const unsigned below = (1u << lane) - 1;
    if (low >> lane & 1) shared.list[i][__popc(low & below)] = lane;
    if (high >> lane & 1) shared.list[i][__popc(low) + __popc(high & below)] = kWarp + lane;
    if (lane == 0) shared.listed[i] = __popc(low) + __popc(high);
    for (int j = lane; j < args.base.tokens * 4; j += kWarp) {
      if (shared.present.item[j / 4] == item) continue;
      store_shared(to + place(j / 4, j % 4), make_uint4(0, 0, 0, 0));
      store_shared(to + kRows * 64 + place(j / 4, j % 4), make_uint4(0, 0, 0, 0));
    }
  }

  // Eight shrunk numbers of a row of a step, each as two elements.
  __device__ __forceinline__ void bring_octet(int step, int row, int piece, unsigned to, const ShrunkTurn* turn) {
    const int entry = step / (kMaxRank / kChunk), slice = entry % kMaxSlices;
    const int at = step % (kMaxRank / kChunk) * kChunk + piece * kOctet;
    const int rank = static_cast<int>(shared.present.entry[entry].rank);
    uint4 large = make_uint4(0, 0, 0, 0), small = large;
    if (at < rank && turn == nullptr) {
      const Element* from = shrunk_at<Element>(args.lora, row, slice) + at;
      large = load_fresh(from);
      small = load_fresh(from + rank);
    } else if (at < rank) {
      float sum[kOctet];
      await_octet(turn->at(row, slice, 0, parts) + at, parts, sum);
      split<Element>(sum, shared.present.entry[entry].scale, large, small);
    }
    store_shared(to + place(row, piece), large);
    store_shared(to + kRows * 64 + place(row, piece), small);
  }

  // Rows of B of some steps begin to come before the first of their shrunk rows is awaited; of those, a thread
  // has eight numbers of a row at a time.
  __device__ void bring_deltas(const ShrunkTurn* turn) {
    const int at_once = min(kHalf / kWarp, stages), own = thread / kWarp;
    for (int base = 0; base < shared.deltas; base += at_once) {
      const int count = min(at_once, shared.deltas - base), first_stage = stage;
      const unsigned first_parity = parity;
      for (int i = 0; i < count; ++i) {
        barrier_wait(&shared.empty[stage], parity ^ 1);
        bring_outer(base + i);
        next_stage();
      }
      copies_commit();
      stage = first_stage;
      parity = first_parity;
      if (own < count) list_rows(own, shared.step[base + own], shrunk_at_stage(first_stage, own));
      named_barrier(kBrought, kHalf);
      int all = 0;
      for (int i = 0; i < count; ++i) all += shared.listed[i] * 4;
      for (int j = thread; j < all; j += kHalf) {
        int i = 0, rest = j;
        while (rest >= shared.listed[i] * 4) rest -= shared.listed[i++] * 4;
        bring_octet(shared.step[base + i], shared.list[i][rest / 4], rest % 4, shrunk_at_stage(first_stage, i), turn);
      }
      copies_wait<0>();
      async_proxy_fence();
      for (int i = 0; i < count; ++i) {
        barrier_arrive(&shared.full[stage]);
        next_stage();
      }
      named_barrier(kBrought, kHalf);  // the lists have been read
    }
  }

  // Steps of weights in front of the first pass of A, which has the last stages of the ring's first turn.
  __device__ __forceinline__ int early() const { return min(stages - pass_stages(), steps); }

  __device__ __forceinline__ void bring_weights(int step) {
    barrier_wait(&shared.empty[stage], parity ^ 1);
    if (thread == 0) {
      barrier_expect(&shared.full[stage], stage_bytes);
      load_box(at_stage(), &map.weight, &shared.full[stage], (first_step + step) * kDepth, first_col);
    } else {
      barrier_arrive(&shared.full[stage]);
    }
    next_stage();
  }

  __device__ __forceinline__ void arrange() {
    shared.present.template arrange<kBrought, kHalf>(args, thread);
    named_barrier_arrive(kArranged, kThreads);
  }

  // The rows of x of a stage.
  __device__ __forceinline__ void bring_x(int step, int of) const {
    if (thread == 0) {
      load_box(ring + of * stage_bytes + kStageBytes, &map.x, &shared.full[of], (first_step + step) * kDepth, 0);
    }
  }

  // x comes with the weights, of which the first do not wait for it.
  __device__ void bring_both() {
    const bool deltas = args.lora.slice_count > 0;
    const int first = min(stages, steps);
    for (int step = 0; step < first; ++step) bring_weights(step);
    if (!deltas) wait_for_front();
    for (int step = 0; step < first; ++step) bring_x(step, step);
    if (deltas) {
      arrange();
      find_steps();
    }
    for (int step = first; step < steps; ++step) {
      const int of = stage;
      bring_weights(step);
      bring_x(step, of);
    }
    if (!deltas) return;
    wait_for_front();
    bring_deltas(nullptr);
  }

  __device__ void bring() {
    if (streams) {
      bring_both();
      return;
    }
    const bool deltas = args.lora.slice_count > 0, inside = args.ready != nullptr;
    // Of a shrink in front the table's latency is over before the last stages are free.
    const int first = !deltas ? steps : inside ? early() : min(stages, steps);
    for (int step = 0; step < first; ++step) bring_weights(step);
    if (!deltas) {
      wait_for_front();
      return;
    }
    arrange();
    if (!inside) {
      find_steps();
      for (int step = first; step < steps; ++step) bring_weights(step);
      wait_for_front();
      bring_deltas(nullptr);
      return;
    }
    bring_factors(0);
    find_steps();
    // No stage is free before x is there.
    wait_for_front();
    const ShrunkTurn turn(args);
    const uint4 extents = turn.extents();
    for (int step = first; step < steps; ++step) bring_weights(step);
    for (int pass = 1; pass < passes(); ++pass) bring_factors(pass);
    bring_deltas(&turn);
    const int block = blockIdx.y * parts + part;
    if (block == 0 && thread == 0) turn.announce(args.base.tokens * kMaxSlices * parts, shared.present.widest);
    if (thread == 0) shared.half = turn.half;
    turn.clear(extents, block * kHalf + thread, gridDim.y * parts * kHalf);
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

  __device__ __forceinline__ void multiply_weights(float (&acc)[kCols / 2], int from, int to) {
    int before = 0;
    for (int step = from; step < to; ++step) {
      if (!streams) barrier_wait(&shared.x_full[step], 0);
      barrier_wait(&shared.full[stage], parity);
      products_begin();
      const unsigned long long left = streams ? operand(at_stage() + kStageBytes) : x_operand(step);
      const unsigned long long right = operand(at_stage());
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) GroupProduct<Element, kCols>::run(acc, left + 2 * i, right + 2 * i);
      products_commit();
      if (step > from) {
        products_wait<1>();
        release(before);
      }
      before = stage;
      next_stage();
    }
    products_wait<0>();
    settle(acc);
    if (to > from) release(before);
  }

  // What eight rows of A each belong to, of a pass; -1: nothing; and this lane's first of them.
  struct Places {
    int entry[kPass / 8], rank[kPass / 8];
  };
  __device__ __forceinline__ Places places(int pass) const {
    const int first = factor_share(0) + pass * kPass, end = factor_share(1);
    Places of;
#pragma unroll
    for (int j = 0; j < kPass / 8; ++j) {
      of.entry[j] = first + j * 8 < end ? shared.present.entry_of(first + j * 8) : -1;
      of.rank[j] = of.entry[j] < 0 ? 0 : first + j * 8 - shared.present.start[of.entry[j]] + lane % 4 * 2;
    }
    return of;
  }

  // This part's sums of a pass of rows of A, for the blocks that await them.
  __device__ __forceinline__ void multiply_factors(const Places& of, const ShrunkTurn& turn) {
    float sum[kPass / 2] = {};
    for (int step = 0; step < steps; step += kPassSteps) {
      const int upto = min(step + kPassSteps, steps);
      for (int at = step; at < upto; ++at) barrier_wait(&shared.x_full[at], 0);
      barrier_wait(&shared.full[stage], parity);
      async_proxy_fence();
      products_begin();
      for (int at = step; at < upto; ++at) {
        const unsigned long long left = x_operand(at), right = operand(at_stage() + (at - step) * kPassBytes);
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) GroupProduct<Element, kPass>::run(sum, left + 2 * i, right + 2 * i);
      }
      products_commit();
      products_wait<0>();
      settle(sum);
      release(stage);
      next_stage();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + lane / 4 + half * 8, item = row < args.base.tokens ? shared.present.item[row] : -1;
      if (item < 0) continue;
#pragma unroll
      for (int j = 0; j < kPass / 8; ++j) {
        if (of.entry[j] < 0 || of.entry[j] / kMaxSlices != item) continue;
        store_relaxed(turn.at(row, of.entry[j] % kMaxSlices, part, parts) + of.rank[j],
                      as_flag(sum[4 * j + 2 * half]), as_flag(sum[4 * j + 2 * half + 1]));
      }
    }
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
    if (!streams) wait_for_front();
    if (threadIdx.x == 0 && !streams) {
      for (int step = 0; step < steps; ++step) {
        barrier_expect(&shared.x_full[step], x_bytes);
        load_box(x_shared + step * x_bytes, &map.x, &shared.x_full[step], (first_step + step) * kDepth, 0);
      }
    }
    __syncwarp();
    if (args.lora.slice_count == 0) {
      multiply_weights(acc, 0, steps);
      return;
    }
    if (args.ready == nullptr) {
      named_barrier(kArranged, kThreads);
      multiply_weights(acc, 0, steps);
    } else {
      const ShrunkTurn turn(args);
      named_barrier(kArranged, kThreads);
      const Places first = places(0);  // while x comes
      multiply_weights(acc, 0, early());
      multiply_factors(first, turn);
      multiply_weights(acc, early(), steps);
      for (int pass = 1; pass < passes(); ++pass) multiply_factors(places(pass), turn);
    }
    named_barrier(kFound, kThreads);
    multiply_deltas(acc);
  }

  // The sums of all parts; a block writes its share of the outputs.
  __device__ void meet(const float (&acc)[kCols / 2]) {
    const unsigned sums = x_shared;  // x and the weights have been read by all
    __syncthreads();
    const bool leaves = threadIdx.x == kHalf && args.ready != nullptr;
    unsigned left = 0;
    if (leaves) left = ShrunkTurn::leave(args);
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
    if (leaves && left + 1 == gridDim.y * parts) ShrunkTurn::end(args, shared.half);
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
      for (int i = 0; i < steps && !streams; ++i) barrier_init(&shared.x_full[i], 1);
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
    if (streams) wait_for_front();
    meet(acc);
  }
};

#endif

template <class Config, int kThreads>
__device__ __forceinline__ void linear_cluster(const DenseClusterArgs& args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = DenseCluster<typename Config::Element, kThreads>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ typename Kernel::Shared shared;
  // The layouts of wgmma want memory at multiples of 1024 bytes; the host adds room for it.
  Kernel(args, shared, (shared_address(dynamic) + 1023) / 1024 * 1024).run();
#endif
}

}  // namespace amphora
