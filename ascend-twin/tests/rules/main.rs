//! One wrong kernel or call per rule; each must be caught, by the vendor's code and with the rule in
//! words. Run on the host twin.

mod calls;
mod kernels;
mod operators;

use std::ffi::{CStr, c_void};

use amphora_ascend_twin::acl::*;

/// A context of this test's own, current on its thread, with a stream.
struct Twin {
    context: Handle,
    stream: Handle,
}

impl Twin {
    fn open() -> Self {
        let code = aclInit(std::ptr::null());
        assert!(code == SUCCESS || code == REPEAT_INITIALIZE);
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both results are valid for their writes.
        unsafe {
            assert_eq!(aclrtCreateContext(&mut context, 0), SUCCESS);
            assert_eq!(aclrtCreateStream(&mut stream), SUCCESS);
        }
        Twin { context, stream }
    }

    fn device(&self, bytes: usize) -> *mut c_void {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the result is valid for its write.
        assert_eq!(unsafe { aclrtMalloc(&mut pointer, bytes, 0) }, SUCCESS);
        pointer
    }

    fn pinned(&self, bytes: usize) -> *mut c_void {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the result is valid for its write.
        assert_eq!(unsafe { aclrtMallocHost(&mut pointer, bytes) }, SUCCESS);
        pointer
    }

    /// Device memory that holds these values.
    fn filled<T: Copy>(&self, values: &[T]) -> *mut c_void {
        let bytes = size_of_val(values);
        let pointer = self.device(bytes);
        let from = values.as_ptr().cast();
        // SAFETY: the source is a slice of `bytes`.
        let code = unsafe { aclrtMemcpy(pointer, bytes, from, bytes, HOST_TO_DEVICE) };
        assert_eq!(code, SUCCESS);
        pointer
    }

    fn read<T: Copy + Default>(&self, from: *mut c_void, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        let bytes = count * size_of::<T>();
        let to = values.as_mut_ptr().cast();
        // SAFETY: the destination is a vector of `bytes`.
        let code = unsafe { aclrtMemcpy(to, bytes, from, bytes, DEVICE_TO_HOST) };
        assert_eq!(code, SUCCESS);
        values
    }

    fn synchronize(&self) -> i32 {
        aclrtSynchronizeStream(self.stream)
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        aclrtDestroyContext(self.context);
    }
}

/// The twin's words for the last refusal on this thread.
fn words() -> String {
    let text = aclGetRecentErrMsg();
    assert!(!text.is_null(), "a refusal without words");
    // SAFETY: not null, a string that lives until this thread's next call.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A call that must be refused with `code`, in words that hold `rule`.
#[track_caller]
fn refused(got: i32, code: i32, rule: &str) {
    assert_eq!(got, code, "expected the refusal: {rule}");
    let words = words();
    assert!(words.contains(rule), "{words:?} does not say {rule:?}");
}
