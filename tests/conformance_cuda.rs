//! The conformance suite on a CUDA GPU.
fn main() -> std::process::ExitCode {
    amphora_tests::suite::<amphora_backend_cuda::Cuda>(&Default::default())
}
