//! In-order queues.

use std::sync::Arc;

use amphora_hal::{DeviceBytes, Error, Result};

use super::event::EventPool;
use super::{Buffer, Context, Event, Graph, acl};
use crate::sys;

/// Awaited events are looked through once there are this many.
const AWAITED: usize = 64;

/// A stream and the workspace of its operators.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    events: Arc<EventPool>,
    handle: usize,
    workspace: Option<Arc<Buffer>>,
    capturing: bool,
    /// Events that the stream may still have to wait for: kept so that they are not destroyed.
    awaited: Vec<Event>,
}

impl Stream {
    pub(crate) fn new(
        context: &Context,
        events: &Arc<EventPool>,
        workspace: Option<Buffer>,
    ) -> Result<Self> {
        let api = context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is valid for the write.
        unsafe { acl!(api, aclrtCreateStream(&raw mut handle)) }?;
        Ok(Stream {
            context: context.clone(),
            events: events.clone(),
            handle: handle as usize,
            workspace: workspace.map(Arc::new),
            capturing: false,
            awaited: Vec::new(),
        })
    }

    /// The runtime's handle.
    pub(super) fn handle(&self) -> usize {
        self.handle
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Address and bytes of the workspace.
    pub(crate) fn workspace(&self) -> (usize, usize) {
        self.workspace.as_ref().map_or((0, 0), |buffer| (buffer.address(), buffer.len()))
    }

    /// Whether what is put on it is recorded instead of run.
    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing
    }

    pub(crate) fn record(&mut self) -> Result<Event> {
        self.not_capturing("record")?;
        Event::record(&self.context, &self.events, self.handle)
    }

    pub(crate) fn wait(&mut self, event: &Event) -> Result<()> {
        self.not_capturing("wait")?;
        let api = self.context.enter()?;
        if self.awaited.len() >= AWAITED {
            let mut status = sys::ACL_STREAM_STATUS_NOT_READY;
            // SAFETY: the stream is ours, `status` is valid for the write.
            unsafe { acl!(api, aclrtStreamQuery(self.handle as _, &raw mut status)) }?;
            if status == sys::ACL_STREAM_STATUS_COMPLETE {
                self.awaited.clear();
            }
        }
        self.awaited.push(event.clone());
        let handle = event.handle_for_wait();
        // SAFETY: the stream is ours, and the event stays alive in `awaited`.
        unsafe { acl!(api, aclrtStreamWaitEvent(self.handle as _, handle as _)) }
    }

    /// Host to device copies of pinned bytes, or the other way, in stream order.
    ///
    /// # Safety
    /// Until an event recorded behind it has passed, the pinned bytes are not touched or freed, and
    /// `device` stays reserved.
    pub(super) unsafe fn copy(
        &mut self,
        to: usize,
        from: usize,
        bytes: usize,
        up: bool,
    ) -> Result<()> {
        let api = self.context.enter()?;
        let kind = if up { sys::ACL_MEMCPY_HOST_TO_DEVICE } else { sys::ACL_MEMCPY_DEVICE_TO_HOST };
        // SAFETY: both sides are valid for `bytes` by this function's own contract; destMax is exact.
        unsafe {
            acl!(api, aclrtMemcpyAsync(to as _, bytes, from as _, bytes, kind, self.handle as _))
        }
    }

    /// Waits for everything on it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let api = self.context.enter()?;
        // SAFETY: the stream is ours.
        unsafe { acl!(api, aclrtSynchronizeStream(self.handle as _)) }
    }

    /// Records what `body` puts on the stream. The capture is closed whatever happens in between.
    pub(crate) fn capture(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<Graph> {
        self.not_capturing("capture")?;
        let api = self.context.enter()?;
        // Thread-local: a loader thread that copies meanwhile must not spoil the capture.
        let mode = sys::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not capturing.
        unsafe { acl!(api, aclmdlRICaptureBegin(self.handle as _, mode)) }?;
        self.capturing = true;
        let mut guard = EndCapture(self);
        let outcome = body(guard.0);
        let ended = guard.end();
        drop(guard);
        let graph = ended.map(|model| Graph::new(&self.context, model, self.workspace.clone()));
        outcome.and(graph)
    }

    /// Runs a recorded graph.
    pub(crate) fn replay(&mut self, graph: &Graph) -> Result<()> {
        self.not_capturing("replay")?;
        let api = self.context.enter()?;
        // SAFETY: stream and model are alive; what the model's tasks address is reserved memory that
        // outlives graphs by the contract of the pools.
        unsafe { acl!(api, aclmdlRIExecuteAsync(graph.model() as _, self.handle as _)) }
    }

    pub(crate) fn not_capturing(&self, op: &'static str) -> Result<()> {
        if self.capturing {
            return Err(Error::invalid(op, "inside a capture"));
        }
        Ok(())
    }
}

/// Ends a capture on every way out of `capture`, a panic included.
struct EndCapture<'a>(&'a mut Stream);

impl EndCapture<'_> {
    fn end(&mut self) -> Result<usize> {
        self.0.capturing = false;
        let api = self.0.context.enter()?;
        let mut model = std::ptr::null_mut();
        // SAFETY: the stream is ours, `model` is valid for the write.
        unsafe { acl!(api, aclmdlRICaptureEnd(self.0.handle as _, &raw mut model)) }?;
        Ok(model as usize)
    }
}

impl Drop for EndCapture<'_> {
    fn drop(&mut self) {
        if self.0.capturing
            && let Ok(model) = self.end()
        {
            // A body that panicked: its graph is dropped here.
            drop(Graph::new(&self.0.context, model, None));
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Dropping waits for the device. Errors have no one left to go to.
        let _ = self.synchronize();
        if let Ok(api) = self.context.enter() {
            // SAFETY: the stream is ours, and nothing lies on it any more.
            let _ = unsafe { acl!(api, aclrtDestroyStream(self.handle as _)) };
        }
    }
}
