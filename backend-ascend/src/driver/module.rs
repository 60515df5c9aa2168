//! Kernel binaries, their functions, and the launch.

use std::ffi::CString;
use std::path::Path;

use amphora_hal::{Error, Result};

use super::{Context, Stream, acl};

/// A loaded kernel binary.
#[derive(Debug)]
pub(super) struct Module {
    context: Context,
    handle: usize,
}

/// A kernel of a [`Module`], which must outlive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Function(usize);

fn c_string(call: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Driver {
        call,
        code: 0,
        message: format!("{text:?} has a zero byte"),
    })
}

impl Module {
    /// Loads the binary at an absolute path.
    ///
    /// # Errors
    /// The runtime's: no such file, or not for this product.
    pub(super) fn load(context: &Context, path: &Path) -> Result<Self> {
        let api = context.enter()?;
        let text = c_string("aclrtBinaryLoadFromFile", &path.to_string_lossy())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `text` ends in zero and outlives the call, null asks for default options, `handle`
        // is valid for the write.
        unsafe {
            acl!(api, aclrtBinaryLoadFromFile(text.as_ptr(), std::ptr::null_mut(), &raw mut handle))
        }?;
        Ok(Module { context: context.clone(), handle: handle as usize })
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// The runtime's: the binary has no such kernel.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let api = self.context.enter()?;
        let text = c_string("aclrtBinaryGetFunction", name)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the binary is alive, `text` ends in zero, `handle` is valid for the write.
        unsafe {
            acl!(api, aclrtBinaryGetFunction(self.handle as _, text.as_ptr(), &raw mut handle))
        }?;
        Ok(Function(handle as usize))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A launch of it may still run. Errors have no one left to go to.
        let _ = self.context.synchronize();
        if let Ok(api) = self.context.enter() {
            // SAFETY: the binary is ours and idle.
            let _ = unsafe { acl!(api, aclrtBinaryUnLoad(self.handle as _)) };
        }
    }
}

/// Puts a kernel on a stream: `addresses` in parameter order, then `tiling`, which travels with the
/// launch. Values are read now; under capture they are part of the graph.
///
/// # Errors
/// The runtime's.
///
/// # Safety
/// The kernel takes exactly these parameters, and `tiling` has its block's layout.
pub(super) unsafe fn launch(
    stream: &mut Stream,
    function: Function,
    blocks: u32,
    addresses: &[usize],
    tiling: &[u8],
) -> Result<()> {
    let api = stream.context().enter()?;
    let mut list = std::ptr::null_mut();
    let mut parameter = std::ptr::null_mut();
    let mut block = std::ptr::null_mut();
    // SAFETY: all handles come from the calls above them, results are valid for their writes, an
    // address is read as 8 bytes at once, and `block` has room for what it was asked for.
    unsafe {
        acl!(api, aclrtKernelArgsInit(function.0 as _, &raw mut list))?;
        for address in addresses {
            let mut value = *address as u64;
            acl!(
                api,
                aclrtKernelArgsAppend(
                    list,
                    (&raw mut value).cast(),
                    size_of::<u64>(),
                    &raw mut parameter
                )
            )?;
        }
        acl!(api, aclrtKernelArgsAppendPlaceHolder(list, &raw mut parameter))?;
        acl!(
            api,
            aclrtKernelArgsGetPlaceHolderBuffer(list, parameter, tiling.len(), &raw mut block)
        )?;
        block.cast::<u8>().copy_from_nonoverlapping(tiling.as_ptr(), tiling.len());
        acl!(api, aclrtKernelArgsFinalize(list))?;
        acl!(
            api,
            aclrtLaunchKernelWithConfig(
                function.0 as _,
                blocks,
                stream.handle() as _,
                std::ptr::null_mut(),
                list,
                std::ptr::null_mut()
            )
        )
    }
}
