//! Capture of a stream, and the executable graph it gives.

use std::sync::Arc;

use amphora_hal::{Error, Result};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::context::CaptureHold;
use super::{Context, Stream, check};

/// A recorded stretch of a stream, ready to launch.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    exec: CUgraphExec,
}

// SAFETY: the handle is bound to no thread; launching goes through a stream that is borrowed alone.
unsafe impl Send for Graph {}

/// Ends the capture that it stands for, also when the body returns an error or panics.
struct Capturing<'a, S: AsMut<Stream>> {
    stream: &'a mut S,
    open: bool,
}

impl<S: AsMut<Stream>> Capturing<'_, S> {
    fn end(&mut self) -> Result<Captured> {
        self.open = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives and its capture was begun on this thread.
        check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.stream.as_mut().raw(), &mut graph)
        })?;
        if graph.is_null() {
            return Err(Error::Driver {
                call: "cuStreamEndCapture",
                code: 0,
                message: "the capture was invalidated".to_owned(),
            });
        }
        Ok(Captured(graph))
    }
}

impl<S: AsMut<Stream>> Drop for Capturing<'_, S> {
    fn drop(&mut self) {
        if self.open {
            // What was recorded is thrown away; the error that led here is the one to report.
            let _ = self.end();
        }
    }
}

/// A graph that is not instantiated yet.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: given by the driver once; an executable graph is a copy.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

impl Graph {
    /// Records what `body` enqueues on the stream that `stream` wraps. Of this thread alone: others may
    /// go on calling the driver.
    pub(crate) fn capture<S: AsMut<Stream>>(
        stream: &mut S,
        body: impl FnOnce(&mut S) -> Result<()>,
    ) -> Result<Self> {
        let context = stream.as_mut().context().clone();
        context.bind()?;
        let hold = CaptureHold::take();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and is not the null stream.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.as_mut().raw(), mode)
        })?;
        let mut capturing = Capturing { stream, open: true };
        body(capturing.stream)?;
        let captured = capturing.end()?;
        drop(hold);
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just captured; writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut exec, captured.0, 0)
        })?;
        let graph = Graph { context, exec };
        // So that the first launch does not pay for it.
        // SAFETY: both live, in one context.
        check("cuGraphUpload", unsafe {
            sys::cuGraphUpload(graph.exec, capturing.stream.as_mut().raw())
        })?;
        Ok(graph)
    }

    /// Enqueues the recorded work.
    pub(crate) fn launch(&self, stream: &mut Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both live, in one context. The addresses recorded are of pools that outlive graphs,
        // which is the contract of `hal::Device`.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A launch of it may still run.
        let _ = self.context.synchronize();
        // SAFETY: instantiated once in `capture`.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
