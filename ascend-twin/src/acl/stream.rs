//! Streams: queues that run when somebody asks.

use std::collections::VecDeque;
use std::ffi::c_void;

use super::Handle;
use super::capture::Capture;
use super::codes::{CAPTURE_FORBIDS, PARAM_INVALID};
use super::device::put;
use super::state::{Fail, State, fail, in_context};
use super::task::{Task, enqueue, run};

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) queue: VecDeque<Task>,
    pub(crate) capture: Option<Capture>,
}

impl Stream {
    pub(crate) fn new(context: u64) -> Self {
        Stream { context, queue: VecDeque::new(), capture: None }
    }
}

/// Runs the first task of a stream, if there is one.
pub(super) fn advance(state: &mut State, stream: u64) -> bool {
    let Some(found) = state.streams.get_mut(&stream) else {
        return false;
    };
    let context = found.context;
    match found.queue.pop_front() {
        Some(task) => {
            run(state, context, &task);
            true
        }
        None => false,
    }
}

/// Runs everything on a stream.
pub(super) fn drain(state: &mut State, stream: u64) {
    while advance(state, stream) {}
}

/// Refuses to wait for a stream that is being captured: nothing on it runs. The capture is spoilt.
pub(super) fn not_captured(state: &mut State, stream: u64) -> Result<(), Fail> {
    if let Some(capture) = &mut state.stream_mut(stream).capture {
        capture.spoilt = true;
        return fail(CAPTURE_FORBIDS, "the stream is being captured");
    }
    Ok(())
}

/// `aclrtCreateStream`.
///
/// # Safety
/// `stream` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateStream(stream: *mut Handle) -> i32 {
    in_context("aclrtCreateStream", |state, context| {
        let id = state.handle();
        state.streams.insert(id, Stream::new(context));
        // SAFETY: handed on to this function's caller.
        unsafe { put(stream, id as *mut c_void) }
    })
}

/// `aclrtDestroyStream`: what lies on it runs first.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(stream: Handle) -> i32 {
    in_context("aclrtDestroyStream", |state, context| {
        if stream.is_null() {
            return fail(PARAM_INVALID, "the default stream is the context's own");
        }
        let id = state.stream_id(context, stream as u64)?;
        drain(state, id);
        state.streams.remove(&id);
        Ok(())
    })
}

/// `aclrtSynchronizeStream`: where faults surface.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: Handle) -> i32 {
    in_context("aclrtSynchronizeStream", |state, context| {
        let id = state.stream_id(context, stream as u64)?;
        not_captured(state, id)?;
        drain(state, id);
        state.healthy(context)
    })
}

/// `aclrtStreamQuery`: COMPLETE is 0. Looking makes the stream move on afterwards, as time would.
///
/// # Safety
/// `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtStreamQuery(stream: Handle, status: *mut i32) -> i32 {
    in_context("aclrtStreamQuery", |state, context| {
        let id = state.stream_id(context, stream as u64)?;
        not_captured(state, id)?;
        let busy = !state.stream_mut(id).queue.is_empty();
        drain(state, id);
        state.healthy(context)?;
        // SAFETY: handed on to this function's caller.
        unsafe { put(status, i32::from(busy)) }
    })
}

/// `aclrtStreamWaitEvent`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: Handle, event: Handle) -> i32 {
    in_context("aclrtStreamWaitEvent", |state, context| {
        let id = state.stream_id(context, stream as u64)?;
        let event = event as u64;
        let ticket = state.recorded(event)?;
        if state.stream_mut(id).capture.is_some() {
            return fail(
                super::codes::NOT_SUPPORTED,
                "the twin does not model events under capture",
            );
        }
        enqueue(state, id, Task::Wait(event, ticket))
    })
}
