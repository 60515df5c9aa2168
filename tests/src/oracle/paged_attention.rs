//! `out = Σ_j softmax(scale · q·k_j)·v_j` over the positions a query sees, found through the
//! block table; a sink is one more logit of the softmax and has no value.

use amphora_hal::ops::Mask;

/// One sequence of a step.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// First row of its queries.
    pub first_row: usize,
    /// Queries.
    pub rows: usize,
    /// Positions that the last of them sees.
    pub context: usize,
    /// Blocks of its positions.
    pub blocks: Vec<usize>,
}

/// Caches and their shape.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Heads of the cache.
    pub kv_heads: usize,
    /// Width of q and k.
    pub k_dim: usize,
    /// Width of v.
    pub v_dim: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// `[blocks, block_size, kv_heads, k_dim]`.
    pub k_cache: &'a [f64],
    /// `[blocks, block_size, kv_heads, v_dim]`.
    pub v_cache: &'a [f64],
    /// What a query sees.
    pub mask: Mask,
    /// `[heads]`.
    pub sinks: Option<&'a [f64]>,
    /// Multiplies q·k.
    pub scale: f64,
}

impl Attention<'_> {
    fn sees(&self, query: usize, key: usize) -> bool {
        key <= query
            && match self.mask {
                Mask::Causal => true,
                Mask::Window(window) => key + window > query,
                Mask::Chunk(chunk) => key / chunk == query / chunk,
            }
    }

    /// Rows of `q` (`[rows, heads, k_dim]`) that belong to no sequence give `None`s.
    pub fn attend(&self, q: &[f64], sequences: &[Sequence]) -> Vec<Option<f64>> {
        let rows = q.len() / (self.heads * self.k_dim);
        let mut out = vec![None; rows * self.heads * self.v_dim];
        for sequence in sequences {
            for i in 0..sequence.rows {
                let (row, position) =
                    (sequence.first_row + i, sequence.context - sequence.rows + i);
                for head in 0..self.heads {
                    let at = row * self.heads + head;
                    let query = &q[at * self.k_dim..(at + 1) * self.k_dim];
                    let values = self.head(query, head, position, &sequence.blocks);
                    for (to, value) in out[at * self.v_dim..].iter_mut().zip(values) {
                        *to = Some(value);
                    }
                }
            }
        }
        out
    }

    fn head(&self, query: &[f64], head: usize, position: usize, blocks: &[usize]) -> Vec<f64> {
        let kv_head = head * self.kv_heads / self.heads;
        let place = |j: usize| {
            let slot = blocks[j / self.block_size] * self.block_size + j % self.block_size;
            slot * self.kv_heads + kv_head
        };
        let seen: Vec<usize> = (0..=position).filter(|&j| self.sees(position, j)).collect();
        let logits: Vec<f64> = seen
            .iter()
            .map(|&j| {
                let key = &self.k_cache[place(j) * self.k_dim..(place(j) + 1) * self.k_dim];
                self.scale * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()
            })
            .collect();
        let sink = self.sinks.map(|sinks| sinks[head]);
        let most = logits.iter().copied().chain(sink).fold(f64::MIN, f64::max);
        let weights: Vec<f64> = logits.iter().map(|l| (l - most).exp()).collect();
        let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - most).exp());
        let mut out = vec![0.0; self.v_dim];
        for (weight, &j) in weights.iter().zip(&seen) {
            let value = &self.v_cache[place(j) * self.v_dim..(place(j) + 1) * self.v_dim];
            for (to, v) in out.iter_mut().zip(value) {
                *to += weight / total * v;
            }
        }
        out
    }
}
