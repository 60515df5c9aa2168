//! The files: JSON of one GPU and one operator.
//!
//! ```json
//! {
//!   "gpu": "NVIDIA H200",
//!   "operator": "linear",
//!   "made": {"date": "2026-11-30", "driver": "580.159.04", "command": "amphora tune ..."},
//!   "entries": [
//!     {"when": {"tokens": 32, "k": 2880, "n": 5120, "dtype": "bf16"},
//!      "use": {"path": "narrow", "parts": 4},
//!      "measured": {"microseconds": 9.1, "heuristic": 9.6}}
//!   ]
//! }
//! ```

use std::collections::HashSet;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::operators::{
    AttentionUse, DeltaUse, DenseUse, ExpertsUse, Operator, RouteUse, ShrinkUse,
};
use super::{Fault, Limits, When};

/// A file whose operator is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File<U> {
    /// The GPU as its driver names it; data of another is never used.
    pub gpu: String,
    /// The operator's name.
    pub operator: String,
    /// Where the data comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<Made>,
    /// The choices.
    pub entries: Vec<Entry<U>>,
}

/// Where data comes from; for readers alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Made {
    /// The day, year first.
    pub date: String,
    /// The GPU's driver.
    pub driver: String,
    /// The command line that measured.
    pub command: String,
}

/// One choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound(deserialize = "U: Deserialize<'de>"))]
pub struct Entry<U> {
    /// For which calls.
    pub when: When,
    /// What to do there; `null`: what the heuristic chooses. It must be said.
    #[serde(rename = "use", deserialize_with = "said")]
    pub choice: Option<U>,
    /// What it took where it was measured; for readers alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// A field that may be null but not be missing.
fn said<'de, D: serde::Deserializer<'de>, U: Deserialize<'de>>(
    from: D,
) -> Result<Option<U>, D::Error> {
    Option::deserialize(from)
}

/// Times of a call, in the same run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// With the entry's choice.
    pub microseconds: f64,
    /// With the heuristic's.
    pub heuristic: f64,
}

/// A file.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Each is the operator of that name.
pub enum AnyFile {
    Linear(File<DenseUse>),
    LoraLinear(File<DeltaUse>),
    LoraShrink(File<ShrinkUse>),
    MoeRoute(File<RouteUse>),
    FusedMoe(File<ExpertsUse>),
    PagedAttention(File<AttentionUse>),
}

/// The same for each operator.
macro_rules! each {
    ($any:expr, $file:ident => $value:expr) => {
        match $any {
            AnyFile::Linear($file) => $value,
            AnyFile::LoraLinear($file) => $value,
            AnyFile::LoraShrink($file) => $value,
            AnyFile::MoeRoute($file) => $value,
            AnyFile::FusedMoe($file) => $value,
            AnyFile::PagedAttention($file) => $value,
        }
    };
}

/// What tells a file's kind.
#[derive(Deserialize)]
struct Head {
    operator: String,
}

fn json<T: DeserializeOwned>(text: &str) -> Result<T, Fault> {
    let from = &mut serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut *from).map_err(|error| {
        let field = error.path().to_string();
        Fault::new(
            if field.is_empty() || field == "." { "file".to_owned() } else { field },
            error.inner().to_string(),
        )
    })?;
    from.end().map_err(|error| Fault::new("file", error.to_string()))?;
    Ok(value)
}

fn typed<U: Operator + DeserializeOwned>(text: &str) -> Result<File<U>, Fault> {
    let file: File<U> = json(text)?;
    if file.gpu.is_empty() {
        return Err(Fault::new("gpu", "empty: expected the GPU's name"));
    }
    let mut seen = HashSet::new();
    for (i, entry) in file.entries.iter().enumerate() {
        let front = format!("entries[{i}]");
        let at = |part: &str| format!("{front}.{part}");
        entry.when.check(U::FIELDS).map_err(|fault| fault.within(&at("when")))?;
        if let Some(choice) = &entry.choice {
            choice.check(&entry.when).map_err(|fault| fault.within(&at("use")))?;
        }
        if !seen.insert(entry.when) {
            return Err(Fault::new(at("when"), "an entry in front is for the same calls"));
        }
        if let Some(Measured { microseconds, heuristic }) = entry.measured
            && !(microseconds > 0.0 && heuristic > 0.0)
        {
            return Err(Fault::new(at("measured"), "expected times above 0"));
        }
    }
    Ok(file)
}

impl AnyFile {
    /// Reads a file's text and checks everything that needs no device.
    ///
    /// # Errors
    /// The first fault: no JSON, an unknown field or operator, a wrong type, a value that no kernel obeys.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let Head { operator } = json(text)?;
        Ok(match operator.as_str() {
            DenseUse::NAME => AnyFile::Linear(typed(text)?),
            DeltaUse::NAME => AnyFile::LoraLinear(typed(text)?),
            ShrinkUse::NAME => AnyFile::LoraShrink(typed(text)?),
            RouteUse::NAME => AnyFile::MoeRoute(typed(text)?),
            ExpertsUse::NAME => AnyFile::FusedMoe(typed(text)?),
            AttentionUse::NAME => AnyFile::PagedAttention(typed(text)?),
            _ => {
                let names = Self::NAMES.join(", ");
                return Err(Fault::new("operator", format!("{operator}: expected one of {names}")));
            }
        })
    }

    /// The operators that have files.
    pub const NAMES: [&'static str; 6] = [
        DenseUse::NAME,
        DeltaUse::NAME,
        ShrinkUse::NAME,
        RouteUse::NAME,
        ExpertsUse::NAME,
        AttentionUse::NAME,
    ];

    /// The GPU it is for.
    pub fn gpu(&self) -> &str {
        each!(self, file => &file.gpu)
    }

    /// The operator's name.
    pub fn operator(&self) -> &str {
        each!(self, file => &file.operator)
    }

    /// How many entries it has.
    pub fn entries(&self) -> usize {
        each!(self, file => file.entries.len())
    }

    /// Checks what a device of the file's GPU bounds.
    ///
    /// # Errors
    /// The first entry that asks for more than there is.
    pub fn check_on(&self, limits: Limits) -> Result<(), Fault> {
        each!(self, file => on(file, limits))
    }

    /// Takes the entries of `newer`, a file of the same operator, in place of its own for the same calls,
    /// and puts all in order of shapes and tokens.
    ///
    /// # Errors
    /// It is another operator's or another GPU's.
    pub fn absorb(&mut self, newer: AnyFile) -> Result<(), Fault> {
        if self.gpu() != newer.gpu() {
            return Err(Fault::new("gpu", format!("{}: expected {}", newer.gpu(), self.gpu())));
        }
        match (self, newer) {
            (AnyFile::Linear(own), AnyFile::Linear(newer)) => own.absorb(newer),
            (AnyFile::LoraLinear(own), AnyFile::LoraLinear(newer)) => own.absorb(newer),
            (AnyFile::LoraShrink(own), AnyFile::LoraShrink(newer)) => own.absorb(newer),
            (AnyFile::MoeRoute(own), AnyFile::MoeRoute(newer)) => own.absorb(newer),
            (AnyFile::FusedMoe(own), AnyFile::FusedMoe(newer)) => own.absorb(newer),
            (AnyFile::PagedAttention(own), AnyFile::PagedAttention(newer)) => own.absorb(newer),
            (own, newer) => {
                let what = format!("{}: expected {}", newer.operator(), own.operator());
                return Err(Fault::new("operator", what));
            }
        }
        Ok(())
    }

    /// Says where the data comes from.
    pub fn set_made(&mut self, made: Made) {
        each!(self, file => file.made = Some(made));
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        each!(self, file => pretty(file))
    }
}

impl<U> File<U> {
    fn absorb(&mut self, newer: File<U>) {
        let replaced: HashSet<When> = newer.entries.iter().map(|entry| entry.when).collect();
        self.entries.retain(|entry| !replaced.contains(&entry.when));
        self.entries.extend(newer.entries);
        self.entries.sort_by_key(|entry| entry.when.order());
        self.made = newer.made.or(self.made.take());
    }
}

fn on<U: Operator>(file: &File<U>, limits: Limits) -> Result<(), Fault> {
    let check = |(i, entry): (usize, &Entry<U>)| {
        let Some(choice) = &entry.choice else { return Ok(()) };
        let front = format!("entries[{i}].use");
        choice.check_on(&entry.when, limits).map_err(|fault| fault.within(&front))
    };
    file.entries.iter().enumerate().try_for_each(check)
}

/// One entry a line: files are compared by people.
fn pretty<U: Serialize>(file: &File<U>) -> String {
    let mut text = format!("{{\n  \"gpu\": {},\n", line(&file.gpu));
    text += &format!("  \"operator\": {},\n", line(&file.operator));
    if let Some(made) = &file.made {
        text += &format!("  \"made\": {},\n", line(made));
    }
    let entries: Vec<String> =
        file.entries.iter().map(|entry| format!("    {}", line(entry))).collect();
    text += "  \"entries\": [\n";
    text += &entries.join(",\n");
    text + "\n  ]\n}\n"
}

fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("structs of text and numbers, no maps")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::vllm;
    use super::*;

    /// Found by the fuzzer: a number of many digits was read a unit off, and so written otherwise.
    #[test]
    fn a_measured_time_of_many_digits_is_read_exactly() {
        let text = r#"{"gpu":"g","operator":"linear","entries":[{"when":{},"use":{"path":"stream"},
            "measured":{"microseconds":1.5,"heuristic":4444444444446444444444444444441}}]}"#;
        let file = AnyFile::parse(text).expect("a file");
        assert_eq!(AnyFile::parse(&file.text()), Ok(file));
    }

    /// A first input that is refused at its first field finds nothing behind it.
    #[test]
    fn the_fuzzer_s_first_inputs_are_taken() {
        let mut operators = BTreeSet::new();
        for line in include_str!("../../../fuzz/fuzz_targets/tuned_file.txt").lines() {
            let kind = match line.as_bytes()[0] {
                b'a' => vllm::Kind::Shrink,
                b'd' => vllm::Kind::DownShrink,
                b'f' => vllm::Kind::Experts,
                _ => {
                    let file = AnyFile::parse(&line[1..]).expect(line);
                    operators.insert(file.operator().to_owned());
                    continue;
                }
            };
            vllm::answer(kind, "g", &line[1..]).expect(line);
        }
        assert_eq!(operators, AnyFile::NAMES.map(str::to_owned).into());
    }
}
