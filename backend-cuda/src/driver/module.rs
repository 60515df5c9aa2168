//! Machine code on the device.

use std::ffi::CString;
use std::sync::Arc;

use amphora_hal::{Error, Result};
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};

use super::{Context, check, cubin};

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
    pub(crate) fn load(context: &Arc<Context>, code: &[u8]) -> Result<Arc<Self>> {
        if !cubin::is_whole(code) {
            let what = format!("{} bytes that are no whole cubin", code.len());
            return Err(Error::invalid("module", what));
        }
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current. The driver takes no length; all that the image's header leads to
        // lies within it, as was just seen, and it is the compiler's own bytes or a file of them.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut raw, code.as_ptr().cast())
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
        let function = Function { _module: self.clone(), raw };
        function.allow_most()?;
        Ok(function)
    }
}

impl Function {
    /// Lets launches ask for all the shared memory that a block may have, and for clusters of 16
    /// where there are clusters, so that no launch has to set anything first.
    fn allow_most(&self) -> Result<()> {
        use CUfunction_attribute::*;
        let limits = self._module.context.limits();
        let mut own = 0;
        // SAFETY: the function lives; writes one integer.
        check("cuFuncGetAttribute", unsafe {
            sys::cuFuncGetAttribute(&mut own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.raw)
        })?;
        let left = limits.shared.saturating_sub(own.unsigned_abs() as usize);
        let left = i32::try_from(left).unwrap_or(i32::MAX);
        // SAFETY: the function lives; the value is within the device's limit.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(self.raw, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, left)
        })?;
        // All of a processor's memory that may be shared memory, for every kernel: it cannot be divided
        // anew while a kernel runs, so one that wants less would keep the next from beginning beside it.
        // SAFETY: the function lives; the value is a share in percent.
        check("cuFuncSetAttribute", unsafe {
            let id = CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            sys::cuFuncSetAttribute(self.raw, id, 100)
        })?;
        if !limits.overlap {
            return Ok(());
        }
        // SAFETY: the function lives; clusters came with the architecture of overlapped launches.
        check("cuFuncSetAttribute", unsafe {
            let id = CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            sys::cuFuncSetAttribute(self.raw, id, 1)
        })
    }

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
