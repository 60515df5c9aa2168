//! Named ranges for the vendor's profilers (NVTX): the operators and layers that the host puts on streams.

use std::ffi::{CString, c_char, c_int};

use amphora_hal::{Error, Mark, Result};
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

/// The ranges of one stream: a layer's, and an operator's within it.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    in_layer: bool,
}

impl Ranges {
    /// Opens and closes what a mark says.
    pub(crate) fn hear(&mut self, nvtx: &Nvtx, mark: Mark) {
        match mark {
            Mark::Layer(layer) => {
                if self.in_layer {
                    nvtx.pop();
                }
                self.in_layer = layer.is_some();
                if let Some(layer) = layer {
                    nvtx.push(&format!("layer {layer}"));
                }
            }
            Mark::Begin(op) => nvtx.push(&format!("{op:?}")),
            Mark::End => nvtx.pop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::CStr;

    use amphora_hal::OpKind;

    use super::*;

    thread_local! {
        /// What a profiler would have heard: `name(` where a range begins, `)` where one ends.
        static HEARD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// # Safety
    /// The name ends in zero and outlives the call.
    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: the caller's promise; `Nvtx::push` keeps it.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        HEARD.with_borrow_mut(|heard| heard.push(name + "("));
        0
    }

    extern "C" fn pop() -> c_int {
        HEARD.with_borrow_mut(|heard| heard.push(")".to_owned()));
        0
    }

    /// Every range that begins ends, each operator's within its layer's.
    #[test]
    fn ranges_of_layers_and_operators_are_nested_and_end() {
        let nvtx = Nvtx { push, pop };
        let mut ranges = Ranges::default();
        let op = |op| [Mark::Begin(op), Mark::End];
        let layer = |i| [&[Mark::Layer(Some(i))][..], &op(OpKind::LoraLinear)].concat();
        let (embed, none) = (op(OpKind::Embed), [Mark::Layer(None)]);
        let step = [&embed[..], &layer(0), &layer(1), &none, &op(OpKind::Sample)].concat();
        // One that fails in its first layer marks no other, and the end of layers all the same.
        let failed = [&embed[..], &layer(0), &none].concat();
        for mark in [step.clone(), failed, step].concat() {
            ranges.hear(&nvtx, mark);
        }
        let heard = HEARD.take();
        let step = "Embed( ) layer 0( LoraLinear( ) ) layer 1( LoraLinear( ) ) Sample( )";
        let failed = "Embed( ) layer 0( LoraLinear( ) )";
        assert_eq!(heard.join(" "), [step, failed, step].join(" "));
    }

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
