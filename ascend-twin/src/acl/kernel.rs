//! Kernels by handle: binary, function, argument list, launch.
//!
//! A kernel binary here is a shared object for the host, or this library itself, which carries the
//! kernels of `ascendc-kernels`.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use libloading::Library;

use super::Handle;
use super::codes::{INVALID_FILE, KERNEL_NOT_FOUND, NOT_SUPPORTED, PARAM_INVALID};
use super::device::put;
use super::launch::{Entry, Launch, Run, bundled};
use super::state::{Fail, fail, in_context, invalid};
use super::task::{Task, enqueue};

/// An address as a kernel's parameter; other sizes are not modelled.
const ADDRESS: usize = size_of::<u64>();

#[derive(Debug, Clone)]
pub(crate) enum Binary {
    /// The kernels in this library.
    Bundled,
    Opened(Arc<Library>),
}

#[derive(Debug, Clone)]
pub(crate) struct Function {
    binary: u64,
    name: String,
    entry: Entry,
    run: Run,
    /// Keeps the code mapped while launches of it lie on a stream.
    _library: Option<Arc<Library>>,
}

/// One parameter of an argument list.
#[derive(Debug, Clone)]
pub(crate) enum Parameter {
    Address(u64),
    /// Host bytes that go to the device with the launch, in words for their alignment.
    Block(Vec<u64>),
}

#[derive(Debug)]
pub(crate) struct Arguments {
    function: u64,
    parameters: Vec<(u64, Parameter)>,
    finalized: bool,
}

/// A caller's string.
///
/// # Safety
/// `pointer` is null or a string that ends in zero and outlives the result.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str, Fail> {
    if pointer.is_null() {
        return fail(PARAM_INVALID, "a name is null");
    }
    // SAFETY: not null, and a string by this function's own contract.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().or_else(|_| fail(PARAM_INVALID, "a name is no UTF-8"))
}

/// Whether `path` is the file that this code came from.
fn is_this_library(path: &std::path::Path) -> bool {
    let own = aclrtLaunchKernelWithConfig as *const c_void;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let from = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let inside = usize::from_str_radix(start, 16).ok()? <= own as usize
            && (own as usize) < usize::from_str_radix(end, 16).ok()?;
        inside.then(|| rest.find('/').map(|at| rest[at..].to_owned()))?
    });
    match (from, std::fs::canonicalize(path)) {
        (Some(from), Ok(path)) => std::fs::canonicalize(from).is_ok_and(|own| own == path),
        _ => false,
    }
}

/// `aclrtBinaryLoadFromFile`: wants an absolute path.
///
/// # Safety
/// `path` is null or a string; `binary` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtBinaryLoadFromFile(
    path: *const c_char,
    options: *mut c_void,
    binary: *mut Handle,
) -> i32 {
    in_context("aclrtBinaryLoadFromFile", |state, _| {
        if !options.is_null() {
            return fail(NOT_SUPPORTED, "load options are not modelled");
        }
        // SAFETY: handed on to this function's caller; the string is used within the call.
        let path = std::path::Path::new(unsafe { text(path) }?);
        if !path.is_absolute() {
            return fail(PARAM_INVALID, format!("{} is not absolute", path.display()));
        }
        let made = if is_this_library(path) {
            Binary::Bundled
        } else {
            // SAFETY: a kernel binary is code to be run, as trusted as its caller; the twin's are
            // shared objects without initialisers of their own.
            match unsafe { Library::new(path) } {
                Ok(library) => Binary::Opened(Arc::new(library)),
                Err(error) => return fail(INVALID_FILE, format!("{}: {error}", path.display())),
            }
        };
        let id = state.handle();
        state.binaries.insert(id, made);
        // SAFETY: handed on to this function's caller.
        unsafe { put(binary, id as *mut c_void) }
    })
}

/// `aclrtBinaryUnLoad`: its functions go with it.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtBinaryUnLoad(binary: Handle) -> i32 {
    in_context("aclrtBinaryUnLoad", |state, _| {
        let id = binary as u64;
        if state.binaries.remove(&id).is_none() {
            return invalid("binary", id);
        }
        state.functions.retain(|_, function| function.binary != id);
        Ok(())
    })
}

/// `aclrtBinaryGetFunction`: by the kernel's plain name.
///
/// # Safety
/// `name` is null or a string; `function` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtBinaryGetFunction(
    binary: Handle,
    name: *const c_char,
    function: *mut Handle,
) -> i32 {
    in_context("aclrtBinaryGetFunction", |state, _| {
        let id = binary as u64;
        // SAFETY: handed on to this function's caller; the string is copied within the call.
        let name = unsafe { text(name) }?;
        let found = match state.binaries.get(&id) {
            None => return invalid("binary", id),
            Some(Binary::Bundled) => bundled(name).map(|(entry, run)| (entry, run, None)),
            Some(Binary::Opened(library)) => super::launch::opened(library, name)
                .map(|(entry, run)| (entry, run, Some(library.clone()))),
        };
        let Some((entry, run, library)) = found else {
            return fail(KERNEL_NOT_FOUND, format!("no kernel {name}"));
        };
        let made = Function { binary: id, name: name.to_owned(), entry, run, _library: library };
        let id = state.handle();
        state.functions.insert(id, made);
        // SAFETY: handed on to this function's caller.
        unsafe { put(function, id as *mut c_void) }
    })
}

/// `aclrtKernelArgsInit`: the runtime keeps the list; here a function's new list ends its last.
///
/// # Safety
/// `arguments` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtKernelArgsInit(function: Handle, arguments: *mut Handle) -> i32 {
    in_context("aclrtKernelArgsInit", |state, _| {
        let function = function as u64;
        if !state.functions.contains_key(&function) {
            return invalid("function", function);
        }
        state.arguments.retain(|_, list| list.function != function);
        let id = state.handle();
        let made = Arguments { function, parameters: Vec::new(), finalized: false };
        state.arguments.insert(id, made);
        // SAFETY: handed on to this function's caller.
        unsafe { put(arguments, id as *mut c_void) }
    })
}

/// # Safety
/// `out` is null or valid for a write.
unsafe fn append(arguments: Handle, call: &str, out: *mut Handle, parameter: Parameter) -> i32 {
    in_context(call, |state, _| {
        let id = state.handle();
        let Some(list) = state.arguments.get_mut(&(arguments as u64)) else {
            return invalid("argument list", arguments as u64);
        };
        if list.finalized {
            return fail(PARAM_INVALID, "the list is final");
        }
        list.parameters.push((id, parameter));
        // SAFETY: handed on to this function's caller.
        unsafe { put(out, id as *mut c_void) }
    })
}

/// `aclrtKernelArgsAppend`: the value is copied from host memory.
///
/// # Safety
/// `value` is null or valid for `bytes`; `parameter` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtKernelArgsAppend(
    arguments: Handle,
    value: *mut c_void,
    bytes: usize,
    parameter: *mut Handle,
) -> i32 {
    let call = "aclrtKernelArgsAppend";
    if value.is_null() || bytes != ADDRESS {
        return in_context(call, |_, _| {
            fail(
                NOT_SUPPORTED,
                format!("a parameter of {bytes} bytes: only addresses are modelled"),
            )
        });
    }
    // SAFETY: not null, and valid for 8 bytes by this function's contract; no alignment is asked.
    let address = unsafe { value.cast::<u64>().read_unaligned() };
    // SAFETY: handed on to this function's caller.
    unsafe { append(arguments, call, parameter, Parameter::Address(address)) }
}

/// `aclrtKernelArgsAppendPlaceHolder`.
///
/// # Safety
/// `parameter` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtKernelArgsAppendPlaceHolder(
    arguments: Handle,
    parameter: *mut Handle,
) -> i32 {
    let call = "aclrtKernelArgsAppendPlaceHolder";
    // SAFETY: handed on to this function's caller.
    unsafe { append(arguments, call, parameter, Parameter::Block(Vec::new())) }
}

/// `aclrtKernelArgsGetPlaceHolderBuffer`: valid until the launch.
///
/// # Safety
/// `buffer` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtKernelArgsGetPlaceHolderBuffer(
    arguments: Handle,
    parameter: Handle,
    bytes: usize,
    buffer: *mut *mut c_void,
) -> i32 {
    in_context("aclrtKernelArgsGetPlaceHolderBuffer", |state, _| {
        let Some(list) = state.arguments.get_mut(&(arguments as u64)) else {
            return invalid("argument list", arguments as u64);
        };
        let found = list.parameters.iter_mut().find(|(id, _)| *id == parameter as u64);
        let Some((_, Parameter::Block(words))) = found else {
            return invalid("place holder", parameter as u64);
        };
        *words = vec![u64::MAX; bytes.div_ceil(size_of::<u64>())];
        // SAFETY: handed on to this function's caller.
        unsafe { put(buffer, words.as_mut_ptr().cast()) }
    })
}

/// `aclrtKernelArgsFinalize`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtKernelArgsFinalize(arguments: Handle) -> i32 {
    in_context("aclrtKernelArgsFinalize", |state, _| {
        match state.arguments.get_mut(&(arguments as u64)) {
            None => invalid("argument list", arguments as u64),
            Some(list) if list.finalized => fail(PARAM_INVALID, "the list is final already"),
            Some(list) => {
                list.finalized = true;
                Ok(())
            }
        }
    })
}

/// `aclrtLaunchKernelWithConfig`: values of the list are copied now.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtLaunchKernelWithConfig(
    function: Handle,
    blocks: u32,
    stream: Handle,
    config: *mut c_void,
    arguments: Handle,
    reserve: *mut c_void,
) -> i32 {
    in_context("aclrtLaunchKernelWithConfig", |state, context| {
        let on = state.stream_id(context, stream as u64)?;
        if !config.is_null() || !reserve.is_null() {
            return fail(NOT_SUPPORTED, "launch attributes are not modelled");
        }
        let Some(kernel) = state.functions.get(&(function as u64)).cloned() else {
            return invalid("function", function as u64);
        };
        let Some(list) = state.arguments.get(&(arguments as u64)) else {
            return invalid("argument list", arguments as u64);
        };
        if !list.finalized || list.function != function as u64 || blocks == 0 {
            return fail(
                PARAM_INVALID,
                "the list is not final or of another function, or there is no block",
            );
        }
        let parameters = list.parameters.iter().map(|(_, p)| p.clone()).collect();
        let launch = Launch::new(kernel.name, (kernel.entry, kernel.run), blocks, parameters);
        enqueue(state, on, Task::Kernel(Arc::new(launch)))
    })
}

/// `aclrtLaunchKernel`: takes the packed arguments at a **device** address.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtLaunchKernel(
    function: Handle,
    blocks: u32,
    data: *const c_void,
    bytes: usize,
    stream: Handle,
) -> i32 {
    in_context("aclrtLaunchKernel", |state, context| {
        let on = state.stream_id(context, stream as u64)?;
        let Some(kernel) = state.functions.get(&(function as u64)).cloned() else {
            return invalid("function", function as u64);
        };
        if !state.on_device(data as usize, bytes) {
            return fail(
                PARAM_INVALID,
                format!("the argument block {data:p}+{bytes} is not in device memory"),
            );
        }
        if blocks == 0 || bytes == 0 || !bytes.is_multiple_of(ADDRESS) {
            return fail(PARAM_INVALID, "no block, or arguments that are no addresses");
        }
        let launch =
            Launch::packed(kernel.name, (kernel.entry, kernel.run), blocks, (data as usize, bytes));
        enqueue(state, on, Task::Kernel(Arc::new(launch)))
    })
}
