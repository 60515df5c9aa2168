//! The tensors a step works on, carved once, and the paged cache. `forward` allocates nothing: it
//! takes the front rows of these for the bucket at hand.

use amphora_hal::ops::{Routing, RoutingShape};
use amphora_hal::{Bucket, Carver, DType, Device, Error, Pool, Result, Tensor, carved_bytes};

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
    /// `[tokens, hidden]`, what attention or the experts give, not yet added to the residual.
    pub(crate) branch: Tensor<D>,
    /// `[tokens, q + k + v]`.
    pub(crate) qkv: Tensor<D>,
    /// `[tokens, q]`, attention's values before its output projection.
    pub(crate) attended: Tensor<D>,
    /// `[tokens, experts]` f32.
    pub(crate) router_logits: Tensor<D>,
    pub(crate) routing: Routing<D>,
    /// `[logit_rows, hidden]`.
    pub(crate) gathered: Tensor<D>,
    /// `[logit_rows, vocab]` f32.
    pub(crate) logits: Tensor<D>,
}

/// Shapes and types, in the order they are carved.
fn shapes(config: &Config, limits: &StepLimits, dtype: DType) -> [([usize; 2], DType); 8] {
    let rows = |width| ([limits.tokens, width], dtype);
    let q = config.q_width();
    [
        rows(config.hidden),
        rows(config.hidden),
        rows(config.hidden),
        rows(q + 2 * config.kv_width()),
        rows(q),
        ([limits.tokens, config.experts], DType::F32),
        ([limits.logit_rows, config.hidden], dtype),
        ([limits.logit_rows, config.vocab], DType::F32),
    ]
}

fn routing_shape(config: &Config, limits: &StepLimits) -> RoutingShape {
    RoutingShape {
        tokens: limits.tokens,
        top_k: config.top_k,
        experts: config.experts,
        slots: limits.slots,
        tile_rows: limits.tile_rows,
    }
}

impl<D: Device> Activations<D> {
    /// Bytes that [`Activations::carve`] takes.
    pub fn bytes(config: &Config, limits: &StepLimits, dtype: DType) -> usize {
        let tensors: usize = shapes(config, limits, dtype)
            .iter()
            .map(|(dims, dtype)| carved_bytes(dims, *dtype))
            .sum();
        tensors + routing_shape(config, limits).bytes()
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
        let mut carved = Vec::with_capacity(8);
        for (dims, dtype) in shapes(config, limits, dtype) {
            carved.push(carver.carve(&dims, dtype)?);
        }
        let routing = Routing::carve(carver, routing_shape(config, limits))?;
        let mut next = carved.into_iter();
        let mut take = || {
            next.next().ok_or_else(|| Error::invalid("activations", "fewer tensors than fields"))
        };
        Ok(Activations {
            all: StepTensors {
                residual: take()?,
                normed: take()?,
                branch: take()?,
                qkv: take()?,
                attended: take()?,
                router_logits: take()?,
                gathered: take()?,
                logits: take()?,
                routing,
            },
        })
    }

    /// The front rows, for one step.
    pub(crate) fn bucket(&self, bucket: &Bucket) -> Result<StepTensors<D>> {
        let StepTensors {
            residual,
            normed,
            branch,
            qkv,
            attended,
            router_logits,
            routing,
            gathered,
            logits,
        } = &self.all;
        Ok(StepTensors {
            residual: residual.rows(bucket.tokens)?,
            normed: normed.rows(bucket.tokens)?,
            branch: branch.rows(bucket.tokens)?,
            qkv: qkv.rows(bucket.tokens)?,
            attended: attended.rows(bucket.tokens)?,
            router_logits: router_logits.rows(bucket.tokens)?,
            routing: routing.bucket(bucket.tokens)?,
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

    pub(crate) fn layer(&mut self, index: usize) -> Result<&mut LayerCache<D>> {
        let layers = self.layers.len();
        self.layers.get_mut(index).ok_or_else(|| {
            Error::invalid("kv cache", format!("layer {index} of a cache of {layers}"))
        })
    }
}
