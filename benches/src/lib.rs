//! What operators must move and compute at least, and what the machine could: a benchmark's time
//! becomes a share of the nearer roof.

pub mod layers;

use std::hint::black_box;
use std::time::{Duration, Instant};

use amphora_tests::cases::fused_moe::HostMoe;
use amphora_tests::cases::linear::HostLinear;
use amphora_tests::cases::lora_linear::HostLoraLinear;
use amphora_tests::cases::paged_attention::HostAttention;
use amphora_tests::cases::sample::HostSample;
use amphora_tests::fixtures::Factors;
use amphora_tests::harness::HostOp;
use amphora_tests::oracle::moe_route::Route;

/// The least an operator call must do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes read or written once each.
    pub bytes: usize,
    /// Multiplications and additions.
    pub flops: usize,
}

impl Cost {
    fn and(self, other: Cost) -> Cost {
        Cost { bytes: self.bytes + other.bytes, flops: self.flops + other.flops }
    }

    /// `rows` rows through one matrix `[n, k]` of elements of `size` bytes.
    fn product(rows: usize, n: usize, k: usize, size: usize) -> Cost {
        Cost { bytes: size * (n * k + rows * (n + k)), flops: 2 * rows * n * k }
    }

    /// `rows` rows through both factors.
    fn delta(rows: usize, factors: &Factors, size: usize) -> Cost {
        let elements = factors.a.len() + factors.b.len();
        Cost { bytes: size * elements, flops: 2 * rows * elements }
    }
}

/// An operator call whose cost is known.
pub trait Costed: HostOp {
    /// Its cost.
    fn cost(&self) -> Cost;
}

impl Costed for HostLinear {
    fn cost(&self) -> Cost {
        Cost::product(self.spec.tokens, self.spec.n, self.spec.k, self.spec.dtype.size())
    }
}

impl Costed for HostLoraLinear {
    fn cost(&self) -> Cost {
        let slots = self.steps[0].slots();
        let rows = |slot: usize| slots.iter().filter(|of| **of == Some(slot)).count();
        let used = self.adapters.factors.iter().filter(|((slot, _, _), _)| rows(*slot) > 0);
        used.fold(self.base.cost(), |cost, ((slot, _, _), factors)| {
            cost.and(Cost::delta(rows(*slot), factors, self.base.spec.dtype.size()))
        })
    }
}

impl Costed for HostMoe {
    fn cost(&self) -> Cost {
        let spec = &self.spec;
        let route = Route {
            experts: spec.experts,
            top_k: spec.top_k,
            score: amphora_hal::ops::RouteScore::SoftmaxTopk,
            correction: None,
            groups: None,
            renorm: false,
            scale: 1.0,
        };
        let logits = self.logits.values();
        let chosen: Vec<Vec<usize>> = logits
            .chunks(spec.experts)
            .take(spec.tokens)
            .map(|row| route.choose(row).experts)
            .collect();
        let slots = self.steps[0].slots();
        let size = spec.dtype.size();
        let mut cost = Cost::default();
        for expert in 0..spec.experts {
            let rows: Vec<usize> =
                (0..spec.tokens).filter(|&t| chosen[t].contains(&expert)).collect();
            if rows.is_empty() {
                continue;
            }
            cost = cost
                .and(Cost::product(rows.len(), 2 * spec.inner, spec.hidden, size))
                .and(Cost::product(rows.len(), spec.hidden, spec.inner, size));
            for ((slot, _, of), factors) in self.adapters.iter().flat_map(|a| &a.factors) {
                let own = rows.iter().filter(|&&t| slots[t] == Some(*slot)).count();
                if *of == expert && own > 0 {
                    cost = cost.and(Cost::delta(own, factors, size));
                }
            }
        }
        cost
    }
}

impl Costed for HostAttention {
    fn cost(&self) -> Cost {
        let spec = &self.spec;
        let size = spec.dtype.size();
        let (mut seen, mut pairs) = (0, 0);
        for (before, rows) in &spec.sequences {
            seen += before + rows;
            pairs += (0..*rows).map(|i| before + i + 1).sum::<usize>();
        }
        let width = spec.k_dim + spec.v_dim;
        let rows = self.steps[0].rows();
        Cost {
            bytes: size * width * (seen * spec.kv_heads + rows * spec.heads),
            flops: 2 * pairs * spec.heads * width,
        }
    }
}

/// Each row that draws is read once, whatever it asks for.
impl Costed for HostSample {
    fn cost(&self) -> Cost {
        let rows = self.steps()[0].sequences.iter().filter(|s| s.sample.is_some()).count();
        let vocab = self.bounds()[0].k;
        Cost { bytes: rows * vocab * size_of::<f32>(), flops: 0 }
    }
}

/// What a machine could do.
#[derive(Debug, Clone, Copy)]
pub struct Roof {
    /// Bytes of memory read in a second.
    pub bytes: f64,
    /// f32 multiplications and additions in a second.
    pub flops: f64,
}

impl Roof {
    /// The host's, measured now: reading by all threads, and fused multiply-adds as many as two units
    /// of the widest vectors do at the clock that a chain of dependent multiplications shows.
    pub fn host() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Roof {
            bytes: read_rate(threads),
            flops: threads as f64 * clock() * lanes() as f64 * 2.0 * 2.0,
        }
    }

    /// The nearer roof of a cost: its name, and the share of it that `time` reaches.
    pub fn share(&self, cost: Cost, time: Duration) -> (&'static str, f64) {
        let seconds = time.as_secs_f64();
        let memory = cost.bytes as f64 / self.bytes;
        let compute = cost.flops as f64 / self.flops;
        if memory > compute { ("memory", memory / seconds) } else { ("compute", compute / seconds) }
    }
}

/// f32 lanes of the widest vectors there are.
fn lanes() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return 16;
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return 8;
        }
    }
    4
}

/// Cycles in a second. A 64-bit multiplication takes three cycles and an addition one on every core
/// this runs on, and each step here waits for the one before.
fn clock() -> f64 {
    const STEPS: u64 = 50_000_000;
    let best = (0..3).map(|_| {
        let begin = Instant::now();
        let mut value = black_box(1u64);
        let factor = black_box(0x5851_f42d_4c95_7f2d);
        for _ in 0..STEPS {
            value = value.wrapping_mul(factor).wrapping_add(factor);
        }
        black_box(value);
        begin.elapsed()
    });
    let best = best.min().unwrap_or_default();
    4.0 * STEPS as f64 / best.as_secs_f64()
}

/// Bytes in a second that `threads` threads read of memory too large for caches.
fn read_rate(threads: usize) -> f64 {
    const WORDS: usize = 32 << 20;
    let memory = vec![1u64; WORDS];
    let part = WORDS / threads;
    let best = (0..5).map(|_| {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for words in memory.chunks(part) {
                scope.spawn(move || {
                    black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)))
                });
            }
        });
        begin.elapsed()
    });
    let best = best.min().unwrap_or_default();
    (WORDS * 8) as f64 / best.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_nearer_roof() {
        let roof = Roof { bytes: 1e9, flops: 1e12 };
        let cost = Cost { bytes: 1_000_000, flops: 1_000_000 };
        let (name, share) = roof.share(cost, Duration::from_millis(2));
        assert_eq!(name, "memory");
        assert!((share - 0.5).abs() < 1e-9);
        let cost = Cost { bytes: 1000, flops: 4_000_000_000 };
        let (name, share) = roof.share(cost, Duration::from_millis(16));
        assert_eq!(name, "compute");
        assert!((share - 0.25).abs() < 1e-9);
    }

    #[test]
    fn a_product_reads_its_matrix_once() {
        let cost = Cost::product(2, 3, 5, 4);
        assert_eq!(cost, Cost { bytes: 4 * (15 + 16), flops: 60 });
    }
}
