//! Which dense products go to the vendor's library, and which of as few rows to tiles that share k.

use super::{CLUSTERED, Operands, Product, SumsPlace, Tile};
use crate::driver::Limits;

/// Whether the vendor's dense products are installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Present,
    Absent,
}

/// Least rows, outputs and inputs of a product that goes to the library: below, its launch and the pass
/// over its sums, measured on an H200, cost more than they save. From 65 rows on, which are too many for
/// clusters, it takes half the time of tiles; but the pass with deltas of some rows wants deep products.
const LIBRARY_ROWS: [usize; 2] = [65, 128];
pub(super) const LIBRARY_COLS: usize = 1024;
const LIBRARY_DEPTH: [usize; 2] = [2560, 2048];
/// Least rows of a vocabulary of more outputs, which goes there if its sums are the outputs: on an H200 16 rows of
/// 2880 inputs and 201 088 outputs take 288 µs where the stream takes 299, 32 take 293, tiles 346 or 420.
const LIBRARY_VOCABULARY_ROWS: usize = 9;
/// Most outputs whose sums lie in workspace: a vocabulary's would take much of it.
pub(super) const LIBRARY_MOST_COLS: usize = 1 << 16;

/// Whether a product of so many rows and outputs may go to the library, which gives its sums in f32; they
/// are finished, with bias and deltas, by a kernel behind it.
pub(crate) fn may_go_to_library(tokens: usize, n: usize) -> bool {
    let vocabulary = tokens >= LIBRARY_VOCABULARY_ROWS && n > LIBRARY_MOST_COLS;
    (vocabulary || (tokens >= LIBRARY_ROWS[0] && n >= LIBRARY_COLS)) && n.is_multiple_of(8)
}

/// Whether a product goes there.
pub(crate) fn goes_to_library(product: &Product, limits: Limits) -> bool {
    let depth = LIBRARY_DEPTH
        [usize::from(product.n > LIBRARY_MOST_COLS || product.tokens >= LIBRARY_ROWS[1])];
    may_go_to_library(product.tokens, product.n)
        && library_fits(product)
        && product.k >= depth
        && shared_by_some(product, limits).is_none()
}

/// Parts of wide tiles that share k where there are so few rows and outputs that, with the part of the
/// deltas, they run at once: with deltas they take two thirds of the library's time.
const SOME_PARTS: usize = 3;

pub(super) fn shared_by_some(product: &Product, limits: Limits) -> Option<(Tile, usize)> {
    let &Product { tokens, n, k, .. } = product;
    let [used, of] = CLUSTERED;
    let at_once = (SOME_PARTS + 1) * n.div_ceil(128) <= limits.processors * used / of;
    let some = (LIBRARY_ROWS[0]..LIBRARY_ROWS[1]).contains(&tokens);
    (some && at_once && limits.groups && n >= LIBRARY_COLS && k >= LIBRARY_DEPTH[0])
        .then_some((Tile::Wide, SOME_PARTS))
}

/// Whether a product's sums can be made by the library and finished behind it.
pub(crate) fn library_fits(product: &Product) -> bool {
    let room = product.place == SumsPlace::Outputs || library_takes(product.n);
    product.operands == Operands::HalfAligned && product.n.is_multiple_of(8) && room
}

/// Whether so many outputs can be finished from workspace.
pub(crate) fn library_takes(n: usize) -> bool {
    n <= LIBRARY_MOST_COLS && n.is_multiple_of(8)
}

/// Workspace of a product by the library: its sums, unless they lie in the outputs, and what its algorithms
/// ask for.
pub(crate) fn sums_pieces(tokens: usize, n: usize) -> [usize; 2] {
    let sums = if n <= LIBRARY_MOST_COLS { tokens * n * 4 } else { 0 };
    [sums, crate::driver::cublaslt::WORKSPACE]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{H200, product};
    use super::super::{Path, path};
    use super::*;

    #[test]
    fn the_library_begins_where_clusters_end() {
        let goes = |tokens, n, k| goes_to_library(&product(tokens, n, k), H200);
        assert_eq!([64, 65, 1600].map(|tokens| goes(tokens, 5120, 2880)), [false, true, true]);
        assert_eq!([65, 127, 128].map(|tokens| goes(tokens, 5120, 2048)), [false, false, true]);
        assert!(!goes(128, 32, 2880) && !goes(128, 5120, 1024), "little to save");
        assert!(!goes(128, 201_088, 2880), "a vocabulary's sums are too many");
    }

    #[test]
    fn a_vocabulary_goes_to_the_library_if_its_sums_are_the_outputs() {
        let head = |tokens, place| Product { place, ..product(tokens, 201_088, 2880) };
        assert!(!goes_to_library(&head(32, SumsPlace::Workspace), H200));
        assert!(!goes_to_library(&head(8, SumsPlace::Outputs), H200), "which streams");
        for tokens in [9, 32, 400] {
            assert!(goes_to_library(&head(tokens, SumsPlace::Outputs), H200));
            assert_eq!(sums_pieces(tokens, 201_088)[0], 0);
        }
    }

    #[test]
    fn some_rows_of_few_outputs_share_k_among_wide_tiles() {
        let shared = product(96, 2880, 4096);
        assert_eq!(path(&shared, H200), Path::Tiles(Tile::Wide, 3));
        assert!(
            !goes_to_library(&shared, H200) && goes_to_library(&product(128, 2880, 4096), H200)
        );
        let older = Limits { groups: false, ..H200 };
        assert!(goes_to_library(&shared, older), "measured with products of warpgroups");
    }
}
