//! The vendor's two-phase operators: descriptors as guards, phase one, phase two.
//!
//! Phase one checks on the host and touches no device. Phase two consumes the executor, so
//! [`Executor::run`] takes it by value. Descriptors hold addresses, not bytes, and may go once phase
//! two has returned.

use amphora_hal::{DType, Error, Result};

use super::{Context, Stream, acl};
use crate::sys::{self, aclOpExecutor, invoke};

/// Device memory as an operator sees it.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// First element.
    pub(crate) address: usize,
    pub(crate) dims: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    pub(crate) dtype: i32,
}

/// The vendor's number of a type.
pub(crate) fn data_type(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => sys::ACL_FLOAT,
        DType::F16 => sys::ACL_FLOAT16,
        DType::BF16 => sys::ACL_BF16,
        // Neither reaches an operator here: bytes are seen as what they hold, plans stay with kernels.
        DType::I32 | DType::U8 => sys::ACL_INT32,
    }
}

impl View {
    /// Elements without gaps.
    pub(crate) fn dense(address: usize, dims: &[usize], dtype: i32) -> Self {
        let dims: Vec<i64> = dims.iter().map(|d| *d as i64).collect();
        let mut strides = vec![1i64; dims.len()];
        for i in (0..dims.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * dims[i + 1];
        }
        View { address, dims, strides, dtype }
    }

    /// The last two dimensions exchanged.
    pub(crate) fn transposed(mut self) -> Self {
        let n = self.dims.len();
        self.dims.swap(n - 2, n - 1);
        self.strides.swap(n - 2, n - 1);
        self
    }
}

fn refused(call: &'static str) -> Error {
    Error::Driver { call, code: 0, message: "the runtime gave no descriptor".to_owned() }
}

/// A descriptor of one tensor.
#[derive(Debug)]
pub(crate) struct TensorArg<'a> {
    context: &'a Context,
    handle: *mut sys::aclTensor,
}

impl<'a> TensorArg<'a> {
    pub(crate) fn new(context: &'a Context, view: &View) -> Result<Self> {
        let api = context.enter()?;
        // The storage is what the view spans, seen flat.
        let last = view.dims.iter().zip(&view.strides).map(|(d, s)| (d - 1) * s);
        let storage = [1 + last.sum::<i64>()];
        // SAFETY: all arrays outlive the call, which copies them; the address is not followed.
        let handle = unsafe {
            invoke!(
                api,
                aclCreateTensor(
                    view.dims.as_ptr(),
                    view.dims.len() as u64,
                    view.dtype,
                    view.strides.as_ptr(),
                    0,
                    sys::ACL_FORMAT_ND,
                    storage.as_ptr(),
                    1,
                    view.address as _,
                )
            )
        }?;
        if handle.is_null() {
            return Err(refused("aclCreateTensor"));
        }
        Ok(TensorArg { context, handle })
    }

    /// A list of this one tensor, which takes it over.
    fn into_list(self) -> Result<ListArg<'a>> {
        let api = self.context.enter()?;
        let members = [self.handle.cast_const()];
        // SAFETY: the array outlives the call, which copies it.
        let handle = unsafe { invoke!(api, aclCreateTensorList(members.as_ptr(), 1)) }?;
        if handle.is_null() {
            return Err(refused("aclCreateTensorList"));
        }
        let context = self.context;
        // Destroying the list destroys its members.
        std::mem::forget(self);
        Ok(ListArg { context, handle })
    }
}

impl Drop for TensorArg<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, and destroyed once: `into_list` forgets it.
        let _ = unsafe { invoke!(self.context.api(), aclDestroyTensor(self.handle)) };
    }
}

/// A descriptor of a list of tensors, and those.
#[derive(Debug)]
struct ListArg<'a> {
    context: &'a Context,
    handle: *mut sys::aclTensorList,
}

impl<'a> ListArg<'a> {
    fn single(context: &'a Context, view: &View) -> Result<Self> {
        TensorArg::new(context, view)?.into_list()
    }
}

impl Drop for ListArg<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, and destroyed once, members included.
        let _ = unsafe { invoke!(self.context.api(), aclDestroyTensorList(self.handle)) };
    }
}

/// A host number.
#[derive(Debug)]
pub(crate) struct ScalarArg<'a> {
    context: &'a Context,
    handle: *mut sys::aclScalar,
}

impl<'a> ScalarArg<'a> {
    pub(crate) fn new(context: &'a Context, mut value: f32) -> Result<Self> {
        let api = context.enter()?;
        // SAFETY: an f32 that outlives the call, which copies it.
        let handle =
            unsafe { invoke!(api, aclCreateScalar((&raw mut value).cast(), sys::ACL_FLOAT)) }?;
        if handle.is_null() {
            return Err(refused("aclCreateScalar"));
        }
        Ok(ScalarArg { context, handle })
    }
}

impl Drop for ScalarArg<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, and destroyed once.
        let _ = unsafe { invoke!(self.context.api(), aclDestroyScalar(self.handle)) };
    }
}

/// Which operator's phase two an executor is for.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Matmul,
    RmsNorm,
    InplaceAdd,
    InplaceCopy,
    GroupedMatmul,
}

/// What phase one gave.
#[derive(Debug)]
pub(crate) struct Executor {
    kind: Kind,
    handle: *mut aclOpExecutor,
    workspace: u64,
}

/// Operands of a grouped product: rows of x by group, each with its own matrix.
#[derive(Debug)]
pub(crate) struct GroupedMatmul<'a> {
    /// `[m, k]`.
    pub(crate) x: &'a View,
    /// `[groups, k, n]`.
    pub(crate) weight: &'a View,
    /// `[groups, n]`: f32 for bf16 and f32 weights, f16 for f16.
    pub(crate) bias: Option<&'a View>,
    /// `[groups]` i64 on the device: rows of each.
    pub(crate) counts: &'a View,
    /// `[m, n]`.
    pub(crate) out: &'a View,
}

impl Executor {
    fn phase_one(
        kind: Kind,
        call: impl FnOnce(*mut u64, *mut *mut aclOpExecutor) -> Result<()>,
    ) -> Result<Self> {
        let (mut workspace, mut handle) = (0u64, std::ptr::null_mut());
        call(&raw mut workspace, &raw mut handle)?;
        Ok(Executor { kind, handle, workspace })
    }

    /// out = left · right.
    pub(crate) fn matmul(
        left: &TensorArg<'_>,
        right: &TensorArg<'_>,
        out: &TensorArg<'_>,
    ) -> Result<Self> {
        let api = left.context.enter()?;
        // 0 keeps the type: an f32 product is a full one.
        let keep = 0i8;
        Executor::phase_one(Kind::Matmul, |workspace, executor| {
            // SAFETY: live descriptors, and results that are valid for their writes.
            unsafe {
                acl!(
                    api,
                    aclnnMatmulGetWorkspaceSize(
                        left.handle,
                        right.handle,
                        out.handle,
                        keep,
                        workspace,
                        executor
                    )
                )
            }
        })
    }

    /// out = x / sqrt(mean(x²) + eps) · gamma; rstd is its by-product.
    pub(crate) fn rms_norm(
        (x, gamma): (&TensorArg<'_>, &TensorArg<'_>),
        eps: f32,
        (out, rstd): (&TensorArg<'_>, &TensorArg<'_>),
    ) -> Result<Self> {
        let api = x.context.enter()?;
        Executor::phase_one(Kind::RmsNorm, |workspace, executor| {
            // SAFETY: as in `matmul`.
            unsafe {
                acl!(
                    api,
                    aclnnRmsNormGetWorkspaceSize(
                        x.handle,
                        gamma.handle,
                        f64::from(eps),
                        out.handle,
                        rstd.handle,
                        workspace,
                        executor
                    )
                )
            }
        })
    }

    /// target += alpha · other.
    pub(crate) fn add(
        target: &TensorArg<'_>,
        other: &TensorArg<'_>,
        alpha: &ScalarArg<'_>,
    ) -> Result<Self> {
        let api = target.context.enter()?;
        Executor::phase_one(Kind::InplaceAdd, |workspace, executor| {
            // SAFETY: as in `matmul`.
            unsafe {
                acl!(
                    api,
                    aclnnInplaceAddGetWorkspaceSize(
                        target.handle,
                        other.handle,
                        alpha.handle,
                        workspace,
                        executor
                    )
                )
            }
        })
    }

    /// target = source.
    pub(crate) fn copy(target: &TensorArg<'_>, source: &TensorArg<'_>) -> Result<Self> {
        let api = target.context.enter()?;
        Executor::phase_one(Kind::InplaceCopy, |workspace, executor| {
            // SAFETY: as in `matmul`.
            unsafe {
                acl!(
                    api,
                    aclnnInplaceCopyGetWorkspaceSize(
                        target.handle,
                        source.handle,
                        workspace,
                        executor
                    )
                )
            }
        })
    }

    /// Phase one, phase two and descriptors of a grouped product.
    pub(crate) fn run_grouped_matmul(
        op: &GroupedMatmul<'_>,
        stream: &mut Stream,
        workspace: (usize, usize),
    ) -> Result<()> {
        let context = stream.context().clone();
        let x = ListArg::single(&context, op.x)?;
        let weight = ListArg::single(&context, op.weight)?;
        let bias = op.bias.map(|b| ListArg::single(&context, b)).transpose()?;
        let counts = TensorArg::new(&context, op.counts)?;
        let out = ListArg::single(&context, op.out)?;
        let api = context.enter()?;
        let none = std::ptr::null_mut();
        let bias = bias.as_ref().map_or(none, |list| list.handle);
        // One output tensor; rows split by group; counts and not sums; no activation.
        let (split_item, group_type, list_type, activation) = (2, 0, 1, 0);
        let executor = Executor::phase_one(Kind::GroupedMatmul, |size, executor| {
            // SAFETY: as in `matmul`; null stands for operands that are optional.
            unsafe {
                acl!(
                    api,
                    aclnnGroupedMatmulV4GetWorkspaceSize(
                        x.handle,
                        weight.handle,
                        bias,
                        none,
                        none,
                        none,
                        none,
                        none,
                        counts.handle,
                        none,
                        none,
                        none,
                        split_item,
                        group_type,
                        list_type,
                        activation,
                        out.handle,
                        none,
                        none,
                        size,
                        executor
                    )
                )
            }
        })?;
        executor.run(stream, workspace)
    }

    /// Phase two, with (address, bytes) of workspace.
    ///
    /// # Errors
    /// `OutOfMemory` if the operator wants more workspace, or the runtime's.
    pub(crate) fn run(self, stream: &mut Stream, workspace: (usize, usize)) -> Result<()> {
        let (address, room) = workspace;
        if self.workspace > room as u64 {
            return Err(Error::OutOfMemory {
                pool: amphora_hal::Pool::Scratch,
                wanted: self.workspace as usize,
                left: room,
            });
        }
        let api = stream.context().enter()?;
        let at = address as *mut std::ffi::c_void;
        let (size, executor, on) = (self.workspace, self.handle, stream.handle());
        // SAFETY: the executor is fresh from phase one and consumed here; the workspace belongs to the
        // stream, whose order keeps operators from using it at the same time.
        unsafe {
            match self.kind {
                Kind::Matmul => acl!(api, aclnnMatmul(at, size, executor, on as _)),
                Kind::RmsNorm => acl!(api, aclnnRmsNorm(at, size, executor, on as _)),
                Kind::InplaceAdd => acl!(api, aclnnInplaceAdd(at, size, executor, on as _)),
                Kind::InplaceCopy => acl!(api, aclnnInplaceCopy(at, size, executor, on as _)),
                Kind::GroupedMatmul => {
                    acl!(api, aclnnGroupedMatmulV4(at, size, executor, on as _))
                }
            }
        }
    }
}
