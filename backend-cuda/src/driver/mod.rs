//! Safe owners over the raw driver bindings.
//!
//! This layer settles every lifetime and thread question, so that the layers above are safe code:
//!
//! * A context stays retained while any owner made in it lives; each call makes it current first, so
//!   owners may be used from any thread.
//! * Owners free on drop. An owner that work may still use waits for the device first.
//! * A code becomes an [`Error`] where it appears, with the call's name; codes after which the context
//!   is unusable become [`Error::Lost`].
//! * No function of a library is called before [`library`] has found the library and every symbol that
//!   is used, so a missing one is an error of [`Context::open`] and never a panic.

mod context;
pub(crate) mod cubin;
pub(crate) mod cublaslt;
mod event;
mod graph;
pub(crate) mod library;
mod memory;
mod module;
pub(crate) mod nvrtc;
pub(crate) mod nvtx;
mod stream;
mod tensor_map;

pub(crate) use context::Context;
pub use context::Limits;
pub(crate) use event::{Clock, Event};
pub(crate) use graph::Graph;
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use module::{Function, Module};
pub(crate) use stream::{Geometry, Part, Stream};
pub(crate) use tensor_map::Tiled;

use std::ffi::CStr;

use amphora_hal::{Error, Result};
use cudarc::driver::sys::{self, CUresult};

/// Codes after which every later call of the context fails as well.
fn is_fatal(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
    )
}

/// The code of a call that found no device memory.
pub(crate) const OUT_OF_MEMORY: i64 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as i64;

/// Converts a driver's code; `call` is the function's name.
fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let message = message(code);
    Err(if is_fatal(code) {
        Error::Lost { message: format!("{call}: {message}") }
    } else {
        Error::Driver { call, code: code as i64, message }
    })
}

fn message(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: a code came from the driver, so it is loaded; the call writes one pointer.
    let found = unsafe { sys::cuGetErrorString(code, &mut text) };
    if found != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: on success the driver gives a static string that ends in zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
