//! The oracle against the cases that torch computed: `golden/ops/README.md` says what they hold.

use std::collections::HashMap;
use std::path::Path;

use amphora_hal::ops::{Activation, ExpertGroups, Mask, RopePairing, RouteScore, WeightOn};
use amphora_tests::oracle::fused_moe::Experts;
use amphora_tests::oracle::linear::{Matrix, linear};
use amphora_tests::oracle::lora_linear::{Delta, lora_linear};
use amphora_tests::oracle::moe_route::{Route, sorted_pairs};
use amphora_tests::oracle::paged_attention::{Attention, Sequence};
use amphora_tests::oracle::rms_norm::rms_norm;
use amphora_tests::oracle::rope::Rope;
use amphora_tests::oracle::rows;
use amphora_tests::oracle::sample::{Draw, by_logit, kept, logprob};
use amphora_tests::oracle::swiglu::swiglu;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// One case of a file: its tensors and its scalars.
struct Case {
    op: String,
    name: String,
    scalars: Value,
    reals: HashMap<String, (Vec<usize>, Vec<f64>)>,
    ints: HashMap<String, Vec<i64>>,
}

fn cases(op: &str) -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("golden/ops/{op}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let metadata = header.metadata().clone().expect("metadata");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let names: Vec<String> = serde_json::from_str(&metadata["cases"]).expect("a list");
    names
        .into_iter()
        .map(|name| {
            let mut case = Case {
                op: op.to_owned(),
                scalars: serde_json::from_str(&metadata[&name]).expect("an object"),
                reals: HashMap::new(),
                ints: HashMap::new(),
                name,
            };
            for (full, view) in tensors.tensors() {
                let Some(short) = full.strip_prefix(&format!("{}.", case.name)) else {
                    continue;
                };
                let words = view.data().chunks_exact(8).map(|w| w.try_into().expect("8 bytes"));
                match view.dtype() {
                    Dtype::F64 => {
                        let values = words.map(f64::from_le_bytes).collect();
                        case.reals.insert(short.to_owned(), (view.shape().to_vec(), values));
                    }
                    Dtype::I64 => {
                        case.ints.insert(short.to_owned(), words.map(i64::from_le_bytes).collect());
                    }
                    other => panic!("{full} is {other:?}"),
                }
            }
            case
        })
        .collect()
}

impl Case {
    fn real(&self, name: &str) -> &[f64] {
        self.optional(name).unwrap_or_else(|| panic!("{}.{}.{name}", self.op, self.name))
    }

    fn optional(&self, name: &str) -> Option<&[f64]> {
        self.reals.get(name).map(|(_, values)| values.as_slice())
    }

    fn dims(&self, name: &str) -> &[usize] {
        &self.reals[name].0
    }

    fn int(&self, name: &str) -> &[i64] {
        self.ints.get(name).unwrap_or_else(|| panic!("{}.{}.{name}", self.op, self.name))
    }

    fn indices(&self, name: &str) -> Vec<i32> {
        self.int(name).iter().map(|&v| v as i32).collect()
    }

    /// −1 is none.
    fn optionals(&self, name: &str) -> Vec<Option<usize>> {
        self.int(name).iter().map(|&v| usize::try_from(v).ok()).collect()
    }

    fn number(&self, name: &str) -> f64 {
        self.scalars[name].as_f64().unwrap_or_else(|| panic!("{}.{name}", self.name))
    }

    fn size(&self, name: &str) -> usize {
        self.number(name) as usize
    }

    fn text(&self, name: &str) -> &str {
        self.scalars[name].as_str().unwrap_or_else(|| panic!("{}.{name}", self.name))
    }

    /// `got` is the stored output `name` to 1e-12 of its largest value.
    fn holds(&self, name: &str, got: &[f64]) {
        let want = self.real(name);
        assert_eq!(got.len(), want.len(), "{}.{}.{name}", self.op, self.name);
        let largest = want.iter().fold(1e-300, |m: f64, v| m.max(v.abs()));
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(
                (got - want).abs() <= 1e-12 * largest,
                "{}.{}.{name}[{i}]: {got} for {want}",
                self.op,
                self.name
            );
        }
    }

    /// The deltas of a projection; `select` gives each one's slice list and expert, or leaves it out.
    fn deltas(&self, select: impl Fn(&Value) -> Option<(String, usize)>) -> Vec<Delta> {
        let list = self.scalars["deltas"].as_array().expect("deltas");
        let field = |value: &Value, name: &str| value[name].as_f64().expect("a number");
        list.iter()
            .enumerate()
            .filter_map(|(i, delta)| {
                let (slices, expert) = select(delta)?;
                let slice = &self.scalars[slices][field(delta, "slice") as usize];
                Some(Delta {
                    slot: field(delta, "slot") as usize,
                    expert,
                    out_offset: field(slice, "out_offset") as usize,
                    out_stride: field(slice, "out_stride") as usize,
                    scale: field(delta, "scale"),
                    rank: field(delta, "rank") as usize,
                    a: self.real(&format!("delta.{i}.a")).to_vec(),
                    b: self.real(&format!("delta.{i}.b")).to_vec(),
                })
            })
            .collect()
    }

    fn activation(&self) -> Activation {
        match self.scalars.get("limit") {
            Some(_) => Activation::ClampedInterleaved {
                limit: self.number("limit") as f32,
                alpha: self.number("alpha") as f32,
            },
            None => Activation::Swiglu,
        }
    }

    fn matrix(&self, name: &str) -> Matrix<'_> {
        let dims = self.dims(name);
        Matrix { n: dims[0], k: dims[1], data: self.real(name) }
    }
}

#[test]
fn rows_move_as_stored() {
    for case in cases("embed") {
        let hidden = case.dims("table")[1];
        let (index, tokens) = (case.indices("token_index"), case.indices("token_table"));
        case.holds("out", &rows::embed(&index, &tokens, case.real("table"), hidden));
    }
    for case in cases("write_tokens") {
        let (table, prompt) = (case.indices("token_table"), case.indices("prompt_tokens"));
        let out = rows::write_tokens(&table, case.size("max_seqs"), &prompt);
        assert_eq!(out, case.indices("out"));
    }
    for case in cases("gather_rows") {
        let width = case.dims("x")[1];
        case.holds("out", &rows::gather_rows(case.real("x"), &case.indices("rows"), width));
    }
    for case in cases("kv_write") {
        let index = case.indices("kv_index");
        for (new, cache, out) in [("k", "k_cache", "k_out"), ("v", "v_cache", "v_out")] {
            let width = case.dims(new)[1..].iter().product();
            let written = rows::kv_write(case.real(cache), case.real(new), &index, width);
            case.holds(out, &written);
        }
    }
    for case in cases("copy_blocks") {
        let pairs: Vec<(usize, usize)> =
            case.indices("pairs").chunks(2).map(|p| (p[0] as usize, p[1] as usize)).collect();
        for (cache, out) in [("k_cache", "k_out"), ("v_cache", "v_out")] {
            let block = case.dims(cache)[1..].iter().product();
            case.holds(out, &rows::copy_blocks(case.real(cache), &pairs, block));
        }
    }
}

#[test]
fn rms_norm_is_as_stored() {
    for case in cases("rms_norm") {
        let mut x = case.real("x").to_vec();
        if let Some(residual) = case.optional("residual") {
            x.iter_mut().zip(residual).for_each(|(x, r)| *x += r);
            case.holds("residual_out", &x);
        }
        case.holds("out", &rms_norm(&x, case.real("weight"), case.number("eps")));
    }
}

#[test]
fn rope_is_as_stored() {
    for case in cases("rope") {
        let rotary = case.size("rotary_dim");
        let position = case.indices("positions");
        let positions = position.iter().max().map_or(0, |&p| p as usize + 1);
        let factor = case.number("attention_factor");
        let turn = |p: usize, f: fn(f64) -> f64| {
            let freqs = case.real("inv_freq").iter();
            freqs.map(|freq| factor * f(p as f64 * freq)).collect::<Vec<_>>()
        };
        let table: Vec<f64> =
            (0..positions).flat_map(|p| [turn(p, f64::cos), turn(p, f64::sin)].concat()).collect();
        // The file has one scale for each token, the operator one for each position.
        let scale = case.optional("q_scale").map(|of_token| {
            let mut scale = vec![f64::NAN; positions];
            position.iter().zip(of_token).for_each(|(&p, &s)| scale[p as usize] = s);
            scale
        });
        let rope = |name: &str, scale| Rope {
            dim: case.dims(name)[2],
            heads: case.dims(name)[1],
            rotary,
            position: &position,
            table: &table,
            pairing: match case.text("pairing") {
                "half" => RopePairing::Half,
                "interleaved" => RopePairing::Interleaved,
                other => panic!("pairing {other}"),
            },
            scale,
        };
        case.holds("out_q", &rope("q", scale.as_deref()).turn(case.real("q")));
        case.holds("out_k", &rope("k", None).turn(case.real("k")));
    }
}

#[test]
fn products_are_as_stored() {
    for case in cases("linear") {
        case.holds("out", &linear(case.real("x"), case.matrix("weight"), case.optional("bias")));
    }
    for case in cases("lora_linear") {
        let deltas = case.deltas(|_| Some(("slices".to_owned(), 0)));
        let slots = case.optionals("slots");
        let (weight, bias) = (case.matrix("weight"), case.optional("bias"));
        case.holds("out", &lora_linear(case.real("x"), weight, bias, &slots, &deltas));
    }
}

#[test]
fn attention_is_as_stored() {
    for case in cases("paged_attention") {
        let (starts, contexts) = (case.indices("q_start"), case.int("context_len"));
        let blocks = case.optionals("block_table");
        let width = blocks.len() / contexts.len();
        let sequences: Vec<Sequence> = contexts
            .iter()
            .enumerate()
            .map(|(s, &context)| Sequence {
                first_row: starts[s] as usize,
                rows: (starts[s + 1] - starts[s]) as usize,
                context: context as usize,
                blocks: blocks[s * width..(s + 1) * width].iter().filter_map(|b| *b).collect(),
            })
            .collect();
        let attention = Attention {
            heads: case.dims("q")[1],
            kv_heads: case.dims("k_cache")[2],
            k_dim: case.size("qk_dim"),
            v_dim: case.size("v_dim"),
            block_size: case.size("block_size"),
            k_cache: case.real("k_cache"),
            v_cache: case.real("v_cache"),
            mask: match case.text("mask") {
                "causal" => Mask::Causal,
                "window" => Mask::Window(case.size("window")),
                "chunk" => Mask::Chunk(case.size("chunk")),
                other => panic!("mask {other}"),
            },
            sinks: case.optional("sinks"),
            scale: case.number("scale"),
        };
        let out = attention.attend(case.real("q"), &sequences);
        let out: Vec<f64> = out.into_iter().map(|v| v.expect("no padding is stored")).collect();
        case.holds("out", &out);
    }
}

#[test]
fn activations_are_as_stored() {
    for case in cases("swiglu") {
        // The file has gates and ups apart, the operator each row's in one.
        let inner = case.dims("gate")[1];
        let rows = case.real("gate").chunks(inner).zip(case.real("up").chunks(inner));
        let x: Vec<f64> = rows
            .flat_map(|(gate, up)| match case.activation() {
                Activation::Swiglu => [gate, up].concat(),
                Activation::ClampedInterleaved { .. } => {
                    gate.iter().zip(up).flat_map(|(g, u)| [*g, *u]).collect()
                }
            })
            .collect();
        case.holds("out", &swiglu(case.activation(), &x, inner));
    }
}

#[test]
fn routing_is_as_stored() {
    for case in cases("moe_route") {
        let experts = case.dims("logits")[1];
        let groups = case.scalars["groups"].as_object().map(|groups| ExpertGroups {
            groups: groups["count"].as_u64().expect("a count") as usize,
            keep: groups["keep"].as_u64().expect("a count") as usize,
            best: if groups["score"] == "max" { 1 } else { 2 },
        });
        let route = Route {
            experts,
            top_k: case.size("top_k"),
            score: match case.text("score") {
                "softmax_topk" => RouteScore::SoftmaxTopk,
                "softmax" => RouteScore::Softmax,
                "sigmoid" => RouteScore::Sigmoid,
                other => panic!("score {other}"),
            },
            correction: case.optional("correction"),
            groups,
            renorm: case.scalars["renorm"] == true,
            scale: case.number("scale"),
        };
        let (mut chosen, mut weights) = (Vec::new(), Vec::new());
        for (logits, &live) in case.real("logits").chunks(experts).zip(case.int("live")) {
            let choice = route.choose(logits);
            let real = live >= 0;
            chosen.extend(choice.experts.into_iter().map(|e| real.then_some(e)));
            weights.extend(choice.weights.into_iter().map(|w| if real { w } else { 0.0 }));
        }
        assert_eq!(chosen, case.optionals("experts"), "{}", case.name);
        case.holds("weights", &weights);
        let pairs = sorted_pairs(&chosen, &case.optionals("slots"), route.top_k);
        let stored: Vec<usize> = case.optionals("sorted_pairs").into_iter().flatten().collect();
        assert_eq!(pairs, stored, "{}", case.name);
    }
}

#[test]
fn experts_are_as_stored() {
    for case in cases("fused_moe").into_iter().chain(cases("fused_moe_lora")) {
        let (hidden, inner) = (case.dims("down")[1], case.dims("down")[2]);
        let of = |projection: &'static str| {
            if case.scalars.get("deltas").is_none() {
                return Vec::new();
            }
            case.deltas(|delta| {
                let expert = delta["expert"].as_u64().expect("an expert") as usize;
                (delta["projection"] == projection)
                    .then(|| (format!("{projection}_slices"), expert))
            })
        };
        let (gate_up_deltas, down_deltas) = (of("gate_up"), of("down"));
        let on_input = case.scalars.get("weight_on").is_some_and(|on| on == "input");
        let experts = Experts {
            hidden,
            inner,
            gate_up: case.real("gate_up"),
            gate_up_bias: case.optional("gate_up_bias"),
            down: case.real("down"),
            down_bias: case.optional("down_bias"),
            activation: case.activation(),
            weight_on: if on_input { WeightOn::Input } else { WeightOn::Output },
            gate_up_deltas: &gate_up_deltas,
            down_deltas: &down_deltas,
            round: &|value| value,
            unsure: 0.0,
        };
        let tokens = case.dims("x")[0];
        let top_k = case.dims("weights")[1];
        let chosen = case.optionals("experts");
        let slots = case.ints.get("slots").map(|_| case.optionals("slots"));
        let mut out = Vec::new();
        for t in 0..tokens {
            let pairs = t * top_k..(t + 1) * top_k;
            let own: Vec<usize> = chosen[pairs.clone()].iter().filter_map(|e| *e).collect();
            let x = &case.real("x")[t * hidden..(t + 1) * hidden];
            let slot = slots.as_ref().and_then(|slots| slots[t]);
            out.extend(experts.token(x, &own, &case.real("weights")[pairs], slot).out);
        }
        if let Some(before) = case.optional("out_before") {
            out.iter_mut().zip(before).for_each(|(o, b)| *o += b);
        }
        case.holds("out", &out);
    }
}

#[test]
fn sampling_is_as_stored() {
    for case in cases("sample") {
        let vocab = case.dims("logits")[1];
        let rows = case.real("logits").chunks(vocab);
        if case.name == "greedy" {
            let greedy = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
            let tokens: Vec<usize> = rows.clone().map(|row| kept(row, greedy).0[0].0).collect();
            let stored: Vec<usize> = case.optionals("tokens").into_iter().flatten().collect();
            assert_eq!(tokens, stored);
            let of = |(row, &token): (&[f64], &usize)| logprob(row, token);
            case.holds("logprobs", &rows.zip(&tokens).map(of).collect::<Vec<_>>());
            continue;
        }
        let mut probs = vec![0.0; case.real("logits").len()];
        for (s, row) in rows.enumerate() {
            let draw = Draw {
                temperature: case.real("temperature")[s],
                top_k: case.int("top_k")[s] as usize,
                top_p: case.real("top_p")[s],
                min_p: 0.0,
            };
            for (token, share) in kept(row, draw).0 {
                probs[s * vocab + token] = share;
            }
        }
        case.holds("probs", &probs);
    }
    for case in cases("logprobs") {
        let rows = case.real("logits").chunks(case.dims("logits")[1]);
        let of = |(row, &target): (&[f64], &i64)| logprob(row, target as usize);
        let targets: Vec<f64> = rows.clone().zip(case.int("targets")).map(of).collect();
        case.holds("target_logprobs", &targets);
        let best: Vec<Vec<usize>> =
            rows.clone().map(|row| by_logit(row)[..case.size("top")].to_vec()).collect();
        let stored: Vec<usize> = case.optionals("top_ids").into_iter().flatten().collect();
        assert_eq!(best.concat(), stored);
        let of = |(row, ids): (&[f64], &Vec<usize>)| -> Vec<f64> {
            ids.iter().map(|&id| logprob(row, id)).collect()
        };
        case.holds("top_logprobs", &rows.zip(&best).flat_map(of).collect::<Vec<_>>());
    }
}
