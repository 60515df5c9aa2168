//! The laws on a CUDA GPU. At the widths of their cases a row's products are summed in one order whatever
//! its batch.
fn main() -> std::process::ExitCode {
    let config = Default::default();
    amphora_tests::laws::<amphora_backend_cuda::Cuda>(&config, amphora_tests::laws::RowLaw::Bitwise)
}
