//! Named ranges for the vendor's profilers (NVTX): the operators and layers that the host puts on streams.

use std::ffi::{CString, c_char, c_int};

use amphora_hal::{Error, Result};
use libloading::Library;

/// Where the two calls may be: the toolkit's library of CUDA 12.9 and later, and the one before it.
const NAMES: [&str; 4] =
    ["libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so.1", "libnvToolsExt.so"];

/// The calls that begin and end a range of the calling thread.
#[derive(Debug)]
pub(crate) struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

impl Nvtx {
    /// Opens the library.
    ///
    /// # Errors
    /// It is not installed, or is another one.
    pub(crate) fn open() -> Result<Self> {
        let missing = |message| Error::Driver { call: "dlopen", code: 0, message };
        // SAFETY: opening the library runs its initialisers, which look for a profiler that listens.
        let found = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library =
            found.ok_or_else(|| missing(format!("none of {} was found", NAMES.join(", "))))?;
        // SAFETY: the vendor declares both like this: `int nvtxRangePushA(const char*)` and
        // `int nvtxRangePop(void)`.
        let calls = unsafe {
            let push = library.get(b"nvtxRangePushA\0").map(|symbol| *symbol);
            push.and_then(|push| Ok(Nvtx { push, pop: *library.get(b"nvtxRangePop\0")? }))
        };
        let nvtx = calls.map_err(|error| missing(error.to_string()))?;
        // Never closed: the two addresses are used until the process ends.
        std::mem::forget(library);
        Ok(nvtx)
    }

    /// Begins a range within the one that is open.
    pub(crate) fn push(&self, name: &str) {
        if let Ok(name) = CString::new(name) {
            // SAFETY: the library stays loaded; it reads a string that ends in zero, before it returns.
            let _ = unsafe { (self.push)(name.as_ptr()) };
        }
    }

    /// Ends the range that began last.
    pub(crate) fn pop(&self) {
        // SAFETY: the library stays loaded; without an open range it does nothing.
        let _ = unsafe { (self.pop)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_open_and_close_or_the_library_is_named() {
        match Nvtx::open() {
            Ok(nvtx) => {
                nvtx.push("layer 0");
                nvtx.pop();
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libnvtx3interop.so.1") && !text.contains('\n'), "{text}");
            }
        }
    }
}
