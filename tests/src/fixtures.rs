//! What cases are made of beside activations: weights as files have them, and adapters.

use std::collections::BTreeMap;
use std::sync::Arc;

use amphora_hal::{
    DType, HostData, HostPart, HostWeight, HostWeightMeta, LoraLayout, LoraSlice, Result, Scheme,
    SliceId, SliceMeta,
};

use crate::host::{HostTensor, round};
use crate::oracle::lora_linear::Delta;
use crate::rng::Rng;

/// How a file stores a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One part, k innermost.
    Rows,
    /// One part, n innermost.
    Transposed,
    /// Two parts, the first of this many outputs.
    Parts(usize),
    /// The same, k innermost, and each matrix of each part in a place of its own.
    Separate(usize),
}

/// A weight: `matrices` of `[n, k]`.
#[derive(Debug, Clone)]
pub struct HostMatrices {
    /// 1, or the number of experts.
    pub matrices: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// How the device is to store it; values are rounded to this.
    pub dtype: DType,
    /// How the file stores it.
    pub form: Form,
    /// `[matrices, n, k]`.
    pub values: Vec<f64>,
}

impl HostMatrices {
    /// Normal numbers that give outputs of about deviation 1 for inputs of deviation 1.
    pub fn random(rng: &mut Rng, shape: [usize; 3], dtype: DType) -> Self {
        let [matrices, n, k] = shape;
        HostMatrices {
            matrices,
            n,
            k,
            dtype,
            form: Form::Rows,
            values: rng.normals(matrices * n * k, 1.0 / (k as f64).sqrt(), dtype),
        }
    }

    /// The logical form.
    pub fn meta(&self) -> HostWeightMeta {
        HostWeightMeta {
            matrices: self.matrices,
            n: self.n,
            k: self.k,
            scheme: Scheme::Dense(self.dtype),
        }
    }

    /// Gives the weight, in its file's form, to `then`.
    ///
    /// # Errors
    /// What `then` returns.
    pub fn with_host_weight<T>(
        &self,
        then: impl FnOnce(&HostWeight<'_>) -> Result<T>,
    ) -> Result<T> {
        let (n, k) = (self.n, self.k);
        let stored = |rows: std::ops::Range<usize>, transposed: bool| {
            let mut values = Vec::new();
            for m in 0..self.matrices {
                let at = |r: usize, c: usize| self.values[(m * n + r) * k + c];
                if transposed {
                    (0..k).for_each(|c| values.extend(rows.clone().map(|r| at(r, c))));
                } else {
                    rows.clone().for_each(|r| values.extend((0..k).map(|c| at(r, c))));
                }
            }
            HostTensor::real(&[values.len()], self.dtype, &values).bytes
        };
        let all = 0..n;
        let (first, second);
        let (first_each, second_each): (Vec<_>, Vec<_>);
        let parts = match self.form {
            Form::Rows => {
                first = stored(all, false);
                vec![HostPart { n, data: HostData::RowMajor(self.dtype, &first) }]
            }
            Form::Transposed => {
                first = stored(all, true);
                vec![HostPart { n, data: HostData::Transposed(self.dtype, &first) }]
            }
            Form::Parts(cut) => {
                (first, second) = (stored(0..cut, false), stored(cut..n, true));
                vec![
                    HostPart { n: cut, data: HostData::RowMajor(self.dtype, &first) },
                    HostPart { n: n - cut, data: HostData::Transposed(self.dtype, &second) },
                ]
            }
            Form::Separate(cut) => {
                let each = |bytes: &[u8]| bytes.len() / self.matrices;
                (first, second) = (stored(0..cut, false), stored(cut..n, false));
                first_each = first.chunks(each(&first)).map(|m| (self.dtype, m)).collect();
                second_each = second.chunks(each(&second)).map(|m| (self.dtype, m)).collect();
                vec![
                    HostPart { n: cut, data: HostData::Separate(&first_each) },
                    HostPart { n: n - cut, data: HostData::Separate(&second_each) },
                ]
            }
        };
        then(&HostWeight::new(self.meta(), parts)?)
    }
}

/// Both factors of one delta.
#[derive(Debug, Clone)]
pub struct Factors {
    /// Rank.
    pub rank: usize,
    /// Multiplies the delta.
    pub scale: f32,
    /// The block's class is at least this; 0 takes the smallest that holds the rank.
    pub least_class: usize,
    /// `[rank, k]`. Slices of one fused factor share it: one block, equal offsets.
    pub a: Arc<Vec<f64>>,
    /// `[n, rank]`.
    pub b: Vec<f64>,
}

/// The adapters of a table: factors by (slot, slice, expert).
#[derive(Debug, Clone)]
pub struct Adapters {
    /// Type of the blocks; values are rounded to this.
    pub dtype: DType,
    /// Slots of the table.
    pub slots: usize,
    /// The slices, in the order of the layout.
    pub slices: Vec<SliceMeta>,
    /// What each slot touches.
    pub factors: BTreeMap<(usize, usize, usize), Factors>,
}

impl Adapters {
    /// A table in which no slot touches anything.
    pub fn none(dtype: DType, slots: usize, slices: &[SliceMeta]) -> Self {
        Adapters { dtype, slots, slices: slices.to_vec(), factors: BTreeMap::new() }
    }

    /// Random factors whose delta is about as large as the base product, so that a lost or doubled
    /// one cannot hide in a tolerance.
    pub fn add(&mut self, rng: &mut Rng, at: (usize, usize, usize), rank: usize) {
        let k = self.slices[at.1].k;
        let a = rng.normals(rank * k, 1.0 / (k as f64).sqrt(), self.dtype);
        self.add_with(rng, at, rank, Arc::new(a));
    }

    /// The same with a given A.
    pub fn add_with(
        &mut self,
        rng: &mut Rng,
        at: (usize, usize, usize),
        rank: usize,
        a: Arc<Vec<f64>>,
    ) {
        let n = self.slices[at.1].n;
        let scale = rng.pick(&[0.5f32, 1.0, 2.0, -1.25, 0.7]);
        let b = rng.normals(n * rank, 1.0 / (rank as f64).sqrt(), self.dtype);
        self.factors.insert(at, Factors { rank, scale, least_class: 0, a, b });
    }

    /// Without the factors for which `drop` holds.
    pub fn without(&self, drop: impl Fn(&(usize, usize, usize)) -> bool) -> Self {
        let mut kept = self.clone();
        kept.factors.retain(|at, _| !drop(at));
        kept
    }

    /// The layout and the name of each slice.
    pub fn layout(&self) -> (Arc<LoraLayout>, Vec<SliceId>) {
        let mut layout = LoraLayout::default();
        let ids = self.slices.iter().map(|&meta| layout.push(meta)).collect();
        (Arc::new(layout), ids)
    }

    /// The largest rank.
    pub fn max_rank(&self) -> usize {
        self.factors.values().map(|f| f.rank.max(f.least_class)).max().unwrap_or(0)
    }

    /// Bytes of all blocks at most: a class is at most twice its rank or the smallest there is, and a
    /// layout may pad either side.
    pub fn block_bytes(&self) -> usize {
        let side = |elements: usize, factors: &Factors| {
            let class = (2 * factors.rank.max(factors.least_class)).max(16);
            let width = (elements / factors.rank).next_multiple_of(64);
            (class * width * self.dtype.size()).next_multiple_of(1024) + 1024
        };
        self.factors.values().map(|f| side(f.a.len(), f) + side(f.b.len(), f)).sum()
    }

    /// The deltas of slice `slice` for the oracle, on outputs `offset`, `offset + stride`, …
    pub fn deltas(&self, slice: usize, offset: usize, stride: usize) -> Vec<Delta> {
        let own = self.factors.iter().filter(|((_, s, _), _)| *s == slice);
        own.map(|(&(slot, _, expert), factors)| Delta {
            slot,
            expert,
            out_offset: offset,
            out_stride: stride,
            scale: f64::from(factors.scale),
            rank: factors.rank,
            a: factors.a.to_vec(),
            b: factors.b.clone(),
        })
        .collect()
    }
}

/// Where the slices of a projection go: (slice of the layout, first output, stride).
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Index into [`Adapters::slices`].
    pub slice: usize,
    /// Output of its first element.
    pub offset: usize,
    /// Outputs from one element to the next.
    pub stride: usize,
}

/// The slices as hal takes them.
pub fn lora_slices(adapters: &Adapters, places: &[Place]) -> Vec<LoraSlice> {
    let (_, ids) = adapters.layout();
    places
        .iter()
        .map(|place| LoraSlice {
            table: ids[place.slice],
            out_offset: place.offset,
            out_stride: place.stride,
            len: adapters.slices[place.slice].n,
        })
        .collect()
}

/// The deltas of all `places` for the oracle.
pub fn deltas(adapters: &Adapters, places: &[Place]) -> Vec<Delta> {
    places.iter().flat_map(|p| adapters.deltas(p.slice, p.offset, p.stride)).collect()
}

/// `W + scale · B·A` for one slot: the weight that has the adapter merged in.
pub fn merged(weight: &HostMatrices, deltas: &[Delta], slot: usize) -> HostMatrices {
    let mut merged = weight.clone();
    let (n, k) = (weight.n, weight.k);
    for delta in deltas.iter().filter(|delta| delta.slot == slot) {
        for i in 0..delta.b.len() / delta.rank {
            for j in 0..delta.rank {
                let row = delta.expert * n + delta.out_offset + i * delta.out_stride;
                let factor = delta.scale * delta.b[i * delta.rank + j];
                for c in 0..k {
                    merged.values[row * k + c] += factor * delta.a[j * k + c];
                }
            }
        }
    }
    merged.values.iter_mut().for_each(|v| *v = round(weight.dtype, *v));
    merged
}
