//! What lies on a stream, and how it is run.

use std::sync::Arc;

use super::capture::Model;
use super::codes::AICORE_EXCEPTION;
use super::launch::Launch;
use super::state::{Fail, State, fail};
use super::stream::advance;

/// An operator of `aclnn`, ready to compute on the addresses it was given.
pub(crate) type Operator = dyn Fn(&State) -> Result<(), String> + Send + Sync;

#[derive(Clone)]
pub(crate) enum Task {
    /// Bytes from one address to another; both are looked up again when it runs.
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// Event and its ticket.
    Record(u64, u64),
    Wait(u64, u64),
    Kernel(Arc<Launch>),
    Operator(Arc<Operator>),
    Graph(Arc<Model>),
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Task::Copy { .. } => "Copy",
            Task::Record(..) => "Record",
            Task::Wait(..) => "Wait",
            Task::Kernel(_) => "Kernel",
            Task::Operator(_) => "Operator",
            Task::Graph(_) => "Graph",
        })
    }
}

/// Puts a task on a stream, or into the capture that the stream is under.
pub(crate) fn enqueue(state: &mut State, stream: u64, task: Task) -> Result<(), Fail> {
    let context = state.stream_mut(stream).context;
    state.healthy(context)?;
    let stream = state.stream_mut(stream);
    match &mut stream.capture {
        Some(capture) => capture.tasks.push(task),
        None => stream.queue.push_back(task),
    }
    Ok(())
}

/// Runs one task. A fault of the device spoils the context of the stream.
pub(super) fn run(state: &mut State, context: u64, task: &Task) {
    if state.healthy(context).is_err() {
        // Events still pass, so that nobody waits for ever; they pass as failed (see `healthy`).
        if let Task::Record(event, ticket) = task {
            state.pass(*event, *ticket);
        }
        return;
    }
    let outcome = match task {
        Task::Copy { to, from, bytes } => copy(state, *to, *from, *bytes),
        Task::Record(event, ticket) => {
            state.pass(*event, *ticket);
            Ok(())
        }
        Task::Wait(event, ticket) => {
            catch_up(state, *event, *ticket);
            Ok(())
        }
        Task::Kernel(launch) => launch.run(state),
        Task::Operator(operator) => operator(state).or_else(|text| fail(AICORE_EXCEPTION, text)),
        Task::Graph(model) => {
            for task in &model.tasks {
                run(state, context, task);
            }
            Ok(())
        }
    };
    if let (Err(fault), Some(context)) = (outcome, state.contexts.get_mut(&context)) {
        context.fault.get_or_insert(fault);
    }
}

/// Runs the stream that an event lies on until the event has passed.
pub(super) fn catch_up(state: &mut State, event: u64, ticket: u64) {
    while let Some(found) = state.events.get(&event) {
        if found.passed >= ticket || !advance(state, found.stream) {
            break;
        }
    }
}

fn copy(state: &State, to: usize, from: usize, bytes: usize) -> Result<(), Fail> {
    for (side, address) in [("to", to), ("from", from)] {
        if !state.on_device(address, bytes) && !state.is_pinned(address, bytes) {
            return fail(
                AICORE_EXCEPTION,
                format!("a copy {side} {address:#x}: the memory was freed before it ran"),
            );
        }
    }
    // SAFETY: both ranges lie in allocations that the registry says are alive, and frees need the
    // lock that the caller holds. Overlap is allowed by `copy`.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    Ok(())
}
