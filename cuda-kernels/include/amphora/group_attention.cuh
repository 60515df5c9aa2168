// Products of a warpgroup for attention. Architecture sm_90a alone; accumulators and operands in shared memory
// as in group_product.cuh.
#pragma once

#include "amphora/group_product.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Results are read behind a wait that the compiler does not tie to them.
template <int kCount>
__device__ __forceinline__ void products_settle(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Describes a right operand that is turned: rows along k, of 64 columns (128 bytes) each, exchanged as others
// are; 8 rows are 1 KiB. `apart` bytes lie between 64 columns and the next 64. Sixteen numbers further along k
// are 2 KiB further, 128 in the descriptor.
__device__ __forceinline__ unsigned long long turned_operand(unsigned address, unsigned apart) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62, kStride = 64ull << 32;
  return kSwizzle128 | kStride | static_cast<unsigned long long>(apart >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

// Logits. d = A · Bᵀ + (kAdd ? d : 0) over 16 of k: A of 64 rows, B of 64 rows.
template <class Element>
struct LogitProduct;

// Weighted values. d += A · B over 16 of k: B is turned, of kColumns columns; A of 64 rows lies in registers,
// which may not change before the wait: lane 4g + t of warp w holds rows 16w + g and 16w + g + 8, numbers 2t,
// 2t + 1 and 2t + 8, 2t + 9 of k, in the order (g, lower), (g + 8, lower), (g, upper), (g + 8, upper): what an
// accumulator holds of sixteen columns, pair by pair.
template <class Element, int kColumns>
struct ValueProduct;

#define AMPHORA_LOGIT_PRODUCT(type, name)                                                             \
  template <>                                                                                         \
  struct LogitProduct<type> {                                                                         \
    template <bool kAdd>                                                                              \
    static __device__ __forceinline__ void run(float* d, unsigned long long left,                     \
                                               unsigned long long right) {                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                       \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" AMPHORA_TEXT4     \
                   "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                   \
                   : AMPHORA_ACC4(d)                                                                  \
                   : "l"(left), "l"(right), "n"(kAdd ? 1 : 0));                                       \
    }                                                                                                 \
  };
AMPHORA_LOGIT_PRODUCT(bf16, "bf16")
AMPHORA_LOGIT_PRODUCT(f16, "f16")

#define AMPHORA_VALUE_PRODUCT(type, name, columns, blocks, a0, a1, a2, a3, b)                         \
  template <>                                                                                         \
  struct ValueProduct<type, columns> {                                                                \
    static __device__ __forceinline__ void run(float* d, const unsigned (&left)[4],                   \
                                               unsigned long long right) {                            \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name              \
                   " {" AMPHORA_TEXT##blocks "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b      \
                   ", 1, 1, 1, 1;"                                                                    \
                   : AMPHORA_ACC##blocks(d)                                                           \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));             \
    }                                                                                                 \
  };
AMPHORA_VALUE_PRODUCT(bf16, "bf16", 64, 4, 32, 33, 34, 35, 36)
AMPHORA_VALUE_PRODUCT(f16, "f16", 64, 4, 32, 33, 34, 35, 36)
AMPHORA_VALUE_PRODUCT(bf16, "bf16", 128, 8, 64, 65, 66, 67, 68)
AMPHORA_VALUE_PRODUCT(f16, "f16", 128, 8, 64, 65, 66, 67, 68)

#undef AMPHORA_LOGIT_PRODUCT
#undef AMPHORA_VALUE_PRODUCT

#endif

}  // namespace amphora
