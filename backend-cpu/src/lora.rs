//! Blocks of the adapter arena, and the delta of one adapter on some rows.
//!
//! Block A `[class, k]` is stored as panels of 8 outputs for class 8, else of 16; block B `[n, class]` as
//! ⌈n/16⌉ panels of 16: the panels of `simd::product`.

use amphora_hal::{
    ARENA_UNIT, DType, Error, Factor, HostFactor, LoraRow, LoraShape, LoraSlice, LoraTable, OpKey,
    OpKind, RankClass, Result,
};
use half::bf16;

use crate::memory::{Access, Rows, RowsMut};
use crate::product::LANES;
use crate::scratch::{Scratch, piece};
use crate::simd::{self, Level, Panels, Widen, pack_panel, panel_elements};
use crate::{Cpu, TILE_ROWS};

/// Outputs of one panel of block A.
fn a_lanes(class: usize) -> usize {
    class.min(LANES)
}

fn unsupported(shape: LoraShape, class: RankClass, reason: &'static str) -> Error {
    Error::Unsupported { key: OpKey::new(OpKind::LoraLinear, shape.dtype).class(class), reason }
}

pub(crate) fn block_bytes(shape: LoraShape, class: RankClass) -> Result<usize> {
    if !RankClass::ALL.contains(&class) {
        return Err(unsupported(shape, class, "no such rank class"));
    }
    if !matches!(shape.dtype, DType::F32 | DType::BF16) {
        return Err(unsupported(shape, class, "the CPU keeps adapters as f32 or bf16"));
    }
    let elements = match shape.dtype {
        DType::BF16 => block_elements::<bf16>(shape.factor, shape.width, class.get()),
        _ => block_elements::<f32>(shape.factor, shape.width, class.get()),
    };
    Ok(elements * shape.dtype.size())
}

fn block_elements<T: Widen>(factor: Factor, width: usize, class: usize) -> usize {
    match factor {
        Factor::A => class / a_lanes(class) * panel_elements::<T>(width, a_lanes(class)),
        Factor::B => width.div_ceil(LANES) * panel_elements::<T>(class, LANES),
    }
}

pub(crate) fn pack(factor: &HostFactor<'_>, into: &mut [u8]) -> Result<()> {
    let bytes = block_bytes(factor.shape, factor.class)?;
    let fits = into.len() == bytes
        && factor.rank <= factor.class.get()
        && factor.data.len() == factor.rank * factor.shape.width;
    if !fits {
        return Err(Error::invalid(
            "pack_lora",
            format!("{factor:?} into {} bytes, expected {bytes}", into.len()),
        ));
    }
    match factor.shape.dtype {
        DType::BF16 => pack_as::<bf16>(factor, into),
        _ => pack_as::<f32>(factor, into),
    }
    Ok(())
}

fn pack_as<T: Widen>(factor: &HostFactor<'_>, into: &mut [u8]) {
    let (class, width) = (factor.class.get(), factor.shape.width);
    let (outputs, k, lanes) = match factor.shape.factor {
        Factor::A => (class, width, a_lanes(class)),
        Factor::B => (width, class, LANES),
    };
    let panel = panel_elements::<T>(k, lanes);
    for at in 0..outputs.div_ceil(lanes) {
        let value = |lane: usize, i: usize| match (factor.shape.factor, at * lanes + lane) {
            (Factor::A, r) => factor.at(r, i),
            (Factor::B, row) if row < width => factor.at(i, row),
            (Factor::B, _) => 0.0,
        };
        // `into` may lie anywhere in a host page, so elements are written as bytes.
        pack_panel((k, lanes), value, |to, value: T| {
            let to = (at * panel + to) * size_of::<T>();
            into[to..][..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        });
    }
}

/// Deltas of one operator: the arena and rows as it reads them.
#[derive(Clone, Copy)]
pub(crate) struct Deltas<'a> {
    level: Level,
    arena: &'a [u8],
    rows: &'a [LoraRow],
    per_slot: usize,
    dtype: DType,
}

/// Scratch of [`Deltas::add`] for a tile.
pub(crate) fn scratch_bytes(rank: usize, n: usize) -> usize {
    piece::<f32>(TILE_ROWS * rank) + piece::<f32>(TILE_ROWS * n)
}

/// The two scratch pieces: `[rows, rank]` and `[rows, n]`.
#[derive(Debug)]
pub(crate) struct DeltaScratch<'a> {
    shrunk: &'a mut [f32],
    expanded: &'a mut [f32],
}

impl<'a> DeltaScratch<'a> {
    /// For a tile of deltas up to `rank` on slices of up to `n` outputs.
    pub(crate) fn take(scratch: &mut Scratch<'a>, rank: usize, n: usize) -> Self {
        DeltaScratch {
            shrunk: scratch.take(TILE_ROWS * rank),
            expanded: scratch.take(TILE_ROWS * n),
        }
    }
}

impl<'a> Deltas<'a> {
    pub(crate) fn of(device: &Cpu, access: &'a Access<'_>, table: &'a LoraTable<Cpu>) -> Self {
        Deltas {
            level: device.0.level,
            arena: access.slice(table.arena()),
            rows: bytemuck::cast_slice(access.slice::<i32>(table.rows().tensor())),
            per_slot: table.layout().rows(),
            dtype: table.dtype(),
        }
    }

    /// `out[:, slice] += (scale · x·Aᵀ)·Bᵀ` for every slice that the slot touches; `out` has a view
    /// of one row for each row of `x`, a tile's at most.
    pub(crate) fn add<X: Widen>(
        &self,
        at: DeltaOf<'_>,
        x: Rows<'_, X>,
        out: &mut [RowsMut<'_, f32>],
        scratch: &mut DeltaScratch<'_>,
    ) {
        match self.dtype {
            DType::BF16 => self.add_as::<bf16, X>(at, x, out, scratch),
            _ => self.add_as::<f32, X>(at, x, out, scratch),
        }
    }

    fn add_as<T: Widen, X: Widen>(
        &self,
        at: DeltaOf<'_>,
        x: Rows<'_, X>,
        out: &mut [RowsMut<'_, f32>],
        scratch: &mut DeltaScratch<'_>,
    ) {
        // Slices that share a block A (a fused gate and up) shrink once.
        let mut shrunk_from = None;
        for slice in at.slices {
            let row = self.row(at, slice);
            let class = row.class as usize;
            if class == 0 {
                continue;
            }
            let shrunk = &mut scratch.shrunk[..x.len() * class];
            if shrunk_from != Some((row.a, row.class, row.scale.to_bits())) {
                let data = self.block::<T>(row.a, Factor::A, x.width(), class);
                let a = Panels { data, k: x.width(), lanes: a_lanes(class) };
                simd::product(self.level, x, a, RowsMut::of(shrunk, class));
                shrunk.iter_mut().for_each(|value| *value *= row.scale);
                shrunk_from = Some((row.a, row.class, row.scale.to_bits()));
            }
            let data = self.block::<T>(row.b, Factor::B, slice.len, class);
            let b = Panels { data, k: class, lanes: LANES };
            let expanded = &mut scratch.expanded[..x.len() * slice.len];
            let to = RowsMut::of(expanded, slice.len);
            simd::product(self.level, Rows::of(shrunk, class), b, to);
            for (out, delta) in out.iter_mut().zip(expanded.chunks(slice.len)) {
                let to = out.row(0)[slice.out_offset..].iter_mut().step_by(slice.out_stride);
                to.zip(delta).for_each(|(to, delta)| *to += delta);
            }
        }
    }

    /// The largest rank class among these deltas: what scratch must hold.
    pub(crate) fn rank<'s>(&self, of: impl Iterator<Item = DeltaOf<'s>>) -> usize {
        of.flat_map(|at| at.slices.iter().map(move |slice| self.row(at, slice).class as usize))
            .max()
            .unwrap_or(0)
    }

    fn row(&self, at: DeltaOf<'_>, slice: &LoraSlice) -> LoraRow {
        self.rows[at.slot * self.per_slot + slice.table.row() + at.expert]
    }

    fn block<T: Widen>(&self, offset: u32, factor: Factor, width: usize, class: usize) -> &'a [T] {
        let elements = block_elements::<T>(factor, width, class);
        let bytes = &self.arena[offset as usize * ARENA_UNIT..][..elements * size_of::<T>()];
        bytemuck::cast_slice(bytes)
    }
}

/// Whose delta: a slot's on some slices, of an expert (0 for a dense projection).
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaOf<'a> {
    pub(crate) slot: usize,
    pub(crate) expert: usize,
    pub(crate) slices: &'a [LoraSlice],
}
