//! Pairs of fused 3-D expert parameters: which parameter a pair is for, which way round it lies, and
//! its cut into experts and slices.
//!
//! With E experts of rank r, the first tensor has rows e·r + j (expert-major) and the second columns
//! j·E + e (rank-major): `Δ_e[y, x] = scale · Σ_j second[y, j·E + e] · first[e·r + j, x]`. Natural
//! means x runs over the parameter's inputs and y over its outputs; some versions of PEFT write the
//! two the other way round under the same names.

use std::collections::BTreeMap;

use super::names::Module;
use super::read::{Assembly, Pair};
use super::reason::Reason;
use super::{DecidedBy, FusedLayout, Matrix, ModuleFactor, Orientation, Target};
use crate::config::Architecture;

/// A fused parameter of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameter {
    GateUp,
    Down,
}

impl Parameter {
    fn name(self) -> &'static str {
        match self {
            Parameter::GateUp => "gate_up_proj",
            Parameter::Down => "down_proj",
        }
    }
}

/// One pair whose parameter is known.
#[derive(Debug, Clone, Copy)]
struct Fused<'a> {
    layer: usize,
    parameter: Parameter,
    pair: Pair<'a>,
    inputs: usize,
    outputs: usize,
    rank: usize,
    scale: f32,
    /// `None` if the shapes fit both ways.
    orientation: Option<Orientation>,
}

impl<'a> Assembly<'a> {
    pub(super) fn add_fused(&mut self, pairs: &BTreeMap<Module, Pair<'a>>) {
        let mut found = Vec::new();
        for layer in 0..self.base.layers() {
            for (parameter, pair) in self.parameters_of(layer, pairs) {
                found.extend(self.check_fused(layer, parameter, pair));
            }
        }
        for (fused, way) in self.orientations(found) {
            self.cut(&fused, way.orientation);
            self.layouts.fused.push(way);
        }
    }

    /// Which parameter each pair of a layer is for.
    fn parameters_of(
        &mut self,
        layer: usize,
        pairs: &BTreeMap<Module, Pair<'a>>,
    ) -> Vec<(Parameter, Pair<'a>)> {
        let outer = pairs.get(&Module::Fused { layer, inner: false });
        let inner = pairs.get(&Module::Fused { layer, inner: true });
        let Some(experts) = outer.or(inner).map(|pair| fused_module(pair.path)) else {
            return Vec::new();
        };
        let targeted = |p: Parameter| {
            let path = format!("{experts}.{}", p.name());
            self.config.and_then(|config| config.targets_parameter(&path))
        };
        let missing = |wrapper: &str| Reason::MissingPair {
            layer,
            missing: format!("base_model.model.{experts}{wrapper}.lora_A.weight"),
        };
        let (Some(gate_up), Some(down)) = (targeted(Parameter::GateUp), targeted(Parameter::Down))
        else {
            // Refused already. Two pairs tell which is which; one needs the configuration.
            return match (inner, outer) {
                (Some(inner), Some(outer)) => {
                    vec![(Parameter::GateUp, *inner), (Parameter::Down, *outer)]
                }
                _ => Vec::new(),
            };
        };
        match (gate_up, down, inner, outer) {
            (true, true, Some(inner), Some(outer)) => {
                return vec![(Parameter::GateUp, *inner), (Parameter::Down, *outer)];
            }
            (true, false, None, Some(outer)) => return vec![(Parameter::GateUp, *outer)],
            (false, true, None, Some(outer)) => return vec![(Parameter::Down, *outer)],
            (true, true, None, Some(_)) => self.reasons.push(missing(".base_layer")),
            (true, true, Some(_), None) => self.reasons.push(missing("")),
            // One parameter has one wrapper; an inner one has nothing to be in.
            (true, false, Some(stray), _) | (false, true, Some(stray), _) => {
                self.reasons.push(Reason::NotTargeted { tensor: stray.a.name.to_owned() });
            }
            (_, _, inner, outer) => {
                for stray in inner.into_iter().chain(outer) {
                    self.reasons.push(Reason::NotTargeted { tensor: stray.a.name.to_owned() });
                }
            }
        }
        for pair in inner.into_iter().chain(outer) {
            self.numbers(&pair.a);
            self.numbers(&pair.b);
        }
        Vec::new()
    }

    /// Shapes, rank and scale of one pair.
    fn check_fused(
        &mut self,
        layer: usize,
        parameter: Parameter,
        pair: Pair<'a>,
    ) -> Option<Fused<'a>> {
        let shapes = (self.matrix_shape(&pair.a), self.matrix_shape(&pair.b));
        let checked = match shapes {
            (Some(a), Some(b)) => self.check_shapes(layer, parameter, pair, (a, b)),
            _ => None,
        };
        if checked.is_none() {
            self.numbers(&pair.a);
            self.numbers(&pair.b);
        }
        checked
    }

    /// The same of two matrices, given A's and B's rows and columns.
    fn check_shapes(
        &mut self,
        layer: usize,
        parameter: Parameter,
        pair: Pair<'a>,
        ((rows, width), (height, columns)): ((usize, usize), (usize, usize)),
    ) -> Option<Fused<'a>> {
        let experts = self.base.experts;
        let (inputs, outputs) = match parameter {
            Parameter::GateUp => (self.base.hidden, 2 * self.base.intermediate),
            Parameter::Down => (self.base.intermediate, self.base.hidden),
        };
        if rows == 0 || !rows.is_multiple_of(experts) {
            let expected = format!("rows that are a multiple of the {experts} experts");
            self.shape(&pair.a, expected);
            return None;
        }
        if columns != rows {
            self.shape(&pair.b, format!("{rows} columns, the rows of lora_A"));
            return None;
        }
        let natural = (width, height) == (inputs, outputs);
        let swapped = (width, height) == (outputs, inputs);
        if !natural && !swapped {
            let name = parameter.name();
            let whole = format!(
                "{width} and {height} to be the {inputs} inputs and {outputs} outputs of {name}"
            );
            // Name the tensor that cannot be right, where it is one of the two.
            if width == inputs {
                self.shape(&pair.b, format!("[{outputs}, {rows}] ({name})"));
            } else if height == outputs {
                self.shape(&pair.a, format!("[{rows}, {inputs}] ({name})"));
            } else {
                self.shape(&pair.a, whole);
            }
            return None;
        }
        let rank = rows / experts;
        let path = format!("{}.{}", fused_module(pair.path), parameter.name());
        let scale = self.scale(&path, rank, &pair.a)?;
        let orientation = match (natural, swapped) {
            (true, true) => None,
            (true, false) => Some(Orientation::Natural),
            (false, _) => Some(Orientation::Swapped),
        };
        Some(Fused { layer, parameter, pair, inputs, outputs, rank, scale, orientation })
    }

    /// An orientation for every pair. One writer made the whole file, so a square parameter goes by
    /// its layer's other parameter, else by the other layers if they agree, else by the version that
    /// wrote the file, and where nothing else decides, by the operator's word. What stays open is refused.
    fn orientations(&mut self, found: Vec<Fused<'a>>) -> Vec<(Fused<'a>, FusedLayout)> {
        let known: Vec<(usize, Orientation)> =
            found.iter().filter_map(|f| Some((f.layer, f.orientation?))).collect();
        let of_layer = |layer| known.iter().find(|(l, _)| *l == layer).map(|(_, o)| *o);
        let agreed = match known.first() {
            Some(&(_, first)) if known.iter().all(|(_, o)| *o == first) => Some(first),
            _ => None,
        };
        let version = self.config.and_then(|config| config.peft_version.as_deref());
        let written = by_version(self.base.architecture, version);
        let decide = |fused: &Fused<'_>| {
            let ways = [
                (fused.orientation, DecidedBy::Shapes),
                (of_layer(fused.layer), DecidedBy::SameLayer),
                (agreed, DecidedBy::OtherLayers),
                (written, DecidedBy::Version),
                (self.options.square_orientation, DecidedBy::Operator),
            ];
            ways.into_iter().find_map(|(orientation, by)| Some((orientation?, by)))
        };
        let mut settled = Vec::with_capacity(found.len());
        for fused in found {
            match decide(&fused) {
                Some((orientation, decided_by)) => {
                    let (layer, parameter) = (fused.layer, fused.parameter.name());
                    settled
                        .push((fused, FusedLayout { layer, parameter, orientation, decided_by }));
                }
                None => self.reasons.push(Reason::Orientation {
                    tensor: fused.pair.a.name.to_owned(),
                    width: fused.inputs,
                    version: version.unwrap_or("not said").to_owned(),
                }),
            }
        }
        let assumed = settled.iter().find(|(_, way)| way.decided_by >= DecidedBy::Version);
        if let Some((_, way)) = assumed {
            let version = version.unwrap_or("not said");
            let orientation = match way.orientation {
                Orientation::Natural => "lora_A over inputs",
                Orientation::Swapped => "lora_A over outputs",
            };
            let why = match way.decided_by {
                DecidedBy::Operator => {
                    format!("as the operator says; peft_version ({version}) does not settle it")
                }
                _ => format!("because peft_version is {version}"),
            };
            self.notes.push(format!("square expert parameters are read as {orientation}, {why}"));
        }
        settled
    }

    /// Cuts one pair into experts, and gate_up into gate and up, which share each expert's A: even and
    /// odd outputs in gpt_oss, the first half and the second elsewhere.
    fn cut(&mut self, fused: &Fused<'a>, orientation: Orientation) {
        let (Some(first), Some(second)) =
            (self.numbers(&fused.pair.a), self.numbers(&fused.pair.b))
        else {
            return;
        };
        let experts = self.base.experts;
        let Fused { rank, inputs, outputs, .. } = *fused;
        let lanes = experts * rank;
        for expert in 0..experts {
            // factor[j, x] of the expert-major tensor, factor[y, j] of the rank-major one.
            let expert_major =
                |j: usize, x: usize, width: usize| first[(expert * rank + j) * width + x];
            let rank_major = |y: usize, j: usize| second[y * lanes + j * experts + expert];
            let (a, b): (Vec<f32>, Vec<f32>) = match orientation {
                Orientation::Natural => (
                    grid(rank, inputs, |j, x| expert_major(j, x, inputs)),
                    grid(outputs, rank, rank_major),
                ),
                Orientation::Swapped => (
                    grid(rank, inputs, |j, x| rank_major(x, j)),
                    grid(outputs, rank, |y, j| expert_major(j, y, outputs)),
                ),
            };
            self.shrinks.push(Matrix { rows: rank, cols: inputs, data: a });
            self.push_slices(fused, expert, &b);
        }
    }

    fn push_slices(&mut self, fused: &Fused<'a>, expert: usize, b: &[f32]) {
        let rank = fused.rank;
        let slices: &[(Target, usize, usize)] = match fused.parameter {
            Parameter::GateUp if self.base.gate_up_stride() == 2 => {
                &[(Target::Gate, 0, 2), (Target::Up, 1, 2)]
            }
            Parameter::GateUp => &[(Target::Gate, 0, 1), (Target::Up, self.base.intermediate, 1)],
            Parameter::Down => &[(Target::Down, 0, 1)],
        };
        for &(target, offset, stride) in slices {
            let rows = match fused.parameter {
                Parameter::GateUp => fused.outputs / 2,
                Parameter::Down => fused.outputs,
            };
            self.modules.push(ModuleFactor {
                layer: fused.layer,
                target,
                expert: Some(expert),
                rank,
                scale: fused.scale,
                shrink: self.shrinks.len() - 1,
                b: Matrix {
                    rows,
                    cols: rank,
                    data: grid(rows, rank, |y, j| b[(offset + y * stride) * rank + j]),
                },
            });
        }
    }
}

/// The experts' module, whichever wrapper the pair is of.
fn fused_module(path: &str) -> &str {
    path.strip_suffix(".base_layer").unwrap_or(path)
}

fn grid(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| at(r, c)).collect()
}

/// How a version of PEFT writes fused experts, where it does so in one way: read from its code from
/// 0.17 on. For gpt_oss, 0.17 and 0.18 write them natural; 0.19 either way, depending on the version of
/// transformers, which the file does not tell; later ones natural with transformers 5, which they are
/// made for. Other families have fused parameters from 0.19 on, which wrote them swapped.
fn by_version(architecture: Architecture, version: Option<&str>) -> Option<Orientation> {
    let mut parts = version?.split('.');
    let major: u32 = parts.next()?.parse().ok()?;
    let minor: u32 = parts.next()?.parse().ok()?;
    match (architecture, major, minor) {
        (_, 0, 20..) | (_, 1.., _) => Some(Orientation::Natural),
        (Architecture::GptOss, 0, 17 | 18) => Some(Orientation::Natural),
        (Architecture::Qwen3Moe | Architecture::Mixtral, 0, 19) => Some(Orientation::Swapped),
        _ => None,
    }
}
