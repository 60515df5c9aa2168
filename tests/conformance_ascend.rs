//! The conformance suite through the Ascend backend, on the host twin.
fn main() -> std::process::ExitCode {
    let library = amphora_backend_ascend::bundled_twin().ok();
    amphora_tests::suite::<amphora_backend_ascend::Ascend>(&amphora_hal::DeviceConfig {
        library,
        ..Default::default()
    })
}
