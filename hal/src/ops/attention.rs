//! The paged KV cache: writing it, and attention over it.

use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::error::Result;
use crate::plan::PlanView;
use crate::tensor::Tensor;

/// Where a step's keys and values go: what [`KvWrite`] does, within the operator that turns the keys.
#[derive(Debug)]
pub struct KvStore<'a, D: Device> {
    /// `[tokens, kv_heads, v_dim]`.
    pub v: &'a Tensor<D>,
    /// Its `kv_index` says where; −1 leaves the cache alone.
    pub plan: &'a PlanView<D>,
    /// `[blocks, block_size, kv_heads, k_dim]`.
    pub k_cache: &'a mut Tensor<D>,
    /// `[blocks, block_size, kv_heads, v_dim]`.
    pub v_cache: &'a mut Tensor<D>,
}

impl<D: Device> KvStore<'_, D> {
    /// The rules of the store of `k`, `[tokens, kv_heads, k_dim]`.
    pub(super) fn check(&self, check: &Check, k: &Tensor<D>) -> Result<()> {
        let index = self.plan.kv_index().tensor();
        let (blocks, size) = self.plan.kv_shape();
        for (name, t, cache_name, cache) in
            [("k", k, "k_cache", &*self.k_cache), ("v", self.v, "v_cache", &*self.v_cache)]
        {
            check.ndim(name, t, 3)?;
            check.float(name, t)?;
            check.rows(name, t)?;
            check.dims(name, t, &[index.dims()[0], k.dims()[1], t.dims()[2]])?;
            check.dims(cache_name, cache, &[blocks, size, t.dims()[1], t.dims()[2]])?;
            check.dtype(cache_name, cache, t.dtype())?;
            check.dense(cache_name, cache)?;
        }
        check.disjoint(
            &[("k_cache", self.k_cache), ("v_cache", self.v_cache)],
            &[("k", k), ("v", self.v), ("kv_index", index)],
        )
    }
}

/// Puts each row's k and v at its place in the cache; padding rows (`kv_index` −1) leave it alone. Where
/// keys are turned first, [`super::Rope`] does it too.
#[derive(Debug)]
pub struct KvWrite<'a, D: Device> {
    /// `[tokens, kv_heads, k_dim]`.
    pub k: &'a Tensor<D>,
    /// `[tokens, kv_heads, v_dim]`.
    pub v: &'a Tensor<D>,
    /// Its `kv_index` says where.
    pub plan: &'a PlanView<D>,
    /// `[blocks, block_size, kv_heads, k_dim]`.
    pub k_cache: &'a mut Tensor<D>,
    /// `[blocks, block_size, kv_heads, v_dim]`.
    pub v_cache: &'a mut Tensor<D>,
}

impl<D: Device> KvWrite<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let Self { k, v, plan, k_cache, v_cache } = self;
        KvStore { v, plan, k_cache: &mut *k_cache, v_cache: &mut *v_cache }
            .check(&Check::of("kv_write"), k)?;
        Ok(Checked::new(Self { k, v, plan, k_cache, v_cache }))
    }
}
runnable!(KvWrite, kv_write);

/// Copies the blocks that the plan says, in the caches of one layer. Runs before the step's
/// [`KvWrite`], in steps whose plan has copies ([`crate::HostPlan::any_copies`]).
#[derive(Debug)]
pub struct CopyBlocks<'a, D: Device> {
    /// Its `copies` say which.
    pub plan: &'a PlanView<D>,
    /// `[blocks, block_size, kv_heads, k_dim]`.
    pub k_cache: &'a mut Tensor<D>,
    /// `[blocks, block_size, kv_heads, v_dim]`.
    pub v_cache: &'a mut Tensor<D>,
}

impl<D: Device> CopyBlocks<'_, D> {
    /// # Errors
    /// A shape is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("copy_blocks");
        let (blocks, size) = self.plan.kv_shape();
        for (name, cache) in [("k_cache", &*self.k_cache), ("v_cache", &*self.v_cache)] {
            check.ndim(name, cache, 4)?;
            check.float(name, cache)?;
            check.dims(name, cache, &[blocks, size, cache.dims()[2], cache.dims()[3]])?;
            check.dense(name, cache)?;
        }
        let copies = self.plan.copies();
        check.addresses_or_skips("copies", copies, blocks)?;
        check.disjoint(
            &[("k_cache", self.k_cache), ("v_cache", self.v_cache)],
            &[("copies", copies.tensor())],
        )?;
        Ok(Checked::new(self))
    }
}
runnable!(CopyBlocks, copy_blocks);

/// Which earlier positions a query sees; it always sees itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All.
    Causal,
    /// The last W, itself included: i − W < j ≤ i.
    Window(usize),
    /// Those in its own chunk of C: ⌊i / C⌋ = ⌊j / C⌋, j ≤ i.
    Chunk(usize),
}

/// Attention of a step's queries over the paged cache.
///
/// Row i of a sequence's n rows is at position p = context − n + i and sees the positions j ≤ p that
/// the mask leaves: `out = Σ softmax(scale · q·k_j)·v_j`, where a head's sink, if there is one, is
/// one more logit in the softmax that contributes no value. Query head h reads KV head
/// ⌊h · kv_heads / heads⌋. Sums are f32. Padding rows get no defined value.
#[derive(Debug)]
pub struct PagedAttention<'a, D: Device> {
    /// `[tokens, heads, k_dim]`.
    pub q: &'a Tensor<D>,
    /// `[blocks, block_size, kv_heads, k_dim]`.
    pub k_cache: &'a Tensor<D>,
    /// `[blocks, block_size, kv_heads, v_dim]`.
    pub v_cache: &'a Tensor<D>,
    /// Rows, contexts and blocks of the sequences.
    pub plan: &'a PlanView<D>,
    /// What a query sees.
    pub mask: Mask,
    /// `[heads]` f32.
    pub sinks: Option<&'a Tensor<D>>,
    /// Multiplies q·k.
    pub scale: f32,
    /// `[tokens, heads, v_dim]`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> PagedAttention<'_, D> {
    /// # Errors
    /// A shape or type is another, heads are no multiple of KV heads, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("paged_attention");
        let tokens = self.plan.kv_index().tensor().dims()[0];
        let (blocks, size) = self.plan.kv_shape();
        check.ndim("q", self.q, 3)?;
        check.float("q", self.q)?;
        check.rows("q", self.q)?;
        let (heads, k_dim) = (self.q.dims()[1], self.q.dims()[2]);
        check.dims("q", self.q, &[tokens, heads, k_dim])?;
        check.ndim("v_cache", self.v_cache, 4)?;
        let (kv_heads, v_dim) = (self.v_cache.dims()[2], self.v_cache.dims()[3]);
        check.dims("k_cache", self.k_cache, &[blocks, size, kv_heads, k_dim])?;
        check.dims("v_cache", self.v_cache, &[blocks, size, kv_heads, v_dim])?;
        check.that(kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} heads over {kv_heads} KV heads")
        })?;
        check.dims("out", self.out, &[tokens, heads, v_dim])?;
        check.rows("out", self.out)?;
        for (name, t) in [("k_cache", self.k_cache), ("v_cache", self.v_cache)] {
            check.dense(name, t)?;
            check.dtype(name, t, self.q.dtype())?;
        }
        check.dtype("out", self.out, self.q.dtype())?;
        let mut inputs = vec![
            ("q", self.q),
            ("k_cache", self.k_cache),
            ("v_cache", self.v_cache),
            ("q_start", self.plan.q_start().tensor()),
            ("context", self.plan.context().tensor()),
            ("block_table", self.plan.block_table().tensor()),
        ];
        if let Some(sinks) = self.sinks {
            check.f32_dense("sinks", sinks, &[heads])?;
            inputs.push(("sinks", sinks));
        }
        let open = matches!(self.mask, Mask::Window(0) | Mask::Chunk(0));
        check.that(!open, || format!("{:?}", self.mask))?;
        check.disjoint(&[("out", self.out)], &inputs)?;
        Ok(Checked::new(self))
    }
}
runnable!(PagedAttention, paged_attention);
