//! The tensors of a gpt_oss checkpoint, by the names the hub gives them, and the layers made of them.

use amphora_hal::ops::{Activation, Mask, RouteScore};
use amphora_hal::{Backend, Ctx};

use super::{GptOss, Layer, Norm};
use crate::config::{Config, Quantization};
use crate::error::Result;
use crate::files::ModelFiles;
use crate::layers::{Attention, Heads, Moe, Projection};
use crate::rope::rope_table;
use crate::weights::{Item, Kind, Layout, LoadOptions, LoadReport, Part, Progress, Request, Store};

/// Reads, packs and puts together.
pub(crate) fn load<B: Backend>(
    files: &ModelFiles,
    config: &Config,
    options: LoadOptions,
    cx: &mut Ctx<'_, B>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(GptOss<B>, LoadReport)> {
    let items = describe(files, config, options);
    let request = request(files, &items, options);
    let (mut store, report) = crate::weights::load(&request, cx, progress)?;
    Ok((assemble(&mut store, config)?, report))
}

fn request<'a>(files: &'a ModelFiles, items: &'a [Item], options: LoadOptions) -> Request<'a> {
    Request {
        files,
        items,
        options,
        architecture: "gpt_oss",
        // Old exports keep the rotary frequencies, which are computed here.
        ignorable: |name| name.ends_with(".rotary_emb.inv_freq"),
    }
}

/// Everything the model needs on the device.
fn describe(files: &ModelFiles, config: &Config, options: LoadOptions) -> Vec<Item> {
    let (hidden, vocab) = (config.hidden, config.vocab);
    let positions = options.positions.min(config.max_positions);
    let head = match config.tied_embeddings {
        true => "model.embed_tokens.weight",
        false => "lm_head.weight",
    };
    let mut items = vec![
        Item::new(
            "embedding",
            Kind::Table { tensor: "model.embed_tokens.weight".to_owned(), dims: [vocab, hidden] },
        ),
        Item::new(
            "rope",
            Kind::Computed {
                dims: [positions, config.head_dim],
                values: rope_table(&config.rope, config.head_dim, positions),
            },
        ),
    ];
    for layer in 0..config.layers() {
        describe_layer(&mut items, files, config, layer);
    }
    items.push(Item::vector("final_norm", "model.norm.weight", &[hidden]));
    items.push(Item::linear("head", hidden, &[(head, vocab)]));
    items
}

fn describe_layer(items: &mut Vec<Item>, files: &ModelFiles, config: &Config, layer: usize) {
    let key = |name: &str| format!("{layer}.{name}");
    let tensor = |name: &str| format!("model.layers.{layer}.{name}");
    let (hidden, q, kv) = (config.hidden, config.q_width(), config.kv_width());
    let (experts, inner) = (config.experts, config.intermediate);

    let vector = |name: &str, of: &str, dims: &[usize]| Item::vector(&key(name), &tensor(of), dims);
    items.push(vector("input_norm", "input_layernorm.weight", &[hidden]));
    items.push(vector("post_norm", "post_attention_layernorm.weight", &[hidden]));
    items.push(vector("sinks", "self_attn.sinks", &[config.heads]));
    items.push(vector("router.bias", "mlp.router.bias", &[experts]));
    items.push(vector("gate_up.bias", "mlp.experts.gate_up_proj_bias", &[experts, 2 * inner]));
    items.push(vector("down.bias", "mlp.experts.down_proj_bias", &[experts, hidden]));

    let attention = |of: &str, what: &str| tensor(&format!("self_attn.{of}_proj.{what}"));
    let parts = [("q", q), ("k", kv), ("v", kv)];
    let weights = parts.map(|(of, n)| (attention(of, "weight"), n));
    let weights: Vec<(&str, usize)> = weights.iter().map(|(t, n)| (t.as_str(), *n)).collect();
    items.push(Item::linear(&key("qkv"), hidden, &weights));
    let o = attention("o", "weight");
    items.push(Item::linear(&key("o"), q, &[(&o, hidden)]));
    if config.attention_bias {
        items.push(Item::new(
            &key("qkv.bias"),
            Kind::Vector {
                dims: vec![q + 2 * kv],
                tensors: parts.map(|(of, n)| (attention(of, "bias"), vec![n])).to_vec(),
            },
        ));
        items.push(Item::vector(&key("o.bias"), &attention("o", "bias"), &[hidden]));
    }
    let router = tensor("mlp.router.weight");
    items.push(Item::linear(&key("router"), hidden, &[(&router, experts)]));

    let expert = |name: &str, of: &str, k: usize, n: usize| {
        let tensor = tensor(of);
        let blocks = format!("{tensor}_blocks");
        // A checkpoint that was dequantised and saved again may still say mxfp4.
        let packed = config.quantization == Quantization::Mxfp4 && files.tensor(&blocks).is_some();
        let layout = match packed {
            true => Layout::Mxfp4,
            false => Layout::Experts,
        };
        Item::new(
            &key(name),
            Kind::Matrix { matrices: experts, k, parts: vec![Part { n, tensor, layout }] },
        )
    };
    items.push(expert("gate_up", "mlp.experts.gate_up_proj", hidden, 2 * inner));
    items.push(expert("down", "mlp.experts.down_proj", inner, hidden));
}

fn assemble<B: Backend>(store: &mut Store<B>, config: &Config) -> Result<GptOss<B>> {
    Ok(GptOss {
        embedding: store.tensor("embedding")?,
        rope: store.tensor("rope")?,
        layers: config
            .windows
            .iter()
            .enumerate()
            .map(|(index, window)| layer(store, config, index, *window))
            .collect::<Result<_>>()?,
        final_norm: norm(store, config, "final_norm")?,
        head: projection(store, "head")?,
    })
}

fn layer<B: Backend>(
    store: &mut Store<B>,
    config: &Config,
    layer: usize,
    window: Option<usize>,
) -> Result<Layer<B>> {
    let key = |name: &str| format!("{layer}.{name}");
    Ok(Layer {
        input_norm: norm(store, config, &key("input_norm"))?,
        attention: Attention {
            qkv: projection(store, &key("qkv"))?,
            o: projection(store, &key("o"))?,
            sinks: Some(store.tensor(&key("sinks"))?),
            heads: Heads { q: config.heads, kv: config.kv_heads, dim: config.head_dim },
            mask: window.map_or(Mask::Causal, Mask::Window),
        },
        post_norm: norm(store, config, &key("post_norm"))?,
        moe: Moe {
            router: projection(store, &key("router"))?,
            score: RouteScore::SoftmaxTopk,
            gate_up: store.matrix(&key("gate_up"))?,
            gate_up_bias: Some(store.tensor(&key("gate_up.bias"))?),
            down: store.matrix(&key("down"))?,
            down_bias: Some(store.tensor(&key("down.bias"))?),
            activation: Activation::ClampedInterleaved {
                limit: config.swiglu_limit,
                alpha: config.swiglu_alpha,
            },
        },
    })
}

fn norm<B: Backend>(store: &mut Store<B>, config: &Config, key: &str) -> Result<Norm<B>> {
    Ok(Norm { weight: store.tensor(key)?, eps: config.rms_eps })
}

fn projection<B: Backend>(store: &mut Store<B>, key: &str) -> Result<Projection<B>> {
    Ok(Projection { weight: store.matrix(key)?, bias: store.optional(&format!("{key}.bias")) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use amphora_hal::DType;

    const OPTIONS: LoadOptions = LoadOptions { dtype: DType::F32, positions: 64 };

    fn golden(model: &str) -> (ModelFiles, Config) {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("../tests/golden/models").join(model);
        let files = ModelFiles::open(&folder).expect("a stored model");
        let config = Config::read(&files).expect("sound");
        (files, config)
    }

    fn check(files: &ModelFiles, config: &Config) -> Result<LoadReport> {
        let items = describe(files, config, OPTIONS);
        crate::weights::check(&request(files, &items, OPTIONS))
    }

    #[test]
    fn every_tensor_of_a_checkpoint_is_used_once() {
        for model in ["gpt_oss", "gpt_oss_bf16", "gpt_oss_mxfp4"] {
            let (files, config) = golden(model);
            let report = check(&files, &config).expect(model);
            assert_eq!(report.tensors, files.names().count());
            assert_eq!(report.file_bytes, files.tensor_bytes());
        }
    }

    #[test]
    fn tensors_that_contradict_the_configuration_are_named() {
        let (files, config) = golden("gpt_oss");
        let message = |edit: fn(&mut Config)| {
            let mut config = config.clone();
            edit(&mut config);
            check(&files, &config).expect_err("contradicts").to_string()
        };
        let shape = message(|c| c.experts = 7);
        assert!(
            shape.contains("`model.layers.0.mlp.router.bias` has shape [8], expected [7]"),
            "{shape}"
        );
        let unused = message(|c| c.windows.truncate(2));
        assert!(unused.contains("17 tensors play no part in gpt_oss"), "{unused}");
        let missing = message(|c| c.windows.push(None));
        assert!(
            missing.contains("`model.layers.3.input_layernorm.weight` is missing"),
            "{missing}"
        );
        let biases = message(|c| c.attention_bias = false);
        assert!(biases.contains("12 tensors play no part"), "{biases}");
        let tied = message(|c| c.tied_embeddings = true);
        assert!(tied.contains("[\"lm_head.weight\"]"), "{tied}");
    }

    /// Blocks without `quantization_config` are no weights of the plain model.
    #[test]
    fn mxfp4_blocks_need_their_configuration() {
        let (files, mut config) = golden("gpt_oss_mxfp4");
        config.quantization = Quantization::None;
        let error = check(&files, &config).expect_err("contradicts").to_string();
        assert!(error.contains("mlp.experts.gate_up_proj` is missing"), "{error}");
    }
}
