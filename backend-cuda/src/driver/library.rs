//! Finds the vendor's libraries before anything is called in them.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use amphora_hal::{Error, Result};
use cudarc::{cublaslt, driver, nvrtc};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Every driver function that this crate calls.
const DRIVER_SYMBOLS: &[&str] = &[
    "cuInit",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveClusters",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// Every compiler function that this crate calls.
const COMPILER_SYMBOLS: &[&str] = &[
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetErrorString",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcVersion",
];

/// Every function of cuBLASLt that this crate calls.
const PRODUCT_SYMBOLS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetStatusString",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

fn missing(message: String) -> Error {
    Error::Driver { call: "dlopen", code: 0, message }
}

/// The first of `symbols` that `library` lacks.
fn lacking(library: &libloading::Library, symbols: &[&'static str]) -> Option<&'static str> {
    symbols.iter().copied().find(|symbol| {
        // SAFETY: the symbol is only looked up, never used at this type.
        unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err()
    })
}

/// Makes sure that the driver's functions may be called.
pub(crate) fn require_driver() -> Result<()> {
    // SAFETY: opening the driver's library runs its initialisers, which is what a CUDA program is for.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(missing(
            "libcuda.so.1 was not found; install the NVIDIA driver, or choose another backend"
                .to_owned(),
        ));
    }
    // SAFETY: the library was just found, so this does not panic.
    match lacking(unsafe { driver::sys::culib() }, DRIVER_SYMBOLS) {
        None => Ok(()),
        Some(symbol) => Err(missing(format!(
            "libcuda.so.1 has no {symbol}; install an NVIDIA driver for CUDA 13 or later"
        ))),
    }
}

/// Makes sure that the compiler's functions may be called. `folder` holds its libraries, where it is
/// not to be found by the loader's own search; the first call decides for the process.
pub(crate) fn require_compiler(folder: Option<&Path>) -> Result<()> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *loaded {
        return Ok(());
    }
    if let Some(folder) = folder {
        preload(folder, &["libnvrtc-builtins.so", "libnvrtc.so"])?;
    }
    // SAFETY: as for the driver's library.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(missing(
            "libnvrtc.so.13 was not found; install the CUDA 13 toolkit's runtime compiler, or name \
             its folder in AMPHORA_NVRTC_DIR"
                .to_owned(),
        ));
    }
    // SAFETY: the library was just found, so this does not panic.
    if let Some(symbol) = lacking(unsafe { nvrtc::sys::culib() }, COMPILER_SYMBOLS) {
        return Err(missing(format!("libnvrtc.so.13 has no {symbol}; install that of CUDA 13")));
    }
    *loaded = true;
    Ok(())
}

/// Makes sure that the functions of cuBLASLt may be called. `folder` as for the compiler.
pub(crate) fn require_cublaslt(folder: Option<&Path>) -> Result<()> {
    static LOADED: Mutex<bool> = Mutex::new(false);
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *loaded {
        return Ok(());
    }
    if let Some(folder) = folder {
        preload(folder, &["libcublasLt.so"])?;
    }
    // SAFETY: as for the driver's library.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        return Err(missing("libcublasLt.so.13 was not found".to_owned()));
    }
    // SAFETY: the library was just found, so this does not panic.
    if let Some(symbol) = lacking(unsafe { cublaslt::sys::culib() }, PRODUCT_SYMBOLS) {
        return Err(missing(format!("libcublasLt.so.13 has no {symbol}; install that of CUDA 13")));
    }
    *loaded = true;
    Ok(())
}

/// Where a toolkit, or the compiler's Python packages, keep libraries below the folder one would name.
const BELOW: [&str; 3] = ["", "lib64", "nvidia/cu13/lib"];

/// Loads libraries by path, in order. Of the compiler's, the one with the built-in headers comes first:
/// the compiler opens it by name, and then finds it loaded.
fn preload(folder: &Path, prefixes: &[&str]) -> Result<()> {
    let find = |prefix: &str| {
        BELOW.iter().find_map(|below| {
            let entries = std::fs::read_dir(folder.join(below)).ok()?.flatten();
            let is_named = |path: &PathBuf| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(prefix)
            };
            // One library may have several names; the shortest is the plainest.
            let paths = entries.map(|entry| entry.path()).filter(is_named);
            paths.min_by_key(|path| path.as_os_str().len())
        })
    };
    for &prefix in prefixes {
        let Some(path) = find(prefix) else {
            return Err(missing(format!("no {prefix} in {}", folder.display())));
        };
        // SAFETY: the user names this folder as the compiler's; opening a library runs its
        // initialisers.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|error| missing(format!("{}: {error}", path.display())))?;
        // Never closed: the compiler keeps addresses of it until the process ends.
        std::mem::forget(library);
    }
    Ok(())
}
