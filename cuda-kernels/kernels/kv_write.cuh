// Each row's k and v to its place in the paged cache; padding rows write nothing. One block a row.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void kv_write(const KvWriteArgs& args) {
  let_next_begin();
  using Element = typename Config::Element;
  const long long row = blockIdx.x, place = args.kv_index[row];  // of the plan: there already
  wait_for_front();
  if (place < 0) return;
  const Element* k = static_cast<const Element*>(args.k) + row * args.k_pitch;
  const Element* v = static_cast<const Element*>(args.v) + row * args.v_pitch;
  Element* k_cache = static_cast<Element*>(args.k_cache) + place * args.k_width;
  Element* v_cache = static_cast<Element*>(args.v_cache) + place * args.v_width;
  copy_row<Element, kThreads>(k, k_cache, args.k_width);
  copy_row<Element, kThreads>(v, v_cache, args.v_width);
}

}  // namespace amphora
