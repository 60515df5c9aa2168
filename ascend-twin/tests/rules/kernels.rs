//! Rules that a kernel can break. The fault surfaces at the next synchronisation.

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use amphora_ascend_twin::acl::*;

use crate::{Twin, refused};

fn compiler() -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command
        .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-I"])
        .arg(root.join("kernel_operator"))
        .arg(root.join("tests/rules/kernels.cpp"));
    command
}

/// The kernels of `kernels.cpp`, compiled once.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rules_kernels.so");
        let status = compiler().arg("-o").arg(&out).status().expect("a C++ compiler");
        assert!(status.success(), "the kernels do not compile");
        out
    })
}

fn function(name: &str) -> Handle {
    let path = CString::new(binary().to_string_lossy().into_owned()).expect("no zero byte");
    let name = CString::new(name).expect("no zero byte");
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: strings end in zero, results are valid for their writes.
    unsafe {
        let code = aclrtBinaryLoadFromFile(path.as_ptr(), std::ptr::null_mut(), &mut module);
        assert_eq!(code, SUCCESS, "{}", crate::words());
        assert_eq!(aclrtBinaryGetFunction(module, name.as_ptr(), &mut function), SUCCESS);
    }
    function
}

fn launch(twin: &Twin, name: &str, arguments: &[*mut c_void]) -> i32 {
    let function = function(name);
    let (mut list, mut parameter) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: values are addresses of 8 bytes, results are valid for their writes.
    unsafe {
        assert_eq!(aclrtKernelArgsInit(function, &mut list), SUCCESS);
        for argument in arguments {
            let mut value = *argument as u64;
            let at = (&raw mut value).cast();
            assert_eq!(aclrtKernelArgsAppend(list, at, 8, &mut parameter), SUCCESS);
        }
        assert_eq!(aclrtKernelArgsAppendPlaceHolder(list, &mut parameter), SUCCESS);
    }
    assert_eq!(aclrtKernelArgsFinalize(list), SUCCESS);
    let none = std::ptr::null_mut();
    aclrtLaunchKernelWithConfig(function, 1, twin.stream, none, list, none)
}

/// Runs a kernel on 16 floats: what it wrote, or the code of the synchronisation.
fn run(name: &str) -> Result<Vec<f32>, i32> {
    let twin = Twin::open();
    let input: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let (from, to) = (twin.filled(&input), twin.device(64));
    assert_eq!(launch(&twin, name, &[from, to]), SUCCESS, "a launch only enqueues");
    match twin.synchronize() {
        SUCCESS => Ok(twin.read(to, 16)),
        code => Err(code),
    }
}

#[track_caller]
fn caught(name: &str, rule: &str) {
    let code = run(name).expect_err("the kernel breaks a rule");
    refused(code, VECTOR_CORE_EXCEPTION, rule);
}

#[test]
fn a_right_kernel_runs() {
    let want: Vec<f32> = (0..16).map(|i| 2.0 * i as f32).collect();
    assert_eq!(run("right"), Ok(want));
}

#[test]
fn copies_move_whole_blocks() {
    caught("copy_of_odd_bytes", "no multiple of 32");
}

#[test]
fn vector_operands_begin_at_blocks() {
    caught("operand_off_its_block", "not a multiple of 32");
}

#[test]
fn buffers_fit_into_ub() {
    caught("more_than_ub_holds", "leave the 188416 bytes of UB");
}

#[test]
fn queues_give_each_tensor_back() {
    caught("tensor_never_freed", "not freed");
    caught("take_from_an_empty_queue", "DeQue of an empty queue");
    caught("queue_without_alloc", "EnQue of a tensor that is not allocated");
}

#[test]
fn nothing_is_read_before_it_is_written() {
    caught("read_before_write", "which nothing has written");
}

#[test]
fn global_memory_ends_with_its_allocation() {
    caught("past_the_allocation", "in no device allocation");
}

#[test]
fn pipes_wait_for_each_other() {
    caught("scalar_read_without_flag", "pipe V may still write");
    caught("vector_read_without_queue", "pipe MTE2 may still write");
    caught("wait_for_nothing", "which nobody set");
    caught("flag_left_set", "a flag set that nobody waited for");
}

#[test]
fn casts_to_bf16_round() {
    caught("unrounded_cast_to_bf16", "no CAST_NONE");
}

#[test]
fn unsized_tensors_have_no_size() {
    caught("size_of_an_unsized_tensor", "given no size");
}

#[test]
fn bf16_has_no_vector_arithmetic() {
    let out =
        compiler().args(["-fsyntax-only", "-DAMPHORA_RULE_BF16"]).output().expect("a C++ compiler");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success(), "it compiles");
    assert!(text.contains("no vector arithmetic in bf16"), "{text}");
}

#[test]
fn faults_surface_at_the_next_wait_and_stay() {
    let twin = Twin::open();
    let (from, to) = (twin.filled(&[0.0f32; 16]), twin.device(64));
    assert_eq!(launch(&twin, "wait_for_nothing", &[from, to]), SUCCESS);
    assert_eq!(launch(&twin, "right", &[from, to]), SUCCESS, "not known yet");
    refused(twin.synchronize(), VECTOR_CORE_EXCEPTION, "nobody set");
    refused(twin.synchronize(), VECTOR_CORE_EXCEPTION, "nobody set");
}

#[test]
fn the_plain_launch_wants_its_arguments_on_the_device() {
    let twin = Twin::open();
    let (from, to) = (twin.filled(&[1.0f32; 16]), twin.device(64));
    let tiling = twin.device(32);
    let arguments = [from as u64, to as u64, tiling as u64];
    let function = function("right");
    let bytes = size_of_val(&arguments);
    let on_host = arguments.as_ptr().cast();
    let code = aclrtLaunchKernel(function, 1, on_host, bytes, twin.stream);
    refused(code, PARAM_INVALID, "not in device memory");
    let on_device = twin.filled(&arguments);
    assert_eq!(aclrtLaunchKernel(function, 1, on_device, bytes, twin.stream), SUCCESS);
    assert_eq!(twin.synchronize(), SUCCESS);
    assert_eq!(twin.read::<f32>(to, 16), [2.0; 16]);
}

#[test]
fn binaries_have_absolute_paths_and_known_kernels() {
    let _twin = Twin::open();
    let mut module = std::ptr::null_mut();
    let none = std::ptr::null_mut();
    // SAFETY: strings end in zero, results are valid for their writes.
    unsafe {
        let code = aclrtBinaryLoadFromFile(c"kernels.o".as_ptr(), none, &mut module);
        refused(code, PARAM_INVALID, "not absolute");
        let code = aclrtBinaryLoadFromFile(c"/nowhere/kernels.o".as_ptr(), none, &mut module);
        refused(code, INVALID_FILE, "/nowhere");
        let path = CString::new(binary().to_string_lossy().into_owned()).expect("no zero byte");
        assert_eq!(aclrtBinaryLoadFromFile(path.as_ptr(), none, &mut module), SUCCESS);
        let mut function = std::ptr::null_mut();
        let code = aclrtBinaryGetFunction(module, c"no_such".as_ptr(), &mut function);
        refused(code, KERNEL_NOT_FOUND, "no_such");
    }
}
