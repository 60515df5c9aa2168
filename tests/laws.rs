//! The laws on the CPU, whose rows never depend on their batch.
fn main() -> std::process::ExitCode {
    let config = Default::default();
    amphora_tests::laws::<amphora_backend_cpu::Cpu>(&config, amphora_tests::laws::RowLaw::Bitwise)
}
