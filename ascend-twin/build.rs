//! Compiles the AscendC kernels for the host, against this crate's own `kernel_operator.h`.

fn main() {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // Products and sums are rounded one by one, as vector instructions do.
        .flag("-ffp-contract=off")
        .include("kernel_operator")
        .include(amphora_ascendc_kernels::include_dir());
    for source in amphora_ascendc_kernels::sources() {
        println!("cargo:rerun-if-changed={}", source.display());
        build.file(source);
    }
    build.compile("amphora_kernels");
    println!("cargo:rerun-if-changed=kernel_operator");
    println!("cargo:rerun-if-changed={}", amphora_ascendc_kernels::include_dir().display());
}
