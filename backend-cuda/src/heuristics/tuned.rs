//! The choice for each call: what tuning data says of the nearest call that its kernel takes, else the
//! heuristic. Calls are described here to the data, and its words turned into launches.

use amphora_cuda_kernels::Source;
use amphora_hal::DType;
use amphora_hal::ops::RoutingShape;

use super::attention::{self, Call};
use super::dense::{self, GroupShrink, GroupTile, Library, Operands, Path, Product, Shrink, Tile};
use super::{MoeCall, MoePath, PrefillKind, ROUTE_FEW_PAIRS, RoutePath, moe_path, route_path};
use super::{PRODUCT, shrunk_bytes};
use super::{has_streams, prefill, route_sort, routes_fast, stream, stream_tile_or};
use crate::driver::Limits;
use crate::driver::cublaslt::Shape;
use crate::jit::{Unit, Variant};
use crate::tuning::operators::{
    AttentionPath, Deltas, DensePath, DenseUse, ExpertsPath, Order, RoutePath as RouteWords,
    ShrinkUse,
};
use crate::tuning::{Element, Tuning, When};

/// A product's kernel. `library` gives its shape if cuBLASLt is installed and takes it, and is asked
/// only where it matters.
pub(crate) fn dense_path(
    product: &Product,
    dtype: DType,
    library: impl Fn() -> Option<Shape>,
    (limits, tuning): (Limits, &Tuning),
) -> Path {
    let by_library = || {
        if dense::library_fits(product) { library().map(Path::Library) } else { None }
    };
    let heuristic = || {
        let groups = dense::goes_to_groups(product, limits);
        if let Some(path) = dense::group(product, limits).filter(|_| groups) {
            return path;
        }
        let large = dense::goes_to_library(product, limits);
        let by_library = if large { by_library() } else { None };
        by_library.unwrap_or_else(|| dense::path(product, limits))
    };
    if product.operands == Operands::Exact {
        return heuristic();
    }
    let tiled = |tile, choice: &DenseUse| choice.tiling(tile).path(product, limits);
    let tuned = tuning.linear.find(&dense_when(product, dtype), |choice| match choice.path {
        DensePath::Stream => dense::stream(product, limits),
        DensePath::Cluster => dense::cluster(product, choice.parts.unwrap_or(1), limits),
        DensePath::Narrow => tiled(Tile::Narrow, choice),
        DensePath::Wide => tiled(Tile::Wide, choice),
        DensePath::Library => by_library(),
        DensePath::Warpgroups => dense::group(product, limits),
    });
    tuned.unwrap_or_else(heuristic)
}

fn dense_when(product: &Product, dtype: DType) -> When {
    When {
        tokens: Some(product.tokens),
        k: Some(product.k),
        n: Some(product.n),
        dtype: Element::of(dtype),
        ..When::default()
    }
}

/// Whether products within a bound may leave their sums to another kernel, which takes workspace.
pub(crate) fn may_use_sums(tokens: usize, n: usize, library: Library, tuning: &Tuning) -> bool {
    let of = |choice: &DenseUse| match choice.path {
        DensePath::Library => library == Library::Present,
        _ => choice.deltas == Some(Deltas::Apart),
    };
    let large = library == Library::Present && dense::may_go_to_library(tokens, n);
    large || (n.is_multiple_of(8) && tuning.linear.any(of))
}

/// The shrink of a dense product's deltas: `tiles` of segments, `slices` of outputs.
pub(crate) fn dense_shrink(
    product: &Product,
    dtype: DType,
    [tiles, slices]: [usize; 2],
    tuning: &Tuning,
) -> Shrink {
    let tuned = tuning.lora_linear.find(&dense_when(product, dtype), |choice| {
        Some(dense::shrink_of(tiles, slices, [choice.rank_rows, choice.rank_parts]))
    });
    tuned.unwrap_or_else(|| dense::shrink(tiles, slices, product.k))
}

/// The shrink by warpgroup products in front of a product by such tiles; `None`: it does not take the product, or
/// data says how the other one takes it.
pub(crate) fn shrink_in_groups(
    (product, tile): (&Product, GroupTile),
    dtype: DType,
    (limits, tuning): (Limits, &Tuning),
) -> Option<GroupShrink> {
    let tuned = tuning.lora_linear.find(&dense_when(product, dtype), |choice| Some(*choice));
    if tuned.is_some() { None } else { dense::shrink_group(product, tile, limits) }
}

/// How the blocks of a shrink in f32 share k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) parts: usize,
    pub(crate) order: Order,
}

/// Most rows of partial sums: 16 MiB.
const MOST_PARTIAL_ROWS: usize = 4096;

/// The split of a shrink of `positions` rows of width `k`; not at all unless data says so.
pub(crate) fn shrink_split(
    [tokens, positions, k]: [usize; 3],
    dtype: DType,
    tuning: &Tuning,
) -> Split {
    let when =
        When { tokens: Some(tokens), k: Some(k), dtype: Element::of(dtype), ..When::default() };
    let tuned = tuning.lora_shrink.find(&when, |&ShrinkUse { parts, order }| {
        let chunks = k.div_ceil(PRODUCT.depth).max(1);
        let room = order == Order::Atomic || parts * positions <= MOST_PARTIAL_ROWS;
        (parts <= chunks && room).then_some(Split { parts, order })
    });
    tuned.unwrap_or(Split { parts: 1, order: Order::Ordered })
}

impl Split {
    /// Rows of partial sums of `positions` rows.
    pub(crate) fn partial_rows(self, positions: usize) -> usize {
        if self.parts > 1 && self.order == Order::Ordered { self.parts * positions } else { 0 }
    }
}

/// Workspace of the partial sums of any split of at most `positions` rows.
pub(crate) fn partial_bytes(positions: usize, tuning: &Tuning) -> usize {
    let most = |choice: &ShrinkUse| {
        Split { parts: choice.parts, order: choice.order }.partial_rows(positions) > 0
    };
    let rows = if tuning.lora_shrink.any(most) { MOST_PARTIAL_ROWS } else { 0 };
    shrunk_bytes(rows.min(ShrinkUse::MOST_PARTS * positions))
}

/// The kernels of routing; `groups`: the choice is limited to groups.
pub(crate) fn routing(
    shape: &RoutingShape,
    groups: usize,
    (limits, tuning): (Limits, &Tuning),
) -> RoutePath {
    let when = When {
        tokens: Some(shape.tokens),
        experts: Some(shape.experts),
        top_k: Some(shape.top_k),
        ..When::default()
    };
    let tuned = tuning.moe_route.find(&when, |choice| {
        let sort = || route_sort(shape, choice.blocks.unwrap_or(super::sort_blocks(shape)), limits);
        if !routes_fast(shape, groups) {
            return None;
        }
        match choice.path {
            RouteWords::Few if shape.tokens * shape.top_k <= ROUTE_FEW_PAIRS => {
                Some(RoutePath::Few)
            }
            RouteWords::Few => None,
            RouteWords::Sort => sort().map(RoutePath::Sort),
            RouteWords::Choose => sort().map(RoutePath::ChooseThenSort),
        }
    });
    tuned.unwrap_or_else(|| route_path(shape, groups, limits))
}

/// The kernels of both expert products.
pub(crate) fn experts(
    call: &MoeCall,
    top_k: usize,
    (limits, tuning): (Limits, &Tuning),
) -> MoePath {
    let when = When {
        tokens: Some(call.tokens),
        k: Some(call.hidden),
        inner: Some(call.inner),
        experts: Some(call.experts),
        top_k: Some(top_k),
        dtype: Element::of(call.dtype),
        ..When::default()
    };
    let tuned = tuning.fused_moe.find(&when, |choice| match choice.path {
        ExpertsPath::Stream => {
            let sizes = [choice.pass, choice.gate_up_pieces, choice.down_pieces];
            stream(call, sizes, limits).map(MoePath::Stream)
        }
        ExpertsPath::Warpgroups => {
            prefill(call, PrefillKind::Warpgroups, limits).map(MoePath::Prefill)
        }
        ExpertsPath::Warps => {
            let tile = PrefillKind::Warps(choice.warp_tile());
            prefill(call, tile, limits).map(MoePath::Prefill)
        }
        ExpertsPath::General => Some(match choice.deltas {
            Some(Deltas::Apart) => MoePath::GeneralApart,
            _ => MoePath::General,
        }),
    });
    tuned.unwrap_or_else(|| moe_path(call, limits))
}

/// The units that data asks for beside those that are always there, as far as it names sizes: they are
/// compiled when the device is opened, and not by a step.
pub(crate) fn units(tuning: &Tuning, architecture: &str) -> Vec<Unit> {
    let mut found: Vec<Unit> = Vec::new();
    let mut ask = |source, variant, dtype: Option<Element>| {
        let half = [(DType::F16, Element::F16), (DType::BF16, Element::Bf16)];
        for (element, _) in half.iter().filter(|(_, of)| dtype.is_none_or(|dtype| dtype == *of)) {
            let unit = Unit { source, element: Some(*element), variant: Some(variant) };
            if !found.contains(&unit) {
                found.push(unit);
            }
        }
    };
    for (when, choice) in tuning.linear.each() {
        let tiles = matches!(choice.path, DensePath::Narrow | DensePath::Wide);
        if tiles && choice.even_k == Some(true) {
            ask(Source::LinearTile, Variant::Tiles { even_k: true }, when.dtype);
        }
    }
    for (when, choice) in tuning.fused_moe.each() {
        if choice.path == ExpertsPath::Warps {
            let tile = Variant::Warps(choice.warp_tile());
            ask(Source::FusedMoePrefillMma, tile, when.dtype);
        }
        let streams = choice.path == ExpertsPath::Stream && has_streams(architecture);
        for (source, width, pieces) in [
            (Source::StreamGateUp, when.k, choice.gate_up_pieces),
            (Source::StreamDown, when.inner, choice.down_pieces),
        ] {
            let tile = width.filter(|_| streams).and_then(|width| stream_tile_or(width, pieces));
            if let Some(tile) = tile {
                ask(source, Variant::Stream(tile), when.dtype);
            }
        }
    }
    found
}

/// The kernel of attention.
pub(crate) fn attention_path(
    call: &Call,
    dtype: DType,
    (limits, tuning): (Limits, &Tuning),
) -> attention::Path {
    let when = When {
        tokens: Some(call.tokens),
        heads: Some(call.heads),
        kv_heads: Some(call.kv_heads),
        head_dim: Some(call.dim),
        dtype: Element::of(dtype),
        ..When::default()
    };
    let tuned = tuning.paged_attention.find(&when, |choice| match choice.path {
        AttentionPath::Split => attention::split(call, choice.splits, limits),
        AttentionPath::Warpgroups => attention::group(call, limits),
        AttentionPath::Flash => attention::flash(call, limits),
    });
    tuned.unwrap_or_else(|| attention::path(call, limits))
}

#[cfg(test)]
mod tests {
    use super::super::WarpTile;
    use super::super::dense::{Sums, Tiling};
    use super::*;
    use crate::tuning::AnyFile;

    const H200: Limits = Limits { processors: 132, shared: 227 << 10, overlap: true, groups: true };

    /// A tuning of one file with these entries.
    fn tuning(operator: &str, entries: &str) -> Tuning {
        let text =
            format!(r#"{{"gpu": "a GPU", "operator": "{operator}", "entries": [{entries}]}}"#);
        let mut tuning = Tuning::default();
        tuning.put_first(AnyFile::parse(&text).expect("sound"));
        tuning
    }

    fn product(tokens: usize) -> Product {
        let place = dense::SumsPlace::Workspace;
        Product { tokens, n: 5120, k: 2880, operands: Operands::HalfAligned, place }
    }

    #[test]
    fn data_chooses_the_kernel_of_a_product_and_its_sizes() {
        let shape = Shape { m: 32, n: 5120, k: 2880, x_pitch: 2880, dtype: DType::BF16 };
        let of = |entries: &str, tokens| {
            let tuning = tuning("linear", entries);
            dense_path(&product(tokens), DType::BF16, || Some(shape), (H200, &tuning))
        };
        let one = r#"{"when": {"tokens": 8}, "use": {"path": "stream"}}"#;
        assert!(matches!(of(one, 1), Path::Stream(dense::Stream::Eight, _)));
        let wide = r#"{"when": {"k": 2880}, "use": {"path": "wide", "parts": 2}}"#;
        assert_eq!(of(wide, 8), Path::Tiles(Tile::Wide, 2));
        let library = r#"{"when": {"k": 2880}, "use": {"path": "library"}}"#;
        assert_eq!(of(library, 32), Path::Library(shape));
        // The stream does not take 17 rows: the next nearest does.
        let both = format!(r#"{one}, {{"when": {{"tokens": 64}}, "use": {{"path": "narrow"}}}}"#);
        assert_eq!(of(&both, 17), Path::Tiles(Tile::Narrow, 1));
        let apart = r#"{"when": {"k": 2880}, "use": {"path": "wide", "parts": 2, "group": 4, "even_k": true, "deltas": "apart", "order": "atomic"}}"#;
        let Path::Tiling(tiling) = of(apart, 8) else { panic!("{:?}", of(apart, 8)) };
        assert_eq!((tiling.group, tiling.even_k, tiling.sums), (4, true, Sums::Atomic));
        let grouped = r#"{"when": {"k": 2880}, "use": {"path": "narrow", "group": 2}}"#;
        assert!(matches!(
            of(grouped, 8),
            Path::Tiling(Tiling { group: 2, sums: Sums::Inside, .. })
        ));
        let other = r#"{"when": {"n": 64}, "use": {"path": "wide"}}"#;
        assert_eq!(of(other, 8), of("", 8), "another shape's");
    }

    #[test]
    fn data_that_sends_products_to_the_library_is_counted() {
        let tuning = tuning("linear", r#"{"when": {"k": 64}, "use": {"path": "library"}}"#);
        assert!(may_use_sums(32, 5120, Library::Present, &tuning));
        assert!(!may_use_sums(32, 5121, Library::Present, &tuning));
        assert!(!may_use_sums(32, 5120, Library::Absent, &tuning));
        assert!(!may_use_sums(32, 5120, Library::Present, &Tuning::default()));
        let apart = r#"{"when": {"k": 64}, "use": {"path": "narrow", "deltas": "apart"}}"#;
        assert!(may_use_sums(32, 5120, Library::Absent, &self::tuning("linear", apart)));
    }

    #[test]
    fn data_shares_out_the_rows_of_a() {
        let tuning = tuning(
            "lora_linear",
            r#"{"when": {"k": 2880}, "use": {"rank_rows": 32, "rank_parts": 2}}"#,
        );
        let shrink = dense_shrink(&product(8), DType::BF16, [8, 3], &tuning);
        assert_eq!((shrink.geometry.grid, shrink.rank_rows), ([8, 3, 2], 32));
        let plain = dense_shrink(&product(8), DType::BF16, [8, 3], &Tuning::default());
        assert_eq!((plain.geometry.grid, plain.rank_rows), ([8, 3, 4], 8));
    }

    #[test]
    fn data_splits_a_shrink_whose_partial_sums_have_room() {
        let entries = r#"{"when": {"k": 64}, "use": {"parts": 2, "order": "ordered"}},
            {"when": {"k": 96}, "use": {"parts": 3, "order": "atomic"}}"#;
        let tuning = tuning("lora_shrink", entries);
        let of = |positions, k| shrink_split([8, positions, k], DType::F32, &tuning);
        assert_eq!((of(8, 64).parts, of(8, 64).partial_rows(8)), (2, 16));
        assert_eq!((of(8, 96).parts, of(8, 96).partial_rows(8)), (3, 0));
        assert_eq!(of(MOST_PARTIAL_ROWS, 64).parts, 1, "no room");
        assert_eq!(of(MOST_PARTIAL_ROWS, 96).parts, 3, "which atomics do not need");
        assert_eq!(of(8, 32).parts, 1);
        assert_eq!(partial_bytes(8, &tuning), shrunk_bytes(16 * 8));
        assert_eq!(partial_bytes(8, &Tuning::default()), 0);
    }

    #[test]
    fn data_chooses_the_sort_and_its_blocks() {
        let shape = RoutingShape { tokens: 128, top_k: 4, experts: 32, slots: 8, tile_rows: 16 };
        let of = |entries: &str, shape| routing(&shape, 0, (H200, &tuning("moe_route", entries)));
        let choose = r#"{"when": {"experts": 32}, "use": {"path": "choose", "blocks": 4}}"#;
        assert!(matches!(of(choose, shape), RoutePath::ChooseThenSort(g) if g.cluster == 4));
        let few = r#"{"when": {"tokens": 16, "top_k": 4}, "use": {"path": "few"}}"#;
        assert!(matches!(of(few, shape), RoutePath::Sort(_)), "too many pairs for one block");
        let grouped = routing(&shape, 2, (H200, &tuning("moe_route", choose)));
        assert_eq!(grouped, RoutePath::General);
    }

    #[test]
    fn data_chooses_the_expert_products_and_their_sizes() {
        let call = MoeCall {
            tokens: 8,
            pairs: 32,
            experts: 32,
            hidden: 2880,
            inner: 2880,
            dtype: DType::BF16,
            tiles: 32,
            lora_tiles: 32,
            tile_rows: 16,
            plain: true,
            x_bytes: 0,
        };
        let of = |entries: &str| experts(&call, 4, (H200, &tuning("fused_moe", entries)));
        let stream =
            r#"{"when": {"inner": 2880}, "use": {"path": "stream", "pass": 16, "down_pieces": 5}}"#;
        let MoePath::Stream(stream) = of(stream) else { panic!("a stream") };
        assert_eq!((stream.pass, stream.down.pairs), (16, 5));
        let MoePath::Stream(plain) = of("") else { panic!("a stream") };
        assert_eq!(plain.pass, 8);
        for (path, warpgroups) in [("warpgroups", true), ("warps", false)] {
            let entry = format!(r#"{{"when": {{"top_k": 4}}, "use": {{"path": "{path}"}}}}"#);
            let MoePath::Prefill(how) = of(&entry) else { panic!("{path}") };
            assert_eq!(how.warpgroups, warpgroups);
        }
        let tile = r#"{"when": {"top_k": 4}, "use": {"path": "warps", "tile_tokens": 32, "stages": 4, "even_k": true}}"#;
        let MoePath::Prefill(how) = of(tile) else { panic!("products of warps") };
        let expected = WarpTile { tokens: 32, stages: 4, even_k: true };
        assert_eq!((how.warps, how.product.shared), (expected, 4 * 160 * 128 + 672 + 16 * 33));
        for (deltas, path) in [("inside", MoePath::General), ("apart", MoePath::GeneralApart)] {
            let entry = format!(
                r#"{{"when": {{"top_k": 4}}, "use": {{"path": "general", "deltas": "{deltas}"}}}}"#
            );
            assert_eq!(of(&entry), path);
        }
    }

    #[test]
    fn what_data_wants_compiled_is_known_when_the_device_opens() {
        let experts = r#"{"when": {"k": 2048, "inner": 768, "dtype": "bf16"}, "use": {"path": "stream", "gate_up_pieces": 5}},
            {"when": {"k": 2048}, "use": {"path": "warps", "tile_tokens": 64}},
            {"when": {}, "use": {"path": "stream", "pass": 16}}, {"when": {"k": 64}, "use": null}"#;
        let of = units(&tuning("fused_moe", experts), "sm_90a");
        let names: Vec<_> = of.iter().map(|unit| (unit.source, unit.element)).collect();
        assert_eq!(
            names,
            [
                (Source::StreamGateUp, Some(DType::BF16)),
                (Source::StreamDown, Some(DType::BF16)),
                (Source::FusedMoePrefillMma, Some(DType::F16)),
                (Source::FusedMoePrefillMma, Some(DType::BF16)),
            ]
        );
        assert_eq!(units(&tuning("fused_moe", experts), "sm_80").len(), 2, "no streams there");
        let dense = r#"{"when": {"dtype": "f16"}, "use": {"path": "wide", "even_k": true}}"#;
        assert_eq!(units(&tuning("linear", dense), "sm_80").len(), 1);
    }

    #[test]
    fn data_chooses_the_kernel_of_attention_and_its_splits() {
        let call = Call {
            tokens: 1,
            sequences: 1,
            heads: 64,
            kv_heads: 8,
            dim: 64,
            span: 131072,
            operands: attention::Operands::Half,
        };
        let of = |entries: &str| {
            attention_path(&call, DType::BF16, (H200, &tuning("paged_attention", entries)))
        };
        let split = r#"{"when": {"heads": 64}, "use": {"path": "split", "splits": 5}}"#;
        assert!(matches!(of(split), attention::Path::Split(_, g) if g.cluster == 5));
        let flash = r#"{"when": {"kv_heads": 8}, "use": {"path": "flash"}}"#;
        assert!(matches!(of(flash), attention::Path::Flash(..)));
        let groups = r#"{"when": {}, "use": {"path": "warpgroups"}}"#;
        assert!(matches!(of(groups), attention::Path::Group(..)));
        assert!(matches!(of(""), attention::Path::Split(_, g) if g.cluster == 16));
    }
}
