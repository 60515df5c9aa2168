//! What can be said of an adapter folder without a base model: what it says of itself, what its file
//! holds, and what speaks against it whatever the base is.

use std::collections::{BTreeMap, BTreeSet};

use super::config::PeftConfig;
use super::names::{Cut, Half, cut};
use super::read::{RawTensor, WeightsFile, numbers, read_config, read_weights};
use super::reason::Reason;
use super::refusal::Reasons;
use super::{AdapterOptions, AdapterRefused};
use crate::source::Source;

/// Unmatched names that a message shows.
const EXAMPLES: usize = 3;

/// An adapter folder as it lies there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Survey {
    /// `r`.
    pub rank: Option<usize>,
    /// `lora_alpha`.
    pub alpha: Option<f64>,
    /// Whether scales are alpha / √r.
    pub use_rslora: bool,
    /// `target_parameters`, sorted.
    pub target_parameters: Vec<String>,
    /// The version of PEFT that wrote it.
    pub peft_version: Option<String>,
    /// The base it says it was trained on.
    pub base_model: Option<String>,
    /// Tensors of the file.
    pub tensors: usize,
    /// Bytes of the file.
    pub file_bytes: usize,
    /// Tensors by element type.
    pub dtypes: BTreeMap<String, usize>,
    /// Pairs by the modules they are for, numbers of layers and experts left out.
    pub modules: BTreeMap<String, SurveyedModule>,
}

/// All pairs of alike modules.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SurveyedModule {
    /// How many.
    pub pairs: usize,
    /// Layers with one.
    pub layers: usize,
    /// Shapes of A, the first few.
    pub a: BTreeSet<Vec<usize>>,
    /// Shapes of B, the first few.
    pub b: BTreeSet<Vec<usize>>,
}

/// Looks at the adapter in `source`, and says what speaks against it, if anything does.
pub fn survey(source: &Source, options: &AdapterOptions) -> (Survey, Option<AdapterRefused>) {
    let mut reasons = Reasons::default();
    let config = read_config(source, None, &mut reasons);
    let mut survey = Survey::default();
    if let Some(config) = &config {
        survey.take_config(config);
    }
    match read_weights(source, options) {
        Ok(file) => survey.take_file(&file, &mut reasons),
        Err(error) => reasons.push(error),
    }
    let refused = (!reasons.is_empty()).then(|| reasons.refuse(source.name()));
    (survey, refused)
}

impl Survey {
    fn take_config(&mut self, config: &PeftConfig) {
        self.rank = config.rank;
        self.alpha = config.alpha;
        self.use_rslora = config.use_rslora;
        self.target_parameters = config.target_parameters.iter().flatten().cloned().collect();
        self.target_parameters.sort();
        self.peft_version = config.peft_version.clone();
        self.base_model = config.base_model.clone();
    }

    fn take_file(&mut self, file: &WeightsFile, reasons: &mut Reasons) {
        self.tensors = file.entries.len();
        self.file_bytes = file.bytes.len();
        let mut halves: BTreeMap<(&str, Half), RawTensor<'_>> = BTreeMap::new();
        let mut unmatched = Vec::new();
        for entry in &file.entries {
            *self.dtypes.entry(format!("{:?}", entry.dtype)).or_default() += 1;
            match cut(&entry.name) {
                Cut::Half { path, half } => {
                    halves.insert((path, half), file.tensor(entry));
                }
                Cut::Unmatched => unmatched.push(entry.name.clone()),
                Cut::Refused(reason) => reasons.push(reason),
            }
        }
        if file.entries.is_empty() {
            reasons.push(Reason::NoTensors);
        }
        if !unmatched.is_empty() {
            let count = unmatched.len();
            unmatched.truncate(EXAMPLES);
            reasons.push(Reason::Unmatched { count, of: self.tensors, examples: unmatched });
        }
        let mut layers: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (&(path, half), tensor) in &halves {
            if let Err(reason) = numbers(tensor) {
                reasons.push(reason);
            }
            let (other, there, gone) = match half {
                Half::A => (Half::B, "lora_A", "lora_B"),
                Half::B => (Half::A, "lora_B", "lora_A"),
            };
            let Some(b) = halves.get(&(path, other)) else {
                reasons.push(Reason::MissingHalf {
                    present: tensor.name.to_owned(),
                    missing: tensor.name.replace(there, gone),
                });
                continue;
            };
            if half == Half::A {
                let (name, layer) = collapse(path);
                check_pair(tensor, b, reasons);
                let seen = layers.entry(name.clone()).or_default();
                seen.extend(layer);
                let module = self.modules.entry(name).or_default();
                module.pairs += 1;
                module.layers = seen.len();
                for (shapes, shape) in [(&mut module.a, tensor.shape), (&mut module.b, b.shape)] {
                    if shapes.len() < EXAMPLES {
                        shapes.insert(shape.to_vec());
                    }
                }
            }
        }
    }
}

/// Rows of A are columns of B, fused or not.
fn check_pair(a: &RawTensor<'_>, b: &RawTensor<'_>, reasons: &mut Reasons) {
    let mut shape = |tensor: &RawTensor<'_>, expected: String| {
        let (tensor, found) = (tensor.name.to_owned(), tensor.shape.to_vec());
        reasons.push(Reason::Shape { tensor, found, expected });
    };
    match (a.shape, b.shape) {
        (&[rank, _], &[_, columns]) if rank == columns => {}
        (&[rank, _], &[rows, _]) => shape(b, format!("[{rows}, {rank}], the rank of lora_A")),
        (&[_, _], _) => shape(b, "two dimensions".to_owned()),
        _ => shape(a, "two dimensions".to_owned()),
    }
}

/// `model.layers.3.mlp.experts.7.up_proj` → `mlp.experts.*.up_proj` and layer 3.
fn collapse(path: &str) -> (String, Option<&str>) {
    let inside = path.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let (layer, rest) = inside.map_or((None, path), |(layer, rest)| (Some(layer), rest));
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> = rest.split('.').map(|p| if number(p) { "*" } else { p }).collect();
    (parts.join("."), layer)
}
