//! For which calls an entry is, and which of several is the nearest.

use std::cmp::Reverse;

use amphora_hal::DType;
use serde::{Deserialize, Serialize};

use super::Fault;

/// A compute type as files name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Element {
    /// `None`: nothing is computed in this type.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Element::F32),
            DType::F16 => Some(Element::F16),
            DType::BF16 => Some(Element::Bf16),
            _ => None,
        }
    }
}

/// The sizes of a call, or of the calls that an entry is for: there, a field left out matches every call.
///
/// Sizes must be the same, but for `tokens`, the rows of the step's bucket, of which the nearest is taken:
/// another shape is other work, about which the heuristic knows more than an entry of a far shape. Ranks
/// are no part of it: adapters of every rank come and go while one recorded step is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct When {
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Inputs of a product; the hidden width for experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    /// Outputs of a product.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// Width of an expert behind its activation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Experts of a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    /// Experts of a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Key and value heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Width of a head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Compute type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Element>,
}

/// Nearer is less: first entries that name more, then those of nearer tokens, then those of fewer.
pub type Nearness = (Reverse<usize>, usize, usize);

impl When {
    fn sizes(&self) -> [(&'static str, Option<usize>); 8] {
        [
            ("k", self.k),
            ("n", self.n),
            ("inner", self.inner),
            ("experts", self.experts),
            ("top_k", self.top_k),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
        ]
    }

    /// The order of entries in a file: by shape, then by tokens.
    pub(super) fn order(&self) -> impl Ord + use<> {
        (self.sizes().map(|(_, size)| size), self.dtype, self.tokens)
    }

    /// How near this entry is to a call whose sizes are all named; `None`: it is for others.
    pub fn nearness(&self, call: &When) -> Option<Nearness> {
        let mut named = 0;
        for ((_, own), (_, of_call)) in self.sizes().into_iter().zip(call.sizes()) {
            if let Some(own) = own {
                named += 1;
                if of_call != Some(own) {
                    return None;
                }
            }
        }
        if let Some(own) = self.dtype {
            named += 1;
            if call.dtype != Some(own) {
                return None;
            }
        }
        let tokens = self.tokens.or(call.tokens).unwrap_or(0);
        Some((Reverse(named), tokens.abs_diff(call.tokens.unwrap_or(tokens)), tokens))
    }

    /// Refuses fields that an operator's calls do not have, and sizes of nothing.
    pub(super) fn check(&self, fields: &[&str]) -> Result<(), Fault> {
        let sizes = [("tokens", self.tokens)].into_iter().chain(self.sizes());
        let known = |name: &str| match fields.contains(&name) {
            true => Ok(()),
            false => Err(Fault::new(name, format!("this operator has {}", fields.join(", ")))),
        };
        if self.dtype.is_some() {
            known("dtype")?;
        }
        for (name, size) in sizes {
            let Some(size) = size else { continue };
            known(name)?;
            if size == 0 || size > u32::MAX as usize {
                return Err(Fault::new(name, format!("{size}: expected 1 to {}", u32::MAX)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: When = When {
        tokens: Some(40),
        k: Some(2880),
        n: Some(5120),
        dtype: Some(Element::Bf16),
        inner: None,
        experts: None,
        top_k: None,
        heads: None,
        kv_heads: None,
        head_dim: None,
    };

    #[test]
    fn shapes_match_or_do_not_and_tokens_are_near() {
        let of = |tokens, k, n| When { tokens, k, n, ..When::default() };
        assert_eq!(of(Some(1), Some(2880), Some(64)).nearness(&CALL), None);
        assert_eq!(When { dtype: Some(Element::F16), ..CALL }.nearness(&CALL), None);
        let near = |when: When| when.nearness(&CALL).expect("it matches");
        assert!(near(of(Some(32), None, None)) < near(of(Some(64), None, None)));
        assert!(near(of(Some(32), None, None)) < near(of(Some(48), None, None)), "fewer first");
        assert!(near(of(Some(1), Some(2880), None)) < near(of(Some(40), None, None)), "more named");
        assert!(near(of(None, None, None)) < near(of(Some(39), None, None)), "any is here");
    }

    #[test]
    fn a_field_of_another_operator_is_refused() {
        let heads = When { heads: Some(8), ..When::default() };
        assert_eq!(heads.check(&["tokens", "k"]).expect_err("no heads").field, "heads");
        let typed = When { dtype: Some(Element::Bf16), ..When::default() };
        assert_eq!(typed.check(&["tokens", "k"]).expect_err("of no type").field, "dtype");
        assert_eq!(typed.check(&["tokens", "dtype"]), Ok(()));
        let none = When { tokens: Some(0), ..When::default() };
        assert!(none.check(&["tokens"]).is_err());
    }
}
