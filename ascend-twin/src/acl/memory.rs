//! Device and pinned memory, and copies. Device memory is host memory that only the twin's own tasks
//! may touch: every address is looked up, and contents start as poison.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::thread::ThreadId;

use super::Handle;
use super::codes::{
    CAPTURE_FORBIDS, DEVICE_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, HOST_TO_HOST,
    MEMORY_ALLOCATION, NOT_SUPPORTED, PARAM_INVALID,
};
use super::device::put;
use super::state::{Fail, State, fail, in_context};
use super::stream::drain;
use super::task::{Task, enqueue};

/// Memory that the device says it has.
const TOTAL: usize = 4 << 30;
/// `aclrtMalloc` aligns to this.
const ALIGN: usize = 64;
/// It adds this many bytes behind the size rounded up to 32, which operators may read past the end.
const TAIL: usize = 32;
/// A NaN in every floating-point type, and no valid index.
const POISON: u8 = 0xff;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    /// Bytes that were asked for; what lies behind is not the caller's.
    pub(crate) bytes: usize,
    layout: Layout,
}

fn take(bytes: usize) -> Result<(usize, Allocation), Fail> {
    let refused = || Fail { code: MEMORY_ALLOCATION, text: format!("{bytes} bytes") };
    let padded = bytes.checked_next_multiple_of(TAIL).and_then(|b| b.checked_add(TAIL));
    let layout = padded
        .and_then(|padded| Layout::from_size_align(padded, ALIGN).ok())
        .ok_or_else(refused)?;
    // SAFETY: the layout has at least TAIL bytes.
    let address = unsafe { alloc(layout) };
    if address.is_null() {
        return Err(refused());
    }
    // SAFETY: just allocated with this size.
    unsafe { address.write_bytes(POISON, layout.size()) };
    Ok((address as usize, Allocation { bytes, layout }))
}

fn give(address: usize, allocation: Allocation) {
    // SAFETY: `take` made this address with this layout, and its entry has just left the registry, so
    // it is freed once.
    unsafe { dealloc(address as *mut u8, allocation.layout) };
}

fn within(
    registry: &std::collections::BTreeMap<usize, Allocation>,
    address: usize,
    bytes: usize,
) -> bool {
    registry.range(..=address).next_back().is_some_and(|(start, found)| {
        address.checked_add(bytes).is_some_and(|end| end <= start + found.bytes)
    })
}

impl State {
    /// Whether a range lies in one device allocation, its tail not counted.
    pub(crate) fn on_device(&self, address: usize, bytes: usize) -> bool {
        within(&self.device_memory, address, bytes)
    }

    pub(crate) fn is_pinned(&self, address: usize, bytes: usize) -> bool {
        within(&self.host_memory, address, bytes)
    }

    fn used(&self) -> usize {
        self.device_memory.values().map(|a| a.bytes).sum()
    }

    /// Refuses calls that capture forbids: in any thread under a global one, in the capturing thread
    /// under a thread-local one. The capture is spoilt.
    fn capture_forbids(&mut self, call: &str) -> Result<(), Fail> {
        let here: ThreadId = std::thread::current().id();
        let mut forbidden = false;
        for stream in self.streams.values_mut() {
            if let Some(capture) = &mut stream.capture
                && capture.forbids(here)
            {
                capture.spoilt = true;
                forbidden = true;
            }
        }
        if forbidden {
            return fail(CAPTURE_FORBIDS, format!("{call} is forbidden while a capture is open"));
        }
        Ok(())
    }
}

/// `aclrtMalloc`: 64-byte aligned, contents not initialised (poison here).
///
/// # Safety
/// `pointer` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMalloc(pointer: *mut *mut c_void, bytes: usize, _policy: i32) -> i32 {
    in_context("aclrtMalloc", |state, _| {
        if bytes == 0 {
            return fail(PARAM_INVALID, "0 bytes");
        }
        if bytes > TOTAL - state.used().min(TOTAL) {
            return fail(MEMORY_ALLOCATION, format!("{bytes} bytes of {TOTAL}"));
        }
        let (address, allocation) = take(bytes)?;
        state.device_memory.insert(address, allocation);
        // SAFETY: handed on to this function's caller.
        unsafe { put(pointer, address as *mut c_void) }
    })
}

/// `aclrtFree`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(pointer: *mut c_void) -> i32 {
    in_context("aclrtFree", |state, _| match state.device_memory.remove(&(pointer as usize)) {
        Some(allocation) => {
            give(pointer as usize, allocation);
            Ok(())
        }
        None => fail(PARAM_INVALID, format!("{pointer:p} is no device allocation")),
    })
}

/// `aclrtMallocHost`: pinned.
///
/// # Safety
/// `pointer` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocHost(pointer: *mut *mut c_void, bytes: usize) -> i32 {
    in_context("aclrtMallocHost", |state, _| {
        if bytes == 0 {
            return fail(PARAM_INVALID, "0 bytes");
        }
        let (address, allocation) = take(bytes)?;
        state.host_memory.insert(address, allocation);
        // SAFETY: handed on to this function's caller.
        unsafe { put(pointer, address as *mut c_void) }
    })
}

/// `aclrtFreeHost`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtFreeHost(pointer: *mut c_void) -> i32 {
    in_context("aclrtFreeHost", |state, _| match state.host_memory.remove(&(pointer as usize)) {
        Some(allocation) => {
            give(pointer as usize, allocation);
            Ok(())
        }
        None => fail(PARAM_INVALID, format!("{pointer:p} is no pinned allocation")),
    })
}

/// Both sides of a copy, checked against what its kind says of them.
#[derive(Debug, Clone, Copy)]
struct Copy {
    to: usize,
    room: usize,
    from: usize,
    bytes: usize,
    kind: i32,
}

impl Copy {
    fn check(&self, state: &State) -> Result<(), Fail> {
        let Copy { to, room, from, bytes, kind } = *self;
        if to == 0 || from == 0 || bytes == 0 {
            return fail(PARAM_INVALID, "a null side, or 0 bytes");
        }
        if bytes > room {
            return fail(PARAM_INVALID, format!("{bytes} bytes into destMax {room}"));
        }
        let (to_device, from_device) = match kind {
            HOST_TO_HOST => (false, false),
            HOST_TO_DEVICE => (true, false),
            DEVICE_TO_HOST => (false, true),
            DEVICE_TO_DEVICE => (true, true),
            _ => return fail(PARAM_INVALID, format!("kind {kind} is not modelled")),
        };
        for (side, address, bytes, device) in
            [("destination", to, room, to_device), ("source", from, bytes, from_device)]
        {
            // A host address may be any; one inside device memory is a mix-up.
            let fits =
                if device { state.on_device(address, bytes) } else { !state.on_device(address, 1) };
            if !fits {
                let wanted = if device { "device" } else { "host" };
                return fail(
                    PARAM_INVALID,
                    format!("the {side} {address:#x}+{bytes} is not {wanted} memory"),
                );
            }
        }
        Ok(())
    }

    /// # Safety
    /// Host sides are valid for the copy.
    unsafe fn run(&self) {
        // SAFETY: device sides were found in the registry under the lock; host sides by this
        // function's contract.
        unsafe { std::ptr::copy(self.from as *const u8, self.to as *mut u8, self.bytes) };
    }
}

/// `aclrtMemcpy`: forbidden under capture.
///
/// # Safety
/// Host sides are valid for `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(
    dst: *mut c_void,
    dest_max: usize,
    src: *const c_void,
    count: usize,
    kind: i32,
) -> i32 {
    in_context("aclrtMemcpy", |state, context| {
        state.capture_forbids("aclrtMemcpy")?;
        let copy =
            Copy { to: dst as usize, room: dest_max, from: src as usize, bytes: count, kind };
        copy.check(state)?;
        state.healthy(context)?;
        // SAFETY: handed on to this function's caller.
        unsafe { copy.run() };
        Ok(())
    })
}

/// `aclrtMemcpyAsync`: waits for its turn with pinned memory, runs at once with pageable memory.
///
/// # Safety
/// Pageable host sides are valid for `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpyAsync(
    dst: *mut c_void,
    dest_max: usize,
    src: *const c_void,
    count: usize,
    kind: i32,
    stream: Handle,
) -> i32 {
    in_context("aclrtMemcpyAsync", |state, context| {
        if kind == HOST_TO_HOST {
            return fail(NOT_SUPPORTED, "host to host is not asynchronous");
        }
        let id = state.stream_id(context, stream as u64)?;
        let copy =
            Copy { to: dst as usize, room: dest_max, from: src as usize, bytes: count, kind };
        copy.check(state)?;
        let host = match kind {
            HOST_TO_DEVICE => Some(copy.from),
            DEVICE_TO_HOST => Some(copy.to),
            _ => None,
        };
        if host.is_some_and(|address| !state.is_pinned(address, count)) {
            state.capture_forbids("a copy with pageable memory")?;
            drain(state, id);
            state.healthy(context)?;
            // SAFETY: handed on to this function's caller.
            unsafe { copy.run() };
            return Ok(());
        }
        let task = Task::Copy { to: copy.to, from: copy.from, bytes: count };
        enqueue(state, id, task)
    })
}

/// `aclrtMemset`: forbidden under capture.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemset(
    pointer: *mut c_void,
    max_count: usize,
    value: i32,
    count: usize,
) -> i32 {
    in_context("aclrtMemset", |state, _| {
        state.capture_forbids("aclrtMemset")?;
        if count > max_count || !state.on_device(pointer as usize, max_count) {
            return fail(PARAM_INVALID, format!("{count} of {max_count} bytes at {pointer:p}"));
        }
        // SAFETY: the range lies in a live device allocation, and the lock is held.
        unsafe { pointer.cast::<u8>().write_bytes(value as u8, count) };
        Ok(())
    })
}

/// `aclrtGetMemInfo`.
///
/// # Safety
/// `free` and `total` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetMemInfo(_attr: i32, free: *mut usize, total: *mut usize) -> i32 {
    in_context("aclrtGetMemInfo", |state, _| {
        // SAFETY: handed on to this function's caller.
        unsafe {
            put(free, TOTAL - state.used().min(TOTAL))?;
            put(total, TOTAL)
        }
    })
}
