//! The operators of a layer beside its experts, each the median of graph replays over copies of its weights
//! or of its cache that no cache of the device holds: products with adapters and without, the product to
//! the vocabulary, routing alone, attention, and what lies between. bf16, rank 32; tables with the gates.
//!
//! A product is timed in a row of its own kind, which may begin beside the end of the one in front, and
//! behind a `rms_norm` that writes its rows, as a layer has it; the norm is part of those times. Before it
//! is timed, rows of it are held against f64.
//!
//! `cargo bench -p amphora-benches --features cuda --bench dense_layer [-- TEXT..]`: lines whose name holds
//! one of the texts, such as a model's, `/qkv/`, `/vocabulary/`, `route/`, `/attention/`, `/norm/` or `/t=8`.

mod attention;
mod check;
mod products;

use amphora_backend_cuda::Cuda;
use amphora_benches::layers::{Users, Wanted, ended, verdict};
use amphora_engine::measure::experts::{self, Extent, Layer, Model};
use amphora_engine::measure::{CAREFUL, Pattern, SHORT};
use amphora_hal::{Device, DeviceConfig, Result};

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

impl Bench<'_> {
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

    fn all(&mut self) -> Result<bool> {
        self.products()?;
        self.vocabulary()?;
        self.routing()?;
        self.attention()?;
        self.between()?;
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
