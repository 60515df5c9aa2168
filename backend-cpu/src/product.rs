//! The one product: weights in panels of 16 outputs, packed at load.
//!
//! A matrix `[n, k]` is stored `[⌈n/16⌉, k, 16]`, the missing outputs zero, so that one load gives 16
//! outputs their k-th weight. See `simd` for the order of sums.

use amphora_hal::{
    DType, Error, Float, HostWeight, HostWeightMeta, OpKey, OpKind, Result, Scheme, Weight,
};
use half::bf16;

use crate::Cpu;
use crate::memory::{Access, Rows, RowsMut};
use crate::simd::{self, Level, Panels, Widen};
use crate::threads::{Threads, ranges};

/// Outputs of a panel.
pub(crate) const LANES: usize = 16;

/// The type a scheme is stored in here.
pub(crate) fn stored(scheme: Scheme) -> Result<DType> {
    match scheme {
        Scheme::Dense(dtype @ (DType::F32 | DType::BF16)) => Ok(dtype),
        _ => Err(Error::Unsupported {
            key: OpKey::new(OpKind::Linear, DType::F32).scheme(scheme),
            reason: "the CPU stores weights as f32 or bf16",
        }),
    }
}

/// Elements of one packed matrix.
fn matrix_elements(n: usize, k: usize) -> usize {
    n.next_multiple_of(LANES) * k
}

pub(crate) fn packed_bytes(meta: &HostWeightMeta) -> Result<usize> {
    Ok(meta.matrices * matrix_elements(meta.n, meta.k) * stored(meta.scheme)?.size())
}

/// Packs every matrix of `weight` into `out`, all of [`packed_bytes`].
pub(crate) fn pack(weight: &HostWeight<'_>, dtype: DType, out: &mut [u8], threads: &Threads) {
    match dtype {
        DType::BF16 => pack_as::<bf16>(weight, bytemuck::cast_slice_mut(out), threads),
        _ => pack_as::<f32>(weight, bytemuck::cast_slice_mut(out), threads),
    }
}

fn pack_as<W: Float>(weight: &HostWeight<'_>, out: &mut [W], threads: &Threads) {
    let HostWeightMeta { n, k, .. } = *weight.meta();
    let panels = n.div_ceil(LANES);
    // Eight panels a task: a transposed file is then read 128 outputs at a stretch.
    const GROUP: usize = 8;
    let mut tasks = Vec::new();
    for (matrix, data) in out.chunks_mut(matrix_elements(n, k)).enumerate() {
        let groups = data.chunks_mut(GROUP * k * LANES).enumerate();
        tasks.extend(groups.map(|(group, data)| (matrix, group * GROUP, data)));
    }
    threads.run(tasks, |(matrix, first, data)| {
        let rows = (n - first * LANES).min(GROUP * LANES).min((panels - first) * LANES);
        let mut values = vec![0.0; rows * k];
        weight.decode(matrix, first * LANES, rows, &mut values);
        for (panel, data) in data.chunks_mut(k * LANES).enumerate() {
            for (i, lanes) in data.chunks_mut(LANES).enumerate() {
                for (lane, to) in lanes.iter_mut().enumerate() {
                    let row = panel * LANES + lane;
                    let value = if row < rows { values[row * k + i] } else { 0.0 };
                    *to = W::from_f32(value);
                }
            }
        }
    });
}

/// A packed weight as an operator reads it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packed<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> Packed<'a> {
    pub(crate) fn of(access: &'a Access<'_>, weight: &'a Weight<Cpu>) -> Self {
        match weight.data().dtype() {
            DType::BF16 => Packed::Bf16(access.slice(weight.data())),
            _ => Packed::F32(access.slice(weight.data())),
        }
    }

    /// `out = x · Wᵀ` for matrix `matrix` of `[n, k]` with n outputs of which `out` takes those from
    /// `first` (a multiple of [`LANES`]) on.
    pub(crate) fn product(
        self,
        level: Level,
        at: MatrixPart,
        x: Rows<'_, f32>,
        out: RowsMut<'_, f32>,
    ) {
        match self {
            Packed::F32(data) => at.product(level, data, x, out),
            Packed::Bf16(data) => at.product(level, data, x, out),
        }
    }
}

/// Which outputs of which matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixPart {
    pub(crate) matrix: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// First output, a multiple of [`LANES`].
    pub(crate) first: usize,
}

impl MatrixPart {
    fn product<W: Widen>(self, level: Level, data: &[W], x: Rows<'_, f32>, out: RowsMut<'_, f32>) {
        let start = self.matrix * matrix_elements(self.n, self.k) + self.first * self.k;
        let panels = Panels { data: &data[start..], k: self.k, lanes: LANES };
        simd::product(level, x, panels, out);
    }
}

/// The whole product of a dense weight, its outputs shared among threads.
pub(crate) fn product(
    device: &Cpu,
    access: &Access<'_>,
    weight: &Weight<Cpu>,
    x: Rows<'_, f32>,
    out: RowsMut<'_, f32>,
) {
    let packed = Packed::of(access, weight);
    let (n, k) = (weight.n(), weight.k());
    let parts = device.0.threads.parts(x.len() * n * k);
    let mut left = out;
    let mut tasks = Vec::with_capacity(parts);
    for range in ranges(n, parts, LANES) {
        let (part, rest) = left.split_columns(range.len());
        left = rest;
        tasks.push((range.start, part));
    }
    device.0.threads.run(tasks, |(first, out)| {
        packed.product(device.0.level, MatrixPart { matrix: 0, n, k, first }, x, out);
    });
}
