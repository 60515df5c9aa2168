// Who computes what in the expert products of a prefill step, found by each block for itself from the
// tile lists of the routing, so that nothing is launched or read back for it.
//
// The weights are the rows of these products and the tokens of one expert their columns. A *unit* is 64
// rows of an expert's weight. An expert's tokens are cut evenly into *tiles* of at most kMost, a
// multiple of 16. Blocks take contiguous runs of units, of equal cost. Units
// of one expert follow each other with the tiles inside, so that a weight is read from memory once for
// as many tiles as a *chunk* holds: all of an expert's, unless that left too few units to share out.
//
// The deltas of a tile are more k: 32 of the rank at a time, each with the tokens of its slot alone.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"
#include "amphora/tile.cuh"
#include "kernels/lora_expand.cuh"
#include "kernels/moe_prefill_shrunk.cuh"

namespace amphora {

// What a tile costs beside its tokens, in tokens: its share of the weights is as many rows.
constexpr int kTileCost = 128;

// Running sums over the experts, in shared memory; `experts` + 1 entries each.
struct ExpertTables {
  int* position;   // first position of the expert
  int* lora_tile;  // its first LoRA tile
  int* cost;       // of all units in front of its own
  int experts;
};

// An expert's tokens, cut.
struct Cut {
  int tiles;
  int tokens;  // of a tile; the last may have fewer
  __device__ __forceinline__ int cost() const { return tokens + kTileCost; }  // of a tile and unit
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
__device__ __forceinline__ void build_tables(const MoePrefillArgs& args, int units,
                                             const ExpertTables& tables) {
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
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    int positions = 0, lora_tiles = 0, costs = 0;
    for (int start = 0; start < tables.experts; start += kWarp) {
      const int e = start + lane;
      const int tokens = e < tables.experts ? tables.position[e] : 0;
      const int entries = e < tables.experts ? tables.lora_tile[e] : 0;
      const Cut cut = cut_of<kMost>(tokens);
      const int cost = units * cut.tiles * cut.cost();
      int sums[3] = {tokens, entries, cost};
#pragma unroll
      for (int lanes = 1; lanes < kWarp; lanes *= 2) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          const int before = __shfl_up_sync(kFullWarp, sums[i], lanes);
          if (lane >= lanes) sums[i] += before;
        }
      }
      if (e < tables.experts) {
        tables.position[e] = positions + sums[0] - tokens;
        tables.lora_tile[e] = lora_tiles + sums[1] - entries;
        tables.cost[e] = costs + sums[2] - cost;
      }
      positions += __shfl_sync(kFullWarp, sums[0], kWarp - 1);
      lora_tiles += __shfl_sync(kFullWarp, sums[1], kWarp - 1);
      costs += __shfl_sync(kFullWarp, sums[2], kWarp - 1);
    }
    if (lane == 0) {
      tables.position[tables.experts] = positions;
      tables.lora_tile[tables.experts] = lora_tiles;
      tables.cost[tables.experts] = costs;
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
};

// A run of the work. Each thread walks for itself; all find the same.
template <int kMost>
class Walk {
 public:
  // Run `index` of `count`; `most_units`: of one Work.
  __device__ Walk(const ExpertTables& tables, int units, int most_units, int index, int count)
      : tables_(tables), units_(units), most_units_(most_units), tile_(0) {
    const long long total = tables.cost[tables.experts];
    most_cost_ = static_cast<int>(total / (8ll * count));
    at_ = locate(static_cast<int>(total * index / count));
    end_ = locate(static_cast<int>(total * (index + 1) / count));
  }

  __device__ bool next(Work& work) {
    while (at_.expert < end_.expert ||
           (at_.expert == end_.expert && at_.expert < tables_.experts)) {
      const bool last = at_.expert == end_.expert;
      if (last && at_.chunk > end_.chunk) return false;
      const int first = tables_.position[at_.expert];
      const int tokens = tables_.position[at_.expert + 1] - first;
      const Cut cut = cut_of<kMost>(tokens);
      const int chunk = chunk_of(cut);
      if (at_.chunk * chunk >= cut.tiles) {
        if (last) return false;
        at_ = Place{at_.expert + 1, 0, 0};
        continue;
      }
      const int left = (last && at_.chunk == end_.chunk ? end_.unit : units_) - at_.unit;
      if (left <= 0) {
        if (last && at_.chunk == end_.chunk) return false;
        at_ = Place{at_.expert, at_.chunk + 1, 0};
        continue;
      }
      // Even parts, so that none is thin.
      const int rounds = (left + most_units_ - 1) / most_units_;
      const int units = (left + rounds - 1) / rounds;
      const int begin = (at_.chunk * chunk + tile_) * cut.tokens;
      work = Work{at_.expert, at_.unit, units, first + begin, min(cut.tokens, tokens - begin)};
      if (++tile_ == min(chunk, cut.tiles - at_.chunk * chunk)) {
        tile_ = 0;
        at_.unit += units;
      }
      return true;
    }
    return false;
  }

 private:
  struct Place {
    int expert;
    int chunk;
    int unit;
  };

  __device__ int chunk_of(const Cut& cut) const {
    return min(max(1, most_cost_ / cut.cost()), max(1, cut.tiles));
  }

  // The first unit in front of which lies at least `cost`.
  __device__ Place locate(int cost) const {
    if (cost >= tables_.cost[tables_.experts]) return Place{tables_.experts, 0, 0};
    int low = 0, high = tables_.experts - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tables_.cost[middle] <= cost) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const Cut cut = cut_of<kMost>(tables_.position[low + 1] - tables_.position[low]);
    const int chunk = chunk_of(cut);
    int rest = cost - tables_.cost[low];
    const int whole = units_ * chunk * cut.cost();
    const int index = rest / whole;
    rest -= index * whole;
    const int each = min(chunk, cut.tiles - index * chunk) * cut.cost();
    return Place{low, index, (rest + each - 1) / each};
  }

  ExpertTables tables_;
  int units_, most_units_, most_cost_, tile_;
  Place at_, end_;
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

// Columns of one product of a delta: those that its slot does not meet are left out, and narrower ones
// take as long, as reading B does.
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
