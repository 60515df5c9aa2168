// The warps that bring operands to the rings of a prefill block. One brings the weights of the base. Of
// three others the first brings the base's tokens, the second looks for the work's deltas meanwhile, and all
// bring both operands of the deltas.
//
// Blocks of a cluster are at the same tile, each with units of its own, and each brings a share of the tokens
// to all. So a place in the ring of tokens is free when it is in every block, and their stages, deltas too,
// are in step: the same tile has the same deltas.
//
// Nothing here can wait for ever. Within a block, let positions count the stages of all works, base and deltas,
// in order; a stage is brought to position p of a ring when p - n has been released (n stages in the ring, for
// tokens by every block of the cluster), and released in order once both operands of it are there. The warp
// that looks is held up at kBegun, until all have begun the work, which they do when they have brought what
// is in front. The first is held up at kFound in front of the work's last tokens, where the warp of the
// weights comes when it has brought all of the base's, for which releases of the stages in front suffice;
// and both at kDelta, for a place of either ring, when all of the work's base is brought. Of the blocks of
// a cluster the one that is behind waits for nothing that the others have not yet done.
//
// A barrier tells neighbouring phases apart and no others, so a warp waits for a phase only if the next
// cannot end without it. Of the three that bring tokens one waits for the ring; the others, which may be far
// from it, meet it at a barrier of their own before they take part.
#pragma once

#include "kernels/moe_prefill_block.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Shape, bool kGateUp>
struct PrefillBring {
  using Block = PrefillBlock<Shape, kGateUp>;
  using Shared = typename Block::Shared;
  static constexpr int kRowBytes = Block::kRowBytes;
  static constexpr int kBoxRows = 16;  // of tokens

  const MoePrefillArgs& args;
  const Shared& shared;
  int thread;
  int rank;  // of the block in its cluster
  typename Block::WeightRing weights;
  typename Block::TokenRing tokens;
  // A thread copies one piece of every kEach-th row of a delta.
  static constexpr int kEach = Shape::kBring / 8, kOwn = (Shape::kMaxTokens + kEach - 1) / kEach;
  static_assert(kEach % 4 == 0, "the exchange of pieces has two forms");

  __device__ __forceinline__ bool leads() const { return thread < kWarp; }

  // Only the first warp waits: others may be far behind it.
  __device__ __forceinline__ void base_stage(const Work& work, int step, int deltas) {
    const int stage = tokens.stage;
    Barrier* full = shared.tokens_full(stage);
    // The first stage of a tile whose pairs are wanted waits for them too.
    const bool together = !kGateUp && step == 0;
    if (leads()) barrier_wait(shared.tokens_empty(stage), tokens.parity ^ 1);
    if (together) {
      named_barrier(kTile, Shape::kBring);
      copies_arrive(full);
    }
    if (leads()) {
      const int boxes = (work.count + kBoxRows - 1) / kBoxRows;
      if (thread == 0) {
        // A delta's copies may have been in this place.
        if (with_deltas() && step < Shape::kTokenStages) async_proxy_fence();
        shared.info(stage)[2] = deltas;
        // In every block of the cluster all boxes land, whoever sent them.
        barrier_expect(full, boxes * kBoxRows * kOperandRow, together ? 1 : Shape::kArrivals);
      }
      __syncwarp();
      for (int i = thread * Shape::kCluster + rank; i < boxes; i += kWarp * Shape::kCluster) {
        load_box_shared<Shape::kCluster>(shared.tokens(stage) + i * kBoxRows * kOperandRow, &args.tokens,
                                         full, step * kOperandK, work.first + i * kBoxRows);
      }
    }
    tokens.step();
    weights.step();  // which another warp brings
  }

  // What a stage has of one delta. Its tokens, in rows of the stage from the start of its first window to the
  // end of its last, and its shrunk numbers, those of the first row; and B: gate's or down's, and up's, from
  // the first number that is taken on, the bytes of a row, and how many numbers of the rank are left. Null
  // where there is none. Nothing here may be an array: one whose index is known late lies in memory.
  struct DeltaSide {
    int low, high, rows;
    const char* shrunk;
    const char* gate;
    const char* up;
    int pitch, left;
  };
  __device__ __forceinline__ DeltaSide delta_side(const Work& work, const Delta& delta, int index) const {
    DeltaSide side{0, 0, 0, nullptr, nullptr, nullptr, 0, 0};
    if (index >= delta.steps) return side;
    const auto [part, step] = delta_step(delta, index);
    const int start = windows_start(delta.low), size = 8 * (part == 0 ? delta.rank[0] : delta.rank[1]);
    side.low = delta.low - start;
    side.high = delta.high - start;
    side.rows = min(windows_end(delta.high) - start, Shape::kMaxTokens);
    side.shrunk = static_cast<const char*>(args.shrunk) +
                  (static_cast<long long>(work.first) + start) * kShrunkRow +
                  (part * kDeltaSteps + step) * kShrunkStep;
    side.pitch = size * kRowBytes;
    side.left = size - step * kDeltaRank;
    // A unit's first row of a block.
    const char* arena = static_cast<const char*>(args.arena) + step * kDeltaRank * kRowBytes +
                        static_cast<long long>(work.unit * (kGateUp ? 32 : 64)) * side.pitch;
    if (delta.shared || part == 0) side.gate = arena + static_cast<long long>(delta.b[0]) * kArenaUnit;
    if (delta.shared || part == 1) side.up = arena + static_cast<long long>(delta.b[1]) * kArenaUnit;
    return side;
  }

  // A step of each of two deltas side by side: B in the halves of the weights' rows; the shrunk numbers in
  // the tokens' rows, those of the first's windows, then of the second's, zeros for tokens of others.
  __device__ __forceinline__ void delta_stage(const Work& work, const Delta& first, int first_step,
                                              const Delta& second, int second_step) {
    const int stage = tokens.stage;
    const DeltaSide one = delta_side(work, first, first_step), two = delta_side(work, second, second_step);
    if (leads()) barrier_wait(shared.tokens_empty(stage), tokens.parity ^ 1);
    named_barrier(kDelta, kAll);
    if (thread == 0) {
      int* info = shared.info(stage);
      info[0] = one.rows == 0 ? 0 : first.low | first.high << 16;
      info[1] = two.rows == 0 ? 0 : second.low | second.high << 16;
      barrier_arrive(shared.tokens_full(stage));
      barrier_arrive(shared.weights_full(weights.stage));  // B counts with the tokens
    }
    const bool left = thread % 8 < 4;
    if (left ? one.rows != 0 : two.rows != 0) {
      copy_factor(work, left ? one.gate : two.gate, left ? one.up : two.up, left ? one.pitch : two.pitch,
                  left ? one.left : two.left);
    }
    copy_shrunk(shared.tokens(stage), one, 0);
    copy_shrunk(shared.tokens(stage), two, one.rows);
    copies_arrive(shared.tokens_full(stage));
    tokens.step();
    weights.step();
  }

  // To rows of a stage from `row` on, a multiple of 8.
  __device__ __forceinline__ void copy_shrunk(unsigned to, const DeltaSide& side, int row) const {
    const int own = thread / 8, piece = thread % 8;
    const unsigned start = to + (row + own) * kOperandRow;
    const unsigned even = start + ((piece ^ (own & 7)) << 4);
    const unsigned odd = start + ((piece ^ ((own + kEach) & 7)) << 4);
    const char* from = side.shrunk + own * kShrunkRow + piece * 16;
    const unsigned tokens = side.high - side.low;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (own + i * kEach >= side.rows) break;
      const bool there = static_cast<unsigned>(own + i * kEach - side.low) < tokens;
      copy16((i % 2 ? odd : even) + i * kEach * kOperandRow, from + i * kEach * kShrunkRow, there);
    }
  }

  // A thread's pieces of B of a delta. Warps take eights of rows in turn, which are of one block each; a
  // row's four pieces lie in the half of its bytes that `thread` says.
  __device__ __forceinline__ void copy_factor(const Work& work, const char* gate, const char* up, int pitch,
                                              int left) const {
    constexpr int kWarps = Shape::kBring / kWarp, kEights = Shape::kUnits * 8;
    static_assert(kWarps % 2 == 1, "a warp's eights are gates and ups in turn");
    const int piece = thread % 8, quarter = thread % kWarp / 8, warp = thread / kWarp;
    const bool in_rank = piece % 4 * 8 < left;
    const unsigned to = shared.weights(weights.stage) + warp * 8 * kOperandRow + quarter * kOperandRow;
    const unsigned low = to + ((piece ^ quarter) << 4);
    const unsigned high = to + 4 * kOperandRow + ((piece ^ (quarter + 4)) << 4);
    // Rows that follow each other in an eight of down are neighbours but one, where it has whole sixteens.
    const bool pairs = !kGateUp && args.hidden % 16 == 0;
    const int step = pairs ? 2 * pitch : pitch, bytes = piece % 4 * 16 + quarter * step;
    // Rows of a block that there are from the unit's first on, and those that the stage holds.
    const int end = (kGateUp ? args.inner : args.hidden) - work.unit * (kGateUp ? 32 : 64);
    const int eights = work.units * 8;
#pragma unroll
    for (int i = 0; i < (kEights + kWarps - 1) / kWarps; ++i) {
      const int eight = warp + i * kWarps;
      if (eight >= eights) break;
      const char* block = kGateUp && eight % 2 ? up : gate;
      const int row = pairs ? eight / 2 * 16 + eight % 2 : (kGateUp ? eight / 2 : eight) * 8;
      const bool there = in_rank && row < end && block != nullptr;
      const char* from = there ? block + bytes + row * pitch : static_cast<const char*>(args.arena);
      copy16(low + i * kWarps * 8 * kOperandRow, from, there);
      copy16(high + i * kWarps * 8 * kOperandRow, there ? from + 4 * step : from, there);
    }
  }

  __device__ __forceinline__ bool with_deltas() const { return args.lora_tile_count > 0; }
  // Named barriers: all have begun a work, for the warp that looks; it has the work's deltas, for them; the
  // threads that bring tokens have a place for a tile; and all have one for a step of a delta.
  static constexpr int kBegun = 1, kFound = 2, kTile = 3, kDelta = 4, kAll = Shape::kBring + kWarp;
  __device__ __forceinline__ Walk<Shape::kMaxTokens> walk(const ExpertTables& tables) const {
    return Walk<Shape::kMaxTokens>(tables, prefill_units<kGateUp>(args), Shape::kCluster * Shape::kUnits,
                                   Shape::kCluster, blockIdx.x / Shape::kCluster,
                                   gridDim.x / Shape::kCluster);
  }
  // Whether two works have one tile of tokens, hence the same deltas: most neighbours do.
  static __device__ __forceinline__ bool same_tokens(const Work& one, const Work& other) {
    return one.expert == other.expert && one.first == other.first;
  }
  // The block's share of a work: the blocks of a cluster divide the units.
  __device__ __forceinline__ bool next(Walk<Shape::kMaxTokens>& walk, Work& work) const {
    if (!walk.next(work)) return false;
    const int each = (work.units + Shape::kCluster - 1) / Shape::kCluster, first = rank * each;
    work.unit += first;
    work.units = max(0, min(each, work.units - first));
    return true;
  }

  // The warp that looks for deltas, which has nothing to do for the base. The list is free when all others
  // have begun the work.
  __device__ __forceinline__ bool looks() const { return thread / kWarp == 1; }
  __device__ __forceinline__ DeltaCount look_for(const ExpertTables& tables, const Work& work) const {
    named_barrier(kBegun, kAll);
    const int lane = thread % kWarp;
    const DeltaCount found = find_deltas<Shape::kMaxTokens, kWarp>(
        args, tables, work, lane, shared.deltas(), shared.scratch(), [] { __syncwarp(); });
    if (lane == 0) {
      shared.scratch()[1] = found.deltas;
      shared.scratch()[2] = found.stages;
    }
    named_barrier_arrive(kFound, kAll);
    return found;
  }

  // The threads that bring tokens and deltas.
  __device__ void run(const ExpertTables& tables) {
    const int steps = Block::steps(args);
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0};
    DeltaCount found{0, 0};
    int number = 0;
    wait_for_front();
    for (; next(walk, work); ++number) {
      const bool fresh = !same_tokens(work, before);
      before = work;
      if (leads() || !kGateUp) wait_for_work(number);
      if (thread == 0) put_work(number, work);
      if constexpr (!kGateUp) {
        const unsigned index = shared_address(shared.index(number & 1));
        for (int n = thread; n < work.count; n += Shape::kBring) copy4(index + 4 * n, args.perm + work.first + n);
      }
      const bool look = with_deltas() && fresh;
      if (look && !looks()) named_barrier_arrive(kBegun, kAll);
      int step = 0;
      if (steps > 1) base_stage(work, step++, 0);  // which may wait for all three warps
      if (look && looks()) found = look_for(tables, work);
      for (; step + 1 < steps; ++step) base_stage(work, step, 0);
      if (look && !looks()) {
        named_barrier(kFound, kAll);
        found = DeltaCount{shared.scratch()[1], shared.scratch()[2]};
      }
      base_stage(work, steps - 1, found.stages);
      const Delta none{};
      for (int i = 0; i < found.deltas; i += 2) {
        const Delta first = shared.deltas()[i];
        const Delta second = i + 1 < found.deltas ? shared.deltas()[i + 1] : none;
        const int ones = first.steps, twos = second.steps;
        if (side_by_side<Shape::kMaxTokens>(first, second)) {
          for (int step = 0; step < max(ones, twos); ++step) delta_stage(work, first, step, second, step);
        } else {
          for (int step = 0; step < ones; ++step) delta_stage(work, first, step, none, 0);
          for (int step = 0; step < twos; ++step) delta_stage(work, second, step, none, 0);
        }
      }
    }
    // A work without tokens ends it.
    if (!leads()) return;
    wait_for_work(number);
    barrier_wait(shared.tokens_empty(tokens.stage), tokens.parity ^ 1);
    if (thread == 0) {
      put_work(number, Work{0, 0, 0, 0, 0});
      barrier_expect(shared.tokens_full(tokens.stage), 0, Shape::kArrivals);
    }
  }

  // The warp that brings weights.
  __device__ void run_weights(const ExpertTables& tables) {
    const int steps = Block::steps(args), lane = threadIdx.x % kWarp;
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0};
    int stages = 0;  // of deltas
    while (next(walk, work)) {
      const bool look = with_deltas() && !same_tokens(work, before);
      if (look) named_barrier_arrive(kBegun, kAll);
      const int ahead = min(steps, Shape::kWeightStages / 2);
      for (int step = 0; step < ahead; ++step) weight_stage(work, step, lane);
      // Weights are older than the kernel in front.
      if (before.expert < 0) wait_for_front();
      before = work;
      for (int step = ahead; step < steps; ++step) weight_stage(work, step, lane);
      if (look) {
        named_barrier(kFound, kAll);
        stages = shared.scratch()[2];
      }
      // The others fill these.
      for (int step = 0; step < stages; ++step) {
        barrier_wait(shared.weights_empty(weights.stage), weights.parity ^ 1);
        named_barrier(kDelta, kAll);
        weights.step();
      }
    }
  }

  __device__ __forceinline__ void weight_stage(const Work& work, int step, int lane) {
    const int stage = weights.stage;
    barrier_wait(shared.weights_empty(stage), weights.parity ^ 1);
    if (lane == 0) {
      // A delta's copies may have been in this place.
      if (with_deltas() && step < Shape::kWeightStages) async_proxy_fence();
      Barrier* full = shared.weights_full(stage);
      barrier_expect(full, work.units * kGroupBytes);
      for (int i = 0; i < work.units; ++i) {
        const unsigned to = shared.weights(stage) + i * kGroupBytes;
        if constexpr (kGateUp) {
          load_box(to, &args.map, full, step * kOperandK, 0, 0, (work.unit + i) * 4, work.expert);
        } else {
          const bool pairs = args.hidden % 16 == 0;
          load_box(to, &args.map, full, step * kOperandK, 0, pairs ? 0 : (work.unit + i) * 8,
                   pairs ? (work.unit + i) * 4 : 0, work.expert);
        }
      }
    }
    __syncwarp();
    weights.step();
  }

  // Those that multiply have read what lay in the place of work `number`: the one two before.
  __device__ __forceinline__ void wait_for_work(int number) {
    if (number >= 2) barrier_wait(shared.done(number & 1), (number / 2 - 1) & 1);
  }
  __device__ __forceinline__ void put_work(int number, const Work& work) {
    volatile Work* to = shared.work(number & 1);
    to->expert = work.expert;
    to->unit = work.unit;
    to->units = work.units;
    to->first = work.first;
    to->count = work.count;
  }
};

#endif

}  // namespace amphora
