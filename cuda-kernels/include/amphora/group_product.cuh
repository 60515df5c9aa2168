// Products of a warpgroup (128 threads) on Hopper's tensor cores, the registers that its warps pass to one
// another, and the tensor maps that bring the operands. Architecture sm_90a alone.
//
// Both operands lie in shared memory as rows of 64 two-byte numbers along k (128 bytes), rows in
// groups of 8 (1 KiB, aligned so), the 16-byte pieces of a row exchanged by the row's number: piece c
// of row r is at c ^ (r % 8). A tensor map with 128-byte swizzle writes them so.
//
// An accumulator of 64 x n: warp w of the group, lane 4g + t, holds for every eight columns j
//   d[4j], d[4j+1]: row 16w + g,     columns 8j + 2t, 8j + 2t + 1
//   d[4j+2], d[4j+3]: row 16w + g + 8, the same columns
#pragma once

#include "amphora/args.h"
#include "amphora/bulk.cuh"
#include "amphora/dtype.cuh"

namespace amphora {

constexpr int kGroupRows = 64;                   // rows of a warpgroup's product
constexpr int kGroupBytes = kGroupRows * 64 * 2; // of its operand, 64 of k

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Describes an operand that starts at `address`: 128-byte swizzle, 1 KiB from one group of 8 rows to
// the next. Sixteen numbers further along k are 32 bytes further, 2 in the descriptor.
__device__ __forceinline__ unsigned long long operand(unsigned address) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62, kStride = 64ull << 32, kLeading = 1ull << 16;
  return kSwizzle128 | kStride | kLeading | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kGroups` groups are under way.
template <int kGroups>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// d += A · Bᵀ over 16 of k: A of 64 rows, B of kColumns rows.
template <class Element, int kColumns>
struct GroupProduct;

#define AMPHORA_EIGHT(d, o)                                                                   \
  "+f"((d)[(o)]), "+f"((d)[(o) + 1]), "+f"((d)[(o) + 2]), "+f"((d)[(o) + 3]), "+f"((d)[(o) + 4]), \
      "+f"((d)[(o) + 5]), "+f"((d)[(o) + 6]), "+f"((d)[(o) + 7])
// Registers of 16 columns, as text and as operands, one more for each step.
#define AMPHORA_TEXT1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AMPHORA_ACC1(d) AMPHORA_EIGHT(d, 0)
#define AMPHORA_TEXT1H AMPHORA_TEXT1 ", %8, %9, %10, %11"
#define AMPHORA_ACC1H(d) AMPHORA_ACC1(d), "+f"((d)[8]), "+f"((d)[9]), "+f"((d)[10]), "+f"((d)[11])
#define AMPHORA_TEXT2 AMPHORA_TEXT1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AMPHORA_ACC2(d) AMPHORA_ACC1(d), AMPHORA_EIGHT(d, 8)
#define AMPHORA_TEXT3 AMPHORA_TEXT2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define AMPHORA_ACC3(d) AMPHORA_ACC2(d), AMPHORA_EIGHT(d, 16)
#define AMPHORA_TEXT4 AMPHORA_TEXT3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define AMPHORA_ACC4(d) AMPHORA_ACC3(d), AMPHORA_EIGHT(d, 24)
#define AMPHORA_TEXT5 AMPHORA_TEXT4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define AMPHORA_ACC5(d) AMPHORA_ACC4(d), AMPHORA_EIGHT(d, 32)
#define AMPHORA_TEXT6 AMPHORA_TEXT5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define AMPHORA_ACC6(d) AMPHORA_ACC5(d), AMPHORA_EIGHT(d, 40)
#define AMPHORA_TEXT7 AMPHORA_TEXT6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define AMPHORA_ACC7(d) AMPHORA_ACC6(d), AMPHORA_EIGHT(d, 48)
#define AMPHORA_TEXT8 AMPHORA_TEXT7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define AMPHORA_ACC8(d) AMPHORA_ACC7(d), AMPHORA_EIGHT(d, 56)
#define AMPHORA_TEXT9 AMPHORA_TEXT8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define AMPHORA_ACC9(d) AMPHORA_ACC8(d), AMPHORA_EIGHT(d, 64)
#define AMPHORA_TEXT10 AMPHORA_TEXT9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define AMPHORA_ACC10(d) AMPHORA_ACC9(d), AMPHORA_EIGHT(d, 72)
#define AMPHORA_TEXT11 AMPHORA_TEXT10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define AMPHORA_ACC11(d) AMPHORA_ACC10(d), AMPHORA_EIGHT(d, 80)
#define AMPHORA_TEXT12 AMPHORA_TEXT11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define AMPHORA_ACC12(d) AMPHORA_ACC11(d), AMPHORA_EIGHT(d, 88)
#define AMPHORA_TEXT13 AMPHORA_TEXT12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define AMPHORA_ACC13(d) AMPHORA_ACC12(d), AMPHORA_EIGHT(d, 96)
#define AMPHORA_TEXT14 AMPHORA_TEXT13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define AMPHORA_ACC14(d) AMPHORA_ACC13(d), AMPHORA_EIGHT(d, 104)
#define AMPHORA_TEXT15 AMPHORA_TEXT14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define AMPHORA_ACC15(d) AMPHORA_ACC14(d), AMPHORA_EIGHT(d, 112)
#define AMPHORA_TEXT16 AMPHORA_TEXT15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define AMPHORA_ACC16(d) AMPHORA_ACC15(d), AMPHORA_EIGHT(d, 120)

#define AMPHORA_PRODUCT(type, name, columns, blocks, a, b)                                        \
  template <>                                                                                     \
  struct GroupProduct<type, columns> {                                                            \
    static __device__ __forceinline__ void run(float* d, unsigned long long left,                 \
                                               unsigned long long right) {                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name          \
                   " {" AMPHORA_TEXT##blocks "}, %" #a ", %" #b ", 1, 1, 1, 0, 0;"                \
                   : AMPHORA_ACC##blocks(d)                                                       \
                   : "l"(left), "l"(right));                                                      \
    }                                                                                             \
  };
#define AMPHORA_PRODUCTS(columns, blocks, a, b)           \
  AMPHORA_PRODUCT(bf16, "bf16", columns, blocks, a, b)    \
  AMPHORA_PRODUCT(f16, "f16", columns, blocks, a, b)
AMPHORA_PRODUCTS(16, 1, 8, 9)
AMPHORA_PRODUCTS(24, 1H, 12, 13)
AMPHORA_PRODUCTS(32, 2, 16, 17)
AMPHORA_PRODUCTS(48, 3, 24, 25)
AMPHORA_PRODUCTS(64, 4, 32, 33)
AMPHORA_PRODUCTS(80, 5, 40, 41)
AMPHORA_PRODUCTS(96, 6, 48, 49)
AMPHORA_PRODUCTS(112, 7, 56, 57)
AMPHORA_PRODUCTS(128, 8, 64, 65)
AMPHORA_PRODUCTS(144, 9, 72, 73)
AMPHORA_PRODUCTS(160, 10, 80, 81)
AMPHORA_PRODUCTS(176, 11, 88, 89)
AMPHORA_PRODUCTS(192, 12, 96, 97)
AMPHORA_PRODUCTS(208, 13, 104, 105)
AMPHORA_PRODUCTS(224, 14, 112, 113)
AMPHORA_PRODUCTS(240, 15, 120, 121)
AMPHORA_PRODUCTS(256, 16, 128, 129)

#undef AMPHORA_PRODUCTS
#undef AMPHORA_PRODUCT

// The same in bf16 with A in registers: of each warp's 16 rows as in `warp_product`. The first of a sum does not read d.
template <int kColumns, bool kFirst = false>
struct RegisterProduct;

#define AMPHORA_PRODUCT(columns, blocks, a0, a1, a2, a3, b, first, add)                                     \
  template <>                                                                                               \
  struct RegisterProduct<columns, first> {                                                                  \
    static __device__ __forceinline__ void run(float* d, const unsigned (&left)[4], unsigned long long right) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16"                         \
                   " {" AMPHORA_TEXT##blocks "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", " add ", 1, 1, 0;" \
                   : AMPHORA_ACC##blocks(d)                                                                 \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                   \
    }                                                                                                       \
  };
AMPHORA_PRODUCT(32, 2, 16, 17, 18, 19, 20, true, "0")
AMPHORA_PRODUCT(16, 1, 8, 9, 10, 11, 12, false, "1")
AMPHORA_PRODUCT(32, 2, 16, 17, 18, 19, 20, false, "1")
AMPHORA_PRODUCT(64, 4, 32, 33, 34, 35, 36, false, "1")
AMPHORA_PRODUCT(96, 6, 48, 49, 50, 51, 52, false, "1")
AMPHORA_PRODUCT(128, 8, 64, 65, 66, 67, 68, false, "1")
AMPHORA_PRODUCT(160, 10, 80, 81, 82, 83, 84, false, "1")
AMPHORA_PRODUCT(192, 12, 96, 97, 98, 99, 100, false, "1")
AMPHORA_PRODUCT(208, 13, 104, 105, 106, 107, 108, false, "1")
AMPHORA_PRODUCT(224, 14, 112, 113, 114, 115, 116, false, "1")
AMPHORA_PRODUCT(240, 15, 120, 121, 122, 123, 124, false, "1")
AMPHORA_PRODUCT(256, 16, 128, 129, 130, 131, 132, false, "1")
#undef AMPHORA_PRODUCT

// Every warp of a warpgroup, in a kernel whose launch bounds name the blocks of a processor: fewer registers
// from here on, or more, for which it waits.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Has the map at hand when the first box is asked for.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor map to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void load_box(unsigned to, const TensorMap* map, Barrier* barrier, int k,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row)
      : "memory");
}
__device__ __forceinline__ void load_box(unsigned to, const TensorMap* map, Barrier* barrier, int k,
                                         int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(matrix)
      : "memory");
}
__device__ __forceinline__ void load_box(unsigned to, const TensorMap* map, Barrier* barrier, int k,
                                         int low, int half, int high, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(low), "r"(half), "r"(high), "r"(matrix)
      : "memory");
}

// The same of numbers that are wanted once: the cache gives them up before others.
__device__ __forceinline__ void load_box_once(unsigned to, const TensorMap* map, Barrier* barrier, int k,
                                              int low, int half, int high, int matrix) {
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      " cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], policy;\n}" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(low), "r"(half), "r"(high), "r"(matrix)
      : "memory");
}

// Rows of a matrix alone, to every block of the cluster whose bit is in `blocks`, at the same place of its
// shared memory, each block's `barrier` counting the bytes.
template <int kBlocks>
__device__ __forceinline__ void load_box_shared(unsigned to, const TensorMap* map, Barrier* barrier, int k,
                                                int row) {
  if constexpr (kBlocks == 1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row)
        : "memory");
  } else {
    constexpr unsigned short kAll = (1 << kBlocks) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "h"(kAll)
        : "memory");
  }
}

#endif

}  // namespace amphora
