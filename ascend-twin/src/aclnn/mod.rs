//! The two-phase operators: descriptors, executors, and the frame that all operators share.
//!
//! Phase one checks what the vendor's pages list and touches no device; phase two puts the computation
//! on a stream. Sums are f32 in k order and rounded once. What an operator asks for as workspace it
//! fills with poison, so a workspace that overlaps live data shows.

mod add;
mod grouped_matmul;
mod matmul;
mod rms_norm;
mod tensor;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

pub use add::*;
pub use grouped_matmul::*;
pub use matmul::*;
pub use rms_norm::*;
pub use tensor::*;

use crate::acl::{
    ACLNN_INVALID, ACLNN_NULLPTR, ACLNN_RUNTIME, Fail, Handle, Operator, State, Task, enqueue,
    enter, fail, in_context,
};
use tensor::{Scalar, Tensor};

/// Descriptors and executors by handle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    tensors: HashMap<u64, Tensor>,
    lists: HashMap<u64, Vec<u64>>,
    scalars: HashMap<u64, Scalar>,
    executors: HashMap<u64, Executor>,
}

/// What phase one leaves for phase two.
struct Executor {
    name: &'static str,
    workspace: u64,
    operator: Arc<Operator>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Where phase one puts its results.
pub(crate) struct Out {
    workspace: *mut u64,
    executor: *mut Handle,
}

fn tensor(state: &State, handle: Handle, name: &str) -> Result<Tensor, Fail> {
    if handle.is_null() {
        return fail(ACLNN_NULLPTR, format!("{name} is null"));
    }
    match state.objects.tensors.get(&(handle as u64)) {
        Some(tensor) => Ok(tensor.clone()),
        None => fail(ACLNN_INVALID, format!("{name} is no tensor")),
    }
}

/// The only tensor of a list.
fn single(state: &State, handle: Handle, name: &str) -> Result<Tensor, Fail> {
    if handle.is_null() {
        return fail(ACLNN_NULLPTR, format!("{name} is null"));
    }
    match state.objects.lists.get(&(handle as u64)).map(Vec::as_slice) {
        None => fail(ACLNN_INVALID, format!("{name} is no tensor list")),
        Some([member]) => tensor(state, *member as *mut c_void, name),
        Some(members) => {
            fail(ACLNN_INVALID, format!("{name} has {} tensors: one is modelled", members.len()))
        }
    }
}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Fail> {
    if holds { Ok(()) } else { fail(ACLNN_INVALID, what()) }
}

/// Phase one of an operator: `build` checks and gives the computation and its workspace.
fn phase_one(
    name: &'static str,
    out: Out,
    build: impl FnOnce(&State) -> Result<(u64, Arc<Operator>), Fail>,
) -> i32 {
    enter(name, |state| {
        if out.workspace.is_null() || out.executor.is_null() {
            return fail(ACLNN_NULLPTR, "a result pointer is null");
        }
        let (workspace, operator) = build(state)?;
        let id = state.handle();
        let executor = Executor { name, workspace, operator };
        state.objects.executors.insert(id, executor);
        // SAFETY: not null, and valid for a write by the contract of each exported phase one.
        unsafe {
            out.workspace.write(workspace);
            out.executor.write(id as *mut c_void);
        }
        Ok(())
    })
}

/// Phase two: consumes the executor.
fn phase_two(
    name: &'static str,
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    in_context(name, |state, context| {
        let Some(found) = state.objects.executors.remove(&(executor as u64)) else {
            return fail(ACLNN_INVALID, "no such executor: phase two consumes it, so it runs once");
        };
        if found.name != name {
            return fail(ACLNN_INVALID, format!("the executor is of {}", found.name));
        }
        let (address, wanted) = (workspace as usize, found.workspace as usize);
        if wanted > 0 && (bytes < found.workspace || !state.on_device(address, wanted)) {
            return fail(
                ACLNN_RUNTIME,
                format!("a workspace of {wanted} device bytes is wanted, {bytes} given"),
            );
        }
        let on = state.stream_id(context, stream as u64)?;
        let operator = found.operator;
        let task: Arc<Operator> = Arc::new(move |state: &State| {
            if wanted > 0 {
                if !state.on_device(address, wanted) {
                    return Err(format!("{name}: its workspace was freed before it ran"));
                }
                // SAFETY: the range lies in a live device allocation, and the lock is held.
                unsafe { (address as *mut u8).write_bytes(0xff, wanted) };
            }
            operator(state).map_err(|text| format!("{name}: {text}"))
        });
        enqueue(state, on, Task::Operator(task))
    })
}
