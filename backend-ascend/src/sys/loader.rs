//! Opens the vendor's libraries and looks every function up by name: the first library that has a
//! symbol gives it, and a symbol that none has is reported by its name when it is needed.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::{Error, Result};

use super::bindings::Acl;

/// The functions found, and the libraries that hold them.
#[derive(Debug)]
pub(crate) struct Api {
    table: Acl,
    /// Kept open: `table` holds addresses inside them.
    _others: Vec<Acl>,
    origin: String,
}

impl std::fmt::Debug for Acl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acl")
    }
}

/// Runs `$with` on the names of all functions, in two groups: those without which nothing works,
/// and the operators, each of which may be absent.
macro_rules! for_each_symbol {
    ($with:ident, $($context:tt)*) => {
        $with! { $($context)*;
            runtime:
            aclInit aclGetRecentErrMsg aclrtGetDeviceCount aclrtSetDevice aclrtResetDevice
            aclrtSynchronizeDevice aclrtCreateContext aclrtDestroyContext aclrtSetCurrentContext
            aclrtGetSocName aclGetDeviceCapability
            aclrtCreateStream aclrtDestroyStream aclrtSynchronizeStream aclrtStreamQuery
            aclrtStreamWaitEvent aclrtCreateEventExWithFlag aclrtDestroyEvent aclrtRecordEvent
            aclrtQueryEventStatus aclrtSynchronizeEvent
            aclrtMalloc aclrtFree aclrtMallocHost aclrtFreeHost aclrtMemcpyAsync aclrtMemset
            aclrtGetMemInfo
            aclrtBinaryLoadFromFile aclrtBinaryUnLoad aclrtBinaryGetFunction aclrtKernelArgsInit
            aclrtKernelArgsAppend aclrtKernelArgsAppendPlaceHolder
            aclrtKernelArgsGetPlaceHolderBuffer aclrtKernelArgsFinalize
            aclrtLaunchKernelWithConfig;
            optional:
            aclrtGetCurrentContext aclrtMemcpy aclrtLaunchKernel
            aclmdlRICaptureBegin aclmdlRICaptureEnd aclmdlRIExecuteAsync aclmdlRIDestroy
            aclCreateTensor aclDestroyTensor aclCreateTensorList aclDestroyTensorList
            aclCreateScalar aclDestroyScalar
            aclnnMatmulGetWorkspaceSize aclnnMatmul aclnnRmsNormGetWorkspaceSize aclnnRmsNorm
            aclnnInplaceAddGetWorkspaceSize aclnnInplaceAdd
            aclnnInplaceCopyGetWorkspaceSize aclnnInplaceCopy
            aclnnGroupedMatmulV4GetWorkspaceSize aclnnGroupedMatmulV4
        }
    };
}

macro_rules! take_missing {
    ($into:expr, $from:expr; runtime: $($r:ident)*; optional: $($o:ident)*) => {
        $( if $into.$r.is_err() && $from.$r.is_ok() { std::mem::swap(&mut $into.$r, &mut $from.$r); } )*
        $( if $into.$o.is_err() && $from.$o.is_ok() { std::mem::swap(&mut $into.$o, &mut $from.$o); } )*
    };
}

macro_rules! absent_runtime {
    ($table:expr; runtime: $($r:ident)*; optional: $($o:ident)*) => {
        [$( (stringify!($r), $table.$r.is_err()) ),*]
    };
}

impl Api {
    /// As [`Api::open`], once for each list of paths.
    ///
    /// What was opened stays open until the process ends: libraries leave clean-up with threads, which
    /// would run code that is no longer there.
    ///
    /// # Errors
    /// As [`Api::open`].
    pub(crate) fn shared(paths: &[PathBuf], runtimes: usize) -> Result<Arc<Self>> {
        static OPENED: Mutex<Vec<(Vec<PathBuf>, Arc<Api>)>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, api)) = opened.iter().find(|(of, _)| of == paths) {
            return Ok(api.clone());
        }
        let api = Arc::new(Api::open(paths, runtimes)?);
        opened.push((paths.to_owned(), api.clone()));
        Ok(api)
    }

    /// Opens the libraries at `paths`, first wins. The first `runtimes` of them are alternatives of
    /// which one must open; the others are passed over where they do not.
    ///
    /// # Errors
    /// No runtime opens, or its functions are not all there.
    fn open(paths: &[PathBuf], runtimes: usize) -> Result<Self> {
        let (mut opened, mut reasons): (Vec<(PathBuf, Acl)>, Vec<String>) = (vec![], vec![]);
        for (index, path) in paths.iter().enumerate() {
            if index == runtimes && opened.is_empty() {
                break;
            }
            match open_one(path) {
                Ok(acl) => opened.push((path.clone(), acl)),
                Err(error) => reasons.push(reason(&error)),
            }
        }
        let origin = opened
            .iter()
            .filter_map(|(path, _)| path.file_name())
            .map(|name| name.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
            .join(", ");
        let mut tables = opened.into_iter().map(|(_, acl)| acl);
        let Some(mut table) = tables.next() else {
            return Err(failed(
                "dlopen",
                format!("no Ascend runtime found ({})", reasons.join("; ")),
            ));
        };
        let mut others: Vec<Acl> = tables.collect();
        for other in &mut others {
            for_each_symbol!(take_missing, table, other);
        }
        let absent: Vec<&str> = for_each_symbol!(absent_runtime, table)
            .into_iter()
            .filter_map(|(name, absent)| absent.then_some(name))
            .collect();
        if !absent.is_empty() {
            return Err(failed("dlsym", format!("{origin}: no {}", absent.join(", "))));
        }
        Ok(Api { table, _others: others, origin })
    }

    /// The functions.
    pub(crate) fn table(&self) -> &Acl {
        &self.table
    }

    /// The libraries that opened, for messages.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether the functions of both phases of an operator, and the descriptors they take, are there.
    pub(crate) fn has_operator(&self, name: &str) -> bool {
        let table = &self.table;
        let both = match name {
            "aclnnMatmul" => table.aclnnMatmul.is_ok() && table.aclnnMatmulGetWorkspaceSize.is_ok(),
            "aclnnRmsNorm" => {
                table.aclnnRmsNorm.is_ok() && table.aclnnRmsNormGetWorkspaceSize.is_ok()
            }
            "aclnnInplaceAdd" => {
                table.aclnnInplaceAdd.is_ok() && table.aclnnInplaceAddGetWorkspaceSize.is_ok()
            }
            "aclnnInplaceCopy" => {
                table.aclnnInplaceCopy.is_ok() && table.aclnnInplaceCopyGetWorkspaceSize.is_ok()
            }
            _ => false,
        };
        both && table.aclCreateTensor.is_ok() && table.aclDestroyTensor.is_ok()
    }

    /// Whether streams can be captured.
    pub(crate) fn has_capture(&self) -> bool {
        let table = &self.table;
        table.aclmdlRICaptureBegin.is_ok()
            && table.aclmdlRICaptureEnd.is_ok()
            && table.aclmdlRIExecuteAsync.is_ok()
            && table.aclmdlRIDestroy.is_ok()
    }

    /// The error of a call to a function that no library has.
    pub(crate) fn missing(&self, name: &'static str) -> Error {
        failed(name, format!("this function is not in {}", self.origin))
    }
}

fn failed(call: &'static str, message: String) -> Error {
    Error::Driver { call, code: 0, message }
}

/// The dynamic linker's own words where it has some: they name the file.
fn reason(error: &libloading::Error) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), |source| source.to_string())
}

fn open_one(path: &Path) -> std::result::Result<Acl, libloading::Error> {
    // SAFETY: opening runs the library's initialisers. The path is one of the vendor's library
    // names or one that the operator gave by hand; both are trusted as the process itself is. The
    // symbols are used with the signatures of `acl.h`, which are the vendor's for these names.
    unsafe { Acl::new(path) }
}
