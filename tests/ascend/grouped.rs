//! The vendor's grouped product through our two-phase call, and its refusals. Run on the host twin.

use amphora_backend_ascend::{Ascend, GroupedProduct};
use amphora_hal::{
    Backend, Carver, DType, Device, DeviceConfig, Error, HostBytes, HostData, HostPart, HostWeight,
    HostWeightMeta, OpBounds, OpKind, Pool, Scheme, StreamRole, Tensor, narrow, widen,
};
use amphora_tests::rig::upload;

#[test]
fn each_group_takes_its_own_matrix_and_rows_behind_the_last_are_left_alone() {
    let device = super::twin();
    let (groups, rows, k, n, dtype) = (3usize, 6usize, 5usize, 4usize, DType::BF16);
    let bounds = OpBounds { op: Some(OpKind::Linear), tokens: rows, k, n, ..OpBounds::default() };
    let mut stream =
        device.stream(StreamRole::Compute, device.workspace(&bounds)).expect("a stream");
    let mut carver = Carver::<Ascend>::new(device.reserve(Pool::Scratch, 1 << 16).expect("bytes"));

    let value = |i: usize| (i % 7) as f32 - 3.0;
    let meta = HostWeightMeta { matrices: groups, n, k, scheme: Scheme::Dense(dtype) };
    let weights: Vec<f32> = (0..groups * n * k).map(|i| value(i * 5)).collect();
    let part = HostPart { n, data: HostData::RowMajor(DType::F32, bytemuck::cast_slice(&weights)) };
    let host_weight = HostWeight::new(meta, vec![part]).expect("complete");
    let bytes = device.packed_bytes(&meta).expect("dense");
    let into = carver.carve(&[bytes], DType::U8).expect("counted");
    let weight = device.pack(&mut stream, &host_weight, into).expect("packed");

    let inputs: Vec<f32> = (0..rows * k).map(|i| value(i * 3 + 1)).collect();
    let bias: Vec<f32> = (0..groups * n).map(value).collect();
    let x = carver.carve(&[rows, k], dtype).expect("counted");
    let mut encoded = vec![0; x.bytes()];
    narrow(&inputs, dtype, &mut encoded);
    upload(&device, &mut stream, &x, &encoded);
    let bias_tensor = carver.carve(&[groups, n], DType::F32).expect("counted");
    upload(&device, &mut stream, &bias_tensor, bytemuck::cast_slice(&bias));
    let counts = carver.carve(&[groups * 8], DType::U8).expect("counted");
    let sizes = [2i64, 0, 3];
    upload(&device, &mut stream, &counts, bytemuck::cast_slice(&sizes));
    let mut out = carver.carve(&[rows, n], dtype).expect("counted");

    let run = |stream: &mut _, bias, out: &mut Tensor<Ascend>| {
        let op = GroupedProduct { x: &x, weight: &weight, bias, counts: &counts, out };
        device.grouped_product(stream, &op)
    };
    run(&mut stream, Some(&bias_tensor), &mut out).expect("runs");
    let host = device.reserve_host(out.bytes()).expect("pinned");
    let host = device
        .download(&mut stream, &out, host)
        .map_err(|returned| returned.error)
        .and_then(|sent| sent.finish())
        .expect("downloaded");
    let got = widen(dtype, host.bytes()).expect("whole elements");
    let group_of = |row: usize| [0, 0, 2, 2, 2].get(row).copied();
    for row in 0..rows {
        for o in 0..n {
            let want = group_of(row).map_or(0.0, |g| {
                let w = &weights[(g * n + o) * k..][..k];
                let dot: f32 = w.iter().zip(&inputs[row * k..]).map(|(a, b)| a * b).sum();
                dot + bias[g * n + o]
            });
            assert_eq!(got[row * n + o], want, "row {row}, output {o}");
        }
    }

    // The vendor takes no bf16 bias; ours is refused before it is asked.
    let narrow_bias = carver.carve(&[groups, n], dtype).expect("counted");
    let refused = run(&mut stream, Some(&narrow_bias), &mut out);
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
}

#[test]
fn without_a_library_the_reason_is_one_line() {
    let missing =
        DeviceConfig { library: Some("/nowhere/libascendcl.so".into()), ..DeviceConfig::default() };
    let error = Ascend::open(&missing).expect_err("there is no such file");
    let text = error.to_string();
    assert!(text.contains("/nowhere/libascendcl.so") && !text.contains('\n'), "{text}");
}
