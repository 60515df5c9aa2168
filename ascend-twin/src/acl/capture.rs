//! Capture: what is put on a stream is kept instead of run, and runs as often as asked later.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread::ThreadId;

use super::Handle;
use super::codes::{
    CAPTURE_INVALIDATED, CAPTURE_UNMATCHED, CAPTURE_WRONG_THREAD, MODEL_RUNNING, PARAM_INVALID,
    STREAM_CAPTURED, STREAM_NOT_CAPTURED,
};
use super::device::put;
use super::state::{fail, in_context, invalid};
use super::task::{Task, enqueue};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// A capture that is open on a stream.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: i32,
    thread: ThreadId,
    /// A forbidden call was made: there will be no model.
    pub(crate) spoilt: bool,
    pub(crate) tasks: Vec<Task>,
}

impl Capture {
    /// Whether calls that block or set memory are forbidden in `thread`.
    pub(super) fn forbids(&self, thread: ThreadId) -> bool {
        match self.mode {
            GLOBAL => true,
            THREAD_LOCAL => self.thread == thread,
            _ => false,
        }
    }
}

/// What was captured.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tasks: Vec<Task>,
}

/// `aclmdlRICaptureBegin`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureBegin(stream: Handle, mode: i32) -> i32 {
    in_context("aclmdlRICaptureBegin", |state, context| {
        if stream.is_null() || !(GLOBAL..=RELAXED).contains(&mode) {
            return fail(PARAM_INVALID, "the default stream, or an unknown mode");
        }
        let id = state.stream_id(context, stream as u64)?;
        let stream = state.stream_mut(id);
        if stream.capture.is_some() {
            return fail(STREAM_CAPTURED, "the stream is being captured already");
        }
        stream.capture = Some(Capture {
            mode,
            thread: std::thread::current().id(),
            spoilt: false,
            tasks: Vec::new(),
        });
        Ok(())
    })
}

/// `aclmdlRICaptureEnd`.
///
/// # Safety
/// `model` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureEnd(stream: Handle, model: *mut Handle) -> i32 {
    in_context("aclmdlRICaptureEnd", |state, context| {
        let id = state.stream_id(context, stream as u64)?;
        let Some(capture) = &state.stream_mut(id).capture else {
            return fail(STREAM_NOT_CAPTURED, "the stream is not being captured");
        };
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return fail(
                CAPTURE_WRONG_THREAD,
                "begun in another thread, and the mode is not relaxed",
            );
        }
        let Some(capture) = state.stream_mut(id).capture.take() else {
            return fail(CAPTURE_UNMATCHED, "no begin");
        };
        if capture.spoilt {
            return fail(CAPTURE_INVALIDATED, "a forbidden call spoilt the capture");
        }
        let handle = state.handle();
        let made = Model { tasks: capture.tasks };
        state.models.insert(handle, Arc::new(made));
        // SAFETY: handed on to this function's caller.
        unsafe { put(model, handle as *mut c_void) }
    })
}

/// `aclmdlRIExecuteAsync`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIExecuteAsync(model: Handle, stream: Handle) -> i32 {
    in_context("aclmdlRIExecuteAsync", |state, context| {
        let on = state.stream_id(context, stream as u64)?;
        let Some(found) = state.models.get(&(model as u64)).cloned() else {
            return invalid("model", model as u64);
        };
        enqueue(state, on, Task::Graph(found))
    })
}

/// `aclmdlRIDestroy`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIDestroy(model: Handle) -> i32 {
    in_context("aclmdlRIDestroy", |state, _| {
        let Some(found) = state.models.remove(&(model as u64)) else {
            return invalid("model", model as u64);
        };
        if Arc::strong_count(&found) > 1 {
            state.models.insert(model as u64, found);
            return fail(MODEL_RUNNING, "the model still lies on a stream");
        }
        Ok(())
    })
}
