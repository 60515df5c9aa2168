// The warps that bring operands to the rings of a prefill block. One brings the weights of the base and B of
// the deltas. Of three others the first brings the base's tokens and the deltas' shrunk rows, the second looks
// for the work's deltas meanwhile, and the third makes zeros of rows of others' tokens among the shrunk, for
// which single warps have more time than those that multiply. Where down's shrink lies between the products the third
// lists the block's share of it before its first work, and waits for nobody then.
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
// weights comes when it has brought all of the base's, for which releases of the stages in front suffice.
// The third waits for shrunk rows that the first has asked for, and nobody waits for it but for those.
// Of the blocks of a cluster the one that is behind waits for nothing that the others have not yet done.
//
// Between blocks, where both products are made: what gate_up stores of a work waits for no other block outside the
// cluster, and is counted by a warp that waits for none before it has counted all. A work of down waits for works of
// gate_up, and with adapters for its expert's cuts of down's shrink, which wait for works of gate_up alone.
//
// A barrier tells neighbouring phases apart and no others, so a warp waits for a phase only if the next
// cannot end without it. Of the three that bring tokens one waits for the ring, and the third for shrunk rows of
// each stage that it masks; but for that the others, which may be far from it, meet it at a barrier of their own before they
// take part.
#pragma once

#include "kernels/moe_prefill_block.cuh"
#include "kernels/moe_prefill_ready.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Shape, bool kGateUp, PrefillForm kForm>
struct PrefillBring {
  using Block = PrefillBlock<Shape, kGateUp, kForm>;
  static constexpr bool kBoth = Block::kBoth, kDeltas = Block::kDeltas;
  using Shared = typename Block::Shared;
  static constexpr int kRowBytes = Block::kRowBytes;
  static constexpr int kBoxRows = 16;  // of tokens

  const MoePrefillArgs& args;
  const Shared& shared;
  int thread;
  int rank;  // of the block in its cluster
  typename Block::WeightRing weights;
  typename Block::TokenRing tokens;
  int number = 0;   // works before this one
  int counted = 0;  // of them, as stored
  // Units of gate_up to wait for: of an expert, 0 for none, and of all.
  unsigned wanted = 0, all_units = 0;
  int shrunk_expert = -1;  // whose shrunk rows are there
  unsigned landed = 0;  // parities of stages, for the warp that masks

  // Goes on where the product in front has ended.
  template <class Front>
  __device__ __forceinline__ void follow(const Front& front) {
    weights = front.weights;
    tokens = front.tokens;
    number = front.number;
    landed = front.landed;
  }
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
      if (kBoth && leads() && wanted > 0) wait_for_units(work.expert);
    }
    if (leads()) {
      const int boxes = (work.count + kBoxRows - 1) / kBoxRows;
      if (thread == 0) {
        shared.info(stage)->deltas = deltas;
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
  }

  // Stage `index` of a work's deltas. The first are listed by the warp that looks, which has time for it.
  __device__ __forceinline__ DeltaStage delta_stage(int index) const {
    if (index < Shape::kListed) return shared.delta_stages()[index];
    for (int i = 0;; i += 2) {
      const DeltaPair<Shape::kMaxTokens> pair(shared.deltas(), i, shared.scratch()[1]);
      if (index < pair.stages) return pair.template stage<kGateUp>(index);
      index -= pair.stages;
    }
  }

  // Those that multiply go on where `follow` does, but shrink first, in the ring of tokens: of every block of the
  // cluster, as each brings tokens to all.
  __device__ __forceinline__ void let_shrink() {
    const int stage = tokens.stage;
    const unsigned parity = tokens.parity;
    if (leads()) {
      wait_for_work();
      barrier_wait(shared.tokens_empty(stage), parity ^ 1);
      if (thread == 0) {
        put_work(Work{});
        barrier_expect(shared.tokens_full(stage), 0, Shape::kArrivals);
      }
      __syncwarp();
      barrier_wait(shared.tokens_empty(stage), parity);
    }
    tokens.step();
  }

  // Whether rows of others' tokens come with shrunk rows, which another warp makes zeros before the stage is full: if the
  // shape has it so, and unless all of the tile's tokens have one adapter.
  static __device__ __forceinline__ bool masked(const DeltaStage& delta, const Work& work) {
    return Shape::kMasked && delta.range[0] != work.count << 16;
  }
  // The shrunk rows of two deltas, in whole windows: those of the first, then of the second.
  __device__ __forceinline__ void shrunk_stage(const Work& work, int index) {
    const int stage = tokens.stage;
    Barrier* full = shared.tokens_full(stage);
    const DeltaStage delta = delta_stage(index);
    const int ones = windows_of(delta.range[0]), boxes = ones + windows_of(delta.range[1]);
    barrier_wait(shared.tokens_empty(stage), tokens.parity ^ 1);
    if constexpr (kBoth && !kGateUp) wait_for_shrunk(work.expert);
    if (thread == 0) {
      StageInfo* info = shared.info(stage);
      info->delta[0] = delta_info(delta.range[0], FactorInfo::of(delta.factors), 0);
      info->delta[1] = delta_info(delta.range[1], FactorInfo::of(delta.factors >> 16), ones);
      const bool masks = masked(delta, work);
      Barrier* landed = masks ? shared.landed(stage) : full;
      if (masks) {
        barrier_expect(full, 0, Shape::kArrivals - 1);
        barrier_expect(landed, boxes * kDeltaWindow * kOperandRow);
      } else {
        barrier_expect(full, boxes * kDeltaWindow * kOperandRow, Shape::kArrivals);
      }
      for (int box = rank; box < boxes; box += Shape::kCluster) {
        const bool other = box >= ones;
        const int start = windows_start((other ? delta.range[1] : delta.range[0]) & 0xffff);
        load_box_shared<Shape::kCluster>(shared.tokens(stage) + box * kDeltaWindow * kOperandRow, &args.shrunk_map,
                                         landed, other ? delta.columns >> 16 : delta.columns & 0xffff,
                                         work.first + start + (other ? box - ones : box) * kDeltaWindow);
      }
    }
    __syncwarp();
    tokens.step();
  }

  // The warp that masks shrunk rows, which has nothing to do for the base.
  __device__ __forceinline__ bool masks() const { return Shape::kMasked && thread / kWarp == 2; }
  __device__ __forceinline__ void mask_stage(const Work& work, int index) {
    const int stage = tokens.stage;
    const DeltaStage delta = delta_stage(index);
    if (!masked(delta, work)) {
      tokens.step();
      return;
    }
    barrier_wait(shared.landed(stage), landed >> stage & 1);
    landed ^= 1u << stage;
    unsigned start = shared.tokens(stage);  // of a delta's windows
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int low = delta.range[side] & 0xffff, high = delta.range[side] >> 16;
      if (high == 0) continue;
      const int from = windows_start(low), end = windows_end(high);
      clear_rows(start, 0, low - from);
      clear_rows(start, high - from, end - from);
      start += (end - from) * kOperandRow;
    }
    async_proxy_fence();
    __syncwarp();
    if (thread % kWarp == 0) barrier_arrive(shared.tokens_full(stage));
    tokens.step();
  }
  __device__ __forceinline__ void clear_rows(unsigned start, int from, int end) const {
    const int lane = thread % kWarp;
    for (int row = from + lane / 8; row < end; row += kWarp / 8) clear_shared16(start + row * kOperandRow + lane % 8 * 16);
  }

  // B of two deltas, each in a half of a stage of the weights: `rows` of each block, from `row` on. A rank of one
  // step comes as it lies, all rows in one piece; of another a box, of every unit's rows.
  static constexpr int kFactorRows = kGateUp ? 32 : 64;  // of a block, gate's or up's or down's, in a unit
  __device__ __forceinline__ void factor_stage(int index, int lane, int row, int rows) {
    constexpr int kBoxBytes = Shape::kUnits * kFactorRows * kDeltaRank * kRowBytes;
    const int stage = weights.stage;
    Barrier* full = shared.weights_full(stage);
    const DeltaStage delta = delta_stage(index);
    const FactorInfo one = FactorInfo::of(delta.factors), two = FactorInfo::of(delta.factors >> 16);
    const int blocks[2] = {one.gates + one.ups, two.gates + two.ups};
    const int bytes[2] = {one.whole() ? rows * one.rank * 16 : kBoxBytes, two.whole() ? rows * two.rank * 16 : kBoxBytes};
    barrier_wait(shared.weights_empty(stage), weights.parity ^ 1);
    if (lane == 0) {
      barrier_expect(full, rows == 0 ? 0 : blocks[0] * bytes[0] + blocks[1] * bytes[1]);
      if (rows > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const FactorInfo& info = i < 2 ? one : two;
          if (!kGateUp && i % 2 == 1) continue;
          if (!(i % 2 == 0 ? info.gates : info.ups)) continue;
          const unsigned to = shared.weights(stage) + i / 2 * Shape::kFactor + i % 2 * Shape::kFactorUps;
          if (info.whole()) {
            const char* from = static_cast<const char*>(args.arena) +
                               static_cast<long long>(delta.b[i]) * kArenaUnit + row * info.rank * 16;
            bulk_copy_to(to, from, bytes[i / 2], full);
          } else {
            const int column = i < 2 ? delta.columns & 0xffff : delta.columns >> 16;
            load_box(to, args.factors + rank_class(info.rank), full, column / kOperandK % kDeltaSteps * kDeltaRank, row,
                     static_cast<int>(delta.b[i]));
          }
        }
      }
    }
    __syncwarp();
    weights.step();
  }
  // Of ranks of more than a step: hal's 48, 64, 96, 128, 192 and 256, in eights.
  static __device__ __forceinline__ int rank_class(int eights) {
    return eights <= 6 ? 0 : eights <= 8 ? 1 : eights <= 12 ? 2 : eights <= 16 ? 3 : eights <= 24 ? 4 : 5;
  }

  __device__ __forceinline__ bool with_deltas() const { return kDeltas && args.lora_tile_count > 0; }
  // Named barriers: all have begun a work, for the warp that looks; it has the work's deltas, for them; and the
  // threads that bring tokens have a place for a tile.
  static constexpr int kBegun = 1, kFound = 2, kTile = 3, kAll = Shape::kBring + kWarp;
  // Down's shrinks wait for the experts of gate_up one by one.
  using Works = Walk<Shape::kMaxTokens, kGateUp && kBoth && kDeltas ? Rests::kFirst : Rests::kLast>;
  __device__ __forceinline__ Works walk(const ExpertTables& tables) const {
    constexpr int kMost = Shape::kWorkUnits;
    // Where down follows at once, nobody waits for all of gate_up's last turn.
    const int grain = kGateUp && kBoth ? kMost : Shape::kCluster;
    const int taken = !kGateUp && kBoth ? Works::count(tables, prefill_units<true>(args), kMost) : 0;
    const int group = blockIdx.x / Shape::kCluster, groups = gridDim.x / Shape::kCluster;
    return Works(tables, prefill_units<kGateUp>(args), kMost, grain, Turns{group, groups, taken});
  }
  // Whether two works have one tile of tokens, hence the same deltas: most neighbours do.
  static __device__ __forceinline__ bool same_tokens(const Work& one, const Work& other) {
    return one.expert == other.expert && one.first == other.first;
  }
  // The block's share of a work: the blocks of a cluster divide the units.
  __device__ __forceinline__ bool next(Works& walk, Work& work) const {
    if (!walk.next(work)) return false;
    const int each = (work.units + Shape::kCluster - 1) / Shape::kCluster, first = rank * each;
    work.unit += first;
    work.units = max(0, min(each, work.units - first));
    work.product = kGateUp ? kGateUpProduct : kDownProduct;
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
    int listed = 0;
    for (int first = 0; first < found.deltas && listed < Shape::kListed; first += 2 * kWarp) {
      const DeltaPair<Shape::kMaxTokens> pair(shared.deltas(), first + 2 * lane, found.deltas);
      const int end = warp_inclusive_sum(pair.stages, lane);
      const int start = listed + end - pair.stages;
      for (int i = 0; i < min(pair.stages, Shape::kListed - start); ++i) {
        shared.delta_stages()[start + i] = pair.template stage<kGateUp>(i);
      }
      listed += __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    if (lane == 0) {
      shared.scratch()[1] = found.deltas;
      shared.scratch()[2] = found.stages;
    }
    named_barrier_arrive(kFound, kAll);
    return found;
  }

  // The threads that bring tokens and deltas. One warp calls `rest` when its first work has what it needs of them.
  template <class Rest>
  __device__ __forceinline__ void run(const ExpertTables& tables, Rest rest) {
    const int steps = Block::steps(args);
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0, 0};
    DeltaCount found{0, 0};
    if (kGateUp || !kBoth) wait_for_front();
    all_units = prefill_units<true>(args) * tables.tile[tables.experts];
    for (; next(walk, work); ++number) {
      const bool fresh = !same_tokens(work, before);
      if (leads() || !kGateUp || kBoth) wait_for_work();
      if constexpr (kBoth) {
        if (!leads() && thread % kWarp == 0) barrier_arrive(shared.done(number & 1));
        if constexpr (kGateUp) {
          if (counts() && number - 1 - counted >= kCountAtOnce) count(tables, number - 1);
        }
      }
      const bool begins = before.expert < 0;
      if constexpr (kBoth && !kGateUp) {
        const int tokens = tables.position[work.expert + 1] - tables.position[work.expert];
        const bool other = work.expert != before.expert;
        wanted = other && all_units > 0 ? prefill_units<true>(args) * cut_of<Shape::kMaxTokens>(tokens).tiles : 0;
      }
      before = work;
      if (thread == 0) put_work(work);
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
      if (begins && counts()) rest();
      for (int i = 0; i < found.stages; ++i) {
        if (leads()) {
          shrunk_stage(work, i);
        } else if (masks()) {
          mask_stage(work, i);
        } else {
          tokens.step();
        }
      }
    }
    if (before.expert < 0 && counts()) rest();
  }

  // Ends them.
  __device__ __forceinline__ void end() {
    if (!leads()) return;
    wait_for_work();
    barrier_wait(shared.tokens_empty(tokens.stage), tokens.parity ^ 1);
    if (thread == 0) {
      put_work(Work{});
      barrier_expect(shared.tokens_full(tokens.stage), 0, Shape::kArrivals);
    }
  }

  // The warp that counts what gate_up has stored. A fence takes long, and others wait for it: so it is not the warp that
  // leads, and counts some works at once; but each as soon as it can where down's shrinks wait for them.
  static constexpr int kCountAtOnce = kDeltas ? 1 : 4;
  __device__ __forceinline__ bool counts() const { return thread / kWarp == 1; }
  // The warp that lists the block's cuts of down's shrink, which has nothing else to do then.
  __device__ __forceinline__ bool lists() const { return thread / kWarp == 2; }
  // Works up to `end`, which this warp has seen stored.
  __device__ __forceinline__ void count(const ExpertTables& tables, int end) {
    const Ready ready{args.ready, args.experts};
    auto behind = walk(tables);
    behind.skip(counted);
    __threadfence();
    Work work;
    for (; counted < end; ++counted) {
      next(behind, work);
      if (thread % kWarp == 0 && work.units > 0) ready.count(work.expert, work.units);
    }
  }
  // All works of gate_up, when they have been stored.
  __device__ __forceinline__ void count_rest(const ExpertTables& tables) {
    if constexpr (kDeltas) {
      wait_for_work(number - 2);
      count(tables, number - 1);
    }
    wait_for_work(number - 1);
    count(tables, number);
  }
  // Returns when what down's shrinks make of an expert is there for tensor maps.
  __device__ __forceinline__ void wait_for_shrunk(int expert) {
    if (expert == shrunk_expert) return;
    shrunk_expert = expert;
    const Ready ready{args.ready, args.experts};
    while (load_acquire(ready.shrunk(expert)) != Ready::kAllShrunk) {
    }
    global_proxy_fence();
  }
  // Returns when what gate_up makes of an expert is there for tensor maps.
  __device__ __forceinline__ void wait_for_units(int expert) {
    const Ready ready{args.ready, args.experts};
    if (load_acquire(ready.all()) == all_units) {
      all_units = 0;
    } else {
      while (load_acquire(ready.of(expert)) < wanted) {
      }
    }
    global_proxy_fence();
  }

  // The warp that brings weights.
  __device__ __forceinline__ void run_weights(const ExpertTables& tables) {
    const int steps = Block::steps(args), lane = threadIdx.x % kWarp;
    auto walk = this->walk(tables);
    Work work, before{-1, 0, 0, 0, 0, 0};
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
      const int row = work.unit * kFactorRows;
      const int rows = max(0, min(work.units * kFactorRows, (kGateUp ? args.inner : args.hidden) - row));
      for (int i = 0; i < stages; ++i) factor_stage(i, lane, row, rows);
    }
  }

  __device__ __forceinline__ void weight_stage(const Work& work, int step, int lane) {
    const int stage = weights.stage;
    barrier_wait(shared.weights_empty(stage), weights.parity ^ 1);
    if (lane == 0) {
      Barrier* full = shared.weights_full(stage);
      barrier_expect(full, work.units * kGroupBytes);
      for (int i = 0; i < work.units; ++i) {
        const unsigned to = shared.weights(stage) + i * kGroupBytes;
        // Of pairs of rows, or of rows as they come.
        const bool pairs = kGateUp || args.hidden % 16 == 0;
        const int half = pairs ? 0 : (work.unit + i) * 8, high = pairs ? (work.unit + i) * 4 : 0;
        if constexpr (Shape::kOnce) {
          load_box_once(to, &args.map, full, step * kOperandK, 0, half, high, work.expert);
        } else {
          load_box(to, &args.map, full, step * kOperandK, 0, half, high, work.expert);
        }
      }
    }
    __syncwarp();
    weights.step();
  }

  // Those that multiply have stored the work two before, whose place this one takes.
  __device__ __forceinline__ void wait_for_work() const { wait_for_work(number - 2); }
  __device__ __forceinline__ void wait_for_work(int which) const {
    if (which >= 0) barrier_wait(shared.done(which & 1), which / 2 & 1);
  }
  __device__ __forceinline__ void put_work(const Work& work) const {
    volatile Work* to = shared.work(number & 1);
    to->expert = work.expert;
    to->unit = work.unit;
    to->units = work.units;
    to->first = work.first;
    to->count = work.count;
    to->product = work.product;
  }
};

#endif

}  // namespace amphora
