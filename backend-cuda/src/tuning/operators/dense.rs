//! Dense products and the first half of their deltas.

use serde::{Deserialize, Serialize};

use super::super::{AnyFile, Fault, File, Limits, When};
use super::{
    Deltas, Operator, Order, at_most_tokens, between, fits_a_block, needs, one_of, only_with,
};
use crate::heuristics::dense;

/// A dense product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseUse {
    /// The kernel.
    pub path: DensePath,
    /// `cluster`, `narrow`, `wide`: blocks that share k (split-K).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<usize>,
    /// `narrow`, `wide`: how the sums of the parts meet; `atomic` only where deltas are added apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,
    /// `narrow`, `wide`: neighbouring column tiles whose blocks follow each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// `narrow`, `wide`: nothing is masked along k, where it is whole steps of 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub even_k: Option<bool>,
    /// `narrow`, `wide`: where deltas are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deltas: Option<Deltas>,
}

impl DenseUse {
    /// Nothing but a path.
    pub fn new(path: DensePath) -> Self {
        DenseUse { path, parts: None, order: None, group: None, even_k: None, deltas: None }
    }

    /// How tiles are made.
    pub(crate) fn tiling(&self, tile: dense::Tile) -> dense::Tiling {
        dense::Tiling {
            tile,
            parts: self.parts.unwrap_or(1),
            group: self.group.unwrap_or(1),
            even_k: self.even_k.unwrap_or(false),
            sums: match (self.deltas, self.order) {
                (Some(Deltas::Apart), Some(Order::Atomic)) => dense::Sums::Atomic,
                (Some(Deltas::Apart), _) => dense::Sums::Apart,
                _ => dense::Sums::Inside,
            },
        }
    }

    /// Whether what tiles alone obey is as it should be.
    fn check_tiles(&self, when: &When) -> Result<(), Fault> {
        let most = match self.path {
            DensePath::Cluster => dense::CLUSTER_PARTS,
            _ => dense::MOST_PARTS,
        };
        between("parts", self.parts, [1, most])?;
        between("group", self.group, [1, 64])?;
        if !matches!(self.path, DensePath::Narrow | DensePath::Wide) {
            if self.path != DensePath::Cluster {
                only_with("parts", self.parts, "cluster, narrow or wide")?;
            }
            only_with("order", self.order, "narrow or wide")?;
            only_with("group", self.group, "narrow or wide")?;
            only_with("even_k", self.even_k, "narrow or wide")?;
            return only_with("deltas", self.deltas, "narrow or wide");
        }
        if self.order == Some(Order::Atomic) && self.deltas != Some(Deltas::Apart) {
            return Err(Fault::new("order", "atomic only with deltas apart"));
        }
        match (when.k, when.n) {
            (Some(k), _) if self.even_k == Some(true) && !k.is_multiple_of(64) => {
                Err(Fault::new("even_k", format!("{k} inputs are no whole steps")))
            }
            (_, Some(n)) if self.deltas == Some(Deltas::Apart) && !dense::library_takes(n) => {
                Err(Fault::new("deltas", format!("{n} outputs are not finished apart")))
            }
            _ => Ok(()),
        }
    }
}

/// The kernel of a dense product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DensePath {
    /// At most 16 rows: the weight is streamed.
    Stream,
    /// At most 64 rows on Hopper: a cluster of blocks shares k.
    Cluster,
    /// Tiles of 64 x 32 outputs.
    Narrow,
    /// Tiles of 128 x 128 outputs.
    Wide,
    /// Tiles of warpgroup products on Hopper, for many rows.
    Warpgroups,
    /// f32 sums by cuBLASLt, finished by a kernel behind it; deltas are added there.
    Library,
}

impl Operator for DenseUse {
    const NAME: &'static str = "linear";
    const FIELDS: &'static [&'static str] = &["tokens", "k", "n", "dtype"];

    fn any(file: File<Self>) -> AnyFile {
        AnyFile::Linear(file)
    }

    fn candidates() -> Vec<Self> {
        let path = DenseUse::new;
        let mut all =
            vec![path(DensePath::Stream), path(DensePath::Warpgroups), path(DensePath::Library)];
        let cluster = |parts| DenseUse { parts: Some(parts), ..path(DensePath::Cluster) };
        all.extend((1..=dense::CLUSTER_PARTS).map(cluster));
        for of in [DensePath::Narrow, DensePath::Wide] {
            let tile = |parts| DenseUse { parts: Some(parts), ..path(of) };
            all.extend((1..=dense::MOST_PARTS).map(tile));
            all.extend([2, 4, 8].map(|group| DenseUse { group: Some(group), ..tile(1) }));
            all.push(DenseUse { even_k: Some(true), ..tile(1) });
            all.push(DenseUse { deltas: Some(Deltas::Apart), ..tile(1) });
        }
        all
    }

    fn check(&self, when: &When) -> Result<(), Fault> {
        self.check_tiles(when)?;
        match self.path {
            DensePath::Stream => at_most_tokens(when, dense::STREAM_ROWS, "stream"),
            DensePath::Cluster => at_most_tokens(when, dense::CLUSTER_ROWS, "cluster"),
            DensePath::Narrow | DensePath::Wide | DensePath::Warpgroups => Ok(()),
            // A vocabulary's sums have no place in workspace, but in f32 outputs, which only the call knows of.
            DensePath::Library => match when.n {
                Some(n) if !n.is_multiple_of(8) => {
                    Err(Fault::new("path", format!("library does not take {n} outputs")))
                }
                _ => Ok(()),
            },
        }
    }

    fn check_on(&self, when: &When, limits: Limits) -> Result<(), Fault> {
        match self.path {
            DensePath::Stream => {
                let (tokens, k) = (when.tokens.unwrap_or(1), when.k.unwrap_or(1));
                fits_a_block(dense::stream_bytes(tokens, k), limits)
            }
            DensePath::Cluster => {
                needs(limits.groups, "cluster", "warpgroup products")?;
                let (tokens, parts) = (when.tokens.unwrap_or(1), self.parts.unwrap_or(1));
                let what = "a block's share of x does not fit its shared memory";
                match dense::cluster_takes(tokens, when.k.unwrap_or(1), parts, limits) {
                    true => Ok(()),
                    false => Err(Fault::new("parts", what.to_owned())),
                }
            }
            DensePath::Narrow | DensePath::Wide => {
                let tile = if self.path == DensePath::Wide {
                    dense::Tile::Wide
                } else {
                    dense::Tile::Narrow
                };
                fits_a_block(tile.all_shared(limits), limits)?;
                needs(
                    limits.overlap || self.parts.unwrap_or(1) == 1,
                    "more than one part",
                    "clusters",
                )
            }
            DensePath::Warpgroups => needs(limits.groups, "warpgroups", "warpgroup products"),
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
    const FIELDS: &'static [&'static str] = &["tokens", "k", "n", "dtype"];

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_s_product_may_go_to_the_library() {
        let of = |n| When { n: Some(n), ..When::default() };
        let library = DenseUse::new(DensePath::Library);
        assert!(library.check(&of(201_088)).is_ok());
        assert!(library.check(&of(201_089)).is_err(), "outputs are no whole eights");
        let apart = DenseUse { deltas: Some(Deltas::Apart), ..DenseUse::new(DensePath::Narrow) };
        assert!(apart.check(&of(201_088)).is_err(), "whose sums lie in workspace");
    }
}
