//! Shapes to kernel configurations, grids and workspace. Pure: tested without a GPU.

pub(crate) mod attention;
pub(crate) mod dense;
mod moe;
pub(crate) mod tuned;

use dense::Library;

use amphora_cuda_kernels::args::{
    LOGIT_CHUNK, LogprobPartial, MAX_RANK, MAX_SLICES, MOST_BEST, MOST_CANDIDATES, SHORT_VECTORS,
    SamplePartial,
};
use amphora_hal::{ALIGN, DType, OpBounds, OpKind};

use crate::driver::Geometry;
use crate::tuning::Tuning;

pub(crate) use moe::*;

/// The largest head that attention takes.
pub(crate) const MAX_HEAD: usize = 256;
/// Bytes at the end of a stream's workspace that count between blocks, and with what else there is zero
/// between operators; see `launch::Workspace`.
pub(crate) const COUNTER_BYTES: usize = ALIGN;
pub(crate) const CLEARED_BYTES: usize =
    COUNTER_BYTES + STREAM_SHRUNK[0] + STREAM_SHRUNK[1] + PREFILL_READY_BYTES + dense::SHRUNK_BYTES;
/// Shared memory that a block gets without asking for more.
pub(crate) const SHARED_BYTES: usize = 48 << 10;

/// Outputs of one block of a base product, and how much of k it holds at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProductTile {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) depth: usize,
}

/// The one tile there is: each thread makes four outputs of a row, and the two operands take 10 KiB.
pub(crate) const PRODUCT: ProductTile = ProductTile { rows: 16, cols: 64, depth: 32 };

/// The architecture that kernels are compiled for. A cubin runs on its own major architecture and
/// newer minors of it, so one serves all of 8.x; from 9.0 on the architecture's own instructions are
/// wanted (`a`), and the cubin fits that minor alone. `None`: older than any this crate is made for.
pub(crate) fn architecture(major: u32, minor: u32) -> Option<String> {
    match major {
        0..=7 => None,
        8 => Some("sm_80".to_owned()),
        _ => Some(format!("sm_{major}{minor}a")),
    }
}

fn blocks(items: usize, of: usize) -> u32 {
    u32::try_from(items.div_ceil(of)).unwrap_or(u32::MAX)
}

/// A thread for each item.
pub(crate) fn per_thread(items: usize, threads: usize) -> Geometry {
    Geometry::new([blocks(items, threads), 1, 1])
}

/// The activation of a dense MLP: a thread for each 16 bytes of rows of `bytes`.
pub(crate) fn swiglu(rows: usize, bytes: usize, threads: usize) -> Geometry {
    Geometry::new([blocks(rows, 1), blocks(bytes, 16 * threads), 1]).overlapped()
}

/// Blocks of a norm of short vectors from which on each takes several after another.
const SHORT_BLOCKS: usize = 264;

/// The norm of vectors of `bytes`, of which several lanes of a warp take one, 16 bytes each. Which lanes depends on
/// `bytes` alone, so a vector's bits do not tell how many others there are. `None`: they are not whole pieces, or
/// too long for a warp.
pub(crate) fn short_norm(vectors: usize, bytes: usize, threads: usize) -> Option<Geometry> {
    let pieces = (bytes / 16).next_power_of_two();
    (bytes > 0 && bytes.is_multiple_of(16) && pieces <= 32).then(|| {
        let at_a_time = threads / pieces;
        let side_by_side = vectors.div_ceil(at_a_time).min(SHORT_BLOCKS);
        let grid = vectors.div_ceil(at_a_time * SHORT_VECTORS).max(side_by_side);
        Geometry::new([blocks(grid, 1), 1, 1]).overlapped()
    })
}

/// Rotary positions: of each row's `pairs`, a thread turns four or more.
pub(crate) fn rope(rows: usize, pairs: usize, threads: usize) -> Geometry {
    Geometry::new([blocks(rows, 1), blocks(pairs, 4 * threads), 1])
}

/// Rows that are few for the rotary kernel: a row's blocks share its heads.
const ROPE_FEW: usize = 64;

/// Rotary positions of many rows: half of a block's threads turn a row, each several heads. Also how many
/// threads those are; `None`: the rows are few.
pub(crate) fn rope_many(rows: usize, threads: usize) -> Option<(Geometry, usize)> {
    let geometry = Geometry::new([blocks(rows, 2), 1, 1]).overlapped();
    (rows > ROPE_FEW).then_some((geometry, threads / 2))
}

/// A block for each item.
pub(crate) fn per_block(items: usize) -> Geometry {
    Geometry::new([blocks(items, 1), 1, 1])
}

/// Copies of cache blocks: a few kernel blocks for each, of 16 bytes a thread and some turns.
pub(crate) fn block_copies(copies: usize, bytes: usize) -> Geometry {
    Geometry::new([blocks(copies, 1), blocks(bytes.max(1), 16 << 10), 1])
}

/// A dense product `[tokens, n]`.
pub(crate) fn linear(tokens: usize, n: usize) -> Geometry {
    Geometry::new([blocks(tokens, PRODUCT.rows), blocks(n, PRODUCT.cols), 1])
}

/// A product whose row tiles are in a list. `n` outputs of a row.
pub(crate) fn tiled(tiles: usize, n: usize) -> Geometry {
    Geometry::new([blocks(tiles, 1), blocks(n, PRODUCT.cols), 1])
}

/// The shrink of `slices` slices whose k is shared by `parts` blocks: enough blocks for the largest class,
/// as the host knows none.
pub(crate) fn shrink(tiles: usize, slices: usize, parts: usize) -> Geometry {
    Geometry::new([blocks(tiles, 1), blocks(slices, 1), blocks(parts * MAX_RANK, PRODUCT.cols)])
}

/// What meets the parts of a shrink.
pub(crate) fn shrink_meeting(tiles: usize, slices: usize) -> Geometry {
    Geometry::new([blocks(tiles, 1), blocks(slices, 1), 1])
}

/// Choice of experts: a warp for each token, scores and groups in shared memory.
pub(crate) fn topk(tokens: usize, experts: usize, groups: usize) -> Option<Geometry> {
    let shared = (2 * experts + 2 * groups) * 4;
    let grid = [blocks(tokens, 1), 1, 1];
    (shared <= SHARED_BYTES).then_some(Geometry::new(grid).shared(shared as u32))
}

/// The deltas of down by themselves: a thread for an output of each row of a LoRA tile.
pub(crate) fn down_deltas(lora_tiles: usize, hidden: usize) -> Geometry {
    Geometry::new([blocks(lora_tiles, 1), blocks(hidden, 256), 1])
}

/// The sum over a token's experts: a thread for four outputs.
pub(crate) fn combine(tokens: usize, hidden: usize) -> Geometry {
    Geometry::new([blocks(tokens, 1), blocks(hidden, 4 * 256), 1]).overlapped()
}

/// Bytes of shrunk rows.
pub(crate) fn shrunk_bytes(positions: usize) -> usize {
    positions * MAX_SLICES * MAX_RANK * 4
}

/// Workspace of routing `pairs` pairs: their keys, and the keys in order.
pub(crate) fn route_pieces(pairs: usize) -> [usize; 2] {
    [pairs * 4; 2]
}

/// Workspace of both expert products: activations between them, the outputs of each pair, and the
/// shrunk rows of one product at a time, if there are adapters.
pub(crate) fn moe_pieces(moe: MoeBytes) -> [usize; 3] {
    let shrunk = if moe.lora { shrunk_bytes(moe.pairs) } else { 0 };
    [moe.pairs * moe.inner * moe.element, moe.pairs * moe.hidden * 4, shrunk]
}

/// Workspace of a prompt's expert products beside it: the tokens of each pair.
pub(crate) fn gathered_bytes(moe: MoeBytes) -> usize {
    moe.pairs * moe.hidden * moe.element
}

/// What [`moe_pieces`] depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoeBytes {
    pub(crate) pairs: usize,
    /// Width after the activation.
    pub(crate) inner: usize,
    pub(crate) hidden: usize,
    /// Bytes of an element.
    pub(crate) element: usize,
    pub(crate) lora: bool,
}

/// Chunks of a row of logits, of a block each.
pub(crate) fn chunks(vocab: usize) -> usize {
    vocab.div_ceil(LOGIT_CHUNK)
}

/// A block for each chunk of `rows` rows of logits.
pub(crate) fn logit_chunks(rows: usize, vocab: usize) -> Geometry {
    Geometry::new([blocks(vocab, LOGIT_CHUNK), blocks(rows, 1), 1])
}

/// Candidates of a chunk: as many as a row may have, shared out. `None`: not even one.
pub(crate) fn candidates(vocab: usize) -> Option<usize> {
    MOST_CANDIDATES.checked_div(chunks(vocab)).filter(|&of_chunk| of_chunk > 0)
}

/// Workspace of drawing: what is found in each chunk, candidates, and a bit for each token.
pub(crate) fn sample_pieces(rows: usize, vocab: usize) -> [usize; 3] {
    let (chunks, of_chunk) = (chunks(vocab), candidates(vocab).unwrap_or(0));
    [size_of::<SamplePartial>(), of_chunk * 8, LOGIT_CHUNK / 8].map(|bytes| rows * chunks * bytes)
}

/// Workspace of log-probabilities: what is found in each chunk, and its most likely tokens.
pub(crate) fn logprob_pieces(rows: usize, vocab: usize) -> [usize; 2] {
    [size_of::<LogprobPartial>(), MOST_BEST * 8].map(|bytes| rows * chunks(vocab) * bytes)
}

/// Most workspace of an operator within `bounds`, as [`amphora_hal::Device::workspace`] wants it.
pub(crate) fn workspace(bounds: &OpBounds, library: Library, tuning: &Tuning) -> usize {
    let pairs = bounds.tokens * bounds.top_k;
    let moe = |lora| MoeBytes {
        pairs,
        inner: bounds.inner.div_ceil(2),
        hidden: bounds.k.max(bounds.n),
        element: DType::F32.size(),
        lora,
    };
    let sums = || match tuned::may_use_sums(bounds.tokens, bounds.n, library, tuning) {
        true => dense::sums_pieces(bounds.tokens, bounds.n),
        false => [0, 0],
    };
    let sum = |pieces: &[usize]| pieces.iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum();
    let pieces = match bounds.op {
        Some(OpKind::Linear) => sum(&sums()),
        Some(OpKind::LoraLinear) => {
            let [sums, workspace] = sums();
            let partials = tuned::partial_bytes(bounds.tokens, tuning);
            sum(&[shrunk_bytes(bounds.tokens), sums, workspace, partials])
        }
        Some(OpKind::MoeRoute) => sum(&route_pieces(pairs)),
        Some(OpKind::FusedMoe) => {
            let [act, y, shrunk] = moe_pieces(moe(false));
            sum(&[act, y, shrunk, gathered_bytes(moe(false))])
        }
        Some(OpKind::FusedMoeLora) => {
            let [act, y, shrunk] = moe_pieces(moe(true));
            let behind = gathered_bytes(moe(true)).max(tuned::partial_bytes(pairs, tuning));
            sum(&[act, y, shrunk, behind])
        }
        Some(OpKind::Sample) => sum(&sample_pieces(bounds.tokens, bounds.k)),
        Some(OpKind::Logprobs) => sum(&logprob_pieces(bounds.tokens, bounds.k)),
        _ => 0,
    };
    if pieces == 0 { 0 } else { pieces + CLEARED_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_named_as_the_compiler_wants_them() {
        assert_eq!(architecture(7, 5), None);
        assert_eq!(architecture(8, 9).as_deref(), Some("sm_80"));
        assert_eq!(architecture(9, 0).as_deref(), Some("sm_90a"));
        assert_eq!(architecture(10, 0).as_deref(), Some("sm_100a"));
    }

    #[test]
    fn grids_cover_their_outputs_and_nothing_needs_no_block() {
        assert_eq!(linear(17, 65).grid, [2, 2, 1]);
        assert_eq!(linear(0, 65).grid[0], 0);
        assert_eq!(tiled(3, 64).grid, [3, 1, 1]);
        assert_eq!(shrink(5, 3, 1).grid, [5, 3, 4]);
        assert_eq!(shrink(5, 3, 2).grid, [5, 3, 8]);
        assert_eq!(per_thread(257, 256).grid, [2, 1, 1]);
        assert_eq!(block_copies(3, (16 << 10) + 1).grid, [3, 2, 1]);
        assert_eq!(swiglu(3, 4097, 256).grid, [3, 2, 1]);
        assert_eq!(rope_many(64, 256), None);
        assert_eq!(rope_many(65, 256).map(|(g, of_row)| (g.grid, of_row)), Some(([33, 1, 1], 128)));
    }

    #[test]
    fn short_vectors_all_have_lanes_and_long_or_broken_ones_another_norm() {
        let grid = |vectors, bytes| short_norm(vectors, bytes, 256).map(|g| g.grid[0]);
        for (vectors, bytes) in [(1, 16), (17, 256), (4224, 256), (4225, 256), (102_400, 512)] {
            let at_a_time = 256 / (bytes / 16);
            let blocks = grid(vectors, bytes).expect("short") as usize;
            assert!(blocks * at_a_time * SHORT_VECTORS >= vectors, "{vectors} of {bytes} bytes");
        }
        // Few vectors are side by side.
        assert_eq!((grid(32, 256), grid(4224, 256)), (Some(2), Some(264)));
        assert_eq!(grid(1600 * 32, 256), Some(800));
        assert_eq!(grid(7, 144), Some(1), "9 pieces by 16 lanes");
        assert_eq!(
            (grid(0, 256), grid(1, 0), grid(1, 40), grid(1, 528)),
            (Some(0), None, None, None)
        );
    }

    #[test]
    fn routing_that_shared_memory_cannot_hold_is_refused() {
        assert_eq!(topk(4, 128, 8).map(|g| g.shared), Some((256 + 16) * 4));
        assert_eq!(topk(4, 6145, 0), None);
    }

    #[test]
    fn candidates_are_shared_out_among_chunks() {
        assert_eq!((chunks(1), candidates(1)), (1, Some(2048)));
        assert_eq!((chunks(8193), candidates(8193)), (2, Some(1024)));
        assert_eq!((chunks(201_088), candidates(201_088)), (25, Some(81)));
        assert_eq!(candidates(LOGIT_CHUNK * 2049), None);
        assert_eq!(logit_chunks(3, 201_088).grid, [25, 3, 1]);
    }

    #[test]
    fn the_bound_covers_what_an_operator_takes() {
        let bounds = OpBounds {
            op: Some(OpKind::FusedMoeLora),
            tokens: 7,
            k: 40,
            n: 40,
            inner: 2 * 24,
            experts: 5,
            top_k: 3,
            rank: 8,
            ..OpBounds::default()
        };
        let moe = MoeBytes { pairs: 21, inner: 24, hidden: 40, element: 2, lora: true };
        let [act, y, shrunk] = moe_pieces(moe);
        let taken = [act, y, shrunk, gathered_bytes(moe), CLEARED_BYTES];
        assert!(
            workspace(&bounds, Library::Present, &Tuning::default())
                >= taken.iter().map(|b| b.next_multiple_of(ALIGN)).sum()
        );
        assert_eq!(workspace(&OpBounds::default(), Library::Present, &Tuning::default()), 0);
    }
}
