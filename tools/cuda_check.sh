#!/bin/sh
# Everything that a CUDA GPU is needed for, in one run: the suite, the laws, whole models, the binary.
#
#   tools/cuda_check.sh build OUT   where cargo is: test binaries, the server and kernels for ARCH, into OUT
#   tools/cuda_check.sh run OUT     where the GPU is, from the root of the same checkout: runs them;
#                                   needs neither cargo nor a compiler
#
# ARCH is sm_80,sm_90a unless set. AMPHORA_NVRTC_DIR names the runtime compiler, if the loader does not
# find it. Logs are written beside the binaries; the last lines say what passed. The golden sets are
# found at the path that the checkout had where it was built.
set -u

TESTS="conformance_cuda laws_cuda cuda cuda_fault server"

build() {
    out=$1
    mkdir -p "$out/kernels"
    cargo build --package amphora-backend-cuda --example compile_kernels || return 1
    target=${CARGO_TARGET_DIR:-target}
    "$target/debug/examples/compile_kernels" --arch "${ARCH:-sm_80,sm_90a}" --out "$out/kernels" || return 1
    for test in $TESTS; do
        binary=$(cargo test --package amphora-tests --features cuda \
            --test "$test" --no-run --message-format json |
            sed -n 's/.*"executable":"\([^"]*'"$test"'-[^"]*\)".*/\1/p')
        [ -n "$binary" ] && strip -o "$out/$test" "$binary" || return 1
    done
    cargo build --release --package amphora-server --features cuda || return 1
    strip -o "$out/amphora" "$target/release/amphora"
    # The black-box tests know no backend: this names it for them.
    printf '#!/bin/sh\nexec "${0%%-cuda}" "$@" --backend cuda\n' >"$out/amphora-cuda"
    chmod +x "$out/amphora-cuda"
    git rev-parse HEAD >"$out/commit"
}

run() {
    out=$1
    failed=0
    export AMPHORA_KERNEL_CACHE="$out/kernels"
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    cat "$out/commit"
    for test in $TESTS; do
        arguments=
        [ "$test" = server ] && arguments=accuracy
        echo "$test $arguments"
        AMPHORA_TEST_BINARY="$(cd "$out" && pwd)/amphora-cuda" \
            "$out/$test" $arguments >"$out/$test.log" 2>&1 || failed=1
        sed -n '/^failures:/,$p' "$out/$test.log" | head -n 60
        grep '^test result' "$out/$test.log"
    done
    for dtype in f32 bf16; do
        "$out/amphora" demo --backend cuda --dtype $dtype | tail -n 2 || failed=1
    done
    return $failed
}

case "${1:-}" in
build | run) "$1" "${2:?a folder}" ;;
*) sed -n '2,11p' "$0" && exit 2 ;;
esac
