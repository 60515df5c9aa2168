//! Tensor names of an adapter file → modules of the model that is served.

use super::base::dense_projection;
use super::reason::Reason;
use super::{AdapterBase, Target};
use crate::config::MlpKind;

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

/// A name cut in two, whatever the model is.
#[derive(Debug)]
pub(super) enum Cut<'a> {
    /// A or B of the module at `path`.
    Half {
        path: &'a str,
        half: Half,
    },
    /// No name that PEFT gives to a factor.
    Unmatched,
    Refused(Reason),
}

pub(super) fn cut(name: &str) -> Cut<'_> {
    let refused =
        |feature| Cut::Refused(Reason::Unsupported { source_of: name.to_owned(), feature });
    if let Some((_, feature)) = FEATURES.iter().find(|(mark, _)| name.contains(mark)) {
        return refused(feature);
    }
    let Some(rest) = name.strip_prefix("base_model.model.") else {
        return Cut::Unmatched;
    };
    if rest.starts_with("model.layers.") && rest.ends_with(".bias") {
        return refused("trained biases of the base model");
    }
    if let Some(path) = rest.strip_suffix(".lora_A.weight") {
        Cut::Half { path, half: Half::A }
    } else if let Some(path) = rest.strip_suffix(".lora_B.weight") {
        Cut::Half { path, half: Half::B }
    } else {
        Cut::Unmatched
    }
}

pub(super) fn parse<'a>(name: &'a str, base: &AdapterBase) -> Parsed<'a> {
    let (path, half) = match cut(name) {
        Cut::Half { path, half } => (path, half),
        Cut::Unmatched => return Parsed::Unmatched,
        Cut::Refused(reason) => return Parsed::Refused(reason),
    };
    match module(path, base) {
        None => Parsed::Unmatched,
        Some(module) => match misplaced(name, module, base) {
            Some(reason) => Parsed::Refused(reason),
            None => Parsed::Half { module, half, path },
        },
    }
}

fn module(path: &str, base: &AdapterBase) -> Option<Module> {
    let (layer, rest) = path.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = number(layer)?;
    let linear = |target, expert| Some(Module::Linear { layer, target, expert });
    let (block, rest) = rest.split_once('.')?;
    if block == "self_attn" {
        return match rest {
            "q_proj" => linear(Target::Q, None),
            "k_proj" => linear(Target::K, None),
            "v_proj" => linear(Target::V, None),
            "o_proj" => linear(Target::O, None),
            _ => None,
        };
    }
    if let ("mlp", Some(target)) = (block, dense_projection(rest)) {
        return linear(target, None);
    }
    if !base.expert_blocks().contains(&block) {
        return None;
    }
    if rest == base.router_name() {
        return linear(Target::Router, None);
    }
    match rest {
        "experts" => return Some(Module::Fused { layer, inner: false }),
        "experts.base_layer" => return Some(Module::Fused { layer, inner: true }),
        _ => {}
    }
    let (expert, projection) = rest.strip_prefix("experts.")?.split_once('.')?;
    let expert = Some(number(expert)?);
    linear(base.expert_projection(projection)?, expert)
}

/// A number as Python prints it: one way only, so that no two names mean one module.
fn number(text: &str) -> Option<usize> {
    let value: usize = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

/// Why the model has no such module although the name is one of its family.
fn misplaced(name: &str, module: Module, base: &AdapterBase) -> Option<Reason> {
    let out_of_range = |what, found, limit| {
        Some(Reason::OutOfRange { tensor: name.to_owned(), what, found, limit })
    };
    let (layer, expert, wants) = match module {
        Module::Linear { layer, target, expert } => {
            let wants = match (target, expert) {
                (Target::Q | Target::K | Target::V | Target::O, _) => None,
                (Target::Router, _) | (_, Some(_)) => Some(MlpKind::Experts),
                (Target::Gate | Target::Up | Target::Down, None) => Some(MlpKind::Dense),
            };
            (layer, expert, wants)
        }
        Module::Fused { layer, .. } => (layer, None, Some(MlpKind::Experts)),
    };
    let Some(&is) = base.mlps.get(layer) else {
        return out_of_range("layer", layer, base.layers());
    };
    if wants.is_some_and(|wants| wants != is) {
        return Some(Reason::OtherMlp { tensor: name.to_owned(), layer, is });
    }
    let expert = expert.filter(|&e| e >= base.experts)?;
    out_of_range("expert", expert, base.experts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Architecture;

    fn of(path: &str, base: &AdapterBase) -> Option<Module> {
        let name = format!("base_model.model.model.layers.{path}.lora_A.weight");
        match parse(&name, base) {
            Parsed::Half { module, half, .. } => {
                assert_eq!(half, Half::A);
                Some(module)
            }
            _ => None,
        }
    }

    fn base(architecture: Architecture, mlps: &[MlpKind]) -> AdapterBase {
        AdapterBase {
            architecture,
            hidden: 8,
            q: 8,
            kv: 4,
            experts: 4,
            intermediate: 6,
            dense_intermediate: 10,
            mlps: mlps.to_vec(),
        }
    }

    fn linear(layer: usize, target: Target, expert: Option<usize>) -> Option<Module> {
        Some(Module::Linear { layer, target, expert })
    }

    #[test]
    fn a_name_means_one_module_or_none() {
        let base = base(Architecture::GptOss, &[MlpKind::Experts; 2]);
        let of = |path| of(path, &base);
        assert_eq!(of("1.self_attn.q_proj"), linear(1, Target::Q, None));
        assert_eq!(of("1.mlp.router"), linear(1, Target::Router, None));
        assert_eq!(of("1.mlp.experts.3.up_proj"), linear(1, Target::Up, Some(3)));
        assert_eq!(of("1.mlp.experts.base_layer"), Some(Module::Fused { layer: 1, inner: true }));
        for path in [
            "01.self_attn.q_proj",
            "+1.self_attn.q_proj",
            "2.self_attn.q_proj",
            "1.mlp.experts.4.up_proj",
            "1.mlp.experts.3.router",
            "1.mlp.gate",
            "1.mlp.gate_proj",
            "1.block_sparse_moe.experts",
            "1.self_attn.q_proj.base_layer",
            "1.mlp.experts.base_layer.base_layer",
            "1",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn a_layer_has_experts_or_a_dense_mlp() {
        let base = base(Architecture::Qwen3Moe, &[MlpKind::Dense, MlpKind::Experts]);
        let of = |path| of(path, &base);
        assert_eq!(of("0.mlp.up_proj"), linear(0, Target::Up, None));
        assert_eq!(of("1.mlp.experts.0.up_proj"), linear(1, Target::Up, Some(0)));
        assert_eq!(of("1.mlp.gate"), linear(1, Target::Router, None));
        for path in ["1.mlp.up_proj", "0.mlp.gate", "0.mlp.experts", "0.mlp.experts.0.up_proj"] {
            assert_eq!(of(path), None, "{path}");
        }
        let name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight";
        assert!(matches!(
            parse(name, &base),
            Parsed::Refused(Reason::OtherMlp { layer: 0, is: MlpKind::Dense, .. })
        ));
    }

    #[test]
    fn mixtral_has_names_of_its_own() {
        let base = base(Architecture::Mixtral, &[MlpKind::Experts]);
        for block in ["block_sparse_moe", "mlp"] {
            let of = |path: &str| of(&format!("0.{block}.{path}"), &base);
            assert_eq!(of("experts.1.w1"), linear(0, Target::Gate, Some(1)));
            assert_eq!(of("experts.1.w2"), linear(0, Target::Down, Some(1)));
            assert_eq!(of("experts.1.w3"), linear(0, Target::Up, Some(1)));
            assert_eq!(of("gate"), linear(0, Target::Router, None));
            assert_eq!(of("experts"), Some(Module::Fused { layer: 0, inner: false }));
            assert_eq!(of("experts.1.gate_proj"), None);
        }
    }
}
