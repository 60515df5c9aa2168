// The base product x·Wᵀ of a tile of rows and columns, used by every projection.
//
// An output is one chain of fused multiply-adds over k in ascending order, made by one thread. So its
// bits depend on its row of x and its row of W alone: not on which rows share the tile, nor on the
// adapters present. The law of the base row follows from there being only this one product.
//
// Config: kRows × kCols outputs a block, kDepth inputs at a time through shared memory.
#pragma once

namespace amphora {

template <class Config, int kThreads>
struct Product {
  static constexpr int kRows = Config::kTileRows;
  static constexpr int kCols = Config::kTileCols;
  static constexpr int kDepth = Config::kTileDepth;
  static constexpr int kLanes = kThreads / kRows;         // threads that share a row
  static constexpr int kPerThread = kCols / kLanes;       // outputs of a thread
  static_assert(kThreads % kRows == 0 && kCols % kLanes == 0, "each thread has whole outputs");
  static_assert(kPerThread % 2 == 0, "gate and up of one output lie in one thread");

  // One word of padding spreads a column of rows over the banks.
  struct Shared {
    float x[kRows][kDepth + 1];
    float w[kCols][kDepth + 1];
  };

  static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ int col(int j) { return threadIdx.x % kLanes + j * kLanes; }

  // acc[j] = Σ_i x_at(row(), i) · w_at(col(j), i). Both functions are asked for i < k only, and give
  // 0 for rows and columns that are not there.
  template <class X, class W>
  static __device__ __forceinline__ void run(Shared& shared, int k, X x_at, W w_at,
                                             float (&acc)[kPerThread]) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) acc[j] = 0.f;
    for (int start = 0; start < k; start += kDepth) {
      __syncthreads();  // the chunk before has been read by all
      for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
        const int at = start + i % kDepth;
        shared.x[i / kDepth][i % kDepth] = at < k ? x_at(i / kDepth, at) : 0.f;
      }
      for (int i = threadIdx.x; i < kCols * kDepth; i += kThreads) {
        const int at = start + i % kDepth;
        shared.w[i / kDepth][i % kDepth] = at < k ? w_at(i / kDepth, at) : 0.f;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const float x = shared.x[row()][i];
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) acc[j] = fmaf(x, shared.w[col(j)][i], acc[j]);
      }
    }
    __syncthreads();  // the caller may fill `shared` again
  }
};

}  // namespace amphora
