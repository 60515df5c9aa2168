//! Running a kernel: one emulated core for each block, on a few threads.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::Library;

use super::codes::VECTOR_CORE_EXCEPTION;
use super::kernel::Parameter;
use super::state::{Fail, State, fail};

/// A kernel's entry: a function of as many addresses as it has parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry(*const c_void);

// SAFETY: the address of code, which any thread may call; the library that holds it is kept by the
// function's record or is this one.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// `amphora_twin_run` of a kernel binary: one block on the calling thread.
pub(crate) type Run = unsafe extern "C" fn(
    entry: *const c_void,
    arguments: *const *mut u8,
    count: u32,
    host: *const Host,
    block: u32,
    blocks: u32,
    message: *mut c_char,
    room: u64,
) -> c_int;

/// `AmphoraTwinHost` of `kernel_operator/core.h`.
#[repr(C)]
pub(crate) struct Host {
    in_device_memory: extern "C" fn(*const c_void, *const c_void, u64) -> c_int,
    context: *const c_void,
}

// SAFETY: defined by the kernels that `build.rs` compiles into this library: the first with this
// signature in `kernel_operator/run.h`, the others only ever used as addresses.
unsafe extern "C" {
    fn amphora_twin_run(
        entry: *const c_void,
        arguments: *const *mut u8,
        count: u32,
        host: *const Host,
        block: u32,
        blocks: u32,
        message: *mut c_char,
        room: u64,
    ) -> c_int;
    fn lora_fused_f32();
    fn lora_fused_f16();
    fn lora_fused_bf16();
}

/// The kernels in this library.
pub(super) fn bundled(name: &str) -> Option<(Entry, Run)> {
    let entry = match name {
        "lora_fused_f32" => lora_fused_f32 as *const c_void,
        "lora_fused_f16" => lora_fused_f16 as *const c_void,
        "lora_fused_bf16" => lora_fused_bf16 as *const c_void,
        _ => return None,
    };
    Some((Entry(entry), amphora_twin_run))
}

/// A kernel of a shared object that was compiled against `kernel_operator.h`.
pub(super) fn opened(library: &Library, name: &str) -> Option<(Entry, Run)> {
    // SAFETY: only the address is taken here; it is called through `Run`, by the calling convention
    // that the header gives every kernel entry.
    let entry = unsafe { library.get::<*const c_void>(name.as_bytes()) }.ok()?;
    // SAFETY: the header defines this name with this signature in every binary.
    let run = unsafe { library.get::<Run>(b"amphora_twin_run") }.ok()?;
    Some((Entry(*entry), *run))
}

/// Where the arguments come from.
#[derive(Debug)]
enum Arguments {
    List(Vec<Parameter>),
    /// Packed addresses in device memory, read when the launch runs.
    Packed {
        address: usize,
        bytes: usize,
    },
}

/// A launch on a stream.
#[derive(Debug)]
pub(crate) struct Launch {
    name: String,
    entry: Entry,
    run: Run,
    blocks: u32,
    arguments: Arguments,
}

impl Launch {
    pub(super) fn new(
        name: String,
        (entry, run): (Entry, Run),
        blocks: u32,
        parameters: Vec<Parameter>,
    ) -> Self {
        Launch { name, entry, run, blocks, arguments: Arguments::List(parameters) }
    }

    pub(super) fn packed(
        name: String,
        (entry, run): (Entry, Run),
        blocks: u32,
        (address, bytes): (usize, usize),
    ) -> Self {
        Launch { name, entry, run, blocks, arguments: Arguments::Packed { address, bytes } }
    }

    fn addresses(&self, state: &State) -> Result<Vec<usize>, Fail> {
        match &self.arguments {
            Arguments::List(parameters) => Ok(parameters
                .iter()
                .map(|parameter| match parameter {
                    Parameter::Address(address) => *address as usize,
                    Parameter::Block(words) => words.as_ptr() as usize,
                })
                .collect()),
            Arguments::Packed { address, bytes } => {
                if !state.on_device(*address, *bytes) {
                    return fail(
                        VECTOR_CORE_EXCEPTION,
                        format!("{}: its argument block was freed before it ran", self.name),
                    );
                }
                let words = (*address..address + bytes).step_by(size_of::<u64>());
                // SAFETY: the range lies in a live device allocation and the lock is held; no
                // alignment is asked.
                Ok(words
                    .map(|at| unsafe { (at as *const u64).read_unaligned() } as usize)
                    .collect())
            }
        }
    }

    /// Runs every block. The first broken rule is the launch's fault.
    pub(super) fn run(&self, state: &State) -> Result<(), Fail> {
        let addresses = self.addresses(state)?;
        let mut ranges: Vec<(usize, usize)> = state
            .device_memory
            .iter()
            .map(|(start, allocation)| (*start, allocation.bytes))
            .collect();
        if let Arguments::List(parameters) = &self.arguments {
            // Blocks of bytes travel to the device with the launch.
            ranges.extend(parameters.iter().filter_map(|parameter| match parameter {
                Parameter::Block(words) => Some((words.as_ptr() as usize, words.len() * 8)),
                Parameter::Address(_) => None,
            }));
        }
        ranges.sort_unstable();
        let next = AtomicU32::new(0);
        let broken = Mutex::new(None);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..threads.min(self.blocks as usize) {
                scope.spawn(|| {
                    loop {
                        let block = next.fetch_add(1, Ordering::Relaxed);
                        if block >= self.blocks {
                            break;
                        }
                        if let Err(text) = self.block(&addresses, &ranges, block) {
                            broken
                                .lock()
                                .unwrap_or_else(std::sync::PoisonError::into_inner)
                                .get_or_insert(text);
                            next.store(self.blocks, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        match broken.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(text) => fail(VECTOR_CORE_EXCEPTION, format!("{}: {text}", self.name)),
            None => Ok(()),
        }
    }

    fn block(
        &self,
        addresses: &[usize],
        ranges: &[(usize, usize)],
        block: u32,
    ) -> Result<(), String> {
        let arguments: Vec<*mut u8> = addresses.iter().map(|a| *a as *mut u8).collect();
        let host = Host { in_device_memory, context: (&raw const ranges).cast() };
        let mut message = [0u8; 512];
        // SAFETY: entry and run are code of a mapped binary that was compiled against the twin's
        // header, where every access to global memory first asks `in_device_memory`. All pointers
        // outlive the call, and no exception leaves it. Blocks write disjoint memory, as on the
        // device: that is the kernel's own contract.
        let broken = unsafe {
            (self.run)(
                self.entry.0,
                arguments.as_ptr(),
                arguments.len() as u32,
                &host,
                block,
                self.blocks,
                message.as_mut_ptr().cast(),
                message.len() as u64,
            )
        };
        if broken == 0 {
            return Ok(());
        }
        let end = message.iter().position(|b| *b == 0).unwrap_or(message.len());
        Err(String::from_utf8_lossy(&message[..end]).into_owned())
    }
}

/// Whether a range lies in one of the launch's device ranges.
extern "C" fn in_device_memory(
    context: *const c_void,
    address: *const c_void,
    bytes: u64,
) -> c_int {
    // SAFETY: `block` passes the address of its sorted slice, which lives until the run returns.
    let ranges = unsafe { *context.cast::<&[(usize, usize)]>() };
    let address = address as usize;
    let after = ranges.partition_point(|(start, _)| *start <= address);
    let inside = after > 0 && {
        let (start, len) = ranges[after - 1];
        address.checked_add(bytes as usize).is_some_and(|end| end <= start + len)
    };
    c_int::from(inside)
}
