#!/bin/sh
# Everything that a CUDA GPU is needed for, in one run: conformance, laws, and the crate's own tests.
#
#   tools/cuda_check.sh build OUT   where cargo is: the test binaries, and kernels for ARCH, into OUT
#   tools/cuda_check.sh run OUT     where the GPU is: runs them; needs neither cargo nor a compiler
#
# ARCH is sm_80,sm_90a unless set. AMPHORA_NVRTC_DIR names the runtime compiler, if the loader does not
# find it. Logs are written beside the binaries; the last lines say what passed.
set -u

build() {
    out=$1
    mkdir -p "$out/kernels"
    cargo build --package amphora-backend-cuda --example compile_kernels || return 1
    target=${CARGO_TARGET_DIR:-target}/debug
    "$target/examples/compile_kernels" --arch "${ARCH:-sm_80,sm_90a}" --out "$out/kernels" || return 1
    for test in conformance_cuda laws_cuda; do
        binary=$(cargo test --package amphora-tests --no-default-features --features cuda \
            --test "$test" --no-run --message-format json |
            sed -n 's/.*"executable":"\([^"]*'"$test"'[^"]*\)".*/\1/p')
        [ -n "$binary" ] && strip -o "$out/$test" "$binary" || return 1
    done
}

run() {
    out=$1
    failed=0
    export AMPHORA_KERNEL_CACHE="$out/kernels"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    for test in conformance_cuda laws_cuda; do
        "$out/$test" >"$out/$test.log" 2>&1 || failed=1
        sed -n '/^failures:/,$p' "$out/$test.log" | head -n 60
        tail -n 2 "$out/$test.log"
    done
    return $failed
}

case "${1:-}" in
build | run) "$1" "${2:?a folder}" ;;
*) sed -n '2,9p' "$0" && exit 2 ;;
esac
