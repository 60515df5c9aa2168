//! What a model asks of a device before anything is loaded: the operators it runs, and the workspace
//! they take.

use amphora_hal::{Device, Error, OpBounds, OpKey, OpKind, Scheme, Support};

use crate::activations::StepLimits;
use crate::config::{Config, MlpKind};

/// Every operator of a step at the types that decide which implementation runs. With adapters, at
/// each of the device's rank classes that `limits` needs.
pub fn op_keys<D: Device>(
    device: &D,
    config: &Config,
    limits: &StepLimits,
    dtype: amphora_hal::DType,
) -> Vec<OpKey> {
    let plain = |op| OpKey::new(op, dtype);
    let weighted = |op| plain(op).scheme(Scheme::Dense(dtype));
    let mut keys = vec![
        plain(OpKind::WriteTokens),
        plain(OpKind::Embed),
        plain(OpKind::RmsNorm),
        plain(OpKind::Rope).head_dim(config.head_dim),
        plain(OpKind::KvWrite).head_dim(config.head_dim),
        plain(OpKind::PagedAttention).head_dim(config.head_dim),
        weighted(OpKind::Linear),
        plain(OpKind::GatherRows),
        plain(OpKind::CopyBlocks),
        plain(OpKind::Sample),
        plain(OpKind::Logprobs),
    ];
    let experts = config.mlps.contains(&MlpKind::Experts);
    if experts {
        keys.extend([plain(OpKind::MoeRoute), weighted(OpKind::FusedMoe)]);
    }
    if config.mlps.contains(&MlpKind::Dense) {
        keys.push(plain(OpKind::Swiglu));
    }
    if limits.slots > 0 {
        let most = device.caps().rank_class(limits.max_rank);
        for class in device.caps().rank_classes {
            if most.is_none_or(|most| *class <= most) {
                keys.push(weighted(OpKind::LoraLinear).class(*class));
                if experts {
                    keys.push(weighted(OpKind::FusedMoeLora).class(*class));
                }
            }
        }
    }
    keys
}

/// The path of each operator of [`op_keys`].
///
/// # Errors
/// The first that the device does not run.
pub fn supported_paths<D: Device>(
    device: &D,
    keys: &[OpKey],
) -> amphora_hal::Result<Vec<(OpKey, &'static str)>> {
    keys.iter()
        .map(|key| match device.supports(key) {
            Support::Yes { path } => Ok((*key, path)),
            Support::No { reason } => Err(Error::Unsupported { key: *key, reason }),
        })
        .collect()
}

/// Bytes of workspace that the compute stream needs: the most that any operator of a step takes.
pub fn workspace<D: Device>(device: &D, config: &Config, limits: &StepLimits) -> usize {
    bounds(device, config, limits).iter().map(|bounds| device.workspace(bounds)).max().unwrap_or(0)
}

fn bounds<D: Device>(device: &D, config: &Config, limits: &StepLimits) -> Vec<OpBounds> {
    // Blocks have the rank of their class.
    let rank =
        device.caps().rank_class(limits.max_rank).map_or(limits.max_rank, |class| class.get());
    let (hidden, q) = (config.hidden, config.q_width());
    let of = |op, tokens, k, n| OpBounds { op: Some(op), tokens, k, n, ..OpBounds::default() };
    let tokens = limits.tokens;
    let mut all = vec![
        of(OpKind::WriteTokens, tokens, 0, 0),
        of(OpKind::Embed, tokens, hidden, hidden),
        of(OpKind::RmsNorm, tokens, hidden, hidden),
        of(OpKind::Rope, tokens, config.head_dim, config.heads),
        of(OpKind::KvWrite, tokens, config.head_dim, config.kv_heads),
        OpBounds {
            context: limits.context,
            ..of(OpKind::PagedAttention, tokens, config.head_dim, config.heads)
        },
        of(OpKind::GatherRows, limits.logit_rows, hidden, hidden),
        of(OpKind::Linear, limits.logit_rows, hidden, config.vocab),
        of(OpKind::CopyBlocks, limits.sequences, config.head_dim, config.kv_heads),
        of(OpKind::Sample, limits.sequences, config.vocab, config.vocab),
        of(OpKind::Logprobs, limits.logit_rows, config.vocab, config.vocab),
    ];
    let with_lora = |plain, lora| match limits.slots {
        0 => vec![plain],
        _ => vec![plain, lora],
    };
    let mut projections = vec![(hidden, q + 2 * config.kv_width()), (q, hidden)];
    if config.mlps.contains(&MlpKind::Dense) {
        let inner = config.dense_intermediate;
        projections.extend([(hidden, 2 * inner), (inner, hidden)]);
        all.push(of(OpKind::Swiglu, tokens, 2 * inner, inner));
    }
    if config.mlps.contains(&MlpKind::Experts) {
        let (experts, top_k) = (config.experts, config.top_k);
        projections.push((hidden, experts));
        all.push(OpBounds { experts, top_k, ..of(OpKind::MoeRoute, tokens, 0, 0) });
        for op in with_lora(OpKind::FusedMoe, OpKind::FusedMoeLora) {
            let inner = 2 * config.intermediate;
            all.push(OpBounds { inner, experts, top_k, rank, ..of(op, tokens, hidden, hidden) });
        }
    }
    for op in with_lora(OpKind::Linear, OpKind::LoraLinear) {
        all.extend(projections.iter().map(|&(k, n)| OpBounds { rank, ..of(op, tokens, k, n) }));
    }
    all
}
