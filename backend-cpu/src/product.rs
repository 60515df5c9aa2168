//! The one product: weights in panels of 16 outputs, packed at load.
//!
//! A matrix `[n, k]` is stored as ⌈n/16⌉ panels, the missing outputs zero, so that one load gives 16
//! outputs their k-th weight. See `simd` for a panel's layout and the order of sums.

use amphora_hal::{
    DType, Error, HostWeight, HostWeightMeta, OpKey, OpKind, Result, Scheme, Weight,
};
use half::bf16;

use crate::Cpu;
use crate::memory::{Access, Rows, RowsMut};
use crate::simd::{self, Level, Panels, Widen, pack_panel, panel_elements};
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
fn matrix_elements<W: Widen>(n: usize, k: usize) -> usize {
    n.div_ceil(LANES) * panel_elements::<W>(k, LANES)
}

pub(crate) fn packed_bytes(meta: &HostWeightMeta) -> Result<usize> {
    let dtype = stored(meta.scheme)?;
    let elements = match dtype {
        DType::BF16 => matrix_elements::<bf16>(meta.n, meta.k),
        _ => matrix_elements::<f32>(meta.n, meta.k),
    };
    Ok(meta.matrices * elements * dtype.size())
}

/// Packs every matrix of `weight` into `out`, all of [`packed_bytes`].
pub(crate) fn pack(weight: &HostWeight<'_>, dtype: DType, out: &mut [u8], threads: &Threads) {
    match dtype {
        DType::BF16 => pack_as::<bf16>(weight, bytemuck::cast_slice_mut(out), threads),
        _ => pack_as::<f32>(weight, bytemuck::cast_slice_mut(out), threads),
    }
}

fn pack_as<W: Widen>(weight: &HostWeight<'_>, out: &mut [W], threads: &Threads) {
    let HostWeightMeta { n, k, .. } = *weight.meta();
    let (panels, panel) = (n.div_ceil(LANES), panel_elements::<W>(k, LANES));
    // Eight panels a task: a transposed file is then read 128 outputs at a stretch.
    const GROUP: usize = 8;
    let mut tasks = Vec::new();
    for (matrix, data) in out.chunks_mut(matrix_elements::<W>(n, k)).enumerate() {
        let groups = data.chunks_mut(GROUP * panel).enumerate();
        tasks.extend(groups.map(|(group, data)| (matrix, group * GROUP, data)));
    }
    threads.run(tasks, |(matrix, first, data)| {
        let rows = (n - first * LANES).min(GROUP * LANES).min((panels - first) * LANES);
        let mut values = vec![0.0; rows * k];
        weight.decode(matrix, first * LANES, rows, &mut values);
        for (at, data) in data.chunks_mut(panel).enumerate() {
            let value = |lane: usize, i: usize| match at * LANES + lane {
                row if row < rows => values[row * k + i],
                _ => 0.0,
            };
            pack_panel((k, LANES), value, |at, value| data[at] = value);
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
    pub(crate) fn product<X: Widen>(
        self,
        level: Level,
        at: MatrixPart,
        x: Rows<'_, X>,
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
    fn product<X: Widen, W: Widen>(
        self,
        level: Level,
        data: &[W],
        x: Rows<'_, X>,
        out: RowsMut<'_, f32>,
    ) {
        let panel = panel_elements::<W>(self.k, LANES);
        let start = self.matrix * matrix_elements::<W>(self.n, self.k) + self.first / LANES * panel;
        let panels = Panels { data: &data[start..], k: self.k, lanes: LANES };
        simd::product(level, x, panels, out);
    }
}

/// Rows below which a product takes as long as reading its weights does.
pub(crate) const ROWS_OF_A_READ: usize = 6;
/// Rows of a thread's part from which cutting rows costs less than packing them twice does.
const ROWS_OF_A_PART: usize = 48;
/// Outputs of a thread's part to which packing rows twice costs little.
const OUTPUTS_OF_A_PART: usize = 512;

/// The whole product of a dense weight, shared among threads by rows or by outputs.
pub(crate) fn product<X: Widen>(
    device: &Cpu,
    access: &Access<'_>,
    weight: &Weight<Cpu>,
    x: Rows<'_, X>,
    out: RowsMut<'_, f32>,
) {
    let packed = Packed::of(access, weight);
    let (n, k, rows) = (weight.n(), weight.k(), x.len());
    let parts = device.0.threads.parts(rows.max(ROWS_OF_A_READ) * n * k);
    let mut left = out;
    let mut tasks = Vec::with_capacity(parts);
    if n < parts * OUTPUTS_OF_A_PART && rows >= parts * ROWS_OF_A_PART {
        for range in ranges(rows, parts, 1) {
            let (part, rest) = left.split_rows(range.len());
            left = rest;
            tasks.push((0, x.part(range), part));
        }
    } else {
        for range in ranges(n, parts, LANES) {
            let (part, rest) = left.split_columns(range.len());
            left = rest;
            tasks.push((range.start, x, part));
        }
    }
    device.0.threads.run(tasks, |(first, x, out)| {
        packed.product(device.0.level, MatrixPart { matrix: 0, n, k, first }, x, out);
    });
}
