//! What files may say of each operator. A field is here only if a kernel obeys it.

mod dense;
mod experts;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{AnyFile, Fault, File, Limits, When};
use crate::heuristics;

pub use dense::{DeltaUse, DensePath, DenseUse};
pub use experts::{ExpertsPath, ExpertsUse};

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

/// A kernel wants more shared memory than a block may have.
fn fits_a_block(wanted: usize, limits: Limits) -> Result<(), Fault> {
    if wanted <= limits.shared {
        return Ok(());
    }
    let what = format!("{wanted} bytes of shared memory are more than {}", limits.shared);
    Err(Fault::new("path", what))
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
    const FIELDS: &'static [&'static str] = &["tokens", "k", "dtype"];

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

/// Where deltas are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Deltas {
    /// In the product they belong to.
    Inside,
    /// By a kernel behind it, to its sums in f32.
    Apart,
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
    /// At most 128 pairs: one block compares them.
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
    const FIELDS: &'static [&'static str] = &["tokens", "heads", "kv_heads", "head_dim", "dtype"];

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
