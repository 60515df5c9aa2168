//! A point in a stream.

use std::sync::Arc;
use std::time::Duration;

use amphora_hal::Result;
use cudarc::driver::sys::{self, CUevent, CUresult};

use super::{Context, check};

/// Recorded once, when it is made.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: an event handle may be used from any thread; the driver locks what it shares.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that no stream has passed yet; `Stream::record` records it.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = flags as u32;
        // SAFETY: the context is current; writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { context: context.clone(), raw })
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Whether the stream has passed it; only looks.
    pub(crate) fn is_done(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits on the host.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: made once in `new`; the driver keeps what a running wait still needs.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// A point in a stream that tells when it was passed.
#[derive(Debug)]
pub(crate) struct Clock(Event);

impl Clock {
    /// One that no stream has passed yet; `Stream::clock` records it.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Event::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT).map(Clock)
    }

    pub(super) fn raw(&self) -> CUevent {
        self.0.raw
    }

    /// From `earlier` to it; both have been passed.
    pub(crate) fn since(&self, earlier: &Clock) -> Result<Duration> {
        self.0.context.bind()?;
        let mut ms = 0f32;
        // SAFETY: both events live; writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&mut ms, earlier.raw(), self.raw())
        })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}
