//! Rules of the runtime: contexts, handles, memory, capture, order.

use std::ffi::c_void;

use amphora_ascend_twin::acl::*;

use crate::{Twin, refused};

#[test]
fn a_thread_has_no_context_until_it_takes_one() {
    let twin = Twin::open();
    let context = twin.context as usize;
    std::thread::spawn(move || {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the result is valid for its write.
        let code = unsafe { aclrtCreateStream(&mut stream) };
        refused(code, CONTEXT_NULL, "no current context");
        assert_eq!(aclrtSetCurrentContext(context as *mut c_void), SUCCESS);
        // SAFETY: as above.
        assert_eq!(unsafe { aclrtCreateStream(&mut stream) }, SUCCESS);
    })
    .join()
    .expect("the assertions hold");
}

#[test]
fn copies_stay_within_dest_max_and_sides_are_what_they_are_called() {
    let twin = Twin::open();
    let (device, host) = (twin.device(64), [0u8; 64]);
    let from = host.as_ptr().cast();
    // SAFETY: every host side is valid for the bytes named; refused calls touch nothing.
    unsafe {
        refused(
            aclrtMemcpy(device, 32, from, 64, HOST_TO_DEVICE),
            PARAM_INVALID,
            "into destMax 32",
        );
        refused(
            aclrtMemcpy(device, 65, from, 64, HOST_TO_DEVICE),
            PARAM_INVALID,
            "is not device memory",
        );
        refused(
            aclrtMemcpy(device, 64, from, 64, DEVICE_TO_DEVICE),
            PARAM_INVALID,
            "is not device memory",
        );
        refused(
            aclrtMemcpy(host.as_ptr() as *mut c_void, 64, device, 64, HOST_TO_HOST),
            PARAM_INVALID,
            "is not host memory",
        );
    }
}

#[test]
fn host_to_host_is_never_asynchronous() {
    let twin = Twin::open();
    let (a, b) = (twin.pinned(32), twin.pinned(32));
    // SAFETY: both sides are pinned and 32 bytes long.
    let code = unsafe { aclrtMemcpyAsync(a, 32, b, 32, HOST_TO_HOST, twin.stream) };
    refused(code, NOT_SUPPORTED, "not asynchronous");
}

#[test]
fn stale_and_foreign_handles_are_refused() {
    let twin = Twin::open();
    let mut stream = std::ptr::null_mut();
    // SAFETY: the result is valid for its write.
    assert_eq!(unsafe { aclrtCreateStream(&mut stream) }, SUCCESS);
    assert_eq!(aclrtDestroyStream(stream), SUCCESS);
    refused(aclrtSynchronizeStream(stream), INVALID_HANDLE, "no stream");
    refused(aclrtSynchronizeEvent(twin.stream), INVALID_HANDLE, "no event");
    let elsewhere = twin.stream;
    let _other = Twin::open();
    refused(aclrtSynchronizeStream(elsewhere), STREAM_CONTEXT, "another context");
    assert_eq!(aclrtSetCurrentContext(twin.context), SUCCESS);
    refused(aclrtFree(twin.pinned(8)), PARAM_INVALID, "no device allocation");
}

#[test]
fn device_memory_is_aligned_and_starts_as_poison() {
    let twin = Twin::open();
    let device = twin.device(48);
    assert_eq!(device as usize % 64, 0);
    assert!(twin.read::<f32>(device, 12).iter().all(|v| v.is_nan()));
    let mut none = std::ptr::null_mut();
    // SAFETY: the result is valid for its write.
    refused(unsafe { aclrtMalloc(&mut none, 0, 0) }, PARAM_INVALID, "0 bytes");
}

#[test]
fn asynchronous_bytes_come_with_the_wait() {
    let twin = Twin::open();
    let (device, host) = (twin.filled(&[7u8; 32]), twin.pinned(32));
    // SAFETY: `host` is 32 pinned bytes, alive until the end of the test.
    unsafe {
        host.cast::<u8>().write_bytes(0, 32);
        assert_eq!(aclrtMemcpyAsync(host, 32, device, 32, DEVICE_TO_HOST, twin.stream), SUCCESS);
        assert_eq!(host.cast::<u8>().read(), 0, "nobody waited yet");
        assert_eq!(twin.synchronize(), SUCCESS);
        assert_eq!(host.cast::<u8>().read(), 7);
    }
}

#[test]
fn memory_freed_under_a_copy_is_a_fault() {
    let twin = Twin::open();
    let (device, host) = (twin.device(32), twin.pinned(32));
    // SAFETY: the copy looks both sides up when it runs, and runs after the free.
    let code = unsafe { aclrtMemcpyAsync(device, 32, host, 32, HOST_TO_DEVICE, twin.stream) };
    assert_eq!(code, SUCCESS);
    assert_eq!(aclrtFreeHost(host), SUCCESS);
    refused(twin.synchronize(), AICORE_EXCEPTION, "freed before it ran");
}

#[test]
fn capture_forbids_what_blocks() {
    let twin = Twin::open();
    let (device, host) = (twin.device(32), [0u8; 32]);
    let from = host.as_ptr().cast();
    let thread_local = 1;
    let mut model = std::ptr::null_mut();
    for forbidden in 0..4 {
        assert_eq!(aclmdlRICaptureBegin(twin.stream, thread_local), SUCCESS);
        // SAFETY: `host` is 32 bytes, results are valid for their writes.
        let code = unsafe {
            match forbidden {
                0 => aclrtMemcpy(device, 32, from, 32, HOST_TO_DEVICE),
                1 => aclrtMemset(device, 32, 0, 32),
                2 => aclrtMemcpyAsync(device, 32, from, 32, HOST_TO_DEVICE, twin.stream),
                _ => twin.synchronize(),
            }
        };
        refused(code, CAPTURE_FORBIDS, "captur");
        // SAFETY: as above.
        let code = unsafe { aclmdlRICaptureEnd(twin.stream, &mut model) };
        refused(code, CAPTURE_INVALIDATED, "spoilt");
    }
    assert_eq!(aclrtMemset(device, 32, 0, 32), SUCCESS, "allowed again");
}

#[test]
fn captured_work_runs_by_replay_alone() {
    let twin = Twin::open();
    let (source, target) = (twin.filled(&[5u8; 32]), twin.filled(&[0u8; 32]));
    let mut model = std::ptr::null_mut();
    assert_eq!(aclmdlRICaptureBegin(twin.stream, 1), SUCCESS);
    refused(aclmdlRICaptureBegin(twin.stream, 1), STREAM_CAPTURED, "already");
    // SAFETY: both sides are device memory, the result is valid for its write.
    unsafe {
        let kind = DEVICE_TO_DEVICE;
        assert_eq!(aclrtMemcpyAsync(target, 32, source, 32, kind, twin.stream), SUCCESS);
        assert_eq!(aclmdlRICaptureEnd(twin.stream, &mut model), SUCCESS);
        let again = aclmdlRICaptureEnd(twin.stream, &mut model);
        refused(again, STREAM_NOT_CAPTURED, "not being captured");
    }
    assert_eq!(twin.synchronize(), SUCCESS);
    assert_eq!(twin.read::<u8>(target, 32), [0; 32]);
    assert_eq!(aclmdlRIExecuteAsync(model, twin.stream), SUCCESS);
    refused(aclmdlRIDestroy(model), MODEL_RUNNING, "still lies");
    assert_eq!(twin.synchronize(), SUCCESS);
    assert_eq!(twin.read::<u8>(target, 32), [5; 32]);
    assert_eq!(aclmdlRIDestroy(model), SUCCESS);
}

#[test]
fn events_order_streams_and_want_a_record() {
    let twin = Twin::open();
    let (mut event, mut second) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: results are valid for their writes.
    unsafe {
        assert_eq!(aclrtCreateEventExWithFlag(&mut event, 1), SUCCESS);
        assert_eq!(aclrtCreateStream(&mut second), SUCCESS);
    }
    refused(aclrtStreamWaitEvent(second, event), PARAM_INVALID, "never recorded");
    let (source, middle, target) = (twin.filled(&[9u8; 32]), twin.device(32), twin.device(32));
    let kind = DEVICE_TO_DEVICE;
    // SAFETY: all sides are device memory.
    unsafe {
        assert_eq!(aclrtMemcpyAsync(middle, 32, source, 32, kind, twin.stream), SUCCESS);
        assert_eq!(aclrtRecordEvent(event, twin.stream), SUCCESS);
        assert_eq!(aclrtStreamWaitEvent(second, event), SUCCESS);
        assert_eq!(aclrtMemcpyAsync(target, 32, middle, 32, kind, second), SUCCESS);
    }
    refused(aclrtDestroyEvent(event), PARAM_INVALID, "still waits");
    assert_eq!(aclrtSynchronizeStream(second), SUCCESS);
    assert_eq!(twin.read::<u8>(target, 32), [9; 32]);
    assert_eq!(aclrtDestroyEvent(event), SUCCESS);
}
