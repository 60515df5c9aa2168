//! Segments: the tokens of a step sorted by adapter slot, cut into tiles that one kernel block
//! takes. Built on the host once a step; serves every dense projection of every layer.

use crate::device::Device;
use crate::lora::Slot;
use crate::tensor::Index;

/// Some rows of one segment: `perm[first .. first + rows]` use `slot`. As kernels read it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Tile {
    /// The adapter slot.
    pub slot: i32,
    /// First row, an index into the permutation.
    pub first: i32,
    /// Rows; 0 in the surplus tiles of a bucket.
    pub rows: i32,
}

/// The host's result: a permutation of the tokens and the tiles over it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segments {
    /// Token indices sorted by slot, stable; tokens without an adapter last.
    pub perm: Vec<i32>,
    /// Tiles of the tokens that have an adapter.
    pub tiles: Vec<Tile>,
    /// Distinct slots.
    pub segments: usize,
}

impl Segments {
    /// Sorts and cuts. Pure.
    pub fn build(slots: &[Option<Slot>], tile_rows: usize) -> Self {
        let mut perm: Vec<i32> = (0..slots.len() as i32).collect();
        perm.sort_by_key(|&t| slots[t as usize].map_or(usize::MAX, Slot::index));
        let slot_of = |at: usize| slots[perm[at] as usize];
        let (mut tiles, mut segments, mut first) = (Vec::new(), 0, 0);
        while first < perm.len() {
            let Some(slot) = slot_of(first) else { break };
            let end = (first..perm.len()).find(|&i| slot_of(i) != Some(slot)).unwrap_or(perm.len());
            segments += 1;
            for start in (first..end).step_by(tile_rows) {
                tiles.push(Tile {
                    slot: slot.index() as i32,
                    first: start as i32,
                    rows: (end - start).min(tile_rows) as i32,
                });
            }
            first = end;
        }
        Segments { perm, tiles, segments }
    }

    /// Most tiles that `rows` rows in at most `groups` groups can need.
    pub fn bound(rows: usize, groups: usize, tile_rows: usize) -> usize {
        rows / tile_rows + groups.min(rows)
    }
}

/// A step's segments on the device, part of its plan.
#[derive(Debug)]
pub struct SegmentTable<D: Device> {
    pub(crate) slot: Index<D>,
    pub(crate) perm: Index<D>,
    pub(crate) tiles: Index<D>,
    pub(crate) slots: usize,
}

impl<D: Device> SegmentTable<D> {
    /// `[tokens]`: the adapter slot of each row; −1: none.
    pub fn slot(&self) -> &Index<D> {
        &self.slot
    }

    /// `[tokens]`, the permutation.
    pub fn perm(&self) -> &Index<D> {
        &self.perm
    }

    /// The adapter slots that tiles name stay below it.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// `[tiles, 3]`, words of [`Tile`]; surplus tiles have 0 rows.
    pub fn tiles(&self) -> &Index<D> {
        &self.tiles
    }
}

impl<D: Device> Clone for SegmentTable<D> {
    fn clone(&self) -> Self {
        SegmentTable {
            slot: self.slot.clone(),
            perm: self.perm.clone(),
            tiles: self.tiles.clone(),
            slots: self.slots,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(of: &[i32]) -> Vec<Option<Slot>> {
        of.iter().map(|&s| u16::try_from(s).ok().map(Slot::new)).collect()
    }

    #[test]
    fn the_walk_of_the_architecture_page() {
        let built = Segments::build(&slots(&[3, 3, 0, 3, -1, -1, -1, -1]), 16);
        assert_eq!(built.perm, [2, 0, 1, 3, 4, 5, 6, 7]);
        assert_eq!(
            built.tiles,
            [Tile { slot: 0, first: 0, rows: 1 }, Tile { slot: 3, first: 1, rows: 3 }]
        );
        assert_eq!(built.segments, 2);
    }

    #[test]
    fn tiles_cover_each_adapter_row_once_within_the_bound() {
        for seed in 0..200u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = |n: u64| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) % n
            };
            let of: Vec<i32> = (0..next(40)).map(|_| next(5) as i32 - 1).collect();
            let tile_rows = 1 + next(6) as usize;
            let built = Segments::build(&slots(&of), tile_rows);
            let mut seen = vec![0; of.len()];
            for tile in &built.tiles {
                assert!(tile.rows as usize <= tile_rows && tile.rows > 0);
                for at in tile.first..tile.first + tile.rows {
                    let token = built.perm[at as usize] as usize;
                    assert_eq!(of[token], tile.slot);
                    seen[token] += 1;
                }
            }
            assert!(of.iter().zip(&seen).all(|(&slot, &n)| n == i32::from(slot >= 0)));
            assert!(built.tiles.len() <= Segments::bound(of.len(), 4, tile_rows));
        }
    }

    #[test]
    fn no_tokens_and_no_adapters_give_no_tiles() {
        assert_eq!(Segments::build(&[], 4), Segments::default());
        assert!(Segments::build(&slots(&[-1, -1]), 4).tiles.is_empty());
    }
}
