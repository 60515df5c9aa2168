// Programmatic dependent launch: a kernel begins while the one in front of it in the stream ends.
//
// A kernel that is launched overlapped may read weights, adapters and the plan at once: whatever wrote
// those had passed before the first kernel of the step began. Everything else it reads or writes only
// behind `wait_for_front`, which each of its threads executes (also those that have nothing to do, so
// that its own end implies the end of all in front of it). `let_next_begin` is a hint: without it the
// next kernel begins when all blocks have ended. On architectures without the instructions both are
// empty, and the launch is a plain one.
#pragma once

namespace amphora {

// Returns when every kernel in front has ended and its writes can be seen.
__device__ __forceinline__ void wait_for_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may be scheduled once every block has said so or ended.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace amphora
