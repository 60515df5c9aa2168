// The product down for few tokens: y[pair] = down_e · act[p] + b' + delta, f32; see moe_stream.cuh.
// An entry for each number of tokens that a pass takes, plain and with deltas.
#pragma once

#include "amphora/moe_stream.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void stream_down_8(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, false, false, 1>(args);
}
template <class Config, int kThreads>
__device__ void stream_down_16(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, false, false, 2>(args);
}
template <class Config, int kThreads>
__device__ void stream_down_lora_8(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, false, true, 1>(args);
}
template <class Config, int kThreads>
__device__ void stream_down_lora_16(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, false, true, 2>(args);
}

}  // namespace amphora
