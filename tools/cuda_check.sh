#!/bin/sh
# Everything that a CUDA GPU is needed for, in one run: the suite, the laws, whole models, the binary.
#
#   tools/cuda_check.sh build OUT   where cargo is: test binaries, the server and kernels for ARCH, into OUT
#   tools/cuda_check.sh run OUT     where the GPU is, from the root of the same checkout: runs them;
#                                   needs no cargo, and the runtime compiler for two tests of `cuda` alone
#   tools/cuda_check.sh measure OUT as run, for the figures: layers of experts, a layer's other operators, the
#                                   engine with its table of a step, uneven routing, contexts of many lengths,
#                                   the other models; MEASURES names some of them
#
# ARCH is sm_80,sm_90a unless set. AMPHORA_NVRTC_DIR names the runtime compiler, if the loader does not
# find it. Logs are written beside the binaries; the last lines say what passed. The golden sets are
# found at the path that the checkout had where it was built.
set -u

TESTS="conformance_cuda laws_cuda server cuda cuda_fault"
BENCHES="moe_layer dense_layer"

# ship NAME ARGUMENTS..: builds what cargo's arguments say, and strips its binary into OUT.
ship() {
    name=$1
    shift
    binary=$(cargo "$@" --features cuda --no-run --message-format json |
        sed -n 's/.*"executable":"\([^"]*'"$name"'-[^"]*\)".*/\1/p')
    [ -n "$binary" ] && strip -o "$out/$name" "$binary"
}

build() {
    out=$1
    mkdir -p "$out/kernels"
    cargo build --package amphora-backend-cuda --example compile_kernels || return 1
    target=${CARGO_TARGET_DIR:-target}
    "$target/debug/examples/compile_kernels" --arch "${ARCH:-sm_80,sm_90a}" --out "$out/kernels" || return 1
    for test in $TESTS; do
        ship "$test" test --package amphora-tests --test "$test" || return 1
    done
    ship amphora test --package amphora-server --bin amphora || return 1
    mv "$out/amphora" "$out/serve_fault" || return 1
    cargo build --release --package amphora-server --features cuda || return 1
    strip -o "$out/amphora" "$target/release/amphora"
    for bench in $BENCHES; do
        ship "$bench" bench --package amphora-benches --bench "$bench" || return 1
    done
    # The black-box tests know no backend and hand no setting on: this names it for them, and the kernels.
    printf '#!/bin/sh\nexport AMPHORA_KERNEL_CACHE="${0%%/*}/kernels"\nexec "${0%%-cuda}" "$@" --backend cuda\n' \
        >"$out/amphora-cuda"
    chmod +x "$out/amphora-cuda"
    git rev-parse HEAD >"$out/commit"
}

# What both say first: the day, the GPU, the commit.
begin() {
    export AMPHORA_KERNEL_CACHE="$out/kernels"
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    cat "$out/commit"
}

run() {
    out=$1
    failed=0
    begin
    export AMPHORA_TEST_BINARY="$(cd "$out" && pwd)/amphora-cuda"
    # Processes beside each other, as most of their time is the oracles': the driver gives each the whole device
    # for a slice of time. `cuda` looks at the device's memory, so it runs alone, and its tests, which open the
    # device each, one after the other: kernels whose blocks wait for each other want it for themselves. The fault
    # comes last, in a bare engine and then under `serve`.
    for test in $TESTS serve_fault; do
        case "$test" in
        server) arguments=accuracy ;;
        cuda)
            wait
            arguments=--test-threads=1
            ;;
        cuda_fault)
            wait
            arguments=
            ;;
        serve_fault)
            wait
            arguments=gpu_fault
            ;;
        *) arguments= ;;
        esac
        { "$out/$test" $arguments; echo "exit $?"; } >"$out/$test.log" 2>&1 &
    done
    wait
    for test in $TESTS serve_fault; do
        echo "$test"
        sed -n '/^failures:/,$p' "$out/$test.log" | head -n 60
        grep '^test result' "$out/$test.log"
        grep -qx 'exit 0' "$out/$test.log" || failed=1
    done
    for dtype in f32 bf16; do
        "$out/amphora" demo --backend cuda --dtype $dtype >"$out/demo-$dtype.log" 2>&1 || failed=1
        tail -n 2 "$out/demo-$dtype.log"
    done
    return $failed
}

# One log for each figure; MEASURES names some of them, else all are taken.
measure() {
    out=$1
    failed=0
    begin
    for measure in ${MEASURES:-layers dense engine chunks zipf one contexts qwen3-30b-a3b qwen3-32b}; do
        echo "$measure"
        engine="$out/amphora bench --backend cuda --dtype bf16 --model synthetic:"
        case "$measure" in
        layers) "$out/moe_layer" ;;
        dense) "$out/dense_layer" ;;
        engine) ${engine}gpt-oss-20b --profile ;;
        chunks) ${engine}gpt-oss-20b --streams 8,32 --new-tokens 100 --max-batch-tokens 512 ;;
        zipf | one) ${engine}gpt-oss-20b --new-tokens 100 --routing "$measure" ;;
        contexts) ${engine}gpt-oss-20b --streams 1 --new-tokens 1 --contexts 200 ;;
        *) ${engine}"$measure" --streams 1,8 --new-tokens 100 --profile ;;
        esac >"$out/$measure.log" 2>&1 || failed=1
        tail -n 3 "$out/$measure.log"
    done
    return $failed
}

case "${1:-}" in
build | run | measure) "$1" "${2:?a folder}" ;;
*) sed -n '2,13p' "$0" && exit 2 ;;
esac
