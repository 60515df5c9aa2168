//! Machine code on the device.

use std::ffi::CString;
use std::sync::Arc;

use amphora_hal::{Error, Result};
use cudarc::driver::sys::{self, CUfunction, CUmodule};

use super::{Context, check};

/// Loaded machine code.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

// SAFETY: a module handle may be used from any thread; after loading it is only read.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel. Keeps its module loaded.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    _module: Arc<Module>,
    raw: CUfunction,
}

// SAFETY: a function handle may be used from any thread; it is only read.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads a cubin.
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Arc<Self>> {
        // The driver takes no length, so at least the kind of file must be right; its own header then
        // bounds what is read.
        if !cubin.starts_with(b"\x7fELF") {
            return Err(Error::invalid(
                "module",
                format!("{} bytes that are no cubin", cubin.len()),
            ));
        }
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the image is a whole cubin: the compiler's own bytes, or a
        // file that was renamed into place after all of them were written.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast())
        })?;
        Ok(Arc::new(Module { context: context.clone(), raw }))
    }

    /// The kernel of that name.
    pub(crate) fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let name = CString::new(name)
            .map_err(|_| Error::invalid("module", format!("kernel name {name:?}")))?;
        self.context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends in zero; writes one handle.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr())
        })?;
        Ok(Function { _module: self.clone(), raw })
    }
}

impl Function {
    pub(super) fn raw(&self) -> CUfunction {
        self.raw
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A kernel of it may still run.
        let _ = self.context.synchronize();
        // SAFETY: loaded once in `load`; every function holds an `Arc` and is gone.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}
