// The product gate_up for few tokens: act[p] = activation(gate_up_e · x[t] + b + delta), rounded; see moe_stream.cuh.
// An entry for each number of tokens that a pass takes, plain and with deltas.
#pragma once

#include "amphora/moe_stream.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void stream_gate_up_8(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, true, false, 1>(args);
}
template <class Config, int kThreads>
__device__ void stream_gate_up_16(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, true, false, 2>(args);
}
template <class Config, int kThreads>
__device__ void stream_gate_up_lora_8(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, true, true, 1>(args);
}
template <class Config, int kThreads>
__device__ void stream_gate_up_lora_16(const MoeStreamArgs& args) {
  stream_block<Config, kThreads, true, true, 2>(args);
}

}  // namespace amphora
