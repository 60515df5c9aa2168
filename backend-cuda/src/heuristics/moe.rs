//! Which kernels run a mixture of experts, and their configurations.

use amphora_cuda_kernels::args::MAX_RANK;
use amphora_hal::DType;
use amphora_hal::ops::RoutingShape;

use super::blocks;
use crate::driver::{Geometry, Limits};

/// Which implementation routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoutePath {
    /// One block compares all pairs.
    Few,
    /// One launch that chooses and sorts.
    Sort(Geometry),
    /// The choice over the whole device, then the sort.
    ChooseThenSort(Geometry),
    /// Any number of experts, slots and groups.
    General,
}

/// Experts that the fast choice holds in registers, experts of a token, pairs that can be compared each
/// with each, and tokens of which a cluster's own choice is not slower than one in front of it.
const ROUTE_EXPERTS: usize = 256;
const ROUTE_TOP_K: usize = 32;
pub(crate) const ROUTE_FEW_PAIRS: usize = 128;
const ROUTE_CLUSTER_TOKENS: usize = 256;
/// Pairs of which comparing is not slower than sorting, on an H200: with few keys, which a block's threads
/// sum at once, and with more.
const FEW_KEYS: usize = 512;
const FEW_PAIRS: [usize; 2] = [64, 128];
/// Blocks of the sort's cluster, the most there can be, and those that so many tokens are sorted by; the same
/// of pairs where there are many keys, whose counts blocks must tell each other; warps of a block; static
/// shared memory.
pub(crate) const SORT_BLOCKS: usize = 16;
const SORT_FEW: [usize; 2] = [8, 128];
const SORT_MANY_KEYS: [[usize; 2]; 2] = [[1, 1024], [8, 4096]];
const SORT_WARPS: usize = 16;
const SORT_STATIC: usize = 1 << 10;

/// Chooses for one call of `moe_route`; `groups`: the choice is limited to groups.
pub(crate) fn route_path(shape: &RoutingShape, groups: usize, limits: Limits) -> RoutePath {
    let RoutingShape { tokens, top_k, .. } = *shape;
    if !routes_fast(shape, groups) {
        return RoutePath::General;
    }
    if tokens * top_k <= FEW_PAIRS[usize::from(sort_keys(shape) > FEW_KEYS)] {
        return RoutePath::Few;
    }
    let own_choice = tokens <= ROUTE_CLUSTER_TOKENS && sort_keys(shape) <= FEW_KEYS;
    match route_sort(shape, sort_blocks(shape), limits) {
        Some(sort) if own_choice && limits.overlap => RoutePath::Sort(sort),
        Some(sort) => RoutePath::ChooseThenSort(sort),
        None => RoutePath::General,
    }
}

/// The number of keys that pairs are sorted by.
fn sort_keys(shape: &RoutingShape) -> usize {
    shape.experts.saturating_mul(shape.slots + 1).saturating_add(1)
}

/// Blocks of the sort's cluster.
pub(crate) fn sort_blocks(shape: &RoutingShape) -> usize {
    if sort_keys(shape) > FEW_KEYS {
        let pairs = shape.tokens * shape.top_k;
        let few = SORT_MANY_KEYS.into_iter().find(|[_, most_pairs]| pairs <= *most_pairs);
        return few.map_or(SORT_BLOCKS, |[blocks, _]| blocks);
    }
    let [few, most_tokens] = SORT_FEW;
    if shape.tokens <= most_tokens { few } else { SORT_BLOCKS }
}

/// Whether the kernels that sort in shared memory take the choice.
pub(crate) fn routes_fast(shape: &RoutingShape, groups: usize) -> bool {
    groups == 0
        && shape.experts <= ROUTE_EXPERTS
        && shape.top_k <= ROUTE_TOP_K
        && sort_keys(shape) < 0xffff
}

/// The sort by a cluster of so many blocks; `None`: their shared memory does not hold the pairs.
pub(crate) fn route_sort(shape: &RoutingShape, blocks: usize, limits: Limits) -> Option<Geometry> {
    let RoutingShape { tokens, top_k, .. } = *shape;
    let keys = sort_keys(shape);
    let cluster = if limits.overlap { blocks } else { 1 };
    let (pitch, pairs) = (keys.next_multiple_of(8), tokens.div_ceil(cluster) * top_k);
    // The kernel's words of each key, two bytes of it for each warp, and two numbers of each pair.
    let shared = pitch * (3 * 4 + 2 * SORT_WARPS) + 2 * 2 * pairs.next_multiple_of(8);
    if shared + SORT_STATIC > limits.shared || pairs > 0xffff {
        return None;
    }
    let sort = Geometry::new([cluster as u32, 1, 1]).shared(shared as u32).overlapped();
    Some(Geometry { cluster: cluster as u32, ..sort })
}

/// Which implementation runs both expert products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MoePath {
    /// Few tokens: weights are streamed once.
    Stream(MoeStream),
    /// Many tokens: grouped products on tensor cores.
    Prefill(MoePrefill),
    /// Any shape and type.
    General,
    /// The same, down's deltas by a kernel of their own.
    GeneralApart,
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoeCall {
    pub(crate) tokens: usize,
    pub(crate) pairs: usize,
    pub(crate) experts: usize,
    pub(crate) hidden: usize,
    /// Width after the activation.
    pub(crate) inner: usize,
    pub(crate) dtype: DType,
    /// Entries of the lists of tiles.
    pub(crate) tiles: usize,
    pub(crate) lora_tiles: usize,
    /// Most rows of a LoRA tile.
    pub(crate) tile_rows: usize,
    /// Whether rows of the operands lie on 16 bytes, weights are of the compute type, routing weights
    /// multiply outputs, and slices are gates, ups and the whole of down.
    pub(crate) plain: bool,
    /// Bytes from the first row of x to its end.
    pub(crate) x_bytes: usize,
}

/// How both products are streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MoeStream {
    pub(crate) gate_up: StreamTile,
    pub(crate) down: StreamTile,
    /// Tokens of an expert that a pass over a tile takes: 8 or 16.
    pub(crate) pass: usize,
}

/// How a block of a weight stream shares out the `width` inputs of a product: constants of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StreamTile {
    pub(crate) width: usize,
    /// Warps over the inputs, each with `pairs` pieces of 64; the last may have fewer.
    pub(crate) warps: usize,
    pub(crate) pairs: usize,
    /// Tiles that a block multiplies at a time, each by its own warps.
    pub(crate) streams: usize,
}

/// Threads of a block of a stream, and its shared memory: all there is of a multiprocessor of compute
/// capability 9.0 or 10.0.
const STREAM_THREADS: usize = 384;
pub(crate) const STREAM_SHARED: usize = 227 << 10;
/// What a stream's lists hold (`moe_work.cuh`): tokens and pairs, experts, tiles of A of a block.
pub(crate) const STREAM_TOKENS: usize = 64;
const STREAM_PAIRS: usize = 512;
const STREAM_EXPERTS: usize = 256;
/// Left for a stream's lists and for rows of B.
const STREAM_LISTS: usize = 20 << 10;
const STREAM_SHRINKS: usize = 192;
const STREAM_ITEMS: usize = 384;
/// Bytes of the shrunk rows of gate_up, in two slices, and of down.
pub(crate) const STREAM_SHRUNK: [usize; 2] =
    [2 * STREAM_PAIRS * MAX_RANK * 4, STREAM_PAIRS * MAX_RANK * 4];
const STREAM_TILE_ROWS: usize = 16;

impl StreamTile {
    /// Names and values in the unit's text.
    pub(crate) fn constants(&self) -> [(&'static str, usize); 6] {
        [
            ("kWidth", self.width),
            ("kStreamWarps", self.warps),
            ("kStreamPairs", self.pairs),
            ("kStreams", self.streams),
            ("kStreamThreads", STREAM_THREADS),
            ("kStreamShared", STREAM_SHARED),
        ]
    }
}

/// Most warps of a stream, and pieces of 64 inputs of a warp.
const STREAM_MOST_WARPS: usize = 10;
pub(crate) const STREAM_MOST_PIECES: usize = 5;

/// The division of `width` inputs: 5, 4 or 3 pieces a warp if that comes out even, and at most ten
/// warps, as registers hold the tokens' inputs of a warp's columns. A narrow product leaves room for
/// more streams. `None`: no whole number of pieces, or too many.
pub(crate) fn stream_tile(width: usize) -> Option<StreamTile> {
    let pieces = width / 64;
    let even = [5, 4, 3]
        .into_iter()
        .find(|pairs| pieces.is_multiple_of(*pairs) && pieces / pairs <= STREAM_MOST_WARPS);
    let spread = || pieces.div_ceil(pieces.div_ceil(STREAM_MOST_PIECES).max(1));
    stream_tile_of(width, even.unwrap_or_else(spread))
}

/// The division of `width` inputs with `pairs` pieces a warp; `None`: there are no whole pieces, or they
/// take too many warps or too much shared memory.
pub(crate) fn stream_tile_of(width: usize, pairs: usize) -> Option<StreamTile> {
    let pieces = width / 64;
    if width == 0 || !width.is_multiple_of(64) || !(1..=STREAM_MOST_PIECES).contains(&pairs) {
        return None;
    }
    let warps = pieces.div_ceil(pairs);
    if warps > STREAM_MOST_WARPS {
        return None;
    }
    // Of a stream: two tiles of its inputs, 16 rows each, and the partial sums.
    let bytes = warps * (2 * STREAM_TILE_ROWS * pairs * 128 + 2048);
    let room = (STREAM_SHARED - STREAM_LISTS) / bytes;
    let streams = if warps > 5 { 1 } else { STREAM_THREADS / 32 / (warps + 1) };
    (room > 0).then_some(StreamTile { width, warps, pairs, streams: streams.min(room) })
}

/// The division with given pieces a warp, where they are given.
pub(crate) fn stream_tile_or(width: usize, pieces: Option<usize>) -> Option<StreamTile> {
    match pieces {
        Some(pieces) => stream_tile_of(width, pieces),
        None => stream_tile(width),
    }
}

/// Whether kernels of weight streams exist for an architecture: those with bulk copies.
pub(crate) fn has_streams(architecture: &str) -> bool {
    !architecture.starts_with("sm_8")
}

/// Chooses for one call of `fused_moe` or `fused_moe_lora`.
pub(crate) fn moe_path(call: &MoeCall, limits: Limits) -> MoePath {
    if let Some(stream) = stream(call, [None; 3], limits) {
        return MoePath::Stream(stream);
    }
    let kind = match limits.groups {
        true => PrefillKind::Warpgroups,
        false => PrefillKind::Warps(WarpTile::DEFAULT),
    };
    prefill(call, kind, limits).map_or(MoePath::General, MoePath::Prefill)
}

/// How the products of a prefill step are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MoePrefill {
    /// Products of warpgroups with tensor maps, else of warps.
    pub(crate) warpgroups: bool,
    /// The shape of those of warpgroups.
    pub(crate) shape: PrefillShape,
    /// The tiles of products of warps.
    pub(crate) warps: WarpTile,
    /// The same for both products: a block a multiprocessor, which take works in turn.
    pub(crate) product: Geometry,
}

/// The shapes of products of warpgroups, by the tokens that an expert has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefillShape {
    Few,
    Some,
    Many,
}

/// The tiles of products of warps, constants of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WarpTile {
    /// Most tokens of a tile.
    pub(crate) tokens: usize,
    /// Stages of 64 of k in flight.
    pub(crate) stages: usize,
    /// Whether widths are whole stages, so that nothing is masked along k.
    pub(crate) even_k: bool,
}

impl WarpTile {
    pub(crate) const DEFAULT: WarpTile = WarpTile { tokens: 96, stages: 3, even_k: false };

    /// Names and values in the unit's text.
    pub(crate) fn constants(&self) -> [(&'static str, usize); 4] {
        [
            ("kMmaTokens", self.tokens),
            ("kMmaStages", self.stages),
            ("kMmaShared", self.shared()),
            ("kEvenK", usize::from(self.even_k)),
        ]
    }

    /// Stages of 128 rows of a weight and the tokens, 128 bytes each, and what is known of each token.
    pub(crate) fn shared(&self) -> usize {
        self.stages * (128 + self.tokens) * 128 + self.tokens * (16 + 4) + 32
    }
}

/// How products of a prefill step are made, where data says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefillKind {
    Warpgroups,
    Warps(WarpTile),
}

/// Shared memory of the products beside their tables, and of an entry of those. The device source asserts
/// the same numbers.
const PREFILL_MANY_SHARED: usize = 1024 + 225_456;
const PREFILL_SOME_SHARED: usize = 1024 + 218_464;
const PREFILL_FEW_SHARED: usize = 1024 + 217_104;
const PREFILL_EXPERT_SHARED: usize = 16;
/// Bytes of what is counted of experts: a count of each, two of all, and with shrinks between both products one more of
/// each.
pub(crate) const PREFILL_READY_BYTES: usize = 4096;
const _: () =
    assert!(4 * (2 * 256 + 2) <= PREFILL_READY_BYTES, "of as many experts as have shrinks there");
/// Blocks that share the tokens of an expert, where there are more than few.
const PREFILL_CLUSTER: usize = 2;
/// Most tokens an expert on average for the shapes for few and for some: so that hardly one has more than
/// their tiles, of 64 and of 128.
const PREFILL_FEW_TOKENS: usize = 44;
const PREFILL_SOME_TOKENS: usize = 100;
/// Of the shrink.
const PREFILL_SHRINK_SHARED: usize = 98_304;

/// Most tokens an expert on average for shrinks between both products in one launch: so many that hardly one
/// has more than a tile.
const PREFILL_BETWEEN_TOKENS: usize = 256;
/// Tiles of shrinks of a block there, the device source says the same; and so many that making them there is faster
/// than in a launch of its own where experts have fewer tokens.
const PREFILL_CUTS: usize = 63;
const PREFILL_SOME_CUTS: usize = 4;

impl MoePrefill {
    /// Whether one launch makes both products and the shrink between.
    pub(crate) fn shrinks_between(&self, pairs: usize, experts: usize, lora_tiles: usize) -> bool {
        // A block counts each expert's tiles where its second index of a work's pairs will be.
        let (cuts, places) = match self.shape {
            PrefillShape::Few => (0, 0),
            PrefillShape::Some => (PREFILL_SOME_CUTS, 128),
            PrefillShape::Many => (PREFILL_CUTS, 256),
        };
        self.warpgroups
            && experts <= places
            && pairs <= PREFILL_BETWEEN_TOKENS * experts
            && lora_tiles <= cuts * self.product.grid[0] as usize
    }
}

/// Such products; `None`: they do not take the call.
pub(crate) fn prefill(call: &MoeCall, kind: PrefillKind, limits: Limits) -> Option<MoePrefill> {
    let &MoeCall { pairs, experts, hidden, inner, dtype, plain, x_bytes, .. } = call;
    let (warpgroups, warps) = match kind {
        PrefillKind::Warpgroups => (true, WarpTile::DEFAULT),
        PrefillKind::Warps(tile) => (false, tile),
    };
    let shape = match pairs {
        _ if pairs <= PREFILL_FEW_TOKENS * experts => PrefillShape::Few,
        _ if pairs <= PREFILL_SOME_TOKENS * experts => PrefillShape::Some,
        _ => PrefillShape::Many,
    };
    let (fixed, cluster) = match (warpgroups, shape) {
        (false, _) => (warps.shared(), 1),
        (true, PrefillShape::Few) => (PREFILL_FEW_SHARED, 1),
        (true, PrefillShape::Some) => (PREFILL_SOME_SHARED, PREFILL_CLUSTER),
        (true, PrefillShape::Many) => (PREFILL_MANY_SHARED, PREFILL_CLUSTER),
    };
    let whole = |width: usize| width.is_multiple_of(if warps.even_k { 64 } else { 8 });
    let shared = fixed + PREFILL_EXPERT_SHARED * (experts + 1);
    let fits = dtype.size() == 2
        && plain
        && (limits.groups || !warpgroups)
        && whole(hidden)
        && whole(inner)
        && (!warpgroups || 4 * (experts + 2) <= PREFILL_READY_BYTES)
        // Rows are found by 32 bits.
        && u32::try_from(x_bytes.max(pairs * inner * dtype.size())).is_ok()
        && shared.max(PREFILL_SHRINK_SHARED) <= limits.shared;
    let grid = blocks(limits.processors / cluster * cluster, 1);
    let product = Geometry::new([grid, 1, 1]).shared(shared as u32).overlapped();
    let product = Geometry { cluster: cluster as u32, ..product };
    fits.then_some(MoePrefill { warpgroups, shape, warps, product })
}

/// The gather of a prefill step: two warps for each row, of eight in a block.
pub(crate) fn prefill_gather(pairs: usize) -> Geometry {
    Geometry::new([blocks(2 * pairs, 8), 1, 1]).overlapped()
}

/// The shrink of a prefill step: a block for each LoRA tile.
pub(crate) fn prefill_shrink(lora_tiles: usize) -> Geometry {
    Geometry::new([blocks(lora_tiles, 1), 1, 1]).shared(PREFILL_SHRINK_SHARED as u32).overlapped()
}

/// The stream, with given tokens of a pass and pieces of a warp of gate_up and of down where they are
/// given; `None`: it does not take the call.
pub(crate) fn stream(
    call: &MoeCall,
    [pass, gate_up, down]: [Option<usize>; 3],
    limits: Limits,
) -> Option<MoeStream> {
    let &MoeCall { tokens, pairs, experts, hidden, inner, dtype, tiles, lora_tiles, .. } = call;
    // A rank of 256 in both slices makes 32 tiles of A of a LoRA tile.
    let shrinks = 2 * (lora_tiles.min(pairs) * 2 * (MAX_RANK / 16)).div_ceil(2 * limits.processors);
    let pass = pass.unwrap_or(if tokens <= 8 { 8 } else { 16 });
    // A block's share of the passes over tiles. Eight tokens have one each at most.
    let widest = hidden.max(2 * inner) / STREAM_TILE_ROWS;
    let further = if tokens <= 8 { STREAM_TILE_ROWS } else { pass };
    let passes = experts.min(pairs) + pairs / further;
    let items = shrinks + (widest * passes).div_ceil(limits.processors) + 1;
    let fits = limits.overlap
        && limits.shared >= STREAM_SHARED
        && dtype.size() == 2
        && call.plain
        && call.tile_rows <= STREAM_TILE_ROWS
        && tokens <= STREAM_TOKENS
        && pairs <= STREAM_PAIRS
        && experts <= STREAM_EXPERTS
        && tiles <= STREAM_THREADS
        && lora_tiles <= 2 * STREAM_THREADS
        && shrinks <= STREAM_SHRINKS
        // Kernels of passes of eight make one pass over each tile.
        && (pass > 8 || tokens <= 8)
        && items <= STREAM_ITEMS;
    let (gate_up, down) = (stream_tile_or(hidden, gate_up)?, stream_tile_or(inner, down)?);
    fits.then_some(MoeStream { gate_up, down, pass })
}

/// The blocks of a product that is streamed: one a multiprocessor.
pub(crate) fn streamed(limits: Limits) -> Geometry {
    Geometry::new([blocks(limits.processors, 1), 1, 1]).shared(STREAM_SHARED as u32).overlapped()
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits =
        Limits { processors: 132, shared: STREAM_SHARED, overlap: true, groups: true };

    #[test]
    fn products_are_shared_out_evenly_where_they_can_be() {
        let of = |width| stream_tile(width).map(|t| (t.warps, t.pairs, t.streams));
        assert_eq!(of(2880), Some((9, 5, 1)));
        assert_eq!(of(2048), Some((8, 4, 1)));
        assert_eq!(of(768), Some((3, 4, 3)));
        assert_eq!(of(704), Some((3, 4, 3)), "eleven pieces: four, four and three");
        assert_eq!(of(64), Some((1, 1, 6)));
        assert_eq!(of(1600), Some((5, 5, 1)), "two streams of it would not fit");
        assert_eq!([of(0), of(48), of(3072), of(4096)], [None; 4]);
        for width in (64..=2880).step_by(64) {
            let StreamTile { warps, pairs, streams, .. } = stream_tile(width).expect("in range");
            let last = (width / 64).checked_sub((warps - 1) * pairs).expect("no idle warp");
            assert!((1..=pairs).contains(&last), "{width}");
            let epilogues = if streams == 1 { 2 } else { 1 };
            assert!(streams * (warps + epilogues) * 32 <= STREAM_THREADS, "{width}");
            let bytes = streams * warps * (pairs * 4096 + 2048);
            assert!(bytes + STREAM_LISTS <= STREAM_SHARED, "{width}");
        }
    }

    #[test]
    fn few_tokens_are_streamed_and_all_else_is_not() {
        let call = MoeCall {
            tokens: 32,
            pairs: 128,
            experts: 32,
            hidden: 2880,
            inner: 2880,
            dtype: DType::BF16,
            tiles: 40,
            lora_tiles: 136,
            tile_rows: 16,
            plain: true,
            x_bytes: 0,
        };
        let streams = |call: MoeCall, limits| matches!(moe_path(&call, limits), MoePath::Stream(_));
        assert!(streams(call, H200));
        assert!(!streams(call, Limits { overlap: false, ..H200 }));
        assert!(!streams(MoeCall { tokens: 65, ..call }, H200));
        let pass_of_eight =
            |tokens| stream(&MoeCall { tokens, ..call }, [Some(8), None, None], H200);
        assert!(pass_of_eight(8).is_some());
        assert_eq!(pass_of_eight(9), None, "its kernels make one pass over a tile");
        assert!(!streams(MoeCall { dtype: DType::F32, ..call }, H200));
        assert!(!streams(MoeCall { inner: 48, ..call }, H200));
        assert!(!streams(MoeCall { plain: false, ..call }, H200));
        // Adapters of the largest rank must fit a block's list even where few blocks share them.
        let many = MoeCall { pairs: 512, lora_tiles: 544, ..call };
        assert!(streams(many, H200) && !streams(many, Limits { processors: 60, ..H200 }));
    }

    #[test]
    fn many_tokens_of_whole_pieces_go_to_tensor_cores() {
        let call = MoeCall {
            tokens: 1600,
            pairs: 6400,
            experts: 128,
            hidden: 2048,
            inner: 768,
            dtype: DType::BF16,
            tiles: 528,
            lora_tiles: 1424,
            tile_rows: 16,
            plain: true,
            x_bytes: 0,
        };
        let path = |call: MoeCall, limits| match moe_path(&call, limits) {
            MoePath::Prefill(prefill) => Some(prefill.warpgroups),
            _ => None,
        };
        assert_eq!(path(call, H200), Some(true));
        assert_eq!(path(call, Limits { groups: false, shared: 99 << 10, ..H200 }), Some(false));
        assert_eq!(path(call, Limits { groups: false, shared: 64 << 10, ..H200 }), None);
        assert_eq!(path(MoeCall { hidden: 2049, ..call }, H200), None);
        assert_eq!(path(MoeCall { dtype: DType::F32, ..call }, H200), None);
        assert_eq!(path(MoeCall { plain: false, ..call }, H200), None);
        assert_eq!(path(MoeCall { x_bytes: 1 << 32, ..call }, H200), None);
        assert_eq!(path(MoeCall { experts: 4096, ..call }, H200), None);
    }

    #[test]
    fn the_shape_depends_on_tokens_an_expert_and_blocks_share_more_than_few() {
        let call = MoeCall {
            tokens: 256,
            pairs: 1024,
            experts: 32,
            hidden: 2880,
            inner: 2880,
            dtype: DType::BF16,
            tiles: 96,
            lora_tiles: 0,
            tile_rows: 16,
            plain: true,
            x_bytes: 0,
        };
        let how = |pairs, processors| {
            let call = MoeCall { pairs, ..call };
            let how = prefill(&call, PrefillKind::Warpgroups, Limits { processors, ..H200 });
            how.expect("the call fits")
        };
        for (pairs, shape, cluster) in [
            (1024, PrefillShape::Few, 1),
            (3200, PrefillShape::Some, 2),
            (3232, PrefillShape::Many, 2),
        ] {
            let how = how(pairs, 132);
            assert_eq!((how.shape, how.product.cluster), (shape, cluster));
            assert_eq!(how.product.grid, [132, 1, 1]);
        }
        assert_eq!(how(6400, 133).product.grid, [132, 1, 1], "whole clusters");
    }

    #[test]
    fn shrinks_are_made_between_both_products_where_there_is_room_for_them() {
        let between = |shape, pairs, experts, lora_tiles| {
            let product = Geometry { cluster: 2, ..Geometry::new([132, 1, 1]) };
            MoePrefill { warpgroups: true, shape, warps: WarpTile::DEFAULT, product }
                .shrinks_between(pairs, experts, lora_tiles)
        };
        let [few, some, many] = [PrefillShape::Few, PrefillShape::Some, PrefillShape::Many];
        assert!(!between(few, 1024, 32, 96));
        assert!(between(some, 2048, 32, 528) && !between(some, 2048, 32, 529));
        assert!(between(many, 6400, 32, 63 * 132) && !between(many, 6400, 32, 63 * 132 + 1));
        assert!(between(many, 8192, 32, 544) && !between(many, 8193, 32, 544));
        // More experts than their counts have room for.
        assert!(between(some, 6400, 128, 528) && !between(some, 6450, 129, 528));
        assert!(between(many, 30_720, 256, 4344) && !between(many, 30_840, 257, 4352));
    }

    #[test]
    fn many_keys_are_sorted_by_few_blocks_behind_a_choice_of_its_own() {
        let blocks = |tokens| {
            let shape = RoutingShape { tokens, top_k: 8, experts: 128, slots: 8, tile_rows: 16 };
            match route_path(&shape, 0, H200) {
                RoutePath::ChooseThenSort(sort) => sort.cluster,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([17, 128, 129, 512, 1024].map(blocks), [1, 1, 8, 8, 16]);
        let base = RoutingShape { tokens: 128, top_k: 8, experts: 128, slots: 0, tile_rows: 16 };
        let alone = route_path(&base, 0, H200);
        assert!(matches!(alone, RoutePath::Sort(g) if g.cluster == 8), "few keys: {alone:?}");
    }

    #[test]
    fn routing_falls_back_where_shared_memory_ends() {
        let shape = RoutingShape { tokens: 1600, top_k: 4, experts: 32, slots: 8, tile_rows: 16 };
        let path = |shape: RoutingShape| route_path(&shape, 0, H200);
        assert!(matches!(path(shape), RoutePath::ChooseThenSort(g) if g.cluster == 16));
        assert!(matches!(path(RoutingShape { tokens: 128, ..shape }), RoutePath::Sort(_)));
        assert!(
            matches!(path(RoutingShape { tokens: 32, ..shape }), RoutePath::Sort(g) if g.cluster == 8)
        );
        assert_eq!(path(RoutingShape { tokens: 16, ..shape }), RoutePath::Few);
        let many = RoutingShape { tokens: 16, top_k: 8, experts: 128, ..shape };
        assert_eq!(path(many), RoutePath::Few, "many keys are dear to sum");
        assert_eq!(path(RoutingShape { slots: 200, ..shape }), RoutePath::General);
        assert_eq!(path(RoutingShape { experts: 512, ..shape }), RoutePath::General);
        assert_eq!(route_path(&shape, 4, H200), RoutePath::General);
    }
}
