//! Dense products of few rows by clusters that share k (`linear_cluster.cuh`): parts, what a block holds, launches.

use super::library::LIBRARY_MOST_COLS;
use super::{DEPTH, Operands, Path, Product, SumsPlace};
use crate::driver::{Geometry, Limits};
use crate::heuristics::blocks;

/// Rows and outputs of a block of a cluster, steps of k that it holds x of, and what its kernel declares for
/// itself, at most.
pub(crate) const CLUSTER_ROWS: usize = 64;
const CLUSTER_COLS: usize = 144;
const CLUSTER_STEPS: usize = 15;
const CLUSTER_OWN: usize = 11 << 10;
/// Most blocks that share k: a cluster that every device takes.
pub(crate) const CLUSTER_PARTS: usize = 8;
/// Stages of a block's ring, least and most.
const CLUSTER_STAGES: [usize; 2] = [3, 12];
/// Processors that clusters make use of together: on an H200 39 clusters of three run at once.
const CLUSTER_USED: [usize; 2] = [17, 20];
/// Least steps of a block.
const CLUSTER_LEAST: usize = 4;
/// Bytes of a stage of weights, and of a step of x, whose rows are rounded up to 8.
const CLUSTER_STAGE: usize = CLUSTER_COLS * DEPTH * 2;
fn cluster_x(product: &Product) -> usize {
    product.tokens.next_multiple_of(8) * DEPTH * 2
}
/// Room for the shrink in front, whose blocks run beside those that bring x with the weights.
const CLUSTER_BESIDE: usize = 18 << 10;

/// As many parts as run at once, or one where a part alone takes more than one turn; `None`: no product for clusters.
pub(super) fn cluster_parts(product: &Product, limits: Limits) -> Option<usize> {
    let [used, of] = CLUSTER_USED;
    let tiles = product.n.div_ceil(CLUSTER_COLS).max(1);
    let steps = product.k.div_ceil(DEPTH);
    let most = (limits.processors * used / of / tiles).clamp(1, CLUSTER_PARTS);
    (product.tokens > 0 && product.n <= LIBRARY_MOST_COLS)
        .then_some(most.min(steps / CLUSTER_LEAST).max(1))
}

/// A cluster of so many parts; `None`: it does not take the product.
pub(crate) fn cluster(product: &Product, parts: usize, limits: Limits) -> Option<Path> {
    let fits = limits.groups
        && product.operands == Operands::HalfAligned
        && (1..=CLUSTER_ROWS).contains(&product.tokens)
        && (1..=CLUSTER_PARTS).contains(&parts)
        && parts <= product.k.div_ceil(DEPTH)
        && cluster_ring(product, parts, limits).stages >= CLUSTER_STAGES[0];
    fits.then_some(Path::Cluster(parts))
}

/// Whether blocks of a cluster of so many parts take such rows.
pub(crate) fn cluster_takes(tokens: usize, k: usize, parts: usize, limits: Limits) -> bool {
    let operands = Operands::HalfAligned;
    let place = SumsPlace::Workspace;
    let product = Product { tokens, n: CLUSTER_COLS, k, operands, place };
    parts > k.div_ceil(DEPTH) || cluster(&product, parts, limits).is_some()
}

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) stages: usize,
    /// Whether x comes with the weights of a stage; else all of a block's share is there from the start.
    pub(crate) streams: bool,
}

/// Stages of a ring that brings x too and has deltas: with more on their way, the shrink beside it starves.
const CLUSTER_SHALLOW: usize = 5;

impl Ring {
    /// The same in front of deltas. A row has the same bits whatever the ring is.
    pub(crate) fn with_deltas(self) -> Self {
        let most = if self.streams { CLUSTER_SHALLOW } else { self.stages };
        Ring { stages: self.stages.min(most), ..self }
    }
}

/// Steps of k of a part, at most.
fn cluster_steps(product: &Product, parts: usize) -> usize {
    product.k.div_ceil(DEPTH).div_ceil(parts)
}

/// The ring of a block.
pub(crate) fn cluster_ring(product: &Product, parts: usize, limits: Limits) -> Ring {
    let (steps, x) = (cluster_steps(product, parts), cluster_x(product));
    let room = limits.shared.saturating_sub(CLUSTER_OWN + 1024);
    let stages = room.saturating_sub(steps * x) / CLUSTER_STAGE;
    if steps <= CLUSTER_STEPS && stages >= CLUSTER_STAGES[0] {
        return Ring { stages: stages.min(CLUSTER_STAGES[1]), streams: false };
    }
    let beside = CLUSTER_BESIDE + rows_beyond(product);
    let stages = room.saturating_sub(beside) / (CLUSTER_STAGE + x);
    Ring { stages: stages.min(CLUSTER_STAGES[1]), streams: true }
}

/// Products read 64 rows of x, and so beyond those of the last stage.
fn rows_beyond(product: &Product) -> usize {
    CLUSTER_ROWS * DEPTH * 2 - cluster_x(product).min(CLUSTER_ROWS * DEPTH * 2)
}

/// The launch of a cluster with such a ring.
pub(crate) fn cluster_geometry(product: &Product, parts: usize, ring: Ring) -> Geometry {
    let grid = [blocks(parts, 1), blocks(product.n, CLUSTER_COLS), 1];
    let x = cluster_x(product);
    let shared = match ring.streams {
        false => cluster_steps(product, parts) * x + ring.stages * CLUSTER_STAGE,
        true => ring.stages * (CLUSTER_STAGE + x) + rows_beyond(product),
    };
    let geometry = Geometry::new(grid).shared((shared + 1024) as u32).overlapped();
    Geometry { cluster: grid[0], ..geometry }
}

/// Least tiles of outputs that share out the rows of A: with one, as a router's product has, the shrink inside
/// took 36 µs on an H200 where a launch in front takes 8.
const CLUSTER_SHARES: usize = 12;

/// Whether a cluster's blocks may make the shrunk rows: they are enough, and hold their share of x.
pub(crate) fn cluster_shares_factors(product: &Product, ring: Ring) -> bool {
    product.n.div_ceil(CLUSTER_COLS) >= CLUSTER_SHARES && !ring.streams
}

/// Numbers of k and rows of a box of the weight.
pub(crate) const CLUSTER_BOX: [usize; 2] = [DEPTH, CLUSTER_COLS];

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, product};
    use super::super::{Path, path};
    use super::*;

    fn parts(tokens: usize, n: usize, k: usize) -> Option<(usize, bool)> {
        let product = product(tokens, n, k);
        match path(&product, H200) {
            Path::Cluster(parts) => Some((parts, cluster_ring(&product, parts, H200).streams)),
            _ => None,
        }
    }

    #[test]
    fn some_rows_go_to_clusters_that_run_at_once() {
        assert_eq!(parts(32, 5120, 2880), Some((3, false)));
        assert_eq!(parts(64, 2880, 4096), Some((5, false)));
        assert_eq!(parts(17, 32, 2880), Some((8, false)));
        assert_eq!(parts(17, 32, 64), Some((1, false)));
        assert_eq!(parts(65, 5120, 2880), None);
        let of = |tokens| cluster_ring(&product(tokens, 5120, 2880), 3, H200);
        assert_eq!(of(64), Ring { stages: 5, streams: false });
        for tokens in [17, 64] {
            let product = product(tokens, 5120, 2880);
            let geometry = cluster_geometry(&product, 3, of(tokens));
            let all = geometry.shared as usize + CLUSTER_OWN;
            assert!(all <= H200.shared && geometry.grid == [3, 36, 1] && geometry.cluster == 3);
        }
    }

    #[test]
    fn x_of_deep_products_comes_with_the_weights() {
        // Projections of Qwen3-32B; of 8 rows all that the stream does not hold.
        assert_eq!(parts(32, 10_240, 5120), Some((1, true)));
        assert_eq!(parts(32, 51_200, 5120), Some((1, true)), "more than one turn");
        assert_eq!([8, 64].map(|tokens| parts(tokens, 5120, 8192)), [Some((3, true)); 2]);
        assert_eq!([8, 64].map(|tokens| parts(tokens, 5120, 25_600)), [Some((3, true)); 2]);
        assert_eq!(parts(8, 10_240, 5120), None, "which streams");
        assert_eq!(parts(32, 201_088, 5120), None, "a vocabulary");
        for tokens in [1, 8, 33, 64] {
            let product = product(tokens, 5120, 25_600);
            let ring = cluster_ring(&product, 3, H200);
            let geometry = cluster_geometry(&product, 3, ring);
            let all = geometry.shared as usize + CLUSTER_OWN;
            assert!(ring.stages >= 6 && all + (17 << 10) <= H200.shared, "{tokens}: {ring:?}");
        }
    }
}
