//! The conformance suite on the CPU.
fn main() -> std::process::ExitCode {
    amphora_tests::suite::<amphora_backend_cpu::Cpu>(&Default::default())
}
