//! The tensors a step works on, carved once, and the paged cache. `forward` allocates nothing: it
//! takes the front rows of these for the bucket at hand.

use amphora_hal::ops::{CopyBlocks, Routing, RoutingShape};
use amphora_hal::{
    Backend, Bucket, Carver, Ctx, DType, Device, Error, PlanView, Pool, Result, Tensor,
    carved_bytes,
};

use crate::config::Config;

/// Bounds of every step, from which memory is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of a step.
    pub tokens: usize,
    /// Sequences of a step.
    pub sequences: usize,
    /// Rows that go through the head.
    pub logit_rows: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Adapter slots; 0 when adapters are off.
    pub slots: usize,
    /// Most rank of an adapter; 0 when adapters are off.
    pub max_rank: usize,
    /// Most rows of a tile, from [`amphora_hal::Caps`].
    pub tile_rows: usize,
}

/// The activation tensors of one step, at most.
#[derive(Debug)]
pub struct Activations<D: Device> {
    all: StepTensors<D>,
}

/// Those of one bucket: views of the same memory.
#[derive(Debug)]
pub(crate) struct StepTensors<D: Device> {
    /// `[tokens, hidden]`, the residual stream.
    pub(crate) residual: Tensor<D>,
    /// `[tokens, hidden]`, what a norm gives.
    pub(crate) normed: Tensor<D>,
    /// `[tokens, hidden]`, what attention or the MLP gives, not yet added to the residual.
    pub(crate) branch: Tensor<D>,
    /// `[tokens, q + k + v]`.
    pub(crate) qkv: Tensor<D>,
    /// `[tokens, q]`, attention's values before its output projection.
    pub(crate) attended: Tensor<D>,
    /// Of layers with experts, if there are any.
    pub(crate) experts: Option<ExpertTensors<D>>,
    /// Of dense layers, if there are any.
    pub(crate) dense: Option<DenseTensors<D>>,
    /// `[logit_rows, hidden]`.
    pub(crate) gathered: Tensor<D>,
    /// `[logit_rows, vocab]` f32.
    pub(crate) logits: Tensor<D>,
}

/// The choice of experts.
#[derive(Debug)]
pub(crate) struct ExpertTensors<D: Device> {
    /// `[tokens, experts]` f32.
    pub(crate) router_logits: Tensor<D>,
    pub(crate) routing: Routing<D>,
}

/// Inside a dense MLP.
#[derive(Debug)]
pub(crate) struct DenseTensors<D: Device> {
    /// `[tokens, 2·intermediate]`: gate, then up.
    pub(crate) gate_up: Tensor<D>,
    /// `[tokens, intermediate]`.
    pub(crate) inner: Tensor<D>,
}

/// Shapes and types of the tensors, at most; `None` is a part that the model does not have.
struct Shapes<'a> {
    config: &'a Config,
    limits: &'a StepLimits,
    dtype: DType,
}

impl Shapes<'_> {
    /// Residual, normed, branch, qkv, attended.
    fn stream(&self) -> [([usize; 2], DType); 5] {
        let (hidden, q) = (self.config.hidden, self.config.q_width());
        [hidden, hidden, hidden, q + 2 * self.config.kv_width(), q]
            .map(|width| ([self.limits.tokens, width], self.dtype))
    }

    fn router_logits(&self) -> Option<([usize; 2], DType)> {
        let experts = self.config.experts;
        (experts > 0).then_some(([self.limits.tokens, experts], DType::F32))
    }

    fn routing(&self) -> RoutingShape {
        RoutingShape {
            tokens: self.limits.tokens,
            top_k: self.config.top_k,
            experts: self.config.experts,
            slots: self.limits.slots,
            tile_rows: self.limits.tile_rows,
        }
    }

    /// Gate and up, then what the activation makes of them.
    fn dense(&self) -> Option<[([usize; 2], DType); 2]> {
        let inner = self.config.dense_intermediate;
        let rows = |width| ([self.limits.tokens, width], self.dtype);
        (inner > 0).then_some([rows(2 * inner), rows(inner)])
    }

    /// Gathered, logits.
    fn head(&self) -> [([usize; 2], DType); 2] {
        let rows = self.limits.logit_rows;
        [([rows, self.config.hidden], self.dtype), ([rows, self.config.vocab], DType::F32)]
    }
}

impl<D: Device> Activations<D> {
    /// Bytes that [`Activations::carve`] takes.
    pub fn bytes(config: &Config, limits: &StepLimits, dtype: DType) -> usize {
        let shapes = Shapes { config, limits, dtype };
        let router = shapes.router_logits();
        let routing = router.map_or(0, |_| shapes.routing().bytes());
        let tensors = shapes.stream().into_iter().chain(shapes.head()).chain(router);
        let tensors = tensors.chain(shapes.dense().into_iter().flatten());
        routing + tensors.map(|(dims, dtype)| carved_bytes(&dims, dtype)).sum::<usize>()
    }

    /// Takes the tensors out of `carver`.
    ///
    /// # Errors
    /// The carver's buffer is used up.
    pub fn carve(
        carver: &mut Carver<D>,
        config: &Config,
        limits: &StepLimits,
        dtype: DType,
    ) -> Result<Self> {
        let shapes = Shapes { config, limits, dtype };
        let mut take = |(dims, dtype): ([usize; 2], DType)| carver.carve(&dims, dtype);
        let [residual, normed, branch, qkv, attended] = shapes.stream();
        let [gathered, logits] = shapes.head();
        let mut all = StepTensors {
            residual: take(residual)?,
            normed: take(normed)?,
            branch: take(branch)?,
            qkv: take(qkv)?,
            attended: take(attended)?,
            experts: None,
            dense: match shapes.dense() {
                Some([gate_up, inner]) => {
                    Some(DenseTensors { gate_up: take(gate_up)?, inner: take(inner)? })
                }
                None => None,
            },
            gathered: take(gathered)?,
            logits: take(logits)?,
        };
        if let Some(router_logits) = shapes.router_logits() {
            all.experts = Some(ExpertTensors {
                router_logits: take(router_logits)?,
                routing: Routing::carve(carver, shapes.routing())?,
            });
        }
        Ok(Activations { all })
    }

    /// `[bucket.logit_rows, vocab]` f32: where the last step of this bucket left its logits.
    ///
    /// # Errors
    /// The bucket is larger than the limits.
    pub fn logits(&self, bucket: &Bucket) -> Result<Tensor<D>> {
        self.all.logits.rows(bucket.logit_rows)
    }

    /// The front rows, for one step.
    pub(crate) fn bucket(&self, bucket: &Bucket) -> Result<StepTensors<D>> {
        let StepTensors {
            residual,
            normed,
            branch,
            qkv,
            attended,
            experts,
            dense,
            gathered,
            logits,
        } = &self.all;
        let tokens = bucket.tokens;
        let front = |experts: &ExpertTensors<D>| -> Result<_> {
            Ok(ExpertTensors {
                router_logits: experts.router_logits.rows(tokens)?,
                routing: experts.routing.bucket(tokens)?,
            })
        };
        let inside = |dense: &DenseTensors<D>| -> Result<_> {
            Ok(DenseTensors {
                gate_up: dense.gate_up.rows(tokens)?,
                inner: dense.inner.rows(tokens)?,
            })
        };
        Ok(StepTensors {
            residual: residual.rows(tokens)?,
            normed: normed.rows(tokens)?,
            branch: branch.rows(tokens)?,
            qkv: qkv.rows(tokens)?,
            attended: attended.rows(tokens)?,
            experts: experts.as_ref().map(front).transpose()?,
            dense: dense.as_ref().map(inside).transpose()?,
            gathered: gathered.rows(bucket.logit_rows)?,
            logits: logits.rows(bucket.logit_rows)?,
        })
    }
}

/// Keys and values of all layers: `[blocks, block_size, kv_heads, head_dim]` each.
#[derive(Debug)]
pub struct KvCache<D: Device> {
    layers: Vec<LayerCache<D>>,
}

/// Those of one layer.
#[derive(Debug)]
pub struct LayerCache<D: Device> {
    pub(crate) k: Tensor<D>,
    pub(crate) v: Tensor<D>,
}

/// The size of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks of every layer.
    pub blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
}

impl KvShape {
    fn dims(&self, config: &Config) -> [usize; 4] {
        [self.blocks, self.block_size, config.kv_heads, config.head_dim]
    }

    /// Bytes of the whole cache.
    pub fn bytes(&self, config: &Config, dtype: DType) -> usize {
        2 * config.layers() * carved_bytes(&self.dims(config), dtype)
    }
}

impl<D: Device> KvCache<D> {
    /// Reserves [`KvShape::bytes`] from the cache's pool.
    ///
    /// # Errors
    /// The pool has no room.
    pub fn reserve(device: &D, config: &Config, shape: KvShape, dtype: DType) -> Result<Self> {
        let buffer = device.reserve(Pool::KvCache, shape.bytes(config, dtype))?;
        let mut carver = Carver::new(buffer);
        let dims = shape.dims(config);
        let layers = (0..config.layers())
            .map(|_| {
                Ok(LayerCache { k: carver.carve(&dims, dtype)?, v: carver.carve(&dims, dtype)? })
            })
            .collect::<Result<_>>()?;
        Ok(KvCache { layers })
    }

    /// Copies the plan's blocks in every layer.
    ///
    /// # Errors
    /// The device's.
    pub fn copy_blocks(&mut self, cx: &mut Ctx<'_, D>, plan: &PlanView<D>) -> Result<()>
    where
        D: Backend,
    {
        for LayerCache { k, v } in &mut self.layers {
            CopyBlocks { plan, k_cache: k, v_cache: v }.run(cx)?;
        }
        Ok(())
    }

    pub(crate) fn layer(&mut self, index: usize) -> Result<&mut LayerCache<D>> {
        let layers = self.layers.len();
        self.layers.get_mut(index).ok_or_else(|| {
            Error::invalid("kv cache", format!("layer {index} of a cache of {layers}"))
        })
    }
}
