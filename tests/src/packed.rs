//! Adapters packed for a device: blocks of an arena and the rows that point at them.

use std::sync::Arc;

use amphora_hal::{ARENA_UNIT, Backend, Error, Factor, HostFactor, LoraRow, LoraShape, Result};

use crate::fixtures::Adapters;
use crate::host::POISON;

/// Adapters as bytes of an arena.
#[derive(Debug)]
pub struct PackedAdapters {
    /// All blocks, each at a multiple of the arena's unit, poison between them.
    pub blocks: Vec<u8>,
    /// The row of each (slot, slice, expert).
    pub rows: Vec<((usize, usize, usize), LoraRow)>,
}

impl PackedAdapters {
    /// Packs every factor; shared ones once.
    ///
    /// # Errors
    /// The backend's.
    pub fn new<B: Backend>(device: &B, adapters: &Adapters) -> Result<Self> {
        let mut packed = PackedAdapters { blocks: Vec::new(), rows: Vec::new() };
        packed.gap();
        let mut shared: Vec<(*const Vec<f64>, usize, u32)> = Vec::new();
        for (at, factors) in &adapters.factors {
            let meta = adapters.slices[at.1];
            let rank = factors.rank.max(factors.least_class);
            let class = device.caps().rank_class(rank).ok_or_else(|| Error::Invalid {
                op: "adapters",
                what: format!("no class for rank {rank}"),
            })?;
            let shape = |factor, width| LoraShape { factor, width, dtype: adapters.dtype };
            let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
            let (a_data, b_data) = (narrow(&factors.a), narrow(&factors.b));
            let host = |shape, data| HostFactor { shape, class, rank: factors.rank, data };
            let key = (Arc::as_ptr(&factors.a), class.get());
            let known = shared.iter().find(|(a, c, _)| (*a, *c) == key).map(|(_, _, unit)| *unit);
            let a = match known {
                Some(unit) => unit,
                None => packed.push(device, &host(shape(Factor::A, meta.k), &a_data))?,
            };
            shared.push((key.0, key.1, a));
            let b = packed.push(device, &host(shape(Factor::B, meta.n), &b_data))?;
            let row = LoraRow { a, b, class: class.get() as u32, scale: factors.scale };
            packed.rows.push((*at, row));
        }
        Ok(packed)
    }

    /// All rows of one slot, as the table takes them.
    pub fn slot_rows(&self, adapters: &Adapters, slot: usize) -> Vec<LoraRow> {
        let (layout, ids) = adapters.layout();
        let mut rows = vec![LoraRow::default(); layout.rows()];
        for ((_, slice, expert), row) in self.rows.iter().filter(|((s, _, _), _)| *s == slot) {
            rows[ids[*slice].row() + expert] = *row;
        }
        rows
    }

    fn gap(&mut self) {
        let end = (self.blocks.len() + 1).next_multiple_of(ARENA_UNIT);
        let poison = POISON.iter().copied().cycle();
        self.blocks.extend(poison.take(end - self.blocks.len()));
    }

    fn push<B: Backend>(&mut self, device: &B, factor: &HostFactor<'_>) -> Result<u32> {
        let start = self.blocks.len();
        let bytes = device.lora_block(factor.shape, factor.class)?;
        // Poisoned first: packing has to write the zero rows of a class, too.
        self.blocks.extend(POISON.iter().copied().cycle().take(bytes));
        device.pack_lora(factor, &mut self.blocks[start..])?;
        self.gap();
        Ok((start / ARENA_UNIT) as u32)
    }
}
