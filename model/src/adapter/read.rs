//! The way of one load: configuration, file, names, then pairs. Every step goes on where the one before
//! found reasons to refuse, so that all of them are reported together.

use std::collections::BTreeMap;
use std::ops::Range;

use amphora_hal::{DType, Float, widen};
use half::{bf16, f16};
use safetensors::Dtype;

use super::config::PeftConfig;
use super::names::{Half, Module, Parsed};
use super::reason::Reason;
use super::refusal::Reasons;
use super::{
    ADAPTER_FILES, AdapterBase, AdapterFactors, AdapterOptions, Layouts, Matrix, ModuleFactor,
    config, names,
};
use crate::error::FileError;
use crate::safetensors_header::read_header;
use crate::source::Source;

const CONFIG: &str = ADAPTER_FILES[0];
const WEIGHTS: &str = ADAPTER_FILES[1];
const CONFIG_LIMIT: u64 = 16 << 20;
/// Names of modules are far shorter; messages repeat them.
const MOST_NAME_BYTES: usize = 1024;
/// Unmatched names that a message shows.
const EXAMPLES: usize = 3;

/// One tensor of the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawTensor<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [usize],
    dtype: Dtype,
    bytes: &'a [u8],
}

/// A and B of one module, with the module's path in the base model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) path: &'a str,
    pub(super) a: RawTensor<'a>,
    pub(super) b: RawTensor<'a>,
}

/// What assembling needs, and what it makes. Once there is a reason to refuse, what is made counts for
/// nothing, and only further reasons are looked for.
pub(super) struct Assembly<'a> {
    pub(super) base: &'a AdapterBase,
    pub(super) options: &'a AdapterOptions,
    /// `None` if there is none that can be read; a reason to refuse.
    pub(super) config: Option<&'a PeftConfig>,
    pub(super) modules: Vec<ModuleFactor>,
    pub(super) shrinks: Vec<Matrix>,
    pub(super) layouts: Layouts,
    pub(super) notes: Vec<String>,
    pub(super) reasons: Reasons,
}

pub(super) fn load(
    source: &Source,
    base: &AdapterBase,
    options: &AdapterOptions,
) -> Result<AdapterFactors, Reasons> {
    let mut reasons = Reasons::default();
    let config = read_config(source, Some(base), &mut reasons);
    let file = match read_weights(source, options) {
        Ok(file) => file,
        Err(error) => {
            reasons.push(error);
            return Err(reasons);
        }
    };
    let halves = sort_names(&file, base, &mut reasons);
    let mut assembly = Assembly {
        base,
        options,
        config: config.as_ref(),
        modules: Vec::new(),
        shrinks: Vec::new(),
        layouts: Layouts::default(),
        notes: config.as_ref().map(unknown_fields).unwrap_or_default(),
        reasons,
    };
    let pairs = assembly.pair_up(halves);
    assembly.add_linears(&pairs);
    assembly.add_fused(&pairs);
    let Assembly { mut modules, shrinks, layouts, notes, mut reasons, .. } = assembly;
    modules.sort_by_key(|m| (m.layer, m.target, m.expert));
    for two in modules.windows(2) {
        let place = |m: &ModuleFactor| (m.layer, m.target, m.expert);
        if place(&two[0]) == place(&two[1]) {
            reasons.push(Reason::Twice {
                layer: two[0].layer,
                target: two[0].target,
                expert: two[0].expert.unwrap_or_default(),
            });
        }
    }
    match config {
        Some(config) if reasons.is_empty() => Ok(AdapterFactors {
            modules,
            shrinks,
            layouts,
            dtype: file.widest(),
            file_bytes: file.bytes.len(),
            peft_version: config.peft_version,
            base_model: config.base_model,
            notes,
        }),
        _ => Err(reasons),
    }
}

fn unknown_fields(config: &PeftConfig) -> Vec<String> {
    let note = |field: &String| {
        format!("adapter_config.json: field `{field}` is not known and not applied")
    };
    config.unknown.iter().map(note).collect()
}

pub(super) fn read_config(
    source: &Source,
    base: Option<&AdapterBase>,
    reasons: &mut Reasons,
) -> Option<PeftConfig> {
    match source.need_text(CONFIG, CONFIG_LIMIT, "the adapter's configuration") {
        Ok(text) => config::read(&text, base, reasons),
        Err(error) => {
            reasons.push(error);
            None
        }
    }
}

pub(super) struct WeightsFile {
    pub(super) bytes: Vec<u8>,
    /// Sorted by name, so that messages and results do not depend on a hash.
    pub(super) entries: Vec<Entry>,
}

pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    range: Range<usize>,
}

pub(super) fn read_weights(
    source: &Source,
    options: &AdapterOptions,
) -> Result<WeightsFile, FileError> {
    let path = source.path(WEIGHTS);
    let bytes =
        source.read(WEIGHTS, options.max_file_bytes)?.ok_or_else(|| FileError::Missing {
            path: path.clone(),
            expected: "the adapter's tensors (a .bin file is not read)",
        })?;
    let (data, header) = read_header(&path, &bytes)?;
    let mut entries: Vec<Entry> = header
        .tensors()
        .into_iter()
        .map(|(name, info)| Entry {
            name,
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: data + info.data_offsets.0..data + info.data_offsets.1,
        })
        .collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(long) = entries.iter().find(|entry| entry.name.len() > MOST_NAME_BYTES) {
        let bytes = long.name.len();
        let what = format!("a tensor's name has {bytes} bytes, expected at most {MOST_NAME_BYTES}");
        return Err(FileError::Corrupt { path, what });
    }
    Ok(WeightsFile { bytes, entries })
}

impl WeightsFile {
    pub(super) fn tensor<'a>(&'a self, entry: &'a Entry) -> RawTensor<'a> {
        RawTensor {
            name: &entry.name,
            shape: &entry.shape,
            dtype: entry.dtype,
            bytes: &self.bytes[entry.range.clone()],
        }
    }

    fn widest(&self) -> DType {
        let has = |dtype| self.entries.iter().any(|e| e.dtype == dtype);
        match (has(Dtype::F32), has(Dtype::BF16)) {
            (true, _) => DType::F32,
            (false, true) => DType::BF16,
            (false, false) => DType::F16,
        }
    }
}

type Halves<'a> = BTreeMap<(Module, Half), (&'a str, RawTensor<'a>)>;

/// Names → modules; whatever is no half of a pair is a reason to refuse.
fn sort_names<'a>(file: &'a WeightsFile, base: &AdapterBase, reasons: &mut Reasons) -> Halves<'a> {
    let mut halves = BTreeMap::new();
    let mut unmatched: Vec<&str> = Vec::new();
    for entry in &file.entries {
        match names::parse(&entry.name, base) {
            Parsed::Half { module, half, path } => {
                let raw = file.tensor(entry);
                // A second name for the same module, such as one under `mlp` and one under
                // `block_sparse_moe`.
                let other: Option<(&str, RawTensor<'_>)> =
                    halves.insert((module, half), (path, raw));
                if let Some((_, other)) = other {
                    reasons.push(Reason::SameModule {
                        tensor: entry.name.clone(),
                        other: other.name.to_owned(),
                    });
                }
            }
            Parsed::Unmatched => unmatched.push(&entry.name),
            Parsed::Refused(reason) => reasons.push(reason),
        }
    }
    if file.entries.is_empty() {
        reasons.push(Reason::NoTensors);
    }
    if !unmatched.is_empty() {
        reasons.push(Reason::Unmatched {
            count: unmatched.len(),
            of: file.entries.len(),
            examples: unmatched.iter().take(EXAMPLES).map(|n| (*n).to_owned()).collect(),
        });
    }
    halves
}

impl<'a> Assembly<'a> {
    fn pair_up(&mut self, halves: Halves<'a>) -> BTreeMap<Module, Pair<'a>> {
        let mut pairs = BTreeMap::new();
        for (&(module, half), &(path, tensor)) in &halves {
            let (other, there, gone) = match half {
                Half::A => (Half::B, "lora_A", "lora_B"),
                Half::B => (Half::A, "lora_B", "lora_A"),
            };
            match (halves.get(&(module, other)), half) {
                (Some(&(_, b)), Half::A) => {
                    pairs.insert(module, Pair { path, a: tensor, b });
                }
                (Some(_), Half::B) => {}
                (None, _) => {
                    self.reasons.push(Reason::MissingHalf {
                        present: tensor.name.to_owned(),
                        missing: tensor.name.replace(there, gone),
                    });
                    self.numbers(&tensor);
                }
            }
        }
        pairs
    }

    /// The numbers of a tensor as f32; `None`, with the reason noted, if they are none.
    pub(super) fn numbers(&mut self, tensor: &RawTensor<'_>) -> Option<Vec<f32>> {
        let mut values = match numbers(tensor) {
            Ok(values) => values,
            Err(reason) => {
                self.reasons.push(reason);
                return None;
            }
        };
        if let Some(to) = self.options.round_to {
            let largest = round(&mut values, to);
            if !largest.is_finite() {
                let (tensor, dtype) = (tensor.name.to_owned(), to);
                self.reasons.push(Reason::Overflow { tensor, dtype });
                return None;
            }
        }
        Some(values)
    }

    /// Rows and columns; `None`, with the reason noted, if it is no matrix.
    pub(super) fn matrix_shape(&mut self, tensor: &RawTensor<'_>) -> Option<(usize, usize)> {
        match *tensor.shape {
            [rows, cols] => Some((rows, cols)),
            _ => {
                self.shape(tensor, "two dimensions".to_owned());
                None
            }
        }
    }

    pub(super) fn shape(&mut self, tensor: &RawTensor<'_>, expected: String) {
        self.reasons.push(Reason::Shape {
            tensor: tensor.name.to_owned(),
            found: tensor.shape.to_vec(),
            expected,
        });
    }

    /// The scale of the module at `path`, if `rank` is the configured one and within the limit.
    pub(super) fn scale(&mut self, path: &str, rank: usize, a: &RawTensor<'_>) -> Option<f32> {
        if rank > self.options.max_rank {
            self.reasons.push(Reason::RankLimit {
                module: path.to_owned(),
                rank,
                limit: self.options.max_rank,
            });
        }
        // Where the configuration says no rank or alpha, it is refused already.
        let config = self.config?;
        let expected = config.rank(path)?;
        if rank != expected {
            let tensor = a.name.to_owned();
            self.reasons.push(Reason::Rank { tensor, found: rank, expected });
            return None;
        }
        let configured = config.scale(path)?;
        let scale = configured as f32;
        if !scale.is_finite() {
            self.reasons.push(Reason::Scale { module: path.to_owned(), scale: configured });
            return None;
        }
        Some(scale)
    }
}

/// The numbers of a tensor as f32, finite all of them.
pub(super) fn numbers(tensor: &RawTensor<'_>) -> Result<Vec<f32>, Reason> {
    let other_type =
        || Reason::DType { tensor: tensor.name.to_owned(), found: format!("{:?}", tensor.dtype) };
    let dtype = match tensor.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        _ => return Err(other_type()),
    };
    // The header says as many bytes as shape and type need, so nothing is left over.
    let values = widen(dtype, tensor.bytes).map_err(|_| other_type())?;
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(index) => {
            Err(Reason::NonFinite { tensor: tensor.name.to_owned(), value: values[index], index })
        }
    }
}

/// Rounds numbers to `dtype` and back; gives the largest magnitude, which is infinite if one overflowed.
fn round(values: &mut [f32], dtype: DType) -> f32 {
    let to = |value: f32| match dtype {
        DType::F16 => Float::to_f32(<f16 as Float>::from_f32(value)),
        DType::BF16 => Float::to_f32(<bf16 as Float>::from_f32(value)),
        _ => value,
    };
    values.iter_mut().fold(0.0, |largest, value| {
        *value = to(*value);
        f32::max(largest, value.abs())
    })
}
