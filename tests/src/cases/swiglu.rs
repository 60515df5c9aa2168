//! Cases of `swiglu`: both activations, whole rows and columns of wider ones, gates that saturate.

use amphora_hal::ops::{Activation, Swiglu};
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result};

use super::columns;
use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::swiglu::{activate, pairs, sigmoid_lost};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// Where the operands lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Tensors of their own.
    Own,
    /// Columns of wider tensors.
    Columns,
}

/// Sizes and kind of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwigluSpec {
    /// Rows.
    pub rows: usize,
    /// Activations of a row.
    pub inner: usize,
    /// Compute type.
    pub dtype: DType,
    /// Which activation.
    pub activation: Activation,
    /// Where the operands lie.
    pub place: Place,
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostSwiglu {
    /// Steps; the operator reads no plan.
    steps: Vec<Step>,
    spec: SwigluSpec,
    x: HostTensor,
}

/// Columns in front of an operand in a wider tensor, and behind.
const AROUND: usize = 8;

impl HostSwiglu {
    /// Random operands; some gates are large enough to saturate the sigmoid either way.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: SwigluSpec) -> Self {
        let pitch = 2 * spec.inner + spec.margin() * 2;
        let scale = rng.pick(&[1.0, 0.02, 8.0, 40.0]);
        let values = rng.normals(spec.rows * pitch, scale, spec.dtype);
        let limits = limits(rows_bucket(spec.rows), 0, caps.tile_rows);
        HostSwiglu {
            steps: vec![Step::of_rows(&vec![None; spec.rows], spec.rows, limits)],
            spec,
            x: HostTensor::real(&[spec.rows, pitch], spec.dtype, &values),
        }
    }
}

impl SwigluSpec {
    fn margin(&self) -> usize {
        match self.place {
            Place::Own => 0,
            Place::Columns => AROUND,
        }
    }
}

impl HostOp for HostSwiglu {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::Swiglu, self.spec.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let SwigluSpec { rows: tokens, inner: n, .. } = self.spec;
        vec![OpBounds { op: Some(OpKind::Swiglu), tokens, k: 2 * n, n, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        (1 << 19) + 2 * self.x.bytes.len()
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let SwigluSpec { rows, inner, dtype, activation, .. } = self.spec;
        let margin = self.spec.margin();
        let x = rig.tensor("x", &self.x)?.narrow(1, margin, 2 * inner)?;
        let mut out =
            rig.poisoned("out", &[rows, inner + 2 * margin], dtype)?.narrow(1, margin, inner)?;
        Ok(Box::new(move |cx, _| Swiglu { x: &x, activation, out: &mut out }.run(cx)))
    }

    fn expect(&self, _step: usize) -> Vec<(&'static str, Expect)> {
        let (inner, margin) = (self.spec.inner, self.spec.margin());
        let pitch = self.x.dims[1];
        let values = self.x.values();
        let x: Vec<f64> =
            values.chunks(pitch).flat_map(|row| row[margin..pitch - margin].to_vec()).collect();
        let activation = self.spec.activation;
        let want = |&(gate, up): &(f64, f64)| {
            Want::NearRange(activate(activation, gate, up), sigmoid_lost(activation, gate, up))
        };
        let out: Vec<Want> = pairs(activation, &x, inner).iter().map(want).collect();
        vec![("out", Expect::Elements(columns(&out, inner, margin, inner + 2 * margin)))]
    }
}

impl ByRow for HostSwiglu {
    const OUTPUTS: &'static [&'static str] = &["out"];

    fn rows(&self) -> usize {
        self.spec.rows
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        HostSwiglu {
            steps: vec![self.steps[0].of_single_rows(rows)],
            spec: SwigluSpec { rows: rows.len(), ..self.spec },
            x: self.x.of_rows(rows),
        }
    }
}

/// gpt_oss's activation.
pub const CLAMPED: Activation = Activation::ClampedInterleaved { limit: 7.0, alpha: 1.702 };

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for &dtype in caps.dtypes {
        for (kind, activation) in [("swiglu", Activation::Swiglu), ("clamped", CLAMPED)] {
            for (rows, inner, place) in [
                (1, 1, Place::Own),
                (1, 33, Place::Own),
                (5, 80, Place::Columns),
                (17, 7, Place::Columns),
                (3, 2880, Place::Own),
                (70, 257, Place::Own),
                (2, 4099, Place::Columns),
            ] {
                let spec = SwigluSpec { rows, inner, dtype, activation, place };
                let name = format!("swiglu/{dtype}/{kind},{place:?},t={rows},i={inner}");
                list.push(case(name.to_lowercase(), move |rng, caps| {
                    HostSwiglu::random(rng, caps, spec)
                }));
            }
        }
    }
    list
}
