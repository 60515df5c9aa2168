//! Attention: qkv, norms of heads, rotary positions, cache, attention over the cache, output projection.

use amphora_hal::ops::{KvStore, Mask, PagedAttention, Rope, RopePairing};
use amphora_hal::{Backend, Ctx, Result, Tensor};

use super::{LayerRun, Norm, Projection};
use crate::activations::LayerCache;

/// How a projection's outputs split into heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) q: usize,
    /// Key/value heads.
    pub(crate) kv: usize,
    /// Width of one.
    pub(crate) dim: usize,
}

/// Norms over each query and each key head, before they are turned.
#[derive(Debug)]
pub(crate) struct HeadNorms<B: Backend> {
    pub(crate) q: Norm<B>,
    pub(crate) k: Norm<B>,
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention<B: Backend> {
    /// q, k and v, one after another.
    pub(crate) qkv: Projection<B>,
    pub(crate) o: Projection<B>,
    pub(crate) head_norms: Option<HeadNorms<B>>,
    /// `[heads]` f32: one more logit in each head's softmax.
    pub(crate) sinks: Option<Tensor<B>>,
    pub(crate) heads: Heads,
    pub(crate) mask: Mask,
}

impl<B: Backend> Attention<B> {
    /// `normed` → `branch`; the step's keys and values go into the cache on the way.
    pub(crate) fn run(
        &self,
        cx: &mut Ctx<'_, B>,
        run: &mut LayerRun<'_, B>,
        rope_table: &Tensor<B>,
        cache: &mut LayerCache<B>,
    ) -> Result<()> {
        let LayerRun { plan, step, deltas, .. } = run;
        let plan = *plan;
        let qkv_deltas = deltas.as_ref().map(|d| d.of(|slices| &slices.qkv));
        self.qkv.run(cx, &step.normed, &mut step.qkv, qkv_deltas)?;

        let Heads { q, kv, dim } = self.heads;
        let heads_of = |first: usize, count: usize| {
            step.qkv.narrow(1, first * dim, count * dim)?.split_last(dim)
        };
        let mut query = heads_of(0, q)?;
        let mut key = heads_of(q, kv)?;
        let value = heads_of(q + kv, kv)?;
        if let Some(norms) = &self.head_norms {
            norms.q.heads(cx, &mut query)?;
            norms.k.heads(cx, &mut key)?;
        }
        Rope {
            q: &mut query,
            k: &mut key,
            position: plan.position(),
            table: rope_table,
            pairing: RopePairing::Half,
            q_scale: None,
            store: Some(KvStore { v: &value, plan, k_cache: &mut cache.k, v_cache: &mut cache.v }),
        }
        .run(cx)?;
        PagedAttention {
            q: &query,
            k_cache: &cache.k,
            v_cache: &cache.v,
            plan,
            mask: self.mask,
            sinks: self.sinks.as_ref(),
            scale: (dim as f32).sqrt().recip(),
            out: &mut step.attended.split_last(dim)?,
        }
        .run(cx)?;

        let o_deltas = deltas.as_ref().map(|d| d.of(|slices| &slices.o));
        self.o.run(cx, &step.attended, &mut step.branch, o_deltas)
    }
}
