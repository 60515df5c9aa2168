//! The runtime's symbols. Handles are numbers that are looked up, never addresses that are followed,
//! so a stale or foreign handle is an error and not a crash.

mod capture;
mod codes;
mod device;
mod event;
mod kernel;
mod launch;
mod memory;
mod state;
mod stream;
mod task;

pub use capture::*;
pub use codes::*;
pub use device::*;
pub use event::*;
pub use kernel::*;
pub use memory::*;
pub(crate) use state::{Fail, State, enter, fail, in_context};
pub use stream::*;
pub(crate) use task::{Operator, Task, enqueue};

/// Any handle: a number of the state as a pointer.
pub type Handle = *mut std::ffi::c_void;
