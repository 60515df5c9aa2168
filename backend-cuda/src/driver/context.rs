//! The primary context of one device, and what the device is.

use std::cell::Cell;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use amphora_hal::{Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute};

use super::{check, library};

/// Held shared by each capture, and alone by whoever waits for the whole context.
static CAPTURES: RwLock<()> = RwLock::new(());

thread_local! {
    /// Whether this thread is inside a capture.
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, nobody waits for the whole context.
pub(crate) struct CaptureHold {
    _shared: RwLockReadGuard<'static, ()>,
}

impl CaptureHold {
    pub(crate) fn take() -> Self {
        let hold = CaptureHold { _shared: CAPTURES.read().unwrap_or_else(PoisonError::into_inner) };
        CAPTURING.set(true);
        hold
    }
}

impl Drop for CaptureHold {
    fn drop(&mut self) {
        CAPTURING.set(false);
    }
}

/// What a launch must stay within.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Streaming multiprocessors: blocks of a whole processor's memory that run at once.
    pub processors: usize,
    /// Most bytes of shared memory of a block, its kernel's own included.
    pub shared: usize,
    /// Whether a kernel may begin while the one in front of it ends (compute capability 9.0).
    pub overlap: bool,
    /// Whether there are products of warp groups (wgmma, compute capability 9.0 alone).
    pub groups: bool,
}

/// A retained primary context.
#[derive(Debug)]
pub(crate) struct Context {
    device: CUdevice,
    raw: CUcontext,
    limits: Limits,
}

// SAFETY: a context handle may be used from any thread; the driver locks what it shares.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of device `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        library::require_driver()?;
        // SAFETY: the driver is loaded with all of its symbols; the argument must be 0.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut count = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        let Some(index) = i32::try_from(ordinal).ok().filter(|&index| index < count) else {
            return Err(Error::Driver {
                call: "cuDeviceGet",
                code: 0,
                message: format!("device {ordinal} of {count}: there is no such GPU"),
            });
        };
        let mut device = 0;
        // SAFETY: writes one integer; the ordinal is below the count.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index) })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, which is released once, in `drop`.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        let mut context = Context {
            device,
            raw,
            limits: Limits { processors: 0, shared: 0, overlap: false, groups: false },
        };
        context.limits = context.read_limits()?;
        context.bind()?;
        Ok(Arc::new(context))
    }

    fn read_limits(&self) -> Result<Limits> {
        use CUdevice_attribute::*;
        let processors = self.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = self.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let capability = self.capability()?;
        Ok(Limits {
            processors: processors as usize,
            shared: shared as usize,
            overlap: capability.0 >= 9,
            groups: capability == (9, 0),
        })
    }

    /// What a launch must stay within.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Makes the context current on this thread, as every call below needs it.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Waits for everything in the context, and first for captures of other threads: the driver refuses
    /// to wait beside one, and breaks it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        if CAPTURING.get() {
            return Err(Error::invalid("capture", "the host waits for the device inside its body"));
        }
        let _alone = CAPTURES.write().unwrap_or_else(PoisonError::into_inner);
        self.bind()?;
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// The device as its vendor names it.
    pub(crate) fn name(&self) -> Result<String> {
        let mut name = [0u8; 256];
        // SAFETY: the driver writes at most the given bytes, ending in zero.
        check("cuDeviceGetName", unsafe {
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, self.device)
        })?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Bytes of device memory: all of it, and what is free now.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; writes two integers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((total, free))
    }

    /// Major and minor compute capability.
    pub(crate) fn capability(&self) -> Result<(u32, u32)> {
        use CUdevice_attribute::*;
        let major = self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major, minor))
    }

    fn attribute(&self, which: CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, self.device)
        })?;
        Ok(value.unsigned_abs())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; every owner made in it holds an `Arc` and is gone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
