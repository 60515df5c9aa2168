// out = x·Wᵀ + bias, plain and with deltas, for at most 16 rows: the weight is read once, as fast as
// memory gives it, and everything else hides behind that stream.
//
// Grid: at most a block for each multiprocessor, and at most n; block b of G has the outputs
// [n·b/G, n·(b+1)/G), 16 at a time. Eight product warps share k in fixed parts; a warp streams its part of a
// tile's rows through a ring of its own (lines of 64 elements, cp.async), multiplies it with its part of x,
// which lies in shared memory, and leaves a partial sum. Eight finishing warps add those up in the order of
// the product warps, so that an output's bits depend on its rows of x and W alone, and store. Rows of W are
// the 16-row operand, 8 rows of x the 8-column one. No barrier spans the block inside the loop.
//
// Deltas are the finishing warps' work, beside the stream. The rows of A of the adapters present, counted
// through, are shared out like the outputs; the warps share k, and the first eight rows of a block are in
// their registers before x is there. Their products are the shrunk rows, scaled, f32 in the workspace. Blocks
// count in `ready[0]` when theirs are stored, and wait for all while the stream goes on. Then shrunk·Bᵀ is
// added in f32 to the sums of rows that have an adapter: a row without keeps the base's bits, and an
// adapter's row does not show who else is there. All blocks run at once, so the count is always reached;
// the last block that has seen it clears it.
//
// Shared memory, in order: the rings, partial sums, x, rows of B; sizes as in the host's heuristics.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

// kGroups · 8: most rows of x.
template <class Element, int kThreads, int kGroups>
struct Stream {
  static constexpr int kProducts = 8;                   // warps over k
  static constexpr int kFinishers = kThreads - kProducts * kWarp;
  static constexpr int kTokens = 8 * kGroups;
  static constexpr int kRows = 16;                      // rows of W, or of A, of a tile
  static constexpr int kLine = 64;                      // elements of k in a stage
  static constexpr int kLineBytes = kLine * 2;
  static constexpr int kStages = kGroups == 1 ? 6 : 4;
  // Stages that are on their way before x. What the adapters need has a longer way, behind the same queue.
  static constexpr int kEarly = kGroups == 1 ? 4 : 3, kEarlyDeltas = 1;
  static_assert(kEarly < kStages, "a stage is free for the line behind");
  static constexpr int kStageBytes = kRows * kLineBytes;
  static constexpr int kRingBytes = kProducts * kStages * kStageBytes;
  static constexpr int kBuffers = kGroups == 1 ? 3 : 2; // partial sums on their way
  static constexpr int kPitch = 20;                     // of a token's 16 sums, free of bank conflicts
  static constexpr int kPartial = kGroups * 8 * kPitch; // of a warp
  static constexpr int kPartialBytes = kBuffers * kProducts * kPartial * 4;
  static constexpr int kStaged = 2048;                  // numbers of shrunk rows, if they are no more
  static constexpr int kItems = kTokens;                // most adapters
  static constexpr int kReady = 1, kFull = 2, kEmpty = kFull + kBuffers, kFinish = kEmpty + kBuffers;
  static constexpr int kFactorRows = 8;                 // rows of A at a time
  static constexpr int kGranule = 32;                   // elements of k that a warp's load covers in them
  static constexpr int kAhead = 16;                     // such loads in registers
  static_assert(kProducts * 16 * kFactorRows <= kStaged, "sums of rows of A");
  static_assert(kFinishers == kProducts * kWarp, "as many finishing warps as product warps");
  static_assert(kFinishers >= kRows * kTokens, "a finishing thread for each output of a tile");

  // The adapters present, in the order of their first rows.
  struct Shared {
    int count;
    int widest;                            // the largest rank
    unsigned rows[kItems];                 // a bit for each row of x
    int item[kTokens];                     // of each row; -1: none
    alignas(16) LoraRow entry[kItems * kMaxSlices];  // by adapter and slice
    int start[kItems * kMaxSlices + 1];    // rows of A in front, counted through
    // Sums of the warps while there are rows of A; then shrunk rows.
    alignas(16) float staged[kStaged];
  };

  const DenseArgs& args;
  Shared& shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int lines, x_pitch;
  const unsigned ring, x_shared, outer;
  float* const partials;
  const int first_row, end_row;  // of W
  const int tiles;

  __device__ Stream(const DenseArgs& args, Shared& shared, unsigned char* dynamic)
      : args(args),
        shared(shared),
        lines((args.base.k + kLine - 1) / kLine),
        // Half a line more, so that neighbouring rows lie in other banks.
        x_pitch(lines * kLineBytes + 64),
        ring(shared_address(dynamic) + warp * kStages * kStageBytes),
        x_shared(shared_address(dynamic) + kRingBytes + kPartialBytes),
        outer(x_shared + args.base.tokens * x_pitch),
        partials(reinterpret_cast<float*>(dynamic + kRingBytes)),
        first_row(share(args.base.n, 0)),
        end_row(share(args.base.n, 1)),
        tiles((end_row - first_row + kRows - 1) / kRows) {}

  __device__ static int share(int rows, int side) {
    return static_cast<int>(static_cast<long long>(rows) * (blockIdx.x + side) / gridDim.x);
  }

  // Rows of A of all adapters.
  __device__ __forceinline__ int factor_rows() const { return shared.start[shared.count * kMaxSlices]; }

  // The entry that row `row` of all rows of A belongs to.
  __device__ __forceinline__ int entry_of(int row) const {
    int low = 0, high = shared.count * kMaxSlices;  // start[low] <= row < start[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (shared.start[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  __device__ __forceinline__ float* partial(int number) const {
    return partials + number % kBuffers * (kProducts * kPartial);
  }

  // ---- Product warps.

  // The rows of a tile that this lane copies, four apart; those that are not there become zeros.
  struct Source {
    const Element* row[4];
    unsigned there;
  };
  __device__ __forceinline__ void find_rows(Source& source, int number) const {
    source.there = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + number * kRows + i * 4 + lane / 8;
      source.row[i] = static_cast<const Element*>(args.base.weight) +
                      (row < end_row ? static_cast<long long>(row) * args.base.k : 0);
      source.there |= (row < end_row ? 1u : 0u) << i;
    }
  }

  __device__ __forceinline__ void copy_line(const Source& source, int line, int stage) const {
    const int octet = lane % 8, at = line * kLine + octet * kOctet;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i * 4 + lane / 8;
      const bool there = (source.there >> i & 1) && at < args.base.k;
      // Odd rows keep the halves of a line swapped: reads of two rows then touch all banks.
      const unsigned to = ring + stage * kStageBytes + r * kLineBytes + ((octet ^ (r & 1) << 2) * 16);
      copy_16(to, source.row[i] + (there ? at : 0), there ? 16 : 0);
    }
  }

  // This warp's part of x, through registers: copies beside those of the ring would wait for them.
  __device__ __forceinline__ void copy_x(int begin, int end) const {
    constexpr int kAtOnce = 8;
    const Element* x = static_cast<const Element*>(args.base.x);
    const int octets = (end - begin) * (kLine / kOctet), first = begin * (kLine / kOctet);
    const int all = args.base.tokens * octets;
    for (int base = lane; base < all; base += kAtOnce * kWarp) {
      uint4 octet[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kWarp, row = at / octets, column = first + at - row * octets;
        octet[i] = make_uint4(0, 0, 0, 0);
        if (at < all && column * kOctet < args.base.k) {
          octet[i] = load_fresh(x + row * args.base.x_pitch + column * kOctet);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kWarp, row = at / octets, column = first + at - row * octets;
        if (at >= all) continue;
        const unsigned to = x_shared + row * x_pitch + column * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(octet[i].x), "r"(octet[i].y),
                     "r"(octet[i].z), "r"(octet[i].w)
                     : "memory");
      }
    }
    __syncwarp();
  }

  __device__ void multiply() {
    const int begin = lines * warp / kProducts, end = lines * (warp + 1) / kProducts;
    Source source;
    find_rows(source, 0);
    int next_line = begin, next_tile = 0, next_stage = 0, stage = 0;
    const auto issue = [&]() {
      if (next_line == end) {
        next_line = begin;
        if (++next_tile < tiles) find_rows(source, next_tile);
      }
      if (begin < end && next_tile < tiles) copy_line(source, next_line++, next_stage);
      if (++next_stage == kStages) next_stage = 0;
      commit_copies();
    };
    const int early = args.lora.slice_count > 0 ? kEarlyDeltas : kEarly;
    for (int i = 0; i < early; ++i) issue();
    wait_for_front();
    copy_x(begin, end);
    for (int i = early; i < kStages - 1; ++i) issue();
    if (args.lora.slice_count > 0) named_barrier_arrive(kReady, kThreads);
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
      float sum[kGroups][2][4];  // two chains, added at the end
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[q][0][j] = sum[q][1][j] = 0.f;
      }
#pragma unroll 1
      for (int line = begin; line < end; ++line) {
        wait_copies<kStages - 2>();
        __syncwarp();  // every lane's copies have landed, and the stage before this one has been read
        issue();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned octet = (half * 4 + quad) ^ (group & 1) << 2;
          const unsigned from = ring + stage * kStageBytes + group * kLineBytes + octet * 16;
          const uint4 u = load_shared(from), v = load_shared(from + 8 * kLineBytes);
#pragma unroll
          for (int q = 0; q < kGroups; ++q) {
            // Columns beyond the rows of x are nobody's: any row will do.
            const int token = min(q * 8 + group, args.base.tokens - 1);
            const uint4 x = load_shared(x_shared + token * x_pitch + line * kLineBytes + half * 64 + quad * 16);
            mma_k16<Element>(sum[q][0], u.x, v.x, u.y, v.y, x.x, x.y);
            mma_k16<Element>(sum[q][1], u.z, v.z, u.w, v.w, x.z, x.w);
          }
        }
        if (++stage == kStages) stage = 0;
      }
      if (number >= kBuffers) named_barrier(kEmpty + number % kBuffers, kThreads);
      float* own = partial(number) + warp * kPartial;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float* to = own + (q * 8 + quad * 2) * kPitch + group;
        to[0] = sum[q][0][0] + sum[q][1][0];
        to[kPitch] = sum[q][0][1] + sum[q][1][1];
        to[8] = sum[q][0][2] + sum[q][1][2];
        to[kPitch + 8] = sum[q][0][3] + sum[q][1][3];
      }
      named_barrier_arrive(kFull + number % kBuffers, kThreads);
    }
  }

  // ---- Finishing warps: a thread has one output of a tile.

  // Finds the adapters present, each once, in the order of their first rows. The plan and the table alone
  // are read.
  __device__ void arrange(int thread) {
    const int token = thread / kMaxSlices, slice = thread % kMaxSlices;
    const int slot = token < args.base.tokens ? args.slot[token] : -1;
    LoraRow lora{0, 0, 0, 0.f};
    if (slot >= 0 && slice < args.lora.slice_count) lora = lora_row(args.lora, slot, slice, 0);
    if (thread < kWarp) {
      const int own = lane < args.base.tokens ? args.slot[lane] : -1;
      const unsigned same = __match_any_sync(kFullWarp, own);
      const int first = __ffs(same) - 1;
      const unsigned firsts = __ballot_sync(kFullWarp, own >= 0 && first == lane);
      const int item = __popc(firsts & ((1u << first) - 1));
      if (lane < kTokens) shared.item[lane] = own >= 0 ? item : -1;
      if (own >= 0 && first == lane) shared.rows[item] = same;
      if (lane == 0) shared.count = __popc(firsts);
    }
    named_barrier(kFinish, kFinishers);
    const int entries = shared.count * kMaxSlices;
    if (slot >= 0) {
      const int item = shared.item[token];
      if (__ffs(shared.rows[item]) - 1 == token) shared.entry[item * kMaxSlices + slice] = lora;
    }
    named_barrier(kFinish, kFinishers);
    if (thread < kWarp) {
      int front = 0, widest = 0;
      for (int base = 0; base < entries; base += kWarp) {
        const int entry = base + lane;
        const int rank = entry < entries ? static_cast<int>(shared.entry[entry].rank) : 0;
        widest = max(widest, rank);
        const int upto = warp_inclusive_sum(rank, lane);
        if (entry < entries) shared.start[entry] = front + upto - rank;
        front += __shfl_sync(kFullWarp, upto, kWarp - 1);
      }
      widest = warp_reduce(widest, Max{});
      if (lane == 0) {
        shared.start[entries] = front;
        shared.widest = widest;
      }
    }
    named_barrier(kFinish, kFinishers);
  }

  // Rows of B of this block's outputs, of the first slice that each belongs to: into shared memory if there
  // is room for all, else towards this multiprocessor.
  __device__ bool bring_outer(int thread) const {
    const int rows = end_row - first_row, octets = shared.widest / kOctet, all = shared.count * rows * octets;
    const bool fits = all * 16 <= args.factor_bytes;
    for (int i = thread; i < all; i += kFinishers) {
      const int octet = i % octets, row = i / octets % rows, item = i / octets / rows;
      const int n = first_row + row, slice = first_slice(n);
      if (slice < 0) continue;
      const LoraRow lora = shared.entry[item * kMaxSlices + slice];
      if (octet * kOctet >= static_cast<int>(lora.rank)) continue;
      const Element* from = factor_row(lora, slice_element(args.lora.slices[slice], n)) + octet * kOctet;
      if (fits) {
        copy_16(outer + i * 16, from, 16);
      } else if (octet % 8 == 0) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
      }
    }
    commit_copies();
    return fits;
  }

  // This lane's part of eight rows of A from `first` on, of the granules [begin, end) of its warp.
  __device__ __forceinline__ void load_factors(uint4 (&factor)[kAhead], int first, int end_of_rows, int begin,
                                               int end) const {
    const int row = first + group;
    const bool there = row < end_of_rows;
    const int entry = there ? entry_of(row) : 0;
    const Element* from = lora_block<Element>(args.lora, shared.entry[entry].a) +
                          static_cast<long long>(there ? row - shared.start[entry] : 0) * args.base.k;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = (begin + i) * kGranule + quad * kOctet;
      factor[i] = there && begin + i < end && at < args.base.k ? load_fresh(from + at) : make_uint4(0, 0, 0, 0);
    }
  }

  // The shrunk rows of this block's rows of A; rows of B are brought behind the first of A. Whether they fit.
  __device__ bool shrink(int thread) {
    const int all = factor_rows(), first_of = share(all, 0), end_of = share(all, 1);
    const int granules = (args.base.k + kGranule - 1) / kGranule, own = thread / kWarp;
    const int begin = granules * own / kProducts, end = granules * (own + 1) / kProducts;
    uint4 factor[kAhead];
    load_factors(factor, first_of, end_of, begin, end);
    const bool fits = bring_outer(thread);
    named_barrier(kReady, kThreads);  // x
    for (int first = first_of; first < end_of; first += kFactorRows) {
      float sum[2][4] = {};
      for (int at = begin; at < end; at += kAhead) {
        if (at != begin) load_factors(factor, first, end_of, at, end);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (at + i >= end) break;
          uint4 x[2];
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const int token = min(q * 8 + group, args.base.tokens - 1);
            x[q] = make_uint4(0, 0, 0, 0);
            if (q < kGroups) x[q] = load_shared(x_shared + token * x_pitch + (at + i) * kGranule * 2 + quad * 16);
          }
          mma_k16<Element>(sum[0], x[0].x, x[1].x, x[0].y, x[1].y, factor[i].x, factor[i].y);
          mma_k16<Element>(sum[1], x[0].z, x[1].z, x[0].w, x[1].w, factor[i].z, factor[i].w);
        }
      }
      if (first + kFactorRows < end_of) load_factors(factor, first + kFactorRows, end_of, begin, end);
      float* to = shared.staged + own * (16 * kFactorRows) + group * kFactorRows + quad * 2;
      to[0] = sum[0][0] + sum[1][0];
      to[1] = sum[0][1] + sum[1][1];
      to[8 * kFactorRows] = sum[0][2] + sum[1][2];
      to[8 * kFactorRows + 1] = sum[0][3] + sum[1][3];
      named_barrier(kFinish, kFinishers);
      const int token = thread / kFactorRows, row = first + thread % kFactorRows;
      if (token < args.base.tokens && row < end_of) {
        const int entry = entry_of(row);
        if (shared.rows[entry / kMaxSlices] >> token & 1) {
          float value = 0.f;
#pragma unroll
          for (int w = 0; w < kProducts; ++w) value += shared.staged[w * (16 * kFactorRows) + thread];
          shrunk_row(args.lora, token, entry % kMaxSlices)[row - shared.start[entry]] =
              value * shared.entry[entry].scale;
        }
      }
      named_barrier(kFinish, kFinishers);  // all have been stored, and the sums have been read
    }
    if (first_of < end_of && thread == 0) add_release(args.ready, 1);
    return fits;
  }

  // The sum of tile `number`, in the order of the product warps.
  __device__ __forceinline__ float take(int number, int thread) {
    named_barrier(kFull + number % kBuffers, kThreads);
    float sum = 0.f;
    if (thread < kRows * kTokens) {
      const float* from = partial(number) + thread / kRows * kPitch + thread % kRows;
#pragma unroll
      for (int w = 0; w < kProducts; ++w) sum += from[w * kPartial];
    }
    if (number + kBuffers < tiles) named_barrier_arrive(kEmpty + number % kBuffers, kThreads);
    return sum;
  }

  // Waits for the shrunk rows of all blocks, and stages what this block needs of them if it is not much.
  // The widest rank, or 0 if they are not staged.
  __device__ int await_shrunk(int rows, int thread) {
    if (thread == 0) {
      const unsigned expected = min(rows, static_cast<int>(gridDim.x));
      while (load_acquire(args.ready) < expected) {
      }
    }
    wait_copies<0>();  // rows of B
    named_barrier(kFinish, kFinishers);
    if (thread == 0 && atomicAdd(args.ready + 1, 1u) + 1 == gridDim.x) {
      // Every block has seen the count, and those of the next kernel begin to count behind this one.
      args.ready[0] = 0;
      args.ready[1] = 0;
    }
    const int slices = args.lora.slice_count, widest = shared.widest;
    if (args.base.tokens * slices * widest > kStaged) return 0;
    for (int i = thread * 4; i < args.base.tokens * slices * widest; i += kFinishers * 4) {
      const int slice = i / widest % slices, row = i / widest / slices;
      // Beyond a row's own rank lies what nobody reads.
      const uint4 four = load_fresh(shrunk_row(args.lora, row, slice) + i % widest);
      *reinterpret_cast<uint4*>(&shared.staged[i]) = four;
    }
    named_barrier(kFinish, kFinishers);
    return widest;
  }

  __device__ __forceinline__ const Element* factor_row(const LoraRow& lora, int element) const {
    return lora_block<Element>(args.lora, lora.b) + static_cast<long long>(element) * lora.rank;
  }
  // The first slice that output `n` belongs to; -1: none.
  __device__ __forceinline__ int first_slice(int n) const {
    for (int slice = 0; slice < args.lora.slice_count; ++slice) {
      if (slice_element(args.lora.slices[slice], n) >= 0) return slice;
    }
    return -1;
  }

  __device__ __forceinline__ void add_octet(float& delta, const uint4& factor, const float* shrunk,
                                            bool staged) const {
    float4 low, high;
    if (staged) {
      low = *reinterpret_cast<const float4*>(shrunk);
      high = *reinterpret_cast<const float4*>(shrunk + 4);
    } else {
      low = __ldcg(reinterpret_cast<const float4*>(shrunk));
      high = __ldcg(reinterpret_cast<const float4*>(shrunk + 4));
    }
    delta = fmaf(low.x, unpack_first<Element>(factor.x), delta);
    delta = fmaf(low.y, unpack_second<Element>(factor.x), delta);
    delta = fmaf(low.z, unpack_first<Element>(factor.y), delta);
    delta = fmaf(low.w, unpack_second<Element>(factor.y), delta);
    delta = fmaf(high.x, unpack_first<Element>(factor.z), delta);
    delta = fmaf(high.y, unpack_second<Element>(factor.z), delta);
    delta = fmaf(high.z, unpack_first<Element>(factor.w), delta);
    delta = fmaf(high.w, unpack_second<Element>(factor.w), delta);
  }

  // What the adapter of row `token` adds to output `n`. `widest`: of staged shrunk rows; `fits`: whether
  // rows of B have been brought.
  __device__ __forceinline__ float delta_of(int n, int token, int widest, bool fits) const {
    const int item = shared.item[token], slices = args.lora.slice_count;
    float delta = 0.f;
    bool first = true;
    for (int slice = 0; slice < slices; ++slice) {
      const int element = slice_element(args.lora.slices[slice], n);
      if (element < 0) continue;
      const LoraRow lora = shared.entry[item * kMaxSlices + slice];
      const int rank = static_cast<int>(lora.rank);
      const float* shrunk = widest > 0 ? shared.staged + (token * slices + slice) * widest
                                       : shrunk_row(args.lora, token, slice);
      const unsigned near = outer + (item * (end_row - first_row) + n - first_row) * shared.widest * 2;
      const Element* far = factor_row(lora, element);
      const bool here = fits && first;
      first = false;
#pragma unroll 4
      for (int at = 0; at < rank; at += kOctet) {
        const uint4 octet = here ? load_shared(near + at * 2) : load_fresh(far + at);
        add_octet(delta, octet, shrunk + at, widest > 0);
      }
    }
    return delta;
  }

  __device__ void finish() {
    const int thread = threadIdx.x - kProducts * kWarp, token = thread / kRows;
    const bool deltas = args.lora.slice_count > 0;
    bool any = false, fits = false;
    if (deltas) {
      arrange(thread);
      any = factor_rows() > 0;
    }
    if (any) {
      fits = shrink(thread);
    } else if (deltas) {
      named_barrier(kReady, kThreads);
    }
    wait_for_front();
    int widest = 0;
    for (int number = 0; number < tiles; ++number) {
      const int n = first_row + number * kRows + thread % kRows;
      const bool there = n < end_row && token < args.base.tokens;
      const bool biased = there && args.base.bias != nullptr;
      const float bias = biased ? args.base.bias[n] : 0.f;  // on its way while the tile is
      float value = take(number, thread);
      if (any && number == 0) widest = await_shrunk(factor_rows(), thread);
      if (!there) continue;
      if (any && shared.item[token] >= 0) value += delta_of(n, token, widest, fits);
      if (biased) value += bias;
      const long long at = token * args.base.out_pitch + n;
      if (args.base.out_f32) {
        static_cast<float*>(args.base.out)[at] = value;
      } else {
        static_cast<Element*>(args.base.out)[at] = narrow<Element>(value);
      }
    }
  }
};

template <class Element, int kThreads, int kGroups>
__device__ __forceinline__ void stream_rows(const DenseArgs& args) {
  using S = Stream<Element, kThreads, kGroups>;
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ __align__(16) typename S::Shared shared;
  S of(args, shared, dynamic);
  let_next_begin();
  if (of.warp < S::kProducts) {
    of.multiply();
  } else {
    of.finish();
  }
}

template <class Config, int kThreads>
__device__ void linear_stream_8(const DenseArgs& args) {
  stream_rows<typename Config::Element, kThreads, 1>(args);
}

template <class Config, int kThreads>
__device__ void linear_stream_16(const DenseArgs& args) {
  stream_rows<typename Config::Element, kThreads, 2>(args);
}

}  // namespace amphora
