// The second half of a delta, added to a base product in f32: (scale · x·Aᵀ)·Bᵀ for one output.
// Inlined into the epilogue of the product it belongs to.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"

namespace amphora {

// A row of the table.
struct LoraRow {
  unsigned a;      // block A in the arena, in units of kArenaUnit
  unsigned b;      // block B
  unsigned rank;   // rank class; 0: the slot leaves the slice alone
  float scale;
};
static_assert(sizeof(LoraRow) == 16, "LoraRow");

__device__ __forceinline__ LoraRow lora_row(const LoraArgs& args, int slot, int slice, int expert) {
  const long long row =
      static_cast<long long>(slot) * args.table_rows + args.slices[slice].table + expert;
  return static_cast<const LoraRow*>(args.rows)[row];
}

template <class Element>
__device__ __forceinline__ const Element* lora_block(const LoraArgs& args, unsigned offset) {
  const char* arena = static_cast<const char*>(args.arena);
  return reinterpret_cast<const Element*>(arena + static_cast<long long>(offset) * kArenaUnit);
}

// Where the shrunk row of a slice lies.
__device__ __forceinline__ float* shrunk_row(const LoraArgs& args, long long position, int slice) {
  return args.shrunk + (position * kMaxSlices + slice) * kMaxRank;
}

// The delta of output `n` in the row at `position`, whose adapter is `slot`.
template <class Element>
__device__ float lora_delta(const LoraArgs& args, int slot, int expert, long long position, int n) {
  float delta = 0.f;
  for (int slice = 0; slice < args.slice_count; ++slice) {
    const SliceArgs& outputs = args.slices[slice];
    const int beyond = n - outputs.offset;
    if (beyond < 0 || beyond % outputs.stride != 0 || beyond / outputs.stride >= outputs.len) continue;
    const LoraRow row = lora_row(args, slot, slice, expert);
    if (row.rank == 0) continue;
    const int rank = static_cast<int>(row.rank);
    const Element* b =
        lora_block<Element>(args, row.b) + static_cast<long long>(beyond / outputs.stride) * rank;
    const float* shrunk = shrunk_row(args, position, slice);
    for (int r = 0; r < rank; ++r) delta = fmaf(shrunk[r], widen(b[r]), delta);
  }
  return delta;
}

}  // namespace amphora
