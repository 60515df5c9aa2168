//! What can go wrong on a device, told apart by what the caller would do about it.

use std::path::PathBuf;

use crate::caps::OpKey;
use crate::device::Pool;

/// Shorthand used by the whole contract.
pub type Result<T> = std::result::Result<T, Error>;

/// Every error a backend or a check may return.
///
/// There is no catch-all: `OutOfMemory` wants another configuration, `Unsupported` another model or
/// dtype, `Lost` a restart; `Sealed` and `Invalid` are mistakes of the code above the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The pool cannot hold the request, now or ever, under the limits it was opened with.
    #[error("out of memory in pool {pool}: wanted {wanted} bytes, {left} left")]
    OutOfMemory {
        /// The pool that was asked.
        pool: Pool,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that were still free.
        left: usize,
    },
    /// A reservation after [`crate::Device::seal`].
    #[error("pool {pool} is sealed: {wanted} bytes were asked for after start-up")]
    Sealed {
        /// The pool that was asked.
        pool: Pool,
        /// Bytes asked for.
        wanted: usize,
    },
    /// The backend has no implementation for this operator at these types.
    #[error("{key} is not supported here: {reason}")]
    Unsupported {
        /// What was asked for.
        key: OpKey,
        /// Why not, in one line.
        reason: &'static str,
    },
    /// An operator, plan or table breaks its own contract: a bug above `hal`, never user input.
    #[error("invalid {op}: {what}")]
    Invalid {
        /// Operator, plan field or table.
        op: &'static str,
        /// The rule that was broken, with the values that broke it.
        what: String,
    },
    /// A driver call failed.
    #[error("{call} failed with code {code}: {message}")]
    Driver {
        /// The call, as the vendor names it.
        call: &'static str,
        /// The vendor's code.
        code: i64,
        /// The vendor's message, or ours where it has none.
        message: String,
    },
    /// Tuning data that the device does not take.
    #[error("tuning data {}: {field}: {what}", path.display())]
    Tuning {
        /// The file, or the folder.
        path: PathBuf,
        /// The part of it that is wrong.
        field: String,
        /// What is wrong with it, or what was expected.
        what: String,
    },
    /// The device faulted earlier; nothing on it can be trusted any more.
    #[error("the device was lost: {message}")]
    Lost {
        /// What is known about the fault.
        message: String,
    },
}

impl Error {
    /// An [`Error::Invalid`] for `op`.
    pub fn invalid(op: &'static str, what: impl Into<String>) -> Self {
        Error::Invalid { op, what: what.into() }
    }

    /// An [`Error::Tuning`] of a backend that has nothing to tune.
    pub fn nothing_to_tune(backend: &str, folder: &std::path::Path) -> Self {
        Error::Tuning {
            path: folder.to_owned(),
            field: "folder".to_owned(),
            what: format!("the backend {backend} has nothing to tune"),
        }
    }
}
