//! `Cuda`: the contract of `amphora_hal` on NVIDIA GPUs of compute capability 8.0 and later.
//!
//! The crate builds on any machine: driver and compiler are loaded when a device is opened, and their
//! absence is an error of one line. Three layers, never skipped:
//!
//! 1. the raw bindings of `cudarc`;
//! 2. `driver`: safe owners, where every lifetime and thread question is settled;
//! 3. `ops`: an operator to its arguments, a grid from `heuristics`, and `launch`, the one call that
//!    puts a kernel on a stream.
//!
//! Kernels are the sources of `amphora_cuda_kernels`, compiled by [`jit`] when a device is opened and
//! kept on disk; after that nothing compiles, allocates or waits in a step, and everything a step
//! launches can be captured. Streams are ordered by events alone.
//!
//! Knows nothing of requests, of adapters by name, or of HTTP.

mod device;
mod driver;
mod heuristics;
pub mod jit;
mod kernels;
mod launch;
mod ops;
mod pack;
pub mod tuning;

pub use device::{
    Cuda, CudaBuffer, CudaEvent, CudaGraph, CudaHost, CudaStream, Launched, Launches,
};
