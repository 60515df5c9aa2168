//! The conformance suite on a CUDA GPU, the cases of each lever of its kernels by itself, and contexts that take
//! other devices too long.

#[path = "conformance_cuda/calls.rs"]
mod calls;
#[path = "conformance_cuda/levers.rs"]
mod levers;

fn main() -> std::process::ExitCode {
    amphora_tests::suite_and(&Default::default(), |device: &amphora_backend_cuda::Cuda| {
        let mut own = levers::cases(device);
        own.extend(calls::long_contexts());
        own
    })
}
