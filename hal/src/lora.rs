//! Adapters on a device: rank classes, slots, blocks in one arena, and the table that kernels read.
//!
//! An adapter's factors lie in an arena as *blocks*: A or B of one (layer, projection slice,
//! expert) at its rank class. A *table* of rows, data like any other, says for each (slot, slice,
//! expert) where its blocks are. Captured graphs hold only the two base addresses, so adapters come
//! and go under them: first the blocks are copied, then, in stream order, the slot's rows.

use std::sync::Arc;

use crate::backend::LoraOps;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Index, Tensor};
use crate::transfer::{Returned, Sent, Span};

/// Offsets in the arena count in this many bytes.
pub const ARENA_UNIT: usize = 256;

/// A rank rounded up to what kernels are made for; the surplus rows are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankClass(u16);

impl RankClass {
    /// The classes that devices choose from, ascending: no rank above 8 is padded to twice its size,
    /// and they are few enough that kernels can be made for each.
    pub const ALL: &'static [RankClass] = &[
        RankClass(8),
        RankClass(16),
        RankClass(32),
        RankClass(48),
        RankClass(64),
        RankClass(96),
        RankClass(128),
        RankClass(192),
        RankClass(256),
    ];

    /// A class; which classes a device has is in [`crate::Caps::rank_classes`].
    pub const fn new(rank: u16) -> Self {
        RankClass(rank)
    }

    /// The rank that blocks of this class have.
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

/// The number of one adapter version while it is on the device. The host says `Option<Slot>`; the
/// field's −1 for "no adapter" exists in device bytes only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// Slot number `index`.
    pub const fn new(index: u16) -> Self {
        Slot(index)
    }

    /// Its number.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which of a delta's two factors: scale · (x·Aᵀ)·Bᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Factor {
    /// `[rank, k]`, the shrink.
    A,
    /// `[n, rank]`, the expand.
    B,
}

/// The shape of one block; with a rank class it decides the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoraShape {
    /// Which factor.
    pub factor: Factor,
    /// The dimension beside the rank: k for A, n for B.
    pub width: usize,
    /// Element type, the compute type.
    pub dtype: DType,
}

/// One factor in host memory, on its way to [`LoraOps::pack_lora`].
#[derive(Debug, Clone, Copy)]
pub struct HostFactor<'a> {
    /// Shape of the block.
    pub shape: LoraShape,
    /// Class of the block, at least `rank`.
    pub class: RankClass,
    /// Rank of the data.
    pub rank: usize,
    /// `[rank, width]` for A, `[width, rank]` for B, row-major.
    pub data: &'a [f32],
}

impl HostFactor<'_> {
    /// Element (`r`, `w`), rank before width; zero beyond the rank.
    #[inline]
    pub fn at(&self, r: usize, w: usize) -> f32 {
        if r >= self.rank {
            return 0.0;
        }
        match self.shape.factor {
            Factor::A => self.data[r * self.shape.width + w],
            Factor::B => self.data[w * self.rank + r],
        }
    }
}

/// One projection slice of one layer: the finest cut that any adapter file uses (q, k, v; gate, up).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceMeta {
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// 1 for a dense projection, else the number of experts.
    pub experts: usize,
}

/// Names a slice: its first row within a slot; expert e has the row `first + e`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceId(u32);

impl SliceId {
    /// The first row within a slot.
    pub fn row(self) -> usize {
        self.0 as usize
    }
}

/// All slices of a model; the same for every slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoraLayout {
    slices: Vec<(SliceId, SliceMeta)>,
    rows: usize,
}

impl LoraLayout {
    /// Adds a slice behind the ones there are.
    pub fn push(&mut self, meta: SliceMeta) -> SliceId {
        let id = SliceId(u32::try_from(self.rows).expect("a table of 4 G rows has no memory"));
        self.slices.push((id, meta));
        self.rows += meta.experts;
        id
    }

    /// Rows of one slot.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The slices, in row order.
    pub fn slices(&self) -> &[(SliceId, SliceMeta)] {
        &self.slices
    }

    /// What `id` names.
    pub fn meta(&self, id: SliceId) -> Option<&SliceMeta> {
        let found = self.slices.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(&self.slices[found].1)
    }

    /// The slice that owns row `row` of a slot.
    fn owner(&self, row: usize) -> Option<&SliceMeta> {
        let after = self.slices.partition_point(|(id, _)| id.row() <= row);
        let (_, meta) = self.slices.get(after.checked_sub(1)?)?;
        (row < self.rows).then_some(meta)
    }
}

/// One row of the table, as kernels read it. Class 0: this slot leaves the slice alone.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LoraRow {
    /// Block A in the arena, in units of [`ARENA_UNIT`].
    pub a: u32,
    /// Block B in the arena, in units of [`ARENA_UNIT`].
    pub b: u32,
    /// Rank class of both.
    pub class: u32,
    /// Multiplies the f32 intermediate; never folded into a block.
    pub scale: f32,
}

const _: () = assert!(size_of::<LoraRow>() == 16);

/// The arena and the table of all slots.
#[derive(Debug)]
pub struct LoraTable<D: Device> {
    arena: Tensor<D>,
    rows: Index<D>,
    layout: Arc<LoraLayout>,
    slots: usize,
    dtype: DType,
}

impl<D: Device> LoraTable<D> {
    /// Bytes of the rows of `slots` slots.
    pub fn row_bytes(layout: &LoraLayout, slots: usize) -> usize {
        slots * layout.rows() * size_of::<LoraRow>()
    }

    /// A table over freshly reserved memory, in which every row is zero: no slot touches anything.
    ///
    /// `arena` is dense bytes, `rows` dense i32 of [`LoraTable::row_bytes`]; `dtype` is the type of
    /// all blocks.
    ///
    /// # Errors
    /// A shape or type is another.
    pub fn new(
        arena: Tensor<D>,
        rows: Tensor<D>,
        layout: Arc<LoraLayout>,
        slots: usize,
        dtype: DType,
    ) -> Result<Self> {
        let sound = arena.dtype() == DType::U8
            && arena.shape().is_dense()
            && arena.offset().is_multiple_of(ARENA_UNIT)
            && rows.dtype() == DType::I32
            && rows.shape().is_dense()
            && rows.bytes() == Self::row_bytes(&layout, slots)
            && dtype.is_float()
            && slots <= i16::MAX as usize;
        if !sound {
            return Err(Error::invalid(
                "lora table",
                format!("arena {}, rows {}, {slots} slots", arena.shape(), rows.shape()),
            ));
        }
        Ok(LoraTable { arena, rows: Index::words(rows), layout, slots, dtype })
    }

    /// The blocks.
    pub fn arena(&self) -> &Tensor<D> {
        &self.arena
    }

    /// The rows: i32 words of [`LoraRow`], slot-major.
    pub fn rows(&self) -> &Index<D> {
        &self.rows
    }

    /// The slices of every slot.
    pub fn layout(&self) -> &Arc<LoraLayout> {
        &self.layout
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Element type of the blocks.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Copies blocks into the arena. The caller sees to it that no running step reads these bytes:
    /// no visible row points at them.
    ///
    /// # Errors
    /// A span leaves the arena or the buffer.
    pub fn upload_blocks(
        &self,
        device: &D,
        stream: &mut D::Stream,
        host: D::Host,
        spans: &[Span],
    ) -> Sent<D> {
        device.upload(stream, host, spans, &mut self.arena.clone())
    }
}

impl<D: LoraOps> LoraTable<D> {
    /// Makes `rows` the rows of `slot`, by one copy in stream order: an adapter becomes visible, or
    /// (all zero) invisible, between two steps.
    ///
    /// # Errors
    /// A wrong number of rows, a class that the device lacks, or a block that leaves the arena.
    pub fn write_slot(
        &self,
        device: &D,
        stream: &mut D::Stream,
        mut host: D::Host,
        slot: Slot,
        rows: &[LoraRow],
    ) -> Sent<D> {
        if let Err(error) = self.check_rows(device, slot, rows) {
            return Err(Returned { host, error });
        }
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        use crate::device::HostBytes;
        let Some(front) = host.bytes_mut().get_mut(..bytes.len()) else {
            let what = format!("{} bytes of rows in a smaller host buffer", bytes.len());
            return Err(Returned { host, error: Error::invalid("lora rows", what) });
        };
        front.copy_from_slice(bytes);
        let span = Span { from: 0, to: slot.index() * bytes.len(), len: bytes.len() };
        device.upload(stream, host, &[span], &mut self.rows.tensor().clone())
    }

    fn check_rows(&self, device: &D, slot: Slot, rows: &[LoraRow]) -> Result<()> {
        let bad = |what: String| Err(Error::invalid("lora rows", what));
        if slot.index() >= self.slots || rows.len() != self.layout.rows() {
            return bad(format!("{} rows for slot {} of {}", rows.len(), slot.index(), self.slots));
        }
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.class != 0) {
            let Some(meta) = self.layout.owner(index) else {
                return bad(format!("row {index} belongs to no slice"));
            };
            let classes = device.caps().rank_classes;
            let Some(&class) = classes.iter().find(|c| c.get() == row.class as usize) else {
                return bad(format!("row {index} has class {}", row.class));
            };
            for (factor, width, offset) in [(Factor::A, meta.k, row.a), (Factor::B, meta.n, row.b)]
            {
                let shape = LoraShape { factor, width, dtype: self.dtype };
                let end = offset as usize * ARENA_UNIT + device.lora_block(shape, class)?;
                if end > self.arena.bytes() {
                    return bad(format!("row {index}: block {factor:?} ends at {end}"));
                }
            }
            if !row.scale.is_finite() {
                return bad(format!("row {index} has scale {}", row.scale));
            }
        }
        Ok(())
    }
}

/// Which outputs of a projection take which slice's delta: `out_offset + i · out_stride`, i < `len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraSlice {
    /// The slice.
    pub table: SliceId,
    /// Output of its first element.
    pub out_offset: usize,
    /// Outputs from one element to the next (gpt_oss interleaves gate and up: 2).
    pub out_stride: usize,
    /// Elements.
    pub len: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_own_their_rows() {
        let mut layout = LoraLayout::default();
        let q = layout.push(SliceMeta { k: 8, n: 16, experts: 1 });
        let gate = layout.push(SliceMeta { k: 8, n: 4, experts: 3 });
        assert_eq!((q.row(), gate.row(), layout.rows()), (0, 1, 4));
        assert_eq!(layout.owner(3).map(|m| m.n), Some(4));
        assert_eq!(layout.owner(0).map(|m| m.n), Some(16));
        assert_eq!(layout.owner(4), None);
        assert_eq!(layout.meta(gate).map(|m| m.experts), Some(3));
        assert_eq!(layout.meta(SliceId(2)), None, "an expert's row is no slice");
    }

    #[test]
    fn factors_read_as_zero_beyond_their_rank() {
        let shape = LoraShape { factor: Factor::B, width: 2, dtype: DType::F32 };
        let data = [1., 2., 3., 4., 5., 6.];
        let b = HostFactor { shape, class: RankClass::new(8), rank: 3, data: &data };
        assert_eq!([b.at(0, 0), b.at(2, 0), b.at(0, 1), b.at(3, 1)], [1., 3., 4., 0.]);
    }
}
