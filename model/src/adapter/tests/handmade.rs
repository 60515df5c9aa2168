//! Small adapters made here, number by number, against the definition of each layout.

use super::*;

/// A folder in a temporary place, removed at the end.
pub(super) struct Folder(pub(super) std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder left behind in the temporary place harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) type Tensors = Vec<(String, [usize; 2], Vec<f32>)>;

pub(super) fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let info = serde_json::json!({
            "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]
        });
        header.insert(name.clone(), info);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

pub(super) fn write(label: &str, config: &serde_json::Value, weights: &[u8]) -> Folder {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let unique = format!(
        "amphora-adapter-{label}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = std::env::temp_dir().join(unique);
    std::fs::create_dir_all(&path).expect("a temporary folder");
    std::fs::write(path.join("adapter_config.json"), config.to_string()).expect("written");
    std::fs::write(path.join("adapter_model.safetensors"), weights).expect("written");
    Folder(path)
}

pub(super) const EXPERTS: usize = 3;

pub(super) fn tiny() -> AdapterBase {
    AdapterBase {
        architecture: Architecture::GptOss,
        hidden: 4,
        q: 6,
        kv: 2,
        experts: EXPERTS,
        intermediate: 5,
        dense_intermediate: 0,
        mlps: vec![MlpKind::Experts; 2],
    }
}

/// Its down is 4×4.
pub(super) fn square() -> AdapterBase {
    AdapterBase { intermediate: 4, ..tiny() }
}

pub(super) fn config(edit: serde_json::Value) -> serde_json::Value {
    let mut config = serde_json::json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "peft_version": "0.21.2",
        "target_modules": ["q_proj"], "bias": "none"
    });
    for (key, value) in edit.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

pub(super) fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 13) % 23) as f32 - 11.0).collect()
}

pub(super) fn pair(module: &str, a: [usize; 2], b: [usize; 2]) -> Tensors {
    let name = |half: &str| format!("base_model.model.model.layers.{module}.lora_{half}.weight");
    vec![
        (name("A"), a, values(a[0] * a[1], module.len())),
        (name("B"), b, values(b[0] * b[1], module.len() + 5)),
    ]
}

/// scale · B·A of one module, `[out, in]`.
fn delta(factors: &AdapterFactors, target: Target, expert: usize) -> Vec<Vec<f32>> {
    let module = factors
        .modules
        .iter()
        .find(|m| (m.layer, m.target, m.expert) == (1, target, Some(expert)))
        .expect("adapted");
    let a = factors.a(module);
    let element = |y: usize, x: usize| -> f32 {
        let sum: f32 = (0..module.rank)
            .map(|j| module.b.data[y * module.rank + j] * a.data[j * a.cols + x])
            .sum();
        module.scale * sum
    };
    (0..module.b.rows).map(|y| (0..a.cols).map(|x| element(y, x)).collect()).collect()
}

/// Δ_e[y, x] = s · Σ_j B[y, j·E + e] · A[e·r + j, x], over what B and A run over.
fn by_formula(tensors: &Tensors, expert: usize, scale: f32) -> Vec<Vec<f32>> {
    let ((_, [rows, width], a), (_, [height, columns], b)) = (&tensors[0], &tensors[1]);
    let (experts, rank) = (EXPERTS, rows / EXPERTS);
    let element = |y: usize, x: usize| -> f32 {
        let sum: f32 = (0..rank)
            .map(|j| b[y * columns + j * experts + expert] * a[(expert * rank + j) * width + x])
            .sum();
        scale * sum
    };
    (0..*height).map(|y| (0..*width).map(|x| element(y, x)).collect()).collect()
}

fn transposed(m: &[Vec<f32>]) -> Vec<Vec<f32>> {
    (0..m[0].len()).map(|c| m.iter().map(|row| row[c]).collect()).collect()
}

#[test]
fn fused_experts_of_either_orientation_are_the_formula() {
    let both = serde_json::json!({
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    });
    let lanes = EXPERTS * 2;
    for swapped in [false, true] {
        let turn = |input: usize, output: usize| match swapped {
            false => ([lanes, input], [output, lanes]),
            true => ([lanes, output], [input, lanes]),
        };
        let (a, b) = turn(tiny().hidden, 2 * tiny().intermediate);
        let gate_up = pair("1.mlp.experts.base_layer", a, b);
        let (a, b) = turn(tiny().intermediate, tiny().hidden);
        let down = pair("1.mlp.experts", a, b);
        let folder = write(
            "fused",
            &config(both.clone()),
            &safetensors(&[gate_up.clone(), down.clone()].concat()),
        );
        let factors =
            AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()).expect("sound");
        assert_eq!(factors.modules.len(), 3 * EXPERTS);
        for expert in 0..EXPERTS {
            let oriented = |tensors: &Tensors| match swapped {
                false => by_formula(tensors, expert, 3.0),
                true => transposed(&by_formula(tensors, expert, 3.0)),
            };
            assert_eq!(delta(&factors, Target::Down, expert), oriented(&down));
            let gate_up = oriented(&gate_up);
            for (target, first) in [(Target::Gate, 0), (Target::Up, 1)] {
                let rows: Vec<_> = gate_up.iter().skip(first).step_by(2).cloned().collect();
                assert_eq!(delta(&factors, target, expert), rows, "{target:?}");
            }
            let shrink = |target| {
                factors
                    .modules
                    .iter()
                    .find(|m| (m.target, m.expert) == (target, Some(expert)))
                    .map(|m| m.shrink)
            };
            assert_eq!(shrink(Target::Gate), shrink(Target::Up), "one A for both");
        }
    }
}

/// Reading B's columns expert-major, as if they were A's rows, gives other numbers: the formula
/// above is not symmetric by accident of the fixture.
#[test]
fn swapped_axes_of_b_would_be_noticed() {
    let lanes = EXPERTS * 2;
    let down = pair("1.mlp.experts", [lanes, 5], [4, lanes]);
    let (a, b) = (&down[0].2, &down[1].2);
    let wrong: f32 = (0..2).map(|j| b[2 + j] * a[(2 + j) * 5]).sum();
    assert_ne!(by_formula(&down, 1, 1.0)[0][0], wrong);
}

#[test]
fn square_parameters_go_by_their_neighbours_then_by_word_then_by_version() {
    let down_only = |version: &str| {
        config(serde_json::json!({
            "target_modules": [], "target_parameters": ["mlp.experts.down_proj"],
            "peft_version": version
        }))
    };
    let lanes = EXPERTS * 2;
    let down = pair("1.mlp.experts", [lanes, 4], [4, lanes]);
    let open = |config: &serde_json::Value, tensors: &Tensors, options: &AdapterOptions| {
        let folder = write("square", config, &safetensors(tensors));
        AdapterFactors::open(&folder.0, &square(), options)
    };
    let natural = by_formula(&down, 1, 3.0);
    let options = AdapterOptions::default();
    for version in ["0.17.1", "0.18.0", "0.20.0", "0.21.2"] {
        let factors = open(&down_only(version), &down, &options).expect("settled");
        assert_eq!(delta(&factors, Target::Down, 1), natural, "{version}");
        assert_eq!(factors.notes.len(), 1, "the assumption is told");
    }
    for version in ["0.19.0", "0.16.0", "dev"] {
        let refused = open(&down_only(version), &down, &options).expect_err("unsettled");
        assert!(matches!(refused.reasons[0].reason, Reason::Orientation { .. }));
    }
    let word = AdapterOptions { square_orientation: Some(Orientation::Swapped), ..options };
    let factors = open(&down_only("0.19.0"), &down, &word).expect("said");
    assert_eq!(delta(&factors, Target::Down, 1), transposed(&natural));
    assert!(factors.notes[0].contains("as the operator says"), "{:?}", factors.notes);
    // The word counts only where nothing else decides.
    let factors = open(&down_only("0.21.2"), &down, &word).expect("settled");
    assert_eq!(delta(&factors, Target::Down, 1), natural);
    let qwen = AdapterBase { architecture: Architecture::Qwen3Moe, ..square() };
    for (version, expected) in [("0.19.1", Some(transposed(&natural))), ("0.18.0", None)] {
        let folder = write("square", &down_only(version), &safetensors(&down));
        let found = AdapterFactors::open(&folder.0, &qwen, &options).ok();
        assert_eq!(found.map(|f| delta(&f, Target::Down, 1)), expected, "{version}");
    }

    // A swapped gate_up on the same module settles it, whatever version and operator say.
    let gate_up = pair("1.mlp.experts.base_layer", [lanes, 8], [4, lanes]);
    let both = config(serde_json::json!({
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    }));
    let word = AdapterOptions { square_orientation: Some(Orientation::Natural), ..options };
    let factors = open(&both, &[gate_up, down.clone()].concat(), &word).expect("settled");
    assert_eq!(delta(&factors, Target::Down, 1), transposed(&natural));
}

#[test]
fn ranks_scales_and_patterns_are_those_of_peft() {
    let tensors = [
        pair("0.self_attn.q_proj", [2, 4], [6, 2]),
        pair("1.self_attn.q_proj", [1, 4], [6, 1]),
        pair("1.mlp.experts", [9, 5], [4, 9]),
        pair("0.mlp.router", [4, 4], [3, 4]),
    ]
    .concat();
    let mut text = config(serde_json::json!({
        "target_parameters": ["1.mlp.experts.down_proj", "mlp.router.weight"],
        "rank_pattern": {
            "1\\.self_attn\\.q_proj": 1, "q_proj": 2, "experts\\.down_proj": 3,
            "mlp.router.weight": 4, "router": 7
        },
        "alpha_pattern": {"layers.0.self_attn.q_proj": 10.0, "down_proj": 1.5}
    }));
    let scales = |text: &serde_json::Value| -> Vec<(usize, Target, f32)> {
        let folder = write("patterns", text, &safetensors(&tensors));
        let factors =
            AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()).expect("sound");
        let mut found: Vec<_> =
            factors.modules.iter().map(|m| (m.rank, m.target, m.scale)).collect();
        found.dedup();
        found
    };
    assert_eq!(
        scales(&text),
        [
            (2, Target::Q, 5.0),
            (4, Target::Router, 1.5),
            (1, Target::Q, 6.0),
            (3, Target::Down, 0.5)
        ]
    );
    text["use_rslora"] = true.into();
    assert_eq!(scales(&text)[0].2, (10.0 / 2f64.sqrt()) as f32);
    assert_eq!(scales(&text)[1].2, 3.0);
}

#[test]
fn partial_and_one_sided_adapters_load() {
    let tensors = [
        pair("1.mlp.experts.2.down_proj", [2, 5], [4, 2]),
        pair("0.mlp.experts.1.gate_proj", [2, 4], [5, 2]),
    ]
    .concat();
    for targets in [
        serde_json::json!(["down_proj", "gate_proj", "up_proj"]),
        serde_json::json!(".*experts.*"),
        serde_json::json!("all-linear"),
    ] {
        let text = config(serde_json::json!({"target_modules": targets}));
        let folder = write("partial", &text, &safetensors(&tensors));
        let factors =
            AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()).expect("sound");
        let places: Vec<_> =
            factors.modules.iter().map(|m| (m.layer, m.target, m.expert)).collect();
        assert_eq!(places, [(0, Target::Gate, Some(1)), (1, Target::Down, Some(2))]);
        assert_ne!(factors.modules[0].shrink, factors.modules[1].shrink);
    }
}

#[test]
fn numbers_are_rounded_to_the_type_that_is_wanted() {
    let mut tensors = pair("0.self_attn.q_proj", [2, 4], [6, 2]);
    tensors[0].2[0] = 1.0 + 1.0 / 1024.0;
    let folder = write("rounded", &config(serde_json::json!({})), &safetensors(&tensors));
    let open = |round_to| {
        let options = AdapterOptions { round_to, ..AdapterOptions::default() };
        AdapterFactors::open(&folder.0, &tiny(), &options)
    };
    let first = |round_to| open(round_to).expect("sound").shrinks[0].data[0];
    assert_eq!(first(None), 1.0 + 1.0 / 1024.0);
    assert_eq!(first(Some(DType::F16)), 1.0 + 1.0 / 1024.0);
    assert_eq!(first(Some(DType::BF16)), 1.0);
    tensors[0].2[0] = 70_000.0;
    std::fs::write(folder.0.join("adapter_model.safetensors"), safetensors(&tensors))
        .expect("written");
    let refused = open(Some(DType::F16)).expect_err("overflows").to_string();
    assert!(refused.contains("q_proj.lora_A.weight` holds a value that overflows"), "{refused}");
}

/// Each of the three types holds these numbers exactly, so the factors are the same.
#[test]
fn files_of_every_floating_point_type_are_read() {
    let tensors = pair("0.self_attn.q_proj", [2, 4], [6, 2]);
    let wide = safetensors(&tensors);
    let folder = write("types", &config(serde_json::json!({})), &wide);
    let load = || AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default());
    let expected = load().expect("f32");
    let numbers: Vec<f32> = tensors.iter().flat_map(|(_, _, values)| values.clone()).collect();
    let encoded =
        |encode: &dyn Fn(f32) -> [u8; 2]| numbers.iter().flat_map(|&v| encode(v)).collect();
    let of: [(&str, DType, Vec<u8>); 2] = [
        ("F16", DType::F16, encoded(&|v| half::f16::from_f32(v).to_le_bytes())),
        ("BF16", DType::BF16, encoded(&|v| half::bf16::from_f32(v).to_le_bytes())),
    ];
    for (name, dtype, data) in of {
        let mut header = serde_json::Map::new();
        let mut start = 0;
        for (tensor, shape, values) in &tensors {
            let end = start + 2 * values.len();
            let info = serde_json::json!({
                "dtype": name, "shape": shape, "data_offsets": [start, end]
            });
            header.insert(tensor.clone(), info);
            start = end;
        }
        let header = serde_json::Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        std::fs::write(folder.0.join("adapter_model.safetensors"), file).expect("written");
        let factors = load().expect(name);
        assert_eq!(factors.dtype, dtype);
        assert_eq!((&factors.modules, &factors.shrinks), (&expected.modules, &expected.shrinks));
    }
}

#[test]
fn fields_of_a_later_writer_are_told() {
    let text = config(serde_json::json!({"use_new_idea": true, "old_idea": null, "off": false}));
    let q = pair("0.self_attn.q_proj", [2, 4], [6, 2]);
    let folder = write("later", &text, &safetensors(&q));
    let factors =
        AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()).expect("sound");
    assert_eq!(factors.notes.len(), 1, "{:?}", factors.notes);
    assert!(factors.notes[0].contains("`use_new_idea` is not known"), "{:?}", factors.notes);
}
