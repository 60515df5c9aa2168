//! vLLM's folder of tuned tiles: its files are recognised, and each is answered with what of it our
//! kernels could take.
//!
//! They tile the four products of deltas one by one, in the terms of the compiler that makes them. Here
//! deltas are added inside the base product, so little of it has a counterpart. Nothing is taken over
//! silently: the answer names each key once, with what is nearest to it or why there is nothing.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Fault;

/// What a file of that folder is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The first half of a dense projection's deltas.
    Shrink,
    /// The second half.
    Expand,
    /// The first half of an expert product's deltas.
    ExpertShrink,
    /// The second half.
    ExpertExpand,
    /// The base product of experts.
    Experts,
}

impl Kind {
    /// From a file's name; `None`: it is none of that folder's.
    pub fn of(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".json")?;
        if stem.starts_with("E=") && stem.contains(",N=") && stem.contains(",device_name=") {
            return Some(Kind::Experts);
        }
        let of_experts = |way: &str| {
            ["W13", "W2"]
                .iter()
                .any(|part| stem.ends_with(&format!("_FUSED_MOE_LORA_{part}_{way}")))
        };
        if of_experts("SHRINK") {
            Some(Kind::ExpertShrink)
        } else if of_experts("EXPAND") {
            Some(Kind::ExpertExpand)
        } else if stem.ends_with("_SHRINK") {
            Some(Kind::Shrink)
        } else if stem.ends_with("_EXPAND_TRUE") || stem.ends_with("_EXPAND_FALSE") {
            Some(Kind::Expand)
        } else {
            None
        }
    }

    /// Levels of numbers above the tiles.
    fn levels(self) -> usize {
        match self {
            Kind::Experts => 1,
            Kind::Shrink | Kind::Expand => 5,
            Kind::ExpertShrink | Kind::ExpertExpand => 6,
        }
    }
}

/// Why a key of a tile is not taken, and what is nearest to it here.
fn reason(kind: Kind, key: &str) -> &'static str {
    let key = key.to_ascii_uppercase();
    let key = key.strip_prefix("BLOCK_SIZE_").or(key.strip_prefix("BLOCK_")).unwrap_or(&key);
    let expand = matches!(kind, Kind::Expand | Kind::ExpertExpand);
    match key {
        "M" => "all steps over one list of tiles share its rows, 16",
        "N" if kind == Kind::Shrink => "rows of A of a block are rank_rows of GPU.lora_linear.json",
        "N" | "K" if expand => "deltas are more k of the base product, in its tile",
        "N" | "K" => "fixed with the kernel",
        "SPLIT_K" if expand => "the rank is not split",
        "SPLIT_K" => "the warps of a block share k, and their sums meet in order",
        "GROUP_SIZE_M" => "a block takes neighbouring tiles in a run",
        "NUM_WARPS" | "NUM_STAGES" | "MAX_NREG" => {
            "fixed with the kernel, which fills its registers"
        }
        "NUM_CTAS" => "parts of GPU.linear.json are the nearest",
        _ => "not known here",
    }
}

/// What a file says, and what of it applies, as a line.
///
/// # Errors
/// It is no JSON, or its numbers are not as deep as its kind has them.
pub fn answer(kind: Kind, text: &str) -> Result<String, Fault> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| Fault::new("file", error.to_string()))?;
    let mut tiles = Tiles::default();
    tiles.collect(&value, kind.levels(), "file")?;
    let of = |key: &String| format!("{key}: {}", reason(kind, key));
    let keys: Vec<String> = tiles.keys.iter().map(of).collect();
    Ok(format!(
        "{} tiles for kernels of vLLM, of which none applies ({})",
        tiles.count,
        keys.join("; ")
    ))
}

/// The tiles of a file.
#[derive(Debug, Default)]
struct Tiles {
    count: usize,
    keys: BTreeSet<String>,
}

impl Tiles {
    /// Those below `levels` levels of numbers.
    fn collect(&mut self, value: &Value, levels: usize, path: &str) -> Result<(), Fault> {
        let Value::Object(fields) = value else {
            return Err(Fault::new(path, "expected an object"));
        };
        if levels == 0 {
            self.count += 1;
            self.keys.extend(fields.keys().cloned());
            return Ok(());
        }
        for (key, below) in fields {
            if key.parse::<u64>().is_ok() {
                self.collect(below, levels - 1, &format!("{path}.{key}"))?;
            } else if key != "triton_version" {
                return Err(Fault::new(format!("{path}.{key}"), "expected a number as key"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_by_their_names() {
        for (name, kind) in [
            ("NVIDIA_H200_SHRINK.json", Some(Kind::Shrink)),
            ("NVIDIA_H200_EXPAND_TRUE.json", Some(Kind::Expand)),
            ("NVIDIA_H200_FUSED_MOE_LORA_W13_SHRINK.json", Some(Kind::ExpertShrink)),
            ("NVIDIA_H200_FUSED_MOE_LORA_W2_EXPAND.json", Some(Kind::ExpertExpand)),
            ("E=32,N=2880,device_name=NVIDIA_H200.json", Some(Kind::Experts)),
            ("NVIDIA_H200_EXPAND.json", None),
            ("NVIDIA_H200.linear.json", None),
            ("notes.txt", None),
        ] {
            assert_eq!(Kind::of(name), kind, "{name}");
        }
    }

    #[test]
    fn every_key_is_answered() {
        let tile = r#"{"block_m": 16, "block_n": 32, "split_k": 8, "num_warps": 4, "odd": 1}"#;
        let text = format!(r#"{{"8": {{"3": {{"16": {{"2880": {{"32": {tile}}}}}}}}}}}"#);
        let line = answer(Kind::Shrink, &text).expect("as deep as it must be");
        for part in ["1 tiles", "block_m: ", "split_k: ", "odd: not known here"] {
            assert!(line.contains(part), "{part} in {line}");
        }
        let fault = answer(Kind::ExpertShrink, &text).expect_err("one level less");
        assert!(fault.field.ends_with("block_m"), "{fault}");
        assert!(answer(Kind::Experts, "[]").is_err());
        assert!(answer(Kind::Experts, "{").is_err());
    }
}
