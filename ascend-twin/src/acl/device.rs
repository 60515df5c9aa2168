//! Init, devices, contexts, and what the device says of itself: an Ascend 910B3 as the vendor's
//! platform file has it.

use std::ffi::{c_char, c_void};

use super::Handle;
use super::codes::{INVALID_DEVICE, PARAM_INVALID, REPEAT_INITIALIZE, UNINITIALIZED};
use super::state::{CURRENT, Context, Fail, State, enter, fail, in_context, invalid, message};
use super::stream::{Stream, drain};

const DEVICES: u32 = 2;
const CUBE_CORES: i64 = 20;
const VECTOR_CORES: i64 = 40;

/// Writes a result through a caller's pointer.
///
/// # Safety
/// `to` is null or valid for a write.
pub(super) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Fail> {
    if to.is_null() {
        return fail(PARAM_INVALID, "a result pointer is null");
    }
    // SAFETY: not null, and valid by this function's own contract.
    unsafe { to.write(value) };
    Ok(())
}

/// `aclInit`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclInit(_config: *const c_char) -> i32 {
    enter("aclInit", |state| {
        if std::mem::replace(&mut state.initialised, true) {
            return fail(REPEAT_INITIALIZE, "initialised already");
        }
        Ok(())
    })
}

/// `aclGetRecentErrMsg`: of the calling thread.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    message()
}

/// `aclrtGetDeviceCount`.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> i32 {
    // SAFETY: handed on to this function's caller.
    enter("aclrtGetDeviceCount", |_| unsafe { put(count, DEVICES) })
}

fn checked(state: &State, device: i32) -> Result<(), Fail> {
    if !state.initialised {
        return fail(UNINITIALIZED, "aclInit was not called");
    }
    if u32::try_from(device).is_ok_and(|d| d < DEVICES) {
        Ok(())
    } else {
        fail(INVALID_DEVICE, format!("device {device} of {DEVICES} host twins"))
    }
}

fn new_context(state: &mut State, device: i32) -> u64 {
    let (context, stream) = (state.handle(), state.handle());
    state.streams.insert(stream, Stream::new(context));
    let made = Context { device, fault: None, default_stream: stream };
    state.contexts.insert(context, made);
    context
}

fn drop_context(state: &mut State, context: u64) {
    state.contexts.remove(&context);
    state.streams.retain(|_, stream| stream.context != context);
}

/// `aclrtSetDevice`: also makes the device's default context current.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(device: i32) -> i32 {
    enter("aclrtSetDevice", |state| {
        checked(state, device)?;
        let context = match state.devices.get_mut(&device) {
            Some((context, references)) => {
                *references += 1;
                *context
            }
            None => {
                let context = new_context(state, device);
                state.devices.insert(device, (context, 1));
                context
            }
        };
        CURRENT.set(context);
        Ok(())
    })
}

/// `aclrtResetDevice`: the last one takes the default context with it.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDevice(device: i32) -> i32 {
    enter("aclrtResetDevice", |state| {
        checked(state, device)?;
        let Some((context, references)) = state.devices.get_mut(&device) else {
            return fail(INVALID_DEVICE, format!("device {device} is not set"));
        };
        *references -= 1;
        if *references == 0 {
            let context = *context;
            drop_context(state, context);
            state.devices.remove(&device);
        }
        Ok(())
    })
}

/// `aclrtCreateContext`: the new one is current on the calling thread.
///
/// # Safety
/// `context` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateContext(context: *mut Handle, device: i32) -> i32 {
    enter("aclrtCreateContext", |state| {
        checked(state, device)?;
        let id = new_context(state, device);
        CURRENT.set(id);
        // SAFETY: handed on to this function's caller.
        unsafe { put(context, id as *mut c_void) }
    })
}

/// `aclrtDestroyContext`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyContext(context: Handle) -> i32 {
    enter("aclrtDestroyContext", |state| {
        let id = context as u64;
        if !state.contexts.contains_key(&id) {
            return invalid("context", id);
        }
        if state.devices.values().any(|(default, _)| *default == id) {
            return fail(PARAM_INVALID, "the default context is the device's own");
        }
        drop_context(state, id);
        Ok(())
    })
}

/// `aclrtSetCurrentContext`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetCurrentContext(context: Handle) -> i32 {
    enter("aclrtSetCurrentContext", |state| {
        let id = context as u64;
        if !state.contexts.contains_key(&id) {
            return invalid("context", id);
        }
        CURRENT.set(id);
        Ok(())
    })
}

/// `aclrtGetCurrentContext`.
///
/// # Safety
/// `context` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetCurrentContext(context: *mut Handle) -> i32 {
    in_context("aclrtGetCurrentContext", |_, id| {
        // SAFETY: handed on to this function's caller.
        unsafe { put(context, id as *mut c_void) }
    })
}

/// `aclrtSynchronizeDevice`: every stream of the current context's device.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> i32 {
    in_context("aclrtSynchronizeDevice", |state, context| {
        let device = state.contexts[&context].device;
        let streams: Vec<(u64, u64)> = state
            .streams
            .iter()
            .filter(|(_, s)| state.contexts.get(&s.context).is_some_and(|c| c.device == device))
            .map(|(id, s)| (*id, s.context))
            .collect();
        for (stream, of) in streams {
            if state.streams[&stream].capture.is_some() {
                // Another thread's capture is its own concern; what it records does not run.
                continue;
            }
            drain(state, stream);
            if of == context {
                state.healthy(of)?;
            }
        }
        Ok(())
    })
}

/// `aclrtGetSocName`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Ascend910B3".as_ptr()
}

/// `aclGetDeviceCapability`.
///
/// # Safety
/// `value` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclGetDeviceCapability(device: u32, info: i32, value: *mut i64) -> i32 {
    enter("aclGetDeviceCapability", |_| {
        if device >= DEVICES {
            return fail(INVALID_DEVICE, format!("device {device}"));
        }
        let answer = match info {
            0 => CUBE_CORES,
            1 => VECTOR_CORES,
            _ => return fail(PARAM_INVALID, format!("info {info} is not modelled")),
        };
        // SAFETY: handed on to this function's caller.
        unsafe { put(value, answer) }
    })
}
