//! `aclnnGroupedMatmulV4` in the form that experts want: one x, one weight of all groups, rows split
//! by a list on the device.

use std::ffi::c_void;
use std::sync::Arc;

use super::matmul::{WORKSPACE, product};
use super::{Handle, Operator, Out, Tensor, phase_one, phase_two, require, single, tensor};
use crate::acl::{BF16, FLOAT, Fail, INT64, State};

/// The last dimension of x and of weight stays below this.
const MAX_WIDTH: usize = 65_536;
/// Most groups of a single weight tensor.
const MAX_GROUPS: usize = 1024;

/// The operands, checked against each other.
struct Grouped {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    groups: Tensor,
    cumulative: bool,
    out: Tensor,
}

impl Grouped {
    fn check(&self) -> Result<(), Fail> {
        let Grouped { x, weight, bias, groups, out, .. } = self;
        require(x.is_float() && weight.dtype == x.dtype && out.dtype == x.dtype, || {
            format!("types: x {}, weight {}, out {}", x.dtype, weight.dtype, out.dtype)
        })?;
        let shapes = || format!("x {:?}, weight {:?}, out {:?}", x.dims, weight.dims, out.dims);
        let fits = match (x.dims.as_slice(), weight.dims.as_slice()) {
            (&[m, k], &[e, k2, n]) => {
                k == k2
                    && out.dims == [m, n]
                    && k < MAX_WIDTH
                    && n < MAX_WIDTH
                    && e <= MAX_GROUPS
                    && groups.dims == [e]
            }
            _ => false,
        };
        require(fits, shapes)?;
        require(x.is_dense() && out.is_dense(), || "x or out has gaps".to_owned())?;
        require(groups.dtype == INT64, || format!("groupList is of type {}", groups.dtype))?;
        if let Some(bias) = bias {
            // bf16 weights want an f32 bias; a bf16 one is refused.
            let wanted = if x.dtype == BF16 { FLOAT } else { x.dtype };
            require(bias.dtype == wanted, || {
                format!("bias is of type {}, wanted {wanted}", bias.dtype)
            })?;
            require(bias.dims == [weight.dims[0], weight.dims[2]], || {
                format!("bias {:?}, weight {:?}", bias.dims, weight.dims)
            })?;
        }
        Ok(())
    }

    /// First and last row of each group.
    fn rows(&self, state: &State) -> Result<Vec<(usize, usize)>, String> {
        let list = self.groups.load_i64(state)?;
        let m = self.x.dims[0];
        let mut begin = 0;
        let mut out = Vec::with_capacity(list.len());
        for &value in &list {
            let value = usize::try_from(value).map_err(|_| format!("groupList {list:?}"))?;
            let end = if self.cumulative { value } else { begin + value };
            if end < begin || end > m {
                return Err(format!("groupList {list:?} of {m} rows"));
            }
            out.push((begin, end));
            begin = end;
        }
        Ok(out)
    }

    fn run(&self, state: &State) -> Result<(), String> {
        let (k, n) = (self.weight.dims[1], self.weight.dims[2]);
        let (x, weight) = (self.x.load(state)?, self.weight.load(state)?);
        let bias = self.bias.as_ref().map(|b| b.load(state)).transpose()?;
        let mut sums = Vec::new();
        for (group, (begin, end)) in self.rows(state)?.into_iter().enumerate() {
            let of_group = &weight[group * k * n..(group + 1) * k * n];
            let mut part = product(&x[begin * k..end * k], of_group, end - begin, k, n);
            if let Some(bias) = &bias {
                for row in part.chunks_exact_mut(n) {
                    for (sum, add) in row.iter_mut().zip(&bias[group * n..]) {
                        *sum += add;
                    }
                }
            }
            sums.extend(part);
        }
        // Rows beyond the last group are not written.
        self.out.store(state, &sums)
    }
}

/// `aclnnGroupedMatmulV4GetWorkspaceSize`: groupType 0, splitItem 2 or 3, no quantisation.
///
/// # Safety
/// The result pointers are null or valid for writes.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The vendor's.
pub unsafe extern "C" fn aclnnGroupedMatmulV4GetWorkspaceSize(
    x: Handle,
    weight: Handle,
    bias: Handle,
    scale: Handle,
    offset: Handle,
    antiquant_scale: Handle,
    antiquant_offset: Handle,
    per_token_scale: Handle,
    group_list: Handle,
    act_in: Handle,
    act_quant_scale: Handle,
    act_quant_offset: Handle,
    split_item: i64,
    group_type: i64,
    group_list_type: i64,
    act_type: i64,
    out: Handle,
    act_feature_out: Handle,
    dyn_quant_scale_out: Handle,
    workspace: *mut u64,
    executor: *mut Handle,
) -> i32 {
    let results = Out { workspace, executor };
    phase_one("aclnnGroupedMatmulV4", results, |state| {
        let unused = [
            scale,
            offset,
            antiquant_scale,
            antiquant_offset,
            per_token_scale,
            act_in,
            act_quant_scale,
            act_quant_offset,
            act_feature_out,
            dyn_quant_scale_out,
        ];
        require(unused.iter().all(|h| h.is_null()), || {
            "quantisation and activation operands are not modelled".to_owned()
        })?;
        require(matches!(split_item, 2 | 3) && group_type == 0 && act_type == 0, || {
            format!("splitItem {split_item}, groupType {group_type}, actType {act_type}")
        })?;
        require(matches!(group_list_type, 0 | 1), || {
            format!("groupListType {group_list_type} is not modelled")
        })?;
        let grouped = Grouped {
            x: single(state, x, "x")?,
            weight: single(state, weight, "weight")?,
            bias: if bias.is_null() { None } else { Some(single(state, bias, "bias")?) },
            groups: tensor(state, group_list, "groupList")?,
            cumulative: group_list_type == 0,
            out: single(state, out, "out")?,
        };
        grouped.check()?;
        let operator: Arc<Operator> = Arc::new(move |state: &State| grouped.run(state));
        Ok((WORKSPACE, operator))
    })
}

/// `aclnnGroupedMatmulV4`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclnnGroupedMatmulV4(
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    phase_two("aclnnGroupedMatmulV4", workspace, bytes, executor, stream)
}
