//! Rules of the two-phase operators: what phase one refuses, and how executors and descriptors live.

use std::ffi::c_void;

use amphora_ascend_twin::acl::*;
use amphora_ascend_twin::aclnn::*;

use crate::{Twin, refused};

/// A dense tensor's descriptor.
fn tensor(dims: &[i64], dtype: i32, data: *mut c_void) -> Handle {
    let mut strides = vec![1i64; dims.len()];
    for i in (0..dims.len() - 1).rev() {
        strides[i] = strides[i + 1] * dims[i + 1];
    }
    let n = dims.len() as u64;
    // SAFETY: the arrays are valid for their lengths.
    let made = unsafe {
        let (dims, strides) = (dims.as_ptr(), strides.as_ptr());
        aclCreateTensor(dims, n, dtype, strides, 0, FORMAT_ND, dims, n, data)
    };
    assert!(!made.is_null(), "{}", crate::words());
    made
}

fn list(member: Handle) -> Handle {
    // SAFETY: an array of one.
    unsafe { aclCreateTensorList(&member, 1) }
}

fn matmul(a: Handle, b: Handle, out: Handle) -> (i32, u64, Handle) {
    let (mut bytes, mut executor) = (0, std::ptr::null_mut());
    // SAFETY: results are valid for their writes.
    let code = unsafe { aclnnMatmulGetWorkspaceSize(a, b, out, 0, &mut bytes, &mut executor) };
    (code, bytes, executor)
}

#[test]
fn matmul_refuses_mixed_types_and_wrong_shapes() {
    let twin = Twin::open();
    let memory = twin.device(4096);
    let of = |dims: &[i64], dtype| tensor(dims, dtype, memory);
    let (a, b) = (of(&[2, 3], BF16), of(&[3, 4], BF16));
    assert_eq!(matmul(a, b, of(&[2, 4], FLOAT)).0, SUCCESS, "bf16 into f32");
    let cases = [
        (a, of(&[3, 4], FLOAT16), of(&[2, 4], BF16), "mat2 of type 1"),
        (a, of(&[3, 4], FLOAT), of(&[2, 4], BF16), "mat2 of type 0"),
        (a, b, of(&[2, 4], FLOAT16), "out is of type 1"),
        (a, of(&[4, 3], BF16), of(&[2, 4], BF16), "times"),
        (a, b, of(&[4, 2], BF16), "times"),
        (a, of(&[3], BF16), of(&[2], BF16), "two dimensions"),
    ];
    for (a, b, out, rule) in cases {
        refused(matmul(a, b, out).0, ACLNN_INVALID, rule);
    }
    refused(matmul(a, std::ptr::null_mut(), b).0, ACLNN_NULLPTR, "mat2 is null");
}

#[test]
fn phase_two_runs_once_and_wants_its_workspace() {
    let twin = Twin::open();
    let (x, w, y) = (twin.filled(&[1.0f32, 2.0]), twin.filled(&[3.0f32, 4.0]), twin.device(4));
    let operands =
        (tensor(&[1, 2], FLOAT, x), tensor(&[2, 1], FLOAT, w), tensor(&[1, 1], FLOAT, y));
    let (code, bytes, executor) = matmul(operands.0, operands.1, operands.2);
    assert_eq!(code, SUCCESS);
    let none = std::ptr::null_mut();
    let code = aclnnMatmul(none, 0, executor, twin.stream);
    refused(code, ACLNN_RUNTIME, "workspace");
    let (_, _, executor) = matmul(operands.0, operands.1, operands.2);
    let workspace = twin.device(bytes as usize);
    assert_eq!(aclnnMatmul(workspace, bytes, executor, twin.stream), SUCCESS);
    let code = aclnnMatmul(workspace, bytes, executor, twin.stream);
    refused(code, ACLNN_INVALID, "runs once");
    assert_eq!(twin.synchronize(), SUCCESS);
    assert_eq!(twin.read::<f32>(y, 1), [11.0]);
}

#[test]
fn operands_outside_their_allocation_are_a_fault() {
    let twin = Twin::open();
    let (small, fine) = (twin.device(8), twin.filled(&[0.0f32; 8]));
    let (a, b) = (tensor(&[2, 2], FLOAT, small), tensor(&[2, 2], FLOAT, fine));
    let (code, bytes, executor) = matmul(a, b, tensor(&[2, 2], FLOAT, fine));
    assert_eq!(code, SUCCESS, "phase one touches no device");
    let workspace = twin.device(bytes as usize);
    assert_eq!(aclnnMatmul(workspace, bytes, executor, twin.stream), SUCCESS);
    refused(twin.synchronize(), AICORE_EXCEPTION, "leaves its device allocation");
}

#[test]
fn rms_norm_wants_an_f32_root_and_does_not_write_over_x() {
    let twin = Twin::open();
    let (x, y, gamma, root) = (twin.device(64), twin.device(64), twin.device(64), twin.device(64));
    let norm = |gamma_type, root_type, y| {
        let (mut bytes, mut executor) = (0, std::ptr::null_mut());
        // SAFETY: results are valid for their writes.
        unsafe {
            aclnnRmsNormGetWorkspaceSize(
                tensor(&[2, 8], BF16, x),
                tensor(&[8], gamma_type, gamma),
                1e-6,
                tensor(&[2, 8], BF16, y),
                tensor(&[2, 1], root_type, root),
                &mut bytes,
                &mut executor,
            )
        }
    };
    assert_eq!(norm(FLOAT, FLOAT, y), SUCCESS, "an f32 gamma beside bf16");
    refused(norm(FLOAT16, FLOAT, y), ACLNN_INVALID, "gamma 1");
    refused(norm(FLOAT, BF16, y), ACLNN_INVALID, "rstd 27");
    refused(norm(FLOAT, FLOAT, x), ACLNN_INVALID, "overlaps an input");
}

#[test]
fn grouped_matmul_takes_no_bf16_bias() {
    let twin = Twin::open();
    let memory = twin.device(4096);
    let of = |dims: &[i64], dtype| tensor(dims, dtype, memory);
    let none = std::ptr::null_mut();
    let grouped = |bias: Handle, counts_type, act_type| {
        let (mut bytes, mut executor) = (0, std::ptr::null_mut());
        let (x, weight, out) = (of(&[4, 3], BF16), of(&[2, 3, 5], BF16), of(&[4, 5], BF16));
        // SAFETY: results are valid for their writes.
        unsafe {
            aclnnGroupedMatmulV4GetWorkspaceSize(
                list(x),
                list(weight),
                bias,
                none,
                none,
                none,
                none,
                none,
                of(&[2], counts_type),
                none,
                none,
                none,
                2,
                0,
                1,
                act_type,
                list(out),
                none,
                none,
                &mut bytes,
                &mut executor,
            )
        }
    };
    assert_eq!(grouped(list(of(&[2, 5], FLOAT)), INT64, 0), SUCCESS);
    let bf16 = grouped(list(of(&[2, 5], BF16)), INT64, 0);
    refused(bf16, ACLNN_INVALID, "bias is of type 27");
    refused(grouped(none, FLOAT, 0), ACLNN_INVALID, "groupList is of type");
    refused(grouped(none, INT64, 5), ACLNN_INVALID, "actType 5");
}

#[test]
fn lists_take_their_members_with_them() {
    let twin = Twin::open();
    let member = tensor(&[1], FLOAT, twin.device(4));
    let list = list(member);
    refused(aclDestroyTensor(member), ACLNN_INVALID, "belongs to a list");
    assert_eq!(aclDestroyTensorList(list), SUCCESS);
    refused(aclDestroyTensor(member), ACLNN_INVALID, "destroyed before");
    refused(aclDestroyTensorList(list), ACLNN_INVALID, "destroyed before");
}

#[test]
fn views_stay_in_their_storage() {
    let (dims, strides, storage) = ([2i64, 3], [4i64, 1], [6i64]);
    // SAFETY: the arrays are valid for their lengths.
    let made = unsafe {
        aclCreateTensor(
            dims.as_ptr(),
            2,
            FLOAT,
            strides.as_ptr(),
            0,
            FORMAT_ND,
            storage.as_ptr(),
            1,
            std::ptr::null_mut(),
        )
    };
    assert!(made.is_null() && crate::words().contains("leaves its storage"));
}
