//! Tensor names of an adapter file → modules of a gpt_oss model.

use super::reason::Reason;
use super::{AdapterBase, Target};

/// The parameters of a layer that an adapter can change, as `target_parameters` names them.
pub(super) const PARAMETERS: &[&str] = &[
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.router.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
];

/// Which module a pair of tensors adapts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Module {
    /// A projection that is a Linear (or a 2-D parameter, which behaves like one).
    Linear { layer: usize, target: Target, expert: Option<usize> },
    /// A fused 3-D expert parameter. PEFT nests wrappers: where both parameters are adapted,
    /// gate_up is the inner one (`experts.base_layer`) and down the outer one (`experts`); where one
    /// is, it is the outer one and the configuration says which.
    Fused { layer: usize, inner: bool },
}

/// A or B.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Half {
    A,
    B,
}

/// What a name stands for.
#[derive(Debug)]
pub(super) enum Parsed<'a> {
    Half {
        module: Module,
        half: Half,
        /// The module's path in the base model, `model.layers.0.self_attn.q_proj`.
        path: &'a str,
    },
    /// No module of the model.
    Unmatched,
    Refused(Reason),
}

/// Marks of features beyond plain LoRA, looked for in names before anything else.
const FEATURES: &[(&str, &str)] = &[
    ("lora_magnitude_vector", "DoRA"),
    ("lora_A.bias", "a bias on lora_A"),
    ("lora_B.bias", "a bias on lora_B"),
    ("lora_embedding_", "adapted embeddings"),
    ("trainable_tokens_", "trained token embeddings"),
    ("modules_to_save", "whole trained modules beside LoRA"),
    ("embed_tokens.", "adapted embeddings"),
    ("lm_head.", "an adapted head"),
];

pub(super) fn parse<'a>(name: &'a str, base: &AdapterBase) -> Parsed<'a> {
    let refused =
        |feature| Parsed::Refused(Reason::Unsupported { source_of: name.to_owned(), feature });
    if let Some((_, feature)) = FEATURES.iter().find(|(mark, _)| name.contains(mark)) {
        return refused(feature);
    }
    let Some(rest) = name.strip_prefix("base_model.model.") else {
        return Parsed::Unmatched;
    };
    if rest.starts_with("model.layers.") && rest.ends_with(".bias") {
        return refused("trained biases of the base model");
    }
    let (path, half) = if let Some(path) = rest.strip_suffix(".lora_A.weight") {
        (path, Half::A)
    } else if let Some(path) = rest.strip_suffix(".lora_B.weight") {
        (path, Half::B)
    } else {
        return Parsed::Unmatched;
    };
    match module(path) {
        None => Parsed::Unmatched,
        Some(module) => match out_of_range(module, base) {
            Some((what, found, limit)) => {
                Parsed::Refused(Reason::OutOfRange { tensor: name.to_owned(), what, found, limit })
            }
            None => Parsed::Half { module, half, path },
        },
    }
}

fn module(path: &str) -> Option<Module> {
    let (layer, rest) = path.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = number(layer)?;
    let linear = |target, expert| Some(Module::Linear { layer, target, expert });
    match rest {
        "self_attn.q_proj" => return linear(Target::Q, None),
        "self_attn.k_proj" => return linear(Target::K, None),
        "self_attn.v_proj" => return linear(Target::V, None),
        "self_attn.o_proj" => return linear(Target::O, None),
        "mlp.router" => return linear(Target::Router, None),
        "mlp.experts" => {
            return Some(Module::Fused { layer, inner: false });
        }
        "mlp.experts.base_layer" => return Some(Module::Fused { layer, inner: true }),
        _ => {}
    }
    let (expert, projection) = rest.strip_prefix("mlp.experts.")?.split_once('.')?;
    let expert = Some(number(expert)?);
    match projection {
        "gate_proj" => linear(Target::Gate, expert),
        "up_proj" => linear(Target::Up, expert),
        "down_proj" => linear(Target::Down, expert),
        _ => None,
    }
}

/// A number as Python prints it: one way only, so that no two names mean one module.
fn number(text: &str) -> Option<usize> {
    let value: usize = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

fn out_of_range(module: Module, base: &AdapterBase) -> Option<(&'static str, usize, usize)> {
    let (layer, expert) = match module {
        Module::Linear { layer, expert, .. } => (layer, expert),
        Module::Fused { layer, .. } => (layer, None),
    };
    if layer >= base.layers {
        return Some(("layer", layer, base.layers));
    }
    let expert = expert.filter(|&e| e >= base.experts)?;
    Some(("expert", expert, base.experts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_module_or_none() {
        let base = AdapterBase { layers: 2, hidden: 8, q: 8, kv: 4, experts: 4, intermediate: 6 };
        let of = |path: &str| {
            let name = format!("base_model.model.model.layers.{path}.lora_A.weight");
            match parse(&name, &base) {
                Parsed::Half { module, half, .. } => {
                    assert_eq!(half, Half::A);
                    Some(module)
                }
                _ => None,
            }
        };
        let linear = |target, expert| Some(Module::Linear { layer: 1, target, expert });
        assert_eq!(of("1.self_attn.q_proj"), linear(Target::Q, None));
        assert_eq!(of("1.mlp.router"), linear(Target::Router, None));
        assert_eq!(of("1.mlp.experts.3.up_proj"), linear(Target::Up, Some(3)));
        assert_eq!(of("1.mlp.experts.base_layer"), Some(Module::Fused { layer: 1, inner: true }));
        for path in [
            "01.self_attn.q_proj",
            "+1.self_attn.q_proj",
            "2.self_attn.q_proj",
            "1.mlp.experts.4.up_proj",
            "1.mlp.experts.3.router",
            "1.mlp.gate",
            "1.self_attn.q_proj.base_layer",
            "1.mlp.experts.base_layer.base_layer",
            "1",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }
}
