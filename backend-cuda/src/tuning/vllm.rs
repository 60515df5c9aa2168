//! vLLM's folder of tuned tiles: its files are recognised, what of them a kernel here obeys is taken, and
//! each is answered with that and with why the rest is not.
//!
//! They tile the four products of deltas one by one, in the terms of the compiler that makes them. Here
//! deltas are added inside the base product, so little has a counterpart: the rows of A that a block of a
//! dense shrink takes, and the blocks that share its k. Both were measured with other kernels, so they go
//! behind what is built in and in front of the heuristic alone.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::operators::{DeltaUse, Operator, Order, ShrinkUse};
use super::{AnyFile, Entry, Fault, File, When};

/// What a file of that folder is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The first half of a dense projection's deltas.
    Shrink,
    /// The second half.
    Expand,
    /// The first half of the deltas of gate and up of experts.
    GateUpShrink,
    /// The first half of those of down.
    DownShrink,
    /// The second half of both.
    ExpertExpand,
    /// The base product of experts.
    Experts,
}

impl Kind {
    /// From a file's name, with the GPU as it is written there; `None`: it is none of that folder's.
    pub fn of(name: &str) -> Option<(Self, &str)> {
        let stem = name.strip_suffix(".json")?;
        if stem.starts_with("E=") && stem.contains(",N=") {
            let gpu = stem.split(',').find_map(|part| part.strip_prefix("device_name="))?;
            return Some((Kind::Experts, gpu));
        }
        let endings = [
            ("_FUSED_MOE_LORA_W13_SHRINK", Kind::GateUpShrink),
            ("_FUSED_MOE_LORA_W2_SHRINK", Kind::DownShrink),
            ("_FUSED_MOE_LORA_W13_EXPAND", Kind::ExpertExpand),
            ("_FUSED_MOE_LORA_W2_EXPAND", Kind::ExpertExpand),
            ("_SHRINK", Kind::Shrink),
            ("_EXPAND_TRUE", Kind::Expand),
            ("_EXPAND_FALSE", Kind::Expand),
        ];
        endings.iter().find_map(|(ending, kind)| Some((*kind, stem.strip_suffix(ending)?)))
    }

    /// Levels of numbers above the tiles: adapters, slices, rows, two widths, and for experts their inner
    /// width; rows alone for a base product.
    fn levels(self) -> usize {
        match self {
            Kind::Experts => 1,
            Kind::Shrink | Kind::Expand => 5,
            Kind::GateUpShrink | Kind::DownShrink | Kind::ExpertExpand => 6,
        }
    }

    /// Rows and width of the input of a shrink, and its rank, among the levels.
    fn shrink(self) -> Option<[usize; 3]> {
        match self {
            Kind::Shrink => Some([2, 3, 4]),
            Kind::GateUpShrink => Some([2, 4, 3]),
            Kind::DownShrink => Some([2, 5, 3]),
            Kind::Expand | Kind::ExpertExpand | Kind::Experts => None,
        }
    }
}

/// Why a key of a tile is not taken where it is not.
fn reason(kind: Kind, key: &str) -> &'static str {
    let key = key.to_ascii_uppercase();
    let key = key.strip_prefix("BLOCK_SIZE_").or(key.strip_prefix("BLOCK_")).unwrap_or(&key);
    let expand = matches!(kind, Kind::Expand | Kind::ExpertExpand);
    match key {
        "M" => "all steps over one list of tiles share its rows, 16",
        "N" if kind == Kind::Shrink => "a block takes 8 or 32 rows of A",
        "N" | "K" if expand => "deltas are more k of the base product, in its tile",
        "N" | "K" => "fixed with the kernel",
        "SPLIT_K" if expand => "the rank is not split",
        "SPLIT_K" if kind == Kind::Experts => "the warps of a block share k",
        "SPLIT_K" => "at most 16 blocks share k",
        "GROUP_SIZE_M" => "a block takes neighbouring tiles in a run",
        "NUM_WARPS" | "NUM_STAGES" | "MAX_NREG" => {
            "fixed with the kernel, which fills its registers"
        }
        "NUM_CTAS" => "parts of GPU.linear.json are the nearest",
        _ => "not known here",
    }
}

/// What a file says here.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Its tiles, what of them is taken, and why the rest is not.
    pub line: String,
    /// What is taken.
    pub files: Vec<AnyFile>,
}

/// Reads a file, for the GPU called `gpu`.
///
/// # Errors
/// It is no JSON, or its numbers are not as deep as its kind has them.
pub fn answer(kind: Kind, gpu: &str, text: &str) -> Result<Answer, Fault> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| Fault::new("file", error.to_string()))?;
    let mut tiles = Tiles::default();
    tiles.collect(&value, kind.levels(), &mut Vec::new())?;
    let mut said = vec![format!("{} tiles for kernels of vLLM", tiles.found.len())];
    let mut files = Vec::new();
    if let Some(levels) = kind.shrink() {
        let splits = file_of(gpu, tiles.splits(levels));
        let rows = file_of(gpu, tiles.rank_rows(kind, levels));
        for (field, file) in [("split_k", splits), ("block_n", rows)] {
            let Some(file) = file else { continue };
            said.push(format!("{field} taken for {} calls", file.entries()));
            files.push(file);
        }
    }
    let keys: BTreeSet<&String> = tiles.found.iter().flat_map(|(_, tile)| tile.keys()).collect();
    said.extend(keys.into_iter().map(|key| format!("{key}: {}", reason(kind, key))));
    Ok(Answer { line: said.join("; "), files })
}

fn file_of<U: Operator>(gpu: &str, choices: BTreeMap<[usize; 2], U>) -> Option<AnyFile> {
    let entry = |([tokens, k], choice): ([usize; 2], U)| Entry {
        when: When { tokens: Some(tokens), k: Some(k), ..When::default() },
        choice: Some(choice),
        measured: None,
    };
    let sound = |entry: &Entry<U>| {
        entry.choice.as_ref().is_some_and(|choice| choice.check(&entry.when).is_ok())
    };
    let entries: Vec<Entry<U>> = choices.into_iter().map(entry).filter(sound).collect();
    let (gpu, operator) = (gpu.to_owned(), U::NAME.to_owned());
    (!entries.is_empty()).then(|| U::any(File { gpu, operator, made: None, entries }))
}

/// Where a fault is.
fn path(above: &[usize]) -> String {
    let numbers = above.iter().map(|number| format!(".{number}"));
    format!("file{}", numbers.collect::<String>())
}

/// The tiles of a file, each below the numbers of its levels.
#[derive(Debug, Default)]
struct Tiles {
    found: Vec<(Vec<usize>, Map<String, Value>)>,
}

impl Tiles {
    /// Those below `levels` further levels of numbers.
    fn collect(
        &mut self,
        value: &Value,
        levels: usize,
        above: &mut Vec<usize>,
    ) -> Result<(), Fault> {
        let Value::Object(fields) = value else {
            return Err(Fault::new(path(above), "expected an object"));
        };
        if levels == 0 {
            self.found.push((above.clone(), fields.clone()));
            return Ok(());
        }
        for (key, below) in fields {
            match key.parse::<u32>() {
                Ok(number) => {
                    above.push(number as usize);
                    self.collect(below, levels - 1, above)?;
                    above.pop();
                }
                Err(_) if key == "triton_version" => {}
                Err(_) => {
                    let what = format!("{key}: expected a number as key");
                    return Err(Fault::new(path(above), what));
                }
            }
        }
        Ok(())
    }

    /// Each tile's numbers of these levels, with its field of one of two names.
    fn each(&self, levels: [usize; 3], names: [&str; 2]) -> impl Iterator<Item = [usize; 4]> {
        self.found.iter().filter_map(move |(above, tile)| {
            let [tokens, k, rank] = levels.map(|level| above[level]);
            let field = names.iter().find_map(|name| tile.get(*name))?.as_u64()?;
            (tokens > 0 && k > 0).then_some([tokens, k, rank, usize::try_from(field).ok()?])
        })
    }

    /// Blocks that share k, by tokens and width: the fewest where tiles of several ranks and adapters
    /// differ, since the order of sums is kept.
    fn splits(&self, levels: [usize; 3]) -> BTreeMap<[usize; 2], ShrinkUse> {
        let mut out = BTreeMap::new();
        for [tokens, k, _, parts] in self.each(levels, ["split_k", "SPLIT_K"]) {
            let of = |parts| ShrinkUse { parts, order: Order::Ordered };
            if !(1..=ShrinkUse::MOST_PARTS).contains(&parts) {
                continue;
            }
            let least = out.entry([tokens, k]).or_insert(of(parts));
            *least = of(parts.min(least.parts));
        }
        out
    }

    /// Rows of A of a block of a dense shrink, by tokens and width, of the largest rank.
    fn rank_rows(&self, kind: Kind, levels: [usize; 3]) -> BTreeMap<[usize; 2], DeltaUse> {
        let mut out: BTreeMap<[usize; 2], (usize, DeltaUse)> = BTreeMap::new();
        if kind != Kind::Shrink {
            return BTreeMap::new();
        }
        for [tokens, k, rank, rows] in self.each(levels, ["block_n", "BLOCK_SIZE_N"]) {
            if ![8, 32].contains(&rows) || rank == 0 {
                continue;
            }
            let rank_parts = rank.div_ceil(rows).min(DeltaUse::MOST_PARTS);
            let choice = DeltaUse { rank_rows: rows, rank_parts };
            let widest = out.entry([tokens, k]).or_insert((rank, choice));
            if rank > widest.0 {
                *widest = (rank, choice);
            }
        }
        out.into_iter().map(|(call, (_, choice))| (call, choice)).collect()
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
            ("NVIDIA_H200_FUSED_MOE_LORA_W13_SHRINK.json", Some(Kind::GateUpShrink)),
            ("NVIDIA_H200_FUSED_MOE_LORA_W2_SHRINK.json", Some(Kind::DownShrink)),
            ("NVIDIA_H200_FUSED_MOE_LORA_W2_EXPAND.json", Some(Kind::ExpertExpand)),
            ("E=32,N=2880,device_name=NVIDIA_H200.json", Some(Kind::Experts)),
            ("E=32,N=2880,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", Some(Kind::Experts)),
            ("E=32,N=2880.json", None),
            ("NVIDIA_H200_EXPAND.json", None),
            ("NVIDIA_H200.linear.json", None),
            ("notes.txt", None),
        ] {
            assert_eq!(Kind::of(name), kind.map(|kind| (kind, "NVIDIA_H200")), "{name}");
        }
    }

    fn dense(tiles: &str) -> String {
        format!(r#"{{"8": {{"3": {{"16": {{"2880": {tiles}}}}}}}}}"#)
    }

    #[test]
    fn every_key_is_answered() {
        let tile = r#"{"block_m": 16, "block_n": 16, "split_k": 64, "num_warps": 4, "odd": 1}"#;
        let text = dense(&format!(r#"{{"32": {tile}}}"#));
        let Answer { line, files } = answer(Kind::Shrink, "g", &text).expect("deep enough");
        for part in ["1 tiles", "block_m: ", "split_k: at most 16", "odd: not known here"] {
            assert!(line.contains(part), "{part} in {line}");
        }
        assert!(files.is_empty(), "no kernel has such a tile: {files:?}");
        let fault = answer(Kind::GateUpShrink, "g", &text).expect_err("one level less");
        assert!(fault.what.contains("block_m"), "{fault}");
        assert!(answer(Kind::Experts, "g", "[]").is_err());
        assert!(answer(Kind::Experts, "g", "{").is_err());
    }

    #[test]
    fn what_a_kernel_obeys_is_taken() {
        let text =
            dense(r#"{"16": {"block_n": 8, "split_k": 8}, "64": {"block_n": 32, "split_k": 4}}"#);
        let Answer { line, files } = answer(Kind::Shrink, "g", &text).expect("sound");
        assert!(line.contains("split_k taken for 1 calls; block_n taken for 1 calls"), "{line}");
        let when = When { tokens: Some(16), k: Some(2880), ..When::default() };
        let [AnyFile::LoraShrink(shrink), AnyFile::LoraLinear(deltas)] = files.as_slice() else {
            panic!("{files:?}")
        };
        let parts = ShrinkUse { parts: 4, order: Order::Ordered };
        assert_eq!((shrink.entries[0].when, shrink.entries[0].choice), (when, Some(parts)));
        let rows = DeltaUse { rank_rows: 32, rank_parts: 2 };
        assert_eq!((deltas.entries[0].when, deltas.entries[0].choice), (when, Some(rows)));
        // Sixteen blocks cannot share a k of 64: only what is taken is counted.
        let text = r#"{"8": {"1": {"16": {"64": {"32": {"split_k": 16}},
            "2880": {"32": {"split_k": 16}}}}}}"#;
        let Answer { line, files } = answer(Kind::Shrink, "g", text).expect("sound");
        assert_eq!(files.iter().map(AnyFile::entries).sum::<usize>(), 1, "{files:?}");
        assert!(line.contains("split_k taken for 1 calls"), "{line}");
        // Of experts, gate_up's input is the hidden width and down's the inner one.
        let text = r#"{"8": {"2": {"16": {"32": {"2048": {"768": {"SPLIT_K": 2}}}}}}}"#;
        for (kind, k) in [(Kind::GateUpShrink, 2048), (Kind::DownShrink, 768)] {
            let files = answer(kind, "g", text).expect("sound").files;
            let [AnyFile::LoraShrink(shrink)] = files.as_slice() else { panic!("{files:?}") };
            assert_eq!(shrink.entries[0].when, When { k: Some(k), ..when });
        }
    }
}
