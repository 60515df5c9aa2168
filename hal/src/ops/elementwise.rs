//! Norms, rotary positions, and the activation of a dense MLP.

use super::attention::KvStore;
use super::moe::Activation;
use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Index, Tensor};

/// Root mean square norm over the innermost dimension, with the residual add fused in front:
/// `x += add` (rounded to the compute type), then `out = x / sqrt(mean(x²) + eps) · weight`.
///
/// Zhang and Sennrich 2019 (arXiv 1910.07467); the weight multiplies before the one rounding.
#[derive(Debug)]
pub struct RmsNorm<'a, D: Device> {
    /// `[.., width]`, the residual stream; written only if there is an `add`.
    pub x: &'a mut Tensor<D>,
    /// As `x`.
    pub add: Option<&'a Tensor<D>>,
    /// `[width]` f32.
    pub weight: &'a Tensor<D>,
    /// Added to the mean square.
    pub eps: f32,
    /// As `x`; may be `x` itself if there is no `add`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> RmsNorm<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("rms_norm");
        check.float("x", self.x)?;
        check.rows("x", self.x)?;
        let width = *self.x.dims().last().expect("a shape has a dimension");
        check.that(width > 0, || "width 0".to_owned())?;
        check.f32_dense("weight", self.weight, &[width])?;
        check.that(self.eps >= 0.0 && self.eps.is_finite(), || format!("eps {}", self.eps))?;
        check.dims("out", self.out, self.x.dims())?;
        check.dtype("out", self.out, self.x.dtype())?;
        check.rows("out", self.out)?;
        let mut inputs = vec![("weight", self.weight)];
        if let Some(add) = self.add {
            check.dims("add", add, self.x.dims())?;
            check.dtype("add", add, self.x.dtype())?;
            check.rows("add", add)?;
            inputs.push(("add", add));
        }
        if self.add.is_none() && self.out.is_same(self.x) {
            check.disjoint(&[("out", self.out)], &inputs)?;
        } else {
            check.disjoint(&[("x", self.x), ("out", self.out)], &inputs)?;
        }
        Ok(Checked::new(self))
    }
}
runnable!(RmsNorm, rms_norm);

/// Which two elements of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Element i with i + rotary/2.
    Half,
    /// Element 2i with 2i + 1.
    Interleaved,
}

/// Rotary positions, in place: pair (a, b) at frequency i becomes
/// `(a·cos − b·sin, b·cos + a·sin)`, in f32, rounded once.
///
/// Su et al. 2021 (arXiv 2104.09864). A store puts k and v into the cache as [`super::KvWrite`] does. The table carries YaRN's frequencies and attention factor.
#[derive(Debug)]
pub struct Rope<'a, D: Device> {
    /// `[tokens, heads, dim]`.
    pub q: &'a mut Tensor<D>,
    /// `[tokens, kv_heads, dim]`.
    pub k: &'a mut Tensor<D>,
    /// `[tokens]`.
    pub position: &'a Index<D>,
    /// `[positions, rotary]` f32: cosines of the rotary/2 frequencies, then their sines. Elements
    /// from `rotary` on pass unturned.
    pub table: &'a Tensor<D>,
    /// Which elements pair.
    pub pairing: RopePairing,
    /// `[positions]` f32: multiplies q after the turn (Llama 4's temperature).
    pub q_scale: Option<&'a Tensor<D>>,
    /// Where the turned k goes, and v beside it.
    pub store: Option<KvStore<'a, D>>,
}

impl<D: Device> Rope<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("rope");
        for (name, t) in [("q", &*self.q), ("k", &*self.k)] {
            check.ndim(name, t, 3)?;
            check.float(name, t)?;
            check.rows(name, t)?;
        }
        check.dtype("k", self.k, self.q.dtype())?;
        let (tokens, dim) = (self.q.dims()[0], self.q.dims()[2]);
        check.dims("k", self.k, &[tokens, self.k.dims()[1], dim])?;
        check.dims("position", self.position.tensor(), &[tokens])?;
        check.ndim("table", self.table, 2)?;
        let [positions, rotary] = [self.table.dims()[0], self.table.dims()[1]];
        check.f32_dense("table", self.table, &[positions, rotary])?;
        check.that(rotary % 2 == 0 && rotary <= dim, || format!("{rotary} of {dim} turn"))?;
        check.addresses("position", self.position, positions)?;
        let mut inputs = vec![("position", self.position.tensor()), ("table", self.table)];
        if let Some(scale) = self.q_scale {
            check.f32_dense("q_scale", scale, &[positions])?;
            inputs.push(("q_scale", scale));
        }
        let mut written = vec![("q", &*self.q), ("k", &*self.k)];
        if let Some(store) = &self.store {
            store.check(&check, self.k)?;
            check.dtype("v", store.v, self.q.dtype())?;
            inputs.push(("v", store.v));
            written.extend([("k_cache", &*store.k_cache), ("v_cache", &*store.v_cache)]);
        }
        check.disjoint(&written, &inputs)?;
        check.dtype("position", self.position.tensor(), DType::I32)?;
        Ok(Checked::new(self))
    }
}
runnable!(Rope, rope);

/// The activation between the two products of a dense MLP, of `[gate, up]` as `activation` says:
/// each element in f32, rounded once.
///
/// Shazeer 2020 (arXiv 2002.05202). Experts have it inside [`super::FusedMoe`].
#[derive(Debug)]
pub struct Swiglu<'a, D: Device> {
    /// `[rows, 2 · inner]`.
    pub x: &'a Tensor<D>,
    /// Which columns are gate and which up, and what becomes of them.
    pub activation: Activation,
    /// `[rows, inner]`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> Swiglu<'_, D> {
    /// # Errors
    /// A shape or type is another, the activation's constants are unsound, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("swiglu");
        check.ndim("x", self.x, 2)?;
        check.ndim("out", self.out, 2)?;
        let [rows, inner] = [self.out.dims()[0], self.out.dims()[1]];
        check.dims("x", self.x, &[rows, 2 * inner])?;
        check.float("x", self.x)?;
        check.rows("x", self.x)?;
        check.dtype("out", self.out, self.x.dtype())?;
        check.rows("out", self.out)?;
        self.activation.check(&check)?;
        check.disjoint(&[("out", self.out)], &[("x", self.x)])?;
        Ok(Checked::new(self))
    }
}
runnable!(Swiglu, swiglu);
