// Whole blocks of the paged caches of one layer, from one place to another; no block that is written is
// read by another copy. Grid: (copies, parts of a block), each part strided over the block.
#pragma once

#include "amphora/args.h"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Word, int kThreads>
__device__ __forceinline__ void copy_words(char* cache, long long from, long long to,
                                           long long bytes) {
  const Word* source = reinterpret_cast<const Word*>(cache + from * bytes);
  Word* target = reinterpret_cast<Word*>(cache + to * bytes);
  const long long stride = static_cast<long long>(gridDim.y) * kThreads;
  const long long words = bytes / static_cast<long long>(sizeof(Word));
  for (long long i = blockIdx.y * kThreads + threadIdx.x; i < words; i += stride) {
    target[i] = source[i];
  }
}

template <int kThreads>
__device__ __forceinline__ void copy_block(void* cache, long long from, long long to,
                                           long long bytes) {
  char* data = static_cast<char*>(cache);
  const bool wide = (reinterpret_cast<unsigned long long>(data) | bytes) % sizeof(int4) == 0;
  if (wide) {
    copy_words<int4, kThreads>(data, from, to, bytes);
  } else {
    copy_words<char, kThreads>(data, from, to, bytes);
  }
}

template <class Config, int kThreads>
__device__ void copy_blocks(const CopyBlocksArgs& args) {
  let_next_begin();
  wait_for_front();
  const long long from = args.copies[2 * blockIdx.x], to = args.copies[2 * blockIdx.x + 1];
  if (from < 0) return;
  copy_block<kThreads>(args.k_cache, from, to, args.k_bytes);
  copy_block<kThreads>(args.v_cache, from, to, args.v_bytes);
}

}  // namespace amphora
