//! Both expert products.

use serde::{Deserialize, Serialize};

use super::super::{AnyFile, Fault, File, Limits, When};
use super::{Deltas, Operator, at_most_tokens, between, needs, one_of, only_with};
use crate::heuristics::{self, WarpTile};

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
    const FIELDS: &'static [&'static str] = &["tokens", "k", "inner", "experts", "top_k", "dtype"];

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
            if self.pass == Some(8) {
                at_most_tokens(when, 8, "stream with a pass of 8")?;
            }
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
