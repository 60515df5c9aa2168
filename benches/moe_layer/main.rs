//! What adapters cost on one layer of experts: (`moe_route` + `fused_moe_lora`) − (`moe_route` with nobody
//! on an adapter + `fused_moe`), each the median of graph replays over copies of the layer that no cache
//! holds, replayed in turns. Beside it the routing alone and the base product, against what reading their
//! bytes takes, and how many launches the layer is without adapters and with them. Many tokens are timed
//! once more by turns of a few milliseconds on an idle device, before its limit of power lowers the clock.
//! bf16, rank 32. Before a case is timed, rows of it are held against f64, and rows without an adapter
//! against those of the base, bit for bit.
//!
//! `cargo bench -p amphora-benches --features cuda --bench moe_layer [-- [--check | --route] TEXT..]`: cases
//! whose name holds one of the texts; `--check`: no times; `--route`: the routing alone, unchecked.

mod check;

use std::collections::BTreeSet;
use std::time::Instant;

use amphora_backend_cuda::Cuda;
use amphora_benches::layers::{MOST_ERROR, ROOF, Users, Wanted, ended, verdict};
use amphora_engine::measure::experts::{Call, Extent, GPT_OSS, Layer, Model, QWEN3, Rows};
use amphora_engine::measure::{CAREFUL, Pattern, SHORT};
use amphora_hal::{Device, DeviceConfig, Result};
use amphora_tests::rng::Rng;

use self::check::Reference;

/// From so many tokens on a layer's products come to the limit of power: times of short runs are told too.
const HEAVY: usize = 1600;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    All,
    Check,
    Route,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spread {
    /// Any experts.
    Balanced,
    /// The i-th expert with a probability as i^-1.1.
    Zipf,
    /// All tokens to the same.
    One,
}

/// One line of the table; gates in microseconds.
#[derive(Debug, Clone, Copy)]
struct Case {
    tokens: usize,
    spread: Spread,
    users: Users,
    /// Of the LoRA part.
    lora_gate: f64,
    /// Of the base over its bytes' time; 0: none.
    base_gate: f64,
    /// Of the base in microseconds; 0: none.
    base_most: f64,
    route_gate: f64,
}

fn case(tokens: usize, lora_gate: f64) -> Case {
    Case {
        tokens,
        spread: Spread::Balanced,
        users: Users::Mixed,
        lora_gate,
        base_gate: 0.0,
        base_most: 0.0,
        route_gate: 0.0,
    }
}

impl Case {
    fn name(&self, model: &Model, slots: usize) -> String {
        let spread = match self.spread {
            Spread::Balanced => "",
            Spread::Zipf => ",zipf",
            Spread::One => ",one-expert",
        };
        let users = match self.users {
            Users::Mixed => "mixed",
            Users::Stretches => "stretches",
            Users::Single => "single",
            Users::SomeNone => "some-none",
        };
        format!("{}/t={}{spread},{users},slots={slots}", model.name, self.tokens)
    }

    fn logits(&self, model: &Model, set: usize) -> Vec<f32> {
        let mut rng = Rng::new(set as u64, "logits");
        let order = rng.permutation(model.experts);
        let mut logits = Vec::with_capacity(self.tokens * model.experts);
        for _ in 0..self.tokens {
            for rank in &order {
                // Of values with Gumbel noise, the largest k are k draws without putting back.
                let noise = -(-(rng.unit().max(1e-12)).ln()).ln();
                logits.push(match self.spread {
                    Spread::Balanced => noise,
                    Spread::Zipf => noise - 1.1 * ((rank + 1) as f64).ln(),
                    Spread::One => noise - 100.0 * f64::from(u8::from(*rank >= model.top_k)),
                } as f32);
            }
        }
        logits
    }
}

/// Experts with tokens, and (expert, adapter) pairs with tokens.
fn used(model: &Model, logits: &[f32], slots: &[Option<usize>]) -> (usize, usize) {
    let (mut experts, mut pairs) = (BTreeSet::new(), BTreeSet::new());
    for (row, slot) in logits.chunks(model.experts).zip(slots) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        experts.extend(order[..model.top_k].iter().copied());
        pairs.extend(order[..model.top_k].iter().filter_map(|&e| slot.map(|slot| (e, slot))));
    }
    (experts.len(), pairs.len())
}

/// Holds some rows of each call against f64, and rows without an adapter against the base's.
fn check(
    layer: &mut Layer<Cuda>,
    rows: &mut Rows<Cuda>,
    (pattern, logits): (&Pattern, &[f32]),
) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let (model, tokens) = (layer.model, rows.tokens);
    layer.run(rows, 0, Call::Base)?;
    let base = layer.take_out(rows)?;
    layer.run(rows, 0, Call::Lora)?;
    let lora = layer.take_out(rows)?;
    layer.run(rows, 0, Call::Lora)?;
    if layer.take_out(rows)?.iter().zip(&lora).any(|(a, b)| a.to_bits() != b.to_bits()) {
        wrong.push("a second run has other bits".to_owned());
    }
    layer.run(rows, 0, Call::LoraIdle)?;
    let idle = layer.take_out(rows)?;
    for (token, slot) in rows.slots.iter().enumerate() {
        let of = |values: &[f32]| -> Vec<u32> {
            values[token * model.hidden..(token + 1) * model.hidden]
                .iter()
                .map(|v| v.to_bits())
                .collect()
        };
        if of(&idle) != of(&base) {
            wrong.push(format!("row {token} differs from the base with nobody on an adapter"));
        }
        if slot.is_none() && of(&lora) != of(&base) {
            wrong.push(format!("row {token} without an adapter differs from the base"));
        }
    }
    let mut sampled = vec![0, tokens / 2, tokens - 1];
    sampled.dedup();
    for token in sampled {
        for (with, out) in [(false, &base), (true, &lora)] {
            let reference = Reference { model, pattern, set: 0, logits, lora: with };
            let error = reference.error(out, token, rows.slots[token]);
            if error.is_nan() || error > MOST_ERROR {
                wrong.push(format!("row {token}, lora {with}: error {error:.2e}"));
            }
        }
    }
    wrong.truncate(4);
    Ok(wrong)
}

/// Launches of a call, routing included.
fn launches(layer: &mut Layer<Cuda>, rows: &mut Rows<Cuda>, what: Call) -> Result<usize> {
    let (watched, launches) = layer.device.watched();
    let device = std::mem::replace(&mut layer.device, watched);
    let run = layer.run(rows, 0, what);
    layer.device = device;
    run.map(|()| launches.all().len())
}

fn run(layer: &mut Layer<Cuda>, pattern: &Pattern, case: &Case, mode: Mode) -> Result<bool> {
    let model = layer.model;
    let sets = if case.tokens > 256 { layer.sets.len().min(6) } else { layer.sets.len() };
    let logits: Vec<Vec<f32>> = (0..sets).map(|set| case.logits(&model, set)).collect();
    let slots = case.users.slots(case.tokens, layer.slots);
    let mut rows = Rows::new(layer, &slots, &logits)?;
    let name = case.name(&model, layer.slots);
    if mode == Mode::Route {
        let graph = layer.capture(&mut rows, Call::Route)?;
        let route = layer.times(&rows, &[graph], CAREFUL)?[0];
        println!("{name:<46} route {route:7.2} [{}]", verdict(route, case.route_gate));
        return Ok(true);
    }
    let wrong = check(layer, &mut rows, (pattern, &logits[0]))?;
    for what in &wrong {
        println!("{name}: WRONG: {what}");
    }
    if mode == Mode::Check {
        println!("{name}: {}", if wrong.is_empty() { "right" } else { "wrong" });
        return Ok(wrong.is_empty());
    }
    let base_launches = launches(layer, &mut rows, Call::Base)?;
    let lora_launches = launches(layer, &mut rows, Call::Lora)?;
    let calls = [Call::Route, Call::Base, Call::Lora, Call::LoraIdle, Call::Experts];
    let graphs = calls.map(|what| layer.capture(&mut rows, what));
    let graphs = graphs.into_iter().collect::<Result<Vec<_>>>()?;
    let of_calls = |times: Vec<f64>| -> [f64; 5] { times.try_into().expect("one for each graph") };
    let times = of_calls(layer.times(&rows, &graphs, CAREFUL)?);
    let short = match case.tokens >= HEAVY {
        true => Some(of_calls(layer.times(&rows, &graphs, SHORT)?)),
        false => None,
    };
    let (mut bytes, mut lora_bytes) = (0.0, 0.0);
    for of in &logits {
        let (experts, pairs) = used(&model, of, &slots);
        bytes += (experts * model.expert_bytes()) as f64 / sets as f64;
        lora_bytes += (pairs * model.adapter_bytes()) as f64 / sets as f64;
    }
    let (floor, lora_floor) = (bytes / ROOF, lora_bytes / ROOF);
    println!(
        "{name:<46} {}  launches {base_launches} and {lora_launches}",
        line(case, times, [floor, lora_floor])
    );
    if let Some(times) = short {
        println!("{:<46} {}", "  in short runs", line(case, times, [floor, lora_floor]));
    }
    Ok(wrong.is_empty())
}

/// The times of a case's calls beside gates and what reading the bytes takes.
fn line(case: &Case, times: [f64; 5], [floor, lora_floor]: [f64; 2]) -> String {
    let [route, base, lora, idle, experts] = times;
    let base_gate = if case.base_most > 0.0 { case.base_most } else { case.base_gate * floor };
    format!(
        "route {route:7.2} [{}]  experts {experts:8.2} = {:.3} of {floor:7.2} [{}]  \
         lora {:+8.2} of {lora_floor:6.2} [{}]  idle {:+6.2}  sum {lora:8.2}",
        verdict(route, case.route_gate),
        experts / floor,
        verdict(experts, base_gate),
        lora - base,
        verdict(lora - base, case.lora_gate),
        idle - base,
    )
}

fn cases(model: &Model, slots: usize) -> Vec<Case> {
    if slots > 8 {
        return vec![case(1600, if model.gpt_oss { 310.0 } else { 710.0 })];
    }
    if !model.gpt_oss {
        let gates = [(1, 10.0), (8, 17.0), (32, 55.0), (256, 160.0), (1600, 300.0)];
        return gates.into_iter().map(|(tokens, gate)| case(tokens, gate)).collect();
    }
    let base = |of: Case, base_gate| Case { base_gate, ..of };
    let mixed = case(64, 60.0);
    vec![
        base(case(1, 5.0), 1.27),
        base(case(8, 11.0), 1.10),
        base(case(32, 38.0), 1.10),
        base(mixed, 1.12),
        base(Case { users: Users::SomeNone, ..case(32, 38.0) }, 1.10),
        base(Case { users: Users::Single, ..case(32, 0.0) }, 1.10),
        base(Case { spread: Spread::Zipf, lora_gate: 0.0, ..mixed }, 1.28),
        base(Case { spread: Spread::One, lora_gate: 0.0, ..mixed }, 1.28),
        base(case(256, 85.0), 1.12),
        Case { base_most: 650.0, route_gate: 8.0, ..case(1600, 120.0) },
        Case { users: Users::Single, ..case(1600, 60.0) },
        Case { spread: Spread::Zipf, ..case(1600, 0.0) },
        Case { base_most: 1500.0, route_gate: 11.0, ..case(4096, 0.0) },
    ]
}

fn all(device: &Cuda, wanted: &Wanted, mode: Mode) -> Result<bool> {
    let pattern = Pattern::new();
    let mut right = true;
    for (model, slots, sets) in [(GPT_OSS, 8, 12), (QWEN3, 8, 12), (GPT_OSS, 32, 6), (QWEN3, 32, 6)]
    {
        let wanted = |case: &Case| wanted.has(&case.name(&model, slots));
        let cases: Vec<Case> = cases(&model, slots).into_iter().filter(wanted).collect();
        if cases.is_empty() {
            continue;
        }
        let begin = Instant::now();
        let sets = if mode == Mode::Check { 1 } else { sets };
        let tokens = cases.iter().map(|case| case.tokens).max().unwrap_or(1);
        let mut layer = Layer::new(device, model, Extent { slots, sets, tokens }, &pattern)?;
        println!("{} with {slots} adapters: made in {:.1?}", model.name, begin.elapsed());
        for case in &cases {
            right &= run(&mut layer, &pattern, case, mode)?;
        }
    }
    Ok(right)
}

fn main() -> std::process::ExitCode {
    let (mut wanted, mut mode) = (Wanted::default(), Mode::All);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--bench" => {} // cargo's own
            "--check" => mode = Mode::Check,
            "--route" => mode = Mode::Route,
            _ => wanted.0.push(argument),
        }
    }
    ended(Cuda::open(&DeviceConfig::default()).and_then(|device| all(&device, &wanted, mode)))
}
