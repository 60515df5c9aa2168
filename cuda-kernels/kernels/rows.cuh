// Rows moved by index.
//
//   write_tokens  table[sequences + i] = prompt[i]           one thread a token
//   embed         out[i] = weight[table[index[i]]]           one block a row
//   gather_rows   out[i] = x[rows[i]]                        one block a row
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void write_tokens(const WriteTokensArgs& args) {
  let_next_begin();
  wait_for_front();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < args.tokens) args.table[args.sequences + i] = args.prompt[i];
}

template <class Element, int kThreads>
__device__ void copy_row(const void* from, long long from_row, long long from_pitch, void* to,
                         long long to_row, long long to_pitch, int width) {
  const Element* source = static_cast<const Element*>(from) + from_row * from_pitch;
  Element* target = static_cast<Element*>(to) + to_row * to_pitch;
  for (int i = threadIdx.x; i < width; i += kThreads) target[i] = source[i];
}

template <class Config, int kThreads>
__device__ void embed(const EmbedArgs& args) {
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x;
  copy_row<typename Config::Element, kThreads>(args.weight, args.table[args.index[row]], args.width,
                                               args.out, row, args.out_pitch, args.width);
}

template <class Config, int kThreads>
__device__ void gather_rows(const GatherRowsArgs& args) {
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x;
  copy_row<typename Config::Element, kThreads>(args.x, args.rows[row], args.x_pitch, args.out, row,
                                               args.out_pitch, args.width);
}

}  // namespace amphora
