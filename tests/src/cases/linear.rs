//! Cases of `linear`.

use amphora_hal::ops::Linear;
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result, Scheme};

use super::{columns, near};
use crate::compare::{Tolerance, tolerance};
use crate::fixtures::{Form, HostMatrices};
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::linear::{Matrix, linear};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct LinearSpec {
    /// Rows.
    pub tokens: usize,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// Compute type.
    pub dtype: DType,
    /// Type of the output: the compute type, or f32.
    pub out: DType,
    /// How the file stores the weight.
    pub form: Form,
    /// Columns of `x` and `out` beside those that take part.
    pub gap: usize,
    /// With a bias.
    pub bias: bool,
}

impl LinearSpec {
    /// Dense operands, no bias, output in the compute type.
    pub fn new(tokens: usize, k: usize, n: usize, dtype: DType) -> Self {
        LinearSpec { tokens, k, n, dtype, out: dtype, form: Form::Rows, gap: 0, bias: false }
    }

    fn name(&self) -> String {
        let LinearSpec { tokens, k, n, dtype, .. } = self;
        let mut name = format!("linear/{dtype}/t={tokens},k={k},n={n}");
        if self.out != *dtype {
            name += ",out=f32";
        }
        if self.bias {
            name += ",bias";
        }
        if self.form != Form::Rows {
            name += &format!(",{:?}", self.form).to_lowercase();
        }
        if self.gap > 0 {
            name += ",strided";
        }
        name
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostLinear {
    /// Sizes.
    pub spec: LinearSpec,
    /// Steps; the operator reads no plan.
    pub steps: Vec<Step>,
    /// `[tokens, k + gap]`.
    pub x: HostTensor,
    /// `[n, k]`.
    pub weight: HostMatrices,
    /// `[n]`.
    pub bias: Option<Vec<f64>>,
}

impl HostLinear {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: LinearSpec) -> Self {
        let LinearSpec { tokens, k, n, dtype, gap, .. } = spec;
        let mut weight = HostMatrices::random(rng, [1, n, k], dtype);
        weight.form = spec.form;
        let x = rng.normals(tokens * (k + gap), 1.0, dtype);
        let plan = limits(rows_bucket(tokens), 0, caps.tile_rows);
        HostLinear {
            spec,
            steps: vec![Step::of_rows(&vec![None; tokens], tokens, plan)],
            x: HostTensor::real(&[tokens, k + gap], dtype, &x),
            weight,
            bias: spec.bias.then(|| rng.normals(n, 1.0, DType::F32)),
        }
    }

    /// `x` without its gap.
    pub fn inputs(&self) -> Vec<f64> {
        let values = self.x.values();
        let rows = values.chunks(self.x.dims[1]);
        rows.flat_map(|row| row[..self.spec.k].to_vec()).collect()
    }

    /// The weight for the oracle.
    pub fn matrix(&self) -> Matrix<'_> {
        Matrix { n: self.spec.n, k: self.spec.k, data: &self.weight.values }
    }

    /// The elements of `out`, gap included, for these results.
    pub fn wants(&self, out: &[f64]) -> Expect {
        let LinearSpec { n, gap, .. } = self.spec;
        Expect::Elements(columns(&near(out), n, gap, n + gap))
    }

    /// Bytes that hold everything, generously.
    pub fn size(&self) -> usize {
        let LinearSpec { tokens, k, n, gap, .. } = self.spec;
        (1 << 16) + 4 * (n + 64) * (k + 64) + tokens * (256 + 4 * (k + n + 2 * gap))
    }
}

impl HostOp for HostLinear {
    fn keys(&self) -> Vec<OpKey> {
        let scheme = Scheme::Dense(self.spec.dtype);
        vec![OpKey::new(OpKind::Linear, self.spec.dtype).scheme(scheme)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let LinearSpec { tokens, k, n, .. } = self.spec;
        vec![OpBounds { op: Some(OpKind::Linear), tokens, k, n, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        self.size()
    }

    fn tolerance(&self) -> Tolerance {
        tolerance(OpKind::Linear, self.spec.out)
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let LinearSpec { tokens, k, n, gap, out, .. } = self.spec;
        let x = rig.tensor("x", &self.x)?.narrow(1, 0, k)?;
        let weight = rig.weight("weight", &self.weight)?;
        let bias = match &self.bias {
            Some(bias) => Some(rig.tensor("bias", &HostTensor::real(&[n], DType::F32, bias))?),
            None => None,
        };
        let mut out = rig.poisoned("out", &[tokens, n + gap], out)?.narrow(1, gap, n)?;
        Ok(Box::new(move |cx, _| {
            Linear { x: &x, weight: &weight, bias: bias.as_ref(), out: &mut out }.run(cx)
        }))
    }

    fn expect(&self, _step: usize) -> Vec<(&'static str, Expect)> {
        let out = linear(&self.inputs(), self.matrix(), self.bias.as_deref());
        vec![("out", self.wants(&out))]
    }
}

impl ByRow for HostLinear {
    const OUTPUTS: &'static [&'static str] = &["out"];

    fn rows(&self) -> usize {
        self.spec.tokens
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let mut op = self.clone();
        op.spec.tokens = rows.len();
        op.x = self.x.of_rows(rows);
        op.steps = vec![self.steps[0].of_single_rows(rows)];
        op
    }
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut specs = Vec::new();
    for &dtype in caps.dtypes {
        let new = |tokens, k, n| LinearSpec::new(tokens, k, n, dtype);
        specs.extend([
            new(1, 1, 1),
            new(1, 8, 5),
            new(1, 64, 96),
            LinearSpec { bias: true, ..new(1, 33, 17) },
            new(2, 80, 31),
            LinearSpec { bias: true, gap: 8, ..new(7, 48, 70) },
            LinearSpec { form: Form::Transposed, ..new(5, 24, 40) },
            LinearSpec { form: Form::Parts(13), bias: true, ..new(5, 40, 29) },
            new(16, 64, 64),
            LinearSpec { gap: 8, ..new(17, 130, 129) },
            new(70, 72, 50),
            LinearSpec { bias: true, ..new(130, 96, 33) },
            LinearSpec { out: DType::F32, bias: true, ..new(7, 64, 8) },
            LinearSpec { out: DType::F32, ..new(1, 300, 257) },
            LinearSpec { bias: true, ..new(3, 136, 20) },
            LinearSpec { bias: true, gap: 8, ..new(150, 136, 200) },
            LinearSpec { bias: true, ..new(70, 33, 130) },
            LinearSpec { bias: true, ..new(200, 72, 1032) },
            LinearSpec { out: DType::F32, form: Form::Transposed, ..new(33, 65, 4) },
        ]);
    }
    // A weight of two parts and more bytes than a backend takes to a device at a time.
    specs.extend(caps.dtypes.iter().filter(|dtype| dtype.size() == 2).take(1).map(|&dtype| {
        LinearSpec { form: Form::Parts(13), ..LinearSpec::new(1, 1000, 8_500, dtype) }
    }));
    // Where the compute type is f32 the output is f32 anyway.
    let mut seen = std::collections::BTreeSet::new();
    specs.retain(|spec| seen.insert(spec.name()));
    let make =
        |spec: LinearSpec| case(spec.name(), move |rng, caps| HostLinear::random(rng, caps, spec));
    specs.into_iter().map(make).collect()
}
