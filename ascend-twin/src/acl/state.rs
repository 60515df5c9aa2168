//! Everything the twin knows, behind one lock; and the frame that every exported function has.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::capture::Model;
use super::codes::{CONTEXT_NULL, INVALID_HANDLE, SUCCESS, UNINITIALIZED};
use super::event::Event;
use super::kernel::{Arguments, Binary, Function};
use super::memory::Allocation;
use super::stream::Stream;
use crate::aclnn::Objects;

/// A refused call: the vendor's code and the rule in words.
#[derive(Debug, Clone)]
pub(crate) struct Fail {
    pub(crate) code: i32,
    pub(crate) text: String,
}

pub(crate) fn fail<T>(code: i32, text: impl Into<String>) -> Result<T, Fail> {
    Err(Fail { code, text: text.into() })
}

/// A handle that names nothing.
pub(crate) fn invalid<T>(kind: &str, handle: u64) -> Result<T, Fail> {
    fail(INVALID_HANDLE, format!("{handle:#x} is no {kind}"))
}

/// A context: the thing that threads make current, and that a fault spoils.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: i32,
    /// The first fault; from then on nothing runs.
    pub(crate) fault: Option<Fail>,
    pub(crate) default_stream: u64,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    next: u64,
    pub(crate) initialised: bool,
    pub(crate) contexts: HashMap<u64, Context>,
    /// Device → its default context and how often it was set.
    pub(crate) devices: HashMap<i32, (u64, usize)>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) models: HashMap<u64, Arc<Model>>,
    pub(crate) binaries: HashMap<u64, Binary>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) arguments: HashMap<u64, Arguments>,
    /// By first address.
    pub(crate) device_memory: BTreeMap<usize, Allocation>,
    pub(crate) host_memory: BTreeMap<usize, Allocation>,
    pub(crate) objects: Objects,
}

impl State {
    /// A new handle. Never reused, so a stale one is recognised.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 1;
        0x7a00_0000 + self.next * 16
    }

    /// The stream a handle names, for a caller in `context`; null is the context's default stream.
    pub(crate) fn stream_id(&self, context: u64, handle: u64) -> Result<u64, Fail> {
        let id = match handle {
            0 => self.contexts[&context].default_stream,
            id => id,
        };
        match self.streams.get(&id) {
            Some(stream) if stream.context == context => Ok(id),
            Some(_) => fail(super::codes::STREAM_CONTEXT, "the stream belongs to another context"),
            None => invalid("stream", id),
        }
    }

    pub(crate) fn stream_mut(&mut self, id: u64) -> &mut Stream {
        self.streams.get_mut(&id).expect("stream ids come from stream_id and the lock is held")
    }

    /// The fault of a context, if it had one.
    pub(crate) fn healthy(&self, context: u64) -> Result<(), Fail> {
        match self.contexts.get(&context).and_then(|c| c.fault.clone()) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

thread_local! {
    /// The context of this thread; 0 is none.
    pub(crate) static CURRENT: Cell<u64> = const { Cell::new(0) };
    static MESSAGE: RefCell<CString> = RefCell::default();
}

fn lock() -> MutexGuard<'static, Option<State>> {
    // A panic inside is a bug of the twin; the maps stay usable for the calls of other threads.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text of this thread's last refusal.
pub(crate) fn message() -> *const std::ffi::c_char {
    MESSAGE.with_borrow(|text| if text.is_empty() { std::ptr::null() } else { text.as_ptr() })
}

/// Runs one exported call on the state and turns its outcome into the vendor's code.
pub(crate) fn enter(call: &str, body: impl FnOnce(&mut State) -> Result<(), Fail>) -> i32 {
    let result = body(lock().get_or_insert_with(State::default));
    match result {
        Ok(()) => SUCCESS,
        Err(Fail { code, text }) => {
            let text = CString::new(format!("{call}: {text}")).unwrap_or_default();
            MESSAGE.set(text);
            code
        }
    }
}

/// As [`enter`], for calls that need a current context on the calling thread.
pub(crate) fn in_context(
    call: &str,
    body: impl FnOnce(&mut State, u64) -> Result<(), Fail>,
) -> i32 {
    enter(call, |state| {
        if !state.initialised {
            return fail(UNINITIALIZED, "aclInit was not called");
        }
        let context = CURRENT.get();
        if !state.contexts.contains_key(&context) {
            return fail(CONTEXT_NULL, "this thread has no current context");
        }
        body(state, context)
    })
}
