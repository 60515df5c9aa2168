//! The operators of a layer beside its experts, each the median of graph replays over copies of its weights
//! or of its cache that no cache of the device holds: products with adapters and without, the product to
//! the vocabulary, routing alone, attention, and what lies between. bf16, rank 32; tables with the gates.
//!
//! A product is timed in a row of its own kind, which may begin beside the end of the one in front, and
//! behind a `rms_norm` that writes its rows, as a layer has it; the norm is part of those times. Before it
//! is timed, rows of it are held against f64.
//!
//! `cargo bench -p amphora-benches --features cuda --bench dense_layer [-- TEXT..]`: lines whose name holds
//! one of the texts: `qkv/`, `o/`, `vocabulary/`, `route/`, `attention/`, `norm/`, `rope/`, `t=8`.

mod check;

use amphora_backend_cuda::Cuda;
use amphora_benches::layers::{MOST_ERROR, Users, Wanted, ended, verdict};
use amphora_engine::measure::attention::{self, Attention};
use amphora_engine::measure::dense::{self, Projection};
use amphora_engine::measure::experts::{self, Extent, Layer, Model};
use amphora_engine::measure::{CAREFUL, Pattern, SHORT};
use amphora_hal::ops::Mask;
use amphora_hal::{DType, Device, DeviceConfig, Result};

use self::check::Reference;

/// Adapters of the products.
const SLOTS: usize = 8;
/// Copies of the memory of a routing.
const ROUTINGS: usize = 6;

/// A table whose head is printed in front of the first line that is wanted.
struct Table {
    columns: &'static [&'static str],
    begun: bool,
}

impl Table {
    fn new(columns: &'static [&'static str]) -> Self {
        Table { columns, begun: false }
    }

    fn line(&mut self, cells: &[String]) {
        if !self.begun {
            println!("\n| {} |", self.columns.join(" | "));
            println!("|{}", "--|".repeat(self.columns.len()));
            self.begun = true;
        }
        println!("| {} |", cells.join(" | "));
    }
}

/// A difference beside its gate.
fn delta(value: f64, gate: f64) -> String {
    match gate {
        0.0 => format!("{value:+.2}"),
        _ => format!("{value:+.2} ({})", verdict(value, gate)),
    }
}

/// Bytes in microseconds.
fn rate(bytes: usize, time: f64) -> String {
    format!("{:.2} TB/s", bytes as f64 / time / 1e6)
}

/// Multiplications and additions in microseconds.
fn speed(flops: usize, time: f64) -> String {
    format!("{:.0} TFLOP/s", flops as f64 / time / 1e6)
}

/// What a bench needs for every line.
struct Bench<'a> {
    device: &'a Cuda,
    pattern: Pattern,
    wanted: &'a Wanted,
    right: bool,
}

/// A projection of GPT-OSS-20B's attention; gates in microseconds, of the deltas at so many rows.
struct Adapted {
    name: &'static str,
    k: usize,
    slices: &'static [usize],
    gate: fn(usize) -> f64,
}

const PROJECTIONS: [Adapted; 2] = [
    Adapted {
        name: "qkv",
        k: 2880,
        slices: &[4096, 512, 512],
        gate: |rows| match rows {
            ..=32 => 3.0,
            1600 => 40.0,
            _ => 0.0,
        },
    },
    Adapted {
        name: "o",
        k: 4096,
        slices: &[2880],
        gate: |rows| if rows <= 32 { 2.0 } else { 0.0 },
    },
];

impl Bench<'_> {
    /// Counts launches of a product's call.
    fn launches(
        &self,
        projection: &mut Projection<Cuda>,
        rows: &mut dense::Rows<Cuda>,
        what: dense::Call,
    ) -> Result<usize> {
        let (watched, launches) = self.device.watched();
        projection.device = watched;
        let run = projection.run(rows, 0, what);
        projection.device = self.device.clone();
        run.map(|()| launches.all().len())
    }

    /// Holds rows of both calls against f64; nothing has changed the rows' values yet.
    fn check(
        &mut self,
        name: &str,
        projection: &mut Projection<Cuda>,
        (rows, slots): (&mut dense::Rows<Cuda>, &[Option<usize>]),
    ) -> Result<()> {
        for (what, lora) in [(dense::Call::Base, false), (dense::Call::Lora, true)] {
            projection.run(rows, 0, what)?;
            let out = projection.take_out(rows)?;
            let reference = Reference { shape: &projection.shape, pattern: &self.pattern };
            let mut sampled = vec![0, slots.len() / 2, slots.len() - 1];
            sampled.dedup();
            for row in sampled {
                let error = reference.error(&out, row, slots[row].filter(|_| lora));
                if error.is_nan() || error > MOST_ERROR {
                    println!("{name}: WRONG: row {row}, lora {lora}: error {error:.2e}");
                    self.right = false;
                }
            }
        }
        Ok(())
    }

    fn products(&mut self) -> Result<()> {
        let mut table = Table::new(&[
            "product",
            "base µs",
            "weight",
            "speed",
            "8 adapters",
            "one adapter",
            "behind a norm: base µs",
            "8 adapters",
            "one adapter",
            "launches",
        ]);
        for of in PROJECTIONS {
            let name = |tokens: usize| format!("{}/t={tokens}", of.name);
            let rows = [1, 8, 16, 32, 64, 256, 1600];
            let rows: Vec<usize> =
                rows.into_iter().filter(|&rows| self.wanted.has(&name(rows))).collect();
            let Some(&tokens) = rows.last() else { continue };
            let slices = of.slices.to_vec();
            let shape = dense::Shape { k: of.k, slices, tokens, out: DType::BF16, bias: true };
            let weight = shape.n() * shape.k * 2;
            let mut projection = Projection::new(self.device, shape, SLOTS, &self.pattern)?;
            // A norm changes the rows that a check knows.
            let mut checked = Vec::new();
            for tokens in rows {
                let users = [Users::Mixed, Users::Single].map(|users| users.slots(tokens, SLOTS));
                let [mut mixed, mut one] =
                    [projection.rows(&users[0])?, projection.rows(&users[1])?];
                for (rows, slots) in [(&mut mixed, &users[0]), (&mut one, &users[1])] {
                    self.check(&name(tokens), &mut projection, (rows, slots))?;
                }
                checked.push((tokens, mixed, one));
            }
            for (tokens, mut mixed, mut one) in checked {
                use dense::Call::{Base, Lora, NormBase, NormLora};
                let launches = [Base, Lora].map(|c| self.launches(&mut projection, &mut mixed, c));
                let [base_launches, lora_launches] = launches;
                let mut graphs = Vec::new();
                for what in [Base, Lora, NormBase, NormLora] {
                    graphs.push(projection.capture(&mut mixed, what)?);
                }
                for what in [Lora, NormLora] {
                    graphs.push(projection.capture(&mut one, what)?);
                }
                let times = projection.times(&mixed, &graphs, CAREFUL)?;
                let [base, lora, norm_base, norm_lora, single, norm_single] =
                    times.try_into().expect("one for each graph");
                let gate = (of.gate)(tokens);
                table.line(&[
                    name(tokens),
                    format!("{base:.2}"),
                    rate(weight, base),
                    speed(tokens * weight, base),
                    delta(lora - base, gate),
                    delta(single - base, gate),
                    format!("{norm_base:.2}"),
                    delta(norm_lora - norm_base, gate),
                    delta(norm_single - norm_base, gate),
                    format!("{} and {}", base_launches?, lora_launches?),
                ]);
            }
        }
        Ok(())
    }

    fn vocabulary(&mut self) -> Result<()> {
        let mut table =
            Table::new(&["product, f32", "µs", "weight", "behind a norm µs", "launches"]);
        for (model, k, n) in [("gpt-oss-20b", 2880, 201_088), ("qwen3-30b-a3b", 2048, 151_936)] {
            let name = |tokens: usize| format!("vocabulary/{model}/t={tokens}");
            let rows = [1, 8, 16, 32, 64];
            let rows: Vec<usize> =
                rows.into_iter().filter(|&rows| self.wanted.has(&name(rows))).collect();
            let Some(&tokens) = rows.last() else { continue };
            let slices = vec![n];
            let shape = dense::Shape { k, slices, tokens, out: DType::F32, bias: false };
            let mut projection = Projection::new(self.device, shape, 1, &self.pattern)?;
            for tokens in rows {
                let mut rows = projection.rows(&vec![None; tokens])?;
                let launches = self.launches(&mut projection, &mut rows, dense::Call::Base)?;
                let graphs = [dense::Call::Base, dense::Call::NormBase]
                    .map(|what| projection.capture(&mut rows, what));
                let graphs = graphs.into_iter().collect::<Result<Vec<_>>>()?;
                let times = projection.times(&rows, &graphs, CAREFUL)?;
                table.line(&[
                    name(tokens),
                    format!("{:.1}", times[0]),
                    rate(n * k * 2, times[0]),
                    format!("{:.1}", times[1]),
                    launches.to_string(),
                ]);
            }
        }
        Ok(())
    }

    fn routing(&mut self) -> Result<()> {
        let mut table = Table::new(&["moe_route alone", "sustained µs", "short µs"]);
        for (experts, top_k, slots) in [(32, 4, 8), (128, 8, 8), (32, 4, 32)] {
            let name = |tokens| format!("route/e={experts},k={top_k},slots={slots}/t={tokens}");
            let rows = [1, 8, 16, 32, 128, 1600, 4096];
            let rows: Vec<usize> =
                rows.into_iter().filter(|&rows| self.wanted.has(&name(rows))).collect();
            let Some(&tokens) = rows.last() else { continue };
            // Weights, which routing does not look at, as small as they may be.
            let (hidden, inner, gpt_oss) = (64, 64, experts == 32);
            let model = Model { name: "routing", hidden, inner, experts, top_k, gpt_oss };
            let extent = Extent { slots, sets: ROUTINGS, tokens };
            let mut layer = Layer::new(self.device, model, extent, &self.pattern)?;
            for tokens in rows {
                let logits: Vec<Vec<f32>> =
                    (0..ROUTINGS).map(|set| model.random_logits(tokens, set as u64)).collect();
                let of_rows = Users::Mixed.slots(tokens, slots);
                let mut rows = experts::Rows::new(&mut layer, &of_rows, &logits)?;
                layer.run(&mut rows, 0, experts::Call::Route)?;
                let graph = [layer.capture(&mut rows, experts::Call::Route)?];
                let sustained = layer.times(&rows, &graph, CAREFUL)?[0];
                let short = layer.times(&rows, &graph, SHORT)?[0];
                let gate = match (experts, slots, tokens) {
                    (32, 8, 1600) => 8.0,
                    (32, 8, 4096) => 11.0,
                    _ => 0.0,
                };
                let cell = |time: f64| match gate {
                    0.0 => format!("{time:.2}"),
                    _ => format!("{time:.2} ({})", verdict(time, gate)),
                };
                table.line(&[name(tokens), cell(sustained), cell(short)]);
            }
        }
        Ok(())
    }

    fn attention(&mut self) -> Result<()> {
        let mut table = Table::new(&["operator", "µs", "cache", "speed"]);
        let window = Mask::Window(128);
        let gpt_oss = |mask, sequences: &[(usize, usize)]| attention::Shape {
            hidden: 2880,
            heads: 64,
            kv_heads: 8,
            dim: 64,
            sequences: sequences.to_vec(),
            mask,
        };
        let decode = |mask, streams: usize, context: usize| {
            let name = match mask {
                Mask::Causal => format!("attention/s={streams},context={context}"),
                _ => format!("attention/s={streams},context={context},window=128"),
            };
            (name, gpt_oss(mask, &vec![(context - 1, 1); streams]))
        };
        let prompt = |name: &str, mask, sequences: &[(usize, usize)]| {
            (format!("attention/{name}"), gpt_oss(mask, sequences))
        };
        let mut cases: Vec<(String, attention::Shape)> =
            [(1, 1900), (1, 16_000), (1, 131_000), (8, 1900), (32, 1900), (32, 16_000)]
                .map(|(streams, context)| decode(Mask::Causal, streams, context))
                .into();
        cases.extend([1, 8, 32].map(|streams| decode(window, streams, 1900)));
        cases.extend([
            prompt("t=1600", Mask::Causal, &[(0, 1600)]),
            prompt("t=1600,window=128", window, &[(0, 1600)]),
            prompt("t=512,behind=7000", Mask::Causal, &[(7000, 512)]),
            prompt("t=8x200", Mask::Causal, &[(0, 200); 8]),
            prompt("t=4x400", Mask::Causal, &[(0, 400); 4]),
            prompt("t=8000", Mask::Causal, &[(0, 8000)]),
        ]);
        let (name, shape) = prompt("t=1600,heads=32/4x128", Mask::Causal, &[(0, 1600)]);
        cases.push((name, attention::Shape { heads: 32, kv_heads: 4, dim: 128, ..shape }));
        for (name, shape) in cases {
            if !self.wanted.has(&name) {
                continue;
            }
            let time = self.attend(&shape, attention::Call::Attention)?;
            let flops = shape.pairs() * shape.heads * shape.dim * 2 * 2;
            // Behind a window most of the cache is not read.
            let bytes =
                if shape.mask == window { "".into() } else { rate(shape.cache_bytes(), time) };
            table.line(&[name, format!("{time:.2}"), bytes, speed(flops, time)]);
        }
        for (name, what) in [("norm", attention::Call::Norm), ("rope", attention::Call::Rope)] {
            for tokens in [1, 32, 1600] {
                let name = format!("{name}/t={tokens}");
                if self.wanted.has(&name) {
                    let shape = gpt_oss(Mask::Causal, &[(0, tokens)]);
                    let time = self.attend(&shape, what)?;
                    table.line(&[name, format!("{time:.2}"), String::new(), String::new()]);
                }
            }
        }
        Ok(())
    }

    fn attend(&self, shape: &attention::Shape, what: attention::Call) -> Result<f64> {
        let mut attention = Attention::new(self.device, shape, &self.pattern)?;
        let graph = [attention.capture(what)?];
        Ok(attention.times(&graph, CAREFUL)?[0])
    }

    fn all(&mut self) -> Result<bool> {
        self.products()?;
        self.vocabulary()?;
        self.routing()?;
        self.attention()?;
        Ok(self.right)
    }
}

fn main() -> std::process::ExitCode {
    // `--bench` is cargo's own.
    let wanted = Wanted(std::env::args().skip(1).filter(|text| text != "--bench").collect());
    let opened = Cuda::open(&DeviceConfig::default());
    ended(opened.and_then(|device| {
        let (device, wanted) = (&device, &wanted);
        Bench { device, pattern: Pattern::new(), wanted, right: true }.all()
    }))
}
