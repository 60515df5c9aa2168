//! Rotary positions: pair (a, b) becomes `(a·cos − b·sin, b·cos + a·sin)`.

use amphora_hal::ops::RopePairing;

/// What turns the heads of one row after another.
#[derive(Debug)]
pub struct Rope<'a> {
    /// Width of a head.
    pub dim: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Elements that turn; the rest pass.
    pub rotary: usize,
    /// Position of each row.
    pub position: &'a [i32],
    /// `[positions, rotary]`: cosines of the frequencies, then their sines.
    pub table: &'a [f64],
    /// Which elements pair.
    pub pairing: RopePairing,
    /// `[positions]`: multiplies the result.
    pub scale: Option<&'a [f64]>,
}

impl Rope<'_> {
    /// Turns `x`, `[rows, heads, dim]`.
    pub fn turn(&self, x: &[f64]) -> Vec<f64> {
        let mut out = x.to_vec();
        let pairs = self.rotary / 2;
        for (row, &position) in self.position.iter().enumerate() {
            let position = position as usize;
            let angles = &self.table[position * self.rotary..(position + 1) * self.rotary];
            for head in 0..self.heads {
                let base = (row * self.heads + head) * self.dim;
                for i in 0..pairs {
                    let (cos, sin) = (angles[i], angles[pairs + i]);
                    let (at_a, at_b) = match self.pairing {
                        RopePairing::Half => (base + i, base + i + pairs),
                        RopePairing::Interleaved => (base + 2 * i, base + 2 * i + 1),
                    };
                    let (a, b) = (x[at_a], x[at_b]);
                    out[at_a] = a * cos - b * sin;
                    out[at_b] = b * cos + a * sin;
                }
                if let Some(scale) = self.scale {
                    for value in &mut out[base..base + self.dim] {
                        *value *= scale[position];
                    }
                }
            }
        }
        out
    }
}
