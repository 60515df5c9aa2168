//! Events: points in a stream, by ticket. Each record takes a new ticket; what waits, waits for the
//! ticket that was current when it asked.

use std::ffi::c_void;

use super::Handle;
use super::codes::{NOT_SUPPORTED, PARAM_INVALID};
use super::device::put;
use super::state::{Fail, State, fail, in_context, invalid};
use super::stream::not_captured;
use super::task::{Task, catch_up, enqueue};

const SYNC: u32 = 0x1;

#[derive(Debug)]
pub(crate) struct Event {
    /// The last record's ticket; 0 is none.
    pub(crate) recorded: u64,
    /// The last ticket that ran.
    pub(crate) passed: u64,
    /// Where it was recorded last.
    pub(crate) stream: u64,
    context: u64,
}

impl State {
    /// The ticket that a wait for `event` waits for.
    pub(super) fn recorded(&self, event: u64) -> Result<u64, Fail> {
        match self.events.get(&event) {
            None => invalid("event", event),
            Some(found) if found.recorded == 0 => {
                fail(PARAM_INVALID, "the event was never recorded")
            }
            Some(found) => Ok(found.recorded),
        }
    }

    pub(super) fn pass(&mut self, event: u64, ticket: u64) {
        if let Some(found) = self.events.get_mut(&event) {
            found.passed = found.passed.max(ticket);
        }
    }
}

/// `aclrtCreateEventExWithFlag`: of the flags only SYNC is modelled.
///
/// # Safety
/// `event` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEventExWithFlag(event: *mut Handle, flag: u32) -> i32 {
    in_context("aclrtCreateEventExWithFlag", |state, context| {
        if flag != SYNC {
            return fail(NOT_SUPPORTED, format!("flag {flag:#x} is not modelled"));
        }
        let id = state.handle();
        let made = Event { recorded: 0, passed: 0, stream: 0, context };
        state.events.insert(id, made);
        // SAFETY: handed on to this function's caller.
        unsafe { put(event, id as *mut c_void) }
    })
}

/// `aclrtDestroyEvent`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(event: Handle) -> i32 {
    in_context("aclrtDestroyEvent", |state, _| {
        let id = event as u64;
        let waited = state.streams.values().any(|stream| {
            let waits = |task: &Task| matches!(task, Task::Wait(on, _) if *on == id);
            stream.queue.iter().any(waits)
        });
        if waited {
            return fail(PARAM_INVALID, "a stream still waits for the event");
        }
        match state.events.remove(&id) {
            Some(_) => Ok(()),
            None => invalid("event", id),
        }
    })
}

/// `aclrtRecordEvent`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: Handle, stream: Handle) -> i32 {
    in_context("aclrtRecordEvent", |state, context| {
        let (id, on) = (event as u64, state.stream_id(context, stream as u64)?);
        if state.stream_mut(on).capture.is_some() {
            return fail(NOT_SUPPORTED, "the twin does not model events under capture");
        }
        let Some(found) = state.events.get_mut(&id) else {
            return invalid("event", id);
        };
        found.recorded += 1;
        found.stream = on;
        let ticket = found.recorded;
        enqueue(state, on, Task::Record(id, ticket))
    })
}

/// `aclrtQueryEventStatus`: COMPLETE is 1 here. Looking makes the stream move on afterwards.
///
/// # Safety
/// `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtQueryEventStatus(event: Handle, status: *mut i32) -> i32 {
    in_context("aclrtQueryEventStatus", |state, _| {
        let id = event as u64;
        let ticket = state.recorded(id)?;
        let done = state.events[&id].passed >= ticket;
        catch_up(state, id, ticket);
        state.healthy(state.events[&id].context)?;
        // SAFETY: handed on to this function's caller.
        unsafe { put(status, i32::from(done)) }
    })
}

/// `aclrtSynchronizeEvent`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEvent(event: Handle) -> i32 {
    in_context("aclrtSynchronizeEvent", |state, _| {
        let id = event as u64;
        let ticket = state.recorded(id)?;
        let (stream, context) = (state.events[&id].stream, state.events[&id].context);
        if state.streams.contains_key(&stream) {
            not_captured(state, stream)?;
        }
        catch_up(state, id, ticket);
        state.healthy(context)
    })
}
