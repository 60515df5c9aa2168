//! The laws on a CUDA GPU. Which kernel makes a product depends on the bucket, and with it the order of
//! its sums; within a bucket a row's bits are its own.
fn main() -> std::process::ExitCode {
    let config = Default::default();
    amphora_tests::laws::<amphora_backend_cuda::Cuda>(&config, amphora_tests::laws::RowLaw::Near)
}
