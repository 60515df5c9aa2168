// The host's stand-in for the vendor's header of the same name: the part of AscendC that our kernels
// use, run on a CPU, one instruction at a time, with the rules of the hardware checked at each.
//
// It imitates an AIV core of the 910B family (no cube unit): 192 KiB of UB, pipes S, V, MTE2 and
// MTE3 that run ahead of each other unless told to wait, and no vector arithmetic in bf16. It gives
// no timing. A broken rule throws `Fault`, which the launch turns into the vendor's error at the next
// synchronisation. What is not here does not compile, so a kernel cannot lean on what is not modelled.
#pragma once

#define AMPHORA_HOST_TWIN 1
#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t *

#include "types.h"
// The core that runs: UB, pipes, faults.
#include "core.h"
// Tensors, then what moves and computes.
#include "tensor.h"
#include "pipe.h"
#include "copy.h"
#include "vector.h"
// The entry that a launch calls for each core.
#include "run.h"

// Kernel kinds are a matter of the device's build; this header models vector cores only.
#define KERNEL_TYPE_AIV_ONLY 0
#define KERNEL_TASK_TYPE_DEFAULT(kind) static_assert((kind) == KERNEL_TYPE_AIV_ONLY, "vector kernels only")
