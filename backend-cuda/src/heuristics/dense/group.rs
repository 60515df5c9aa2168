//! Dense products of a prompt's rows on Hopper, and the first half of their deltas: forms of tiles, and launches.
//! The sizes are those of `linear_group.cuh` and `dense_shrink_group.cuh`.

use super::library::{LIBRARY_COLS, LIBRARY_MOST_COLS};
use super::{DEPTH, Operands, Path, Product, Ring, SumsPlace};
use crate::driver::{Geometry, Limits};
use crate::heuristics::blocks;

/// The tile of a block: rows and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupTile {
    /// 128 × 192.
    Slim,
    /// 128 × 256.
    Flat,
    /// 256 × 160.
    Square,
    /// 256 × 192.
    Large,
}

/// Sizes of a tile, and its speed.
struct Form {
    rows: usize,
    cols: usize,
    /// Of the ring.
    stages: usize,
    /// Of 1024 outputs in a step of 64 elements of k where all processors work, measured on an H200, in
    /// picoseconds.
    step: usize,
}

/// Blocks of a cluster, which have the same rows and neighbouring outputs.
const PAIR: usize = 2;
/// Least steps of k: the lists of a tile's adapters are made while the tile in front is multiplied.
const LEAST_STEPS: usize = 8;
/// What a block declares for itself, at most.
const OWN: usize = 5 << 10;
/// Of a tile beside its steps, in nanoseconds; and of a flat one's of few turns and so many steps of k, measured on an H200:
/// 1252 × 5120 of 2880 take 64.6 µs where the library and its pass take 66.8, 1600 × 2048 of 4096 44.6 where those
/// take 49.9, and 1152 × 2880 of 4096 45.6 where those take 45.1, but with deltas 56 where those take 74.
const FIXED: usize = 3000;
const FIXED_FLAT: usize = 1500;
const FEW_TURNS: usize = 2;
const FLAT_STEPS: std::ops::RangeInclusive<usize> = 32..=64;
/// Turns, and steps of k, beyond which a product is so long that the device's power limits it, and what it then
/// takes more.
const LONG_TURNS: usize = 8;
const LONG_STEPS: usize = 256;
const LONG: [usize; 2] = [9, 8];

impl GroupTile {
    /// All of them.
    const ALL: [GroupTile; 4] =
        [GroupTile::Slim, GroupTile::Flat, GroupTile::Square, GroupTile::Large];

    fn form(self) -> Form {
        match self {
            GroupTile::Slim => Form { rows: 128, cols: 192, stages: 5, step: 22_500 },
            GroupTile::Flat => Form { rows: 128, cols: 256, stages: 4, step: 21_500 },
            GroupTile::Square => Form { rows: 256, cols: 160, stages: 4, step: 21_200 },
            GroupTile::Large => Form { rows: 256, cols: 192, stages: 3, step: 20_800 },
        }
    }

    /// Elements of k and rows of a box of the weight; and of x, of which each block brings half.
    pub(crate) fn boxes(self) -> [[usize; 2]; 2] {
        let Form { rows, cols, .. } = self.form();
        [[DEPTH, cols], [DEPTH, rows / PAIR]]
    }

    /// Shared memory of a launch, with room to begin at a multiple of 1024.
    fn shared(self) -> usize {
        let Form { rows, cols, stages, .. } = self.form();
        stages * (rows + cols) * DEPTH * 2 + 1024
    }

    /// Pairs of tiles.
    fn pairs(self, product: &Product) -> usize {
        let Form { rows, cols, .. } = self.form();
        product.tokens.div_ceil(rows) * product.n.div_ceil(PAIR * cols)
    }

    /// Turns that clusters take.
    fn turns(self, product: &Product, limits: Limits) -> usize {
        self.pairs(product).div_ceil((limits.processors / PAIR).max(1)).max(1)
    }

    /// In nanoseconds.
    fn time(self, product: &Product, limits: Limits) -> usize {
        let steps = product.k.div_ceil(DEPTH);
        let turns = self.turns(product, limits);
        let long = turns > LONG_TURNS || steps > LONG_STEPS;
        let [more, of] = if long { LONG } else { [1, 1] };
        let fixed = if self.is_flat_of_few(product, limits) { FIXED_FLAT } else { FIXED };
        turns * (fixed + self.steps_time(steps)) * more / of
    }

    /// Whether it is a flat one whose product is of those measured.
    fn is_flat_of_few(self, product: &Product, limits: Limits) -> bool {
        self == GroupTile::Flat
            && self.turns(product, limits) <= FEW_TURNS
            && FLAT_STEPS.contains(&product.k.div_ceil(DEPTH))
    }

    /// Of so many steps of a tile.
    fn steps_time(self, steps: usize) -> usize {
        let Form { rows, cols, step, .. } = self.form();
        rows * cols * steps / 1024 * step / 1000
    }

    /// Its launch: as many clusters as have the same number of turns.
    pub(crate) fn geometry(self, product: &Product, limits: Limits) -> Geometry {
        let clusters = self.pairs(product).div_ceil(self.turns(product, limits));
        let grid = [blocks(clusters * PAIR, 1), 1, 1];
        let geometry = Geometry::new(grid).shared(self.shared() as u32).overlapped();
        Geometry { cluster: PAIR as u32, ..geometry }
    }
}

fn fastest(product: &Product, limits: Limits) -> Option<GroupTile> {
    let fits = limits.groups
        && product.operands == Operands::HalfAligned
        && product.k.div_ceil(DEPTH) >= LEAST_STEPS;
    let tiles = GroupTile::ALL.into_iter().filter(|tile| tile.shared() + OWN <= limits.shared);
    tiles.filter(|_| fits).min_by_key(|tile| tile.time(product, limits))
}

/// The tile that takes the least time; `None`: the kernel does not take the product.
pub(crate) fn group(product: &Product, limits: Limits) -> Option<Path> {
    fastest(product, limits).map(Path::Group)
}

/// Of the vendor's library and the pass over its sums, measured on an H200: nanoseconds, picoseconds of 1024 outputs,
/// and femtoseconds of 1024 of their products.
const LIBRARY_FIXED: usize = 4000;
const LIBRARY_OUTPUTS: usize = 2500;
const LIBRARY_PRODUCTS: usize = 2560;
/// How much more flat tiles of few turns may take: with one adapter they save 15 µs and more (1252 × 5120 of 2880 take
/// 66 to 69 with it, and as many tiles as 1154 rows; the library, its pass and the shrink take 88 of 1152 rows), and a
/// layer without any pays at most so much.
const AHEAD_WITH_DELTAS: usize = 4000;
/// Least rows: fewer are the library's or shared by more blocks.
const GROUP_ROWS: usize = 256;

/// Whether tiles of warpgroup products take less time than the library's sums and the pass that finishes them.
pub(crate) fn goes_to_groups(product: &Product, limits: Limits) -> bool {
    let &Product { tokens, n, k, place, .. } = product;
    let outputs = tokens * n / 1024;
    let library = LIBRARY_FIXED + outputs * (LIBRARY_OUTPUTS + k * LIBRARY_PRODUCTS / 1000) / 1000;
    tokens >= GROUP_ROWS
        && (LIBRARY_COLS..=LIBRARY_MOST_COLS).contains(&n)
        && place == SumsPlace::Workspace
        && fastest(product, limits).is_some_and(|tile| {
            let flat = tile.is_flat_of_few(product, limits);
            let ahead = if flat { AHEAD_WITH_DELTAS } else { 0 };
            tile.time(product, limits) < library + ahead
        })
}

/// Rows of x of a block of the shrink, rows of A of a pass, and steps of k, stages and parts of it at most.
const SHRINK_ROWS: usize = 128;
const SHRINK_PASS: usize = 96;
const SHRINK_STEPS: usize = 8;
const SHRINK_STAGES: usize = 8;
const SHRINK_PARTS: usize = 8;
/// Clusters of so many blocks that an H200 holds at once; and most blocks of those that take turns.
const SHRINK_CLUSTERS: usize = 14;
const SHRINK_FEWER: usize = 6;
/// Steps of k beyond which the other shrink is the slower one anyway.
const SHRINK_DEEP: usize = 64;

/// Of a block of the shrink beside a product: nanoseconds beside its steps, and of a step of an adapter; and how many
/// adapters' rows it is to be early enough for, if they are as many each.
const SHRINK_FIXED: usize = 3000;
const SHRINK_STEP: usize = 500;
const SHRINK_ADAPTERS: usize = 8;
/// Blocks that share k where they run beside the product's; clusters of an even number leave pairs of processors.
const SHRINK_BESIDE: [usize; 4] = [8, 6, 4, 2];

/// The shrink in front of a product: its launch, whose clusters share k, and their ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupShrink {
    pub(crate) geometry: Geometry,
    pub(crate) ring: Ring,
}

/// Elements of k and rows of a box of x.
pub(crate) const SHRINK_BOX: [usize; 2] = [DEPTH, SHRINK_ROWS];

/// Blocks that share k so that all run on processors which the product's blocks leave, and end before its first
/// tiles need the shrunk rows.
fn parts_beside(product: &Product, tile: GroupTile, limits: Limits) -> Option<usize> {
    let (all, rows) = (product.k.div_ceil(DEPTH), product.tokens.div_ceil(SHRINK_ROWS));
    let free = limits.processors.saturating_sub(tile.geometry(product, limits).grid[0] as usize);
    let first = tile.steps_time(all);
    let adapters = 1 + (SHRINK_ADAPTERS * SHRINK_ROWS).div_ceil(product.tokens.max(1));
    let ends =
        |parts: &usize| SHRINK_FIXED + all.div_ceil(*parts) * adapters * SHRINK_STEP <= first;
    let fits = |parts: &usize| *parts <= all && rows * parts <= free;
    SHRINK_BESIDE.into_iter().filter(fits).find(ends)
}

/// The shrink in front of such a product; `None`: the other one is faster.
pub(crate) fn shrink_group(
    product: &Product,
    tile: GroupTile,
    limits: Limits,
) -> Option<GroupShrink> {
    let all = product.k.div_ceil(DEPTH).max(1);
    let rows = product.tokens.div_ceil(SHRINK_ROWS);
    let at_once = rows <= SHRINK_CLUSTERS;
    let beside = parts_beside(product, tile, limits);
    let parts = beside.unwrap_or(match at_once {
        true => all.min(SHRINK_PARTS),
        false => all.div_ceil(SHRINK_STEPS).min(SHRINK_FEWER),
    });
    let steps = all.div_ceil(parts);
    let [stage, step] = [SHRINK_PASS, SHRINK_ROWS].map(|rows| rows * DEPTH * 2);
    let sums = SHRINK_ROWS * (SHRINK_PASS + 4) * 4;
    let left = limits.shared.saturating_sub(sums + OWN + 1024);
    let streams = steps > SHRINK_STEPS;
    let held = if streams { 0 } else { steps * step };
    let stage = if streams { stage + step } else { stage };
    let stages = (left.saturating_sub(held) / stage).min(SHRINK_STAGES).min(steps);
    let grid = [blocks(parts, 1), blocks(rows, 1), 1];
    let geometry = Geometry::new(grid).shared((held + stages * stage + sums + 1024) as u32);
    // Twice the blocks that run at once cost more than they save where the other shrink reads little.
    let deep = at_once || all <= SHRINK_FEWER * SHRINK_STEPS || all > SHRINK_DEEP;
    (limits.groups && deep && stages > 1.min(steps - 1)).then(|| {
        let geometry = Geometry { cluster: grid[0], ..geometry.overlapped() };
        GroupShrink { geometry, ring: Ring { stages, streams } }
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, product};
    use super::*;

    fn tile(tokens: usize, n: usize, k: usize) -> Option<GroupTile> {
        let product = product(tokens, n, k);
        goes_to_groups(&product, H200).then(|| fastest(&product, H200)).flatten()
    }

    #[test]
    fn tiles_are_those_that_keep_the_processors_at_work() {
        let qkv = [512, 1024, 1600, 2048].map(|tokens| tile(tokens, 5120, 2880));
        let square = Some(GroupTile::Square);
        assert_eq!(qkv, [Some(GroupTile::Slim), square, Some(GroupTile::Flat), square]);
        assert_eq!(
            [1600, 2048].map(|tokens| tile(tokens, 2880, 4096)),
            [square, Some(GroupTile::Large)]
        );
    }

    #[test]
    fn flat_tiles_of_few_turns_begin_where_they_were_measured_ahead() {
        let flat = Some(GroupTile::Flat);
        let measured =
            [(1252, 5120, 2880), (1152, 2880, 4096), (1600, 2048, 4096), (1170, 5120, 2880)];
        for (tokens, n, k) in measured {
            assert_eq!(tile(tokens, n, k), flat, "{tokens} x {n} x {k}");
        }
        for (tokens, n, k) in [(384, 5120, 2880), (768, 2880, 4096), (1252, 2048, 4096)] {
            assert_eq!(tile(tokens, n, k), None, "{tokens} x {n} x {k}: the library's");
        }
        for (tokens, n, k) in [(37, 264, 640), (150, 1032, 520)] {
            let slim = Some(Path::Group(GroupTile::Slim));
            assert_eq!(group(&product(tokens, n, k), H200), slim, "{tokens} x {n} x {k}: shallow");
        }
    }

    #[test]
    fn products_that_the_library_makes_faster_are_its() {
        // Of Qwen3-32B: q, k and v; o; gate and up; and down, whose sums are small beside the products.
        let shapes = [(10_240, 5120), (5120, 8192), (51_200, 5120), (5120, 25_600)];
        let ours = |tokens| shapes.map(|(n, k)| tile(tokens, n, k).is_some());
        assert_eq!(ours(1600), [true, true, false, false]);
        assert_eq!(ours(2048), [true, true, true, false]);
    }

    #[test]
    fn few_rows_and_vocabularies_are_others() {
        for (tokens, n, k) in [(64, 5120, 2880), (256, 5120, 2880), (512, 2880, 4096)] {
            assert_eq!(tile(tokens, n, k), None, "{tokens} x {n} x {k}");
        }
        assert_eq!(tile(1600, 201_088, 2880), None);
        let head = Product { place: SumsPlace::Outputs, ..product(1600, 5120, 2880) };
        assert!(!goes_to_groups(&head, H200), "sums that lie in the outputs");
        let older = Limits { groups: false, ..H200 };
        assert!(group(&product(1600, 5120, 2880), older).is_none());
        assert!(group(&product(1600, 5120, 448), H200).is_none(), "too few steps");
    }

    #[test]
    fn clusters_have_equal_turns_and_blocks_fit_a_processor() {
        for tokens in [256, 700, 1600, 4096] {
            for of in GroupTile::ALL {
                let product = product(tokens, 5120, 2880);
                let geometry = of.geometry(&product, H200);
                assert!(geometry.grid[0] <= 132 && geometry.grid[0].is_multiple_of(2), "{of:?}");
                assert!(geometry.shared as usize + OWN <= H200.shared, "{of:?}");
            }
        }
        let geometry = GroupTile::Flat.geometry(&product(1600, 5120, 2880), H200);
        assert_eq!((geometry.grid[0], geometry.cluster), (130, 2), "130 pairs, two turns of 65");
    }

    #[test]
    fn shrinks_share_k_among_the_blocks_of_a_cluster() {
        let of = |tokens, k| shrink_group(&product(tokens, 5120, k), GroupTile::Flat, H200);
        let ring = |stages, streams| Ring { stages, streams };
        let grid = |shrink: GroupShrink| (shrink.geometry.grid, shrink.geometry.cluster);
        let found = of(1600, 2880).expect("six steps of eight parts");
        assert_eq!((grid(found), found.ring), (([8, 13, 1], 8), ring(6, false)));
        let found = of(2048, 2880).expect("eight steps of six parts");
        assert_eq!((grid(found), found.ring), (([6, 16, 1], 6), ring(3, false)));
        let found = of(1600, 25_600).expect("x comes with A");
        assert_eq!(found.ring, ring(6, true));
        for (tokens, k) in [(1600, 2880), (1600, 4096), (1600, 25_600), (4096, 5120), (300, 64)] {
            let GroupShrink { geometry, .. } = of(tokens, k).expect("a shrink");
            assert!(geometry.shared as usize + OWN <= H200.shared, "{tokens} x {k}");
        }
        assert!(of(2048, 4096).is_none(), "clusters in turns");
    }

    #[test]
    fn shrinks_run_beside_products_that_leave_processors() {
        let parts = |tokens, n, k, tile| {
            shrink_group(&product(tokens, n, k), tile, H200).expect("a shrink").geometry.cluster
        };
        assert_eq!(parts(1252, 5120, 2880, GroupTile::Flat), 2, "20 blocks of 32 processors");
        assert_eq!(parts(640, 5120, 2880, GroupTile::Flat), 6);
        assert_eq!(parts(768, 5120, 2880, GroupTile::Flat), 8, "two would be late");
        assert_eq!(parts(1362, 2880, 4096, GroupTile::Flat), 8, "all 132 have a tile");
        assert_eq!(parts(1500, 2880, 4096, GroupTile::Square), 2);
    }
}
