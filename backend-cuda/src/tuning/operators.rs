//! What files may say of each operator. A field is here only if a kernel obeys it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{AnyFile, Fault, File, Limits, When};
use crate::heuristics::{self, WarpTile, dense};

/// An operator that has choices.
pub trait Operator: Clone + PartialEq + std::fmt::Debug + Serialize + DeserializeOwned {
    /// Its name in files, and of files.
    const NAME: &'static str;
    /// Sizes that its calls have.
    const FIELDS: &'static [&'static str];

    /// A file of this operator.
    fn any(file: File<Self>) -> AnyFile;

    /// Every choice there is; those that a call or a device does not take fail their checks.
    fn candidates() -> Vec<Self>;

    /// Those of [`Operator::candidates`] that pass both checks for `when` on a device.
    fn possible(when: &When, limits: Limits) -> Vec<Self> {
        let fits =
            |choice: &Self| choice.check(when).and_then(|()| choice.check_on(when, limits)).is_ok();
        Self::candidates().into_iter().filter(fits).collect()
    }

    /// Checks what no device is needed for.
    ///
    /// # Errors
    /// The first value that no kernel obeys.
    fn check(&self, when: &When) -> Result<(), Fault>;

    /// Checks what a device bounds, as far as the entry names sizes.
    ///
    /// # Errors
    /// The first value that asks for more than there is.
    fn check_on(&self, when: &When, limits: Limits) -> Result<(), Fault>;
}

/// `value`, if there is one, is one of those that `expected` says.
fn one_of(field: &str, value: Option<usize>, expected: &[usize]) -> Result<(), Fault> {
    match value {
        Some(value) if !expected.contains(&value) => {
            let known: Vec<String> = expected.iter().map(usize::to_string).collect();
            Err(Fault::new(field, format!("{value}: expected one of {}", known.join(", "))))
        }
        _ => Ok(()),
    }
}

fn between(field: &str, value: Option<usize>, [least, most]: [usize; 2]) -> Result<(), Fault> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(Fault::new(field, format!("{value}: expected {least} to {most}")))
        }
        _ => Ok(()),
    }
}

/// `value` belongs to other paths than the entry's.
fn only_with<T>(field: &str, value: Option<T>, paths: &str) -> Result<(), Fault> {
    match value {
        Some(_) => Err(Fault::new(field, format!("only with path {paths}"))),
        None => Ok(()),
    }
}

fn at_most_tokens(when: &When, most: usize, path: &str) -> Result<(), Fault> {
    match when.tokens {
        Some(tokens) if tokens > most => {
            Err(Fault::new("path", format!("{path} takes at most {most} tokens")))
        }
        _ => Ok(()),
    }
}

fn needs(there: bool, path: &str, what: &str) -> Result<(), Fault> {
    if there {
        return Ok(());
    }
    Err(Fault::new("path", format!("{path} needs {what}, which this GPU has not")))
}

/// A dense product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseUse {
    /// The kernel.
    pub path: DensePath,
    /// `stream`: blocks of a processor, 1 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<usize>,
    /// `narrow`, `wide`: blocks that share k, whose sums meet in order (split-K).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<usize>,
}

/// The kernel of a dense product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DensePath {
    /// At most 16 rows: the weight is streamed.
    Stream,
    /// Tiles of 64 x 32 outputs.
    Narrow,
    /// Tiles of 128 x 128 outputs.
    Wide,
    /// f32 sums by cuBLASLt, finished by a kernel behind it; deltas are added there.
    Library,
}

impl Operator for DenseUse {
    const NAME: &'static str = "linear";
    const FIELDS: &'static [&'static str] = &["tokens", "k", "n"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::Linear(file)
    }

    fn candidates() -> Vec<Self> {
        let of = |path, blocks, parts| DenseUse { path, blocks, parts };
        let mut all: Vec<Self> =
            [1, 2].map(|blocks| of(DensePath::Stream, Some(blocks), None)).to_vec();
        for path in [DensePath::Narrow, DensePath::Wide] {
            all.extend((1..=dense::MOST_PARTS).map(|parts| of(path, None, Some(parts))));
        }
        all.push(of(DensePath::Library, None, None));
        all
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        between("blocks", self.blocks, [1, 2])?;
        between("parts", self.parts, [1, dense::MOST_PARTS])?;
        match self.path {
            DensePath::Stream => {
                only_with("parts", self.parts, "narrow or wide")?;
                at_most_tokens(when, dense::STREAM_ROWS, "stream")
            }
            DensePath::Narrow | DensePath::Wide => only_with("blocks", self.blocks, "stream"),
            DensePath::Library => {
                only_with("parts", self.parts, "narrow or wide")?;
                only_with("blocks", self.blocks, "stream")?;
                match when.n {
                    Some(n) if !dense::library_takes(n) => {
                        Err(Fault::new("path", format!("library does not take {n} outputs")))
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    fn check_on(&self, when: &When, limits: Limits) -> Result<(), Fault> {
        match self.path {
            DensePath::Stream => {
                let (tokens, k) = (when.tokens.unwrap_or(1), when.k.unwrap_or(1));
                let wanted = dense::stream_bytes(tokens, k);
                let blocks = self.blocks.unwrap_or(1);
                match dense::stream_blocks(wanted, limits) {
                    most if most < blocks => {
                        let bytes = format!("{blocks} blocks of {wanted} bytes of shared memory");
                        Err(Fault::new(
                            "blocks",
                            format!("{bytes} are more than {}", limits.shared),
                        ))
                    }
                    _ => Ok(()),
                }
            }
            DensePath::Narrow | DensePath::Wide => {
                let tile = if self.path == DensePath::Wide {
                    dense::Tile::Wide
                } else {
                    dense::Tile::Narrow
                };
                let wanted = tile.all_shared(limits);
                if wanted > limits.shared {
                    let what =
                        format!("{wanted} bytes of shared memory are more than {}", limits.shared);
                    return Err(Fault::new("path", what));
                }
                needs(
                    limits.overlap || self.parts.unwrap_or(1) == 1,
                    "more than one part",
                    "clusters",
                )
            }
            DensePath::Library => Ok(()),
        }
    }
}

/// The deltas of a dense projection: the shrink in front of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaUse {
    /// Rows of A that a block takes at a time: 8 or 32.
    pub rank_rows: usize,
    /// Blocks that share the rows of A.
    pub rank_parts: usize,
}

impl DeltaUse {
    /// Most blocks that share the rows of A.
    pub const MOST_PARTS: usize = 32;
}

impl Operator for DeltaUse {
    const NAME: &'static str = "lora_linear";
    const FIELDS: &'static [&'static str] = &["tokens", "k", "n"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::LoraLinear(file)
    }

    fn candidates() -> Vec<Self> {
        let of = |rank_rows, rank_parts| DeltaUse { rank_rows, rank_parts };
        let parts = [1, 2, 4, 8];
        [8, 32].into_iter().flat_map(|rows| parts.map(|parts| of(rows, parts))).collect()
    }

    fn check(&self, _when: &When) -> Result<(), Fault> {
        one_of("rank_rows", Some(self.rank_rows), &[8, 32])?;
        between("rank_parts", Some(self.rank_parts), [1, Self::MOST_PARTS])
    }

    fn check_on(&self, _when: &When, _limits: Limits) -> Result<(), Fault> {
        Ok(())
    }
}

/// The shrink of every type and shape, in f32: where tensor cores do not take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShrinkUse {
    /// Blocks that share k.
    pub parts: usize,
    /// How their sums meet.
    pub order: Order,
}

/// How sums of several blocks meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// One after another: the same bits each time.
    Ordered,
    /// As they come, by relaxed atomics in f32: the last bits may differ from run to run.
    Atomic,
}

impl ShrinkUse {
    /// Most parts.
    pub const MOST_PARTS: usize = 16;
}

impl Operator for ShrinkUse {
    const NAME: &'static str = "lora_shrink";
    const FIELDS: &'static [&'static str] = &["tokens", "k"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::LoraShrink(file)
    }

    fn candidates() -> Vec<Self> {
        let of = |parts| ShrinkUse { parts, order: Order::Ordered };
        [1, 2, 4, 8, 16].map(of).to_vec()
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        between("parts", Some(self.parts), [1, Self::MOST_PARTS])?;
        let chunks = when.k.map_or(Self::MOST_PARTS, |k| k.div_ceil(heuristics::PRODUCT.depth));
        between("parts", Some(self.parts), [1, chunks.max(1)])
    }

    fn check_on(&self, _when: &When, _limits: Limits) -> Result<(), Fault> {
        Ok(())
    }
}

/// The choice of experts and the sort of the pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteUse {
    /// The kernels.
    pub path: RoutePath,
    /// `sort`, `choose`: blocks of the sort's cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<usize>,
}

/// The kernels of routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoutePath {
    /// At most 64 pairs: one block compares them.
    Few,
    /// One launch that chooses and sorts.
    Sort,
    /// The choice over the whole device, then the sort.
    Choose,
}

impl Operator for RouteUse {
    const NAME: &'static str = "moe_route";
    const FIELDS: &'static [&'static str] = &["tokens", "experts", "top_k"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::MoeRoute(file)
    }

    fn candidates() -> Vec<Self> {
        let mut all = vec![RouteUse { path: RoutePath::Few, blocks: None }];
        for path in [RoutePath::Sort, RoutePath::Choose] {
            all.extend([1, 4, 8, 16].map(|blocks| RouteUse { path, blocks: Some(blocks) }));
        }
        all
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        between("blocks", self.blocks, [1, heuristics::SORT_BLOCKS])?;
        if self.path != RoutePath::Few {
            return Ok(());
        }
        only_with("blocks", self.blocks, "sort or choose")?;
        let most = heuristics::ROUTE_FEW_PAIRS / when.top_k.unwrap_or(1).max(1);
        at_most_tokens(when, most, "few")
    }

    fn check_on(&self, _when: &When, limits: Limits) -> Result<(), Fault> {
        needs(limits.overlap || self.blocks.unwrap_or(1) == 1, "more than one block", "clusters")
    }
}

/// Both expert products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsUse {
    /// The kernels.
    pub path: ExpertsPath,
    /// `stream`: tokens of an expert that a pass over a weight tile takes, 8 or 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<usize>,
    /// `stream`: pieces of 64 inputs that a warp of gate_up multiplies, 1 to 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_up_pieces: Option<usize>,
    /// `stream`: the same of down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_pieces: Option<usize>,
    /// `warps`: most tokens of a tile, 32, 64, 96 or 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile_tokens: Option<usize>,
    /// `warps`: stages of 64 of k in flight, 2 to 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<usize>,
    /// `warps`: nothing is masked along k, where widths are whole stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub even_k: Option<bool>,
    /// `general`: where the deltas of down are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deltas: Option<Deltas>,
}

/// Where deltas are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Deltas {
    /// In the product they belong to.
    Inside,
    /// By a kernel behind it, to its sums in f32.
    Apart,
}

impl ExpertsUse {
    /// Nothing but a path.
    pub fn new(path: ExpertsPath) -> Self {
        ExpertsUse {
            path,
            pass: None,
            gate_up_pieces: None,
            down_pieces: None,
            tile_tokens: None,
            stages: None,
            even_k: None,
            deltas: None,
        }
    }

    /// The tiles of `warps`.
    pub(crate) fn warp_tile(&self) -> WarpTile {
        let WarpTile { tokens, stages, even_k } = WarpTile::DEFAULT;
        WarpTile {
            tokens: self.tile_tokens.unwrap_or(tokens),
            stages: self.stages.unwrap_or(stages),
            even_k: self.even_k.unwrap_or(even_k),
        }
    }
}

/// The kernels of both expert products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsPath {
    /// At most 64 tokens: weights are streamed once.
    Stream,
    /// Products of warpgroups with tensor maps.
    Warpgroups,
    /// Products of warps.
    Warps,
    /// Those of every type and shape, in f32.
    General,
}

impl Operator for ExpertsUse {
    const NAME: &'static str = "fused_moe";
    const FIELDS: &'static [&'static str] = &["tokens", "k", "inner", "experts", "top_k"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::FusedMoe(file)
    }

    fn candidates() -> Vec<Self> {
        let path = ExpertsUse::new;
        let mut all = Vec::new();
        for pass in [8, 16] {
            let stream = ExpertsUse { pass: Some(pass), ..path(ExpertsPath::Stream) };
            let pieces = (2..=heuristics::STREAM_MOST_PIECES).map(Some);
            all.push(stream);
            all.extend(pieces.clone().map(|of| ExpertsUse { gate_up_pieces: of, ..stream }));
            all.extend(pieces.map(|of| ExpertsUse { down_pieces: of, ..stream }));
        }
        all.push(path(ExpertsPath::Warpgroups));
        for even_k in [false, true] {
            let warps = ExpertsUse { even_k: Some(even_k), ..path(ExpertsPath::Warps) };
            let tile = |tokens, stages| ExpertsUse {
                tile_tokens: Some(tokens),
                stages: Some(stages),
                ..warps
            };
            all.extend([tile(32, 4), tile(64, 4), tile(96, 3), tile(128, 3)]);
        }
        all
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        one_of("pass", self.pass, &[8, 16])?;
        one_of("tile_tokens", self.tile_tokens, &[32, 64, 96, 128])?;
        between("stages", self.stages, [2, 4])?;
        if self.path != ExpertsPath::Stream {
            only_with("pass", self.pass, "stream")?;
            only_with("gate_up_pieces", self.gate_up_pieces, "stream")?;
            only_with("down_pieces", self.down_pieces, "stream")?;
        }
        if self.path != ExpertsPath::Warps {
            only_with("tile_tokens", self.tile_tokens, "warps")?;
            only_with("stages", self.stages, "warps")?;
            only_with("even_k", self.even_k, "warps")?;
        }
        if self.path != ExpertsPath::General {
            only_with("deltas", self.deltas, "general")?;
        }
        if self.path == ExpertsPath::Stream {
            at_most_tokens(when, heuristics::STREAM_TOKENS, "stream")?;
        }
        for (field, pieces, width) in [
            ("gate_up_pieces", self.gate_up_pieces, when.k),
            ("down_pieces", self.down_pieces, when.inner),
        ] {
            between(field, pieces, [1, heuristics::STREAM_MOST_PIECES])?;
            if let (Some(pieces), Some(width)) = (pieces, width)
                && heuristics::stream_tile_of(width, pieces).is_none()
            {
                let what = format!("{pieces} pieces a warp do not share out {width} inputs");
                return Err(Fault::new(field, what));
            }
        }
        for width in [when.k, when.inner].into_iter().flatten() {
            if self.even_k == Some(true) && !width.is_multiple_of(64) {
                return Err(Fault::new("even_k", format!("{width} inputs are no whole stages")));
            }
        }
        Ok(())
    }

    fn check_on(&self, _when: &When, limits: Limits) -> Result<(), Fault> {
        match self.path {
            ExpertsPath::Stream => {
                needs(limits.overlap, "stream", "bulk copies")?;
                needs(
                    limits.shared >= heuristics::STREAM_SHARED,
                    "stream",
                    "227 KiB of shared memory",
                )
            }
            ExpertsPath::Warpgroups => needs(limits.groups, "warpgroups", "their products"),
            ExpertsPath::Warps => {
                let wanted = self.warp_tile().shared();
                if wanted > limits.shared {
                    let what =
                        format!("{wanted} bytes of shared memory are more than {}", limits.shared);
                    return Err(Fault::new("tile_tokens", what));
                }
                Ok(())
            }
            ExpertsPath::General => Ok(()),
        }
    }
}

/// Attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionUse {
    /// The kernel.
    pub path: AttentionPath,
    /// `split`: blocks that share a row's positions, at most; no more than have work are launched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub splits: Option<usize>,
}

/// The kernel of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionPath {
    /// Each row's positions are split over warps and blocks.
    Split,
    /// Tiles of rows, by products of warpgroups.
    Warpgroups,
    /// Tiles of rows, by products of warps.
    Flash,
}

impl Operator for AttentionUse {
    const NAME: &'static str = "paged_attention";
    const FIELDS: &'static [&'static str] = &["tokens", "heads", "kv_heads", "head_dim"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::PagedAttention(file)
    }

    fn candidates() -> Vec<Self> {
        let split = |splits| AttentionUse { path: AttentionPath::Split, splits: Some(splits) };
        let tiles = |path| AttentionUse { path, splits: None };
        let tiles = [AttentionPath::Warpgroups, AttentionPath::Flash].map(tiles);
        [1, 2, 4, 8, 16].map(split).into_iter().chain(tiles).collect()
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        between("splits", self.splits, [1, heuristics::attention::MOST_SPLITS])?;
        match self.path {
            AttentionPath::Split => at_most_tokens(when, heuristics::attention::MOST_ROWS, "split"),
            AttentionPath::Warpgroups | AttentionPath::Flash => {
                only_with("splits", self.splits, "split")
            }
        }
    }

    fn check_on(&self, _when: &When, limits: Limits) -> Result<(), Fault> {
        needs(limits.overlap || self.splits.unwrap_or(1) == 1, "more than one split", "clusters")?;
        let groups = self.path == AttentionPath::Warpgroups;
        needs(limits.groups || !groups, "warpgroups", "their products")
    }
}
