//! Attention: which kernel, and its launch. The sizes are those of the device source
//! (`attention_split.cuh`, `attention_flash.cuh`, `attention_group.cuh`).

use super::blocks;
use crate::driver::{Geometry, Limits};

/// Most rows whose positions are split; more rows go by tiles of rows.
const SPLIT_ROWS: usize = 64;
/// Query heads of one product of the splitting kernel, its warps, and its stages.
const SPLIT_HEADS: usize = 16;
const SPLIT_WARPS: usize = 4;
const SPLIT_STAGES: usize = 3;
/// Most blocks of a cluster.
pub(crate) const MOST_SPLITS: usize = 16;
/// Most rows whose positions could be split: those of a grid.
pub(crate) const MOST_ROWS: usize = 65535;
/// (row, query head) pairs of a block of the tiles by single warps.
const FLASH_PAIRS: usize = 128;

/// One call, as far as the bucket knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    /// Rows of the bucket.
    pub(crate) tokens: usize,
    /// Sequences of the bucket.
    pub(crate) sequences: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// The wider of the two head widths.
    pub(crate) dim: usize,
    /// Most positions that a row sees.
    pub(crate) span: usize,
    pub(crate) operands: Operands,
}

/// What tensor cores want of the operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operands {
    /// They have it not: f32, heads that are no multiple of 8, or rows that start anywhere.
    Exact,
    /// f16 or bf16 heads of whole 16 bytes.
    Half,
}

/// The width that a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    W64,
    W128,
    W256,
}

impl Width {
    /// The narrowest that holds a head.
    fn of(dim: usize) -> Self {
        match dim {
            0..=64 => Width::W64,
            65..=128 => Width::W128,
            _ => Width::W256,
        }
    }

    /// Positions of a tile of the splitting kernel.
    fn split_tile(self) -> usize {
        if self == Width::W256 { 16 } else { 32 }
    }

    /// The form for warpgroups; `None`: such heads fill too many registers.
    fn group(self) -> Option<GroupWidth> {
        match self {
            Width::W64 => Some(GroupWidth::W64),
            Width::W128 => Some(GroupWidth::W128),
            Width::W256 => None,
        }
    }

    fn elements(self) -> usize {
        match self {
            Width::W64 => 64,
            Width::W128 => 128,
            Width::W256 => 256,
        }
    }
}

/// The width that a kernel for warpgroups is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupWidth {
    W64,
    W128,
}

impl GroupWidth {
    /// (row, query head) pairs of a block.
    fn pairs(self) -> usize {
        match self {
            GroupWidth::W64 => 128,
            GroupWidth::W128 => 192,
        }
    }

    /// Bytes of keys, values and queries of a block; they begin at a multiple of 1024.
    fn shared(self) -> usize {
        1024 + match self {
            GroupWidth::W64 => 80 << 10,
            GroupWidth::W128 => 144 << 10,
        }
    }
}

/// The kernel of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// A block for each row and head, in f32.
    Exact(Geometry),
    /// Each row's positions split over warps and blocks.
    Split(Width, Geometry),
    /// Tiles of rows, by products of warpgroups.
    Group(GroupWidth, Geometry),
    /// Tiles of rows, by products of warps.
    Flash(Width, Geometry),
}

/// Chooses.
pub(crate) fn path(call: &Call, limits: Limits) -> Path {
    let few = if call.tokens <= SPLIT_ROWS { split(call, None, limits) } else { None };
    few.or_else(|| group(call, limits))
        .or_else(|| flash(call, limits))
        .unwrap_or_else(|| exact(call))
}

fn exact(call: &Call) -> Path {
    let grid = [blocks(call.tokens, 1), blocks(call.heads, 1), 1];
    Path::Exact(Geometry::new(grid).overlapped())
}

/// Positions split over at most `most` blocks, by default a block for each processor; `None`: the kernel
/// does not take the call.
pub(crate) fn split(call: &Call, most: Option<usize>, limits: Limits) -> Option<Path> {
    let width = Width::of(call.dim);
    let shared = SPLIT_WARPS * SPLIT_STAGES * 2 * width.split_tile() * width.elements() * 2;
    if call.operands == Operands::Exact || call.tokens > MOST_ROWS || shared > limits.shared {
        return None;
    }
    let group = call.heads / call.kv_heads;
    let across = call.kv_heads * group.div_ceil(SPLIT_HEADS);
    let useful = call.span.div_ceil(width.split_tile()) / SPLIT_WARPS;
    // A block for each processor, with tiles for all of its warps: two for each took longer. Blocks
    // that share a row are a cluster.
    let room = limits.processors / (call.tokens.max(1) * across);
    let room = if limits.overlap { most.unwrap_or(room) } else { 1 };
    let splits = room.min(useful).clamp(1, MOST_SPLITS);
    let grid = [blocks(splits, 1), blocks(across, 1), blocks(call.tokens, 1)];
    let geometry = Geometry::new(grid).shared(shared as u32).overlapped();
    Some(Path::Split(width, Geometry { cluster: splits as u32, ..geometry }))
}

/// Tiles of rows of a call, of one KV head, at most: each sequence has one that is not full.
fn tiles(call: &Call, pairs: usize) -> usize {
    let rows = pairs / (call.heads / call.kv_heads).min(pairs);
    call.tokens / rows + call.sequences.min(call.tokens)
}

/// Tiles of rows by products of warpgroups; `None`: the kernel does not take the call.
pub(crate) fn group(call: &Call, limits: Limits) -> Option<Path> {
    let width = Width::of(call.dim).group()?;
    if call.operands == Operands::Exact || !limits.groups || width.shared() > limits.shared {
        return None;
    }
    // One dimension, so that the tiles that see most, of all heads, begin first.
    let across = call.kv_heads * (call.heads / call.kv_heads).div_ceil(width.pairs());
    let grid = [blocks(tiles(call, width.pairs()) * across, 1), 1, 1];
    let geometry = Geometry::new(grid).shared(width.shared() as u32).overlapped();
    Some(Path::Group(width, geometry))
}

/// Tiles of rows by products of warps; `None`: the kernel does not take the call.
pub(crate) fn flash(call: &Call, limits: Limits) -> Option<Path> {
    if call.operands == Operands::Exact {
        return None;
    }
    let width = Width::of(call.dim);
    let dim = width.elements();
    let group = call.heads / call.kv_heads;
    let tile = if width == Width::W256 { 32 } else { 64 };
    let tiles = tiles(call, FLASH_PAIRS);
    let grid = [blocks(tiles, 1), blocks(call.kv_heads * group.div_ceil(FLASH_PAIRS), 1), 1];
    // Three stages of keys and values, and the queries.
    let shared = (3 * 2 * tile + FLASH_PAIRS) * dim * 2;
    let geometry = Geometry::new(grid).shared(shared as u32).overlapped();
    (shared <= limits.shared).then_some(Path::Flash(width, geometry))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits { processors: 132, shared: 227 << 10, overlap: true, groups: true };

    fn call(tokens: usize, sequences: usize, dim: usize) -> Call {
        Call {
            tokens,
            sequences,
            heads: 64,
            kv_heads: 8,
            dim,
            span: 131072,
            operands: Operands::Half,
        }
    }

    #[test]
    fn few_rows_are_split_over_the_device() {
        let Path::Split(Width::W64, one) = path(&call(1, 1, 64), H200) else { panic!("one row") };
        assert_eq!((one.grid, one.cluster), ([16, 8, 1], 16));
        let Path::Split(_, many) = path(&call(32, 32, 64), H200) else { panic!("32 rows") };
        assert_eq!((many.grid, many.cluster), ([1, 8, 32], 1));
        let window = Call { span: 128, ..call(1, 1, 64) };
        let Path::Split(_, window) = path(&window, H200) else { panic!("a window") };
        assert_eq!(window.cluster, 1);
        let older = Limits { overlap: false, ..H200 };
        let Path::Split(_, older) = path(&call(1, 1, 64), older) else { panic!("no clusters") };
        assert_eq!(older.cluster, 1);
    }

    #[test]
    fn many_rows_go_by_tiles_and_other_operands_one_by_one() {
        let older = Limits { groups: false, ..H200 };
        let Path::Flash(Width::W64, flash) = path(&call(1600, 3, 64), older) else {
            panic!("many")
        };
        assert_eq!((flash.grid, flash.shared), ([103, 8, 1], 3 * 16384 + 16384));
        let Path::Group(GroupWidth::W64, group) = path(&call(1600, 3, 64), H200) else {
            panic!("warpgroups")
        };
        assert_eq!((group.grid, group.shared), ([103 * 8, 1, 1], 81 << 10));
        let Path::Group(GroupWidth::W128, group) = path(&call(65, 9, 96), H200) else {
            panic!("warpgroups")
        };
        assert_eq!((group.grid, group.shared), ([(65 / 24 + 9) * 8, 1, 1], 145 << 10));
        let wide = path(&call(1600, 3, 200), H200);
        assert!(matches!(wide, Path::Flash(Width::W256, _)), "{wide:?}");
        let exact = Call { operands: Operands::Exact, ..call(3, 1, 64) };
        assert!(matches!(path(&exact, H200), Path::Exact(g) if g.grid == [3, 64, 1]));
    }

    #[test]
    fn every_form_fits_the_device() {
        for tokens in [1, 16, 64, 65, 4096] {
            for dim in [8, 64, 96, 128, 256] {
                for shared in [48 << 10, 99 << 10, 163 << 10, 227 << 10] {
                    let limits = Limits { shared, ..H200 };
                    let (Path::Split(_, form)
                    | Path::Group(_, form)
                    | Path::Flash(_, form)
                    | Path::Exact(form)) = path(&call(tokens, tokens.min(9), dim), limits);
                    assert!(form.shared as usize <= shared, "{tokens} {dim} {form:?}");
                    assert!(form.grid.iter().all(|&n| n > 0) && form.grid[2] <= 65535);
                }
            }
        }
    }
}
