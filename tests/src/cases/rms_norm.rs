//! Cases of `rms_norm`: plain, in place, with the residual add, over the heads of a fused tensor.

use amphora_hal::ops::RmsNorm;
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result};

use super::{columns, near};
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::{HostTensor, round};
use crate::oracle::rms_norm::rms_norm;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// Which operands there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `out` apart from `x`.
    Plain,
    /// `out` is `x`.
    InPlace,
    /// `x += add` first.
    Residual,
    /// `x` are two heads of each row of a wider tensor, in place.
    Heads,
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostRmsNorm {
    /// Steps; the operator reads no plan.
    steps: Vec<Step>,
    kind: Kind,
    x: HostTensor,
    add: HostTensor,
    weight: Vec<f64>,
    eps: f32,
}

/// The wider tensor of [`Kind::Heads`]: columns in front of the heads, and behind.
const AROUND: usize = 8;

impl HostRmsNorm {
    /// Random operands: tokens, width, type.
    pub fn random(
        rng: &mut Rng,
        caps: &Caps,
        kind: Kind,
        (tokens, width, dtype): (usize, usize, DType),
    ) -> Self {
        let pitch = if kind == Kind::Heads { 2 * width + 2 * AROUND } else { width };
        let scale = rng.pick(&[1.0, 30.0, 0.02]);
        let mut random = || {
            HostTensor::real(&[tokens, pitch], dtype, &rng.normals(tokens * pitch, scale, dtype))
        };
        let bucket = rows_bucket(tokens);
        HostRmsNorm {
            steps: vec![Step::of_rows(
                &vec![None; tokens],
                tokens,
                limits(bucket, 0, caps.tile_rows),
            )],
            kind,
            x: random(),
            add: random(),
            weight: rng.normals(width, 1.0, DType::F32),
            eps: rng.pick(&[1e-5, 1e-6]),
        }
    }
}

impl HostOp for HostRmsNorm {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::RmsNorm, self.x.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let (tokens, k) = (self.x.dims[0], self.weight.len());
        vec![OpBounds { op: Some(OpKind::RmsNorm), tokens, k, n: k, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        (1 << 19) + 3 * self.x.bytes.len()
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let width = self.weight.len();
        let mut x = rig.tensor("x", &self.x)?;
        if self.kind == Kind::Heads {
            x = x.narrow(1, AROUND, 2 * width)?.split_last(width)?;
        }
        let add = match self.kind {
            Kind::Residual => Some(rig.tensor("add", &self.add)?),
            _ => None,
        };
        let weight = rig.tensor("weight", &HostTensor::real(&[width], DType::F32, &self.weight))?;
        let mut out = match self.kind {
            Kind::InPlace | Kind::Heads => x.clone(),
            Kind::Plain | Kind::Residual => rig.poisoned("out", &self.x.dims, self.x.dtype)?,
        };
        let eps = self.eps;
        Ok(Box::new(move |cx, _| {
            RmsNorm { x: &mut x, add: add.as_ref(), weight: &weight, eps, out: &mut out }.run(cx)
        }))
    }

    fn expect(&self, _step: usize) -> Vec<(&'static str, Expect)> {
        let (width, pitch) = (self.weight.len(), self.x.dims[1]);
        let eps = f64::from(self.eps);
        let mut x = self.x.values();
        match self.kind {
            Kind::Plain => {
                vec![("out", Expect::Elements(near(&rms_norm(&x, &self.weight, eps))))]
            }
            Kind::InPlace => {
                vec![("x", Expect::Elements(near(&rms_norm(&x, &self.weight, eps))))]
            }
            Kind::Residual => {
                let add = self.add.values();
                x.iter_mut().zip(add).for_each(|(x, a)| *x = round(self.x.dtype, *x + a));
                let out = rms_norm(&x, &self.weight, eps);
                vec![("x", Expect::Elements(near(&x))), ("out", Expect::Elements(near(&out)))]
            }
            Kind::Heads => {
                let heads = AROUND..AROUND + 2 * width;
                let inner: Vec<f64> =
                    x.chunks(pitch).flat_map(|row| row[heads.clone()].to_vec()).collect();
                let out = near(&rms_norm(&inner, &self.weight, eps));
                vec![("x", Expect::Elements(columns(&out, 2 * width, AROUND, pitch)))]
            }
        }
    }
}

impl ByRow for HostRmsNorm {
    const OUTPUTS: &'static [&'static str] = &["x", "out"];

    fn rows(&self) -> usize {
        self.x.dims[0]
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        HostRmsNorm {
            steps: vec![self.steps[0].of_single_rows(rows)],
            x: self.x.of_rows(rows),
            add: self.add.of_rows(rows),
            ..self.clone()
        }
    }
}

/// Tokens and width of every kind.
const SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (1, 80),
    (7, 33),
    (3, 64),
    (17, 288),
    (2, 2880),
    (1, 128),
    (70, 8),
    (13, 136),
    (5, 256),
];
/// Of heads, and of a residual's short rows: more vectors than there is room for side by side.
const MANY: [(usize, usize); 3] = [(2300, 128), (1100, 256), (4300, 72)];

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for &dtype in caps.dtypes {
        for kind in [Kind::Plain, Kind::InPlace, Kind::Residual, Kind::Heads] {
            let many = if matches!(kind, Kind::Residual | Kind::Heads) { &MANY[..] } else { &[] };
            for &(tokens, width) in SHAPES.iter().chain(many) {
                let name = format!("rms_norm/{dtype}/{kind:?},t={tokens},w={width}").to_lowercase();
                list.push(case(name, move |rng, caps| {
                    HostRmsNorm::random(rng, caps, kind, (tokens, width, dtype))
                }));
            }
        }
    }
    list
}
