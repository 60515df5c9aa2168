//! Dense products on tensor cores: which kernel, and its launch. The sizes are those of the device
//! source (`linear_stream.cuh`, `linear_tile.cuh`, `dense_shrink.cuh`).

mod cluster;
mod group;
mod library;

use amphora_cuda_kernels::args::{MAX_RANK, MAX_SLICES};

use super::blocks;
use crate::driver::cublaslt::Shape;
use crate::driver::{Geometry, Limits};
use cluster::cluster_parts;
pub(crate) use cluster::{
    CLUSTER_BOX, CLUSTER_PARTS, CLUSTER_ROWS, Ring, cluster, cluster_geometry, cluster_ring,
    cluster_shares_factors, cluster_takes,
};
pub(crate) use group::{GroupShrink, GroupTile, SHRINK_BOX, goes_to_groups, group, shrink_group};
use library::shared_by_some;
pub(crate) use library::{
    Library, goes_to_library, library_fits, library_takes, may_go_to_library, sums_pieces,
};

/// Rows that the streaming kernels take.
pub(crate) const STREAM_ROWS: usize = 16;
/// Bytes of the shrunk rows that a cluster's own blocks make, for 64 rows and the most parts: two halves
/// (`dense_shrunk.cuh`).
pub(crate) const SHRUNK_BYTES: usize = 2 * CLUSTER_ROWS * CLUSTER_PARTS * MAX_SLICES * MAX_RANK * 4;
/// Elements of k that they read at a time, and the warps that share k.
const STREAM_LINE: usize = 64;
const STREAM_WARPS: usize = 8;
/// What such a kernel declares for itself, at most.
const STREAM_OWN: usize = 10 << 10;

/// A streaming kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// At most eight rows.
    Eight,
    /// At most sixteen.
    Sixteen,
}

impl Stream {
    fn of(tokens: usize) -> Self {
        if tokens <= 8 { Stream::Eight } else { Stream::Sixteen }
    }

    /// The rings of the warps, of stages of 16 lines; the partial sums, a row of x at a pitch of 20; x, at
    /// a pitch of half a line more than it is wide.
    fn shared(self, tokens: usize, k: usize) -> usize {
        let (stages, buffers, groups) = match self {
            Stream::Eight => (6, 3, 1),
            Stream::Sixteen => (4, 2, 2),
        };
        let rings = STREAM_WARPS * stages * 16 * STREAM_LINE * 2;
        let sums = buffers * STREAM_WARPS * groups * 8 * 20 * 4;
        rings + sums + tokens * (k.div_ceil(STREAM_LINE) * STREAM_LINE * 2 + 64)
    }
}

/// A kernel that walks k in stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    /// 64 × 32 outputs a block.
    Narrow,
    /// 128 × 128.
    Wide,
}

/// Sizes of a tile's blocks, and what its speed is estimated from.
struct Form {
    rows: usize,
    cols: usize,
    stages: usize,
    /// Blocks that a processor holds.
    together: usize,
    /// Of a step of 64 elements of k where all processors work, measured on an H200, in nanoseconds.
    step: usize,
    /// Of a block beside its steps.
    fixed: usize,
}

/// Elements of k in a step.
const DEPTH: usize = 64;
/// Most parts that share k: with that of the deltas, a cluster that every device takes.
pub(crate) const MOST_PARTS: usize = 7;
/// Least steps of a part.
const LEAST_STEPS: usize = 6;
/// Of a cluster's meeting, in nanoseconds.
const MEETING: usize = 4000;
/// Processors of which clusters of more than two blocks leave some unused, as a cluster keeps to one part
/// of the device: eight in ten are counted.
const CLUSTERED: [usize; 2] = [8, 10];

impl Tile {
    fn form(self, limits: Limits) -> Form {
        match self {
            Tile::Narrow => {
                Form { rows: 64, cols: 32, stages: 4, together: 3, step: 330, fixed: 3000 }
            }
            // Warp-group products leave room for more stages.
            Tile::Wide => {
                let stages = if limits.groups { 6 } else { 4 };
                Form { rows: 128, cols: 128, stages, together: 1, step: 550, fixed: 3000 }
            }
        }
    }

    /// The stages, of 128 bytes a row, and room to begin them at a multiple of 1024.
    fn shared(self, limits: Limits) -> usize {
        let form = self.form(limits);
        form.stages * (form.rows + form.cols) * 128 + 1024
    }

    /// What the kernel declares for itself, at most.
    fn own_shared(self) -> usize {
        if self == Tile::Narrow { 10 << 10 } else { 19 << 10 }
    }

    /// Shared memory of a block, what its kernel declares included.
    pub(crate) fn all_shared(self, limits: Limits) -> usize {
        self.shared(limits) + self.own_shared()
    }

    /// A launch with `blocks_of_k` blocks for each tile of outputs.
    fn geometry(self, product: &Product, blocks_of_k: usize, limits: Limits) -> Geometry {
        let form = self.form(limits);
        let grid = [
            blocks(blocks_of_k, 1),
            blocks(product.tokens, form.rows),
            blocks(product.n, form.cols),
        ];
        let geometry = Geometry::new(grid).shared(self.shared(limits) as u32).overlapped();
        Geometry { cluster: grid[0], ..geometry }
    }
}

/// What a product's kernel depends on: nothing about adapters, so that the plain product and the one
/// with deltas agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product {
    pub(crate) tokens: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) operands: Operands,
    pub(crate) place: SumsPlace,
}

/// Where a product's sums in f32 may lie, if another kernel makes or finishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SumsPlace {
    /// In workspace.
    Workspace,
    /// In the outputs, which are f32 and dense.
    Outputs,
}

/// What the operands of a product are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operands {
    /// f32, or of two types.
    Exact,
    /// Both f16 or both bf16.
    Half,
    /// The same, and every row starts at a multiple of 16 bytes.
    HalfAligned,
}

/// The kernel of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// Fused multiply-adds in f32, for every type.
    Exact,
    /// Few rows: the weight is streamed, x lies in shared memory, the deltas are made on the way.
    Stream(Stream, Geometry),
    /// Up to 64 rows on Hopper: tensor maps bring what warp groups multiply, and a cluster of so many blocks
    /// shares k.
    Cluster(usize),
    /// Many rows on Hopper: warp groups multiply what tensor maps bring, bias and deltas are added on the way.
    Group(GroupTile),
    /// Blocks of outputs, whose k is shared by so many blocks.
    Tiles(Tile, usize),
    /// The same in another way than the heuristic has them.
    Tiling(Tiling),
    /// Sums by the vendor's library, finished by a kernel.
    Library(Shape),
}

/// How tiles are made, as tuning data says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    pub(crate) tile: Tile,
    /// Blocks that share k.
    pub(crate) parts: usize,
    /// Neighbouring column tiles whose blocks follow each other.
    pub(crate) group: usize,
    /// Whether k is whole steps, so that nothing is masked along it.
    pub(crate) even_k: bool,
    pub(crate) sums: Sums,
}

/// Where the sums of a tile meet their deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sums {
    /// In the tile, as further steps of k.
    Inside,
    /// Behind it: the tile leaves sums in f32, and another kernel finishes them.
    Apart,
    /// The same, and the parts add theirs as they come.
    Atomic,
}

impl Tiling {
    /// The path; `None`: the kernels do not take the product.
    pub(crate) fn path(self, product: &Product, limits: Limits) -> Option<Path> {
        let Tiling { tile, parts, group, even_k, sums } = self;
        let plain = tiled(product, tile, parts, limits)?;
        let whole = product.operands == Operands::HalfAligned && product.k.is_multiple_of(DEPTH);
        let apart = sums != Sums::Inside;
        if (even_k && !whole) || (apart && !library_takes(product.n)) {
            return None;
        }
        let usual = group == 1 && !even_k && !apart;
        Some(if usual { plain } else { Path::Tiling(self) })
    }
}

/// The launch of zeros in front of parts that add their sums as they come.
pub(crate) fn clear(product: &Product, limits: Limits) -> Geometry {
    let fours = product.tokens * product.n / 4;
    let grid = fours.div_ceil(128).min(8 * limits.processors);
    Geometry::new([blocks(grid, 1), 1, 1]).overlapped()
}

/// The launch that finishes the library's sums: 64 × 128 outputs a block.
pub(crate) fn finish(product: &Product, deltas: Deltas) -> Geometry {
    let grid = [1, blocks(product.tokens, 64), blocks(product.n, 128)];
    let stages = match deltas {
        Deltas::No => 0,
        Deltas::Yes => 2 * (64 + 128) * 128 + 1024,
    };
    Geometry::new(grid).shared(stages).overlapped()
}

/// Whether a product has deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deltas {
    No,
    Yes,
}

/// Chooses.
pub(crate) fn path(product: &Product, limits: Limits) -> Path {
    if product.operands == Operands::Exact {
        return Path::Exact;
    }
    if let Some(path) = stream(product, limits) {
        return path;
    }
    if let Some(path) = cluster_parts(product, limits).and_then(|n| cluster(product, n, limits)) {
        return path;
    }
    let some = shared_by_some(product, limits);
    let (tile, parts) = some.unwrap_or_else(|| tiles(product, limits));
    Path::Tiles(tile, parts)
}

/// The stream; `None`: it does not take the product. All blocks run at once, and each has outputs.
pub(crate) fn stream(product: &Product, limits: Limits) -> Option<Path> {
    let &Product { tokens, n, k, operands, .. } = product;
    let fits = operands == Operands::HalfAligned
        && tokens <= STREAM_ROWS
        && stream_bytes(tokens, k) <= limits.shared;
    let grid = if tokens == 0 { 0 } else { n.min(limits.processors) };
    let geometry = Geometry::new([blocks(grid, 1), 1, 1])
        .shared((stream_bytes(tokens, k) - STREAM_OWN) as u32)
        .overlapped();
    fits.then_some(Path::Stream(Stream::of(tokens), geometry))
}

/// Shared memory of a block of the stream.
pub(crate) fn stream_bytes(tokens: usize, k: usize) -> usize {
    STREAM_OWN + Stream::of(tokens).shared(tokens, k)
}

/// What a streaming kernel's launch leaves of a block's shared memory: room for rows of B.
pub(crate) fn stream_room(geometry: Geometry, limits: Limits) -> usize {
    limits.shared.saturating_sub(geometry.shared as usize + STREAM_OWN) / 128 * 128
}

/// Tiles with so many parts of k; `None`: they do not take the product.
pub(crate) fn tiled(product: &Product, tile: Tile, parts: usize, limits: Limits) -> Option<Path> {
    let steps = product.k.div_ceil(DEPTH).max(1);
    let fits = product.operands != Operands::Exact
        && tile.all_shared(limits) <= limits.shared
        && parts <= steps.min(MOST_PARTS)
        && (limits.overlap || parts == 1);
    fits.then_some(Path::Tiles(tile, parts))
}

/// The launch of a product by tiles. Where parts share k, the deltas are one more.
pub(crate) fn tiles_geometry(
    product: &Product,
    tile: Tile,
    parts: usize,
    deltas: Deltas,
    limits: Limits,
) -> Geometry {
    let more = usize::from(parts > 1 && deltas == Deltas::Yes);
    tile.geometry(product, parts + more, limits)
}

/// The tile and the number of parts that should take the least time.
fn tiles(product: &Product, limits: Limits) -> (Tile, usize) {
    let steps = product.k.div_ceil(DEPTH).max(1);
    let most = if limits.overlap { (steps / LEAST_STEPS).clamp(1, MOST_PARTS) } else { 1 };
    let fits = |tile: Tile| tile.all_shared(limits) <= limits.shared;
    let time = |tile: Tile, parts: usize| {
        let form = tile.form(limits);
        let count = product.tokens.div_ceil(form.rows) * product.n.div_ceil(form.cols) * parts;
        let [most, of] = if parts > 2 { CLUSTERED } else { [1, 1] };
        let waves = count.div_ceil(limits.processors * form.together * most / of).max(1);
        let meeting = if parts > 1 { MEETING } else { 0 };
        waves * (steps.div_ceil(parts) * form.step + form.fixed) + meeting
    };
    [Tile::Narrow, Tile::Wide]
        .into_iter()
        .filter(|&tile| tile == Tile::Narrow || fits(tile))
        .flat_map(|tile| (1..=most).map(move |parts| (tile, parts)))
        .min_by_key(|&(tile, parts)| time(tile, parts))
        .unwrap_or((Tile::Narrow, 1))
}

/// The shrink of a product's deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shrink {
    pub(crate) geometry: Geometry,
    /// Rows of A that a block takes at a time.
    pub(crate) rank_rows: usize,
}

/// Tiles of segments that are few; and inputs for each tile of a slice from which more are few as well:
/// what a block reads of A by itself then takes longer than further blocks do.
const SHRINK_FEW: usize = 28;
const SHRINK_DEPTH: usize = 42;

/// Few tiles share the rows of A among blocks; many read x once for 32 of them.
pub(crate) fn shrink(tiles: usize, slices: usize, k: usize) -> Shrink {
    let few = tiles <= SHRINK_FEW || tiles * slices * SHRINK_DEPTH <= k;
    let (rank_rows, parts) = if few { (8, 4) } else { (32, 1) };
    shrink_of(tiles, slices, [rank_rows, parts])
}

/// The same with given rows of A of a block, 8 or 32, and blocks that share the rows.
pub(crate) fn shrink_of(tiles: usize, slices: usize, [rank_rows, parts]: [usize; 2]) -> Shrink {
    let parts = blocks(parts, 1);
    let grid = [blocks(tiles, 1), blocks(slices, 1), parts];
    Shrink { geometry: Geometry::new(grid).overlapped(), rank_rows }
}

/// Neighbouring tiles of a block of the kernel for many rows, and blocks of the other that a processor
/// holds: only where those would not run all at once is it faster.
const SHRINK_TILES: usize = 3;
const SHRINK_HELD: usize = 2;

impl Shrink {
    /// Its launch by the kernel for many rows, and the neighbouring tiles that a block takes. `None`: the
    /// other kernel's, of a tile a block.
    pub(crate) fn many(self, limits: Limits) -> Option<(Geometry, usize)> {
        let [tiles, slices, parts] = self.geometry.grid;
        let all = tiles as usize * (slices * parts) as usize;
        let grid = [blocks(tiles as usize, SHRINK_TILES), slices, parts];
        let many = self.rank_rows == 32 && all > SHRINK_HELD * limits.processors;
        many.then(|| (Geometry::new(grid).overlapped(), SHRINK_TILES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const H200: Limits =
        Limits { processors: 132, shared: 227 << 10, overlap: true, groups: true };

    pub(super) fn product(tokens: usize, n: usize, k: usize) -> Product {
        let operands = Operands::HalfAligned;
        Product { tokens, n, k, operands, place: SumsPlace::Workspace }
    }

    #[test]
    fn few_rows_stream_the_weight_with_a_block_for_each_processor() {
        let stream = |product: &Product| match path(product, H200) {
            Path::Stream(stream, geometry) => (stream, geometry.grid[0], geometry.shared as usize),
            other => panic!("{other:?}"),
        };
        let one = stream(&product(1, 5120, 2880));
        assert_eq!(one, (Stream::Eight, 132, 8 * 6 * 2048 + 3 * 8 * 640 + 5760 + 64));
        let all = stream(&product(16, 2880, 4096));
        assert_eq!(all, (Stream::Sixteen, 132, 8 * 4 * 2048 + 2 * 8 * 1280 + 16 * (8192 + 64)));
        assert_eq!(stream(&product(1, 20, 64)).1, 20, "no block is without an output");
    }

    #[test]
    fn rows_of_b_get_what_is_left_of_a_block() {
        let Some(Path::Stream(_, geometry)) = stream(&product(8, 5120, 2880), H200) else {
            panic!("eight rows")
        };
        let room = stream_room(geometry, H200);
        assert!(room >= 8 * 39 * 32 * 2, "eight adapters of rank 32");
        assert!(geometry.shared as usize + room + STREAM_OWN <= H200.shared);
    }

    #[test]
    fn what_does_not_stream_goes_by_tiles() {
        let tile = |product: &Product| match path(product, H200) {
            Path::Tiles(tile, parts) => (tile, parts),
            other => panic!("{other:?}"),
        };
        let odd = Product { operands: Operands::Half, ..product(1, 5, 9) };
        assert_eq!(tile(&odd), (Tile::Narrow, 1));
        let older = Limits { groups: false, ..H200 };
        let few = path(&product(32, 5120, 20480), older);
        assert!(matches!(few, Path::Tiles(_, 2..)), "few rows share k among blocks: {few:?}");
        assert_eq!(tile(&product(1600, 5120, 2880)), (Tile::Wide, 1));
        let exact = Product { operands: Operands::Exact, ..product(1, 5, 9) };
        assert_eq!(path(&exact, H200), Path::Exact);
    }

    #[test]
    fn shrinks_of_few_tiles_share_the_rows_of_a() {
        let of = |tiles, slices, k| {
            let Shrink { geometry, rank_rows } = shrink(tiles, slices, k);
            (geometry.grid, rank_rows)
        };
        assert_eq!(of(24, 3, 2880), ([24, 3, 4], 8));
        assert_eq!(of(32, 3, 2880), ([32, 3, 1], 32));
        let rows = [512, 768, 1024].map(|rows| rows / 16 + 8);
        let eights = |k| rows.map(|tiles| of(tiles, 1, k).1 == 8);
        assert_eq!(eights(2048), [true, false, false]);
        assert_eq!(eights(2880), [true, true, false]);
        assert_eq!(eights(4096), [true, true, true]);
    }

    #[test]
    fn shrinks_of_many_tiles_take_three_of_them_a_block() {
        let many = |tiles, slices| shrink(tiles, slices, 2880).many(H200);
        assert_eq!(many(108, 1), None, "all blocks run at once");
        assert_eq!(many(24, 3), None, "blocks share the rows of A");
        let (geometry, tiles) = many(108, 3).expect("more than run at once");
        assert_eq!((geometry.grid, tiles), ([36, 3, 1], 3));
    }

    #[test]
    fn deltas_are_a_part_of_their_own_where_there_are_parts() {
        let some = product(32, 5120, 2880);
        let grid = |parts, deltas| tiles_geometry(&some, Tile::Narrow, parts, deltas, H200);
        assert_eq!(grid(3, Deltas::No).grid, [3, 1, 160]);
        let with = grid(3, Deltas::Yes);
        assert_eq!((with.grid, with.cluster), ([4, 1, 160], 4));
        assert_eq!(grid(1, Deltas::Yes).grid, [1, 1, 160]);
    }

    #[test]
    fn a_smaller_device_gets_what_fits_it_and_no_clusters() {
        for (shared, groups) in [(163 << 10, false), (99 << 10, false), (227 << 10, true)] {
            let limits = Limits { processors: 84, shared, overlap: groups, groups };
            for (tokens, n) in [(1, 20), (17, 5120), (300, 5120), (5000, 2880)] {
                let product = product(tokens, n, 4096);
                match path(&product, limits) {
                    Path::Tiles(tile, parts) => {
                        let form = tiles_geometry(&product, tile, parts, Deltas::Yes, limits);
                        assert!(form.shared as usize + tile.own_shared() <= shared, "{tile:?}");
                        assert!(groups || form.cluster == 1, "{form:?}");
                        assert!(form.cluster <= 8, "{form:?}");
                    }
                    Path::Stream(_, form) => assert!(form.shared as usize + STREAM_OWN <= shared),
                    Path::Cluster(_) => assert!(groups),
                    other => panic!("{other:?} for tiles or a stream"),
                }
            }
        }
    }
}
