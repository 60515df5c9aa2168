//! Dense products: attention's and the MLP's with adapters and without, and the one to the vocabulary.

use amphora_backend_cuda::Cuda;
use amphora_benches::layers::{MOST_ERROR, Users};
use amphora_engine::measure::CAREFUL;
use amphora_engine::measure::dense::{self, Projection};
use amphora_hal::{DType, Result};

use super::check::Reference;
use super::{Bench, Table, delta, rate, speed};

/// Adapters of the products.
const SLOTS: usize = 8;

/// A projection that adapters change; gates in microseconds, of the deltas at so many rows.
struct Adapted {
    name: &'static str,
    k: usize,
    slices: &'static [usize],
    bias: bool,
    gate: fn(usize) -> f64,
}

const fn adapted(name: &'static str, k: usize, slices: &'static [usize]) -> Adapted {
    Adapted { name, k, slices, bias: false, gate: |_| 0.0 }
}

const PROJECTIONS: [Adapted; 8] = [
    Adapted {
        bias: true,
        gate: |rows| match rows {
            ..=32 => 3.0,
            1600 => 40.0,
            _ => 0.0,
        },
        ..adapted("gpt-oss-20b/qkv", 2880, &[4096, 512, 512])
    },
    Adapted {
        bias: true,
        gate: |rows| if rows <= 32 { 2.0 } else { 0.0 },
        ..adapted("gpt-oss-20b/o", 4096, &[2880])
    },
    adapted("qwen3-30b-a3b/qkv", 2048, &[4096, 512, 512]),
    adapted("qwen3-30b-a3b/o", 4096, &[2048]),
    adapted("qwen3-32b/qkv", 5120, &[8192, 1024, 1024]),
    adapted("qwen3-32b/o", 8192, &[5120]),
    adapted("qwen3-32b/gate_up", 5120, &[25_600, 25_600]),
    adapted("qwen3-32b/down", 25_600, &[5120]),
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

    pub fn products(&mut self) -> Result<()> {
        let mut table = Table::new(&[
            "product",
            "base µs",
            "weight",
            "speed",
            "8 adapters, row by row",
            "8, a stretch each",
            "one adapter",
            "behind a norm: base µs",
            "8 row by row",
            "one",
            "launches",
        ]);
        for of in PROJECTIONS {
            let name = |tokens: usize| format!("{}/t={tokens}", of.name);
            let rows = [1, 8, 16, 32, 64, 256, 1600];
            let rows: Vec<usize> =
                rows.into_iter().filter(|&rows| self.wanted.has(&name(rows))).collect();
            let Some(&tokens) = rows.last() else { continue };
            let slices = of.slices.to_vec();
            let shape = dense::Shape { k: of.k, slices, tokens, out: DType::BF16, bias: of.bias };
            let weight = shape.n() * shape.k * 2;
            let mut projection = Projection::new(self.device, shape, SLOTS, &self.pattern)?;
            // A norm changes the rows that a check knows.
            let mut checked = Vec::new();
            for tokens in rows {
                let users = [Users::Mixed, Users::Stretches, Users::Single];
                let mut rows = Vec::new();
                for slots in users.map(|users| users.slots(tokens, SLOTS)) {
                    let mut of = projection.rows(&slots)?;
                    self.check(&name(tokens), &mut projection, (&mut of, &slots))?;
                    rows.push(of);
                }
                checked.push((tokens, rows));
            }
            for (tokens, mut rows) in checked {
                let [mixed, stretches, one] = rows.as_mut_slice() else {
                    unreachable!("rows of three kinds of users")
                };
                use dense::Call::{Base, Lora, NormBase, NormLora};
                let launches = [Base, Lora].map(|c| self.launches(&mut projection, mixed, c));
                let [base_launches, lora_launches] = launches;
                let mut graphs = Vec::new();
                for what in [Base, Lora, NormBase, NormLora] {
                    graphs.push(projection.capture(mixed, what)?);
                }
                graphs.push(projection.capture(stretches, Lora)?);
                for what in [Lora, NormLora] {
                    graphs.push(projection.capture(one, what)?);
                }
                let times = projection.times(mixed, &graphs, CAREFUL)?;
                let [base, lora, norm_base, norm_lora, stretched, single, norm_single] =
                    times.try_into().expect("one for each graph");
                let gate = (of.gate)(tokens);
                table.line(&[
                    name(tokens),
                    format!("{base:.2}"),
                    rate(weight, base),
                    speed(tokens * weight, base),
                    delta(lora - base, gate),
                    delta(stretched - base, gate),
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

    pub fn vocabulary(&mut self) -> Result<()> {
        let mut table =
            Table::new(&["product, f32", "µs", "weight", "behind a norm µs", "launches"]);
        for (model, k, n) in [
            ("gpt-oss-20b", 2880, 201_088),
            ("qwen3-30b-a3b", 2048, 151_936),
            ("qwen3-32b", 5120, 151_936),
        ] {
            let name = |tokens: usize| format!("{model}/vocabulary/t={tokens}");
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
}
