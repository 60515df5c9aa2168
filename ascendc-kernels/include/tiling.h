// The tiling blocks that launches carry, as the host writes them (`src/lib.rs` has the same in Rust).
#pragma once

#include "kernel_operator.h"

namespace amphora {

constexpr uint32_t kMaxSlices = 8;

// The outputs that take one slice's delta: out_offset + i * out_stride, i < len.
struct LoraSliceTiling {
    uint32_t row;         // within a slot of the table
    uint32_t out_offset;
    uint32_t out_stride;
    uint32_t len;
};

struct LoraFusedTiling {
    uint32_t tokens;      // rows of x and out
    uint32_t k;
    uint32_t n;
    uint32_t x_pitch;     // elements from one row of x to the next
    uint32_t out_pitch;
    uint32_t width;       // outputs of one unit of work
    uint32_t tiles;       // entries of the tile list; 0: no adapters, perm is not read
    uint32_t table_rows;  // rows of one slot of the table
    uint32_t slices;      // used entries of slice
    uint32_t out_f32;     // 1: out is f32, else the compute type
    uint32_t has_bias;
    uint32_t reserved;    // 0
    LoraSliceTiling slice[kMaxSlices];
};

static_assert(sizeof(LoraSliceTiling) == 16, "as in Rust");
static_assert(sizeof(LoraFusedTiling) == 48 + 16 * kMaxSlices, "as in Rust");
static_assert(__builtin_offsetof(LoraFusedTiling, width) == 20, "as in Rust");
static_assert(__builtin_offsetof(LoraFusedTiling, has_bias) == 40, "as in Rust");
static_assert(__builtin_offsetof(LoraFusedTiling, slice) == 48, "as in Rust");

}  // namespace amphora
