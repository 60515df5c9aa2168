//! One device and one context on it, made current on whatever thread calls.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use amphora_hal::{Error, Result};

use super::acl;
use crate::sys::{self, Api, invoke};

/// `aclInit` was done before, by us or by another user of the process: not an error.
const REPEAT_INITIALIZE: i32 = 100_002;

thread_local! {
    /// Which of our contexts is current here; 0 is none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Device memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryInfo {
    /// What neither we nor other processes hold.
    pub(crate) free: usize,
    pub(crate) total: usize,
}

/// A context; clones are handles to the same.
#[derive(Debug, Clone)]
pub(crate) struct Context(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    api: Arc<Api>,
    device: i32,
    handle: usize,
    /// Unlike the handle never used twice, so the thread-local note cannot lie.
    number: u64,
}

impl Context {
    /// Initialises the runtime, takes device `ordinal`, and makes a context of our own on it.
    ///
    /// `aclFinalize` is never called: it would drop the runtime under other users of the process.
    ///
    /// # Errors
    /// The runtime's, or there is no such device.
    pub(crate) fn open(api: Arc<Api>, ordinal: usize) -> Result<Self> {
        // SAFETY: null asks for the default configuration.
        let code = unsafe { invoke!(api, aclInit(std::ptr::null())) }?;
        if code != REPEAT_INITIALIZE {
            super::check(&api, "aclInit", Ok(code))?;
        }
        let mut count = 0u32;
        // SAFETY: `count` is valid for the write.
        unsafe { acl!(&api, aclrtGetDeviceCount(&raw mut count)) }?;
        let device = match i32::try_from(ordinal) {
            Ok(device) if ordinal < count as usize => device,
            _ => {
                return Err(Error::Driver {
                    call: "aclrtGetDeviceCount",
                    code: 0,
                    message: format!("device {ordinal} was asked for, there are {count}"),
                });
            }
        };
        // SAFETY: takes a number.
        unsafe { acl!(&api, aclrtSetDevice(device)) }?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is valid for the write.
        let made = unsafe { acl!(&api, aclrtCreateContext(&raw mut handle, device)) };
        if let Err(error) = made {
            // SAFETY: undoes the `aclrtSetDevice` above; the first error is the one to report.
            let _ = unsafe { acl!(&api, aclrtResetDevice(device)) };
            return Err(error);
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        CURRENT.set(number);
        Ok(Context(Arc::new(Inner { api, device, handle: handle as usize, number })))
    }

    /// Makes the context current on this thread and gives the functions to call.
    pub(crate) fn enter(&self) -> Result<&Api> {
        self.0.enter()?;
        Ok(&self.0.api)
    }

    /// The functions, for questions that need no context.
    pub(crate) fn api(&self) -> &Api {
        &self.0.api
    }

    /// The product's name.
    pub(crate) fn soc(&self) -> Result<String> {
        let api = self.enter()?;
        // SAFETY: gives null or a string that lives as long as the runtime; copied at once.
        let name = unsafe {
            let text = invoke!(api, aclrtGetSocName())?;
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        name.ok_or_else(|| Error::Driver {
            call: "aclrtGetSocName",
            code: 0,
            message: "the runtime names no product".to_owned(),
        })
    }

    /// Vector cores.
    pub(crate) fn vector_cores(&self) -> Result<usize> {
        let api = self.enter()?;
        let mut value = 0i64;
        let info = sys::ACL_DEVICE_INFO_VECTOR_CORE_NUM;
        // SAFETY: `value` is valid for the write.
        unsafe { acl!(api, aclGetDeviceCapability(self.0.device as u32, info, &raw mut value)) }?;
        Ok(usize::try_from(value).unwrap_or(0).max(1))
    }

    /// Device memory.
    pub(crate) fn memory(&self) -> Result<MemoryInfo> {
        let api = self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both are valid for the write.
        unsafe { acl!(api, aclrtGetMemInfo(sys::ACL_HBM_MEM, &raw mut free, &raw mut total)) }?;
        Ok(MemoryInfo { free, total })
    }

    /// Waits for everything on the device.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let api = self.enter()?;
        // SAFETY: takes nothing; the context is current.
        unsafe { acl!(api, aclrtSynchronizeDevice()) }
    }
}

impl Inner {
    fn enter(&self) -> Result<()> {
        if CURRENT.get() == self.number {
            return Ok(());
        }
        // SAFETY: the context is destroyed in our `Drop` alone, so it is alive.
        unsafe { acl!(&self.api, aclrtSetCurrentContext(self.handle as _)) }?;
        CURRENT.set(self.number);
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: nobody holds the context any more, since every owner of a resource holds a clone.
        // Errors have no one left to go to.
        unsafe {
            let _ = acl!(&self.api, aclrtDestroyContext(self.handle as _));
            let _ = acl!(&self.api, aclrtResetDevice(self.device));
        }
        CURRENT.set(0);
    }
}
