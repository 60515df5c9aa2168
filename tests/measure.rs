//! What benchmarks and the search of tuning data measure, run on the host: the calls are sound, and change with
//! their adapters.

use amphora_backend_cpu::Cpu;
use amphora_engine::measure::attention::{self, Attention};
use amphora_engine::measure::dense::{Call, Projection, Shape};
use amphora_engine::measure::{Pattern, in_turn};
use amphora_hal::ops::Mask;
use amphora_hal::{DType, Device, DeviceConfig};

fn open() -> Cpu {
    Cpu::open(&DeviceConfig::default()).expect("the host")
}

#[test]
fn a_projection_has_the_deltas_of_its_rows() {
    let (device, pattern) = (open(), Pattern::new());
    let (slices, out) = (vec![48, 16, 16], DType::BF16);
    let shape = Shape { k: 64, slices, tokens: 3, out, bias: true };
    let mut projection = Projection::new(&device, shape, 2, &pattern).expect("room");
    let mut outs = Vec::new();
    for (slots, what) in [
        (in_turn(3, 2), Call::Base),
        (in_turn(3, 2), Call::Lora),
        (vec![Some(0); 3], Call::Lora),
        (vec![None; 3], Call::Lora),
        (in_turn(3, 2), Call::NormBase),
        (in_turn(3, 2), Call::NormLora),
    ] {
        let mut rows = projection.rows(&slots).expect("room");
        projection.run(&mut rows, 0, what).expect("sound");
        let out = projection.take_out(&rows).expect("the host");
        assert!(out.iter().all(|value| value.is_finite()), "{what:?}");
        outs.push(out);
    }
    let [base, mixed, one, none, norm_base, norm_mixed] = &outs[..] else { unreachable!() };
    assert_eq!(base, none);
    // Of a normed row every output is larger.
    assert!(norm_base.iter().zip(base).all(|(normed, raw)| normed.abs() > raw.abs()));
    for (row, changed) in [(0, false), (1, true), (2, false)] {
        let of = |out: &[f32]| out[row * 80..][..80].to_vec();
        assert_ne!(of(mixed), of(base), "row {row}");
        assert_ne!(of(norm_mixed), of(norm_base), "row {row}");
        assert_eq!(of(mixed) != of(one), changed, "row {row}");
    }
}

#[test]
fn attention_sees_what_its_mask_leaves() {
    let (device, pattern) = (open(), Pattern::new());
    let (dim, sequences) = (16, vec![(40, 1), (0, 20)]);
    let shape = attention::Shape {
        hidden: 32,
        inner: 24,
        heads: 4,
        kv_heads: 2,
        dim,
        sequences,
        mask: Mask::Causal,
    };
    assert_eq!((shape.rows(), shape.pairs()), (21, 41 + 210));
    assert_eq!(shape.cache_bytes(), (3 + 2) * 16 * 2 * 16 * 4);
    let mut outs = Vec::new();
    for mask in [Mask::Causal, Mask::Window(8)] {
        let shape = attention::Shape { mask, ..shape.clone() };
        let mut attention = Attention::new(&device, &shape, &pattern).expect("room");
        use attention::Call::{Activation, Attention as Attend, HeadNorms, Norm, Rope};
        for what in [Norm, HeadNorms, Rope, Attend, Activation] {
            attention.run(what).expect("sound");
        }
        let out = attention.take_out().expect("the host");
        assert!(out.iter().all(|value| value.is_finite()), "{mask:?}");
        outs.push(out);
    }
    // The second sequence's first eight rows see the same.
    let [causal, window] = &outs[..] else { unreachable!() };
    let width = 4 * dim;
    assert_ne!(causal[..width], window[..width]);
    assert_eq!(causal[width..9 * width], window[width..9 * width]);
    assert_ne!(causal[9 * width..], window[9 * width..]);
}
