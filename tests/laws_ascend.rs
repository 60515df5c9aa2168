//! The laws through the Ascend backend, on the host twin.
fn main() -> std::process::ExitCode {
    let library = amphora_backend_ascend::bundled_twin().ok();
    let config = amphora_hal::DeviceConfig { library, ..Default::default() };
    amphora_tests::laws::<amphora_backend_ascend::Ascend>(
        &config,
        amphora_tests::laws::RowLaw::Near,
    )
}
