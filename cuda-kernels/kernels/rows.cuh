// Rows moved by index.
//
//   write_tokens  table[sequences + i] = prompt[i]           one thread a token
//   embed         out[i] = weight[table[index[i]]]           one block a row
//   gather_rows   out[i] = x[rows[i]]                        one block a row
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void write_tokens(const WriteTokensArgs& args) {
  let_next_begin();
  wait_for_front();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < args.tokens) args.table[args.sequences + i] = args.prompt[i];
}

template <class Config, int kThreads>
__device__ void embed(const EmbedArgs& args) {
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x;
  using Element = typename Config::Element;
  const long long from = args.table[args.index[row]];
  copy_row<Element, kThreads>(static_cast<const Element*>(args.weight) + from * args.width,
                              static_cast<Element*>(args.out) + row * args.out_pitch, args.width);
}

template <class Config, int kThreads>
__device__ void gather_rows(const GatherRowsArgs& args) {
  let_next_begin();
  wait_for_front();
  const int row = blockIdx.x;
  using Element = typename Config::Element;
  copy_row<Element, kThreads>(static_cast<const Element*>(args.x) + args.rows[row] * args.x_pitch,
                              static_cast<Element*>(args.out) + row * args.out_pitch, args.width);
}

}  // namespace amphora
