//! The vendor's dense products (cuBLASLt), where the library is installed: descriptors and the chosen
//! algorithm are kept for each shape, so that a step asks for nothing twice.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::{DType, Error, Result};
use cudarc::cublaslt::sys::{self, cublasStatus_t};

use super::{Context, Stream, library};

/// Workspace that an algorithm may ask for.
pub(crate) const WORKSPACE: usize = 32 << 20;

/// `out [m, n] = x [m, k] · weight [n, k]ᵀ` in f32; rows of x at a pitch, all else dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) x_pitch: usize,
    /// Of x and the weight: f16 or bf16.
    pub(crate) dtype: DType,
}

/// Where a product's operands lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) x: u64,
    pub(crate) weight: u64,
    pub(crate) out: u64,
    /// [`WORKSPACE`] bytes.
    pub(crate) workspace: u64,
}

/// The library and what it has chosen so far.
#[derive(Debug)]
pub(crate) struct CublasLt {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<Shape, Option<Arc<Plan>>>>,
}

// SAFETY: a handle may be used from any thread; the library locks what it shares.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: the library is loaded; it gives a static string that ends in zero.
    let text = unsafe { CStr::from_ptr(sys::cublasLtGetStatusString(status)) };
    let message = text.to_string_lossy().into_owned();
    Err(Error::Driver { call, code: status as i64, message })
}

/// A descriptor that is destroyed once.
macro_rules! owned {
    ($name:ident $raw:ident $destroy:ident) => {
        #[derive(Debug)]
        struct $name(sys::$raw);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made once, by the one that owns it.
                let _ = unsafe { sys::$destroy(self.0) };
            }
        }
    };
}
owned!(Description cublasLtMatmulDesc_t cublasLtMatmulDescDestroy);
owned!(Layout cublasLtMatrixLayout_t cublasLtMatrixLayoutDestroy);
owned!(Preference cublasLtMatmulPreference_t cublasLtMatmulPreferenceDestroy);

/// What a product of one shape is called with.
#[derive(Debug)]
struct Plan {
    description: Description,
    weight: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptors are bound to no thread, and only read once they are made.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Layout {
    /// Rows of `width` elements at `pitch`, which the library sees as columns.
    fn new(dtype: DType, width: usize, rows: usize, pitch: usize) -> Result<Self> {
        let kind = match dtype {
            DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
            DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
            _ => sys::cudaDataType_t::CUDA_R_32F,
        };
        let mut raw = null_mut();
        // SAFETY: the library is loaded; writes one handle.
        check("cublasLtMatrixLayoutCreate", unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut raw, kind, width as u64, rows as u64, pitch as i64)
        })?;
        Ok(Layout(raw))
    }
}

impl Description {
    /// outᵀ = weightᵀᵀ · xᵀ in the library's columns; sums in f32, without TF32.
    fn new() -> Result<Self> {
        let mut raw = null_mut();
        let (compute, scale) =
            (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: the library is loaded; writes one handle.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(&mut raw, compute, scale)
        })?;
        let description = Description(raw);
        let turned = 1i32; // CUBLAS_OP_T, which the bindings leave to another library
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the descriptor lives; the attribute is one value of this type.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                raw,
                attribute,
                std::ptr::from_ref(&turned).cast(),
                size_of_val(&turned),
            )
        })?;
        Ok(description)
    }
}

impl Preference {
    /// At most [`WORKSPACE`], and rows that start at multiples of 16 bytes.
    fn new() -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t::*;
        let mut raw = null_mut();
        // SAFETY: the library is loaded; writes one handle.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            sys::cublasLtMatmulPreferenceCreate(&mut raw)
        })?;
        let preference = Preference(raw);
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the preference lives; `value` points to `bytes` bytes of the attribute's type.
            check("cublasLtMatmulPreferenceSetAttribute", unsafe {
                sys::cublasLtMatmulPreferenceSetAttribute(raw, attribute, value, bytes)
            })
        };
        let most: u64 = WORKSPACE as u64;
        set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&most).cast(), 8)?;
        let aligned: u32 = 16;
        for attribute in [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(attribute, std::ptr::from_ref(&aligned).cast(), 4)?;
        }
        Ok(preference)
    }
}

impl CublasLt {
    /// Opens the library, in `folder` or by the loader's own search.
    ///
    /// # Errors
    /// It is not installed, or does not start.
    pub(crate) fn open(context: &Arc<Context>, folder: Option<&Path>) -> Result<Self> {
        library::require_cublaslt(folder)?;
        context.bind()?;
        let mut handle = null_mut();
        // SAFETY: the library is loaded with all symbols that are used, and the context is current;
        // writes one handle, which is destroyed once, in `drop`.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(CublasLt { context: context.clone(), handle, plans: Mutex::default() })
    }

    /// Whether it has an algorithm for a shape. Asks it once.
    pub(crate) fn takes(&self, shape: Shape) -> bool {
        self.plan(shape).is_some()
    }

    fn plan(&self, shape: Shape) -> Option<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans
            .entry(shape)
            .or_insert_with(|| match self.choose(shape) {
                Ok(plan) => Some(Arc::new(plan)),
                Err(error) => {
                    tracing::debug!("cuBLASLt does not take {shape:?}: {error}");
                    None
                }
            })
            .clone()
    }

    fn choose(&self, shape: Shape) -> Result<Plan> {
        self.context.bind()?;
        let description = Description::new()?;
        let weight = Layout::new(shape.dtype, shape.k, shape.n, shape.k)?;
        let x = Layout::new(shape.dtype, shape.k, shape.m, shape.x_pitch)?;
        let out = Layout::new(DType::F32, shape.n, shape.m, shape.n)?;
        let preference = Preference::new()?;
        let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        // SAFETY: all descriptors live; at most one result is written, and its number.
        check("cublasLtMatmulAlgoGetHeuristic", unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                weight.0,
                x.0,
                out.0,
                out.0,
                preference.0,
                1,
                found.as_mut_ptr(),
                &mut count,
            )
        })?;
        if count < 1 {
            return Err(Error::invalid("cublasLtMatmulAlgoGetHeuristic", "no algorithm"));
        }
        // SAFETY: the call wrote one result.
        let algorithm = unsafe { found.assume_init() }.algo;
        Ok(Plan { description, weight, x, out, algorithm })
    }

    /// Enqueues a product.
    ///
    /// # Errors
    /// The library's; or it does not take the shape.
    ///
    /// # Safety
    /// The operands are device memory of the shape's sizes and alignment, valid until the work has
    /// passed.
    pub(crate) unsafe fn product(
        &self,
        stream: &mut Stream,
        shape: Shape,
        operands: Operands,
    ) -> Result<()> {
        let plan = self.plan(shape).ok_or_else(|| {
            Error::invalid("cublasLtMatmul", format!("no algorithm for {shape:?}"))
        })?;
        self.context.bind()?;
        let (one, zero) = (1f32, 0f32);
        let at = |address: u64| address as *mut c_void;
        // SAFETY: handle, descriptors and stream live, in one context; both scalars are f32 on the host,
        // read before the call returns; the caller vouches for the operands.
        check("cublasLtMatmul", unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.description.0,
                std::ptr::from_ref(&one).cast(),
                at(operands.weight),
                plan.weight.0,
                at(operands.x),
                plan.x.0,
                std::ptr::from_ref(&zero).cast(),
                at(operands.out),
                plan.out.0,
                at(operands.out),
                plan.out.0,
                &plan.algorithm,
                at(operands.workspace),
                WORKSPACE,
                stream.raw().cast(),
            )
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: made once in `open`.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}
