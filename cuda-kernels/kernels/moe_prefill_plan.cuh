// Who computes what in the expert products of a prefill step, found by each block for itself from the
// tile lists of the routing, so that nothing is launched or read back for it.
//
// The weights are the rows of these products and the tokens of one expert their columns. A *unit* is 64
// rows of an expert's weight. An expert's tokens are cut evenly into *tiles* of at most kMost, a
// multiple of 16. A *work* is some units of an expert with one tile. Blocks take works in turn, so that
// all are at the same few experts at a time: these experts' tokens are then in the cache, a weight is
// there for the tiles behind the first, and few pages are in use. Experts of many tokens come first. What is left
// when an expert's units are divided comes last: what ends late is small. But where others wait for experts one
// by one it comes first: else none would be complete before the last turn.
//
// The deltas of a tile are more k: 32 of the rank at a time, each with the tokens of its slot alone.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"
#include "kernels/moe_prefill_shrunk.cuh"

namespace amphora {

// Of the experts, in shared memory: `experts` + 1 entries each.
struct ExpertTables {
  int* position;   // first position of the expert
  int* lora_tile;  // its first LoRA tile
  int* order;      // experts by falling number of tokens
  int* tile;       // tiles of the experts in front, in that order
  int experts;
};

// An expert's tokens, cut.
struct Cut {
  int tiles;
  int tokens;  // of a tile; the last may have fewer
};

template <int kMost>
__device__ __forceinline__ Cut cut_of(int tokens) {
  static_assert(kMost % 16 == 0, "tiles are cut in sixteens");
  if (tokens == 0) return Cut{0, 16};
  const int tiles = (tokens + kMost - 1) / kMost;
  const int each = ((tokens + tiles - 1) / tiles + 15) / 16 * 16;
  return Cut{(tokens + each - 1) / each, each};
}

// Fills the tables. Every thread of the block takes part, and may read them at return.
template <int kMost, int kThreads>
__device__ __forceinline__ void build_tables(const MoePrefillArgs& args, const ExpertTables& tables) {
  for (int e = threadIdx.x; e < tables.experts; e += kThreads) {
    tables.position[e] = 0;
    tables.lora_tile[e] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < args.tile_count; i += kThreads) {
    const Tile tile = tile_at(args.tiles, 4, i);
    if (tile.rows > 0) atomicAdd(tables.position + tile.expert, tile.rows);
  }
  for (int i = threadIdx.x; i < args.lora_tile_count; i += kThreads) {
    const Tile tile = tile_at(args.lora_tiles, 4, i);
    if (tile.rows > 0) atomicAdd(tables.lora_tile + tile.expert, 1);
  }
  __syncthreads();
  // Experts with as many tokens stay in their own order.
  for (int e = threadIdx.x; e < tables.experts; e += kThreads) {
    const int tokens = tables.position[e];
    int before = 0;
    for (int other = 0; other < tables.experts; ++other) {
      const int others = tables.position[other];
      before += others > tokens || (others == tokens && other < e);
    }
    tables.order[before] = e;
    tables.tile[before] = cut_of<kMost>(tokens).tiles;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    int totals[3] = {0, 0, 0};
    int* const lists[3] = {tables.position, tables.lora_tile, tables.tile};
    for (int start = 0; start < tables.experts; start += kWarp) {
      const int e = start + lane;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int own = e < tables.experts ? lists[i][e] : 0;
        const int sum = warp_inclusive_sum(own, lane);
        if (e < tables.experts) lists[i][e] = totals[i] + sum - own;
        totals[i] += __shfl_sync(kFullWarp, sum, kWarp - 1);
      }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (lane == 0) lists[i][tables.experts] = totals[i];
    }
  }
  __syncthreads();
}

// Some units of an expert with one tile of its tokens.
struct Work {
  int expert;
  int unit;
  int units;
  int first;  // position of the first token
  int count;  // tokens
  int product;  // whose it is
};
// A work of none ends them.
enum PrefillProduct : int { kNoProduct = 0, kGateUpProduct = 1, kDownProduct = 2 };

// Who takes works in turn: one of `groups`, which have taken `taken` works of another product by turns in front.
struct Turns {
  int group;
  int groups;
  int taken;
};

// Where works of what is left of the tiles' units are.
enum class Rests { kFirst, kLast };

// The works of one group. Each thread walks for itself; all find the same.
template <int kMost, Rests kRests = Rests::kLast>
class Walk {
 public:
  // An expert has `units`; a work has `most` of them, but for the last of a tile. Those that are left
  // for the last turn, if they are few and the rests last, are divided further, to `grain` units.
  __device__ Walk(const ExpertTables& tables, int units, int most, int grain, const Turns& turns)
      : tables_(tables), units_(units), most_(most), grain_(grain), groups_(turns.groups) {
    const int tiles = tables.tile[tables.experts], groups = turns.groups;
    at_ = (turns.group + groups - turns.taken % groups) % groups;
    whole_ = tiles * (units / most);
    all_ = count(tables, units, most);
    last_turn_ = all_ / groups * groups;
    const int wholes_left = max(0, whole_ - last_turn_);
    const int parts = (most + grain - 1) / grain, rest_parts = (units % most + grain - 1) / grain;
    whole_parts_ = wholes_left * parts;
    parts_ = whole_parts_ + (all_ - last_turn_ - wholes_left) * rest_parts;
    if (kRests == Rests::kFirst || parts_ > groups) parts_ = 0;
  }

  // Leaves out works of the group, where none is divided.
  __device__ __forceinline__ void skip(int works) { at_ += works * groups_; }

  // Works that there are, where none is divided.
  static __device__ __forceinline__ int count(const ExpertTables& tables, int units, int most) {
    return tables.tile[tables.experts] * ((units + most - 1) / most);
  }

  __device__ bool next(Work& work) {
    const int at = at_;
    at_ += groups_;
    if (at < last_turn_ || parts_ == 0) {
      if (at >= all_) return false;
      find(at, work);
      return true;
    }
    const int part = at - last_turn_;
    if (part >= parts_) return false;
    const bool whole = part < whole_parts_;
    const int each = ((whole ? most_ : units_ % most_) + grain_ - 1) / grain_;
    const int behind = whole ? part : part - whole_parts_;
    find(last_turn_ + (whole ? 0 : max(0, whole_ - last_turn_)) + behind / each, work);
    const int from = behind % each * grain_;
    work.unit += from;
    work.units = min(grain_, work.units - from);
    return true;
  }

 private:
  // Work number `index`.
  __device__ void find(int index, Work& work) const {
    const int turns = units_ / most_, wholes = kRests == Rests::kFirst ? all_ - whole_ : 0;
    const bool whole = index >= wholes && index - wholes < whole_;
    if (whole) index -= wholes;
    const int at = whole ? index / turns : kRests == Rests::kFirst ? index : index - whole_;  // counted in tiles
    int low = 0, high = tables_.experts - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tables_.tile[middle] <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int expert = tables_.order[low], first = tables_.position[expert];
    const int tokens = tables_.position[expert + 1] - first;
    const Cut cut = cut_of<kMost>(tokens);
    const int behind = whole ? index - tables_.tile[low] * turns : at - tables_.tile[low];
    const int begin = behind % cut.tiles * cut.tokens;
    const int unit = (whole ? behind / cut.tiles : turns) * most_;
    work = Work{expert, unit, min(most_, units_ - unit), first + begin, min(cut.tokens, tokens - begin),
                kNoProduct};
  }

  ExpertTables tables_;
  int units_, most_, grain_, at_, groups_, whole_, all_, last_turn_, whole_parts_, parts_;
};

// What one slot adds to a tile: to tokens low .. high of it.
struct Delta {
  unsigned short low, high;
  unsigned b[2];          // blocks B, in units of kArenaUnit
  unsigned char rank[2];  // in eights; 0: none
  unsigned char shared;   // 1: gate and up have one A, hence one shrunk row: gate's
  unsigned char steps;    // of kDeltaRank: of gate, then of up unless they share
};
static_assert(sizeof(Delta) == 16, "Delta");

// The adapter of `slot` for gate and up (or down, and nothing) of an expert.
struct DeltaRows {
  LoraRow row[2];
  bool shared;
};

template <class Args>
__device__ __forceinline__ DeltaRows delta_rows(const Args& args, int slot, int expert) {
  DeltaRows out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out.row[i] = LoraRow{0, 0, 0, 0.f};
    if (args.tables[i] < 0) continue;
    const long long at = static_cast<long long>(slot) * args.table_rows + args.tables[i] + expert;
    out.row[i] = static_cast<const LoraRow*>(args.rows)[at];
  }
  out.shared = out.row[0].rank != 0 && out.row[0].rank == out.row[1].rank &&
               out.row[0].a == out.row[1].a && out.row[0].scale == out.row[1].scale;
  return out;
}

__device__ __forceinline__ int delta_steps(int eights) { return (8 * eights + kDeltaRank - 1) / kDeltaRank; }

// Step `index` of a delta: `step` of gate (`part` 0, or down) or up (1).
struct DeltaStep {
  int part;
  int step;
};
__device__ __forceinline__ DeltaStep delta_step(const Delta& delta, int index) {
  const int first = delta_steps(delta.rank[0]);
  return index < first ? DeltaStep{0, index} : DeltaStep{1, index - first};
}

// Rows of one box of shrunk numbers: columns of a tile.
constexpr int kDeltaWindow = 32;

// The windows that a delta's tokens low .. high meet, in columns: from the first's start to the last's end.
__device__ __forceinline__ int windows_start(int low) { return low / kDeltaWindow * kDeltaWindow; }
__device__ __forceinline__ int windows_end(int high) {
  return (high + kDeltaWindow - 1) / kDeltaWindow * kDeltaWindow;
}

// Deltas 2i and 2i + 1 of a list go side by side, step by step, where the windows of both fit the rows of
// a stage: `kMost` of them. None goes with any.
template <int kMost>
__device__ __forceinline__ bool side_by_side(const Delta& first, const Delta& second) {
  if (second.high == 0) return true;
  return windows_end(first.high) - windows_start(first.low) + windows_end(second.high) -
             windows_start(second.low) <=
         kMost;
}

// B of a delta's step, for those that bring it and those that multiply.
struct FactorInfo {
  int eights;  // of the rank that the step has: at most 4
  int rank;    // in eights
  bool gates, ups;
  __device__ __forceinline__ int packed() const { return eights | rank << 3 | gates << 9 | ups << 10; }
  static __device__ __forceinline__ FactorInfo of(int packed) {
    return FactorInfo{packed & 7, packed >> 3 & 63, (packed >> 9 & 1) != 0, (packed >> 10 & 1) != 0};
  }
  // Whether rows of B are one step.
  __device__ __forceinline__ bool whole() const { return rank <= kDeltaRank / 8; }
  // Bytes from one row to the next where it has been brought.
  __device__ __forceinline__ unsigned pitch() const { return min(rank, kDeltaRank / 8) * 16; }
};

// A stage of deltas: a step of each of two, or of one.
struct __align__(16) DeltaStage {
  int range[2];   // low | high << 16; 0: there is none
  int factors;    // FactorInfo, the second's << 16
  int columns;    // where in a shrunk row the steps start, in two-byte numbers; the second's << 16
  unsigned b[4];  // blocks B: of the first gate's (or down's) and up's, of the second the same
};
__device__ __forceinline__ int windows_of(int range) {
  const int low = range & 0xffff, high = range >> 16;
  return high == 0 ? 0 : (windows_end(high) - windows_start(low)) / kDeltaWindow;
}

// Deltas `i` and `i + 1` of a list of `deltas`, for whose stages it is asked.
template <int kMost>
struct DeltaPair {
  Delta first, second;
  bool both;  // side by side
  int stages;
  __device__ __forceinline__ DeltaPair(const Delta* list, int i, int deltas) : first{}, second{} {
    if (i < deltas) first = list[i];
    if (i + 1 < deltas) second = list[i + 1];
    both = side_by_side<kMost>(first, second);
    stages = both ? max(first.steps, second.steps) : first.steps + second.steps;
  }
  template <bool kGateUp>
  __device__ __forceinline__ DeltaStage stage(int index) const {
    DeltaStage out{};
    if (both) {
      put<kGateUp>(out, 0, first, index);
      put<kGateUp>(out, 1, second, index);
    } else if (index < first.steps) {
      put<kGateUp>(out, 0, first, index);
    } else {
      put<kGateUp>(out, 0, second, index - first.steps);
    }
    return out;
  }

 private:
  template <bool kGateUp>
  static __device__ __forceinline__ void put(DeltaStage& out, int side, const Delta& delta, int index) {
    if (index >= delta.steps) return;
    const auto [part, step] = delta_step(delta, index);
    const int rank = part == 0 ? delta.rank[0] : delta.rank[1];
    const bool shared = !kGateUp || delta.shared;
    const FactorInfo info{min(rank - step * (kDeltaRank / 8), kDeltaRank / 8), rank, shared || part == 0,
                          kGateUp && (shared || part == 1)};
    out.range[side] = delta.low | delta.high << 16;
    out.factors |= info.packed() << 16 * side;
    out.columns |= (part * kDeltaSteps + step) * kOperandK << 16 * side;
    out.b[2 * side] = delta.b[0];
    out.b[2 * side + 1] = delta.b[1];
  }
};

// Lists the deltas of a tile of up to `kMost` tokens, in their order, and gives their number and the stages
// that all take. `kThreads` threads take part, which `sync` brings together; they may read the list at
// return.
struct DeltaCount {
  int deltas;
  int stages;
};
template <int kMost, int kThreads, class Sync>
__device__ __forceinline__ DeltaCount find_deltas(const MoePrefillArgs& args,
                                                  const ExpertTables& tables, const Work& work,
                                                  int thread, Delta* list, int* scratch, Sync sync) {
  constexpr int kWarps = kThreads / kWarp;
  const int begin = tables.lora_tile[work.expert], end = tables.lora_tile[work.expert + 1];
  const int from = work.first, to = work.first + work.count, warp = thread / kWarp;
  DeltaCount found{0, 0};
  for (int start = begin; start < end; start += kThreads) {
    const int i = start + thread;
    bool head = false, tail = false;
    Tile here{0, 0, 0, 0};
    if (i < end) here = tile_at(args.lora_tiles, 4, i);
    if (here.rows > 0 && here.first < to && here.first + here.rows > from) {
      const Tile before = tile_at(args.lora_tiles, 4, max(i - 1, begin));
      const Tile after = tile_at(args.lora_tiles, 4, min(i + 1, end - 1));
      head = i == begin || before.slot != here.slot || before.first + before.rows <= from;
      tail = i + 1 == end || after.slot != here.slot || after.first >= to;
    }
    const unsigned heads = __ballot_sync(kFullWarp, head);
    if (thread % kWarp == 0) scratch[warp] = __popc(heads);
    sync();
    int index = found.deltas - 1, all = found.deltas;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) index += scratch[w];
      all += scratch[w];
    }
    index += __popc(heads & (0xffffffffu >> (kWarp - 1 - thread % kWarp)));
    if (head) {
      const DeltaRows rows = delta_rows(args, here.slot, work.expert);
      Delta& delta = list[index];
      delta.low = static_cast<unsigned short>(max(here.first, from) - from);
      delta.b[0] = rows.row[0].b;
      delta.b[1] = rows.row[1].b;
      delta.rank[0] = static_cast<unsigned char>(rows.row[0].rank / 8);
      delta.rank[1] = static_cast<unsigned char>(rows.row[1].rank / 8);
      delta.shared = rows.shared;
      delta.steps = static_cast<unsigned char>(delta_steps(delta.rank[0]) +
                                               (rows.shared ? 0 : delta_steps(delta.rank[1])));
    }
    if (tail) list[index].high = static_cast<unsigned short>(min(here.first + here.rows, to) - from);
    found.deltas = all;
    sync();
  }
  for (int i = 2 * thread; i < found.deltas; i += 2 * kThreads) {
    const int first = list[i].steps, second = i + 1 < found.deltas ? list[i + 1].steps : 0;
    const bool both = i + 1 == found.deltas || side_by_side<kMost>(list[i], list[i + 1]);
    found.stages += both ? max(first, second) : first + second;
  }
  if (begin == end) return found;
  found.stages = warp_reduce(found.stages, Sum{});
  if (thread % kWarp == 0) scratch[warp] = found.stages;
  sync();
  found.stages = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) found.stages += scratch[w];
  sync();
  return found;
}

}  // namespace amphora
