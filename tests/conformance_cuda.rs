//! The conformance suite on a CUDA GPU, and the cases of each lever of its kernels by itself.

#[path = "conformance_cuda/calls.rs"]
mod calls;
#[path = "conformance_cuda/levers.rs"]
mod levers;

fn main() -> std::process::ExitCode {
    amphora_tests::suite_and(&Default::default(), |device: &amphora_backend_cuda::Cuda| {
        levers::cases(device)
    })
}
