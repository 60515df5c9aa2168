//! Safe owners of what the runtime hands out. All arguments about lifetimes and threads are settled
//! here, and `Drop` frees.
//!
//! * Calls act on the calling thread's *current context*, so each begins with [`Context::enter`].
//! * Handles are kept as integers: they name things of the runtime and are never followed here.
//! * Every owner holds its [`Context`], which therefore goes last: events, streams, memory, context,
//!   device, in the order that the runtime wants.
//! * A device address is never turned into a reference. A wrong one is a fault of the device, which
//!   surfaces as `Lost`, not as undefined behaviour of the host.

mod context;
mod event;
mod graph;
mod kernels;
mod memory;
mod module;
mod operators;
mod pools;
mod stream;
mod transfer;

use amphora_hal::{Error, Result};

pub(crate) use context::Context;
pub use event::Event;
pub(crate) use event::EventPool;
pub use graph::Graph;
pub(crate) use kernels::{Kernels, LoraFused};
pub use memory::PinnedMemory;
pub(crate) use operators::{Executor, GroupedMatmul, ScalarArg, TensorArg, View, data_type};
pub use pools::Buffer;
pub(crate) use pools::Pools;
pub use stream::Stream;
pub(crate) use transfer::{Stretch, download, upload};

use crate::sys::Api;

/// Codes after which the context is gone: exceptions, traps and timeouts of cores, memory errors.
const LOST: [i32; 10] =
    [507_014, 507_015, 507_016, 507_034, 507_035, 507_036, 507_053, 507_054, 507_055, 507_056];
/// Codes of memory that could not be had.
const NO_MEMORY: [i32; 3] = [200_000, 207_001, 207_018];

/// Turns a vendor's code into a result, with the vendor's words where it has some.
fn check(api: &Api, call: &'static str, code: Result<i32>) -> Result<()> {
    let code = code?;
    if code == 0 {
        return Ok(());
    }
    let message = recent_message(api).unwrap_or_else(|| "no message".to_owned());
    if LOST.contains(&code) {
        return Err(Error::Lost { message: format!("{call} gave code {code}: {message}") });
    }
    Err(Error::Driver { call, code: i64::from(code), message })
}

/// Whether an error says that memory could not be had.
fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Driver { code, .. } if NO_MEMORY.iter().any(|c| i64::from(*c) == *code))
}

fn recent_message(api: &Api) -> Option<String> {
    let get = api.table().aclGetRecentErrMsg.as_ref().ok()?;
    // SAFETY: the function takes nothing and gives null or a string that ends in zero, valid until
    // this thread's next call; it is copied at once.
    unsafe {
        let text = get();
        (!text.is_null())
            .then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().trim().to_owned())
    }
}

/// Calls a vendor function and checks its code. The caller's `unsafe` block stands around it.
macro_rules! acl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $crate::driver::check(
            $api,
            stringify!($name),
            $crate::sys::invoke!($api, $name($($arg),*)),
        )
    };
}
use acl;
