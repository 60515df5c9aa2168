//! The vendor's codes and numbers that the twin uses.

#![allow(missing_docs)] // The vendor's names, numbers and meanings.

pub const SUCCESS: i32 = 0;
pub const UNINITIALIZED: i32 = 100_001;
pub const REPEAT_INITIALIZE: i32 = 100_002;
pub const INVALID_FILE: i32 = 100_003;
pub const KERNEL_NOT_FOUND: i32 = 100_029;
pub const PARAM_INVALID: i32 = 107_000;
pub const INVALID_DEVICE: i32 = 107_001;
pub const CONTEXT_NULL: i32 = 107_002;
pub const STREAM_CONTEXT: i32 = 107_003;
pub const INVALID_HANDLE: i32 = 107_017;
pub const STREAM_CAPTURED: i32 = 107_027;
pub const STREAM_NOT_CAPTURED: i32 = 107_029;
pub const CAPTURE_FORBIDS: i32 = 107_030;
pub const CAPTURE_UNMATCHED: i32 = 107_036;
pub const MODEL_RUNNING: i32 = 107_037;
pub const CAPTURE_WRONG_THREAD: i32 = 107_038;
pub const NOT_SUPPORTED: i32 = 207_000;
pub const MEMORY_ALLOCATION: i32 = 207_001;
pub const AICORE_EXCEPTION: i32 = 507_015;
pub const VECTOR_CORE_EXCEPTION: i32 = 507_035;
pub const CAPTURE_INVALIDATED: i32 = 507_903;

pub const ACLNN_NULLPTR: i32 = 161_001;
pub const ACLNN_INVALID: i32 = 161_002;
pub const ACLNN_RUNTIME: i32 = 361_001;
pub const ACLNN_TILING: i32 = 561_002;

pub const FLOAT: i32 = 0;
pub const FLOAT16: i32 = 1;
pub const INT64: i32 = 9;
pub const BF16: i32 = 27;
pub const FORMAT_ND: i32 = 2;

pub const HOST_TO_HOST: i32 = 0;
pub const HOST_TO_DEVICE: i32 = 1;
pub const DEVICE_TO_HOST: i32 = 2;
pub const DEVICE_TO_DEVICE: i32 = 3;
