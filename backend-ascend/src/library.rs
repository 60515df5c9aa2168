//! Which libraries to open, and where kernel binaries lie.
//!
//! A given library is opened alone. Otherwise CANN is looked for by the loader's own search path, its
//! runtime first, then the operators: custom packages, the classic library, the split ones. The host
//! twin is opened only when it is given, which [`bundled_twin`] helps with.

use std::path::{Path, PathBuf};

use amphora_hal::{Error, Result};

/// File name of the host twin.
const TWIN: &str = "libamphora_ascend_twin.so";

/// CANN's libraries in the order in which a function is looked up.
const CANN: [&str; 8] = [
    "libascendcl.so",
    "libacl_rt.so",
    "libnnopbase.so",
    "libcust_opapi.so",
    "libopapi.so",
    "libopapi_math.so",
    "libopapi_nn.so",
    "libopapi_transformer.so",
];

/// The runtimes: without one of them there is no CANN.
const RUNTIMES: usize = 2;

fn executable_dir() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}

/// The host twin, beside the executable or in its `deps` folder.
///
/// # Errors
/// It is in neither place.
pub fn bundled_twin() -> Result<PathBuf> {
    let beside = executable_dir().unwrap_or_default();
    let places = [beside.join(TWIN), beside.join("deps").join(TWIN)];
    match places.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(Error::Driver {
            call: "dlopen",
            code: 0,
            message: format!(
                "the host twin, {TWIN}, lies neither beside the executable nor in {}",
                beside.join("deps").display()
            ),
        }),
    }
}

/// The libraries to open, most wanted first; the first `required` of them are alternatives of which
/// one must open.
pub(crate) fn candidates(given: Option<&Path>) -> (Vec<PathBuf>, usize) {
    match given {
        Some(path) => (vec![path.to_owned()], 1),
        None => (CANN.iter().map(PathBuf::from).collect(), RUNTIMES),
    }
}

/// The kernel binary for a product: beside the executable, in `kernels` there, or beside a given
/// library; a given library may hold the kernels itself, as the host twin does.
pub(crate) fn kernel_binary(soc: &str, given: Option<&Path>) -> Option<PathBuf> {
    let name = amphora_ascendc_kernels::binary_name(soc);
    let mut places = Vec::new();
    if let Some(beside) = executable_dir() {
        places.push(beside.join(&name));
        places.push(beside.join("kernels").join(&name));
    }
    if let Some(library) = given {
        places.extend(library.parent().map(|dir| dir.join(&name)));
        places.push(library.to_owned());
    }
    // The runtime wants an absolute path.
    places.iter().find_map(|path| path.is_file().then(|| path.canonicalize().ok())?)
}
