//! The numbers of a model without files.
//!
//! Matrices are windows into one pool of pseudo-random bf16 numbers, so a model of 40 GB takes the host
//! about one. What routers see is laid out on purpose: layers' norms scale by 2^-10 and biases are zero, so
//! that what layers add to the residual stream is small beside the token's embedding, and a router's scores
//! are a random function of the token. Uneven routing is a score of its own for each expert, through a few
//! inputs that are positive in every token: the embedding's first numbers.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use amphora_hal::{DType, narrow};

use super::Spread;

/// Pool, constants and routers.
#[derive(Debug)]
pub(crate) struct Numbers {
    pool: Vec<u8>,
    /// Width of a row of the embedding.
    hidden: usize,
    zeros: Vec<u8>,
    ones: Vec<u8>,
    small: Vec<u8>,
    routers: BTreeMap<String, Vec<u8>>,
}

/// A tensor to be made: its name and its extents.
pub(crate) type Wanted<'a> = (&'a str, &'a [usize]);

const EMBEDDING: &str = "model.embed_tokens.weight";

/// Places where a tensor may begin: a prime, so that no two rows of a layer fall together.
const OFFSETS: usize = 1_000_003;

/// First numbers of a token's embedding that are positive.
const POSITIVE: usize = 16;

/// Their mean, over the root mean square of all: magnitudes are even in [1, 2).
const POSITIVE_MEAN: f32 = 0.982;

/// Root mean square of the pool's numbers.
const POOL_RMS: f32 = 0.023_87;

/// What a token's numbers are multiplied by in front of attention and MLP.
const SMALL: f32 = 1.0 / 1024.0;

/// How a tensor is made.
#[derive(Debug, PartialEq)]
enum Maker {
    Pool,
    Embedding,
    Router,
    Zeros,
    Ones,
    Small,
}

impl Maker {
    fn of(name: &str) -> Self {
        let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
        if name == EMBEDDING {
            Maker::Embedding
        } else if ends(&["mlp.router.weight", "mlp.gate.weight"]) {
            Maker::Router
        } else if ends(&["input_layernorm.weight", "post_attention_layernorm.weight"]) {
            Maker::Small
        } else if ends(&["norm.weight"]) {
            Maker::Ones
        } else if ends(&["bias"]) {
            Maker::Zeros
        } else {
            Maker::Pool
        }
    }
}

fn elements((_, shape): &Wanted<'_>) -> usize {
    shape.iter().product()
}

fn bf16(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 2 * values.len()];
    narrow(values, DType::BF16, &mut bytes);
    bytes
}

fn hash(name: &str) -> usize {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(name) as usize
}

impl Numbers {
    /// Enough for `tensors`, whose routers choose experts by `spread`.
    pub(crate) fn new(tensors: &[Wanted<'_>], spread: Spread) -> Self {
        let hidden = |(_, shape): &Wanted<'_>| shape.last().copied();
        let embedding = tensors.iter().find(|(name, _)| *name == EMBEDDING);
        let hidden = embedding.and_then(hidden).unwrap_or(1).max(1);
        let most = |made: &dyn Fn(&Maker) -> bool| {
            let of = tensors.iter().filter(|(name, _)| made(&Maker::of(name)));
            of.map(elements).max().unwrap_or(0)
        };
        let same = |value: f32, maker: Maker| bf16(&vec![value; most(&|made| *made == maker)]);
        let mut numbers = Numbers {
            pool: pool(most(&|_| true) + OFFSETS, hidden),
            hidden,
            zeros: same(0.0, Maker::Zeros),
            ones: same(1.0, Maker::Ones),
            small: same(SMALL, Maker::Small),
            routers: BTreeMap::new(),
        };
        let routers: Vec<&Wanted<'_>> =
            tensors.iter().filter(|(name, _)| Maker::of(name) == Maker::Router).collect();
        for (name, shape) in routers {
            if let Some(router) = numbers.router(name, shape, spread) {
                numbers.routers.insert((*name).to_owned(), router);
            }
        }
        numbers
    }

    /// The numbers of tensor `name`: they depend on its name and size alone.
    pub(crate) fn of(&self, name: &str, elements: usize) -> Option<(DType, &[u8])> {
        let from = match Maker::of(name) {
            Maker::Pool => return self.window(hash(name) % OFFSETS, elements),
            // So that each row begins with positive numbers.
            Maker::Embedding => {
                let first = hash(name) % OFFSETS / self.hidden * self.hidden;
                return self.window(first, elements);
            }
            Maker::Router => self.routers.get(name)?,
            Maker::Zeros => &self.zeros,
            Maker::Ones => &self.ones,
            Maker::Small => &self.small,
        };
        from.get(..2 * elements).map(|bytes| (DType::BF16, bytes))
    }

    fn window(&self, first: usize, elements: usize) -> Option<(DType, &[u8])> {
        self.pool.get(2 * first..2 * (first + elements)).map(|bytes| (DType::BF16, bytes))
    }

    /// A window whose first inputs carry each expert's own score.
    fn router(&self, name: &str, shape: &[usize], spread: Spread) -> Option<Vec<u8>> {
        let [experts, hidden] = *shape else { return None };
        let (_, window) = self.window(hash(name) % OFFSETS, experts * hidden)?;
        let mut router = window.to_vec();
        let carriers = POSITIVE.min(hidden);
        let deviation = POOL_RMS * ((hidden - carriers) as f32).sqrt();
        // Other experts in each layer.
        let turn = hash(name);
        for (expert, row) in router.chunks_exact_mut(2 * hidden).enumerate() {
            let score = spread.score((expert + turn % experts) % experts) * deviation;
            let each = score / (carriers as f32 * POSITIVE_MEAN);
            narrow(&vec![each; carriers], DType::BF16, &mut row[..2 * carriers]);
        }
        Some(router)
    }
}

/// Random signs and mantissas, magnitudes in [2^-6, 2^-5); the first numbers of every `hidden` positive.
fn pool(elements: usize, hidden: usize) -> Vec<u8> {
    /// Sign and mantissa; the exponent is that of 2^-6.
    const FREE: u64 = 0x807f_807f_807f_807f;
    const EXPONENT: u64 = 0x3c80_3c80_3c80_3c80;
    let mut bytes = vec![0; (2 * elements).next_multiple_of(8)];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in bytes.chunks_exact_mut(8) {
        // Xorshift (Marsaglia 2003): fast, and plenty for numbers nobody reads.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&(state & FREE | EXPONENT).to_le_bytes());
    }
    for row in bytes.chunks_mut(2 * hidden) {
        let carriers = POSITIVE.min(hidden);
        // The second byte of a bf16 has its sign.
        row.iter_mut().skip(1).step_by(2).take(carriers).for_each(|high| *high &= 0x7f);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: usize = 64;
    const ROUTER: &str = "model.layers.3.mlp.router.weight";

    fn numbers() -> Numbers {
        let wanted: [Wanted<'_>; 5] = [
            (EMBEDDING, &[100, HIDDEN]),
            (ROUTER, &[8, HIDDEN]),
            ("model.norm.weight", &[HIDDEN]),
            ("model.layers.0.input_layernorm.weight", &[HIDDEN]),
            ("model.layers.0.mlp.router.bias", &[8]),
        ];
        Numbers::new(&wanted, Spread::Zipf)
    }

    fn values(numbers: &Numbers, name: &str, elements: usize) -> Vec<f32> {
        let (dtype, bytes) = numbers.of(name, elements).expect("there are so many");
        amphora_hal::widen(dtype, bytes).expect("bf16")
    }

    #[test]
    fn numbers_are_small_finite_and_differ_by_name() {
        let numbers = numbers();
        let a = values(&numbers, "a", 4096);
        assert!(a.iter().all(|v| (2f32.powi(-6)..2f32.powi(-5)).contains(&v.abs())));
        let negative = a.iter().filter(|v| **v < 0.0).count();
        assert!((1000..2500).contains(&negative), "{negative}");
        assert_ne!(values(&numbers, "b", 4096), a);
        assert_eq!(numbers.of("a", 6400 + 2 * OFFSETS), None);
        let square = a.iter().map(|v| v * v).sum::<f32>() / a.len() as f32;
        assert!((square.sqrt() / POOL_RMS - 1.0).abs() < 0.03, "{square}");
    }

    #[test]
    fn every_token_begins_with_the_carriers_of_a_score() {
        let numbers = numbers();
        let embedding = values(&numbers, EMBEDDING, 100 * HIDDEN);
        let rows: Vec<_> = embedding.chunks(HIDDEN).collect();
        assert!(rows.iter().all(|row| row[..POSITIVE].iter().all(|v| *v > 0.0)));
        assert!(rows.iter().any(|row| row[POSITIVE] < 0.0));
        let router = values(&numbers, ROUTER, 8 * HIDDEN);
        let firsts: Vec<f32> = router.chunks(HIDDEN).map(|row| row[0]).collect();
        let best = firsts.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(firsts.iter().filter(|first| **first == best).count(), 1, "{firsts:?}");
    }

    #[test]
    fn norms_and_biases_are_constants() {
        let numbers = numbers();
        let all = |name: &str, elements, value: f32| {
            values(&numbers, name, elements).iter().all(|v| *v == value)
        };
        assert!(all("model.norm.weight", HIDDEN, 1.0));
        assert!(all("model.layers.0.input_layernorm.weight", HIDDEN, SMALL));
        assert!(all("model.layers.0.mlp.router.bias", 8, 0.0));
    }
}
