//! Attention, and what lies between a layer's products: norms, rope, the activation of a dense MLP.

use amphora_engine::measure::CAREFUL;
use amphora_engine::measure::attention::{Attention, Call, Shape};
use amphora_hal::Result;
use amphora_hal::ops::Mask;

use super::{Bench, Table, rate, speed};

const WINDOW: Mask = Mask::Window(128);
/// Models, their hidden and MLP widths, heads, KV heads and the width of one, and whether heads have norms.
const MODELS: [(&str, [usize; 5], bool); 3] = [
    ("gpt-oss-20b", [2880, 0, 64, 8, 64], false),
    ("qwen3-30b-a3b", [2048, 0, 32, 4, 128], true),
    ("qwen3-32b", [5120, 25_600, 64, 8, 128], true),
];

fn shape([hidden, inner, heads, kv_heads, dim]: [usize; 5]) -> Shape {
    let (mask, sequences) = (Mask::Causal, vec![(0, 1)]);
    Shape { hidden, inner, heads, kv_heads, dim, sequences, mask }
}

/// A step.
struct Step {
    name: String,
    /// Positions before, and rows.
    sequences: Vec<(usize, usize)>,
    mask: Mask,
}

fn steps(model: &str) -> Vec<Step> {
    let decode = |streams: usize, context: usize, mask| {
        let window = if mask == WINDOW { ",window=128" } else { "" };
        let name = format!("s={streams},context={context}{window}");
        Step { name, sequences: vec![(context - 1, 1); streams], mask }
    };
    let prompt = |name: &str, sequences: &[(usize, usize)], mask| Step {
        name: name.to_owned(),
        sequences: sequences.to_vec(),
        mask,
    };
    let mut steps = vec![
        decode(1, 1900, Mask::Causal),
        decode(8, 1900, Mask::Causal),
        decode(32, 1900, Mask::Causal),
        prompt("t=1600", &[(0, 1600)], Mask::Causal),
    ];
    if model == "gpt-oss-20b" {
        steps.extend([
            decode(1, 16_000, Mask::Causal),
            decode(1, 131_000, Mask::Causal),
            decode(32, 16_000, Mask::Causal),
            decode(1, 1900, WINDOW),
            decode(8, 1900, WINDOW),
            decode(32, 1900, WINDOW),
            prompt("t=1600,window=128", &[(0, 1600)], WINDOW),
            prompt("t=512,behind=7000", &[(7000, 512)], Mask::Causal),
            prompt("t=8x200", &[(0, 200); 8], Mask::Causal),
            prompt("t=4x400", &[(0, 400); 4], Mask::Causal),
            prompt("t=8000", &[(0, 8000)], Mask::Causal),
        ]);
    }
    steps
}

impl Bench<'_> {
    pub fn attention(&mut self) -> Result<()> {
        let mut table = Table::new(&["attention", "µs", "cache", "speed"]);
        for (model, sizes, _) in MODELS {
            for Step { name, sequences, mask } in steps(model) {
                let name = format!("{model}/attention/{name}");
                if !self.wanted.has(&name) {
                    continue;
                }
                let shape = Shape { sequences, mask, ..shape(sizes) };
                let time = self.time(&shape, Call::Attention)?;
                let flops = shape.pairs() * shape.heads * shape.dim * 2 * 2;
                // Behind a window most of the cache is not read.
                let bytes = match mask {
                    WINDOW => String::new(),
                    _ => rate(shape.cache_bytes(), time),
                };
                table.line(&[name, format!("{time:.2}"), bytes, speed(flops, time)]);
            }
        }
        Ok(())
    }

    /// The operators whose time is their bytes, which the operator in front has just written.
    pub fn between(&mut self) -> Result<()> {
        let mut table = Table::new(&["between products", "µs", "read and written"]);
        for (model, sizes, head_norms) in MODELS {
            for tokens in [1, 32, 1600] {
                let shape = Shape { sequences: vec![(0, tokens)], ..shape(sizes) };
                let [heads, kv] = [shape.heads, shape.kv_heads].map(|of| of * shape.dim);
                // x, what is added, both results; queries and keys twice; values and the cache beside.
                let mut calls = vec![
                    ("norm", Call::Norm, 4 * shape.hidden),
                    ("rope", Call::Rope, 2 * (heads + kv) + 3 * kv),
                ];
                if head_norms {
                    calls.push(("head_norms", Call::HeadNorms, 2 * (heads + kv)));
                }
                if shape.inner > 0 {
                    calls.push(("swiglu", Call::Activation, 3 * shape.inner));
                }
                for (call, what, width) in calls {
                    let name = format!("{model}/{call}/t={tokens}");
                    if self.wanted.has(&name) {
                        let time = self.time(&shape, what)?;
                        let bytes = rate(tokens * width * 2, time);
                        table.line(&[name, format!("{time:.2}"), bytes]);
                    }
                }
            }
        }
        Ok(())
    }

    fn time(&self, shape: &Shape, what: Call) -> Result<f64> {
        let mut attention = Attention::new(self.device, shape, &self.pattern)?;
        let graph = [attention.capture(what)?];
        Ok(attention.times(&graph, CAREFUL)?[0])
    }
}
