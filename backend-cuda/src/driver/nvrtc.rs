//! The runtime compiler: text to machine code. Needs no GPU.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use amphora_hal::{Error, Result};
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::library;

/// The compiler, found and loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compiler {
    version: (i32, i32),
}

/// Machine code, and what the compiler had to say about it.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    pub(crate) log: String,
}

/// A unit, and the files that it may include: `(name, text)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
    pub(crate) files: &'a [(&'a str, &'a str)],
    pub(crate) options: &'a [&'a str],
}

fn check(call: &'static str, code: nvrtcResult, log: impl FnOnce() -> String) -> Result<()> {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the compiler is loaded; it gives a static string that ends in zero.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) }.to_string_lossy();
    let log = log();
    let message = if log.is_empty() { text.into_owned() } else { format!("{text}: {log}") };
    Err(Error::Driver { call, code: code as i64, message })
}

fn no_log() -> String {
    String::new()
}

fn strings<'a>(from: impl Iterator<Item = &'a str>) -> Result<Vec<CString>> {
    from.map(|text| {
        CString::new(text).map_err(|_| Error::invalid("compile", "a zero byte in text"))
    })
    .collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

/// Destroys the program it owns.
struct Owned(nvrtcProgram);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created once in `compile`; the handle is not used again.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Owned {
    /// What the compiler had to say.
    fn text(&self) -> String {
        let mut len = 0;
        // SAFETY: the program lives; writes one integer.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut len) } != nvrtcResult::NVRTC_SUCCESS {
            return no_log();
        }
        let mut log = vec![0u8; len];
        // SAFETY: the compiler writes the number of bytes that it just gave.
        let code = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        if code != nvrtcResult::NVRTC_SUCCESS {
            return no_log();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    /// The front of it, on one line.
    fn log(&self) -> String {
        let text = self.text();
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
        lines.take(20).collect::<Vec<_>>().join(" | ")
    }
}

impl Compiler {
    /// Finds the compiler, in `folder` or by the loader's own search.
    pub(crate) fn find(folder: Option<&Path>) -> Result<Self> {
        library::require_compiler(folder)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the compiler is loaded with all of its symbols; writes two integers.
        let code = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        check("nvrtcVersion", code, no_log)?;
        Ok(Compiler { version: (major, minor) })
    }

    /// Major and minor version.
    pub(crate) fn version(self) -> (i32, i32) {
        self.version
    }

    /// Compiles to a cubin; the options name a real architecture (`sm_90a`).
    pub(crate) fn compile(self, program: Program<'_>) -> Result<Compiled> {
        let text = strings([program.text, program.name].into_iter())?;
        let names = strings(program.files.iter().map(|(name, _)| *name))?;
        let files = strings(program.files.iter().map(|(_, text)| *text))?;
        let options = strings(program.options.iter().copied())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: every string ends in zero and outlives the call; both lists have the given length.
        let code = unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                text[0].as_ptr(),
                text[1].as_ptr(),
                names.len() as i32,
                pointers(&files).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        check("nvrtcCreateProgram", code, no_log)?;
        let owned = Owned(raw);
        // SAFETY: the program lives; the strings end in zero, and their number is given.
        let code = unsafe {
            sys::nvrtcCompileProgram(owned.0, options.len() as i32, pointers(&options).as_ptr())
        };
        check("nvrtcCompileProgram", code, || format!("{}: {}", program.name, owned.log()))?;
        let mut len = 0;
        // SAFETY: the program lives; writes one integer.
        check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(owned.0, &mut len) }, no_log)?;
        let mut cubin = vec![0u8; len];
        // SAFETY: the compiler writes the number of bytes that it just gave.
        let code = unsafe { sys::nvrtcGetCUBIN(owned.0, cubin.as_mut_ptr().cast()) };
        check("nvrtcGetCUBIN", code, no_log)?;
        Ok(Compiled { cubin, log: owned.text() })
    }
}
